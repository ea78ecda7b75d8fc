"""How many of a cluster's tasks train, as set by a file that may change.

`TF_CONFIG` names all workers that a job may have. If `<model_dir>/cluster.json`
contains `{"workers": N}`, only the first N train; without the file, all do. The
job neither waits for the others nor gives them data. The chief checks the file
during training. `python -m tfdist resize` writes it; `tfdist.launch
--workers=MIN:MAX` has its own, named in the environment, and starts workers.

`{"ps": N}` sets the number of parameter servers; a file may contain both. To
redistribute the variables, the chief saves a checkpoint and restarts itself. It
tells surplus tasks to end if it is connected to them when the file changes.

If the file contains `"min_workers"`, an all-reduce job continues with fewer
workers when others stay away for `"last_call_timeout"` seconds (torchrun's
term; default 30). Any worker may be missing, except worker 0 where it leads.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence

from tfdist._tf import storage
from tfdist._tf.waiting import wait_for
from tfdist.cluster import probing, tf_config
from tfdist.cluster.probing import Answer, TaskState
from tfdist.cluster.spec import Cluster

_log = logging.getLogger(__name__)

_ROUND_SECS = 1.0
_REMOTE_ROUND_SECS = 10.0
_TOGETHER_SECS = 15.0  # How long to wait to add all new workers at once.


class ClusterSize:
    """The size of a cluster, as read from its file.

    Args:
        cluster: A cluster with all workers that the job may have.
        model_dir: Directory of the file, unless the launcher has a file.

    Attributes:
        size, ps: Number of workers and parameter servers in use now.
        wanted, wanted_ps: Numbers that the file requests.
        least: Number of workers that an all-reduce job always waits for.
        last_call_timeout: Seconds for which it waits for more workers.
        may_change: Whether there is a file.

    Raises:
        ValueError: The file is malformed, requests more tasks than there are,
            or requests an all-reduce job of one process.
    """

    def __init__(self, cluster: Cluster, model_dir: str | None) -> None:
        path = os.environ.get(tf_config.SIZE_VARIABLE)
        if not path and model_dir:
            path = os.path.join(model_dir, tf_config.SIZE_FILE)
        self.cluster, self.path = cluster, path
        self._addresses = [*cluster.addresses("worker").values()]
        self._group: list[str] | None = None  # Workers of an all-reduce job.
        self.wanted_ps, self.least = cluster.num_ps, cluster.num_workers
        self.last_call_timeout = tf_config.LAST_CALL_SECS
        number = self._read()
        self.may_change = number is not None
        self.size = self.wanted = self._accepted = number or cluster.num_workers
        self.ps = self._num_ps_up = self.wanted_ps
        self._wanted_since = self._due_since = time.monotonic()
        self._due: int | None = None
        self._stopped, self._looking = threading.Event(), threading.Lock()

    @property
    def now(self) -> Cluster:
        """The cluster with only the tasks in use now."""
        return self.cluster.with_first(worker=self.size, ps=self.ps)

    @property
    def asked(self) -> Cluster:
        """The cluster with only the tasks that the file requests."""
        return self.cluster.with_first(worker=self.wanted, ps=self.wanted_ps)

    def follow(self, group: Cluster) -> None:
        """Records the group of an all-reduce job, which may lack workers."""
        self._group = [*group.addresses("worker").values()]
        self.size = len(self._group)
        if self.may_change:
            _log.info("Takes part: %s.", group.shape)

    def refuse(self) -> None:
        """Reverts `change` in the file, so that no tasks are stopped for it."""
        assert self.path
        # The thread must not request the change again from the old file.
        with self._looking, contextlib.suppress(ValueError):
            if self.cluster.num_ps:
                self.wanted_ps = self.ps
                numbers = {"ps": self.ps}
            else:
                self.wanted = self._accepted
                numbers = {"workers": self.wanted}
            # Raises ValueError for a malformed file, which is ignored anyway.
            text = storage.read_text(self.path) or ""
            tf_config.parse_size(text, self.path)
            content = json.loads(text) | numbers
            storage.write_text(self.path, json.dumps(content))

    def watch(self) -> None:
        """Starts a thread that checks the file periodically."""
        if self.path:
            threading.Thread(
                target=self._run, name="tfdist-size", daemon=True
            ).start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def due(self) -> int | None:
        """The number of workers to change to; None if it stays the same."""
        due, size = self._due, self.size
        news = due is not None and (due > size or due == self.wanted != size)
        return due if news else None

    @property
    def change(self) -> str | None:
        """The requested change that needs a restart, such as "ps: 1 -> 2"."""
        job, now, wanted = "workers", self.size, self.wanted
        if self.cluster.num_ps:
            job, now, wanted = "ps", self.ps, self.wanted_ps
        return f"{job}: {now} -> {wanted}" if wanted != now else None

    def is_ready(self) -> bool:
        """Whether the tasks that `change` needs are up."""
        if self.cluster.num_ps:
            return self._num_ps_up >= self.wanted_ps
        return self.due() is not None

    @property
    def shrinks(self) -> bool:
        """Whether the file requests fewer tasks than are in use."""
        return self.wanted < self.size or self.wanted_ps < self.ps

    def is_late(self, secs: float) -> bool:
        """Whether the change has been `due` for more than `secs` seconds."""
        return time.monotonic() - self._due_since > secs

    def there(self) -> int:
        """The number of wanted workers up without a gap; waits up to 15 s."""

        def live() -> int:
            return _num_live(probing.ask(self._addresses[: self.wanted]))

        wait_for(lambda: live() == self.wanted, _TOGETHER_SECS)
        return max(1, live())

    def _read(self) -> int | None:
        text = storage.read_text(self.path) if self.path else None
        if text is None:
            return None
        asked = tf_config.parse_size(text, str(self.path))
        most, most_ps = self.cluster.num_workers, self.cluster.num_ps
        number, num_ps = asked.workers or most, asked.ps or most_ps
        if number == 1 and not {"chief", "ps"} & {*self.cluster.tasks}:
            raise ValueError(
                f"{self.path} asks for 1 worker, but there is no chief besides "
                "it: all-reduce needs two processes. Ask for at least 2."
            )
        if number > most or num_ps > most_ps:
            raise ValueError(
                f"{self.path} asks for {number} workers and {num_ps} ps, but "
                f"the cluster of this job names {most} and {most_ps}. Name "
                "more in TF_CONFIG of every task, and restart the tasks."
            )
        self.least = min(asked.min_workers or number, number)
        self.last_call_timeout = asked.last_call_timeout
        self.wanted_ps = num_ps
        return number

    def _run(self) -> None:
        assert self.path
        remote, problem = storage.is_object_store(self.path), ""
        secs = _REMOTE_ROUND_SECS if remote else _ROUND_SECS
        while not self._stopped.wait(secs):
            with self._looking:
                try:
                    number, problem = self._read(), ""
                except Exception as error:  # Whatever storage raises.
                    if str(error) != problem:
                        _log.error("The cluster stays as it is. %s", error)
                    number, problem = None, str(error)
                self.may_change |= number is not None
                if number not in (None, self.wanted):
                    self.wanted, self._wanted_since = number, time.monotonic()
            asked = [*self.asked.addresses("ps").values()]
            new = _num_live(probing.ask(asked[self.ps :]))
            self._num_ps_up = self.ps + new
            due = self._reachable()
            if due != self._due:
                self._due, self._due_since = due, time.monotonic()

    def _reachable(self) -> int | None:
        """The size to change to: `wanted`, or less if new workers are down."""
        size, wanted = self.size, self.wanted
        if wanted <= size:
            return wanted
        group = self._addresses[:size] if self._group is None else self._group
        new = [a for a in self._addresses[:wanted] if a not in group]
        live = size + _num_live(probing.ask(new), gaps=self._group is not None)
        waited = time.monotonic() - self._wanted_since > _TOGETHER_SECS
        return live if live == wanted or waited else None


def _num_live(answers: Sequence[Answer], gaps: bool = False) -> int:
    """The number of live answers; without `gaps`, before the first other."""
    live = [answer.state is TaskState.LIVE for answer in answers]
    return sum(live) if gaps else [*live, False].index(False)

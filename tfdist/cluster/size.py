"""How many of a cluster's tasks train: a file says it, and may change.

`TF_CONFIG` names all workers that a job may have. The first N of them train,
where `<model_dir>/cluster.json` says `{"workers": N}`; without the file, all.
Nobody waits for the others, or gives them data. The chief looks at the file
while it trains. `python -m tfdist resize` writes it; `tfdist.launch
--workers=MIN:MAX` has its own, named by the environment, and starts workers.

Likewise `{"ps": N}` for parameter servers, or both. What they hold is dealt
anew, for which the chief saves and restarts itself. Surplus tasks are told to
end, unless the file changes while the chief is not connected to them.

An all-reduce job goes on with fewer, where the file says `"min_workers"` and
others stay away for `"last_call_timeout"` seconds (torchrun's word; default
30). Then any of the N may be missing, but for worker 0 where that one leads.
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
_TOGETHER_SECS = 15.0  # For new workers, to take all of them in at once.


class ClusterSize:
    """The size of a cluster, told by its file.

    Args:
        cluster: With all workers that there may be.
        model_dir: Where the file is, if the launcher has none. None: nowhere.

    Attributes:
        size, ps: How many workers and parameter servers train now.
        wanted, wanted_ps: How many the file asks for.
        least: How many workers an all-reduce job waits for in any case.
        last_call_timeout: For how many seconds it waits for the others.
        may_change: Whether there is a file.

    Raises:
        ValueError: the file is malformed, or asks for more tasks than there
            are, or for an all-reduce of one process.
    """

    def __init__(self, cluster: Cluster, model_dir: str | None) -> None:
        path = os.environ.get(tf_config.SIZE_VARIABLE)
        if not path and model_dir:
            path = os.path.join(model_dir, tf_config.SIZE_FILE)
        self.cluster, self.path = cluster, path
        self._addresses = [*cluster.addresses("worker").values()]
        self._group: list[str] | None = None  # All-reduce: who trains now.
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
        """The cluster with the tasks that train now."""
        return self.cluster.with_first(worker=self.size, ps=self.ps)

    @property
    def asked(self) -> Cluster:
        """The cluster with the tasks that the file asks for."""
        return self.cluster.with_first(worker=self.wanted, ps=self.wanted_ps)

    def follow(self, group: Cluster) -> None:
        """All-reduce: these train now, whoever of those wanted they are."""
        self._group = [*group.addresses("worker").values()]
        self.size = len(self._group)
        if self.may_change:
            _log.info("Takes part: %s.", group.shape)

    def refuse(self) -> None:
        """Takes `change` back, lest anybody stops tasks."""
        assert self.path
        # A look at the file of before must not ask for the change again.
        with self._looking, contextlib.suppress(ValueError):
            if self.cluster.num_ps:
                self.wanted_ps = self.ps
                numbers = {"ps": self.ps}
            else:
                self.wanted = self._accepted
                numbers = {"workers": self.wanted}
            # Nobody follows what is malformed.
            text = storage.read_text(self.path) or ""
            tf_config.parse_size(text, self.path)
            content = json.loads(text) | numbers
            storage.write_text(self.path, json.dumps(content))

    def watch(self) -> None:
        """Looks at the file from now on, in a thread."""
        if self.path:
            threading.Thread(
                target=self._run, name="tfdist-size", daemon=True
            ).start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def due(self) -> int | None:
        """How many workers are to train that are there; None: as many as do."""
        due, size = self._due, self.size
        news = due is not None and (due > size or due == self.wanted != size)
        return due if news else None

    @property
    def change(self) -> str | None:
        """What is asked for that needs a restart, such as "ps: 1 -> 2"."""
        job, now, wanted = "workers", self.size, self.wanted
        if self.cluster.num_ps:
            job, now, wanted = "ps", self.ps, self.wanted_ps
        return f"{job}: {now} -> {wanted}" if wanted != now else None

    def is_ready(self) -> bool:
        """Whether those are up whom `change` needs."""
        if self.cluster.num_ps:
            return self._num_ps_up >= self.wanted_ps
        return self.due() is not None

    @property
    def shrinks(self) -> bool:
        """Whether the file asks for fewer tasks than now."""
        return self.wanted < self.size or self.wanted_ps < self.ps

    def is_late(self, secs: float) -> bool:
        """Whether `due` has told of that change for so long."""
        return time.monotonic() - self._due_since > secs

    def there(self) -> int:
        """How many of those wanted answer soon, without a gap; 1 at least."""

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
                f"{self.path} asks for 1 worker, and there is no chief beside "
                "it: all-reduce needs two processes. Ask for 2 at least."
            )
        if number > most or num_ps > most_ps:
            raise ValueError(
                f"{self.path} asks for {number} workers and {num_ps} ps, and "
                f"the cluster of this job names {most} and {most_ps}. Name "
                "more in TF_CONFIG of every task, which then must be started "
                "again."
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
        """The size to change to: `wanted`, or less if new ones are missing."""
        size, wanted = self.size, self.wanted
        if wanted <= size:
            return wanted
        group = self._addresses[:size] if self._group is None else self._group
        new = [a for a in self._addresses[:wanted] if a not in group]
        live = size + _num_live(probing.ask(new), gaps=self._group is not None)
        waited = time.monotonic() - self._wanted_since > _TOGETHER_SECS
        return live if live == wanted or waited else None


def _num_live(answers: Sequence[Answer], gaps: bool = False) -> int:
    """How many answer, without `gaps` up to the first one that does not."""
    live = [answer.state is TaskState.LIVE for answer in answers]
    return sum(live) if gaps else [*live, False].index(False)

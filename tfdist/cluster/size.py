"""How many of a cluster's workers train: a file says it, and may change.

`TF_CONFIG` names all workers that a job may have. The first N of them train,
where `<model_dir>/cluster.json` says `{"workers": N}`; without the file, all. A
worker that is not among them is not waited for, counted or given any data. The
chief looks at the file while it trains. `python -m tfdist resize` writes it;
`tfdist.launch --workers=MIN:MAX` has one of its own, named by the environment,
and starts the workers that it asks for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

from tfdist._tf import storage
from tfdist._tf.waiting import wait_for
from tfdist.cluster import probing
from tfdist.cluster.probing import Answer, TaskState
from tfdist.cluster.spec import Cluster
from tfdist.cluster.tf_config import SIZE_FILE, SIZE_VARIABLE, parse_size

_log = logging.getLogger(__name__)

_ROUND_SECS = 1.0
_REMOTE_ROUND_SECS = 10.0
# How long new workers are waited for, to take all of them in at once.
_TOGETHER_SECS = 15.0


class ClusterSize:
    """The size of a cluster with parameter servers, told by its file.

    Args:
        cluster: With all workers that there may be.
        model_dir: Where the file is; None: all workers train, unless the
            launcher has a file.

    Attributes:
        cluster: As given.
        size: How many workers train now.
        wanted: How many the file asks for.
        may_change: Whether there is a file.

    Raises:
        ValueError: the file is malformed, or asks for more workers than the
            cluster names.
    """

    def __init__(self, cluster: Cluster, model_dir: str | None) -> None:
        path = os.environ.get(SIZE_VARIABLE)
        if not path and model_dir:
            path = os.path.join(model_dir, SIZE_FILE)
        self.cluster, self.path = cluster, path
        self._addresses = [*cluster.addresses("worker").values()]
        number = self._read()
        self.may_change = number is not None
        self.size = self.wanted = number or len(self._addresses)
        self._wanted_since = self._due_since = time.monotonic()
        self._due: int | None = None
        self._stopped = threading.Event()

    @property
    def now(self) -> Cluster:
        """The cluster with the workers that train now."""
        return self.cluster.with_workers(self.size)

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

    def is_late(self, secs: float) -> bool:
        """Whether `due` has told of that change for so long."""
        return time.monotonic() - self._due_since > secs

    def there(self) -> int:
        """How many of those wanted answer, without a gap; 1 at least.

        Waits a little for all of them.
        """

        def live() -> int:
            answers = probing.ask(self._addresses[: self.wanted])
            return _num_live(answers)

        wait_for(lambda: live() == self.wanted, _TOGETHER_SECS)
        return max(1, live())

    def _read(self) -> int | None:
        text = storage.read_text(self.path) if self.path else None
        if text is None:
            return None
        number, most = parse_size(text, str(self.path)), len(self._addresses)
        if number > most:
            raise ValueError(
                f"{self.path} asks for {number} workers, and the cluster of "
                f"this job names {most}. Name more in TF_CONFIG of every task, "
                "which then must be started again."
            )
        return number

    def _run(self) -> None:
        remote, problem = "://" in str(self.path), ""
        secs = _REMOTE_ROUND_SECS if remote else _ROUND_SECS
        while not self._stopped.wait(secs):
            try:
                number, problem = self._read(), ""
            except Exception as error:  # Whatever storage raises.
                if str(error) != problem:
                    _log.error("The number of workers stays. %s", error)
                number, problem = None, str(error)
            self.may_change |= number is not None
            if number not in (None, self.wanted):
                self.wanted, self._wanted_since = number, time.monotonic()
            due = self._reachable()
            if due != self._due:
                self._due, self._due_since = due, time.monotonic()

    def _reachable(self) -> int | None:
        """The size to change to: `wanted`, or less if new ones are missing."""
        size, wanted = self.size, self.wanted
        if wanted <= size:
            return wanted
        live = size + _num_live(probing.ask(self._addresses[size:wanted]))
        waited = time.monotonic() - self._wanted_since > _TOGETHER_SECS
        return live if live == wanted or waited else None


def _num_live(answers: Sequence[Answer]) -> int:
    """How many answer, up to the first one that does not."""
    states = [*(answer.state for answer in answers), TaskState.DEAD]
    return next(i for i, s in enumerate(states) if s is not TaskState.LIVE)


def warn_if_ignored(model_dir: str) -> None:
    """Says so where a job without parameter servers has such a file."""
    path = os.path.join(model_dir, SIZE_FILE)
    if storage.read_text(path) is not None:
        _log.warning(
            "%s is ignored: only workers of parameter servers come and go. An "
            "all-reduce job starts again with the tasks that it shall have.",
            path,
        )

"""Continuously checks which tasks are up, silent, gone or replaced.

Every client of a dead server notices. A frozen server goes unnoticed: its
connections stay open and every call to it waits forever. A thread of the chief
therefore asks each worker and parameter server for its status (`probing.ask`).
A thread of TensorFlow's C++ server answers, so that a step that takes minutes
does not delay the answer. If even the chief's thread is blocked, a separate
process cuts the connections (`tfdist.cluster.connections`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping

from tfdist.cluster import probing
from tfdist.cluster.connections import Sentinel, cut_connections
from tfdist.cluster.probing import SERVER_JOBS, TaskState
from tfdist.cluster.spec import Cluster

_log = logging.getLogger(__name__)

# A task with an open connection is frozen after this long without an answer.
FROZEN_SECS = 15.0
_ROUND_SECS = 1.0
_LEAST_SECS = 0.1  # Minimum between two rounds, however many calls fail.
_DEAD_ROUNDS = 2
# If a frozen server blocks the main thread in C, the monitor acts after this.
_ACT_SECS = 5.0


class ServerFailure(enum.Enum):
    """Why a parameter server's variables can no longer be used."""

    DEAD = "is not up"
    REPLACED = "was started again and holds no variables"
    FROZEN = "does not answer"


class ServerLostError(RuntimeError):
    """Raised when parameter servers, and thus their variables, were lost.

    >>> print(ServerLostError({"ps:1": ServerFailure.DEAD}))
    ps:1 is not up

    Attributes:
        lost: Maps the name of each lost task to its failure.
    """

    in_hook = False  # Whether a hook of a session raised it.

    def __init__(self, lost: Mapping[str, ServerFailure]) -> None:
        self.lost = dict(lost)
        super().__init__(
            "; ".join(f"{name} {why.value}" for name, why in lost.items())
        )


@dataclasses.dataclass
class _Record:
    """The known status of the task at an address."""

    address: str
    identity: bytes | None = None  # Of the server that the chief connected to.
    replaced: bool = False  # Whether another server now answers at `address`.
    state: TaskState = TaskState.LIVE
    since: float = 0.0  # When `state` began.
    rounds: int = 0  # Consecutive rounds that found `state`.
    cut: bool = False  # Whether the chief has cut its connections to the task.

    def failure(self, frozen_secs: float) -> ServerFailure | None:
        """The failure that a ps with this record suffered; None if none."""
        if self.replaced:
            return ServerFailure.REPLACED
        if self.state is TaskState.DEAD and self.rounds >= _DEAD_ROUNDS:
            return ServerFailure.DEAD
        silent = time.monotonic() - self.since
        if self.state is TaskState.FROZEN and silent >= frozen_secs:
            return ServerFailure.FROZEN
        return None


class HealthMonitor:
    """Continuously polls the status of every worker and ps of a cluster.

    A frozen worker is treated as dead: the monitor cuts the chief's connections
    to it, so that its dispatch fails, as that of a killed worker does, and
    moves to another worker. A worker that wakes up is used again.

    `on_stuck` is called from the monitor's thread if the main thread is stuck
    in a call to a frozen server, and so has not stopped this monitor.
    """

    def __init__(
        self,
        cluster: Cluster,
        on_stuck: Callable[[ServerLostError], None] | None = None,
    ) -> None:
        self._records: dict[str, _Record] = {}
        self._on_stuck = on_stuck
        self._stopped, self._due = threading.Event(), threading.Event()
        self._asking = threading.Lock()
        self.follow(cluster)
        self._thread = threading.Thread(
            target=self._run, name="tfdist-health", daemon=True
        )
        self._sentinel = Sentinel(FROZEN_SECS)
        self._ask()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._due.set()

    def hurry(self) -> None:
        """Makes the thread ask now, because a call to a task just failed."""
        self._due.set()

    def follow(self, cluster: Cluster) -> None:
        """Monitors this cluster from now on, after workers joined or left."""
        with self._asking:
            self._records = {
                task: self._records.get(task) or _Record(address)
                for task, address in cluster.addresses(*SERVER_JOBS).items()
            }

    def _addresses(self) -> list[str]:
        return [record.address for record in self._records.values()]

    def lost(
        self, frozen_secs: float = FROZEN_SECS
    ) -> dict[str, ServerFailure]:
        """The parameter servers that are currently known to be lost."""
        return {
            task: failure
            for task, record in self._of("ps").items()
            if (failure := record.failure(frozen_secs))
        }

    def look(self) -> dict[str, ServerFailure]:
        """Asks all tasks now, twice, and returns the servers that are lost."""
        for _ in range(_DEAD_ROUNDS):
            self._ask()
        return self.lost()

    def check(self) -> None:
        """Raises `ServerLostError` if a parameter server is lost."""
        if lost := self.lost():
            raise ServerLostError(lost)

    def missing(self, job: str, secs: float) -> list[str]:
        """The tasks of a job that have not answered for `secs` seconds."""
        now = time.monotonic()
        return [
            task
            for task, record in self._of(job).items()
            if record.state is not TaskState.LIVE and now - record.since >= secs
        ]

    def alive(self) -> str:
        """The number of live tasks per job, such as "2/2 ps, 1/2 workers"."""
        parts = []
        for job, plural in (("ps", "ps"), ("worker", "workers")):
            states = [record.state for record in self._of(job).values()]
            up = states.count(TaskState.LIVE)
            parts.append(f"{up}/{len(states)} {plural}")
        return ", ".join(parts)

    def _of(self, job: str) -> dict[str, _Record]:
        return {
            task: record
            for task, record in self._records.items()
            if task.startswith(f"{job}:")
        }

    def _run(self) -> None:
        with contextlib.closing(self._sentinel):
            while not self._stopped.wait(_LEAST_SECS):
                if self._due.wait(_ROUND_SECS) and self._stopped.is_set():
                    break
                self._due.clear()
                self._sentinel.tell(self._addresses())
                self._ask()
                self._cut_frozen_workers()
                lost = self.lost(FROZEN_SECS + _ACT_SECS)
                stuck = ServerFailure.FROZEN in lost.values()
                if stuck and self._on_stuck and not self._stopped.is_set():
                    self._on_stuck(ServerLostError(lost))

    def _ask(self) -> None:
        """Asks all tasks at once and records their answers."""
        with self._asking:
            answers = probing.ask(self._addresses())
            for (task, record), answer in zip(
                self._records.items(), answers, strict=True
            ):
                self._note(task, record, answer)

    def _note(self, task: str, record: _Record, answer: probing.Answer) -> None:
        if answer.identity is not None:
            record.identity = record.identity or answer.identity
            replaced = record.identity != answer.identity
            if replaced and not record.replaced and task.startswith("ps:"):
                _log.warning("%s %s.", task, ServerFailure.REPLACED.value)
            record.replaced = replaced
        if answer.state is record.state:
            record.rounds += 1
            return
        if answer.state is TaskState.LIVE:
            _log.info("%s is back.", task)
        else:
            _log.warning("%s: %s.", task, answer.state.value)
        record.state, record.since = answer.state, time.monotonic()
        record.rounds, record.cut = 1, False

    def _cut_frozen_workers(self) -> None:
        for task, record in self._of("worker").items():
            failure = record.failure(FROZEN_SECS)
            if failure is ServerFailure.FROZEN and not record.cut:
                _log.warning(
                    "%s has not answered for %.0f s: it is treated as dead "
                    "until it does.",
                    task,
                    time.monotonic() - record.since,
                )
                cut_connections(record.address)
                record.cut = True

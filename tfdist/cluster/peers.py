"""Keeps the processes of an all-reduce job in step.

Each process has its own replicas and must run the same functions in the same
order, or their collectives would wait for each other forever. One process
therefore leads: it decides how many steps come next, and the others follow. It
sends commands through TensorFlow's coordination service.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfdist._tf import private
from tfdist._tf.errors import summarize_error
from tfdist._tf.waiting import wait_for
from tfdist.cluster import probing
from tfdist.cluster.health import FROZEN_SECS
from tfdist.cluster.probing import TaskState
from tfdist.cluster.spec import Cluster

_numbers = itertools.count()
_POLL_SECS = 1.0
_PATIENCE_SECS = 120.0  # A process may trace a model before it answers.
_GONE_SECS = 2.0  # Long enough for a second probe to fail too.
# How often the leader checks for processes that want to leave; time per check.
_LOOK_SECS, _ASK_SECS = 5.0, 0.02
# How long a process that fails waits until the others, which may be in a step
# or build a model, know why.
_INFORM_SECS = 10.0
# Errors of a process because another one is gone, from which jobs recover.
LOST_PEER = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.UnavailableError,
)


class Peers:
    """Exchanges messages between the processes of a job.

    Create it in all processes equally often and in the same order, once they
    are connected (`strategies.multi_worker_strategy`).
    """

    def __init__(self, cluster: Cluster) -> None:
        self.leads = cluster.is_chief
        self.name = cluster.task
        self._others = cluster.addresses()
        del self._others[self.name]
        self._count = 0
        # Keeps messages of earlier instances apart.
        self._prefix = f"{next(_numbers)}/"
        self._looked = 0.0
        self._fails = False

    def tell(self, **command: Any) -> None:
        """Sends the other processes the next command."""
        self._count += 1
        self._write(f"command/{self._count}", json.dumps(command))

    def next(self, watch: Callable[[], None]) -> dict[str, Any]:
        """Waits for the leader's next command; OpError if the leader is gone.

        `watch` is called every second, and may raise to end the wait. This and
        all other waits end in a RuntimeError if another process fails.
        """
        self._count += 1
        return json.loads(self._wait_for(f"command/{self._count}", watch))

    def broadcast_from_leader(self, what: str, value: str) -> str:
        """Returns the leader's value in every process, ignoring their own."""
        if self.leads:
            self._write(what, value)
            return value
        return self._wait_for(what)

    def ask_to_leave(self) -> None:
        """Tells the leader that this process has to end."""
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self._write("leaving", self.name)

    def leaving(self) -> str | None:
        """For the leader: a process that asked to leave; checked every 5 s."""
        if time.monotonic() - self._looked < _LOOK_SECS:
            return None
        self._looked = time.monotonic()
        return self._read("leaving")

    def fail(self, error: BaseException) -> None:
        """Ends the waits of other processes by a RuntimeError that says why.

        Returns once all know; if some do not listen, after a few seconds.
        """
        self._fails, reason = True, self._reason(error)
        with contextlib.suppress(tf.errors.OpError):  # Some may be gone.
            try:
                self._write("failed", reason)
            except tf.errors.AlreadyExistsError:  # Another was the first.
                self.announce("informed")
            else:
                self.wait_for_others("informed", secs=_INFORM_SECS)

    def tell_error(self, error: BaseException) -> None:
        """Lets the others know why this process is about to end."""
        with contextlib.suppress(tf.errors.OpError):
            self.announce("error", self._reason(error))

    def errors(self) -> list[str]:
        """What processes have told of their errors; on the leader."""
        told = [self._read(f"error/{name}") for name in self._others]
        return [reason for reason in told if reason]

    def _reason(self, error: BaseException) -> str:
        kind, message = type(error).__name__, str(error)
        if isinstance(error, tf.errors.OpError):
            message = summarize_error(error)
        reason = f"{self.name} has failed: {kind}: {message}"
        return reason.encode(errors="backslashreplace").decode()

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Ends all processes if one meets an error of the program in here."""
        try:
            yield
        except LOST_PEER as error:
            self.tell_error(error)  # It may be of the program, after all.
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self.fail(error)
            raise

    def announce(self, what: str, value: str = "") -> None:
        """Tells the other processes that this one has reached `what`."""
        self._write(f"{what}/{self.name}", value)

    def wait_for_others(
        self,
        what: str,
        watch: Callable[[], None] = lambda: None,
        secs: float = _PATIENCE_SECS,
    ) -> dict[str, str]:
        """The announcements of all other processes, by task name.

        Raises OpError if a process is gone, DeadlineExceededError if it is
        silent for `secs`.
        """
        said = {}
        for name in self._others:
            look = self._watching(name, watch)
            said[name] = self._wait_for(f"{what}/{name}", look, secs)
        return said

    def _watching(
        self, name: str, watch: Callable[[], None]
    ) -> Callable[[], None]:
        """Wraps `watch` to raise OpError once the process `name` is gone.

        TensorFlow itself notices this only in a call to that process.
        """
        seen = time.monotonic()

        def look() -> None:
            nonlocal seen
            watch()
            (answer,) = probing.ask([self._others[name]])
            what, secs = answer.state.value, _GONE_SECS
            if answer.state is TaskState.FROZEN:
                secs = FROZEN_SECS
            elif answer.identity == probing.WAITING:
                what = "was started again"
            elif answer.state is TaskState.LIVE:
                seen = time.monotonic()
            if time.monotonic() - seen > secs:
                reason = f"{name}: {what}"
                with contextlib.suppress(tf.errors.OpError):
                    reason = self._read(f"error/{name}") or reason
                raise tf.errors.UnavailableError(None, None, reason)

        return look

    def check_same_program(self, program: Mapping[str, str]) -> None:
        """Raises ValueError if processes are about to run different programs.

        They would wait forever. `program` maps its parts to descriptions.
        """
        self.announce("program", json.dumps(program))
        for name, text in self.wait_for_others("program").items():
            other = json.loads(text)
            differences = [
                f"  {part}: {program.get(part, 'missing')} in {self.name}, "
                f"{other.get(part, 'missing')} in {name}"
                for part in {**program, **other}
                if program.get(part) != other.get(part)
            ]
            if differences:
                raise ValueError(
                    "Every process of an all-reduce job must run the same "
                    "program. They differ:\n" + "\n".join(differences)
                )

    def check_failed(self) -> None:
        """Raises the RuntimeError of another process that has failed."""
        if not self._fails and (reason := self._read("failed")):
            self.announce("informed")
            raise RuntimeError(reason)

    def _read(self, key: str, secs: float = _ASK_SECS) -> str | None:
        return private.get_cluster_value(self._prefix + key, secs)

    def _write(self, key: str, value: str) -> None:
        private.set_cluster_value(self._prefix + key, value)

    def _wait_for(
        self,
        key: str,
        watch: Callable[[], None] = lambda: None,
        secs: float = math.inf,
    ) -> str:
        def answer() -> str | None:
            value = self._read(key, _POLL_SECS)
            if value is None:
                watch()
                self.check_failed()
            return value

        value = wait_for(answer, secs, poll_secs=0.0)
        if value is None:
            raise tf.errors.DeadlineExceededError(
                None, None, f"{self.name} waited {secs:g} s for {key} in vain"
            )
        return value

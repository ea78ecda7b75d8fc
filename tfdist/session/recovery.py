"""What a session does when something fails: the decisions, and the means."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping

import tensorflow as tf

from tfdist._tf.errors import summarize_error
from tfdist._tf.private import COORDINATOR_ERRORS
from tfdist.cluster.health import ServerFailure, ServerLostError

_log = logging.getLogger(__name__)

# Failures without a step in between after which the last one is raised.
MAX_FAILURES = 10
# As the error of a hook, at one step, with every task alive, it is raised.
MAX_REPEATS = 3
# After so many of them the chief of a cluster restarts its process.
MAX_REBUILDS = 3
# What may be recovered from; see `choose_action`.
FAILURES = (tf.errors.OpError, ServerLostError, *COORDINATOR_ERRORS)
# What ends a session without an error.
END_OF_INPUT = (tf.errors.OutOfRangeError, StopIteration)
# What a step raises whose server is gone.
_LOST = (tf.errors.AbortedError, tf.errors.UnavailableError, ServerLostError)
# What servers say to a chief whose state they have freed.
_GIVEN_UP = ("context_id", "Unable to find the relevant tensor remote_handle")
# How an all-reduce ends, too, when a process that takes part in it is gone.
_WITHOUT_ANSWER = (tf.errors.CancelledError, tf.errors.DeadlineExceededError)


class RecoveryAction(enum.Enum):
    """What becomes of a session after an error."""

    RAISE = "the error is raised"
    REBUILD = "everything is built again in this process"
    RESTART = "this process restarts itself"


def choose_action(
    error: BaseException,
    lost: Mapping[str, ServerFailure],
    failures: int = 0,
    in_sync: bool = False,
) -> RecoveryAction:
    """What is done about an error, `failures` of them after the last step.

    >>> choose_action(tf.errors.UnavailableError(None, None, "gone"), {}).name
    'REBUILD'
    >>> choose_action(tf.errors.NotFoundError(None, None, "what"), {}).name
    'RAISE'
    >>> choose_action(ServerLostError({}), {"ps:0": ServerFailure.FROZEN}).name
    'RESTART'

    `in_sync`: by all-reduce, whose processes TensorFlow connects but once; else
    `lost` are ps.
    """
    error = getattr(error, "original_exception", error)
    if not isinstance(error, FAILURES) or failures >= MAX_FAILURES:
        return RecoveryAction.RAISE
    if ServerFailure.FROZEN in lost.values():
        # Calls to it may hang for ever, in threads that nobody can end.
        return RecoveryAction.RESTART
    if in_sync:
        ended = isinstance(error, (*_LOST, *_WITHOUT_ANSWER))
        return RecoveryAction.RESTART if ended else RecoveryAction.RAISE
    # Servers have given a chief up that was frozen, or cut off, for long.
    given_up = any(sign in str(error) for sign in _GIVEN_UP)
    if not (lost or given_up or isinstance(error, _LOST)):
        return RecoveryAction.RAISE
    if failures >= MAX_REBUILDS:
        return RecoveryAction.RESTART
    return RecoveryAction.REBUILD


def restart_process(reason: str) -> None:
    """Replaces this process by a fresh one: same command, pid and port."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise RuntimeError(
            f"{reason}. An interactive process cannot restart itself: "
            "restart it, and training goes on from the last checkpoint."
        )
    _log.warning("%s: this process restarts itself.", reason)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def in_hooks() -> Iterator[None]:
    """Marks the errors of hooks as such."""
    try:
        yield
    except FAILURES as error:
        error.in_hook = True
        raise


class Failures:
    """The failures since the last step that succeeded."""

    _KEPT = "TFDIST_FAILURES"

    def __init__(self) -> None:
        self.count = 0
        # Of the process that this one was before: how many; how often a hook
        # raised the same, and what.
        *numbers, self._what = os.environ.pop(self._KEPT, "0 0 ").split(" ", 2)
        self._before, self._times = map(int, numbers)
        self._first_at = 0.0

    @property
    def in_a_row(self) -> int:
        """How many, with those of the process that this one was before."""
        return self._before + self.count

    def add(self) -> None:
        """Counts one."""
        if not self.count:
            self._first_at = time.monotonic()
        self.count += 1

    def is_the_users(self, error: Exception, step: int) -> bool:
        """Whether a hook has raised the same at the same step too often."""
        if not getattr(error, "in_hook", False):
            return False
        what = f"{step} {summarize_error(error)}"
        self._times = self._times + 1 if what == self._what else 1
        self._what = what
        return self._times >= MAX_REPEATS

    def keep(self) -> None:
        """Hands the count on to the process that this one becomes."""
        os.environ[self._KEPT] = f"{self.in_a_row} {self._times} {self._what}"

    def report(self, step: int) -> None:
        """A run succeeded: says how long it took, if it was a recovery."""
        if self.count:
            _log.warning(
                "Recovered: at step %d, %.1f s after the failure was noticed.",
                step,
                time.monotonic() - self._first_at,
            )
        self.count = self._before = 0

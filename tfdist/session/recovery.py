"""How a session handles failures: the decisions and the actions."""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping

import tensorflow as tf

from tfdist._tf.errors import summarize_error
from tfdist._tf.private import COORDINATOR_ERRORS
from tfdist.cluster.health import ServerFailure, ServerLostError
from tfdist.cluster.peers import LOST_PEER
from tfdist.data.input_fns import unnamed

_log = logging.getLogger(__name__)

# Failures without a step in between after which the last one is raised.
MAX_FAILURES = 10
# Repeats after which a hook's error at one step is raised, if all tasks live.
MAX_REPEATS = 3
# Failures in a row after which the chief of a cluster restarts its process.
MAX_REBUILDS = 3
# Errors that may be recovered from; see `choose_action`.
FAILURES = (tf.errors.OpError, ServerLostError, *COORDINATOR_ERRORS)
# Exceptions that end a session normally.
END_OF_INPUT = (tf.errors.OutOfRangeError, StopIteration)
# Errors that a step raises if its server is gone.
_LOST = (tf.errors.AbortedError, tf.errors.UnavailableError, ServerLostError)
# Messages of servers that have freed the state of a chief.
_GIVEN_UP = ("context_id", "Unable to find the relevant tensor remote_handle")


class RecoveryAction(enum.Enum):
    """How a session responds to an error."""

    RAISE = "the error is raised"
    REBUILD = "everything is built again in this process"
    RESTART = "this process restarts itself"


def choose_action(
    error: BaseException,
    lost: Mapping[str, ServerFailure],
    failures: int = 0,
    in_sync: bool = False,
) -> RecoveryAction:
    """Chooses the response to an error, after `failures` without a step.

    >>> choose_action(tf.errors.UnavailableError(None, None, "gone"), {}).name
    'REBUILD'
    >>> choose_action(tf.errors.NotFoundError(None, None, "what"), {}).name
    'RAISE'
    >>> choose_action(ServerLostError({}), {"ps:0": ServerFailure.FROZEN}).name
    'RESTART'

    `in_sync` means all-reduce, whose processes TensorFlow can connect only
    once; otherwise `lost` holds parameter servers.
    """
    error = getattr(error, "original_exception", error)
    if not isinstance(error, FAILURES) or failures >= MAX_FAILURES:
        return RecoveryAction.RAISE
    if ServerFailure.FROZEN in lost.values():
        # Calls to a frozen server may hang forever, in unkillable threads.
        return RecoveryAction.RESTART
    if in_sync:
        ended = isinstance(error, (*LOST_PEER, ServerLostError))
        return RecoveryAction.RESTART if ended else RecoveryAction.RAISE
    # The servers freed a chief's state after a long freeze or disconnection.
    given_up = any(sign in str(error) for sign in _GIVEN_UP)
    if not (lost or given_up or isinstance(error, _LOST)):
        return RecoveryAction.RAISE
    if failures >= MAX_REBUILDS:
        return RecoveryAction.RESTART
    return RecoveryAction.REBUILD


def restart_process(reason: str) -> None:
    """Replaces this process by a new one: same command, pid and port."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        raise RuntimeError(
            f"{reason}. An interactive process cannot restart itself: "
            "restart it to resume training from the last checkpoint."
        )
    _log.warning("%s: this process restarts itself.", reason)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextlib.contextmanager
def in_hooks(can_end: bool = True) -> Iterator[None]:
    """Marks errors raised inside the context as errors of hooks.

    Warns of those that end training, if hooks `can_end` it. To TensorFlow, a
    file that is too large (EFBIG) is an end of data: here it is an `OSError`.
    """
    try:
        with unnamed():
            yield
    except (*FAILURES, StopIteration) as error:
        if os.strerror(errno.EFBIG) in str(error):
            raise OSError(errno.EFBIG, summarize_error(error)) from error
        error.in_hook = True  # type: ignore[union-attr]
        if can_end and isinstance(error, END_OF_INPUT):
            _log.warning(
                "A hook raised %s: training ends here, as if its data had "
                "ended. To end it on purpose, call `request_stop()`.",
                repr(error),
            )
        raise


class Failures:
    """Counts the failures since the last successful step."""

    _KEPT = "TFDIST_FAILURES"

    def __init__(self) -> None:
        self.count = 0
        # From this process before its restart: the number of failures, and how
        # often a hook raised the same error, and which.
        *numbers, self._what = os.environ.pop(self._KEPT, "0 0 ").split(" ", 2)
        self._before, self._times = map(int, numbers)
        self._first_at = 0.0

    @property
    def in_a_row(self) -> int:
        """The number of failures, including those before a restart."""
        return self._before + self.count

    def add(self) -> None:
        """Counts a failure."""
        if not self.count:
            self._first_at = time.monotonic()
        self.count += 1

    def is_user_error(self, error: Exception, step: int) -> bool:
        """Whether a hook has raised the same error at one step too often."""
        if not getattr(error, "in_hook", False):
            return False
        what = f"{step} {summarize_error(error)}"
        self._times = self._times + 1 if what == self._what else 1
        self._what = what
        return self._times >= MAX_REPEATS

    def keep(self) -> None:
        """Passes the counts on to this process after its restart."""
        os.environ[self._KEPT] = f"{self.in_a_row} {self._times} {self._what}"

    def report(self, step: int) -> None:
        """Resets the count after a successful run; logs a recovery."""
        if self.count:
            _log.warning(
                "Recovered: at step %d, %.1f s after the failure was noticed.",
                step,
                time.monotonic() - self._first_at,
            )
        self.count = self._before = 0

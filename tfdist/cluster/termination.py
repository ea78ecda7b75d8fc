"""SIGTERM handling: a process ends only when it is ready to."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator

_log = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a task ended by SIGTERM; schedulers restart such a task."""


class Sigterm:
    """Records SIGTERM, which then does not end this process.

    Elsewhere than in the main thread, or if not enabled, it has no effect.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.received = False  # Whether the signal has arrived.
        self._at = 0.0
        main = threading.current_thread() is threading.main_thread()
        self._enabled = enabled and main
        if self._enabled:
            self._before = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.received, self._at = True, time.monotonic()
        outer = getattr(self._before, "__self__", None)
        if isinstance(outer, Sigterm):  # Of an enclosing session.
            outer._receive()

    def leave(self) -> None:
        """Exits after SIGTERM, with a code that schedulers retry."""
        if self.received:
            _log.warning(
                "Told to end (SIGTERM); exit code %d asks to be started again.",
                TERMINATED,
            )
            raise SystemExit(TERMINATED)

    def leave_when_late(self, secs: float) -> None:
        """Like `leave`, but not before `secs` seconds after the signal."""
        if time.monotonic() - self._at > secs:
            self.leave()

    def restore(self) -> None:
        """Restores the previous handler, once later instances have."""
        if self._enabled:
            self._enabled = False
            handler = signal.getsignal(signal.SIGTERM) or self._before
            while (
                isinstance(owner := getattr(handler, "__self__", None), Sigterm)
                and not owner._enabled
            ):
                handler = owner._before
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Delays SIGTERM until the block ends; Python's handler then runs.

    When a process joins an all-reduce job, TensorFlow's `PreemptionNotifier`
    replaces the handler and reports no signal to anyone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)  # None: not set from Python.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

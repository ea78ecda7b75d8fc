"""SIGTERM: the process is told to end, and does so when it is ready."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator

_log = logging.getLogger(__name__)

TERMINATED = 128 + signal.SIGTERM
"""Exit code of a task that SIGTERM ended; schedulers start it again."""


class Sigterm:
    """Takes note of SIGTERM, which then does not end this process.

    Only the main thread can; a disabled one hears nothing.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.received = False  # Whether the signal has come.
        self._at = 0.0
        main = threading.current_thread() is threading.main_thread()
        self._enabled = enabled and main
        if self._enabled:
            self._before = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.received, self._at = True, time.monotonic()
        outer = getattr(self._before, "__self__", None)
        if isinstance(outer, Sigterm):  # Of the session in which this one is.
            outer._receive()

    def leave(self) -> None:
        """Ends the process if it was told to, with a code that is retried."""
        if self.received:
            _log.warning(
                "Told to end (SIGTERM); exit code %d asks to be started again.",
                TERMINATED,
            )
            raise SystemExit(TERMINATED)

    def leave_when_late(self, secs: float) -> None:
        """As `leave`, `secs` seconds after the signal at the earliest."""
        if time.monotonic() - self._at > secs:
            self.leave()

    def restore(self) -> None:
        """Puts the handler of before back, once later ones have done so."""
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
    """Has SIGTERM wait meanwhile; Python's handler hears it afterwards.

    Joining an all-reduce job, TensorFlow's `PreemptionNotifier` replaces the
    handler, and tells nobody of a signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)  # None: not one of Python's.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

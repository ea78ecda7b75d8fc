"""SIGTERM: the process is told to end, and does so when it is ready."""

from __future__ import annotations

import logging
import signal
import threading
import time

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
        """Puts the handler of before back."""
        if self._enabled:
            signal.signal(signal.SIGTERM, self._before)
            self._enabled = False


def take_sigterm_back() -> None:
    """Has Python's handler hear SIGTERM again once an all-reduce job is joined.

    TensorFlow's `PreemptionNotifier` has replaced it then, and tells nobody.
    """
    handler = signal.getsignal(signal.SIGTERM)  # None: not one of Python's.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and handler is not None:
        signal.signal(signal.SIGTERM, handler)

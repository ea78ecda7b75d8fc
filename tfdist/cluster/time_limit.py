"""A time limit for a call that nothing in Python can interrupt."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import signal
import subprocess
import sys
from collections.abc import Iterator

# Ends at once when the pipe of its stdin is closed.
_TIMER = (
    "import os, select, signal, sys; "
    "select.select([0], [], [], float(sys.argv[1]))[0] "
    "or os.kill(os.getppid(), signal.SIGHUP)"
)


@contextlib.contextmanager
def time_limit(secs: float) -> Iterator[None]:
    """Ends this process, with a traceback and exit code 1, after `secs`.

    For a call that waits in C and holds Python's lock: no thread and no signal
    handler of Python's runs meanwhile. `faulthandler.dump_traceback_later`
    would do, but a process has one such timer, and it may be the user's. So
    another process sends a signal, to two handlers in C: faulthandler's, and
    then `_exit`, which makes the signal's number the exit code: SIGHUP is 1.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal.restype = ctypes.c_void_p
    leave = ctypes.cast(libc._exit, ctypes.c_void_p)
    before = libc.signal(signal.SIGHUP, leave)
    stderr = sys.__stderr__ or sys.stderr
    faulthandler.register(signal.SIGHUP, file=stderr, chain=True)
    timer = subprocess.Popen(
        [sys.executable, "-ISc", _TIMER, str(secs)], stdin=subprocess.PIPE
    )
    try:
        yield
    finally:
        timer.communicate()  # Closes the pipe.
        faulthandler.unregister(signal.SIGHUP)
        libc.signal(signal.SIGHUP, before)

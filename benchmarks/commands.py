"""Runs commands and waits until they finish."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent
TIMEOUT_SECS = 900.0


class RunError(RuntimeError):
    """A command failed."""


def run(command: Sequence[str], timeout_secs: float = TIMEOUT_SECS) -> str:
    """Runs one command in the repository; returns what it printed.

    Raises:
        RunError: it failed, with the end of what it said.
    """
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_secs,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"It took more than {error.timeout} s.") from error
    if done.returncode:
        tail = (done.stdout + done.stderr)[-3000:]
        raise RunError(f"It ended with {done.returncode}: {tail}")
    return done.stdout

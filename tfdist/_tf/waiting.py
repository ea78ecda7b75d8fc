"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T], timeout_secs: float, poll_secs: float = 0.1
) -> T:
    """Calls `condition` until it returns a value other than None or False.

    >>> wait_for(lambda: 0, timeout_secs=60.0)
    0
    >>> wait_for(lambda: False, timeout_secs=0.0)
    False

    Returns the last value, which is None or False after a timeout.
    """
    deadline = time.monotonic() + timeout_secs
    while (found := condition()) is None or found is False:
        if time.monotonic() >= deadline:
            break
        time.sleep(poll_secs)
    return found

"""Exercises of lesson 5, synchronous all-reduce."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from exercises import Exercise


def waits_for_the_fastest(function: Callable[..., float]) -> bool:
    """Exercise 3, on random times."""
    secs = np.random.default_rng(0).random([7, 5])
    for n in range(1, 6):
        ends = [heapq.nsmallest(n, row)[-1] for row in secs.tolist()]
        if not np.isclose(float(function(secs, n)), np.mean(ends)):
            return False
    return True


def stands_still(answer: Sequence[int]) -> bool:
    """Exercise 4: the first job does (but for a line), the second does not."""
    synchronous, asynchronous = answer
    return 0 <= synchronous <= 10 < 2 * synchronous + 20 < asynchronous


EXERCISES = {
    1: Exercise(
        (
            "How many steps are there, and how large is the piece that is sent "
            "in each?",
            "With n workers each gradient is cut into n pieces, and each "
            "worker sends one piece in each of 2 (n - 1) steps.",
        ),
        digest="c4db8f7fb62c6abac065f60f4e430d20",
    ),
    2: Exercise(
        (
            "Who decides how long a step takes?",
            "A step takes as long as its slowest worker, and does one batch "
            "for each worker.",
        ),
        digest="264c483e56d44a019fbc07cfd29fdc3e",
    ),
    3: Exercise(
        (
            "Sort each step's times. The mean is taken over steps, not over "
            "workers.",
            "When may a step that waits for two of three end? At the time of "
            "the second fastest, not at the mean of the two.",
        ),
        is_right=waits_for_the_fastest,
    ),
    4: Exercise(
        (
            "Write one function that is called with `workers=3` and with "
            "`ps=2, workers=3`; `race` above starts a cluster in the same way.",
            "After `tasks.freeze('worker:1')` and a second's sleep, note "
            "`tasks.step`, sleep for three seconds, and return the difference. "
            "Do not wait for the end of the job: leaving the `with` block ends "
            "it.",
        ),
        is_right=stands_still,
    ),
    5: Exercise(
        (
            "What happens to the global batch, and what to the slowest worker "
            "of a step?",
            "Say what the learning rate must do, where a larger batch stops to "
            "help, and what 64 machines do that eight do not: they are late, "
            "and they fail. Write at least 25 words.",
        ),
    ),
}

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
    """Exercise 4: at most one line of progress is late; then it goes on."""
    before, still, after = answer
    return before >= 50 and 0 <= still - before <= 10 and after >= still + 50


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
            "`race` above starts a cluster in the same way. What is different: "
            "the program, and what happens inside the `with` block.",
            "Inside the block, in this order: `wait_until_step(50)`, `freeze`, "
            "a second's sleep, `tasks.step`, three seconds' sleep, "
            "`tasks.step`, `resume`, and `wait_until_step` for 50 more, which "
            "returns the step. You need not wait for the end of the job.",
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

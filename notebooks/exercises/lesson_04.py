"""Exercises of lesson 4, replication."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from exercises import Exercise


def counts_staleness(function: Callable[..., Any]) -> bool:
    """Exercise 3, compared with a count from the back."""
    rng = np.random.default_rng(0)
    for workers in (1, 2, 3, 5):
        pulled, log = set[int](), []
        for worker in rng.integers(0, workers, 40).tolist():
            log.append(("push" if worker in pulled else "pull", worker))
            pulled ^= {worker}
        if list(function(list(log))) != _stalenesses(log):
            return False
    return True


def _stalenesses(log: list[tuple[str, int]]) -> list[int]:
    found = []
    for end, (what, worker) in enumerate(log):
        if what == "push":
            start = max(i for i in range(end) if log[i] == ("pull", worker))
            found.append([what for what, _ in log[start:end]].count("push"))
    return found


def of_eight_workers(record: dict[str, Any]) -> bool:
    """Exercise 4: staler than four workers can be, and nothing is lost."""
    updates = np.array(record["updates"])
    middle = int(np.searchsorted(updates.cumsum(), updates.sum() / 2))
    return not record["slow"] and updates.sum() == 300 and 4 <= middle <= 9


EXERCISES = {
    1: Exercise(
        (
            "Count the updates that come in between, not the workers.",
            "Between a worker's pull and its push every other worker pushes "
            "once. Its own push does not count.",
        ),
        digest="4c65ed5076afc781747e4da67927a0b5",
    ),
    2: Exercise(
        (
            "`train` is still in this notebook: try each rate with it, for "
            "enough updates.",
            "The formula above gives the rate at which a swing stops growing. "
            "Put staleness 4 into it, and go down to the next rate that is on "
            "the list.",
        ),
        digest="d0b5048742e3ba57b21961d4e6b3d499",
    ),
    3: Exercise(
        (
            "What must you remember at each pull?",
            "Count the pushes as you go. Write the count down at each worker's "
            "pull; at its push, subtract it from the count of that moment.",
        ),
        is_right=counts_staleness,
    ),
    4: Exercise(
        (
            "The cell above that starts `jobs/replicas.py` says how many "
            "workers there are. Read the chief's output before the cluster is "
            "closed.",
            "`course.records(tasks.output('chief:0'))` is a list of two "
            "records. The first is of equal workers; hand over all of it.",
        ),
        is_right=of_eight_workers,
    ),
    5: Exercise(
        (
            "Two different things change with the number of workers. One was "
            "in this notebook.",
            "Say what 20 workers do to the staleness, what that does to the "
            "largest learning rate, and how you would tell staleness from any "
            "other cause. Write at least 25 words.",
        ),
    ),
}

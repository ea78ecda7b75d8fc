"""Exercises of lesson 14, one job from end to end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from exercises import Exercise


def chooses_a_rate(function: Callable[..., Any]) -> bool:
    """Exercise 3, compared on random runs, some of which diverge."""
    rng = np.random.default_rng(0)
    for bad in (np.nan, np.inf, -np.inf, 0.4):
        table = rng.uniform(0.3, 0.9, [5, 3])
        table[1] = bad, 0.01, 0.01  # Its best seeds are the best of all.
        table[3] -= 0.2
        rates = [0.1, 0.2, 0.5, 1.0, 2.0]
        runs = [
            (rate, seed, float(loss))
            for rate, losses in zip(rates, table, strict=True)
            for seed, loss in enumerate(losses)
        ]
        means = np.where(np.isfinite(table).all(1), table.mean(1), np.inf)
        order = rng.permutation(len(runs))
        if function([runs[i] for i in order]) != rates[means.argmin()]:
            return False
    return True


def survived(answer: tuple[dict[str, Any], dict[int, Any]]) -> bool:
    """Exercise 4: a server was killed, and the model is as good as before."""
    ends, evaluated = answer
    killed = any(
        codes[0] == -9 and task.startswith("ps")
        for task, codes in ends.items()
        if codes
    )
    last = evaluated[max(evaluated)]
    return killed and ends["chief:0"][-1] == 0 and last["auc"] > 0.8


EXERCISES = {
    1: Exercise(
        (
            "Count pairs: one person of each kind. How many pairs are there?",
            "For each of the three, count the people of the other kind who "
            "have a smaller score. Add these up, and divide by the number of "
            "pairs.",
        ),
        digest="8a8014db62ac9327675a2af0ce64bfed",
    ),
    2: Exercise(
        (
            "Each id of each column has a weight. The program printed above "
            "says how many ids a column has.",
            "Nine boundaries make ten intervals. Add the buckets of all six "
            "columns of words, those of the crossed column, and one bias.",
        ),
        digest="2965fb70a41f834adc2e6fed49983231",
    ),
    3: Exercise(
        (
            "Collect the losses of each rate first, whatever their order.",
            "Drop a rate if `np.isfinite(losses).all()` is False; of the "
            "others, take the one whose mean is the smallest.",
        ),
        is_right=chooses_a_rate,
    ),
    4: Exercise(
        (
            "The cell above that kills a worker needs another directory and "
            "another task to kill.",
            "`[*job[:2], directory, *job[3:]]` is the command with another "
            "directory. Inside the `with`, after `wait`, the answer is "
            "`(tasks.exit_codes(), tfdist.hooks.read_scalars(...))`.",
        ),
        is_right=survived,
    ),
    5: Exercise(
        (
            "How large is the difference that chance alone makes?",
            "Speak of seeds, of how many people the AUC is measured on, of "
            "each model's own best settings, and of what a model costs. Write "
            "at least 25 words.",
        ),
    ),
}

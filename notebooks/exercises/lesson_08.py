"""Exercises of lesson 8, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from exercises import Exercise


def finds_twice_and_never(function: Callable[..., Any]) -> bool:
    """Exercise 3, compared with a count."""
    rng = np.random.default_rng(0)
    for workers, n in (2, 4), (1, 3), (3, 6), (5, 20):
        read = [rng.integers(0, n, 3).tolist() for _ in range(workers)]
        counts = np.bincount(np.concatenate(read), minlength=n)
        wanted = [np.flatnonzero(counts > 1), np.flatnonzero(counts == 0)]
        found = list(function([list(ids) for ids in read], n))
        if [list(part) for part in found] != [part.tolist() for part in wanted]:
            return False
    return True


def of_a_data_worker(
    answer: tuple[Mapping[str, Sequence[int]], dict[str, Any]],
) -> bool:
    """Exercise 4: who was killed, and what jobs/passes.py found then."""
    codes, record = answer
    if list(codes["data_worker:0"])[:1] != [-9]:
        raise ValueError("the data worker was not killed")
    counts = np.array(record["examples"])
    if record["kind"] != "disturbed":
        raise ValueError('the record of "disturbed" is asked for')
    lost = int((counts == 0).sum())
    return bool(counts.max() == 1 and 0 < lost < len(counts) / 2)


EXERCISES = {
    1: Exercise(
        (
            "Every worker keeps an eighth of its own order. With what chance "
            "does one worker not keep a certain example?",
            "The orders are independent, so the chances are multiplied, one "
            "for each of the eight workers.",
        ),
        digest="272938b2800ed449b029485ad3d83020",
    ),
    2: Exercise(
        (
            "Which batches has the worker already been given that it has not "
            "finished?",
            "One is in its step, and two are on their way from each data "
            "worker. Count examples, not batches.",
        ),
        digest="307e2d7c7b07afd488d10e90fdee6475",
    ),
    3: Exercise(
        (
            "Count how often each id was read, by all workers together.",
            "`collections.Counter` counts them; then go through the ids from 0 "
            "to n - 1 and look at each count. Both lists are sorted.",
        ),
        is_right=finds_twice_and_never,
    ),
    4: Exercise(
        (
            'Ask for one kind of pass only, "disturbed", and kill the task '
            '"data_worker:0" when the job is at work.',
            "`tasks.run([testing.Fault('kill', 'data_worker:0', at_step=30)], "
            "timeout_secs=500)`; then "
            "`(record,) = course.records(tasks.output('chief:0'))` and "
            "`answer_4 = tasks.exit_codes(), record`.",
        ),
        is_right=of_a_data_worker,
    ),
    5: Exercise(
        (
            "In one pass of a seed each, how many different examples did the "
            "four workers see? Begin with that figure.",
            "For each of the three jobs ask: does it matter that an example is "
            "read twice, or not at all? Who deals again what a dead worker "
            "left? Write at least 25 words.",
        ),
    ),
}

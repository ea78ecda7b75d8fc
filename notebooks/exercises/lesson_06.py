"""Exercises of lesson 6, model parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from exercises import Exercise


def cuts_well(function: Callable[..., Sequence[Sequence[int]]]) -> bool:
    """Exercise 3, against the least time by halving an interval."""
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 4):
        secs = rng.integers(1, 20, 8).tolist()
        found = [list(stage) for stage in function(list(secs), n)]
        if list(itertools.chain(*found)) != secs or not all(found):
            return False
        if len(found) != n or max(map(sum, found)) != _least(secs, n):
            return False
    return True


def _least(secs: list[int], n: int) -> int:
    """The smallest limit that `n` stages can keep."""

    def stages(limit: int) -> int:
        count, room = 1, limit
        for sec in secs:
            if sec > room:
                count, room = count + 1, limit
            room -= sec
        return count

    limits = range(max(secs), sum(secs) + 1)
    return next(limit for limit in limits if stages(limit) <= n)


EXERCISES = {
    1: Exercise(
        (
            "`bubble(n, m)` in this notebook is the share of the time.",
            "With n devices and m micro-batches it is (n - 1)/(m + n - 1). Set "
            "that to a fifth, with the n of the question.",
        ),
        digest="2be59d749cbbc64409c7ea92a5e105ba",
    ),
    2: Exercise(
        (
            "How many turns does the wave take, in the drawing at the top?",
            "The first layer needs one turn for each word; the last word then "
            "has to pass the layers above. Multiply the turns by the time of "
            "a cell.",
        ),
        digest="e177ab60567c27d4818222ed20c6ae3f",
    ),
    3: Exercise(
        (
            "Layers stay in their order, so a way to cut is a choice of places "
            "between them.",
            "`itertools.combinations(range(1, len(secs)), n - 1)` gives all "
            "choices. Keep the one whose largest sum is the smallest.",
        ),
        is_right=cuts_well,
    ),
    4: Exercise(
        (
            "`testing.LocalCluster([sys.executable, 'jobs/layers.py', '0', "
            "'0', '1', '1'], workers=2)` starts the first. You need "
            "`import sys` and `from tfdist.launch import testing`.",
            "Wait for the end of the job; `course.records(tasks.output("
            "'chief:0'))` is a list of one record, and the number is its "
            "'sent'.",
        ),
        digest="5d1d7293a9f98b3c1535b8bcc4bd51d2",
    ),
    5: Exercise(
        (
            "Compute the bubble for both, and count the copies of the weights.",
            "Two pipelines wait less and move less along the layers, but they "
            "hold everything twice and must agree on the gradients. Say which "
            "measurement would change your mind. Write at least 25 words.",
        ),
    ),
}

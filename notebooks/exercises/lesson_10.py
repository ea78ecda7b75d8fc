"""Exercises of lesson 10, choosing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tfdist
from exercises import Exercise


def as_advised(
    names: Sequence[str],
    questions: Sequence[tuple[tfdist.Workload, tfdist.Machines]],
) -> bool:
    """Exercise 3, compared with the advice."""
    right = [
        tfdist.choose_strategy(*question).strategy for question in questions
    ]
    return list(names) == right


def of_a_fourth_worker(rows: list[dict[str, Any]]) -> bool:
    """Exercise 4: what the chief of jobs/scaling.py printed."""
    limits, *runs = rows
    paces = {(row["bytes"], row["workers"]): row["pace"] for row in runs}
    largest = max(size for size, _ in paces)
    three, four = paces[largest, 3], paces[largest, 4]
    # A full link gives the fourth worker nothing; without a limit it may.
    return (
        largest > 2e6 and 0 < four < (1.4 if limits["limited"] else 2) * three
    )


EXERCISES = {
    1: Exercise(
        (
            "In a ring each worker sends almost twice the model; notebook 5 "
            "says how much exactly.",
            "Divide those bytes by the link's rate for the time on the wire. A "
            "step takes this and the time to compute; eight workers do eight "
            "batches in it.",
        ),
        digest="cafff026e9608b74affe6bc78444bdf2",
    ),
    2: Exercise(
        (
            "How long is a step, and for how much of it does the device "
            "compute? What takes the rest?",
            "With prefetching, a step takes the longer of two times: the one "
            "to prepare a batch and the one to compute. Halve first the one, "
            "then the other.",
        ),
        digest="20f3ba28cd654ffe52931f4a5a56cb49",
    ),
    3: Exercise(
        (
            "Bytes first: does the model fit a device, and is it dense or a "
            "table? Then seconds: is the step worth distributing?",
            "Work down the table of the takeaway for each question, from the "
            "first row that applies. The four answers are all different.",
        ),
        is_right=as_advised,
    ),
    4: Exercise(
        (
            "What follows the directory on the command line says which model "
            "is trained by how many workers. The cluster needs four of them.",
            "`[sys.executable, 'jobs/scaling.py', directory, '500:3', "
            "'500:4']` with `ps=1, workers=4`; hand over `course.records` of "
            "all that the chief printed.",
        ),
        is_right=of_a_fourth_worker,
    ),
    5: Exercise(
        (
            "A step is made of four things. Which of them do the figures rule "
            "out, and which are left?",
            "Name a measurement for each of those that are left, and what you "
            "would change if it were the one. Write at least 25 words.",
        ),
    ),
}

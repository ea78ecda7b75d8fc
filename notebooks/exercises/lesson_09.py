"""Exercises of lesson 9, train_and_evaluate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tfdist
from exercises import Exercise


def prefers_auc(function: Callable[..., Any]) -> bool:
    """Exercise 2: a larger AUC, and of equal ones the smaller loss."""
    tfdist.BestExporter(compare_fn=function)  # Checks its arguments.
    low, high = {"auc": 0.7, "loss": 0.3}, {"auc": 0.8, "loss": 0.5}
    equal = {"auc": 0.8, "loss": 0.4}
    better = (low, high), (low, equal), (high, equal)
    for a, b in better:
        if not function(best_eval_result=a, current_eval_result=b):
            return False
        if function(best_eval_result=b, current_eval_result=a):
            return False
    return not function(best_eval_result=high, current_eval_result=dict(high))


def evaluates(function: Callable[..., Any]) -> bool:
    """Exercise 3, compared with times that were worked out by hand."""
    saved = list(range(10, 101, 10))
    cases = {
        (5, 0): saved,
        (24, 0): [10, 30, 50, 80, 100],
        (5, 37): [10, 40, 80, 100],
        (5, 600): [10, 100],
        (300, 0): [10, 100],
    }
    return all(list(function(saved, *case)) == cases[case] for case in cases)


def outlives_the_chief(found: dict[str, Any]) -> bool:
    """Exercise 4: exit codes, and the records of both tasks."""
    codes = found["codes"]
    if not codes["chief:0"][:1] == [-9]:
        raise ValueError("the chief was not killed")
    rows = [row for row in found["records"] if "evaluated" in row]
    steps = [row["evaluated"] for row in rows]
    (marks,) = (row["trained"] for row in found["records"] if "trained" in row)
    again = marks[0][0]  # The chief's second life.
    return (
        codes["chief:0"][1:] == [0]
        and set(codes["evaluator:0"]) <= {0}
        and rows[0]["from"] < again < rows[-1]["from"]
        and steps == sorted(set(steps))
        and steps[-1] == marks[-1][1]
    )


EXERCISES = {
    1: Exercise(
        (
            "Go through the steps in order, and note each result that is "
            "better than all before it. Is an equal one better?",
            "`exports_to_keep` says how many of the exports stay: the newest.",
        ),
        digest="9e26c8434d2253ed15888c8f4e2bd952",
    ),
    2: Exercise(
        (
            "It is called by name, as in TF1: the arguments are "
            "`best_eval_result` and `current_eval_result`, two dictionaries.",
            "Tuples are compared from the left: put the AUC first, then the "
            "loss with its sign changed, so that larger is better in both.",
        ),
        is_right=prefers_auc,
    ),
    3: Exercise(
        (
            "Go from the start of one evaluation to the start of the next; "
            "which is the newest checkpoint at that moment?",
            "The next start is the latest of three times: the evaluator is "
            "idle, the throttle allows it, there is a new checkpoint. At or "
            "after the last checkpoint the throttle does not count.",
        ),
        is_right=evaluates,
    ),
    4: Exercise(
        (
            "Take the cell of this notebook that kills the evaluator, and "
            "change whom it kills. `restart_secs` starts the chief again.",
            "`tasks.exit_codes()` is the first part. The second is "
            "`course.records` of both tasks' outputs, one after the other. "
            "Wait for more evaluations after the death, then touch the file "
            "`stop`.",
        ),
        is_right=outlives_the_chief,
    ),
    5: Exercise(
        (
            "How much of the day would the chief spend on evaluations, if it "
            "evaluated every checkpoint itself?",
            "Say which checkpoints an evaluator would see, how many must be "
            "kept until it has read them, and which exporter keeps the best. "
            "Write at least 25 words.",
        ),
    ),
}

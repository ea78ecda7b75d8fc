"""Exercises of lesson 3, partitioned variables and embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exercises import Exercise
from tfdist.placement.strategies import traffic_load_fn
from tfdist.placement.variables import VariableSpec


def of_one_more_server(
    answer: tuple[Sequence[str], Sequence[Mapping[str, float]]],
) -> bool:
    """Exercise 4: the tasks, and bytes that fit the tables."""
    tasks, records = answer
    moved = {(row["kind"], row["rows"]): row["bytes"] for row in records}
    size = max(rows for _, rows in moved)
    whole = VariableSpec("table", (size, 16))
    rows = VariableSpec("table", (size, 16), rows_per_step=64 * 4)
    least = traffic_load_fn(rows)
    return (
        len(moved) == 6
        and sum(name.startswith("ps:") for name in tasks) == 3
        and moved["whole", size] > 0.5 * traffic_load_fn(whole)
        and least < moved["rows", size] < 2 * least
    )


EXERCISES = {
    1: Exercise(
        (
            "How long is the first shard? A billion is not divisible by three.",
            "The cell that cuts the slide's table prints the shapes of the "
            "parts. Add up the first two: which is the last row of shard 1?",
        ),
        digest="1bed0ce52f05ea36c361a3e781451204",
    ),
    2: Exercise(
        (
            "Only different rows move, each of them once in each direction.",
            "The number of different rows, times the bytes of a row and its "
            "id, times two.",
        ),
        digest="d7c7e42b4a43953a5db52241229fdba6",
    ),
    3: Exercise(
        (
            "A slot is as large as the table.",
            "Add up the weights and both slots, in GB; divide by what a "
            "server holds. A part of a server is a server.",
        ),
        digest="29208cd414be949b5c484a57cc438555",
    ),
    4: Exercise(
        (
            "The cell above that starts `jobs/tables.py` says how many "
            "servers there are.",
            "Take `rows` of that cell as they are; only `ps` differs. The "
            "first part of the answer is `sorted(tasks.exit_codes())`.",
        ),
        is_right=of_one_more_server,
    ),
    5: Exercise(
        (
            "How many items share a row with another, when there are as many "
            "rows as items? And later?",
            "Weigh simplicity, collisions, new items and old ones. Then say "
            "what the alternatives cost: a larger table, or one that grows. "
            "Write at least 25 words.",
        ),
    ),
}

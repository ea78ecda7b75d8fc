"""Exercises of lesson 2, device placement."""

from __future__ import annotations

from collections.abc import Sequence

import tfdist
from exercises import Exercise
from tfdist.placement.planner import plan, simulate
from tfdist.placement.variables import VariableSpec


def fools_greedy(shapes: Sequence[Sequence[int]]) -> bool:
    """Exercise 2: greedy against the plan, on three servers."""
    specs = [
        VariableSpec(f"v{i}", tuple(shape)) for i, shape in enumerate(shapes)
    ]
    strategy = tfdist.GreedyLoadBalancingStrategy(3, tfdist.byte_size_load_fn)
    largest = max(simulate(specs, 3, strategy).byte_loads)
    best = max(plan(specs, 3).byte_loads)
    return len(specs) <= 7 and abs(largest / best - 5 / 3) < 0.01


EXERCISES = {
    1: Exercise(
        (
            "Greedy weighs again after each variable.",
            "Write down the bytes of each: four for each number. Keep two "
            "sums, and always add to the smaller one; ps 0 when they are "
            "equal.",
        ),
        digest="4403ca3fa1a41235cd868819b3ccc77d",
    ),
    2: Exercise(
        (
            "The worst case for two servers is above: what comes last there?",
            "Fill all three servers evenly with small variables. Then let a "
            "large one come, as large as what a server would have held in the "
            "best placement of all.",
        ),
        is_right=fools_greedy,
    ),
    3: Exercise(
        (
            "Dividing all the bytes by 4 GB is not enough: a variable is in "
            "one piece.",
            "How many whole variables of 1.5 GB fit into 4 GB?",
        ),
        digest="9c77b8f2ff7a80dc1fc07ff3a085e7cc",
    ),
    4: Exercise(
        (
            "The lesson has the program that you need, and a cell that adds "
            "up what each server holds. Only the number of servers changes.",
            "For each placement add up `bytes` by `ps`, in the rows that have "
            "both, and take the largest of the three sums. Leave out the rows "
            "with `step_secs` and `limited`.",
        ),
        digest="4f9e575044a10ef149aa581d89b1b134",
    ),
    5: Exercise(
        (
            "A server is busy with what it sends. Is that what the plan has "
            "balanced?",
            "Think of tables of which only rows move, of rows that are asked "
            "for more often than others, and of the machine itself. For each "
            "say what you would look at. Write at least 25 words.",
        ),
    ),
}

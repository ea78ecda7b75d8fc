"""Exercises of lesson 1, from one device to a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

import tfdist
from exercises import Exercise


def is_the_third_server(text: str) -> bool:
    """Exercise 2: what tfdist reads in the text."""
    me = tfdist.Cluster.from_env({"TF_CONFIG": text})
    everybody = {
        address for job in me.tasks.values() for address in job.values()
    }
    return (
        (me.role, me.address) == ("ps", f"p{me.num_ps - 1}:2222")
        and (me.num_workers, me.num_ps) == (2, 3)
        and {f"{name}:2222" for name in ("c", "w0", "w1", "p0", "p1")}
        < everybody
        and len(everybody) == 6
    )


def combines(function: Callable[..., ArrayLike]) -> bool:
    """Exercise 3, on the gradients of a quadratic loss."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=[64, 5]), rng.normal(size=64)
    for cuts in [40, 60], [13, 38], [1, 2]:
        pieces = np.split(np.arange(64), cuts)
        gradients = [x[i].T @ y[i] / len(i) for i in pieces]
        found = function(gradients, [len(i) for i in pieces])
        if not np.allclose(found, x.T @ y / 64) or np.shape(found) != (5,):
            return False
    return True


def came_late(
    answer: tuple[str, Mapping[str, Sequence[int]]],
) -> bool:
    """Exercise 4: it was missed, then it ran until it was killed."""
    name, codes = answer
    started = [task for task, found in codes.items() if list(found) == [-9]]
    return (
        name.endswith("task:1")
        and name.split("/")[1] == "job:ps"
        and list(codes["chief:0"]) == [0]
        and sorted(started) == sorted(set(codes) - {"chief:0"})
        and len(started) == 3
    )


EXERCISES = {
    1: Exercise(
        (
            "Who leads where nobody is called chief?",
            "tfdist knows: `tfdist.Cluster.from_jobs(...).role`, with the "
            "cluster and the task of the question.",
        ),
        digest="26bf8ede3935285ad181f3ecd7b01dd2",
    ),
    2: Exercise(
        (
            'There are two parts, "cluster" and "task", as in the output of '
            "the cell above that prints a `TF_CONFIG`.",
            "The cluster lists three jobs, each a list of host:port. The task "
            "says the type of the job and an index, which counts from 0.",
        ),
        is_right=is_the_third_server,
    ),
    3: Exercise(
        (
            "A mean of means is not the mean, unless the parts are equal.",
            "Multiply each gradient by its number of examples; divide the sum "
            "by the number of all examples. The result has the shape of one "
            "gradient.",
        ),
        is_right=combines,
    ),
    4: Exercise(
        (
            "The cell above in which worker 0 is absent does most of it. What "
            "must be done between its last two lines?",
            "After `wait_for_line`, call `tasks.start('ps:1')` and "
            "`tasks.wait(timeout_secs=240)`. Leave the `with` block before you "
            "ask for `tasks.exit_codes()`: it kills what still runs, and the "
            "codes then show it.",
        ),
        is_right=came_late,
    ),
    5: Exercise(
        (
            "How many bytes does a worker move in a step, and how long does "
            "that take at 125 MB a second?",
            "Compare that time with the 20 ms of computation. Then count what "
            "the one server has to send when all four workers ask. Write at "
            "least 25 words.",
        ),
    ),
}

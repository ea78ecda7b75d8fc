"""Measures how long training is interrupted after a task is killed."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import recovery
from benchmarks.contest import Bench, Result


def run(bench: Bench) -> Iterator[Result]:
    """Kills one task of each kind in each round, with and without forks."""
    result = Result(
        "Recovery",
        "`tfdist launch` runs `trainer.task` on 2 ps and 2 workers; a ps, a "
        "worker and the chief are killed, one after the other. Seconds from "
        "the kill until each part of the recovery is complete, the last part "
        "being the first new step (of the killed worker, if it was a worker), "
        "with forked tasks and with `--no_fork`. Estimator's sessions recover "
        "as well; stock Keras 3 and `tf_keras` end with an error.",
    )
    runs = bench.turns(
        {
            "forked": lambda number: recovery.measure(),
            "spawned": lambda number: recovery.measure(launch=["--no_fork"]),
        },
        result,
    )
    for name, measured in runs.items():
        for kind in recovery.KINDS:
            for part in measured[0][kind] if measured else ():
                values = [each[kind][part] for each in measured]
                result.add(f"{kind}, {name}", part, "seconds", values)
    yield result

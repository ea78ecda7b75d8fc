"""Measures the AUC of asynchronous training by steps and by seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

from benchmarks import clicks
from benchmarks.contest import Bench, Measured, Result

_POINTS = 4


def run(bench: Bench) -> Iterator[Result]:
    """Compares one, two and four workers with a single process."""
    rows = 1_000 if bench.quick else 20_000
    result = Result(
        "Asynchronous convergence",
        f"Wide and deep with {rows:,} buckets, on 2 ps with 1, 2 and 4 workers "
        "and in one process: AUC on held-out examples after the same number "
        "of steps, and the seconds that the steps took. Each round has a "
        "different seed. Workers share the machine's cores.",
        curve=("seconds", "AUC"),
    )
    every = 50 if bench.quick else 1_000
    with tempfile.TemporaryDirectory() as data:
        clicks.write(data, rows, 50_000 if bench.quick else 1_000_000)
        case = {"rows": rows, "data": data, "every": every, "points": _POINTS}
        contenders = {"tfdist, one process": _contender(bench, case, 0)}
        for workers in (2,) if bench.quick else (1, 2, 4):
            name = f"tfdist, {workers} worker" + "s" * (workers > 1)
            contenders[name] = _contender(bench, case, workers)
        runs = bench.turns(contenders, result)
    for point in range(1, _POINTS + 1):
        step = point * every
        for name, measured in runs.items():
            for key, measure in (("auc", "AUC"), ("secs", "seconds")):
                values = [run[str(step)][key] for run in measured]
                result.add(f"after {step:,} steps", name, measure, values)
    yield result


def _contender(
    bench: Bench, case: Measured, workers: int
) -> Callable[[int], Measured]:
    return lambda number: bench.run(
        "benchmarks.contenders.convergence",
        {**case, "seed": number},
        ps=2 if workers else 0,
        workers=workers,
    )

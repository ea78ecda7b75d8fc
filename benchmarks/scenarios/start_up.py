"""Measures the seconds from the command to the end of the first step."""

from __future__ import annotations

import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator

from benchmarks import clicks, commands
from benchmarks.contest import Bench, Measured, Result, here

_MODULE = "benchmarks.contenders.wide_and_deep_"


def run(bench: Bench) -> Iterator[Result]:
    """Measures the start of a cluster, and imports in a single process."""
    result = Result(
        "Start-up",
        "`python -m tfdist.launch --ps=2 --workers=2` of a small wide and deep "
        "model, until the end of step 1, which has its own dispatch, and of "
        "step 100, after dispatches of many steps have been traced as well. "
        "For Estimator, 2 ps and two training tasks, where step 1 is the "
        "first after both have run one. Imports are timed in one process.",
    )
    with tempfile.TemporaryDirectory() as data:
        clicks.write(data, 1000, 20_000)
        case = {"data": data, "rows": 1000, "seed": 0}
        case |= {"warm": 1, "steps": 99}
        contenders = {
            "tfdist": lambda number: _launched(case),
            "tfdist, 4 shards of each table of 100,000 rows": lambda number: (
                _launched(case | {"rows": 100_000, "shards": 4})
            ),
            "TF 2.15.1 Estimator": lambda number: _estimator(bench, case),
            "import tensorflow": _importing("import tensorflow"),
            "import tfdist and all its names": _importing(
                "import tfdist; [getattr(tfdist, n) for n in tfdist.__all__]"
            ),
        }
        runs = bench.turns(contenders, result)
    for name, measured in runs.items():
        for key, measure in (
            ("first", "seconds"),
            ("hundredth", "seconds to step 100"),
        ):
            secs = [run[key] for run in measured if key in run]
            result.add("2 ps, 2 workers", name, measure, secs)
    yield result


def _launched(case: Measured) -> Measured:
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory, "output.json")
        told = {**case, "directory": directory, "output": str(output)}
        launch = ("-m", "tfdist.launch", "--ps=2", "--workers=2", "-m")
        start = time.monotonic()
        commands.run(here(*launch, f"{_MODULE}tfdist", json.dumps(told)))
        return _since(start, json.loads(output.read_text()))


def _estimator(bench: Bench, case: Measured) -> Measured:
    bench.environments.python("tf_2_15")  # Created before timing.
    start = time.monotonic()
    found = bench.run(
        f"{_MODULE}estimator", case, environment="tf_2_15", ps=2, workers=1
    )
    return _since(start, found)


def _since(start: float, window: Measured) -> Measured:
    """Returns times since `start`: all processes share the machine's clock."""
    first = window["began"] - start
    return {"first": first, "hundredth": first + window["secs"]}


def _importing(program: str) -> Callable[[int], Measured]:
    def measure(number: int) -> Measured:
        start = time.monotonic()
        commands.run(here("-c", program))
        return {"first": time.monotonic() - start}

    return measure

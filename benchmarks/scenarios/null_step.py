"""Measures steps without computation: only pulling and pushing variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import limits
from benchmarks.bars import COORDINATOR, TF1
from benchmarks.contest import Bench, Measured, Result
from benchmarks.ps_harness import DIM, IDS

_ROWS = (10_000, 100_000, 1_000_000, 10_000_000)
_MEGABYTES = (1, 10, 100)
# Keras pulls the whole table and its slot: larger ones take seconds per step.
_MOST_ROWS_OF_STOCK = 100_000
_ALONE = "limit: tfdist, one process"


def run(bench: Bench) -> Iterator[Result]:
    """Runs all cases on two workers, and the scalar also on one and four."""
    result = Result(
        "Null step",
        "After figure 6 of the TensorFlow paper (OSDI 2016): on 2 ps, 2 tasks "
        "train by pulling the variables of a step, computing (almost) nothing "
        "and pushing an update, with SGD or, for rows, Adagrad. tfdist uses "
        "its default number of steps per dispatch; the coordinator loop uses "
        "one, as in TensorFlow's guide. Rows are 32 of a table of width "
        f"{DIM}, half of which is on each server.",
    )
    secs = 0.2 if bench.quick else 4.0
    for workers in (2,) if bench.quick else (2, 1, 4):
        wanted = _cases(bench.quick) if workers == 2 else {"scalar": _SCALAR}
        runs = bench.turns(_contenders(bench, wanted, workers, secs), result)
        for name, measured in runs.items():
            for case in measured[0] if measured else ():
                if case == "wire":
                    continue
                told = case if workers == 2 else f"{case}, workers: {workers}"
                windows = [
                    {**each[case], "wire": each["wire"]} for each in measured
                ]
                result.add_steps(told, name, windows, 1)
                millis = [1e3 * w["secs"] / w["steps"] for w in windows]
                result.add(told, name, "ms per step", millis)
        yield result
    if not bench.only:
        _add_limits(result, bench, secs / 4)
        yield result


_SCALAR = {
    "model": "floats",
    "floats": 0,
    "optimizer": "sgd",
    "rows": 100,
    "batch": 4,
}


def _cases(quick: bool) -> dict[str, dict[str, Any]]:
    cases = {"scalar": _SCALAR}
    for size in (1,) if quick else _MEGABYTES:
        cases[f"dense, {size} MB"] = {
            **_SCALAR,
            "floats": size * 1_000_000 // 4 // 2,
        }
    for rows in _ROWS[:1] if quick else _ROWS:
        cases[f"32 of {rows:,} rows, Adagrad"] = {
            "model": "rows",
            "rows": rows,
            "batch": 32 // IDS,
            "optimizer": "adagrad",
        }
    cases["100 small variables"] = {
        **_SCALAR,
        "model": "variables",
    }
    return cases


def _contenders(
    bench: Bench, cases: dict[str, dict[str, Any]], workers: int, secs: float
) -> dict[str, Callable[[int], Measured]]:
    module = "benchmarks.contenders.null_step"
    told = {"cases": cases, "secs": secs}
    small = {
        name: case
        for name, case in cases.items()
        if case["rows"] <= _MOST_ROWS_OF_STOCK
    }

    by_tfdist = {**told, "who": "tfdist", "unrolled": None}

    def ours(number: int) -> Measured:
        return bench.run(module, by_tfdist, ps=2, workers=workers)

    def alone(number: int) -> Measured:
        return bench.run(module, by_tfdist)

    def stock(number: int) -> Measured:
        case = {**told, "cases": small, "who": "stock", "unrolled": 1}
        return bench.run(module, case, ps=2, workers=workers)

    def tf1(number: int) -> Measured:
        case = {**told, "trainers": workers}
        others = max(1, workers - 1)  # A cluster needs a worker.
        return bench.run(f"{module}_tf1", case, ps=2, workers=others)

    contenders = {"tfdist": ours, TF1: tf1, COORDINATOR: stock}
    # One process runs the same steps for any number of workers.
    return contenders | ({_ALONE: alone} if workers == 2 else {})


def _add_limits(result: Result, bench: Bench, secs: float) -> None:
    rounds, rate = range(bench.rounds), "steps per second"
    echoes = [limits.echoes_per_second(secs) for _ in rounds]
    result.add("scalar", "limit: gRPC echo in Python", rate, echoes)
    for size in (1,) if bench.quick else _MEGABYTES:
        # Each step moves the variables down and up.
        number = 2 * size * 1_000_000
        copies = [limits.copies_per_second(number, secs) for _ in rounds]
        result.add(f"dense, {size} MB", "limit: memory copy", rate, copies)

"""Measures how evenly each placement balances the load of the servers."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import placement
from benchmarks.contest import Bench, Result

_MODELS = ("VGG16", "DLRM, 26 tables", "wide and deep")
_SERVERS = (2, 8)


def run(bench: Bench) -> Iterator[Result]:
    """Places a skewed model and models with many and few tables."""
    result = Result(
        "Placement",
        "The largest load divided by the mean load, in bytes; 1 is even. The "
        "comparison is of loads because, on a few cores, skew hardly affects "
        "time. `python -m benchmarks.placement` has more models, and times.",
    )
    for model in _MODELS[2:] if bench.quick else _MODELS:
        variables = placement.MODELS[model]()
        for num_ps in _SERVERS:
            plans = placement.compare(variables, num_ps)
            for name, plan in plans.items():
                own = name not in ("round robin", "greedy")
                result.add(
                    f"{model} on {num_ps} ps",
                    f"tfdist, {name}" if own else name,
                    "largest over mean load",
                    [plan.imbalance],
                )
        yield result

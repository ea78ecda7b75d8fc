"""Compares tfdist and TensorFlow's alternatives on a wide and deep model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import clicks
from benchmarks.contest import Bench, Measured, Result

_MODULE = "benchmarks.contenders.wide_and_deep_"


def run(bench: Bench) -> Iterator[Result]:
    """Runs every contender on the same files, for each number of buckets."""
    result = Result(
        "Wide and deep",
        f"{len(clicks.FEATURES)} features, embeddings of width {clicks.DIM}, "
        f"a wide part over the same buckets, hidden layers {clicks.HIDDEN}, "
        f"batches of {clicks.BATCH}, 2 ps and two training tasks. tfdist and "
        "Estimator train the wide part with Ftrl and the rest with Adagrad; "
        "the others accept only one optimizer and use Adagrad. Estimator's "
        "chief is one of the training tasks; in the others, the chief "
        "coordinates two workers. Training computes no metrics but the loss. "
        "AUC is measured on held-out examples after the same number of steps. "
        "One process begins with single steps: its last ones are measured. "
        "Each round has a different seed.",
    )
    for rows in (1_000,) if bench.quick else (100_000, 1_000_000):
        with tempfile.TemporaryDirectory() as data:
            clicks.write(data, rows, 20_000 if bench.quick else 2_000_000)
            runs = bench.turns(_contenders(bench, rows, data), result)
        case = f"{rows:,} buckets"
        for name, measured in runs.items():
            result.add_steps(case, name, measured, clicks.BATCH)
            aucs = [run["auc"] for run in measured if "auc" in run]
            result.add(case, name, "AUC", aucs)
        yield result


def _contenders(
    bench: Bench, rows: int, data: str
) -> dict[str, Callable[[int], Measured]]:
    warm, steps = (100, 40) if bench.quick else (500, 3000)

    def contender(
        name: str,
        share: float = 1.0,
        cluster: tuple[int, int] = (2, 2),
        **options: Any,
    ) -> Callable[[int], Measured]:
        """Returns a contender that runs `share` of the steps on `cluster`."""
        ps, workers = cluster
        # One process runs single steps first.
        later = 0 if workers or bench.quick else 2000
        environment = options.pop("environment", "here")

        def measure(number: int) -> Measured:
            case = {
                "rows": rows,
                "data": data,
                "seed": number,
                "warm": max(5, int((warm + later) * share)),
                "steps": max(10, int((steps - later) * share)),
                **options,
            }
            return bench.run(
                _MODULE + name,
                case,
                environment=environment,
                ps=ps,
                workers=workers,
            )

        return measure

    # Stock Keras pulls whole tables: fewer steps for more rows save time.
    stock = 1.0 if bench.quick else 4_000 / rows
    return {
        "tfdist": contender("tfdist"),
        "tfdist, 20 steps per dispatch": contender(
            "tfdist", steps_per_dispatch=20
        ),
        "TF 2.15.1 Estimator": contender(
            "estimator", cluster=(2, 1), environment="tf_2_15"
        ),
        **{
            f"tf_keras fit, {k} steps per execution": contender(
                "tf_keras",
                share=1.0 if bench.quick else 1 / 3,
                environment="tf_keras",
                steps_per_execution=k,
            )
            for k in ((10,) if bench.quick else (1, 10, 50))
        },
        "Keras 3, ClusterCoordinator": contender("stock", share=stock),
        "limit: tfdist, one process": contender("tfdist", cluster=(0, 0)),
        "limit: one process, by hand": contender("by_hand", cluster=(0, 0)),
        "Keras 3 fit, one process": contender(
            "fit", cluster=(0, 0), share=stock
        ),
    }

"""Measures synchronous training with one to four replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.contenders import sync
from benchmarks.contest import Bench, Measured, Result


def run(bench: Bench) -> Iterator[Result]:
    """Runs every contender with each number of replicas."""
    result = Result(
        "Synchronous scaling",
        f"Three hidden layers of {sync.WIDTH}, batches of {sync.BATCH} per "
        "replica. tfdist and `tf_keras` run one process per replica, with "
        "all-reduce between them; `MirroredStrategy` uses logical CPUs in one "
        "process. Replicas share the machine's cores, so throughput cannot "
        "grow beyond one replica per core.",
    )
    for replicas in (2,) if bench.quick else (1, 2, 4):
        case = f"{replicas} replica" + "s" * (replicas > 1)
        runs = bench.turns(_contenders(bench, replicas), result)
        for name, measured in runs.items():
            result.add_steps(case, name, measured, sync.BATCH * replicas)
        yield result


def _contenders(
    bench: Bench, replicas: int
) -> dict[str, Callable[[int], Measured]]:
    warm, steps = (20, 20) if bench.quick else (200, 500)

    def contender(
        who: str, workers: int, environment: str = "here"
    ) -> Callable[[int], Measured]:
        case = {"who": who, "warm": warm, "steps": steps, "replicas": replicas}
        return lambda number: bench.run(
            "benchmarks.contenders.sync",
            case,
            workers=workers,
            environment=environment,
        )

    return {
        "tfdist, all-reduce": contender("tfdist", replicas - 1),
        "tf_keras fit, MultiWorkerMirroredStrategy": contender(
            "tf_keras", replicas - 1, "tf_keras"
        ),
        "Keras 3 fit, MirroredStrategy": contender("mirrored", 0),
    }

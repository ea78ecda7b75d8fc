"""Synchronous training with one to four replicas on the machine's cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.contenders import sync
from benchmarks.contest import Bench, Measured, Result


def run(bench: Bench) -> Iterator[Result]:
    """Every contender with each number of replicas."""
    result = Result(
        "Synchronous scaling",
        f"Three hidden layers of {sync.WIDTH}, batches of {sync.BATCH} for "
        "each replica. tfdist and `tf_keras` have a process for each replica "
        "and all-reduce between them, `MirroredStrategy` logical CPUs of one "
        "process. Replicas share the machine's cores, so that more examples "
        "per second are not to be had from more of them than it has cores.",
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

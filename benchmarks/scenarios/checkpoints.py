"""Measures the time and memory of saving and restoring a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks import limits
from benchmarks.contenders import checkpoint
from benchmarks.contest import Bench, Measured, Result
from benchmarks.ps_harness import DIM

_LOCAL = "limit: one process"


def run(bench: Bench) -> Iterator[Result]:
    """Measures one to three servers, and one process, for each table size."""
    result = Result(
        "Checkpoints",
        f"A table of width {DIM} in {checkpoint.SHARDS} shards, saved and "
        "restored by the chief, with 1 to 3 ps; and by `tf.train.Checkpoint`, "
        f"on 2 ps and in one process. Each run saves {checkpoint.SAVES} times "
        "(its value is the median) and restores once. Peak memory is that of "
        "whole processes, including TensorFlow.",
    )
    sizes = (1, 2) if bench.quick else (10, 160, 640)
    for megabytes in sizes:
        case = f"{megabytes} MB"

        def measure(
            who: str, ps: int, number: int, megabytes: int = megabytes
        ) -> Measured:
            return bench.run(
                "benchmarks.contenders.checkpoint",
                {"who": who, "rows": megabytes * 1_000_000 // 4 // DIM},
                ps=ps,
                workers=1 if ps else 0,
            )

        contenders = {
            f"tfdist, {ps} ps": functools.partial(measure, "tfdist", ps)
            for ps in ((2,) if bench.quick else (2, 1, 3))
        }
        contenders["tf.train.Checkpoint, 2 ps"] = functools.partial(
            measure, "tensorflow", 2
        )
        contenders[_LOCAL] = functools.partial(measure, "tensorflow", 0)
        for name, runs in bench.turns(contenders, result).items():
            for what, word in (("save", "saved"), ("restore", "restored")):
                rates = [megabytes / each[what] for each in runs]
                result.add(case, name, f"{word} MB per second", rates)
            if name != _LOCAL:
                _add_peaks(result, case, name, runs)
        copies = [
            limits.copies_per_second(megabytes * 1_000_000, 0.3) * megabytes
            for _ in range(bench.rounds)
        ]
        result.add(case, "limit: memory copy", "saved MB per second", copies)
        yield result


def _add_peaks(
    result: Result, case: str, name: str, runs: list[Measured]
) -> None:
    chiefs = [run["peaks"]["chief:0"] / 1e6 for run in runs]
    result.add(case, name, "chief's peak MB", chiefs)
    most = [
        max(n for task, n in run["peaks"].items() if task.startswith("ps"))
        for run in runs
    ]
    result.add(case, name, "a ps' peak MB", [n / 1e6 for n in most])

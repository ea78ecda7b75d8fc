"""Compares the readers of `tfdist.data` with hand-written pipelines."""

from __future__ import annotations

import pathlib
import tempfile
import time
from collections.abc import Iterator

import tensorflow as tf

from benchmarks import input_pipeline
from benchmarks.contest import Bench, Measured, Result


def run(bench: Bench) -> Iterator[Result]:
    """Measures each dataset of `benchmarks.input_pipeline` in this process."""
    result = Result(
        "Input pipeline",
        "Eight files of 40,000 examples with ten numbers, shuffled, repeated "
        f"and read in batches of {input_pipeline.BATCH} in one process; "
        "`plain` follows the tf.data guide.",
    )
    secs = 0.3 if bench.quick else 3.0
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        input_pipeline.write(directory)
        contenders = {
            pipeline: lambda number, dataset=dataset: _measure(dataset, secs)
            for pipeline, dataset in input_pipeline.pipelines(directory).items()
        }
        runs = bench.turns(contenders, result)
    for pipeline, measured in runs.items():
        kind, _, reader = pipeline.partition(", ")
        for measure in measured[0] if measured else ():
            values = [each[measure] for each in measured]
            result.add(kind, reader, measure, values)
    yield result


def _measure(dataset: tf.data.Dataset, secs: float) -> Measured:
    """Reads for `secs` seconds, after a warm-up of a third of that time."""
    batches = iter(dataset)
    for length in (secs / 3, secs):
        count = 0
        start, cpu = time.monotonic(), time.process_time()
        while (now := time.monotonic()) < start + length:
            next(batches)
            count += input_pipeline.BATCH
        used = time.process_time() - cpu
    return {
        "examples per second": count / (now - start),
        "CPU us per example": used / count * 1e6,
    }

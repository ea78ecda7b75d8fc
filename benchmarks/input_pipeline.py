"""Compares `tfdist.data.readers` with hand-written input pipelines.

    python -m benchmarks.input_pipeline [--rounds=5] [--seconds=3]

Eight files of 40,000 examples with ten numbers, as CSV and as TFRecord, batches
of 256, shuffled with a buffer of 10,000, repeated. `plain` follows the tf.data
guide: interleaved files, a shuffle buffer, batches parsed by a parallel map,
prefetching. `TF's own` is `make_csv_dataset` or
`make_batched_features_dataset`. The pipelines take turns. Prints the median and
the range of the examples per second, and the CPU time per example.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

import benchmarks.ps_harness as harness
from tfdist.data import readers

FILES, ROWS, COLUMNS, BATCH = 8, 40_000, 10, 256
NAMES = [f"c{i}" for i in range(COLUMNS)]
FEATURES = {name: tf.io.FixedLenFeature([], tf.float32) for name in NAMES}


def write(directory: pathlib.Path) -> None:
    """Writes the same numbers in both formats."""
    rng = np.random.default_rng(0)
    for number in range(FILES):
        table = rng.integers(0, 100_000, (ROWS, COLUMNS))
        np.savetxt(
            directory / f"{number}.csv",
            table,
            fmt="%.1f",
            delimiter=",",
            header=",".join(NAMES),
            comments="",
        )
        path = str(directory / f"{number}.tfrecord")
        with tf.io.TFRecordWriter(path) as writer:
            for row in table.tolist():
                writer.write(_example(row))


def _example(row: list[float]) -> bytes:
    feature = {
        name: tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
        for name, value in zip(NAMES, row, strict=True)
    }
    features = tf.train.Features(feature=feature)
    return tf.train.Example(features=features).SerializeToString()


def _plain(
    pattern: str,
    read: Callable[[tf.Tensor], tf.data.Dataset],
    parse: Callable[[tf.Tensor], dict[str, tf.Tensor]],
) -> tf.data.Dataset:
    return (
        tf.data.Dataset.list_files(pattern, shuffle=True)
        .interleave(
            read, cycle_length=FILES, num_parallel_calls=tf.data.AUTOTUNE
        )
        .shuffle(10_000)
        .repeat()
        .batch(BATCH, drop_remainder=True)
        .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )


def pipelines(directory: pathlib.Path) -> dict[str, tf.data.Dataset]:
    """The datasets to compare, by format and name."""
    csv, records = str(directory / "*.csv"), str(directory / "*.tfrecord")
    defaults = [0.0] * COLUMNS

    def decode(lines: tf.Tensor) -> dict[str, tf.Tensor]:
        columns = tf.io.decode_csv(lines, defaults)
        return dict(zip(NAMES, columns, strict=True))

    return {
        "CSV, plain": _plain(
            csv, lambda path: tf.data.TextLineDataset(path).skip(1), decode
        ),
        "CSV, TF's own": tf.data.experimental.make_csv_dataset(
            csv, BATCH, column_defaults=defaults, num_parallel_reads=FILES
        ),
        "CSV, tfdist": readers.read_csv(csv, BATCH, column_defaults=defaults),
        "TFRecord, plain": _plain(
            records,
            tf.data.TFRecordDataset,
            lambda batch: tf.io.parse_example(batch, FEATURES),
        ),
        "TFRecord, TF's own": (
            tf.data.experimental.make_batched_features_dataset(
                records, BATCH, FEATURES, reader_num_threads=FILES
            )
        ),
        "TFRecord, tfdist": readers.read_tfrecords(records, FEATURES, BATCH),
    }


def _rate(batches: Iterator, seconds: float) -> tuple[float, float]:
    """Thousands of examples per second, CPU microseconds per example."""
    number = 0
    start, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < start + seconds:
        for _ in range(20):
            next(batches)
        number += 20 * BATCH
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return number / wall / 1e3, cpu / number * 1e6


def main() -> None:
    """Prints a row for each pipeline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        write(directory)
        found = {name: [] for name in pipelines(directory)}
        for _ in range(args.rounds):
            for name, dataset in pipelines(directory).items():
                # Only the one that is measured has an iterator.
                batches = iter(dataset)
                _rate(batches, args.seconds / 3)
                found[name].append(_rate(batches, args.seconds))
                del batches
    print("pipeline             thousand examples/s    CPU us/example")
    for name, results in found.items():
        rates, cpu = zip(*results, strict=True)
        print(
            f"{name:<20} {harness.median_and_range(list(rates)):>20} "
            f"{statistics.median(cpu):>14.2f}"
        )


if __name__ == "__main__":
    main()

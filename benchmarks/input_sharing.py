"""How much of a batch two workers share at the same step, and how to avoid it.

    python -m benchmarks.input_sharing [--picture=input_sharing.png]

Workers that all load the same files see the same batch at the same time and
compute the same gradients, however well the files are shuffled. Measures the
largest share of a batch that two workers read at the same step, for 1 to 16
files and 2 to 4 workers, whose index is a number (all-reduce) or a tensor
(parameter servers): with a pipeline from the tf.data guide, seeded equally in
all processes, and with `tfdist.read_tfrecords`. Prints a table and draws a
picture. Takes a few minutes and needs no cluster.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import pathlib
import tempfile
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.data import audit, readers

NUM_FILES = (1, 2, 4, 8, 16)
NUM_WORKERS = (2, 3, 4)
STRATEGIES = {"all-reduce": False, "parameter servers": True}
EXAMPLES, BATCH, BUFFER = 1920, 32, 500
FEATURES = {"x": tf.io.FixedLenFeature([], tf.int64)}
# Blue and vermilion of Okabe and Ito: told apart by everyone.
COLORS = {"plain tf.data": "#D55E00", "tfdist": "#0072B2"}

# By pipeline, strategy and workers: the share for each number of files.
Shares = dict[tuple[str, str, int], list[float]]
InputFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]


def write(directory: pathlib.Path, num_files: int) -> list[str]:
    """Writes numbered examples to so many files."""
    paths = []
    for part, numbers in enumerate(np.split(np.arange(EXAMPLES), num_files)):
        paths.append(str(directory / f"{part:02}-of-{num_files}.tfrecord"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for number in numbers.tolist():
                values = tf.train.Int64List(value=[number])
                feature = {"x": tf.train.Feature(int64_list=values)}
                features = tf.train.Features(feature=feature)
                example = tf.train.Example(features=features)
                writer.write(example.SerializeToString())
    return paths


def pipelines(paths: list[str]) -> dict[str, InputFn]:
    """One pass over the files, as a user writes it and by tfdist."""

    def plain(context: tf.distribute.InputContext) -> tf.data.Dataset:
        del context  # Nothing in the pipeline asks who reads.
        return (
            tf.data.Dataset.from_tensor_slices(paths)
            .shuffle(len(paths))
            .interleave(tf.data.TFRecordDataset, cycle_length=len(paths))
            .shuffle(BUFFER)
            .batch(BATCH)
            .map(lambda batch: tf.io.parse_example(batch, FEATURES))
        )

    def ours(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return readers.read_tfrecords(
            paths,
            FEATURES,
            BATCH,
            context=context,
            num_epochs=1,
            shuffle_buffer_size=BUFFER,
        )

    return {"plain tf.data": plain, "tfdist": ours}


def measure(
    input_fn: InputFn, num_workers: int, index_as_tensor: bool
) -> tuple[float, int]:
    """Largest share of two workers at a step, and examples nobody reads."""
    found = audit.audit(
        input_fn, num_workers, index_as_tensor=index_as_tensor, seed=7
    )
    pairs = found.at_the_same_step[~np.eye(num_workers, dtype=bool)]
    return float(pairs.max()), len(found.unread)


def draw(shares: Shares, title: str, path: str) -> None:
    """One panel for a strategy, one line for a pipeline and workers."""
    from matplotlib.figure import Figure

    figure = Figure((9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(STRATEGIES), sharey=True)
    styles = dict(zip(NUM_WORKERS, ("o-", "s--", "^:"), strict=True))
    for axes, strategy in zip(panels, STRATEGIES, strict=True):
        for (name, kind, workers), values in shares.items():
            if kind == strategy:
                axes.plot(
                    range(len(NUM_FILES)),
                    [100 * value for value in values],
                    styles[workers],
                    color=COLORS[name],
                    label=f"{name}, {workers} workers",
                    fillstyle="none",
                    markersize=4 + 3 * NUM_WORKERS.index(workers),
                )
        axes.set_xticks(range(len(NUM_FILES)), NUM_FILES)
        axes.set(title=strategy, xlabel="files", ylim=(-5, 108))
    panels[0].set_ylabel("% of a batch that two workers\nread at the same step")
    panels[-1].legend(loc="center right", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def finding(shares: Shares, unread: int) -> str:
    """What the picture shows, from the numbers in it."""
    plain, ours = (
        [
            v
            for (name, *_), values in shares.items()
            if name == k
            for v in values
        ]
        for k in COLORS
    )
    return (
        f"Workers that read the same files share {_range(plain)} of each "
        f"batch;\nwith tfdist {_range(ours)}, and {unread or 'no'} example is "
        "left unread"
    )


def _range(values: list[float]) -> str:
    """From the least to the largest; one number if they are equal."""
    shown = dict.fromkeys(
        f"{value:.0%}" for value in (min(values), max(values))
    )
    return " to ".join(shown)


def main() -> None:
    """Prints a row for each case and draws all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", default="input_sharing.png")
    args = parser.parse_args()
    shares: Shares = {}
    unread = collections.Counter()
    print("pipeline       strategy           workers  files  shared  unread")
    cases = list(itertools.product(STRATEGIES.items(), NUM_WORKERS))
    with tempfile.TemporaryDirectory() as directory:
        for num_files in NUM_FILES:
            paths = write(pathlib.Path(directory), num_files)
            for name, input_fn in pipelines(paths).items():
                for (strategy, as_tensor), workers in cases:
                    share, missing = measure(input_fn, workers, as_tensor)
                    key = name, strategy, workers
                    shares.setdefault(key, []).append(share)
                    unread[name] += missing
                    print(
                        f"{name:<14} {strategy:<18} {workers:>7} "
                        f"{num_files:>6} {share:>7.0%} {missing:>7}",
                        flush=True,
                    )
    title = finding(shares, unread["tfdist"])
    draw(shares, title, args.picture)
    print(f"{title}. Drawn in {args.picture}.")


if __name__ == "__main__":
    main()

"""Trains tables of several sizes, and says what a step costs and moves.

Usage: tables.py MODEL_DIR, as every task of a cluster with ps.
"""

import os
import re
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from meters import Meter

import tfdist
from tfdist.cluster import servers
from tfdist.hooks.session_run_hook import SessionRunValues

STEPS = 40


def model_fn(kind: str, rows: int) -> keras.Model:
    """Looks four ids up in a table of `(rows, 16)`; predicts one number."""
    if kind == "whole":
        table = keras.layers.Embedding(rows, 16)
    else:
        table = tfdist.PartitionedEmbedding(rows, 16, num_shards=2)
    model = keras.Sequential(
        [
            keras.Input([4], dtype="int64"),
            table,
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def input_fn(rows: int) -> tf.data.Dataset:
    """Batches of 64 times four random ids, without end."""
    ids = tf.data.Dataset.random(seed=1).map(lambda seed: batch(seed, rows))
    return ids.prefetch(2)


def batch(seed: tf.Tensor, rows: int) -> tuple[tf.Tensor, tf.Tensor]:
    """One batch."""
    pair = tf.stack([seed, 0])
    ids = tf.random.stateless_uniform([64, 4], pair, 0, rows, tf.int64)
    return ids, tf.ones([64, 1])


def moved() -> int:
    """Bytes that all tasks have sent to each other in their network."""
    text = Path("/proc/self/net/dev").read_text()
    return int(re.search(r"lo:\s*(\d+)", text)[1])


class Cost(Meter):
    """Measures what a step costs and moves."""

    def measured(self, run_values: SessionRunValues) -> tuple[float]:
        """The bytes."""
        return (moved(),)

    def found(self, session: tfdist.MonitoredTrainingSession) -> dict:
        """Of a step."""
        return dict(zip(("secs", "bytes"), self.per_step(), strict=True))


def main(directory: str) -> None:
    """Serves; on the chief, trains each table for some steps."""
    cluster = tfdist.Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    for kind in ("whole", "rows"):
        for rows in (1_000, 30_000, 1_000_000):
            estimator = tfdist.Estimator(
                lambda kind=kind, rows=rows: model_fn(kind, rows),
                tfdist.RunConfig(
                    os.path.join(directory, f"{kind}_{rows}"),
                    save_checkpoints_secs=0,
                    steps_per_dispatch=1,
                    audit_input=False,
                ),
            )
            estimator.train(
                lambda rows=rows: input_fn(rows),
                max_steps=STEPS,
                hooks=[Cost(10, kind=kind, rows=rows)],
            )
    servers.release(cluster)


if __name__ == "__main__":
    main(sys.argv[1])

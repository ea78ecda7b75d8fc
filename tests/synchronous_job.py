"""The program of every task in tests/training/test_synchronous.py.

    python -m tests.synchronous_job --model_dir=DIRECTORY [--max_steps=...]

Worker w has batches of 8 + 4 w examples of its own. With `--count` the model is
a table of zeros, from which each step takes one in all, whatever is in its
global batch.
"""

import argparse
import logging

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import seeded
from tests.recovery_job import slept

ROWS, LIMIT = 50, 10**6


def model_fn():
    x = keras.Input([4], name="x")
    ids = keras.Input([3], dtype="int64", name="ids")
    rows = tfdist.PartitionedEmbedding(ROWS, 4, num_shards=3, name="table")(ids)
    both = keras.ops.concatenate([keras.layers.Flatten()(rows), x], axis=-1)
    hidden = keras.layers.Dense(16, "tanh", kernel_regularizer="l2")(both)
    model = keras.Model({"x": x, "ids": ids}, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def counting_model_fn():
    x = keras.Input([4], name="x")
    ids = keras.Input([3], dtype="int64", name="ids")
    rows = tfdist.PartitionedEmbedding(
        ROWS, 1, num_shards=3, embeddings_initializer="zeros", name="table"
    )(ids)
    mean = keras.ops.mean(rows, axis=1)
    model = keras.Model({"x": x, "ids": ids}, mean)
    model.compile(keras.optimizers.SGD(1.0), lambda y, rows: rows[:, 0])
    return model


def batch(worker, i):
    """Batch number i of a worker."""
    seed = tf.stack([tf.cast(worker, tf.int64), i])
    size = 8 + 4 * tf.cast(worker, tf.int32)
    x = tf.random.stateless_normal([size, 4], seed)
    ids = tf.random.stateless_uniform([size, 3], seed, 0, ROWS, tf.int64)
    return {"x": x, "ids": ids}, tf.reduce_sum(x, 1, keepdims=True)


def input_fn(args, context):
    """Of a worker; number w has `args.batches - 2 w` batches."""
    worker = tf.cast(context.input_pipeline_id, tf.int64)
    num = args.batches - 2 * worker
    batches = tf.data.Dataset.range(num).map(lambda i: batch(worker, i))
    last = worker == context.num_input_pipelines - 1
    secs = tf.where(last, args.slow_secs, 0.0) + args.step_secs
    batches = slept(batches, tf.cast(1e6 * secs, tf.int64))
    if args.batches == LIMIT:
        infinite = tf.data.INFINITE_CARDINALITY
        return batches.apply(tf.data.experimental.assert_cardinality(infinite))
    return batches


class Losses(tfdist.SessionRunHook):
    """Prints the loss of each step."""

    def steps_until_next(self, step):
        return 1

    def after_run(self, run_context, run_values):
        print("loss", run_values.results["loss"], flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--batches", type=int, default=LIMIT)
    parser.add_argument("--backup_workers", type=int)
    parser.add_argument("--max_staleness", type=int)
    parser.add_argument("--slow_secs", type=float, default=0.0)
    parser.add_argument("--step_secs", type=float, default=0.0)
    parser.add_argument("--count", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    cluster = tfdist.Cluster.from_env()
    if cluster.role != "chief":
        tfdist.cluster.serve(cluster)
        return
    config = tfdist.RunConfig(
        args.model_dir,
        save_checkpoints_steps=100,
        log_step_count_steps=10,
        backup_workers=args.backup_workers,
        max_staleness=args.max_staleness,
        session_creation_timeout_secs=60.0,
    )
    function = counting_model_fn if args.count else model_fn
    tfdist.Estimator(lambda: seeded(function), config).train(
        lambda context: input_fn(args, context),
        hooks=[] if args.count else [Losses()],
        max_steps=args.max_steps,
    )


def in_one_process(num_workers, num_batches, max_steps):
    """Keras' own steps on the global batches: losses and the model."""
    model, losses = seeded(model_fn), []
    for i in range(max_steps):
        able = [w for w in range(num_workers) if i < num_batches - 2 * w]
        if not able:
            break
        parts = [batch(w, tf.constant(i, tf.int64)) for w in able]
        x, y = tf.nest.map_structure(lambda *t: np.concatenate(t), *parts)
        model.reset_metrics()
        losses.append(model.train_on_batch(x, y)[0])
    return losses, model


if __name__ == "__main__":
    main()

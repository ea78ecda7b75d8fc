"""The program of every task in test_recovery.py and test_soak.py.

    python -m tests.recovery_job --model_dir=DIRECTORY [--max_steps=...]

Trains a small model, with a table on every parameter server and a dense part,
on endless input at a fixed pace, so that a fault can be caused at a given
step.
"""

import argparse
import logging
import os
import threading
import time

import keras
import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
from notebooks.jobs import paced
from tfdist.cluster import servers
from tfdist.cluster.connections import cut_connections
from tfdist.cluster.spec import Cluster

BATCH, FEATURES, IDS, ROWS = 32, 4, 3, 200
INFINITE = tf.data.INFINITE_CARDINALITY
# A file in `model_dir`: the test has seen enough, and the job may hurry.
HURRY = "hurry"


def model_fn(dynamic=False, words=False):
    x = keras.Input([FEATURES], name="x")
    ids = keras.Input([IDS], dtype="int32", name="ids")
    table = tfdist.PartitionedEmbedding(ROWS, 8, num_shards=2)
    if dynamic:
        table = tfdist.DynamicEmbedding(8, capacity=8192, num_shards=2)
    places = ids
    if words:  # By a lookup table, which is not TensorFlow's variable.
        vocabulary = list(range(ROWS))
        places = keras.layers.IntegerLookup(
            vocabulary=vocabulary, num_oov_indices=0
        )(ids)
    rows = table(places)
    both = keras.ops.concatenate([keras.layers.Flatten()(rows), x], axis=-1)
    hidden = keras.layers.Dense(16, "relu")(both)
    output = keras.layers.Dense(1, "sigmoid")(hidden)
    model = keras.Model({"x": x, "ids": ids}, output)
    model.compile(
        keras.optimizers.Adagrad(0.1), "binary_crossentropy", metrics=["auc"]
    )
    return model


def examples(size, seed):
    """`size` examples of a known model, with noise."""
    seeds = tf.random.split(seed, 3)
    x = tf.random.stateless_normal([size, FEATURES], seeds[0])
    ids = tf.random.stateless_uniform([size, IDS], seeds[1], 0, ROWS, tf.int32)
    logits = tf.reduce_sum(2 * tf.sin(7.0 * tf.cast(ids, tf.float32)), 1)
    logits += tf.reduce_sum(x, axis=1)
    noise = tf.random.stateless_uniform([size], seeds[2])
    y = tf.cast(noise < tf.sigmoid(logits), tf.float32)
    return {"x": x, "ids": ids}, y[:, None]


def input_fn(args, context):
    """A worker's input: different examples in every life of the worker."""
    worker = tf.cast(context.input_pipeline_id, tf.int64)
    if args.dealt:
        print(f"Dealt to {context.num_input_pipelines}.", flush=True)

    def batch(i, seed):
        mine = worker == 0
        secs = tf.where(mine & (i == args.long_at), args.long_secs, 0.0)
        with tf.control_dependencies([compute(secs)]):
            features, y = examples(BATCH, tf.stack([seed, worker]))
        nan = tf.where(mine & (i == args.nan_at), float("nan"), 0.0)
        beyond = tf.where(mine & (i == args.bad_id_at), ROWS, 0)
        return {**features, "ids": features["ids"] + beyond}, y + nan

    dataset = tf.data.Dataset.counter()
    dataset = tf.data.Dataset.zip(dataset, tf.data.Dataset.random()).map(batch)
    factor = tf.where(worker == args.slow_worker, args.slow_factor, 1)
    pace = tf.cast(args.step_secs * 1e6, tf.int64) * tf.cast(factor, tf.int64)
    return slept(dataset, pace, f"{args.model_dir}/{HURRY}").apply(
        tf.data.experimental.assert_cardinality(INFINITE)
    )


def compute(secs):
    """Keeps a core busy for so many seconds."""
    end = tf.timestamp() + tf.cast(secs, tf.float64)
    return tf.while_loop(
        lambda _: tf.timestamp() < end,
        lambda a: [tf.nn.l2_normalize(a @ a, axis=1)],
        [tf.ones([200, 200])],
    )


def slept(dataset, microseconds, hurry=None):
    """`dataset`, which sleeps before each element; until a file `hurry` is."""
    pace = paced.pauses(microseconds)
    if hurry:
        often = tf.data.Dataset.from_tensors(0).repeat()
        which = often.map(
            lambda _: tf.size(tf.io.matching_files(hurry), tf.int64)
        )
        pace = tf.data.Dataset.choose_from_datasets([pace, often], which)
    return tf.data.Dataset.zip(pace, dataset).map(lambda _, batch: batch)


def eval_input_fn():
    features, y = examples(4096, [1, 2])
    return tf.data.Dataset.from_tensor_slices((features, y)).batch(512)


def cut_when_told(path):
    """Cuts this task's connections to the servers once a file appears."""
    while not os.path.exists(path):
        time.sleep(0.05)
    servers = Cluster.from_env().training_spec()["ps"].values()
    cut = sum(cut_connections(address) for address in servers)
    print(f"Cut {cut} connections.", flush=True)


class UserHook(tfdist.SessionRunHook):
    """What a user wrote, with a mistake in it."""

    def __init__(self, raise_at):
        self._raise_at = raise_at

    def steps_until_next(self, step):
        return None

    def after_run(self, run_context, run_values):
        if run_context.session.step >= self._raise_at:
            raise LookupError("A mistake of the user's.")


class FunctionsHook(tfdist.SessionRunHook):
    """Says how many functions are traced, whenever there are more."""

    def __init__(self):
        self._known = 0

    def steps_until_next(self, step):
        return None

    def after_run(self, run_context, run_values):
        traced = len(context.context().list_function_names())
        if traced > self._known:
            print(f"{traced} functions are traced.", flush=True)
        self._known = traced


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=1_000_000)
    parser.add_argument("--save_steps", type=int, default=100)
    parser.add_argument("--wait_secs", type=float, default=60.0)
    parser.add_argument("--steps_per_dispatch", type=int)
    # Seconds of a step, and how much longer those of one worker are.
    parser.add_argument("--step_secs", type=float, default=0.02)
    parser.add_argument("--slow_worker", type=int, default=-1)
    parser.add_argument("--slow_factor", type=int, default=10)
    # Batches of worker 0, counted from its start, that are special: one that
    # takes long to compute, one of NaNs, one with ids beyond the table.
    parser.add_argument("--long_at", type=int, default=-1)
    parser.add_argument("--long_secs", type=float, default=0.0)
    parser.add_argument("--nan_at", type=int, default=-1)
    parser.add_argument("--bad_id_at", type=int, default=-1)
    # Connections after which servers start themselves anew.
    parser.add_argument("--most_connections", type=int)
    # File that tells the workers to lose their connections to the servers.
    parser.add_argument("--cut_when")
    # Whether what a worker reads depends on their number.
    parser.add_argument("--dealt", action="store_true")
    parser.add_argument("--backup_workers", type=int)
    # Whether the table gives ids their rows as they come.
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--words", action="store_true")
    # Step at which a hook raises.
    parser.add_argument("--raise_at", type=int)
    return parser.parse_args()


def main():
    args = flags()
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    config = tfdist.RunConfig(
        args.model_dir,
        save_checkpoints_steps=args.save_steps,
        log_step_count_steps=10,
        steps_per_dispatch=args.steps_per_dispatch,
        backup_workers=args.backup_workers,
        session_creation_timeout_secs=args.wait_secs,
    )
    if args.cut_when and Cluster.from_env().task_type == "worker":
        threading.Thread(
            target=cut_when_told, args=[args.cut_when], daemon=True
        ).start()
    if args.most_connections:
        servers._MOST_CONNECTIONS = args.most_connections
    hooks = [FunctionsHook()]
    if args.raise_at is not None:
        hooks.append(UserHook(args.raise_at))
    tfdist.train_and_evaluate(
        tfdist.Estimator(lambda: model_fn(args.dynamic, args.words), config),
        tfdist.TrainSpec(
            lambda pipeline: input_fn(args, pipeline), args.max_steps, hooks
        ),
        tfdist.EvalSpec(eval_input_fn, steps=None, throttle_secs=3600),
    )


if __name__ == "__main__":
    main()

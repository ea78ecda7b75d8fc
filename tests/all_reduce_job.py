"""The program of every process in test_all_reduce.py.

    python -m tests.all_reduce_job --model_dir=DIRECTORY [--max_steps=...]

A small model with tables, dropout and batch normalization, on an input whose
order is shuffled and whose every example differs: any step that is repeated or
left out shows in the weights. Each process prints a digest of its own weights
at the end.
"""

import argparse
import functools
import hashlib
import logging
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.recovery_job import HURRY
from tfdist.cluster.peers import Peers

ROWS = 50


def model_fn(args):
    x = keras.Input([4], name="x")
    ids = keras.Input([3], dtype="int64", name="ids")
    rows = tfdist.PartitionedEmbedding(ROWS, 8, num_shards=2)(ids)
    both = keras.ops.concatenate([keras.layers.Flatten()(rows), x], axis=-1)
    cluster = tfdist.Cluster.from_env()
    name = f"{cluster.task_type}:{cluster.task_index}"
    if name == args.fails:
        if args.by_error:  # One that a lost process would raise, too.
            raise tf.errors.UnavailableError(None, None, "503 of a storage")
        tf.io.read_file("no_vocabulary.txt")
    ours, other = (16, 0.01, 0.9), (17, 0.02, 0.8)
    units, rate, beta_1 = other if name == args.stranger else ours
    hidden = keras.layers.Dense(units, "relu")(both)
    if not args.plain:
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Dropout(0.2)(hidden)
    output = keras.layers.Dense(1, "sigmoid")(hidden)
    model = keras.Model({"x": x, "ids": ids}, output)
    model.compile(
        keras.optimizers.Adam(rate, beta_1),
        "binary_crossentropy",
        metrics=["auc"],
    )
    return model


def examples(size=512):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[size, 4]).astype("float32")
    ids = rng.integers(0, ROWS, [size, 3])
    y = (x.sum(1) + np.sin(ids).sum(1) > 0).astype("float32")
    return {"x": x, "ids": ids}, y[:, None]


def global_batches(args):
    """The same everywhere; each process takes its share of every batch."""
    dataset = tf.data.Dataset.from_tensor_slices(examples())
    if args.shards_itself:
        cluster = tfdist.Cluster.from_env()
        is_worker = cluster.task_type == "worker"
        dataset = dataset.shard(3, cluster.task_index + is_worker)
    dataset = dataset.shuffle(100).repeat(args.epochs).batch(48)
    is_short = args.short == tfdist.Cluster.from_env().task
    dataset = dataset.take(5) if is_short else dataset
    return dataset.filter(lambda *_: True) if args.unknown_size else dataset


def own_batches(args, context):
    """A part of the examples for each process, in batches of its own."""
    dataset = tf.data.Dataset.from_tensor_slices(examples())
    dataset = dataset.shard(
        context.num_input_pipelines, context.input_pipeline_id
    )
    dataset = dataset.shuffle(100).repeat(args.epochs)
    if args.fixed_batch:
        return dataset.batch(16)
    return dataset.batch(context.get_per_replica_batch_size(48))


class Pace(tfdist.SessionRunHook):
    """Gives a test the time to do harm, until it is in a `HURRY`."""

    def __init__(self, secs, model_dir):
        self._secs, self._hurry = secs, pathlib.Path(model_dir, HURRY)

    def steps_until_next(self, step):
        return 5

    def after_run(self, run_context, run_values):
        time.sleep(0 if self._hurry.exists() else self._secs)


class DiesOnce(tfdist.SessionRunHook):
    """Has `worker:1` end once, after a step whose checkpoint comes next."""

    def __init__(self, mark, by_error):
        self._mark, self._by_error = pathlib.Path(mark), by_error

    def after_run(self, run_context, run_values):
        task, step = tfdist.Cluster.from_env().task, run_context.session.step
        if (task, step) == ("worker:1", 20) and not self._mark.exists():
            self._mark.touch()
            if self._by_error:
                raise ValueError("A line is damaged")
            os.kill(os.getpid(), signal.SIGKILL)


class Exits(tfdist.SessionRunHook):
    """Ends a task after some steps, as a user's hook may."""

    def __init__(self, task):
        self._task = task

    def after_run(self, run_context, run_values):
        if self._task == tfdist.Cluster.from_env().task:
            sys.exit(3)


class Digest(tfdist.SessionRunHook):
    """Prints what the weights are at the end, in this process."""

    def end(self, session):
        digest = hashlib.sha256()
        for _, variable in sorted(session.variables.items()):
            parts = getattr(variable, "variables", [variable])
            for part in parts:
                digest.update(part.numpy().tobytes())
        print(f"step {session.step} digest {digest.hexdigest()}", flush=True)


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--save_steps", type=int, default=20)
    parser.add_argument("--wait_secs", type=float, default=60.0)
    parser.add_argument("--pace_secs", type=float, default=0.0)
    parser.add_argument("--own_batches", action="store_true")
    # Whether those are of one size, however many processes there are.
    parser.add_argument("--fixed_batch", action="store_true")
    # Without layers whose results depend on how many share a batch.
    parser.add_argument("--plain", action="store_true")
    # Whether the input function shards what will be shared out anyway.
    parser.add_argument("--shards_itself", action="store_true")
    # A file that says whether worker:1 has ended, killed or by an error.
    parser.add_argument("--dies_once")
    parser.add_argument("--by_error", action="store_true")
    # The task that runs another program than the others.
    parser.add_argument("--stranger")
    # The task whose model function fails, and the one that a hook ends.
    parser.add_argument("--fails")
    parser.add_argument("--exits")
    # The task whose data end early.
    parser.add_argument("--short")
    parser.add_argument("--steps_per_dispatch", type=int)
    # Whether the number of batches is unknown.
    parser.add_argument("--unknown_size", action="store_true")
    # The task that hears of the leader's announcements late.
    parser.add_argument("--late")
    return parser.parse_args()


def main():
    args = flags()
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    if args.late == tfdist.Cluster.from_env().task:
        heard = Peers.next
        Peers.next = lambda *args: time.sleep(2) or heard(*args)
    input_fn = functools.partial(global_batches, args)
    if args.own_batches:

        def input_fn(context):
            return own_batches(args, context)

    hooks = [Digest()]
    if args.pace_secs:
        hooks.append(Pace(args.pace_secs, args.model_dir))
    if args.exits:
        hooks.append(Exits(args.exits))
    if args.dies_once:
        hooks.append(DiesOnce(args.dies_once, args.by_error))
    config = tfdist.RunConfig(
        args.model_dir,
        tf_random_seed=1,
        save_checkpoints_steps=args.save_steps,
        log_step_count_steps=10,
        session_creation_timeout_secs=args.wait_secs,
        steps_per_dispatch=args.steps_per_dispatch,
    )
    result = tfdist.train_and_evaluate(
        tfdist.Estimator(functools.partial(model_fn, args), config),
        tfdist.TrainSpec(input_fn, args.max_steps, hooks),
        tfdist.EvalSpec(
            lambda: tf.data.Dataset.from_tensor_slices(examples()).batch(64),
            steps=None,
            throttle_secs=3600,
        ),
    )
    print(f"result {result}", flush=True)


if __name__ == "__main__":
    main()

"""A job whose tasks are killed while it trains.

Usage: deaths.py MODEL_DIR, as every task of a cluster with ps. A batch takes 25
ms to come, so that the pace depends on how many workers there are.
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from paced import pauses

import tfdist
from tfdist.hooks.session_run_hook import SessionRunContext, SessionRunValues

MAX_STEPS = 700
PAUSE = 25_000  # Microseconds.


def model_fn() -> keras.Model:
    """A table on every parameter server, and a linear layer."""
    x = keras.Input([20], name="x")
    ids = keras.Input([1], dtype="int64", name="ids")
    rows = tfdist.PartitionedEmbedding(100_000, 1, num_shards=2)(ids)
    y = keras.layers.Dense(1)(x) + keras.layers.Flatten()(rows)
    model = keras.Model({"x": x, "ids": ids}, y)
    model.compile(keras.optimizers.SGD(0.0015), "mse")
    return model


def input_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Endless batches of 64, different in each life of each worker."""
    index = tf.cast(context.input_pipeline_id, tf.int64)

    def batch(seed: tf.Tensor, _: tf.Tensor) -> tuple[dict, tf.Tensor]:
        seed = tf.stack([seed, index])
        x = tf.random.stateless_normal([64, 20], seed)
        ids = tf.random.stateless_uniform([64, 1], seed, 0, 100_000, tf.int64)
        return {"x": x, "ids": ids}, tf.reduce_sum(x, axis=1, keepdims=True)

    seeds = tf.data.Dataset.random()
    return tf.data.Dataset.zip(seeds, pauses(PAUSE)).map(batch)


class Diary(tfdist.SessionRunHook):
    """Prints a line of JSON whenever it is called."""

    def _note(self, what: str, step: int, **more: float) -> None:
        row = {"what": what, "at": time.time(), "step": step, **more}
        print(json.dumps(row), flush=True)

    def after_create_session(
        self, session: tfdist.MonitoredTrainingSession, coord: None
    ) -> None:
        """A session: the first, or one after a failure."""
        self._note("session", session.step)

    def steps_until_next(self, step: int) -> int:
        """Every ten steps."""
        return 10 - step % 10

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Ten steps."""
        step = run_context.session.step
        self._note("steps", step, loss=run_values.results["loss"])

    def end(self, session: tfdist.MonitoredTrainingSession) -> None:
        """A clean end."""
        self._note("end", session.step)


def main(model_dir: str) -> None:
    """Trains for 700 steps, with a checkpoint every 100."""
    config = tfdist.RunConfig(
        model_dir,
        tf_random_seed=1,
        save_checkpoints_steps=100,
        log_step_count_steps=10,
        steps_per_dispatch=1,
    )
    tfdist.train_and_evaluate(
        tfdist.Estimator(model_fn, config),
        tfdist.TrainSpec(input_fn, MAX_STEPS, hooks=[Diary()]),
        tfdist.EvalSpec(input_fn, steps=1, throttle_secs=3600),
    )


if __name__ == "__main__":
    main(sys.argv[1])

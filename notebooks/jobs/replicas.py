"""Asynchronous workers: all equally fast, then one of them ten times slower.

Usage: replicas.py MODEL_DIR, as every task of a cluster with ps. A step of a
worker takes 40 ms, in which it only waits: so two cores can play many machines.
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfdist
from tfdist.cluster import servers
from tfdist.hooks.session_run_hook import SessionRunContext, SessionRunValues

STEPS = 300
PAUSE = 40_000  # Microseconds.


def model_fn() -> keras.Model:
    """A linear model of ten inputs."""
    model = keras.Sequential([keras.Input([10]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def input_fn(
    context: tf.distribute.InputContext, slow: bool
) -> tf.data.Dataset:
    """A batch after each pause; worker 0 may pause ten times as long."""
    is_first = tf.equal(context.input_pipeline_id, 0)
    pause = tf.where(is_first, 10 * PAUSE if slow else PAUSE, PAUSE)
    pauses = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(
            tf.data.Dataset.from_tensors(0).repeat()
        ),
        sleep_microseconds=tf.cast(pause, tf.int64),
        output_types=[tf.int32],
        output_shapes=[[]],
    )
    pauses = tf.data.experimental.from_variant(
        pauses, tf.TensorSpec([], tf.int32)
    )
    batch = tf.ones([8, 10]), tf.ones([8, 1])
    return pauses.map(lambda _: batch)


class Meter(tfdist.SessionRunHook):
    """Measures the pace from step 50 on, and the staleness of all updates."""

    def __init__(self, slow: bool) -> None:
        self._slow = slow
        self._marks = []

    def steps_until_next(self, step: int) -> int:
        """Every 50 steps."""
        return 50 - step % 50

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Notes step and time."""
        step = run_context.session.step
        if step >= 50:
            self._marks.append((step, time.perf_counter()))

    def end(self, session: tfdist.MonitoredTrainingSession) -> None:
        """Prints a line of JSON."""
        first, *_, last = self._marks
        row = {
            "slow": self._slow,
            "pace": (last[0] - first[0]) / (last[1] - first[1]),
            "updates": session.staleness.tolist(),
        }
        print(json.dumps(row), flush=True)


def main(directory: str) -> None:
    """Serves; on the chief, trains twice."""
    cluster = tfdist.Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    for slow in False, True:
        config = tfdist.RunConfig(
            os.path.join(directory, str(slow)),
            save_checkpoints_secs=0,
            steps_per_dispatch=1,
            audit_input=False,
        )
        tfdist.Estimator(model_fn, config).train(
            lambda context, slow=slow: input_fn(context, slow),
            max_steps=STEPS,
            hooks=[Meter(slow)],
        )
    servers.release(cluster)


if __name__ == "__main__":
    main(sys.argv[1])

"""Asynchronous workers: all equally fast, then one of them ten times slower.

Usage: replicas.py MODEL_DIR, as every task of a cluster with ps. A step of a
worker takes 40 ms, in which it only waits, so that two cores can stand in for
many machines.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from meters import Meter
from paced import pauses

import tfdist
from tfdist.cluster import servers

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
    batch = tf.ones([8, 10]), tf.ones([8, 1])
    return pauses(pause).map(lambda _: batch)


class Pace(Meter):
    """Measures the pace, and the staleness of all updates."""

    def found(self, session: tfdist.MonitoredTrainingSession) -> dict:
        """Steps per second; updates by staleness."""
        (secs,) = self.per_step()
        return {"pace": 1 / secs, "updates": session.staleness.tolist()}


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
            hooks=[Pace(50, slow=slow)],
        )
    servers.release(cluster)


if __name__ == "__main__":
    main(sys.argv[1])

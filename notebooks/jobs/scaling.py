"""The pace of training, by the number of workers and by the model's size.

Usage: scaling.py MODEL_DIR UNITS:WORKERS..., as every task of a cluster with
ps: a model of 1,000 times UNITS weights is trained by so many of the workers.
Computing a step takes 30 ms, in which a worker only waits, so that two cores
can play several machines. Pulling the weights and pushing gradients takes time
too: a server sends 50 MB a second, where the system can limit links.
"""

import itertools
import json
import os
import statistics
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import links
import tensorflow as tf
from meters import Meter
from paced import pause

import tfdist
from tfdist.cluster import servers

PAUSE = 30_000  # Microseconds.


class Wait(keras.layers.Layer):
    """Passes on what it is given, after a pause."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """The pause is an op, since no Python runs on a worker."""
        with tf.control_dependencies([x]):  # First the pull, then the pause.
            only = pause(PAUSE)
        with tf.control_dependencies([only]):
            return tf.identity(x)


def model_fn(units: int) -> keras.Model:
    """A layer of 1,000 times so many weights."""
    layers = [keras.Input([1000]), keras.layers.Dense(units), Wait()]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def input_fn(
    context: tf.distribute.InputContext, units: int, workers: int
) -> tf.data.Dataset:
    """Batches of one example without end; none for the other workers."""
    batch = tf.ones([1, 1000]), tf.ones([1, units])
    works = tf.less(context.input_pipeline_id, workers)
    return tf.data.Dataset.from_tensors(batch).repeat(
        tf.where(works, tf.constant(-1, tf.int64), 0)
    )


class Pace(Meter):
    """Measures how many steps a second all workers do together."""

    def found(self, session: tfdist.MonitoredTrainingSession) -> dict:
        """The median of some steps of each worker."""
        times = [secs for _, secs in self.marks]
        secs = [b - a for a, b in itertools.pairwise(times)]
        return {"pace": self.every / statistics.median(secs)}


def main(directory: str, *runs: str) -> None:
    """Serves; on the chief, trains each model with some of the workers."""
    cluster = tfdist.Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    print(json.dumps({"limited": links.limit(50.0)}), flush=True)
    for units, workers in (map(int, run.split(":")) for run in runs):
        config = tfdist.RunConfig(
            os.path.join(directory, f"{units}_{workers}"),
            save_checkpoints_secs=0,
            log_step_count_steps=None,
            steps_per_dispatch=1,
            audit_input=False,
        )
        tfdist.Estimator(lambda units=units: model_fn(units), config).train(
            lambda context, units=units, workers=workers: input_fn(
                context, units, workers
            ),
            max_steps=30 * workers,
            hooks=[Pace(5 * workers, bytes=4 * 1001 * units, workers=workers)],
        )
    servers.release(cluster)


if __name__ == "__main__":
    main(*sys.argv[1:])

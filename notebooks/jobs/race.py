"""The same training, asynchronous or synchronous: the cluster's shape decides.

Usage: race.py MODEL_DIR, as every task. With ps the workers wait for nobody;
without, chief and workers all-reduce their gradients. A batch takes 30 ms to
come; in the second run, for one of them, 150 ms.
"""

import hashlib
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from meters import Meter
from paced import pauses

import tfdist
from tfdist.cluster import servers
from tfdist.hooks.session_run_hook import SessionRunValues

STEPS = 80
PAUSE = 30_000  # Microseconds.


def model_fn() -> keras.Model:
    """A linear model of twenty inputs."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([20]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def input_fn(
    context: tf.distribute.InputContext, slow: bool
) -> tf.data.Dataset:
    """Batches of 16 of a noisy sum, after pauses; different for each worker."""
    index = context.input_pipeline_id
    last = tf.equal(index, context.num_input_pipelines - 1)
    pause = tf.where(last, 5 * PAUSE if slow else PAUSE, PAUSE)

    def batch(i: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.stack([i, tf.cast(index, tf.int64)])
        x = tf.random.stateless_normal([16, 20], seed)
        noise = tf.random.stateless_normal([16, 1], seed + 7)
        return x, tf.reduce_sum(x, axis=1, keepdims=True) + noise

    counter = tf.data.Dataset.counter()
    return tf.data.Dataset.zip(counter, pauses(pause)).map(batch)


class Race(Meter):
    """Marks the loss as well; prints all marks, and a digest of the weights."""

    def measured(self, run_values: SessionRunValues) -> tuple[float]:
        """The loss."""
        return (run_values.results["loss"],)

    def found(self, session: tfdist.MonitoredTrainingSession) -> dict:
        """The clock starts with the first mark."""
        start = self.marks[0][1]
        marks = [(step, secs - start, loss) for step, secs, loss in self.marks]
        weights = b"".join(v.numpy().tobytes() for v in session.model.variables)
        return {
            "marks": marks,
            "weights": hashlib.sha256(weights).hexdigest(),
        }


def main(directory: str) -> None:
    """Serves, or trains twice."""
    cluster = tfdist.Cluster.from_env()
    if cluster.num_ps and cluster.role != "chief":
        servers.serve(cluster)
        return
    for slow in False, True:
        config = tfdist.RunConfig(
            os.path.join(directory, str(slow)),
            save_checkpoints_secs=0,
            log_step_count_steps=None,
            steps_per_dispatch=1,
            audit_input=False,
        )
        tfdist.Estimator(model_fn, config).train(
            lambda context, slow=slow: input_fn(context, slow),
            max_steps=STEPS,
            hooks=[Race(5, slow=slow)],
        )
    if cluster.num_ps:
        servers.release(cluster)


if __name__ == "__main__":
    main(sys.argv[1])

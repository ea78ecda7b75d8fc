"""The same training asynchronously and in step: the cluster's shape decides.

Usage: race.py MODEL_DIR, as every task. With ps the workers wait for nobody;
without, chief and workers all-reduce their gradients. A batch takes 30 ms to
come; in the second run, for one of them, 150 ms.
"""

import hashlib
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

STEPS = 80
PAUSE = 30_000  # Microseconds.


def model_fn() -> keras.Model:
    """A linear model of twenty inputs."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([20]), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def input_fn(
    context: tf.distribute.InputContext, slow: bool
) -> tf.data.Dataset:
    """Batches of 16 of a noisy sum, after pauses; others for each worker."""
    index = context.input_pipeline_id
    last = tf.equal(index, context.num_input_pipelines - 1)
    pause = tf.where(last, 5 * PAUSE if slow else PAUSE, PAUSE)
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

    def batch(i: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        seed = tf.stack([i, tf.cast(index, tf.int64)])
        x = tf.random.stateless_normal([16, 20], seed)
        noise = tf.random.stateless_normal([16, 1], seed + 7)
        return x, tf.reduce_sum(x, axis=1, keepdims=True) + noise

    return tf.data.Dataset.zip(tf.data.Dataset.counter(), pauses).map(batch)


class Meter(tfdist.SessionRunHook):
    """Notes step, time and loss; prints them, and a digest of the weights."""

    def __init__(self, slow: bool) -> None:
        self._slow = slow
        self._marks = []
        self._start = None

    def steps_until_next(self, step: int) -> int:
        """Every five steps."""
        return 5 - step % 5

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Notes how it stands; the clock starts after the first steps."""
        step = run_context.session.step
        self._start = self._start or time.perf_counter()
        secs = time.perf_counter() - self._start
        self._marks.append((step, secs, run_values.results["loss"]))

    def end(self, session: tfdist.MonitoredTrainingSession) -> None:
        """Prints a line of JSON."""
        weights = b"".join(v.numpy().tobytes() for v in session.model.variables)
        digest = hashlib.sha256(weights).hexdigest()
        row = {"slow": self._slow, "marks": self._marks, "weights": digest}
        print(json.dumps(row), flush=True)


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
            hooks=[Meter(slow)],
        )
    if cluster.num_ps:
        servers.release(cluster)


if __name__ == "__main__":
    main(sys.argv[1])

"""The census network, asynchronously and synchronously, at several rates.

Usage: census_modes.py MODEL_DIR TRAIN_FILES RATES SEEDS, as every task of a
cluster with ps; RATES and SEEDS are numbers with commas. The cluster is started
once and trains one model after the other. A batch takes 50 ms to come, in which
a worker only waits, so that two cores can play many machines.
"""

import itertools
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import census_job
import keras
import tensorflow as tf
from meters import Meter
from paced import pauses

import tfdist
from tfdist.cluster import servers
from tfdist.hooks.session_run_hook import SessionRunValues

# Batches in a run, of all workers together. Each is an update of its own, or
# a synchronous update takes one of every worker.
BATCHES = 320
BUCKETS = 16
WORDS = (*census_job.WORDS, *census_job.PAIRED)
WIDTH = len(census_job.NUMBERS) + BUCKETS * len(WORDS)
PAUSE = 50_000  # Microseconds.


def model_fn(rate: float) -> keras.Model:
    """The deep part alone, with plain SGD, whose rate staleness limits."""
    model = keras.Sequential(
        [
            keras.Input([WIDTH]),
            keras.layers.Dense(16, "tanh"),
            keras.layers.Dense(1),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate), loss)
    return model


def vectors(features: dict, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Normalized numbers, and one-hot buckets of the words, side by side."""
    numbers = [
        tf.expand_dims((features[name] - mean) / deviation, 1)
        for name, (mean, deviation) in census_job.NUMBERS.items()
    ]
    words = [
        tf.one_hot(
            tf.strings.to_hash_bucket_fast(features[n], BUCKETS), BUCKETS
        )
        for n in WORDS
    ]
    return tf.concat([*numbers, *words], 1), tf.expand_dims(label, 1)


def input_fn(
    pattern: str, context: tf.distribute.InputContext
) -> tf.data.Dataset:
    """Batches of 32 after pauses; other examples for each worker."""
    rows = census_job.input_fn(
        pattern, context, batch_size=32, shuffle_buffer_size=1000
    )
    paced = tf.data.Dataset.zip(rows, pauses(PAUSE))
    return paced.map(lambda row, _: vectors(*row))


class Curve(Meter):
    """Marks the loss as well; prints all marks, and the staleness."""

    def measured(self, run_values: SessionRunValues) -> tuple[float]:
        """The loss."""
        return (run_values.results["loss"],)

    def found(self, session: tfdist.MonitoredTrainingSession) -> dict:
        """The clock starts with the first mark."""
        start = self.marks[0][1]
        marks = [(step, secs - start, loss) for step, secs, loss in self.marks]
        found = session.staleness  # None of a synchronous job.
        updates = None if found is None else found.tolist()
        return {"marks": marks, "updates": updates}


def train(
    directory: str, pattern: str, rate: float, seed: int, together: bool
) -> None:
    """One run, whose curve is printed as a line of JSON."""
    config = tfdist.RunConfig(
        os.path.join(directory, f"{rate}-{seed}-{together}"),
        tf_random_seed=seed,
        backup_workers=0 if together else None,
        steps_per_dispatch=1,
        save_checkpoints_secs=0,
        save_summary_steps=0,
        log_step_count_steps=None,
        audit_input=False,
    )
    batches = config.cluster.num_workers if together else 1
    row = {"rate": rate, "seed": seed, "together": together}
    curve = Curve(max(1, 8 // batches), **row)
    tfdist.Estimator(lambda: model_fn(rate), config).train(
        lambda context: input_fn(pattern, context),
        max_steps=BATCHES // batches,
        hooks=[curve],
    )


def main(directory: str, pattern: str, rates: str, seeds: str) -> None:
    """Serves; on the chief, trains each run in both modes."""
    cluster = tfdist.Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    runs = itertools.product(
        map(float, rates.split(",")), map(int, seeds.split(",")), (False, True)
    )
    for rate, seed, together in runs:
        train(directory, pattern, rate, seed, together)
    servers.release(cluster)


if __name__ == "__main__":
    main(*sys.argv[1:])

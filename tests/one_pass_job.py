"""The program of every task in the clusters of test_one_pass.py.

    python -m tests.one_pass_job --model_dir=DIRECTORY [--examples=...]

Each step subtracts from the row of each of its examples in a table one over
the number of examples in the step, and so from the row of each worker in
another: what is left in the end says how often each was trained on. Worker
number i takes `pace_secs` times i longer for a batch.
"""

import argparse
import json
import logging

import keras
import tensorflow as tf

import tfdist
from notebooks.jobs import paced
from tfdist.data.data_service import one_pass

WORKERS = 3
BLOCK = 20
BATCH = 4


class Mean(keras.losses.Loss):
    """The mean of what the model returns."""

    def call(self, y_true, y_pred):
        return y_pred

    def get_config(self):
        return {}


def model_fn(args):
    ids = keras.Input([1], dtype="int64", name="id")
    worker = keras.Input([1], dtype="int64", name="worker")
    rows = [
        tfdist.PartitionedEmbedding(
            size, 1, num_shards=1, name=name, embeddings_initializer="zeros"
        )(feature)
        for name, size, feature in (
            ("examples", args.examples, ids),
            ("workers", WORKERS, worker),
        )
    ]
    output = keras.layers.Flatten()(keras.layers.Add()(rows))
    model = keras.Model({"id": ids, "worker": worker}, output)
    model.compile(keras.optimizers.SGD(1.0), Mean())
    return model


def train_input_fn(args, context):
    blocks = tf.data.Dataset.range(0, args.examples, BLOCK)
    ids = blocks.flat_map(lambda i: tf.data.Dataset.range(i, i + BLOCK))
    worker = tf.cast(context.input_pipeline_id, tf.int64)

    def example(_, ids):
        ids = ids[:, None]
        features = {"id": ids, "worker": tf.fill(tf.shape(ids), worker)}
        return features, tf.zeros(tf.shape(ids))

    ids = ids.take(args.examples - args.tail)
    batches = one_pass(ids.batch(BATCH), context).repeat(args.epochs)
    if args.tail:  # Belongs to worker 1 alone.
        tail = tf.data.Dataset.range(args.examples - args.tail, args.examples)
        batches = batches.concatenate(
            tail.filter(lambda _: worker == 1).batch(BATCH)
        )
    pace = args.pace_secs * tf.cast(worker + 1, tf.float32)
    slow = paced.pauses(1e6 * pace)
    return tf.data.Dataset.zip(slow, batches).map(example)


class Counts(tfdist.SessionRunHook):
    """Prints how often the job has trained on what.

    Args:
        batch: Examples in a step.
    """

    def __init__(self, batch=BATCH):
        self._batch = batch

    def steps_until_next(self, step):
        """It has nothing to do before the end."""

    def end(self, session):
        counts = {}
        for name, variable in session.variables.items():
            for table in ("examples", "workers"):
                if table in name:
                    (part,) = getattr(variable, "variables", [variable])
                    counts[table] = (-self._batch * part.numpy()[:, 0]).tolist()
        if session.is_chief:
            print("counts", json.dumps(counts), flush=True)


def logged_config(model_dir, **kwargs):
    """Of a job that tells what it does, and saves at its end alone."""
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    return tfdist.RunConfig(
        model_dir,
        save_checkpoints_steps=10**6,
        save_summary_steps=None,
        session_creation_timeout_secs=100,
        **kwargs,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--examples", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--tail", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--pace_secs", type=float, default=0.0)
    args = parser.parse_args()
    if args.replicas > 1:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * args.replicas,
        )
    config = logged_config(
        args.model_dir,
        strategy="auto" if args.replicas == 1 else "mirrored",
        log_step_count_steps=10,
    )
    tfdist.train_and_evaluate(
        tfdist.Estimator(lambda: model_fn(args), config),
        tfdist.TrainSpec(
            lambda context: train_input_fn(args, context),
            hooks=[Counts()],
        ),
        tfdist.EvalSpec(
            lambda: tf.data.Dataset.from_tensors(
                ({"id": [[0]], "worker": [[0]]}, [[0.0]])
            ),
            throttle_secs=3600,
        ),
    )


if __name__ == "__main__":
    main()

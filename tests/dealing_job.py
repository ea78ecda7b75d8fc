"""The program of every task in the clusters of test_dealing.py.

    python -m tests.dealing_job --model_dir=DIRECTORY --files=PATTERN ...

Each example is one line, its number. A step subtracts one over the size of the
batch from the row of each of its examples in a table, so the table tells in the
end how often each was trained on. Worker 0 takes `slow_secs` longer for each
batch.
"""

import argparse

import keras
import tensorflow as tf

import tfdist
from tests.one_pass_job import Counts, Mean, logged_config
from tests.recovery_job import slept
from tfdist.hooks.progress import UnreadDataHook

BATCH = 10


def model_fn(args):
    ids = keras.Input([], dtype="int64", name="id")
    rows = tfdist.PartitionedEmbedding(
        args.examples, 1, name="examples", embeddings_initializer="zeros"
    )(ids)
    model = keras.Model({"id": ids}, rows)
    model.compile(keras.optimizers.SGD(1.0), Mean())
    return model


def train_input_fn(args, context):
    """Read by tfdist, or by the user's own shards."""
    if args.sharded:
        lines = tf.data.TextLineDataset(tf.io.gfile.glob(args.files))
        lines = lines.shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        lines = lines.shuffle(1000, seed=args.seed).repeat().batch(BATCH)
    else:
        lines = tfdist.read_text(
            args.files,
            BATCH,
            context=context,
            seed=args.seed,
            shuffle_buffer_size=args.buffer,
        )
    slow = tf.equal(tf.cast(context.input_pipeline_id, tf.int64), 0)
    secs = args.pace_secs + tf.where(slow, args.slow_secs, 0.0)
    microseconds = tf.cast(1e6 * secs, tf.int64)
    return slept(lines, microseconds).map(_example)


def _example(lines):
    ids = tf.ensure_shape(tf.strings.to_number(lines, tf.int64), [None])
    return {"id": ids}, tf.zeros(tf.shape(ids))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--files", required=True)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--buffer", type=int, default=100)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--pace_secs", type=float, default=0.0)
    parser.add_argument("--slow_secs", type=float, default=0.0)
    args = parser.parse_args()
    config = logged_config(
        args.model_dir, log_step_count_steps=20, steps_per_dispatch=1
    )

    def input_fn(context):
        return train_input_fn(args, context)

    estimator = tfdist.Estimator(lambda: model_fn(args), config)
    tfdist.train_and_evaluate(
        estimator,
        tfdist.TrainSpec(
            input_fn,
            max_steps=args.max_steps,
            hooks=[Counts(BATCH), UnreadDataHook(input_fn, after_secs=4)],
        ),
        tfdist.EvalSpec(
            lambda: tf.data.Dataset.from_tensors(({"id": [0]}, [0.0])),
            throttle_secs=3600,
        ),
    )


if __name__ == "__main__":
    main()

"""The program of every task in tests/embeddings/test_growing_job.py.

    python -m tests.growing_job --model_dir=DIRECTORY [--max_steps=...]

All workers read the same batches, each of which has new ids. An update takes
`DELTA` from both numbers of a row for each time that the batch has its id: so a
row tells whose it is, and how often that was seen. So does the row of the same
number in `history`, a table that holds all of them. With `--recycles` ids get a
row when they are seen again, and lose it when they are not any more.
"""

import argparse
import functools
import logging
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.recovery_job import slept

DELTA = 0.25
NUMBERS = 100_000
_FACTOR = 0x1E3779B97F4A7C15


class Kind(NamedTuple):
    batch: int
    new: int
    recent: int  # Of so many the others of a batch are.
    table: dict


GROWS = Kind(64, 32, 10**9, {"capacity": 200_000, "num_shards": 4})
RECYCLES = Kind(
    *(256, 128, 3_000),
    {
        "capacity": 8_192,
        "num_shards": 2,
        "admit_after": 2,
        # Workers that were killed read other batches, and all that they have
        # seen since must find room.
        "evict_after_steps": 20,
    },
)


def table(kind):
    uniform = keras.initializers.RandomUniform(-1, 1, seed=3)
    return tfdist.DynamicEmbedding(
        2, embeddings_initializer=uniform, name="table", **kind.table
    )


def model_fn(kind):
    inputs = {
        name: keras.Input([], dtype="int64", name=name)
        for name in ("ids", "numbers")
    }
    history = tfdist.PartitionedEmbedding(
        NUMBERS, 2, 2, embeddings_initializer="zeros", name="history"
    )
    rows = table(kind)(inputs["ids"]), history(inputs["numbers"])
    model = keras.Model(inputs, keras.layers.Add()(rows))

    def loss(y, rows):
        return keras.ops.sum(rows, axis=-1)

    model.compile(keras.optimizers.SGD(kind.batch * DELTA), loss)
    return model


def id_of(number):
    """Of all 64 bits."""
    return number * np.int64(_FACTOR) - 7


def number_of(ids):
    """The number of each id."""
    return (ids + 7) * np.uint64(pow(_FACTOR, -1, 1 << 64)).astype(np.int64)


def batch(i, kind):
    """New ids, and as many of those that were new before."""
    first = i * kind.new
    new = first + tf.range(kind.new, dtype=tf.int64)
    old = tf.random.stateless_uniform(
        [kind.batch - kind.new],
        [i, 0],
        tf.maximum(first + kind.new - kind.recent, 0),
        first + kind.new,
        tf.int64,
    )
    numbers = tf.concat([new, old], axis=0)
    inputs = {"ids": id_of(numbers), "numbers": numbers}
    return inputs, tf.zeros([kind.batch, 2])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=1_000_000)
    parser.add_argument("--save_steps", type=int, default=20)
    parser.add_argument("--step_secs", type=float, default=0.0)
    parser.add_argument("--recycles", action="store_true")
    args = parser.parse_args()
    kind = RECYCLES if args.recycles else GROWS
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)

    cluster = tfdist.Cluster.from_env()
    if cluster.role != "chief":
        tfdist.cluster.serve(cluster)
        return

    def input_fn():
        dataset = tf.data.Dataset.counter().map(lambda i: batch(i, kind))
        pace = tf.constant(int(args.step_secs * 1e6), tf.int64)
        return slept(dataset, pace).apply(
            tf.data.experimental.assert_cardinality(
                tf.data.INFINITE_CARDINALITY
            )
        )

    config = tfdist.RunConfig(
        args.model_dir,
        save_checkpoints_steps=args.save_steps,
        keep_checkpoint_max=None,
        log_step_count_steps=10,
        session_creation_timeout_secs=60.0,
    )
    estimator = tfdist.Estimator(functools.partial(model_fn, kind), config)
    estimator.train(input_fn, max_steps=args.max_steps)


if __name__ == "__main__":
    main()

"""The tasks of test_shared_updates.py: they push equal gradients at once.

    python -m tests.shared_updates_job STEPS DIRECTORY

Each step looks up all rows of the tables, whose gradient is one; what the
updates make of them does not depend on their order.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist

ROWS, DIM = 4096, 16
RULES = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "momentum": lambda: keras.optimizers.SGD(2.0**-10, momentum=0.5),
    "sgd": lambda: keras.optimizers.SGD(2.0**-10),
}


def model_fn():
    ids = keras.Input([ROWS], dtype="int64")
    sums = [
        keras.layers.Lambda(lambda rows: tf.reduce_sum(rows, axis=[1, 2]))(
            tfdist.PartitionedEmbedding(
                ROWS, DIM, embeddings_initializer="zeros", name=rule
            )(ids)
        )
        for rule in RULES
    ]
    model = keras.Model(ids, keras.layers.Add()(sums))
    optimizer = tfdist.MultiOptimizer(
        [(rule, make()) for rule, make in RULES.items()]
    )
    model.compile(optimizer, loss=lambda y, sums: sums)
    return model


def batches():
    ids = tf.range(ROWS, dtype=tf.int64)[tf.newaxis]
    return tf.data.Dataset.from_tensors((ids, tf.zeros([1]))).repeat()


def main():
    steps, directory = sys.argv[1:]
    model, _ = tfdist.fit(
        model_fn, batches, steps_per_epoch=int(steps), model_dir=directory
    )
    if model is not None:
        tables = {
            rule: model.get_layer(rule).get_weights()[0] for rule in RULES
        }
        np.savez(f"{directory}/tables.npz", **tables)


if __name__ == "__main__":
    main()

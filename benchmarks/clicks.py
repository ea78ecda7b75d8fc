"""A click log of hashed features, the same files for every contender.

Eight features, each with an id of one of `rows` buckets, a few of which are
frequent; a click depends on a weight of each id. Examples are records of nine
32-bit integers, so that reading them costs next to nothing and the figures are
those of the frameworks. Needs no more than TensorFlow 2.15.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import tensorflow as tf

FEATURES = [f"f{i}" for i in range(8)]
BATCH, DIM, HIDDEN = 256, 16, (64, 32)
WIDE_RATE, DEEP_RATE = 0.1, 0.05
EVAL_EXAMPLES = 51_200
_FILES = 4
_RECORD = 4 * (len(FEATURES) + 1)


def write(directory: str, rows: int, examples: int) -> None:
    """Writes `train-*.bin` and `eval.bin`."""
    rng = np.random.default_rng(rows)
    weights = rng.normal(scale=0.7, size=(len(FEATURES), rows))

    def part(name: str, size: int) -> None:
        ids = rows * rng.random((size, len(FEATURES))) ** 4
        ids = ids.astype(np.int32)
        logits = weights[np.arange(len(FEATURES)), ids].sum(1)
        clicks = rng.random(size) < 1 / (1 + np.exp(-logits))
        table = np.concatenate([ids, clicks[:, None]], 1).astype(np.int32)
        table.tofile(pathlib.Path(directory) / name)

    for i in range(_FILES):
        part(f"train-{i}.bin", examples // _FILES)
    part("eval.bin", min(EVAL_EXAMPLES, examples))


def _decode(records: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    table = tf.io.decode_raw(records, tf.int32)
    table = tf.reshape(table, [-1, len(FEATURES) + 1])
    ids = {name: table[:, i] for i, name in enumerate(FEATURES)}
    return ids, tf.cast(table[:, -1:], tf.float32)


def train(
    directory: str, pipelines: int = 1, index: Any = 0, batch: int = BATCH
) -> tf.data.Dataset:
    """Returns an infinite dataset of shuffled batches.

    Args:
        directory: What `write` has filled.
        pipelines: How many processes read.
        index: Which of them this is, a number or a tensor.
        batch: Examples in a batch.

    Returns:
        `({"f0": ids, ...}, clicks)`: int32 of shape `[batch]`, float32 of
        `[batch, 1]`.
    """
    paths = [f"{directory}/train-{i}.bin" for i in range(_FILES)]
    files = tf.data.Dataset.from_tensor_slices(paths)
    index = tf.cast(index, tf.int64)
    files = files.shard(pipelines, index)
    return (
        files.interleave(lambda path: _records(path), cycle_length=_FILES)
        .shuffle(20_000)
        .repeat()
        .batch(batch, drop_remainder=True)
        .map(_decode)
        .prefetch(10)
    )


def evaluation(directory: str) -> tf.data.Dataset:
    """Returns a finite dataset of the evaluation examples."""
    return _records(f"{directory}/eval.bin").batch(1024).map(_decode)


def _records(path: Any) -> tf.data.Dataset:
    return tf.data.FixedLengthRecordDataset(path, _RECORD)


def keras_model(
    keras: Any, rows: int, table: Any, optimizer: Any, metrics: Any = None
) -> Any:
    """The wide and deep model, compiled.

    Args:
        keras: The Keras: `keras` or `tf_keras`.
        rows: Buckets of a feature.
        table: Returns an embedding layer for rows, width, initializer and
            name.
        optimizer: Of all variables.
        metrics: As for `compile`.
    """
    ids = {name: keras.Input([], dtype="int32", name=name) for name in FEATURES}

    # Where Estimator begins. An initializer of its own for each table: one that
    # is shared gives all of them the same values in Keras 3.
    def spread() -> Any:
        return keras.initializers.TruncatedNormal(stddev=DIM**-0.5)

    wide = [table(rows, 1, "zeros", f"wide_{n}")(ids[n]) for n in FEATURES]
    deep = [table(rows, DIM, spread(), f"deep_{n}")(ids[n]) for n in FEATURES]
    hidden = keras.layers.Concatenate()(deep)
    for units in HIDDEN:
        hidden = keras.layers.Dense(units, "relu")(hidden)
    logits = keras.layers.Add()([*wide, keras.layers.Dense(1)(hidden)])
    clicks = keras.layers.Activation("sigmoid")(logits)
    model = keras.Model(ids, clicks)
    model.compile(optimizer, "binary_crossentropy", metrics=metrics)
    return model

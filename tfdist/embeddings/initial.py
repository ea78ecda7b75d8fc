"""Initial values of embedding rows.

In a growing table they depend on the id's key and a salt only. So a worker can
compute the row of an id without a slot, and a server can create it at any time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras import initializers

from tfdist.embeddings.index import mixed

Drawn = Callable[[tf.Tensor, tf.Tensor | int], tf.Tensor]

# SplitMix64's increment, here between the inputs for the numbers of a row.
_STEP = 0x9E3779B97F4A7C15
_BITS = 24  # The precision of a float32.
# Including TF1's initializers, which feature columns use.
_v1 = tf.compat.v1.initializers
_CONSTANT = initializers.Constant, _v1.constant, tf.constant_initializer
_SCALING = initializers.VarianceScaling, _v1.variance_scaling
_KNOWN = "constant (zeros, ones), uniform or normal, with a seed that is an int"


def first_rows(initializer: Any, dim: int) -> Drawn:
    """Returns a function from int64 keys `(n,)` and a salt to initial rows.

    Args:
        initializer: A Keras initializer, whose seed is part of the salt (one
            for all keys or one for each).
        dim: Length of a row. Rows are float32 `(n, dim)`.

    Raises:
        ValueError: if it is not constant, uniform or normal, or if its seed is
            neither an int nor None.

    >>> rows = first_rows(initializers.RandomUniform(-1, 1), 2)
    >>> first, again = rows(tf.constant([5, 5], tf.int64), 0).numpy()
    >>> bool((first == again).all())
    True
    """
    kind = type(initializer)
    value: Any
    constants = {initializers.Zeros: 0.0, initializers.Ones: 1.0}
    value = constants.get(kind, getattr(initializer, "value", None))
    is_constant = kind is initializers.Constant or kind in constants
    if is_constant and not np.ndim(value):
        return lambda keys, salt: tf.fill([tf.size(keys), dim], float(value))
    is_random = kind in (initializers.RandomUniform, initializers.RandomNormal)
    config = initializer.get_config() if is_random else {}
    if not is_random or not isinstance(config["seed"] or 0, int):
        raise ValueError(
            f"Argument `embeddings_initializer` must be {_KNOWN}, because the "
            "first row of an id may be computed at any time. Received: "
            f"embeddings_initializer={initializer!r}."
        )
    steps = [_STEP * i % (1 << 64) for i in range(1, dim + 1)]

    def drawn(keys: tf.Tensor, salt: tf.Tensor | int) -> tf.Tensor:
        """Draws uniformly from the open interval (0, 1)."""
        apart = tf.constant(np.array(steps, np.uint64).view(np.int64))
        keys = (keys + salt)[:, tf.newaxis]
        bits = tf.bitcast(mixed(keys + apart), tf.uint64)
        bits = tf.bitwise.right_shift(bits, tf.constant(64 - _BITS, tf.uint64))
        return (tf.cast(tf.cast(bits, tf.int64), tf.float32) + 0.5) / 2**_BITS

    if kind is initializers.RandomUniform:
        low, high = float(config["minval"]), float(config["maxval"])
        return lambda *of: low + (high - low) * drawn(*of)
    mean, scale = float(config["mean"]), float(config["stddev"])
    return lambda *of: mean + scale * tf.math.ndtri(drawn(*of))


def salt(initializer: Any, name: str) -> int:
    """Returns an int64 that makes the initial rows of each table different.

    A seed of None counts as 0, so a resumed job computes the same rows.
    """
    seed = initializer.get_config().get("seed") or 0
    number = (zlib.crc32(name.encode()) + (seed << 32)) % (1 << 64)
    return int(np.uint64(number).astype(np.int64))


def shard_rows(
    initializer: Any,
    table_shape: tuple[int, int],
    runs: Sequence[Sequence[int]],
    shape: Sequence[int],
    dtype: Any = None,
) -> tf.Tensor:
    """Returns the initial rows of a shard of an ordinary table.

    Args:
        initializer: The initializer of the table.
        table_shape: Number and length of the table's rows.
        runs: The first row and the size of each run in the shard.
        shape: Shape of the shard; ValueError if the initializer's differs.
        dtype: Dtype of the rows.

    >>> matrix = initializers.Constant(np.arange(8).reshape(4, 2))
    >>> shard_rows(matrix, (4, 2), [(1, 2)], (2, 2), "int32").numpy().tolist()
    [[2, 3], [4, 5]]
    """
    is_constant = isinstance(initializer, _CONSTANT)
    if is_constant and np.ndim(initializer.value):
        table = np.broadcast_to(initializer.value, table_shape)
        own = [table[row : row + size] for row, size in runs]
        return tf.convert_to_tensor(np.concatenate(own), dtype)
    rows = initializer(shape, dtype=dtype)
    if tuple(rows.shape) != tuple(shape):
        raise ValueError(
            f"An initializer must return the shape of a shard, {tuple(shape)}. "
            f"Received: rows of shape {tuple(rows.shape)}. To start from a "
            "matrix, use `keras.initializers.Constant(matrix)`."
        )
    if isinstance(initializer, _SCALING):
        (num, dim), total = shape, table_shape[0]
        sizes = {"fan_in": (num, total), "fan_avg": (num + dim, total + dim)}
        own_fan, fan = sizes.get(initializer.mode, (1, 1))
        rows *= (own_fan / fan) ** 0.5
    return rows

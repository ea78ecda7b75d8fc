"""Maps keys to shards, so that several shards are searched together.

With many small tables, the number of ops matters more than their size. So all
keys of a server are processed at once, and only reading or writing a variable
takes an op per shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

WRITE = tf.raw_ops.ResourceScatterUpdate


class Places(NamedTuple):
    """The shards of `n` keys, which are sorted by shard."""

    num: int = 1  # The number of shards; if 1, the other fields are None.
    counts: tf.Tensor | None = None  # int32 `(num,)`: keys per shard.
    which: tf.Tensor | None = None  # int32 `(n,)`: the shard per key.

    def some(self, chosen: tf.Tensor) -> Places:
        """Returns the places of some of the keys, by ascending indices."""
        if self.num == 1:
            return self
        which = tf.gather(self.which, chosen)
        return Places(self.num, counted(which, self.num), which)

    def each(self, values: Sequence[int]) -> Any:
        """Returns the value of each key's shard, int64, or an int for all."""
        if len({*values}) == 1:
            return values[0]
        return tf.gather(np.array(values, np.int64), self.which)

    def split(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Splits values by shard, along axis 0."""
        if self.num == 1:
            return [values]
        return tf.split(values, self.counts, num=self.num)

    def read(
        self,
        by: Callable[..., tf.Tensor],
        shards: Sequence[keras.Variable],
        *values: tf.Tensor,
    ) -> tf.Tensor:
        """Joins the results of `by(shard, *values)` for each shard's keys."""
        own = zip(shards, *map(self.split, values), strict=True)
        found = [by(shard.value, *each) for shard, *each in own]
        return tf.concat(found, axis=0) if self.num > 1 else found[0]

    def gather(
        self, shards: Sequence[keras.Variable], rows: tf.Tensor
    ) -> tf.Tensor:
        """Reads rows in the shard of each key."""
        return self.read(tf.gather, shards, rows)

    def scatter(
        self,
        op: Callable[..., tf.Operation],
        shards: Sequence[keras.Variable],
        rows: tf.Tensor,
        values: tf.Tensor,
    ) -> list[tf.Operation]:
        """Changes rows in the shard of each key with a raw op of TensorFlow."""
        values = tf.cast(values, shards[0].dtype)
        own = zip(shards, self.split(rows), self.split(values), strict=True)
        handle, *_ = inspect.signature(op).parameters  # "resource" or "ref".
        return [
            op(**{handle: shard.value.handle}, indices=at, updates=new)
            for shard, at, new in own
        ]


def places_of(counts: tf.Tensor, num: int) -> Places:
    """Returns the places of keys, given their counts in `num` shards."""
    return Places() if num == 1 else Places(num, counts, repeated(counts))


def counted(which: tf.Tensor, num: int) -> tf.Tensor:
    """Counts the numbers below `num` in `which`; both int32."""
    return tf.raw_ops.Bincount(
        arr=which, size=num, weights=tf.zeros([0], tf.int32)
    )


def repeated(repeats: tf.Tensor) -> tf.Tensor:
    """Returns i repeated `repeats[i]` times, for each i in turn; int32."""
    # Instead of the fifty ops of `tf.repeat`.
    ends = tf.cumsum(repeats)
    each = tf.raw_ops.UpperBound(
        sorted_inputs=[ends], values=[tf.range(ends[-1])]
    )
    return tf.reshape(each, [-1])

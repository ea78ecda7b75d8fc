"""Maps keys to shards that are searched together.

With many small tables, the number of ops determines the cost, not their size.
So one op handles the keys of all shards of a server where possible; only reads
and writes of variables take an op per shard.
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

    num: int = 1  # Number of shards; if it is 1, the other fields are None.
    counts: tf.Tensor | None = None  # int32 `(num,)`: keys in each shard.
    which: tf.Tensor | None = None  # int32 `(n,)`: the shard of each key.

    def some(self, chosen: tf.Tensor) -> Places:
        """Returns the places of some keys, given by ascending indices."""
        if self.num == 1:
            return self
        which = tf.gather(self.which, chosen)
        return Places(self.num, counted(which, self.num), which)

    def each(self, values: Sequence[int]) -> Any:
        """Returns each key's shard's value, int64; an int if all are equal."""
        if len({*values}) == 1:
            return values[0]
        return tf.gather(np.array(values, np.int64), self.which)

    def split(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Splits values of keys along axis 0 by shard."""
        if self.num == 1:
            return [values]
        return tf.split(values, self.counts, num=self.num)

    def read(
        self,
        by: Callable[..., tf.Tensor],
        shards: Sequence[keras.Variable],
        *values: tf.Tensor,
    ) -> tf.Tensor:
        """Joins the results of `by(shard, *values)` of all shards on axis 0."""
        own = zip(shards, *map(self.split, values), strict=True)
        found = [by(shard.value, *each) for shard, *each in own]
        return tf.concat(found, axis=0) if self.num > 1 else found[0]

    def gather(
        self, shards: Sequence[keras.Variable], rows: tf.Tensor
    ) -> tf.Tensor:
        """Gathers rows of each key's shard."""
        return self.read(tf.gather, shards, rows)

    def scatter(
        self,
        op: Callable[..., tf.Operation],
        shards: Sequence[keras.Variable],
        rows: tf.Tensor,
        values: tf.Tensor,
    ) -> list[tf.Operation]:
        """Changes rows of each key's shard by a raw TensorFlow op."""
        values = tf.cast(values, shards[0].dtype)
        own = zip(shards, self.split(rows), self.split(values), strict=True)
        handle, *_ = inspect.signature(op).parameters  # "resource" or "ref".
        return [
            op(**{handle: shard.value.handle}, indices=at, updates=new)
            for shard, at, new in own
        ]


def places_of(counts: tf.Tensor, num: int) -> Places:
    """Returns the `Places` of keys sorted by shard, given their counts."""
    return Places() if num == 1 else Places(num, counts, repeated(counts))


def counted(which: tf.Tensor, num: int) -> tf.Tensor:
    """Returns how often each number below `num` is in `which`; both int32."""
    return tf.raw_ops.Bincount(
        arr=which, size=num, weights=tf.zeros([0], tf.int32)
    )


def repeated(repeats: tf.Tensor) -> tf.Tensor:
    """Returns each index `i` of `repeats`, `repeats[i]` times; int32."""
    # `tf.repeat` would take fifty ops.
    ends = tf.cumsum(repeats)
    each = tf.raw_ops.UpperBound(
        sorted_inputs=[ends], values=[tf.range(ends[-1])]
    )
    return tf.reshape(each, [-1])

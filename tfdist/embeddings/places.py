"""Which of several shards each of some keys is in: shards searched together.

Of many small tables the number of ops costs, not their size. So what can be
computed for the keys of all shards of a server at once is, and only what reads
or writes a variable is an op for each of them.
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
    """In which shards `n` keys are; those of the first shard come first."""

    num: int = 1  # Of shards; if it is 1, what follows is None.
    counts: tf.Tensor | None = None  # int32 `(num,)`: how many are in each.
    which: tf.Tensor | None = None  # int32 `(n,)`: the shard of each.

    def some(self, chosen: tf.Tensor) -> Places:
        """Those of some of the keys, by ascending indices."""
        if self.num == 1:
            return self
        which = tf.gather(self.which, chosen)
        return Places(self.num, counted(which, self.num), which)

    def each(self, values: Sequence[int]) -> Any:
        """The value of each key's shard, int64; an int if all are equal."""
        if len({*values}) == 1:
            return values[0]
        return tf.gather(np.array(values, np.int64), self.which)

    def split(self, values: tf.Tensor) -> list[tf.Tensor]:
        """What belongs to each shard, along axis 0."""
        if self.num == 1:
            return [values]
        return tf.split(values, self.counts, num=self.num)

    def read(
        self,
        by: Callable[..., tf.Tensor],
        shards: Sequence[keras.Variable],
        *values: tf.Tensor,
    ) -> tf.Tensor:
        """Joins along axis 0 what `by(shard, *values)` reads for its keys."""
        own = zip(shards, *map(self.split, values), strict=True)
        found = [by(shard.value, *each) for shard, *each in own]
        return tf.concat(found, axis=0) if self.num > 1 else found[0]

    def gather(
        self, shards: Sequence[keras.Variable], rows: tf.Tensor
    ) -> tf.Tensor:
        """For each key some rows of its shard."""
        return self.read(tf.gather, shards, rows)

    def scatter(
        self,
        op: Callable[..., tf.Operation],
        shards: Sequence[keras.Variable],
        rows: tf.Tensor,
        values: tf.Tensor,
    ) -> list[tf.Operation]:
        """Changes rows of each key's shard by one of TensorFlow's raw ops."""
        values = tf.cast(values, shards[0].dtype)
        own = zip(shards, self.split(rows), self.split(values), strict=True)
        handle, *_ = inspect.signature(op).parameters  # "resource" or "ref".
        return [
            op(**{handle: shard.value.handle}, indices=at, updates=new)
            for shard, at, new in own
        ]


def places_of(counts: tf.Tensor, num: int) -> Places:
    """Of keys of which each of `num` shards has so many."""
    return Places() if num == 1 else Places(num, counts, repeated(counts))


def counted(which: tf.Tensor, num: int) -> tf.Tensor:
    """How often each number below `num` is in `which`; both int32."""
    return tf.raw_ops.Bincount(
        arr=which, size=num, weights=tf.zeros([0], tf.int32)
    )


def repeated(repeats: tf.Tensor) -> tf.Tensor:
    """0 as often as the first one says, and so on; int32."""
    # In place of the fifty ops of `tf.repeat`.
    ends = tf.cumsum(repeats)
    each = tf.raw_ops.UpperBound(
        sorted_inputs=[ends], values=[tf.range(ends[-1])]
    )
    return tf.reshape(each, [-1])

"""Which rows of which shard a step needs.

Duplicates are found once for all tables of one width together, so the work per
step does not depend on the number of tables, and each row travels once.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.embeddings import lookups
from tfdist.embeddings.index import SEGMENT, mixed, segments


class Group:
    """Tables of one width and optimizer, whose rows are numbered through.

    Shards are ranked by the server that holds them, so that the rows of one
    server are neighbours in every tensor.
    """

    of_many = True

    def __init__(
        self,
        tables: Sequence[Any],
        part: int,
        device_of: Callable[[keras.Variable], str],
    ) -> None:
        self.tables = list(tables)
        self.part = part
        self.dim = tables[0].output_dim
        self._offsets: dict[int, int] = {}
        shards: list[keras.Variable] = []
        runs: list[tuple[int, int, int]] = []
        start = 0
        for table in tables:
            self._offsets[id(table)] = start
            for row, _, shard, position in table.runs:
                row += start
                runs.append((row, len(shards) + shard, row - position))
            shards += table.shards
            start += table.input_dim
        devices = [device_of(shard) for shard in shards]
        ranked = sorted(range(len(shards)), key=lambda i: (devices[i], i))
        starts, holders, shifts = np.array(runs, np.int64).T
        # Of each run of rows: the first one, the shard's rank, and by how much
        # its rows have lower numbers in the shard.
        self._starts, self._shifts = starts, shifts
        self._rank = np.argsort(ranked).astype(np.int32)[holders]
        self.shards = [shards[i] for i in ranked]
        self.num_shards = collections.Counter(sorted(devices))

    def holds(self, table: Any) -> bool:
        """Whether `table` is one of the group's."""
        return id(table) in self._offsets

    def route(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> Route:
        """Finds each unique row once, and the shard that holds it."""
        return self.routed(self._numbered(calls))

    def routed(self, ids: tf.Tensor) -> Route:
        """As `route`, for ids that are numbered through the group."""
        unique, inverse = tf.unique(ids)
        row = self._row_of(unique)
        # The first run starts at 0. (`tf.searchsorted` is a dozen ops more.)
        run = tf.raw_ops.UpperBound(
            sorted_inputs=self._starts[np.newaxis, 1:],
            values=tf.reshape(row, [1, -1]),
        )
        run = tf.reshape(run, [-1])
        rank = tf.gather(self._rank, run)
        num = len(self.shards)
        order = tf.concat(
            tf.dynamic_partition(tf.range(tf.size(unique)), rank, num), axis=0
        )
        local = tf.gather(self._local(unique, run), order)
        counts = tf.raw_ops.Bincount(
            arr=rank, size=num, weights=tf.zeros([0], tf.int32)
        )
        by_device = tf.split(counts, list(self.num_shards.values()))
        sizes = tf.stack([tf.reduce_sum(each) for each in by_device])
        ids = tf.split(local, sizes, num=len(self.num_shards))
        return Route(
            dict(zip(self.num_shards, ids, strict=True)),
            dict(zip(self.num_shards, by_device, strict=True)),
            sizes,
            tf.gather(tf.math.invert_permutation(order), inverse),
            tf.gather(unique, order),
        )

    def _row_of(self, unique: tf.Tensor) -> tf.Tensor:
        """The row of the group in whose run each id is."""
        return unique

    def _local(self, unique: tf.Tensor, run: tf.Tensor) -> tf.Tensor:
        """What the shard that holds the run knows each id by."""
        return unique - tf.gather(self._shifts, run)

    def _numbered(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> tf.Tensor:
        """All ids, numbered through the group, each in its own table."""
        ids = tf.concat([ids for _, ids in calls], axis=0)
        tables = [table for table, _ in calls]
        which = _repeated([lookups.length(ids) for _, ids in calls])

        def each(values: Sequence[int]) -> Any:
            known = np.array(values, np.int64)
            static = isinstance(which, np.ndarray)
            return known[which] if static else tf.gather(known, which)

        limit = each([table.input_dim for table in tables])
        inside = (ids >= 0) & (ids < limit)

        def refuse() -> tf.Operation:
            bad = tf.where(~inside)[:1, 0]
            name = tf.gather([table.path for table in tables], which)
            return tf.raw_ops.Assert(
                condition=False,
                data=[
                    "Ids of table",
                    tf.gather(name, bad),
                    "must be at least 0 and below",
                    tf.gather(limit, bad),
                    "Received:",
                    tf.gather(ids, bad),
                ],
            )

        # An id out of range is a row of the next table, so it must never pass.
        check = tf.cond(tf.reduce_all(inside), tf.no_op, refuse)
        with tf.control_dependencies([check]):
            return ids + each([self._offsets[id(table)] for table in tables])


class KeyedGroup(Group):
    """A `DynamicEmbedding`, whose shards know rows by the keys of ids."""

    of_many = False

    def _row_of(self, unique: tf.Tensor) -> tf.Tensor:
        return segments(unique, self.tables[0].num_segments) * SEGMENT

    def _local(self, unique: tf.Tensor, run: tf.Tensor) -> tf.Tensor:
        return unique

    def _numbered(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> tf.Tensor:
        ids = tf.concat([ids for _, ids in calls], axis=0)
        return mixed(self.tables[0].checked(ids))


@dataclasses.dataclass(frozen=True)
class Route:
    """Where the rows that a step needs of a group are.

    Attributes:
        ids: For each server, int64: the rows of its shards, shard by shard.
        counts: For each server, int32: how many of each shard.
        sizes: How many of each server.
        positions: For each id that was looked up, where all servers' rows,
            one after the other, have its row.
        rows: These rows, numbered through the group; int64 `(n,)`.
    """

    ids: dict[str, tf.Tensor]
    counts: dict[str, tf.Tensor]
    sizes: tf.Tensor
    positions: tf.Tensor
    rows: tf.Tensor

    def size_at(self, device: str) -> tf.Tensor:
        """How many rows are on a server."""
        return self.sizes[list(self.ids).index(device)]


def stacked(lengths: Sequence[Any]) -> Any:
    """A list of ints as it is, else one tensor."""
    static = all(isinstance(length, int) for length in lengths)
    return list(lengths) if static else tf.stack(lengths)


def _repeated(lengths: Sequence[Any]) -> Any:
    """0 as often as the first length says, and so on; if known, an array."""
    repeats = stacked(lengths)
    if isinstance(repeats, list):
        return np.repeat(np.arange(len(repeats)), repeats)
    # In place of the fifty ops of `tf.repeat`.
    ends = tf.cumsum(repeats)
    each = tf.raw_ops.UpperBound(
        sorted_inputs=[ends], values=[tf.range(ends[-1])]
    )
    return tf.reshape(each, [-1])

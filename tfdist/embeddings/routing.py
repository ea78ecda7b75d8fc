"""Finds the rows that a step needs from each shard.

Duplicate ids are removed for all tables of one width together, so the work per
step does not depend on the number of tables, and each row is transferred once.
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
from tfdist.embeddings.index import NO_ID, SEGMENT, mixed, segments
from tfdist.embeddings.places import counted, repeated


class Group:
    """Tables of one width and optimizer, whose rows have consecutive numbers.

    `part` is the index of the optimizer; None for frozen tables. Shards are
    ranked by server, so the rows of a server are contiguous in every tensor.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        part: int | None,
        device_of: Callable[[keras.Variable], str],
    ) -> None:
        self.tables, self.part = list(tables), part
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
        # For each run of rows: the first row, the rank of the shard, and how
        # much to subtract from row numbers to get those in the shard.
        self._starts, self._shifts = starts, shifts
        self._rank = np.argsort(ranked).astype(np.int32)[holders]
        self.shards = [shards[i] for i in ranked]
        self.num_shards = collections.Counter(sorted(devices))

    def holds(self, table: Any) -> bool:
        """Returns whether `table` belongs to the group."""
        return id(table) in self._offsets

    def route(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> Route:
        """Finds the unique rows of lookups, and the shards that hold them."""
        return self.routed(self._numbered(calls))

    def routed(self, ids: tf.Tensor) -> Route:
        """Finds rows as `route` does, for ids numbered across the group."""
        unique, inverse = self._unique(ids)
        row = self._row_of(unique)
        # The first run starts at 0. (`tf.searchsorted` adds a dozen ops.)
        run = tf.raw_ops.UpperBound(
            sorted_inputs=self._starts[np.newaxis, 1:],
            values=tf.reshape(row, [1, -1]),
        )
        run = tf.reshape(run, [-1])
        rank = tf.gather(self._rank, run)
        num = len(self.shards)
        order = tf.concat(
            tf.dynamic_partition(tf.range(tf.size(row)), rank, num), axis=0
        )
        local = tf.gather(self._local(unique, run), order)
        counts = counted(rank, num)
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

    def _unique(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.unique(ids)

    def _row_of(self, unique: tf.Tensor) -> tf.Tensor:
        """Returns a row of the group that is in the same run as each id."""
        return unique

    def _local(self, unique: tf.Tensor, run: tf.Tensor) -> tf.Tensor:
        """Returns what identifies each id in the shard that holds the run."""
        return unique - tf.gather(self._shifts, run)

    def _numbered(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> tf.Tensor:
        """Returns all ids, numbered across the group, after a range check."""
        ids, which = _together(calls)
        limit = _each([table.input_dim for table, _ in calls], which)
        inside = (ids >= 0) & (ids < limit)

        def refused(bad: tf.Tensor) -> list[Any]:
            where = "must be at least 0 and below", tf.gather(limit, bad)
            return [*where, "Received:", tf.gather(ids, bad)]

        # An id out of range would be a row of another table.
        offsets = [self._offsets[id(table)] for table, _ in calls]
        with tf.control_dependencies([_check(inside, calls, which, refused)]):
            return ids + _each(offsets, which)


class KeyedGroup(Group):
    """A group of `DynamicEmbedding`s, whose shards find rows by key.

    Numbered across a group of several tables, ids have shape `(n, 2)`: the
    index of the table and the key. For a single table they are the keys.
    """

    def _unique(self, ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        if ids.shape.rank == 1:
            return tf.unique(ids)
        return tf.raw_ops.UniqueV2(x=ids, axis=[0])

    def _row_of(self, unique: tf.Tensor) -> tf.Tensor:
        nums = [table.num_segments for table in self.tables]
        if unique.shape.rank == 1:
            return segments(unique, nums[0]) * SEGMENT
        which, keys = tf.unstack(unique, num=2, axis=1)
        start = np.array([*self._offsets.values()], np.int64)
        own = segments(keys, tf.gather(np.array(nums, np.int64), which))
        return tf.gather(start, which) + own * SEGMENT

    def _local(self, unique: tf.Tensor, run: tf.Tensor) -> tf.Tensor:
        return unique if unique.shape.rank == 1 else unique[:, 1]

    def _numbered(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> tf.Tensor:
        ids, which = _together(calls)
        told = "must not be", tf.constant(NO_ID, tf.int64)
        check = _check(ids > NO_ID, calls, which, lambda _: told)
        with tf.control_dependencies([check]):
            keys = mixed(ids)
        if len(self.tables) == 1:
            return keys
        tables = [self.tables.index(table) for table, _ in calls]
        return tf.stack([_each(tables, which), keys], axis=1)


def _together(calls: Sequence[tuple[Any, tf.Tensor]]) -> tuple[tf.Tensor, Any]:
    """Joins all ids; also returns each one's call (an array if static)."""
    repeats = stacked([lookups.length(ids) for _, ids in calls])
    is_known = isinstance(repeats, list)
    numbers = np.arange(len(calls))
    which = np.repeat(numbers, repeats) if is_known else repeated(repeats)
    return tf.concat([ids for _, ids in calls], axis=0), which


def _each(values: Sequence[int], which: Any) -> Any:
    """Returns the int64 value of each id's call; an array if it is static."""
    each = np.array(values, np.int64)
    is_known = isinstance(which, np.ndarray)
    return each[which] if is_known else tf.gather(each, which)


def _check(
    inside: tf.Tensor,
    calls: Sequence[tuple[Any, tf.Tensor]],
    which: Any,
    told: Callable[[tf.Tensor], Sequence[Any]],
) -> tf.Operation:
    """Fails if an id is not `inside`; `told` describes the first such id."""
    # Empty if all ids are inside: fewer ops than a `tf.cond`, no functions.
    bad = tf.where(~inside)[:1, 0]
    paths = [table.path for table, _ in calls]
    first = tf.gather(which, bad)
    data = ["Ids of table", tf.gather(paths, first), *told(bad)]
    return tf.raw_ops.Assert(condition=tf.reduce_all(inside), data=data)


@dataclasses.dataclass(frozen=True)
class Route:
    """The locations of the rows that a step needs from a group."""

    # For each server, int64: the row numbers or keys in each shard, in turn.
    ids: dict[str, tf.Tensor]
    counts: dict[str, tf.Tensor]  # For each server, int32: rows of each shard.
    sizes: tf.Tensor  # The number of rows on each server.
    # For each id that was looked up, the index of its row in `rows`.
    positions: tf.Tensor
    rows: tf.Tensor  # Unique rows by server, int64, numbered across the group.

    def size_at(self, device: str) -> tf.Tensor:
        """Returns the number of rows from a server."""
        return self.sizes[list(self.ids).index(device)]


def stacked(lengths: Sequence[Any]) -> Any:
    """Returns a list of ints unchanged; stacks anything else to a tensor."""
    static = all(isinstance(length, int) for length in lengths)
    return list(lengths) if static else tf.stack(lengths)

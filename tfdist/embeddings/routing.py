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
from tfdist.embeddings.index import NO_ID, SEGMENT, mixed, segments
from tfdist.embeddings.places import counted, repeated


class Group:
    """Tables of one width and optimizer, whose rows are numbered through.

    `part` is the index of that optimizer; None: they are frozen. Shards are
    ranked by server, so that its rows are neighbours in every tensor.
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
        unique, inverse = self._unique(ids)
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
        """The row of the group in whose run each id is."""
        return unique

    def _local(self, unique: tf.Tensor, run: tf.Tensor) -> tf.Tensor:
        """What the shard that holds the run knows each id by."""
        return unique - tf.gather(self._shifts, run)

    def _numbered(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> tf.Tensor:
        """All ids, numbered through the group, each in its own table."""
        ids, which = _together(calls)
        limit = _each([table.input_dim for table, _ in calls], which)
        inside = (ids >= 0) & (ids < limit)

        def refused(bad: tf.Tensor) -> list[Any]:
            where = "must be at least 0 and below", tf.gather(limit, bad)
            return [*where, "Received:", tf.gather(ids, bad)]

        # An id out of range is a row of the next table, so it must never pass.
        offsets = [self._offsets[id(table)] for table, _ in calls]
        with tf.control_dependencies([_check(inside, calls, which, refused)]):
            return ids + _each(offsets, which)


class KeyedGroup(Group):
    """`DynamicEmbedding`s, whose shards know rows by the keys of ids.

    Of several tables, numbered through the group are `(n, 2)`: which table of
    the group, and the key. A table by itself needs the keys alone.
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
    """All ids, and which of the calls each is of: an array, if it is known."""
    repeats = stacked([lookups.length(ids) for _, ids in calls])
    is_known = isinstance(repeats, list)
    numbers = np.arange(len(calls))
    which = np.repeat(numbers, repeats) if is_known else repeated(repeats)
    return tf.concat([ids for _, ids in calls], axis=0), which


def _each(values: Sequence[int], which: Any) -> Any:
    """For each id the value of its call, int64; an array if it is known."""
    each = np.array(values, np.int64)
    is_known = isinstance(which, np.ndarray)
    return each[which] if is_known else tf.gather(each, which)


def _check(
    inside: tf.Tensor,
    calls: Sequence[tuple[Any, tf.Tensor]],
    which: Any,
    told: Callable[[tf.Tensor], Sequence[Any]],
) -> tf.Operation:
    """Fails if an id is not `inside`; `told` what of the first such one."""
    # Empty where all are: fewer ops than a `tf.cond` has, and no functions.
    bad = tf.where(~inside)[:1, 0]
    paths = [table.path for table, _ in calls]
    first = tf.gather(which, bad)
    data = ["Ids of table", tf.gather(paths, first), *told(bad)]
    return tf.raw_ops.Assert(condition=tf.reduce_all(inside), data=data)


@dataclasses.dataclass(frozen=True)
class Route:
    """Where the rows that a step needs of a group are."""

    # For each server, int64: the rows of its shards, shard by shard.
    ids: dict[str, tf.Tensor]
    counts: dict[str, tf.Tensor]  # For each server, int32: one for each shard.
    sizes: tf.Tensor  # How many of each server.
    # For each id that was looked up, its row among those of all servers.
    positions: tf.Tensor
    rows: tf.Tensor  # These rows, numbered through the group; int64 `(n,)`.

    def size_at(self, device: str) -> tf.Tensor:
        """How many rows are on a server."""
        return self.sizes[list(self.ids).index(device)]


def stacked(lengths: Sequence[Any]) -> Any:
    """A list of ints as it is, else one tensor."""
    static = all(isinstance(length, int) for length in lengths)
    return list(lengths) if static else tf.stack(lengths)

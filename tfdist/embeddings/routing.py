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


class Group:
    """Tables of one width and optimizer, whose rows are numbered through.

    Shards are ranked by the server that holds them, so that the rows of one
    server are neighbours in every tensor.
    """

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
        shards: list[tuple[keras.Variable, int]] = []
        start = 0
        for table in tables:
            self._offsets[id(table)] = start
            for shard, (offset, _) in zip(
                table.shards, table.slices, strict=True
            ):
                shards.append((shard, start + offset))
            start += table.input_dim
        self._starts = np.array([start for _, start in shards], np.int64)
        devices = [device_of(shard) for shard, _ in shards]
        ranked = sorted(range(len(shards)), key=lambda i: (devices[i], i))
        self._rank = np.argsort(ranked).astype(np.int32)
        self._ranked_starts = self._starts[ranked]
        self.shards = [shards[i][0] for i in ranked]
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
        shard = tf.searchsorted(self._starts, unique, side="right") - 1
        rank = tf.gather(self._rank, shard)
        num = len(self.shards)
        order = tf.concat(
            tf.dynamic_partition(tf.range(tf.size(unique)), rank, num), axis=0
        )
        local = tf.gather(unique - tf.gather(self._starts, shard), order)
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
        )

    def numbered(self, route: Route) -> tf.Tensor:
        """The rows of a route, numbered through the group; int64 `(n,)`."""
        counts = tf.concat(list(route.counts.values()), axis=0)
        local = tf.concat(list(route.ids.values()), axis=0)
        return local + tf.repeat(self._ranked_starts, counts)

    def _numbered(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> tf.Tensor:
        """All ids, numbered through the group, each in its own table."""
        lengths = [lookups.length(ids) for _, ids in calls]
        ids = tf.concat([ids for _, ids in calls], axis=0)
        offsets = [self._offsets[id(table)] for table, _ in calls]
        limits = [table.input_dim for table, _ in calls]
        names = [table.path for table, _ in calls]
        limit = _repeated(np.array(limits, np.int64), lengths)
        inside = (ids >= 0) & (ids < limit)
        # An id out of range is a row of the next table, so it must never pass.
        bad = tf.where(~inside)[:1, 0]
        which = _repeated(np.arange(len(calls), dtype=np.int64), lengths)
        check = tf.debugging.Assert(
            tf.reduce_all(inside),
            [
                "Ids of table",
                tf.gather(names, tf.gather(which, bad)),
                "must be at least 0 and below",
                tf.gather(limit, bad),
                "Received:",
                tf.gather(ids, bad),
            ],
        )
        with tf.control_dependencies([check]):
            return ids + _repeated(np.array(offsets, np.int64), lengths)


@dataclasses.dataclass(frozen=True)
class Route:
    """Where the rows that a step needs of a group are.

    Attributes:
        ids: For each server, int64: the rows of its shards, shard by shard.
        counts: For each server, int32: how many of each shard.
        sizes: How many of each server.
        positions: For each id that was looked up, where all servers' rows,
            one after the other, have its row.
    """

    ids: dict[str, tf.Tensor]
    counts: dict[str, tf.Tensor]
    sizes: tf.Tensor
    positions: tf.Tensor

    def size_at(self, device: str) -> tf.Tensor:
        """How many rows are on a server."""
        return self.sizes[list(self.ids).index(device)]


def stacked(lengths: Sequence[Any]) -> Any:
    """A list of ints as it is, else one tensor."""
    static = all(isinstance(length, int) for length in lengths)
    return list(lengths) if static else tf.stack(lengths)


def _repeated(values: np.ndarray, lengths: Sequence[Any]) -> tf.Tensor:
    """Each value as often as its length says; a constant where possible."""
    repeats = stacked(lengths)
    if isinstance(repeats, list):
        return tf.constant(np.repeat(values, repeats))
    return tf.repeat(values, repeats)

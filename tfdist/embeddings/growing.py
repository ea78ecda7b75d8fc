"""Reads and claims rows of a shard; in a growing one they have to be found.

Whoever reads or updates rows of a shard asks here, by row or by key, as the
shard's table has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist._tf.mutex import alone
from tfdist.embeddings import admission
from tfdist.embeddings.index import (
    EMPTY,
    NO_ROOM,
    SEGMENT,
    Index,
    find,
    insert,
    segments,
    still_held,
)

# Attribute of a shard in which ids have to be found.
_GROWING = "_tfdist_growing"
COUNTED = "refused", "not_admitted", "evicted_ids"
"""Columns of the counters: gradients of ids that found no room, and of ids that
were not admitted yet; ids that lost their rows."""
# The mutex of a server's tables that evict.
_EVICTING = "tfdist_evicting"

Beside = Sequence[tuple[keras.Variable, float | None]]
"""Slots of a shard: at which value each begins; None: as the row does."""


class Found(NamedTuple):
    """Keys, their slots when their rows were read, -1: none, and the rows."""

    keys: tf.Tensor
    slots: tf.Tensor
    rows: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Growing:
    """A shard that gives rows to ids as they come.

    Attributes:
        table: The `DynamicEmbedding`.
        shard: The rows.
        first_segment: Of those that the shard holds.
        keys: int64 `(buckets, 16)`: whose rows they are, in the same order.
        seen: int32, one for each row: number of the last update, from 1, if
            the table evicts; else 0.
        counters: int64, `(segments, 3)`; see `COUNTED`.
        sketch: int32, of ids without a row; None: all are admitted.
    """

    table: Any
    shard: keras.Variable
    first_segment: int
    keys: keras.Variable
    seen: keras.Variable
    counters: keras.Variable
    sketch: keras.Variable | None = None

    def __post_init__(self) -> None:
        setattr(self.shard, _GROWING, self)

    @property
    def _index(self) -> Index:
        return Index(
            self.keys.value,
            self.shard.path,
            self.first_segment,
            self.table.num_segments,
        )

    @property
    def pieces(self) -> list[keras.Variable]:
        """All that the shard consists of."""
        own = [self.shard, self.keys, self.seen, self.counters]
        return own if self.sketch is None else [*own, self.sketch]

    def ids_by_segment(self) -> tf.Tensor:
        """How many ids each of its segments holds, counted where they are."""
        with tf.device(self.keys.value.device):
            held = tf.reshape(self.keys.value, [-1, SEGMENT])
            return tf.math.count_nonzero(held, axis=1)

    def rows(self, keys: tf.Tensor) -> tuple[tf.Tensor, Found]:
        """The rows of keys; of those that have none, what one begins with."""
        slots = find(self._index, keys)
        rows = tf.gather(self.shard.value, tf.maximum(slots, 0))
        if self.table.evict_after_steps:
            # Was it another's row by then?
            with tf.control_dependencies([rows]):
                slots = still_held(self._index, keys, slots)
        missing = tf.where(slots < 0)[:, 0]

        def some() -> tf.Tensor:
            first = self.table.first_rows(tf.gather(keys, missing))
            return tf.tensor_scatter_nd_update(
                rows, missing[:, tf.newaxis], tf.cast(first, rows.dtype)
            )

        rows = tf.cond(tf.size(missing) > 0, some, lambda: rows)
        return rows, Found(keys, slots, rows)

    def claimed(
        self,
        ids: Found | tf.Tensor,
        gradient: tf.Tensor,
        iteration: tf.Tensor,
        beside: Beside,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Slots of unique keys, and their gradients.

        Those that have no row get one, if they are admitted and there is room;
        else they are left out, and counted. An id that has lost its row since
        it was read is a new one.

        Args:
            ids: Keys, or as `rows` has returned them.
            gradient: Of each.
            iteration: Updates before this one, int64.
            beside: What begins with a row.
        """
        found = ids if isinstance(ids, Found) else None
        keys = found.keys if found else ids
        if self.table.evict_after_steps or not found:
            found, slots = None, find(self._index, keys)
        else:
            slots = found.slots  # Nobody loses one.
        now = tf.cast(iteration + 1, tf.int32)
        if self.table.evict_after_steps:
            held = tf.boolean_mask(slots, slots >= 0)
            # A worker may be late.
            latest = tf.maximum(tf.gather(self.seen.value, held), now)
            _scatter(self.seen, held, latest)

        def grown() -> tuple[tf.Tensor, tf.Tensor]:
            missing = tf.where(slots < 0)
            new = tf.gather_nd(keys, missing)
            # Not while others wait.
            if found:
                rows = tf.gather_nd(found.rows, missing)
            else:
                rows = self.table.first_rows(new)
            given = self._inserted(new, rows, now, beside)
            every = tf.tensor_scatter_nd_update(slots, missing, given)

            def kept() -> tuple[tf.Tensor, tf.Tensor]:
                self._refuse(keys, every)
                kept = tf.where(every >= 0)[:, 0]
                return tf.gather(every, kept), tf.gather(gradient, kept)

            return tf.cond(
                tf.reduce_all(given >= 0), lambda: (every, gradient), kept
            )

        return tf.cond(
            tf.reduce_all(slots >= 0), lambda: (slots, gradient), grown
        )

    def _inserted(
        self,
        new: tf.Tensor,
        rows: tf.Tensor,
        now: tf.Tensor,
        beside: Beside,
    ) -> tf.Tensor:
        """Slots of keys that begin with rows; see `insert`."""
        evicts = self.table.evict_after_steps

        def begin(
            slots: tf.Tensor, which: tf.Tensor, lost: tf.Tensor
        ) -> list[Any]:
            own = tf.gather(rows, which)
            ops = [_scatter(self.shard, slots, own)]
            for variable, value in beside:
                first = own if value is None else tf.fill(tf.shape(own), value)
                ops.append(_scatter(variable, slots, first))
            if evicts:
                ops.append(_scatter(self.seen, slots, now))
                lost = tf.boolean_mask(lost, tf.not_equal(lost, EMPTY))
                ops.append(self._count("evicted_ids", self._segments(lost)))
            return ops

        def age(slots: tf.Tensor) -> tf.Tensor:
            steps = now - tf.gather(self.seen.value, slots)
            return tf.where(steps >= evicts, steps, 0)

        admit = None if self.sketch is None else self._admitted
        return insert(self._index, new, begin, admit, age if evicts else None)

    def _admitted(self, keys: tf.Tensor) -> tf.Tensor:
        """Which of keys without a slot were seen often enough, now too."""
        assert self.sketch is not None
        segment = self._segments(keys)
        times = admission.seen_again(self.sketch.value, segment, keys)
        admitted = times >= self.table.admit_after
        waiting = tf.boolean_mask(segment, ~admitted)
        before = self._periods(waiting)
        self._count("not_admitted", waiting)
        is_due = tf.not_equal(before, self._periods(waiting))
        admission.age(self.sketch.value, tf.boolean_mask(waiting, is_due))
        return admitted

    def _periods(self, segment: tf.Tensor) -> tf.Tensor:
        """After how many periods of its sketch each segment is."""
        counts = tf.gather(self.counters.value, segment)
        return counts[:, COUNTED.index("not_admitted")] // admission.PERIOD

    def _segments(self, keys: tf.Tensor) -> tf.Tensor:
        return segments(keys, self.table.num_segments) - self.first_segment

    def _count(self, what: str, segment: tf.Tensor) -> tf.Operation:
        columns = tf.fill(tf.shape(segment), COUNTED.index(what))
        return tf.raw_ops.ResourceScatterAdd(
            resource=self.counters.value.handle,
            indices=segment,
            updates=tf.one_hot(columns, len(COUNTED), dtype=tf.int64),
        )

    def _refuse(self, keys: tf.Tensor, slots: tf.Tensor) -> None:
        """Counts those that found no room; all must be able to."""
        rows = self.shard.shape[0]
        # No quotes: TensorFlow would escape them.
        message = (
            f"One batch has more ids than {self.shard.path} has rows: {rows}. "
            "Give the table a capacity of several batches; now it is "
            f"{self.table.input_dim}. Ids of the batch there:"
        )
        number = tf.size(keys)
        check = tf.debugging.Assert(number <= rows, [message, number])
        refused = tf.boolean_mask(keys, tf.equal(slots, NO_ROOM))
        with tf.control_dependencies([check]):
            self._count("refused", self._segments(refused))


def _scatter(
    variable: keras.Variable, slots: tf.Tensor, values: tf.Tensor
) -> tf.Operation:
    return tf.raw_ops.ResourceScatterUpdate(
        resource=variable.value.handle,
        indices=slots,
        updates=tf.cast(values, variable.dtype),
    )


def rows_at(
    shard: keras.Variable, ids: tf.Tensor
) -> tuple[tf.Tensor, Found | tf.Tensor]:
    """Rows of a shard, where it is, and what their update has to know.

    `ids` are rows, or keys if it grows.
    """
    growing = growing_of(shard)
    if growing:
        return growing.rows(ids)
    return tf.gather(shard.value, ids), ids


def taking_turns(
    shards: Iterable[keras.Variable],
    update: Callable[[], None],
    after: Sequence[tf.Tensor],
) -> None:
    """Runs a server's update; of tables that evict, while no other runs.

    Else an id might lose its slot when its gradient is on the way to it.
    """
    found = filter(None, map(growing_of, shards))
    if any(growing.table.evict_after_steps for growing in found):
        alone(_EVICTING, update, after)
    else:
        update()


def growing_of(shard: keras.Variable) -> Growing | None:
    """How rows of a shard are claimed; None: by row, they are all there."""
    return getattr(shard, _GROWING, None)

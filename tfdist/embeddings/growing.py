"""Reads rows of a server's shards, and gives rows to new ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist._tf.mutex import locked
from tfdist._tf.tracing import traced_once
from tfdist.embeddings import admission, index
from tfdist.embeddings.places import WRITE, Places, places_of

# Attribute of the shards of growing tables.
_GROWING = "_tfdist_growing"
COUNTED = "refused", "not_admitted", "evicted_ids"
"""Columns of the counters: gradients of ids that found no room, gradients of
ids that were not admitted yet, and ids that lost their rows."""
_EVICTING = "tfdist_evicting"  # A server's mutex for tables that evict.
_MANY = 8  # Shards of a server whose functions are not inlined.

SlotDefaults = Sequence[tuple[keras.Variable, float | None]]
"""Slot variables of a shard and their initial values (None: the row's)."""


class Found(NamedTuple):
    """Keys of ids and, if their rows have been read, the results."""

    keys: tf.Tensor  # int64 `(n,)`.
    places: Places  # The shard of each key.
    slots: Any = None  # The slot of each key in its shard; -1: none.
    rows: Any = None  # The rows that were read.
    is_whole: Any = None  # A scalar: whether all keys have slots.


@dataclasses.dataclass(frozen=True)
class Growing:
    """A shard that gives rows to new ids, and its auxiliary variables."""

    table: Any  # The `DynamicEmbedding`.
    shard: keras.Variable  # The rows.
    first_segment: int  # Index in the table of the first segment of the shard.
    # The key of each row, in the order of rows; int64 `(buckets, 16)`.
    keys: keras.Variable
    # int32, one value per row: if the table evicts, the number of the last
    # update, counted from 1 and modulo 2**32; else 0.
    seen: keras.Variable
    counters: keras.Variable  # int64 `(segments, 3)`; see `COUNTED`.
    # int32, counts ids without a row; None: all ids are admitted.
    sketch: keras.Variable | None = None

    def __post_init__(self) -> None:
        setattr(self.shard, _GROWING, self)

    @property
    def pieces(self) -> list[keras.Variable]:
        """All variables of the shard."""
        own = [self.shard, self.keys, self.seen, self.counters]
        return own if self.sketch is None else [*own, self.sketch]

    def ids_by_segment(self) -> tf.Tensor:
        """Counts the ids in each segment, on the device of the keys."""
        with tf.device(self.keys.value.device):
            held = tf.reshape(self.keys.value, [-1, index.SEGMENT])
            return tf.math.count_nonzero(held, axis=1)


class GrowingShards:
    """Shards of one server and one `group_key`, which are searched together."""

    def __init__(self, shards: Sequence[keras.Variable]) -> None:
        own: list[Growing] = [getattr(shard, _GROWING) for shard in shards]
        self.shards = list(shards)
        self._tables = [each.table for each in own]
        self._seen = [each.seen for each in own]
        self._counters = [each.counters for each in own]
        self._sketches = [e.sketch for e in own if e.sketch is not None]
        firsts = [each.first_segment for each in own]
        nums = [table.num_segments for table in self._tables]
        self._index = index.Index([each.keys for each in own], firsts, nums)
        self._admit_after = self._tables[0].admit_after
        self.evicts = self._tables[0].evict_after_steps

    def rows(self, asked: Found) -> Found:
        """Reads the rows of keys; a key without one reads its initial row."""
        keys, places = asked.keys, asked.places
        slots = index.find(self._index, keys, places)
        rows = places.gather(self.shards, tf.maximum(slots, 0))
        if self.evicts:
            # Another key may have taken the slot before the row was read.
            with tf.control_dependencies([rows]):
                slots = index.still_held(self._index, keys, slots, places)

        def some() -> tf.Tensor:
            missing = tf.where(slots < 0)
            new, its = tf.gather_nd(keys, missing), places.some(missing[:, 0])
            first = tf.cast(self._first_rows(new, its), rows.dtype)
            return tf.tensor_scatter_nd_update(rows, missing, first)

        is_whole = tf.reduce_all(slots >= 0)
        rows = tf.cond(is_whole, lambda: rows, self._rare(some))
        return Found(keys, places, slots, rows, is_whole)

    def _first_rows(self, keys: tf.Tensor, places: Places) -> tf.Tensor:
        salts = places.each([table.salt for table in self._tables])
        return self._tables[0].first_rows(keys, salts)

    def claimed(
        self,
        found: Found,
        gradient: tf.Tensor,
        iteration: tf.Tensor,
        its_slots: Sequence[SlotDefaults],
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Returns for each shard the slots of its unique keys, and gradients.

        Keys without a row get one, if they are admitted and there is room; else
        they are left out and counted. An id that lost its row after the row was
        read counts as new. `iteration`, int64, is the number of earlier
        updates; `its_slots` has the slot variables of each shard, in one order.
        """
        keys, places, slots, read, is_whole = found
        now = tf.cast(iteration + 1, tf.int32)
        if self.evicts or slots is None:
            read, slots = None, index.find(self._index, keys, places)
            is_whole = tf.reduce_all(slots >= 0)
        if self.evicts:
            held = tf.where(slots >= 0)[:, 0]
            self._see(tf.gather(slots, held), now, places.some(held))

        def grown() -> list[tf.Tensor]:
            missing = tf.where(slots < 0)
            new, its = tf.gather_nd(keys, missing), places.some(missing[:, 0])
            # Computed here, not in `_inserted`, which holds a mutex.
            if read is None:
                rows = self._first_rows(new, its)
            else:
                rows = tf.gather_nd(read, missing)
            given = self._inserted(new, its, rows, now, its_slots)
            every = tf.tensor_scatter_nd_update(slots, missing, given)

            def kept() -> list[tf.Tensor]:
                self._refuse(keys, every, places)
                kept = tf.where(every >= 0)[:, 0]
                own = tf.gather(every, kept), tf.gather(gradient, kept)
                return [*own, *counts_of(places.some(kept))]

            have_all = tf.reduce_all(given >= 0)
            return tf.cond(have_all, lambda: whole(every), self._rare(kept))

        def counts_of(places: Places) -> list[tf.Tensor]:
            return [] if places.counts is None else [places.counts]

        def whole(slots: tf.Tensor) -> list[tf.Tensor]:
            return [slots, gradient, *counts_of(places)]

        slots, gradient, *counts = tf.cond(
            is_whole, lambda: whole(slots), self._rare(grown)
        )
        if counts:
            places = places._replace(counts=counts[0])
        own = places.split(slots), places.split(gradient)
        return [*zip(*own, strict=True)]

    def _rare(self, branch: Callable[[], Any]) -> Callable[[], Any]:
        """Prepares a branch of a `tf.cond` that few steps take."""
        return branch

    def _see(self, slots: tf.Tensor, now: tf.Tensor, places: Places) -> None:
        """Records that slots were seen at update `now`."""
        seen = places.gather(self._seen, slots)
        # A slow worker may report an earlier update than others did.
        latest = tf.where(_passed(seen, now) < 0, seen, now)
        places.scatter(WRITE, self._seen, slots, latest)

    def _inserted(
        self,
        new: tf.Tensor,
        places: Places,
        rows: tf.Tensor,
        now: tf.Tensor,
        its_slots: Sequence[SlotDefaults],
    ) -> tf.Tensor:
        """Returns slots of new keys, initialized with `rows`; see `insert`."""

        def begin(
            slots: tf.Tensor, places: Places, which: tf.Tensor, lost: tf.Tensor
        ) -> list[Any]:
            own = tf.gather(rows, which)
            ops = places.scatter(WRITE, self.shards, slots, own)
            for kind in zip(*its_slots, strict=True):
                variables, (value, *_) = zip(*kind, strict=True)
                first = own if value is None else tf.fill(tf.shape(own), value)
                ops += places.scatter(WRITE, variables, slots, first)
            if self.evicts:
                at = tf.fill(tf.shape(slots), now)
                ops += places.scatter(WRITE, self._seen, slots, at)
                taken = tf.where(tf.not_equal(lost, index.EMPTY))[:, 0]
                segment = tf.gather(slots, taken) // index.SEGMENT
                ops += self._count("evicted_ids", segment, places.some(taken))
            return ops

        def age(slots: tf.Tensor, places: Places) -> tf.Tensor:
            steps = _passed(places.gather(self._seen, slots), now)
            return tf.where(steps >= self.evicts, steps, 0)

        return index.insert(
            self._index,
            new,
            places,
            begin,
            self._admitted if self._sketches else None,
            age if self.evicts else None,
        )

    def _admitted(self, keys: tf.Tensor, places: Places) -> tf.Tensor:
        """Counts keys without a slot; returns which were seen often enough."""
        segment = index.own_segments(self._index, keys, places)
        times = admission.seen_again(self._sketches, segment, keys, places)
        waiting = tf.where(times < self._admit_after)[:, 0]
        segment, places = tf.gather(segment, waiting), places.some(waiting)
        self._count("not_admitted", segment, places)
        return times >= self._admit_after

    def _periods(self, segment: tf.Tensor, places: Places) -> tf.Tensor:
        """Returns how many periods of its sketch each segment has completed.

        Evictions count too: the id that evicts another one was also counted.
        """
        counts = places.gather(self._counters, segment)
        sights = tf.reduce_sum(counts[:, COUNTED.index("not_admitted") :], 1)
        return sights // admission.PERIOD

    def _count(
        self, what: str, segment: tf.Tensor, places: Places
    ) -> list[tf.Operation]:
        columns = tf.fill(tf.shape(segment), COUNTED.index(what))
        ones = tf.one_hot(columns, len(COUNTED), dtype=tf.int64)
        ages = self._sketches and what != "refused"
        before = self._periods(segment, places) if ages else None
        add = tf.raw_ops.ResourceScatterAdd
        ops = places.scatter(add, self._counters, segment, ones)
        if ages:
            due = tf.where(before != self._periods(segment, places))[:, 0]
            segment, places = tf.gather(segment, due), places.some(due)
            admission.age(self._sketches, segment, places)
        return ops

    def _refuse(
        self, keys: tf.Tensor, slots: tf.Tensor, places: Places
    ) -> None:
        """Counts keys that found no room; fails if a batch exceeds a shard."""
        sizes = [shard.shape[0] for shard in self.shards]
        numbers = [tf.size(keys)] if places.num == 1 else places.counts
        many = tf.where(tf.greater(numbers, sizes))[:1, 0]
        # No quotes: TensorFlow would escape them.
        messages = [
            f"One batch has more ids than {shard.path} has rows: {size}. Give "
            "the table a capacity of several batches, not of "
            f"{table.input_dim} rows. Number of ids of the batch in this shard:"
            for shard, size, table in zip(
                self.shards, sizes, self._tables, strict=True
            )
        ]
        message = tf.strings.reduce_join(tf.gather(messages, many))
        check = tf.debugging.Assert(
            tf.equal(tf.size(many), 0), [message, tf.gather(numbers, many)]
        )
        refused = tf.where(tf.equal(slots, index.NO_ROOM))[:, 0]
        places, its = places.some(refused), tf.gather(keys, refused)
        segment = index.own_segments(self._index, its, places)
        with tf.control_dependencies([check]):
            self._count("refused", segment, places)


def _passed(seen: tf.Tensor, now: tf.Tensor) -> tf.Tensor:
    """Returns the int32 number of updates from `seen` to `now`, modulo 2**32.

    Negative where `seen` is later; `OLDEST` where the distance exceeds it.
    """
    steps = now - seen
    is_near = (steps >= -index.OLDEST) & (steps <= index.OLDEST)
    return tf.where(is_near, steps, index.OLDEST)


class TracedShards(GrowingShards):
    """`GrowingShards` for functions that unroll many steps of a loop.

    Each method is traced only once, on the device of the shards. Steps inline
    the methods for a few shards: 26 would take seconds longer to compile.
    """

    def __init__(self, shards: Sequence[keras.Variable]) -> None:
        super().__init__(shards)
        rows, self._inline = super().rows, len(shards) < _MANY
        self._rows = traced_once(
            lambda asked: tuple(rows(asked))[2:], self._inline
        )
        self._claimed: Callable[..., Any] | None = None

    def _rare(self, branch: Callable[[], Any]) -> Callable[[], Any]:
        # As one op. A step would pass over all ops of a branch that is skipped.
        return traced_once(branch)

    def rows(self, asked: Found) -> Found:
        """See `GrowingShards`."""
        slots, rows, is_whole = self._rows(asked)
        return Found(asked.keys, asked.places, slots, rows, is_whole)

    def claimed(
        self,
        found: Found,
        gradient: tf.Tensor,
        iteration: tf.Tensor,
        its_slots: Sequence[SlotDefaults],
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """See `GrowingShards`; each call must pass the same `its_slots`."""
        if self._claimed is None:
            claimed: Callable[..., Any] = super().claimed
            # A partial would make TensorFlow treat the variables as inputs.
            self._claimed = traced_once(
                lambda *own: claimed(*own, its_slots), self._inline
            )
        return self._claimed(found, gradient, iteration)


def requested_keys(
    ids: Found | Sequence[tf.Tensor], counts: tf.Tensor
) -> Found:
    """Joins the keys of growing shards; `counts` has the number for each."""
    if isinstance(ids, Found):
        return ids
    return Found(tf.concat(ids, axis=0), places_of(counts, len(ids)))


def rows_at(
    shards: Sequence[keras.Variable] | GrowingShards,
    ids: Sequence[tf.Tensor],
    counts: tf.Tensor,
) -> tuple[tf.Tensor, Found | Sequence[tf.Tensor]]:
    """Reads rows by number or key; returns them and what updates need."""
    if isinstance(shards, GrowingShards):
        found = shards.rows(requested_keys(ids, counts))
        return found.rows, found
    pairs = zip(shards, ids, strict=True)
    return tf.concat([tf.gather(s.value, i) for s, i in pairs], axis=0), ids


def serialized_updates(
    shards: Iterable[keras.Variable],
    update: Callable[[], None],
    after: Sequence[tf.Tensor],
) -> None:
    """Runs a server's update; updates of tables that evict exclude each other.

    Otherwise an id might lose its slot before its gradient is applied.
    """
    found = filter(None, map(growing_of, shards))
    if any(growing.table.evict_after_steps for growing in found):
        locked(_EVICTING, update, after)
    else:
        update()


def growing_of(shard: keras.Variable) -> Growing | None:
    """Returns the `Growing` of a shard; None for an ordinary table."""
    return getattr(shard, _GROWING, None)

"""Which slot of a growing table holds an id: find, and insert.

A table is cut into segments of 4,096 slots, a segment into buckets of 16. An
id is mixed into a key, whose upper bits choose a segment and whose lower ones
two buckets of it: the key is in one of the two or nowhere. So the slot of an id
does not depend on how segments are dealt to shards.

Who finds takes no lock. Inserts take turns, in each shard, and publish a key
when its row is ready: who finds a key finds its row. Where keys lose their
slots to others, who finds looks again when it has the row (see `growing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tf.mutex import alone

BUCKET, SEGMENT = 16, 4096
EMPTY = 0
"""The key of a slot that holds no id; of `NO_ID` alone."""
NO_ID = tf.int64.min
_BUCKETS = SEGMENT // BUCKET
# Of MurmurHash3's finalizer, which is a bijection.
_FACTORS = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53

NO_ROOM, NOT_ADMITTED = -1, -2
"""In the place of a slot: why a key has none."""
# Ages above count as this one.
_OLDEST = 1 << 30

Begin = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], list[Any]]
"""Has slots begin, with the rows of which of the keys; returns ops.

And told whose keys lost them: `EMPTY`, nobody's.
"""


@dataclasses.dataclass(frozen=True)
class Index:
    """Where the ids of one shard are.

    Attributes:
        keys: int64 variable `(buckets, 16)`, where the shard is.
        name: Of its mutex, no other's.
        first_segment: Of those that the shard holds.
        num_segments: Of the whole table.
    """

    keys: Any
    name: str
    first_segment: int
    num_segments: int


def mixed(ids: tf.Tensor) -> tf.Tensor:
    """The key of each int64 id: a bijection, from `NO_ID` to `EMPTY`.

    >>> mixed(tf.constant([NO_ID, 0, 1])).numpy().tolist()
    [0, -8108722261328812909, 7913832204677143650]
    """
    x = tf.bitcast(tf.bitwise.bitwise_xor(ids, NO_ID), tf.uint64)
    for factor in _FACTORS:
        x = _shifted(x, 33) * tf.constant(factor, tf.uint64)
    return tf.bitcast(_shifted(x, 33), tf.int64)


def segments(keys: tf.Tensor, num_segments: int) -> tf.Tensor:
    """The segment of each key, int64: by the upper half of its bits."""
    upper = tf.bitwise.right_shift(
        tf.bitcast(keys, tf.uint64), tf.constant(32, tf.uint64)
    )
    scaled = tf.cast(upper, tf.int64) * num_segments
    return tf.bitwise.right_shift(scaled, tf.constant(32, tf.int64))


def find(index: Index, wanted: tf.Tensor) -> tf.Tensor:
    """The slot of each key in the shard, int64; -1 where it has none."""
    return _found(index, wanted, _buckets(index, wanted))


def still_held(index: Index, wanted: tf.Tensor, slots: tf.Tensor) -> tf.Tensor:
    """`slots` that were found before; -1 where another key is by now."""
    at = tf.maximum(slots, 0)
    held = tf.gather_nd(
        index.keys, tf.stack([at // BUCKET, at % BUCKET], axis=1)
    )
    return tf.where(tf.equal(held, wanted), slots, -1)


def insert(
    index: Index,
    wanted: tf.Tensor,
    begin: Begin,
    admit: Callable[[tf.Tensor], tf.Tensor] | None = None,
    age: Callable[[tf.Tensor], tf.Tensor] | None = None,
) -> tf.Tensor:
    """As `find`, once keys that are missing got slots where there is room.

    Args:
        index: Where to.
        wanted: Keys, unique.
        begin: Runs before anybody can find them.
        admit: Which of missing keys may get a slot. Default: all.
        age: Of slots, int32: where a bucket is full, the oldest one above 0
            goes to a new key. Default: none does.

    Returns:
        The slot of each key, `NO_ROOM` or `NOT_ADMITTED`.
    """
    buckets = _buckets(index, wanted)

    def run() -> tf.Tensor:
        def step(slots: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _round(index, wanted, buckets, slots, begin, age)

        slots = _found(index, wanted, buckets)
        if admit:
            new = tf.where(slots < 0)
            admitted = tf.cast(admit(tf.gather_nd(wanted, new)), tf.int64)
            # Those who are, one more: `NO_ROOM`, until there is some.
            slots = tf.tensor_scatter_nd_update(
                slots, new, NOT_ADMITTED + admitted
            )
        return tf.while_loop(
            lambda slots, goes_on: goes_on & tf.reduce_any(slots == NO_ROOM),
            step,
            [slots, tf.constant(True)],
            shape_invariants=[tf.TensorShape([None]), tf.TensorShape([])],
        )[0]

    return alone(index.name, run)


def _round(
    index: Index,
    wanted: tf.Tensor,
    buckets: tf.Tensor,
    slots: tf.Tensor,
    begin: Begin,
    age: Callable[[tf.Tensor], tf.Tensor] | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives slots to keys, in the emptier one of each key's two buckets.

    In one round a bucket gives away one slot: of many keys, those that come
    later choose by what the ones before them have left. Returns all slots, and
    whether any were given.
    """
    missing = tf.where(slots == NO_ROOM)[:, 0]
    own = tf.gather(buckets, missing)
    held = tf.gather(index.keys, own)
    free = tf.cast(tf.equal(held, EMPTY), tf.int32)
    worth = free * tf.reduce_sum(free, axis=2, keepdims=True)
    every = own[:, :, tf.newaxis] * BUCKET + tf.range(BUCKET, dtype=tf.int64)
    if age:
        # Any free slot before the oldest.
        worth = tf.where(worth > 0, worth + (_OLDEST + 1), age(every))
    held, every, worth = (
        tf.reshape(each, [-1, 2 * BUCKET]) for each in (held, every, worth)
    )
    best = tf.argmax(worth, axis=1)
    room = tf.where(tf.reduce_max(worth, axis=1) > 0)[:, 0]
    slot = tf.gather(every, best, batch_dims=1)
    # The first key of those that chose a bucket.
    bucket, which = tf.unique(tf.gather(slot, room) // BUCKET)
    first = tf.math.unsorted_segment_min(
        tf.range(tf.size(room)), which, tf.size(bucket)
    )
    given = tf.gather(room, first)
    which, slot = tf.gather(missing, given), tf.gather(slot, given)
    at = tf.stack([bucket, slot % BUCKET], axis=1)
    ready = []
    if age:
        # Before its row changes.
        ready = [
            _publish(
                index, at, tf.fill(tf.shape(slot), tf.constant(EMPTY, tf.int64))
            )
        ]
    lost = tf.gather(tf.gather(held, best, batch_dims=1), given)
    with tf.control_dependencies(ready):
        ready = begin(slot, which, lost)
    with tf.control_dependencies(ready):
        published = _publish(index, at, tf.gather(wanted, which))
    with tf.control_dependencies([published]):
        slots = tf.tensor_scatter_nd_update(slots, which[:, tf.newaxis], slot)
        return slots, tf.size(given) > 0


def _publish(index: Index, at: tf.Tensor, keys: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterNdUpdate(
        ref=index.keys.handle, indices=at, updates=keys
    )


def _found(index: Index, wanted: tf.Tensor, buckets: tf.Tensor) -> tf.Tensor:
    held = tf.gather(index.keys, buckets)
    hits = tf.equal(held, wanted[:, tf.newaxis, tf.newaxis])
    # The place of the only hit, from 1. A product is the fastest that finds it.
    hits = tf.cast(tf.reshape(hits, [-1, BUCKET]), tf.float32)
    places = tf.linalg.matvec(hits, tf.range(1.0, BUCKET + 1.0))
    places = tf.cast(tf.reshape(places, [-1, 2]), tf.int64)
    slots = tf.where(places > 0, buckets * BUCKET + places - 1, -1)
    return tf.reduce_max(slots, axis=1)


def _buckets(index: Index, keys: tf.Tensor) -> tf.Tensor:
    """The two buckets of each key, in the shard; int64 `(n, 2)`."""
    first = tf.bitwise.bitwise_and(keys, tf.constant(_BUCKETS - 1, tf.int64))
    bits = tf.bitwise.right_shift(keys, tf.constant(8, tf.int64))
    # Odd, so the second is another one.
    bits = tf.bitwise.bitwise_and(bits, tf.constant(_BUCKETS - 2, tf.int64)) + 1
    both = tf.stack([first, tf.bitwise.bitwise_xor(first, bits)], axis=1)
    segment = segments(keys, index.num_segments) - index.first_segment
    return segment[:, tf.newaxis] * _BUCKETS + both


def _shifted(x: tf.Tensor, bits: int) -> tf.Tensor:
    shift = tf.bitwise.right_shift(x, tf.constant(bits, tf.uint64))
    return tf.bitwise.bitwise_xor(x, shift)

"""The index of a growing table: finds and inserts the slots of ids.

A table is divided into segments of 4,096 slots, and a segment into buckets of
16. An id is hashed to a key. The upper bits of the key choose a bucket and thus
its segment, the lower bits another bucket of that segment; the key can only be
in these two. So the slot of an id does not depend on the shards.

Finding takes no lock. Inserts exclude each other on a server, and publish a key
when its row is ready. If a table evicts, readers recheck keys (see `growing`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.mutex import locked
from tfdist.embeddings.places import Places

BUCKET, SEGMENT = 16, 4096
EMPTY = 0
"""The key of an empty slot, and of the id `NO_ID`."""
NO_ID = tf.int64.min
_BUCKETS = SEGMENT // BUCKET
# Factors of MurmurHash3's finalizer, which is a bijection.
_FACTORS = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53

NO_ROOM, NOT_ADMITTED = -1, -2
"""Values in place of a slot: why a key has none."""
MOST_ROWS = 1 << 35
"""Limit of a table: its buckets times 32 bits of a key must fit an int64."""
OLDEST = 1 << 30
"""The greatest age of a slot."""
_INSERTING = "tfdist_inserting"  # A server's mutex, for all its shards.

Begin = Callable[[tf.Tensor, Places, tf.Tensor, tf.Tensor], list[Any]]
"""Initializes slots and returns ops. Takes slots, their places, the indices of
the new keys, and the keys that the slots held before (or `EMPTY`)."""


@dataclasses.dataclass(frozen=True)
class Index:
    """The keys in the slots of several shards; each numbers its own slots."""

    keys: Sequence[keras.Variable]  # Of each shard, int64 `(buckets, 16)`.
    first_segments: Sequence[int]  # Each shard's first segment in its table.
    num_segments: Sequence[int]  # Segments of each shard's whole table.


def mixed(ids: tf.Tensor) -> tf.Tensor:
    """Returns the key of each int64 id, by a bijection (`NO_ID` to `EMPTY`).

    >>> mixed(tf.constant([NO_ID, 0, 1])).numpy().tolist()
    [0, -8108722261328812909, 7913832204677143650]
    """
    x = tf.bitcast(tf.bitwise.bitwise_xor(ids, NO_ID), tf.uint64)
    for factor in _FACTORS:
        x = _shifted(x) * tf.constant(factor, tf.uint64)
    return tf.bitcast(_shifted(x), tf.int64)


def unmixed(keys: np.ndarray) -> np.ndarray:
    """Returns the id of each key."""
    x = keys.view(np.uint64)
    for factor in reversed(_FACTORS):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(pow(factor, -1, 1 << 64))
    return (x ^ (x >> np.uint64(33))).view(np.int64) ^ NO_ID


def segments(keys: tf.Tensor, num_segments: Any) -> tf.Tensor:
    """Returns each key's int64 segment in its table, by its upper 32 bits."""
    upper = tf.bitwise.right_shift(
        tf.bitcast(keys, tf.uint64), tf.constant(32, tf.uint64)
    )
    scaled = tf.bitcast(upper, tf.int64) * num_segments
    return tf.bitwise.right_shift(scaled, tf.constant(32, tf.int64))


def own_segments(
    index: Index, keys: tf.Tensor, places: Places, parts: int = 1
) -> tf.Tensor:
    """Returns each key's segment, or part of a segment, in its shard; int64."""
    nums = [num * parts for num in index.num_segments]
    firsts = [first * parts for first in index.first_segments]
    return segments(keys, places.each(nums)) - places.each(firsts)


def find(index: Index, wanted: tf.Tensor, places: Places) -> tf.Tensor:
    """Returns the int64 slot of each key in its shard; -1 if it has none."""
    buckets = _buckets(index, wanted, places)
    return _found(index, wanted, buckets, places)


def still_held(
    index: Index, wanted: tf.Tensor, slots: tf.Tensor, places: Places
) -> tf.Tensor:
    """Returns `slots`, with -1 where the slot no longer holds the key."""
    held = places.gather(index.keys, tf.maximum(slots, 0) // BUCKET)
    held = tf.gather(held, slots % BUCKET, batch_dims=1)
    return tf.where(tf.equal(held, wanted) & (slots >= 0), slots, -1)


def insert(
    index: Index,
    wanted: tf.Tensor,
    places: Places,
    begin: Begin,
    admit: Callable[[tf.Tensor, Places], tf.Tensor] | None = None,
    age: Callable[[tf.Tensor, Places], tf.Tensor] | None = None,
) -> tf.Tensor:
    """Finds slots as `find` does, and gives free ones to missing keys.

    Inserts on the same server exclude each other.

    Args:
        index: The keys of the shards.
        wanted: Keys to insert, unique in a shard.
        places: The shard of each key.
        begin: Initializes the slots of new keys before they can be found.
        admit: Returns which missing keys may get a slot. Default: all.
        age: Returns ages of slots, int32, at most `OLDEST`. A key whose buckets
            are full takes their oldest slot above age 0. Default: none does.

    Returns:
        The slot of each key, `NO_ROOM` or `NOT_ADMITTED`.
    """
    buckets = _buckets(index, wanted, places)

    def run() -> tf.Tensor:
        def step(slots: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return _round(index, wanted, buckets, places, slots, begin, age)

        slots = _found(index, wanted, buckets, places)
        if admit:
            new = tf.where(slots < 0)
            may = admit(tf.gather_nd(wanted, new), places.some(new[:, 0]))
            # `NO_ROOM` for those admitted, until they get a slot.
            slots = tf.tensor_scatter_nd_update(
                slots, new, NOT_ADMITTED + tf.cast(may, tf.int64)
            )
        return tf.while_loop(
            lambda slots, goes_on: goes_on & tf.reduce_any(slots == NO_ROOM),
            step,
            [slots, tf.constant(True)],
            shape_invariants=[tf.TensorShape([None]), tf.TensorShape([])],
        )[0]

    return locked(_INSERTING, run)


def _round(
    index: Index,
    wanted: tf.Tensor,
    buckets: tf.Tensor,
    places: Places,
    slots: tf.Tensor,
    begin: Begin,
    age: Callable[[tf.Tensor, Places], tf.Tensor] | None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Gives slots to keys, in the emptier of the two buckets of each key.

    A bucket gives away one slot per round, so that later keys choose by the
    room that is left. Returns all slots, and whether any were given.
    """
    missing = tf.where(slots == NO_ROOM)[:, 0]
    own, places = tf.gather(buckets, missing), places.some(missing)
    held = places.gather(index.keys, own)
    free = tf.cast(tf.equal(held, EMPTY), tf.int32)
    worth = free * tf.reduce_sum(free, axis=2, keepdims=True)
    every = own[:, :, tf.newaxis] * BUCKET + tf.range(BUCKET, dtype=tf.int64)
    if age:
        # Any free slot is better than the oldest one.
        worth = tf.where(worth > 0, worth + (OLDEST + 1), age(every, places))
    held, every, worth = (
        tf.reshape(each, [-1, 2 * BUCKET]) for each in (held, every, worth)
    )
    best = tf.argmax(worth, axis=1)
    room = tf.where(tf.reduce_max(worth, axis=1) > 0)[:, 0]
    slot = tf.gather(every, best, batch_dims=1)
    # Of the keys that chose the same bucket, the first one gets the slot.
    bucket = slot // BUCKET + places.each([i << 40 for i in range(places.num)])
    unique, which = tf.unique(tf.gather(bucket, room))
    first = tf.math.unsorted_segment_min(
        tf.range(tf.size(room)), which, tf.size(unique)
    )
    given = tf.gather(room, first)
    which, slot = tf.gather(missing, given), tf.gather(slot, given)
    places = places.some(given)
    at = tf.stack([slot // BUCKET, slot % BUCKET], axis=1)
    publish, ready = tf.raw_ops.ResourceScatterNdUpdate, []
    if age:
        # No reader may find the old key once its row changes.
        none = tf.fill(tf.shape(slot), tf.constant(EMPTY, tf.int64))
        ready = places.scatter(publish, index.keys, at, none)
    lost = tf.gather(tf.gather(held, best, batch_dims=1), given)
    with tf.control_dependencies(ready):
        ready = begin(slot, places, which, lost)
    with tf.control_dependencies(ready):
        new = tf.gather(wanted, which)
        published = places.scatter(publish, index.keys, at, new)
    with tf.control_dependencies(published):
        slots = tf.tensor_scatter_nd_update(slots, which[:, tf.newaxis], slot)
        return slots, tf.size(given) > 0


def _found(
    index: Index, wanted: tf.Tensor, buckets: tf.Tensor, places: Places
) -> tf.Tensor:
    # Shard by shard: joining the contents of buckets would copy megabytes.
    wanted = wanted[:, tf.newaxis, tf.newaxis]
    hits = places.read(_hits, index.keys, buckets, wanted)
    # The position of the only hit, from 1. A matrix product is the fastest way.
    hits = tf.cast(tf.reshape(hits, [-1, BUCKET]), tf.float32)
    at = tf.matmul(hits, [[i + 1.0] for i in range(BUCKET)])
    at = tf.cast(tf.reshape(at, [-1, 2]), tf.int64)
    slots = tf.where(at > 0, buckets * BUCKET + at - 1, -1)
    return tf.reduce_max(slots, axis=1)


def _hits(keys: Any, buckets: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    return tf.equal(tf.gather(keys, buckets), wanted)


def _buckets(index: Index, keys: tf.Tensor, places: Places) -> tf.Tensor:
    """Returns the two buckets of each key in its shard; int64 `(n, 2)`."""
    first = own_segments(index, keys, places, _BUCKETS)
    # Odd, so the second bucket is a different one of the same segment.
    bits = tf.bitwise.bitwise_and(keys, tf.constant(_BUCKETS - 1, tf.int64))
    bits = tf.bitwise.bitwise_or(bits, tf.constant(1, tf.int64))
    return tf.stack([first, tf.bitwise.bitwise_xor(first, bits)], axis=1)


def _shifted(x: tf.Tensor) -> tf.Tensor:
    shift = tf.bitwise.right_shift(x, tf.constant(33, tf.uint64))
    return tf.bitwise.bitwise_xor(x, shift)

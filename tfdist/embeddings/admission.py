"""A count-min sketch, which estimates how often new ids were seen.

It counts ids without storing them. Counts are never too low except by aging,
and too high where other ids share all counts of an id. (Cormode and
Muthukrishnan, 2005; raising only the lowest counts: Estan and Varghese, 2002;
halving, which makes room by forgetting old ids: Einziger and Friedman, 2015.)
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.embeddings.places import WRITE, Places

WIDTH = 2048
"""Words per segment, of four counts each: two counts for each slot."""
PERIOD = 2048
"""The number of sightings of new ids after which a segment's counts halve."""
MOST = 127
"""The limit of an eight-bit count: several keys may raise it at once."""
_PLACES = np.array([0, 13, 26])  # Low bits; the upper ones choose the segment.


def seen_again(
    sketches: Sequence[keras.Variable],
    segment: tf.Tensor,
    keys: tf.Tensor,
    places: Places,
) -> tf.Tensor:
    """Counts each key once; returns how often each was seen, int32.

    Each shard has an int32 `(segments, WIDTH)` sketch. Keys are unique in their
    shard; `segment` has the segment of each key there.
    """
    bits = tf.bitwise.right_shift(keys[:, tf.newaxis], _PLACES)
    row = tf.broadcast_to(segment[:, tf.newaxis], tf.shape(bits))
    at = tf.stack([row, bits % WIDTH], axis=2)
    shift = tf.cast(bits // WIDTH % 4 * 8, tf.int32)
    words = places.read(tf.gather_nd, sketches, at)
    counts = tf.bitwise.right_shift(words, shift) % 256
    lowest = tf.reduce_min(counts, axis=1, keepdims=True)
    # Keys that share a count all raise it, so no count is too low.
    raised = tf.cast((counts == lowest) & (counts < MOST), tf.int32)
    raised = tf.bitwise.left_shift(raised, shift)
    places.scatter(tf.raw_ops.ResourceScatterNdAdd, sketches, at, raised)
    return tf.minimum(lowest[:, 0] + 1, MOST)


def age(
    sketches: Sequence[keras.Variable], segment: tf.Tensor, places: Places
) -> None:
    """Halves the counts of the given segments."""
    halves = tf.bitwise.right_shift(places.gather(sketches, segment), 1)
    # Clear the bits shifted in from the neighboring count.
    halves = tf.bitwise.bitwise_and(halves, 0x7F7F7F7F)
    places.scatter(WRITE, sketches, segment, halves)

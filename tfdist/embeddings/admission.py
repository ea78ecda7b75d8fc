"""Estimates how often a new id was seen, with a count-min sketch.

A sketch counts ids without storing them. Apart from ageing, a count is never
too low; it is too high if other ids share all of its places. (Cormode and
Muthukrishnan, 2005. Only the lowest counts are raised: Estan and Varghese,
2002. Counts are halved to make room for new ids: Einziger and Friedman, 2015.)
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.embeddings.places import WRITE, Places

WIDTH = 2048
"""Words per segment, of four counts each: two counts per slot."""
PERIOD = 2048
"""A segment's counts halve whenever it has counted so many ids."""
MOST = 127
"""The largest count, of eight bits: several may be added at once."""
_PLACES = np.array([0, 13, 26])  # Bits of a key; upper ones: its segment.


def seen_again(
    sketches: Sequence[keras.Variable],
    segment: tf.Tensor,
    keys: tf.Tensor,
    places: Places,
) -> tf.Tensor:
    """Counts each key once; returns the counts, int32.

    A sketch is int32 `(segments, WIDTH)`, for one shard. Keys are unique within
    their shard, where each has a `segment`.
    """
    bits = tf.bitwise.right_shift(keys[:, tf.newaxis], _PLACES)
    row = tf.broadcast_to(segment[:, tf.newaxis], tf.shape(bits))
    at = tf.stack([row, bits % WIDTH], axis=2)
    shift = tf.cast(bits // WIDTH % 4 * 8, tf.int32)
    words = places.read(tf.gather_nd, sketches, at)
    counts = tf.bitwise.right_shift(words, shift) % 256
    lowest = tf.reduce_min(counts, axis=1, keepdims=True)
    # Keys that share a count all raise it, so none is too low.
    raised = tf.cast((counts == lowest) & (counts < MOST), tf.int32)
    raised = tf.bitwise.left_shift(raised, shift)
    places.scatter(tf.raw_ops.ResourceScatterNdAdd, sketches, at, raised)
    return tf.minimum(lowest[:, 0] + 1, MOST)


def age(
    sketches: Sequence[keras.Variable], segment: tf.Tensor, places: Places
) -> None:
    """Halves the counts of segments."""
    halves = tf.bitwise.right_shift(places.gather(sketches, segment), 1)
    # Without the bits shifted in from the adjacent count.
    halves = tf.bitwise.bitwise_and(halves, 0x7F7F7F7F)
    places.scatter(WRITE, sketches, segment, halves)

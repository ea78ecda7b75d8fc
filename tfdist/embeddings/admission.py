"""How often a new id was seen, about: a count-min sketch.

Which counts ids without remembering them: never too low, but for its ageing,
and too high where other ids have counted in all places of one. (Cormode and
Muthukrishnan, 2005; raising the lowest counts alone, Estan and Varghese, 2002;
halving, so that the ids of long ago make room, Einziger and Friedman, 2015.)
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.embeddings.places import WRITE, Places

WIDTH = 2048
"""Words of a segment, of four counts each: two counts for each slot."""
PERIOD = 2048
"""After so many sights of ids without a slot, a segment's counts halve."""
MOST = 127
"""How far a count goes, of eight bits: many may be added at once."""
_PLACES = np.array([0, 13, 26])  # Of a key's bits; its segment has upper ones.


def seen_again(
    sketches: Sequence[keras.Variable],
    segment: tf.Tensor,
    keys: tf.Tensor,
    places: Places,
) -> tf.Tensor:
    """Counts each key once; returns how often each was seen, int32.

    A sketch is int32 `(segments, WIDTH)`, of one shard. Each key is unique in
    its shard and has a `segment` there.
    """
    bits = tf.bitwise.right_shift(keys[:, tf.newaxis], _PLACES)
    row = tf.broadcast_to(segment[:, tf.newaxis], tf.shape(bits))
    at = tf.stack([row, bits % WIDTH], axis=2)
    shift = tf.cast(bits // WIDTH % 4 * 8, tf.int32)
    words = places.read(tf.gather_nd, sketches, at)
    counts = tf.bitwise.right_shift(words, shift) % 256
    lowest = tf.reduce_min(counts, axis=1, keepdims=True)
    # Of keys that share a count each raises it, so none is too low.
    raised = tf.cast((counts == lowest) & (counts < MOST), tf.int32)
    raised = tf.bitwise.left_shift(raised, shift)
    places.scatter(tf.raw_ops.ResourceScatterNdAdd, sketches, at, raised)
    return tf.minimum(lowest[:, 0] + 1, MOST)


def age(
    sketches: Sequence[keras.Variable], segment: tf.Tensor, places: Places
) -> None:
    """Halves the counts of segments."""
    halves = tf.bitwise.right_shift(places.gather(sketches, segment), 1)
    # Without the bits that came from the count beside.
    halves = tf.bitwise.bitwise_and(halves, 0x7F7F7F7F)
    places.scatter(WRITE, sketches, segment, halves)

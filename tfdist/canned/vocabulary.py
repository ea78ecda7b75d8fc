"""Maps words to ids without a lookup table.

A lookup table would live on one machine, while steps run on others. A sorted
list of fingerprints is a constant of the graph, and searching it is as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_NO_WORD = np.iinfo(np.int64).max  # Greater than any fingerprint of a string.


class Vocabulary:
    """Maps each value to its index in a list of strings or integers.

    >>> Vocabulary(["b", "a"]).ids(tf.constant(["a", "b", "c"])).numpy()
    array([ 1,  0, -1])

    Args:
        words: Distinct strings or integers.

    Raises:
        ValueError: `words` is empty or contains duplicates.
    """

    def __init__(self, words: Sequence[str | int]) -> None:
        words = list(words)
        if not words or len(set(words)) < len(words):
            raise ValueError(
                "A vocabulary must be a list of distinct words. Received: "
                f"{words[:20]}."
            )
        with tf.init_scope():
            known = _fingerprints(tf.constant(words)).numpy()
        order = known.argsort()
        # A sentinel makes the position after the last word a valid index.
        self._order = np.append(order, -1)
        self._sorted = np.append(known[order], _NO_WORD)

    def __len__(self) -> int:
        return len(self._order) - 1

    def ids(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the int64 id of each value, or -1 for unknown values."""
        wanted = tf.reshape(_fingerprints(values), [1, -1])
        # `tf.searchsorted` would add five small operations per column.
        known = self._sorted[np.newaxis]
        place = tf.raw_ops.LowerBound(sorted_inputs=known, values=wanted)
        found = tf.gather(self._sorted, place) == wanted
        ids = tf.where(found, tf.gather(self._order, place), np.int64(-1))
        return tf.reshape(ids, tf.shape(values))


def _fingerprints(values: tf.Tensor) -> tf.Tensor:
    # In a vocabulary of 1,000 words two collide with a probability of 10^-13.
    if values.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(values, 2**63 - 1)
    return tf.cast(values, tf.int64)

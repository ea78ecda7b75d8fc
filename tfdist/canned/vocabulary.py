"""Words to ids without a lookup table.

A table would live on one machine, and steps run on others. A sorted list of
fingerprints is a constant of the graph, and a search in it costs no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

_NO_WORD = np.iinfo(np.int64).max  # Greater than any fingerprint of a string.


class Vocabulary:
    """The place of each value in a list of strings or integers.

    >>> Vocabulary(["b", "a"]).ids(tf.constant(["a", "b", "c"])).numpy()
    array([ 1,  0, -1])

    Args:
        words: Distinct strings or integers.

    Raises:
        ValueError: a word twice, or no word.
    """

    def __init__(self, words: Sequence[str | int]) -> None:
        words = list(words)
        if not words or len(set(words)) < len(words):
            raise ValueError(
                "A vocabulary must have words, none of them twice. Received: "
                f"{words[:20]}."
            )
        with tf.init_scope():
            known = _fingerprints(tf.constant(words)).numpy()
        order = known.argsort()
        # One more, so that a place after the last word is one too.
        self._order = np.append(order, -1)
        self._sorted = np.append(known[order], _NO_WORD)

    def __len__(self) -> int:
        return len(self._order) - 1

    def ids(self, values: tf.Tensor) -> tf.Tensor:
        """The int64 id of each value, -1 for one that is no word."""
        wanted = tf.reshape(_fingerprints(values), [1, -1])
        # `tf.searchsorted` adds five small operations for each column.
        known = self._sorted[np.newaxis]
        place = tf.raw_ops.LowerBound(sorted_inputs=known, values=wanted)
        found = tf.gather(self._sorted, place) == wanted
        ids = tf.where(found, tf.gather(self._order, place), np.int64(-1))
        return tf.reshape(ids, tf.shape(values))


def _fingerprints(values: tf.Tensor) -> tf.Tensor:
    # Two of a thousand strings share a fingerprint once in 10^13 vocabularies.
    if values.dtype == tf.string:
        return tf.strings.to_hash_bucket_fast(values, 2**63 - 1)
    return tf.cast(values, tf.int64)

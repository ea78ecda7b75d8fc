"""How long steps stand still for want of a batch: is training input-bound?

A dispatch notes when each of its batches was there, and when its last step was
done. If its steps take equally long, that tells how long one takes, and what
is left of the time went by in waiting for data. That the next batch is read
while a step computes is no waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class TimedIterator:
    """An iterator within a dispatch that notes when each batch was there."""

    def __init__(self, iterator: Iterator) -> None:
        self._iterator = iterator
        self._start = tf.timestamp()
        self._there: list[tf.Tensor] = []

    def get_next(self) -> Any:
        """The next batch."""
        batch = next(self._iterator)
        parts = tf.nest.flatten(batch, expand_composites=True)
        with tf.control_dependencies(parts):
            self._there.append(tf.timestamp())
        return batch

    def seconds(self, num_steps: int, results: tf.Tensor) -> tf.Tensor:
        """Seconds in which steps waited for data, and of the whole dispatch.

        Args:
            num_steps: How many there were; each read as many batches.
            results: What is there when the last is done.

        Returns:
            float64 `(2,)`.
        """
        with tf.control_dependencies([results]):
            total = tf.timestamp() - self._start
        reads = tf.stack(self._there) - self._start
        last_reads = tf.reshape(reads, [num_steps, -1])[:, -1]
        return tf.stack([total - computing(last_reads, total), total])


def computing(there: Any, total: Any) -> Any:
    """Seconds that equal steps computed, one after the other.

    The steps from any batch on fit between its arrival and the end; those
    that began as their batch came fill it.

    >>> float(computing(tf.constant([0.0, 3.0]), 4.0))  # The second waited.
    2.0
    >>> float(computing(tf.constant([0.0, 0.1]), 4.0))
    4.0

    Args:
        there: `(num_steps,)`: when each batch was there, since the start.
        total: When the last step was done.
    """
    steps = there.shape[0]
    remaining = tf.range(steps, 0, -1)
    each = (total - there) / tf.cast(remaining, there.dtype)
    return steps * tf.minimum(total / steps, tf.reduce_min(each))


class InputSeconds:
    """Sums up what `TimedIterator.seconds` says of each dispatch.

    Attributes:
        sums: float64 `(2,)`: seconds waited, seconds of the dispatches.
    """

    def __init__(self) -> None:
        self.sums = np.zeros(2)

    def without(self, packed: np.ndarray) -> np.ndarray:
        """Counts and removes the seconds at the end of a dispatch's results."""
        self.sums += packed[-2:]
        return packed[:-2]

    def take(self) -> np.ndarray:
        """The sums since the last call."""
        sums, self.sums = self.sums, np.zeros(2)
        return sums


def share(seconds: Sequence[float]) -> float:
    """The share of their time in which steps waited for data.

    >>> share([1.0, 4.0]), share([0.0, 0.0])
    (0.25, 0.0)
    """
    waited, total = seconds
    return float(waited / total) if total else 0.0

"""Staleness: the age of the parameters that a gradient was computed from.

With asynchronous training, other updates are applied between a step's read of
the parameters and its write. The server that holds `global_step` counts these
for each update, without further network traffic.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import numpy as np
import tensorflow as tf

MAX_STALENESS = 127
PERCENTILES = (50, 90, 99)


class StalenessCounter:
    """A histogram of all updates by staleness, on the `global_step` device.

    `global_step` is not read at the exact moment of the parameters' reads and
    writes: a value may be off by the updates in that fraction of a millisecond.
    """

    def __init__(self, global_step: tf.Variable) -> None:
        self._global_step = global_step
        with tf.device(global_step.device):
            none = tf.zeros([MAX_STALENESS + 1], tf.int64)
            self.counts = tf.Variable(none, trainable=False, name="staleness")

    def read(self) -> tf.Tensor:
        """The number of updates before a step reads its parameters."""
        with tf.device(self._global_step.device):
            return tf.identity(self._global_step.read_value())

    def count(self, before: tf.Tensor) -> None:
        """Counts an update, after `global_step` did; `before`: see `read`."""
        with tf.device(self._global_step.device):
            others = self._global_step.read_value() - before - 1
            index = tf.clip_by_value([others], 0, MAX_STALENESS)
            one = tf.IndexedSlices(tf.ones([1], tf.int64), index)
            self.counts.scatter_add(one)

    def histogram(self) -> np.ndarray:
        """int64 `(128,)`: updates of staleness 0, 1, ..., 127 or more."""
        return self.counts.numpy()


class StalenessBound:
    """Delays dispatches so that no update is staler than `most`.

    As in the stale synchronous parallel model (Ho et al. 2013), fast workers
    wait for the slowest: a dispatch begins once it is certain that, before it
    or any running dispatch ends, at most `most` updates of others can be
    applied. A dispatch whose worker dies counts until the failure is noticed.
    With 0, one dispatch runs at a time.
    """

    _SECS = 0.05  # A worker that waited this long yields the queue to others.

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self.clear()

    def clear(self) -> None:
        """Forgets all running dispatches."""
        self._sizes: dict[Hashable, int] = {}  # In steps.
        self._others: dict[Hashable, int] = {}  # Concurrent steps so far.

    def limited(self, size: int, num_workers: int) -> int:
        """The dispatch size at which workers of equal speed hardly wait."""
        beside = 2 * (num_workers - 1)  # Each ends one and begins another.
        return min(size, max(1, self._most // beside)) if beside else size

    def begin(self, dispatch: Hashable, size: int) -> bool:
        """Begins a dispatch of `size` steps, or returns False after 0.05 s."""

        def fits() -> bool:
            others = [each + size for each in self._others.values()]
            return max(sum(self._sizes.values()), *others, 0) <= self._most

        with self._changed:
            if not self._changed.wait_for(fits, self._SECS):
                return False
            for each in self._others:
                self._others[each] += size
            self._others[dispatch] = sum(self._sizes.values())
            self._sizes[dispatch] = size
            return True

    def end(self, dispatch: Hashable) -> None:
        """Ends a dispatch, whose updates were applied or never will be."""
        with self._changed:
            self._others.pop(dispatch, None)
            self._sizes.pop(dispatch, None)
            self._changed.notify_all()


def percentile(histogram: np.ndarray, percent: float) -> int:
    """The least staleness that `percent` of all updates do not exceed.

    >>> percentile(np.array([50, 40, 10]), 90), percentile(np.zeros(3), 50)
    (1, 0)
    """
    reached = np.cumsum(histogram) >= histogram.sum() * percent / 100
    return int(np.argmax(reached))


def describe(histogram: np.ndarray) -> str:
    """One line about the staleness of all updates.

    >>> describe(np.array([50, 40, 9, 1]))
    'staleness of 100 updates: mean 0.61, 50 % 0, 90 % 1, 99 % 2, most 3'
    """
    total = int(histogram.sum())
    mean = float(histogram @ np.arange(len(histogram))) / max(total, 1)
    parts = [f"{p} % {percentile(histogram, p)}" for p in PERCENTILES]
    parts.append(f"most {percentile(histogram, 100)}")
    return f"staleness of {total} updates: mean {mean:.2f}, {', '.join(parts)}"

"""Measures how long steps wait for batches: is training input-bound?

A dispatch records when each of its batches arrived and when its last step
ended. Assuming that all steps take equally long, this gives the duration of a
step; the rest of the time was spent waiting. Reading the next batch while a
step computes does not count as waiting.

A batch that does not arrive blocks the dispatch inside TensorFlow. The dispatch
therefore also writes the number of the awaited batch to a variable of its
process, where another thread, or the chief, can read it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfdist._tf.private import now

_log = logging.getLogger(__name__)


class TimedIterator:
    """An iterator in a dispatch that records when each batch arrives.

    Args:
        iterator: Yields batches; pairs of `input_fns.counted` if `is_counted`.
        first_step: The number of the dispatch's first step.
        is_counted: Whether batches come with the number of those that remain.

    Attributes:
        remaining: After `get_next`, how many batches are certain to follow.
    """

    remaining: tf.Tensor

    def __init__(
        self, iterator: Iterator, first_step: tf.Tensor, is_counted: bool
    ) -> None:
        self._iterator, self._is_counted = iterator, is_counted
        self._start = now()
        self._there: list[tf.Tensor] = []
        self._first_step = first_step
        self._awaited = _awaited()
        self._awaits(first_step + 1)

    def get_next(self) -> Any:
        """Returns the next batch."""
        iterator = self._iterator
        if isinstance(iterator, tf.data.Iterator):
            # TensorFlow refuses more than 32 calls of one object in a function.
            iterator = tf.nest.map_structure(
                lambda tensor: tensor, iterator, expand_composites=True
            )
        batch = next(iterator)
        if self._is_counted:
            batch, self.remaining = batch
        self._parts = tf.nest.flatten(batch, expand_composites=True)
        with tf.control_dependencies(self._parts):
            self._there.append(now())
            self._awaits(self._first_step + len(self._there) + 1)
        return batch

    def _awaits(self, number: tf.Tensor) -> None:
        # Writes no time: if a step has side effects, such as `tf.print`,
        # TensorFlow reads the clock only after the step.
        tf.raw_ops.AssignVariableOp(resource=self._awaited, value=number)

    def seconds(self, num_steps: int, results: tf.Tensor) -> tf.Tensor:
        """float64 `(2,)`: seconds waited for data, seconds of the dispatch.

        `results` are the results of the last of `num_steps` steps.
        """
        with tf.control_dependencies(self._parts):
            self._awaits(tf.zeros([], tf.int64))
        with tf.control_dependencies([results]):
            total = now() - self._start
        reads = tf.stack(self._there) - self._start
        last_reads = tf.reshape(reads, [num_steps, -1])[:, -1]
        return tf.stack([total - computing(last_reads, total), total])


def computing(there: Any, total: Any) -> Any:
    """The seconds that consecutive steps of equal length spent computing.

    The steps from any batch onward fit between its arrival and the end; if the
    first of them waited for its batch, they fill that time.

    >>> float(computing(tf.constant([0.0, 3.0]), 4.0))  # The second waited.
    2.0
    >>> float(computing(tf.constant([0.0, 0.1]), 4.0))
    4.0

    Batch `i` arrived at `there[i]`; the last step ended at `total`.
    """
    steps = there.shape[0]
    remaining = tf.range(steps, 0, -1)
    each = (total - there) / tf.cast(remaining, there.dtype)
    return steps * tf.minimum(total / steps, tf.reduce_min(each))


class InputSeconds:
    """The sum of `TimedIterator.seconds` over dispatches."""

    def __init__(self) -> None:
        self.sums = np.zeros(2)

    def without(self, packed: np.ndarray) -> np.ndarray:
        """Adds the seconds at the end of packed results; returns the rest."""
        self.sums += packed[-2:]
        return packed[:-2]

    def take(self) -> np.ndarray:
        """Returns the sums since the last call, and resets them."""
        sums, self.sums = self.sums, np.zeros(2)
        return sums


def share(seconds: Sequence[float]) -> float:
    """The fraction of the time that steps spent waiting for data.

    >>> share([1.0, 4.0]), share([0.0, 0.0])
    (0.25, 0.0)
    """
    waited, total = seconds
    return float(waited / total) if total else 0.0


def awaited() -> int:
    """The number of the batch awaited in the task of `tf.device`, or 0."""
    try:
        number = tf.raw_ops.ReadVariableOp(resource=_awaited(), dtype=tf.int64)
        return int(number)
    except tf.errors.OpError:  # No dispatch ran there, or the task is gone.
        return 0


def _awaited() -> tf.Tensor:
    with tf.device("/device:CPU:0"):
        return tf.raw_ops.VarHandleOp(
            dtype=tf.int64, shape=[], shared_name="tfdist_awaited"
        )


class InputWatch:
    """Logs what steps wait for, after a minute and at most once a minute.

    `waits` maps descriptions of awaited things to numbers, which change when
    the thing arrives; 0 means no wait. As context managers, all share a thread.
    """

    SECS = 60.0
    _around_calls: ClassVar[set[InputWatch]] = set()
    _thread: threading.Thread | None = None

    def __init__(self, waits: Callable[[], Mapping[str, float]]) -> None:
        self._waits = waits
        self._since: dict[tuple[str, float], float] = {}
        self._next = 0.0

    def look(self) -> None:
        """Logs the waits that have lasted long enough."""
        now = time.monotonic()
        if now < self._next:
            return
        waits = [wait for wait in self._waits().items() if wait[1]]
        self._since = {wait: self._since.get(wait, now) for wait in waits}
        secs = {what: now - since for (what, _), since in self._since.items()}
        said = [what for what in secs if secs[what] >= self.SECS]
        for what in said:
            _log.warning("Still waiting for %s after %.0f s.", what, secs[what])
        self._next = now + self.SECS / (1 if said else 10)

    def __enter__(self) -> None:
        self._around_calls.add(self)
        if InputWatch._thread is None:
            InputWatch._thread = threading.Thread(
                target=self._look_for_all, name="tfdist-input", daemon=True
            )
            InputWatch._thread.start()

    def __exit__(self, *error: object) -> None:
        self._around_calls.discard(self)
        self._since = {}

    @classmethod
    def _look_for_all(cls) -> None:
        while True:
            time.sleep(cls.SECS / 10)
            for watch in tuple(cls._around_calls):
                watch.look()

"""Who answers a table's lookups while a step is traced.

A step wants all rows that it needs from one server in one message, so it must
know every id before the first row arrives. It therefore runs the model twice
while tracing: once to collect the ids (`Collector`; what the model computes
from the zeros it gets is never executed), then, with the rows at hand, for
real (`Answers`). Outside a step, tables look themselves up.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf


class Desk(Protocol):
    """Where a table brings its ids."""

    def rows(self, table: Any, ids: tf.Tensor) -> tf.Tensor:
        """Rows `(n, dim)` for the int64 ids `(n,)` of `table`."""


_desk: contextvars.ContextVar[Desk | None] = contextvars.ContextVar(
    "desk", default=None
)


def current() -> Desk | None:
    """The desk of the step that is being traced, if any."""
    return _desk.get()


@contextlib.contextmanager
def at(desk: Desk) -> Iterator[None]:
    """Lookups inside go to `desk`."""
    token = _desk.set(desk)
    try:
        yield
    finally:
        _desk.reset(token)


class Collector:
    """Writes down the ids of each lookup and answers with zeros."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tf.Tensor]] = []
        self._answers: set[str] = set()

    def rows(self, table: Any, ids: tf.Tensor) -> tf.Tensor:
        """See `Desk`."""
        self._check_independent(table, ids)
        self.calls.append((table, ids))
        zeros = tf.zeros([tf.size(ids), table.output_dim], table.compute_dtype)
        if not tf.executing_eagerly():
            self._answers.add(zeros.op.name)
        return zeros

    def _check_independent(self, table: Any, ids: tf.Tensor) -> None:
        """Ids computed from rows would have been computed from zeros."""
        if tf.executing_eagerly():
            return
        seen, waiting = set(), [ids.op]
        while waiting:
            op = waiting.pop()
            if op.name in seen:
                continue
            seen.add(op.name)
            if op.name in self._answers:
                raise ValueError(
                    f"The ids of table {table.path!r} depend on the rows of a "
                    "table, so they cannot be known before the step reads "
                    "any. Compute ids from the model's inputs alone."
                )
            waiting.extend(tensor.op for tensor in op.inputs)


class Answers:
    """Answers each lookup, in the order in which they were collected.

    Args:
        answers: Rows `(n, dim)` for each lookup.
    """

    def __init__(self, answers: Sequence[tf.Tensor]) -> None:
        self._answers = iter(answers)

    def rows(self, table: Any, ids: tf.Tensor) -> tf.Tensor:
        """See `Desk`."""
        del ids
        return tf.cast(next(self._answers), table.compute_dtype)


def length(ids: tf.Tensor) -> Any:
    """Number of ids: an int where it is static, else a tensor."""
    static = ids.shape.num_elements()
    return tf.size(ids) if static is None else static

"""Providers that answer the lookups of tables while a step is traced.

A step first collects the ids of all lookups (`Collector`; see `forward.py`),
then answers them with rows (`Answers`). Outside a step, tables read their rows.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf


def stand_in(shape: Any, dtype: Any, static: Any = None) -> tf.Tensor:
    """Returns zeros that TensorFlow does not fold as a constant."""
    return tf.compat.v1.placeholder_with_default(
        tf.zeros(shape, dtype), shape if static is None else static
    )


def checked(value: tf.Tensor, condition: tf.Tensor, *told: Any) -> tf.Tensor:
    """Returns `value`, or fails with InvalidArgumentError when a step runs.

    `told` is the message, without quotes, which TensorFlow would escape.
    (`tf.debugging.Assert` would trace two functions for each lookup.)
    """
    check = tf.raw_ops.Assert(condition=condition, data=told)
    with tf.control_dependencies([check]):
        return tf.identity(value)


def checked_weights(weights: Any, ids: Any, combiner: str | None) -> Any:
    """Returns `weights`, after a check that there is one for each id.

    Raises ValueError, or InvalidArgumentError when a step runs.
    """
    if combiner is None:
        raise ValueError("Argument `weights` requires a `combiner`.")
    if not isinstance(ids, tf.RaggedTensor | tf.SparseTensor):
        ids, weights = tf.convert_to_tensor(ids), tf.convert_to_tensor(weights)
    same_kind = type(ids) is type(weights)
    if not (same_kind and ids.shape.is_compatible_with(weights.shape)):
        raise ValueError(
            "There must be a weight for each id, in a tensor of the same kind "
            f"and shape. Received: ids={ids}, weights={weights}."
        )
    if isinstance(ids, tf.RaggedTensor):
        splits = weights.with_row_splits_dtype(ids.row_splits.dtype).row_splits
        _check_places(ids.row_splits, splits)
    elif isinstance(ids, tf.SparseTensor):
        _check_places(ids.indices, weights.indices)
    return weights


def _check_places(of_ids: tf.Tensor, of_weights: tf.Tensor) -> None:
    same = tf.raw_ops.Equal(
        x=of_ids, y=of_weights, incompatible_shape_error=False
    )
    wanted = "Weights and ids must have the same positions. Received:"
    tf.raw_ops.Assert(
        condition=tf.reduce_all(same), data=[wanted, of_weights, of_ids]
    )


def examples_of(ids: tf.RaggedTensor | tf.SparseTensor) -> tuple[Any, Any]:
    """Returns the example number of each id, and the number of examples.

    An example holds the ids along the last axis. Ragged ids have two axes.
    """
    if isinstance(ids, tf.RaggedTensor):
        return ids.value_rowids(), ids.nrows()
    if ids.shape.rank != 2:
        num = tf.reduce_prod(ids.dense_shape[:-1])
        ids = tf.sparse.reshape(ids, [num, ids.dense_shape[-1]])
    return ids.indices[:, 0], ids.dense_shape[0]


def by_example(rows: tf.Tensor, ids: tf.SparseTensor) -> tf.Tensor:
    """Reshapes rows `(n, dim)` of examples to the leading axes of `ids`."""
    dim = rows.shape[-1:]
    rows = tf.reshape(rows, tf.concat([ids.dense_shape[:-1], dim], 0))
    rows.set_shape(ids.shape[:-1].concatenate(dim))
    return rows


class Zeros:
    """Answers each lookup with zeros, where the values do not matter."""

    def rows(
        self, table: Any, ids: tf.Tensor, of_all: bool = False
    ) -> tf.Tensor:
        """Returns zeros in place of the rows `(n, dim)` of int64 ids `(n,)`."""
        return stand_in(
            [tf.size(ids), table.output_dim],
            table.compute_dtype,
            [ids.shape.num_elements(), table.output_dim],
        )


class Collector(Zeros):
    """Answers with zeros, and records lookups; all must be in its graph."""

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        # Table and ids of each lookup; whether it wants all replicas' ids.
        self.calls: list[tuple[Any, tf.Tensor]] = []
        self.of_all: list[bool] = []
        self.answers: list[str] = []  # Names of the ops of the zeros.

    def rows(
        self, table: Any, ids: tf.Tensor, of_all: bool = False
    ) -> tf.Tensor:
        """Returns zeros; see `Zeros.rows`."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise ValueError(
                f"Table {table.path!r} is looked up inside a condition, a "
                "loop (`tf.map_fn`, `tf.vectorized_map`) or a `tf.function` "
                "of the model. Look up all ids in one call outside of it, and "
                "use their rows inside."
            )
        with tf.control_dependencies(None):
            ids = tf.identity(ids)
        self.calls.append((table, ids))
        self.of_all.append(of_all)
        answer = super().rows(table, ids)
        self.answers.append(answer.op.name)
        return answer


class Answers:
    """Answers lookups in the order in which they were collected.

    Takes each table, and its rows `(n, dim)` or a function that returns them.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        answers: Sequence[tf.Tensor | Callable[[], tf.Tensor]],
    ) -> None:
        self._left = list(zip(tables, answers, strict=True))

    def rows(
        self, table: Any, ids: tf.Tensor, of_all: bool = False
    ) -> tf.Tensor:
        """Returns the rows of the next lookup."""
        expected: Any
        expected, answer = self._left.pop(0) if self._left else (None, None)
        if expected is not table:
            raise _differs(table.path, expected)
        rows = answer() if callable(answer) else answer
        return tf.cast(rows, table.compute_dtype)

    def check_all_given(self) -> None:
        """Raises `ValueError` if a collected lookup was not repeated."""
        if self._left:
            raise _differs("none", self._left[0][0])


class Provider(Protocol):
    """Answers lookups in place of the tables."""

    def rows(
        self, table: Any, ids: tf.Tensor, of_all: bool = False
    ) -> tf.Tensor:
        """Returns the rows `(n, dim)` of the int64 ids `(n,)`.

        If `of_all`, returns the rows of the ids of all replicas, each once.
        """


_provider: contextvars.ContextVar[Provider | None] = contextvars.ContextVar(
    "row_provider", default=None
)


def current() -> Provider | None:
    """Returns the provider of the step or export being traced, if any."""
    return _provider.get()


@contextlib.contextmanager
def answered_by(provider: Provider) -> Iterator[None]:
    """Makes lookups inside the context get their rows from `provider`."""
    token = _provider.set(provider)
    try:
        yield
    finally:
        _provider.reset(token)


def _differs(found: str, expected: Any) -> ValueError:
    return ValueError(
        "The model must look up the same tables in the same order each time "
        f"it is called. Received: {found}; in the first call: "
        f"{expected.path if expected is not None else 'none'}. Do not cache "
        "rows, count calls, or recompute lookups (`keras.remat`)."
    )


def length(ids: tf.Tensor) -> Any:
    """Returns the number of ids: an int if it is static, else a tensor."""
    static = ids.shape.num_elements()
    return tf.size(ids) if static is None else static

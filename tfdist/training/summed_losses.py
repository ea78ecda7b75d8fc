"""Finds losses that are sums over the examples of a batch.

Between replicas, a step minimizes the mean over their shares of the batch: with
n replicas, a sum over the examples counts for 1/n of its value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

# Operations whose result is a sum over examples if one of their inputs is.
_LINEAR = {"AddN", "AddV2", "Cast", "Identity", "Neg", "Pack", "Sub"}
# The same, if the other input is a constant, but not the number of examples.
_SCALING = {"DivNoNan", "Mul", "RealDiv"}
# The same, if what they reduce is a scalar, or scalars that were packed.
_REDUCING = {"Mean", "Sum"}


class SummedLosses:
    """The losses of a graph that are sums over the examples of `batch`.

    Attributes:
        names: Of the tensors. A factor that is not constant hides a sum.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = tf.nest.flatten(batch, expand_composites=True)
        self._sizes = {t.shape[0] for t in self._batch if t.shape.rank}
        self.names: list[str] = []

    def check(self, loss: Any) -> None:
        """Notes a loss that is a vector, or a sum, or has one as a term."""
        if not (isinstance(loss, tf.Tensor) and tf.is_symbolic_tensor(loss)):
            return  # It is none of this graph.
        rank = loss.shape.rank
        if rank or (rank == 0 and self._is_sum(loss)):
            self.names.append(loss.name)

    @contextlib.contextmanager
    def watch_tapes(self) -> Iterator[None]:
        """Checks what tapes differentiate with respect to variables."""
        own = tf.GradientTape.gradient

        def gradient(
            tape: tf.GradientTape, target: Any, sources: Any, *a: Any, **kw: Any
        ) -> Any:
            variables = keras.Variable, tf.Variable
            if any(isinstance(s, variables) for s in tf.nest.flatten(sources)):
                for loss in tf.nest.flatten(target):
                    self.check(loss)
            return own(tape, target, sources, *a, **kw)

        tf.GradientTape.gradient = gradient
        try:
            yield
        finally:
            tf.GradientTape.gradient = own

    def _is_sum(self, loss: tf.Tensor) -> bool:
        op, terms = loss.op, []
        if op.type in ("L2Loss", "Sum") and self._sums_examples(op):
            return True
        if op.type in _LINEAR:
            terms = list(op.inputs)
        elif op.type in _REDUCING:
            terms = [op.inputs[0]]
        elif op.type in _SCALING:
            left, right = map(_constant, op.inputs)
            is_mean = op.type != "Mul" and right in self._sizes
            if (left is None) != (right is None) and not is_mean:
                terms = [op.inputs[0 if left is None else 1]]
        terms = [t for t in terms if t.shape.rank == 0 or t.op.type == "Pack"]
        return any(map(self._is_sum, terms))

    def _sums_examples(self, op: tf.Operation) -> bool:
        """Whether a sum reduces an axis of the batch's size."""
        shape = op.inputs[0].shape
        if shape.rank is None:
            return False
        axes = range(shape.rank)
        if op.type == "Sum":
            axes = tf.get_static_value(op.inputs[1])
            axes = [] if axes is None else axes.flat
        if not any(shape[int(axis)] in self._sizes for axis in axes):
            return False
        # Weights may have an axis of that size, too.
        batch, ahead = {id(t) for t in self._batch}, [op]
        seen: set[tf.Operation] = set()
        while ahead:
            inputs = ahead.pop().inputs
            if any(id(t) in batch for t in inputs):
                return True
            new = {t.op for t in inputs} - seen
            seen |= new
            ahead += new
        return False


def _constant(tensor: tf.Tensor) -> float | None:
    value = tf.get_static_value(tensor)
    return None if value is None else float(value)

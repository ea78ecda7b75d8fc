"""The slots that an optimizer keeps of a variable, and views of their rows.

Keras writes an update rule as code on a variable and its slots. `RowView` lets
that code run on some of their rows, so each rule is written once, in Keras.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist._tf.private import unique_id
from tfdist._tf.private_keras import nadam_product, slot_lists, variable_index


class Slots(NamedTuple):
    """The slots of one variable; None if the optimizer has no such slot."""

    average: Any  # Moving average, of `use_ema`.
    total: Any  # Sum of gradients, for `gradient_accumulation_steps`.
    of_rule: list[keras.Variable]


def slots(optimizer: Optimizer, variable: keras.Variable) -> Slots:
    """The slots of `variable`; Keras lists those common to all rules first."""
    index = variable_index(optimizer, variable)
    every = [each[index] for each in slot_lists(optimizer).values()]
    own = [slot for slot in every if slot is not None]
    average = own.pop(0) if optimizer.use_ema else None
    accumulates = optimizer.gradient_accumulation_steps
    return Slots(average, own.pop(0) if accumulates else None, own)


def named_slots(
    optimizer: Optimizer, variable: keras.Variable
) -> dict[str, keras.Variable]:
    """The slots of `variable` by kind, such as `momentum`.

    The kind is what follows the variable's name in the slot's name, or, as for
    Adafactor's factors, the name of the attribute that lists the slots.
    """
    index = variable_index(optimizer, variable)
    prefix = variable.path.replace("/", "_") + "_"
    own = {id(v) for v in optimizer.variables}
    named = {}
    for attribute, each in slot_lists(optimizer).items():
        slot, kind = each[index], attribute.strip("_")
        if id(slot) in own:  # Neither None nor Keras' dummy for no slot.
            if slot.name.startswith(prefix):
                kind = slot.name.removeprefix(prefix)
            named[kind] = slot
    return named


def shared_name(optimizer: Optimizer, variable: keras.Variable) -> str:
    """The name of a variable that an optimizer keeps for all its variables."""
    is_nadam = isinstance(optimizer, keras.optimizers.Nadam)
    if is_nadam and variable is nadam_product(optimizer):
        return "momentum_product"  # Keras gives it no name of its own.
    return variable.name


def rows_of(variable: tf.Variable, ids: tf.Tensor | None) -> tf.Tensor:
    """Some rows of a variable, or all of it."""
    if ids is None:
        return tf.convert_to_tensor(variable)
    return tf.gather(variable, ids)


class AssigningScope(keras.StatelessScope):
    """A scope in which `variable.assign` assigns, as in `optimizer.assign`."""

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Assigns the value instead of recording it in the scope."""
        variable, value = update
        variable.value.assign(value)


class RowView:
    """Some rows of a variable, or all, as its value in a scope.

    An optimizer reads and assigns these rows as it would the whole variable;
    `scatter` writes them back. Values read before an assignment do not change.
    """

    def __init__(
        self,
        scope: keras.StatelessScope,
        variable: keras.Variable,
        ids: tf.Tensor | None,
    ) -> None:
        self._variable, self._ids = variable.value, ids
        self._scope, self._key = scope, id(variable)
        self._rows = rows_of(self._variable, ids)
        self.dtype = self._variable.dtype
        self._unique_id = unique_id(self._variable)
        # The scope's constructor would have converted it to a tensor.
        scope.state_mapping[self._key] = self

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        return tf.convert_to_tensor(self._rows, dtype, name=name)

    def _now(self) -> RowView:
        return self._scope.state_mapping[self._key]

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the rows."""
        after = copy.copy(self)
        after._rows = tf.cast(value, self.dtype)
        self._scope.state_mapping[self._key] = after

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the rows."""
        self.assign(self._now()._rows + tf.cast(value, self.dtype))

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the rows."""
        self.assign(self._now()._rows - tf.cast(value, self.dtype))

    def scatter(self) -> None:
        """Writes the rows into the variable, if they changed."""
        rows = self._now()._rows
        if rows is self._rows:
            return
        if self._ids is None:
            self._variable.assign(rows)
        else:
            self._variable.scatter_update(tf.IndexedSlices(rows, self._ids))

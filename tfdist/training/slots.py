"""What an optimizer keeps of a variable, and some rows in their place.

Keras writes an update as code on a variable and its slots. `RowView` lets the
same code run on some rows of them, so each rule is written once, in Keras.
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
    """What an optimizer keeps of one variable; None: it does not."""

    average: Any  # Moving, of `use_ema`.
    total: Any  # Of gradients, for `gradient_accumulation_steps`.
    of_rule: list[keras.Variable]


def slots(optimizer: Optimizer, variable: keras.Variable) -> Slots:
    """The slots of `variable`; Keras makes those of all rules first."""
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

    The kind is what Keras puts behind the variable's name in the slot's, or, as
    of Adafactor's factors, the name of the attribute that lists them.
    """
    index = variable_index(optimizer, variable)
    prefix = variable.path.replace("/", "_") + "_"
    own = {id(v) for v in optimizer.variables}
    named = {}
    for attribute, each in slot_lists(optimizer).items():
        slot, kind = each[index], attribute.strip("_")
        if id(slot) in own:  # Not None, nor the dummy of a variable without.
            if slot.name.startswith(prefix):
                kind = slot.name.removeprefix(prefix)
            named[kind] = slot
    return named


def shared_name(optimizer: Optimizer, variable: keras.Variable) -> str:
    """Name of one that an optimizer keeps for all its variables together."""
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
    """In it `variable.assign` assigns, as `optimizer.assign` does."""

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Instead of keeping it for whoever asks the scope."""
        variable, value = update
        variable.value.assign(value)


class RowView:
    """Some rows of a variable, or all, as its value in a scope.

    An optimizer reads and assigns them as it would the whole variable;
    `scatter` writes them back. What it has read before it assigns stays.
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
        # The scope's constructor would have made a tensor of it.
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

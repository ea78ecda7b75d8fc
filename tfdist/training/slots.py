"""What an optimizer keeps of a variable, and some rows in their place.

Keras writes an update as code on a variable and its slots. `RowView` lets the
same code run on some rows of them, so each rule is written once, in Keras.
"""

from __future__ import annotations

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist._tf.private import (
    nadam_product,
    slot_lists,
    unique_id,
    variable_index,
)


def slots(
    optimizer: Optimizer, variable: keras.Variable
) -> list[keras.Variable]:
    """The slots of `variable`, in the order in which they were made."""
    index = variable_index(optimizer, variable)
    own = [each[index] for each in slot_lists(optimizer).values()]
    return [slot for slot in own if slot is not None]


def rule_slots(
    optimizer: Optimizer, variable: keras.Variable
) -> list[keras.Variable]:
    """Those that the optimizer's own rule uses; the base class makes others."""
    others = [optimizer.use_ema, optimizer.gradient_accumulation_steps]
    return slots(optimizer, variable)[sum(map(bool, others)) :]


def named_slots(
    optimizer: Optimizer, variable: keras.Variable
) -> dict[str, keras.Variable]:
    """The slots of `variable` by kind, such as `momentum`.

    The kind is what Keras puts behind the variable's name in the slot's; where
    it gives slots no such name (Adafactor's factors), that of the attribute
    that lists them.
    """
    index = variable_index(optimizer, variable)
    prefix = variable.path.replace("/", "_") + "_"
    own = {id(v) for v in optimizer.variables}
    named = {}
    for attribute, each in slot_lists(optimizer).items():
        slot = each[index]
        if id(slot) not in own:  # None, or the dummy of a variable without.
            continue
        if slot.name.startswith(prefix):
            named[slot.name.removeprefix(prefix)] = slot
        else:
            named[attribute.strip("_")] = slot
    return named


def shared_name(optimizer: Optimizer, variable: keras.Variable) -> str:
    """Name of one that an optimizer keeps for all its variables together."""
    is_nadam = isinstance(optimizer, keras.optimizers.Nadam)
    if is_nadam and variable is nadam_product(optimizer):
        return "momentum_product"  # Keras gives it no name of its own.
    return variable.name


class RowView:
    """Some rows of a variable, as the value of a Keras variable in a scope.

    An optimizer reads and assigns them as it would the whole variable;
    `scatter` writes them back.
    """

    def __init__(self, variable: tf.Variable, ids: tf.Tensor) -> None:
        self._variable = variable
        self._ids = ids
        self._rows = self._start = tf.gather(variable, ids)
        self.dtype = variable.dtype
        self._unique_id = unique_id(variable)

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        return tf.convert_to_tensor(self._rows, dtype, name=name)

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the rows."""
        self._rows = tf.cast(value, self.dtype)

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the rows."""
        self.assign(self._rows + tf.cast(value, self.dtype))

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the rows."""
        self.assign(self._rows - tf.cast(value, self.dtype))

    def scatter(self) -> None:
        """Writes the rows into the variable, if they changed."""
        if self._rows is not self._start:
            self._variable.scatter_update(
                tf.IndexedSlices(self._rows, self._ids)
            )

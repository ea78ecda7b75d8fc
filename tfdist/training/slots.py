"""What an optimizer keeps of a variable, and how its rule runs on some rows.

Keras writes an update as code on a variable and its slots. `RowView` lets the
same code run on some rows of them, so each rule is written once, in Keras.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdist._tf.private import (
    nadam_product,
    slot_lists,
    unique_id,
    variable_index,
)


def slots(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> list[keras.Variable]:
    """The slots of `variable`, in the order in which they were made."""
    index = variable_index(optimizer, variable)
    own = [each[index] for each in slot_lists(optimizer).values()]
    return [slot for slot in own if slot is not None]


def rule_slots(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> list[keras.Variable]:
    """The slots of `variable` that the optimizer's own rule uses.

    The moving average of `use_ema` and the sum of accumulated gradients are the
    base class's, made before them.
    """
    others = [optimizer.use_ema, optimizer.gradient_accumulation_steps]
    return slots(optimizer, variable)[sum(map(bool, others)) :]


def named_slots(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
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


def shared_name(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> str:
    """Name of one that an optimizer keeps for all its variables together."""
    is_nadam = isinstance(optimizer, keras.optimizers.Nadam)
    if is_nadam and variable is nadam_product(optimizer):
        return "momentum_product"  # Keras gives it no name of its own.
    return variable.name


def _with_operators(view: type) -> type:
    """Gives a class the arithmetic of its `rows`."""
    for name in ("add", "sub", "mul", "truediv", "pow"):
        for method in (f"__{name}__", f"__r{name}__"):
            setattr(
                view,
                method,
                lambda self, other, method=method: getattr(self.rows, method)(
                    tf.convert_to_tensor(other, self.dtype)
                ),
            )
    return view


@_with_operators
class RowView:
    """Some rows of a variable, in the role of a variable.

    An optimizer's `update_step` reads and assigns it as it would the whole
    variable; `scatter` writes the rows back.
    """

    def __init__(self, variable: tf.Variable, ids: tf.Tensor) -> None:
        self._variable = variable
        self._ids = ids
        self._changed = False
        self.rows = tf.gather(variable, ids)
        self.dtype = variable.dtype
        self.name = variable.name
        self._unique_id = unique_id(variable)

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the rows."""
        return self.rows.shape

    @property
    def value(self) -> tf.Tensor:
        """The rows."""
        return self.rows

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        """The rows."""
        return tf.convert_to_tensor(self.rows, dtype, name=name)

    def assign(self, value: tf.Tensor) -> None:
        """Replaces the rows."""
        self.rows = tf.cast(value, self.dtype)
        self._changed = True

    def assign_add(self, value: tf.Tensor) -> None:
        """Adds to the rows."""
        self.assign(self.rows + tf.cast(value, self.dtype))

    def assign_sub(self, value: tf.Tensor) -> None:
        """Subtracts from the rows."""
        self.assign(self.rows - tf.cast(value, self.dtype))

    def scatter(self) -> None:
        """Writes the rows into the variable, if they changed."""
        if self._changed:
            self._variable.scatter_update(
                tf.IndexedSlices(self.rows, self._ids)
            )


@contextlib.contextmanager
def swapped(
    optimizer: keras.optimizers.Optimizer,
    variable: keras.Variable,
    views: Sequence[RowView],
) -> Iterator[None]:
    """Lets the optimizer find `views` where the slots of `variable` are."""
    index = variable_index(optimizer, variable)
    originals = slot_lists(optimizer)
    remaining = iter(views)
    swapped = {}
    for name, slots_of in originals.items():
        swapped[name] = list(slots_of)
        if swapped[name][index] is not None:
            swapped[name][index] = next(remaining)
    # Not by setattr, which would have Keras and TensorFlow track the views.
    vars(optimizer).update(swapped)
    try:
        yield
    finally:
        vars(optimizer).update(originals)

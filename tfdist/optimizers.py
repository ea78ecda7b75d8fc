"""Updates applied where the variable lives (design decision D2).

A worker pushes gradients; the optimizer's arithmetic runs on the parameter
server that holds the variable and its slots, as it did in TF1. Keras' own
`Optimizer.apply` would run it in the caller, and count `iterations` by reading,
adding and writing, which loses steps as soon as two workers do it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._private import (
    moving_averages,
    nadam_product,
    slot_lists,
    unique_id,
    uses_weight_decay,
    variable_index,
)

Gradient = tf.Tensor | tf.IndexedSlices | None

# Their steps depend on norms or products over all rows.
_WHOLE_VARIABLE = (keras.optimizers.Lamb, keras.optimizers.Muon)


def build(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Creates the slots of `variables`, each beside its variable.

    Must run inside the strategy's scope; else Keras would create the slots at
    the first step, on the chief.

    The moving averages of `use_ema=True` start at the values of their
    variables. Keras starts them at zero and lets the first step set them all,
    which a step that touches some rows of a table cannot.
    """
    if optimizer.built:
        return
    optimizer.build(list(variables))
    for variable in variables:
        part = parts(optimizer)[owner(optimizer, variable)]
        if part.use_ema:
            average = moving_averages(part)[variable_index(part, variable)]
            with tf.device(variable.value.device):
                average.value.assign(variable.value)


def parts(
    optimizer: keras.optimizers.Optimizer,
) -> list[keras.optimizers.Optimizer]:
    """The optimizers that `optimizer` consists of, usually itself alone."""
    if isinstance(optimizer, MultiOptimizer):
        return optimizer.parts
    return [optimizer]


def owner(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> int:
    """Index in `parts(optimizer)` of the one that updates `variable`."""
    if isinstance(optimizer, MultiOptimizer):
        return optimizer.owner(variable)
    return 0


def part_names(optimizer: keras.optimizers.Optimizer) -> list[str]:
    """A name for each of `parts`; the second of two Adagrads is `adagrad_1`."""
    names = [part.name for part in parts(optimizer)]
    return [
        f"{name}_{names[:i].count(name)}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]


def check(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses what has no meaning when several workers share the slots.

    Also refuses `ScheduleFreeAdamW`: Keras 3.15 on TensorFlow does not compute
    its rule. `fit` starts its slots at zero instead of at the variables, and
    `update_step` reads a slot after it has changed it.

    Raises:
        ValueError: naming each option.
    """
    for part in parts(optimizer):
        unsupported = {
            "gradient_accumulation_steps": part.gradient_accumulation_steps,
            "ema_overwrite_frequency": part.use_ema
            and part.ema_overwrite_frequency,
            "LossScaleOptimizer": isinstance(
                part, keras.optimizers.LossScaleOptimizer
            ),
            "ScheduleFreeAdamW": isinstance(
                part, keras.optimizers.ScheduleFreeAdamW
            ),
        }
        used = [name for name, value in unsupported.items() if value]
        if used:
            raise ValueError(
                f"Optimizer {part.name!r} uses {', '.join(used)}, which "
                "updates on parameter servers do not support. For a fixed "
                "loss scale use loss_scale_factor."
            )


def check_rows(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> None:
    """Refuses a rule that cannot update some rows of a variable.

    Raises:
        ValueError: the rule is about the variable as a whole (Adafactor,
            Lamb, Muon).
    """
    own = slots(optimizer, variable)
    others = [v.path for v in own if v.shape != variable.shape]
    if others or isinstance(optimizer, _WHOLE_VARIABLE):
        raise ValueError(
            f"The rule of {type(optimizer).__name__} is about a variable as a "
            f"whole, so it cannot update some rows of {variable.path!r}. Use "
            "tfdist.MultiOptimizer to give tables another optimizer, for "
            "example Adagrad."
        )


def learning_rate(
    optimizer: keras.optimizers.Optimizer,
    iteration: tf.Tensor,
    values: Sequence[tuple[keras.Variable, tf.Tensor]],
) -> tf.Tensor:
    """The learning rate of a part at `iteration`, a float32 scalar.

    Args:
        optimizer: One of `parts`.
        iteration: Scalar int64: updates before this one.
        values: Variables that need not be read again, with their values.
    """
    known = [(optimizer.iterations, iteration), *values]
    with keras.StatelessScope(known):
        return tf.cast(optimizer.learning_rate, tf.float32)


def update(
    optimizer: keras.optimizers.Optimizer,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    iteration: tf.Tensor,
) -> None:
    """Applies a dense gradient where the ops are placed.

    The caller opens the device scope of the variable.

    Args:
        optimizer: The part that owns `variable`.
        variable: The variable.
        gradient: Of the variable's shape.
        rate: Scalar float32, from `learning_rate`.
        iteration: Scalar int64: updates before this one.
    """
    target, decay = variable.value, _decay(optimizer, variable)
    rate = tf.cast(rate, target.dtype)
    with keras.StatelessScope([(optimizer.iterations, iteration)]):
        if decay:
            target.assign_sub(target * (decay * rate))
        fused = _FUSED.get(type(optimizer))
        if fused is None or not fused(optimizer, variable, gradient, rate):
            optimizer.update_step(gradient, variable, rate)
    if optimizer.use_ema:
        index = variable_index(optimizer, variable)
        average = moving_averages(optimizer)[index].value
        weight = _average_weight(optimizer, iteration)
        average.assign_sub((average - target) * tf.cast(weight, target.dtype))
    if variable.constraint is not None:
        target.assign(variable.constraint(target))


def update_rows(
    optimizer: keras.optimizers.Optimizer,
    variable: keras.Variable,
    ids: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    iteration: tf.Tensor,
) -> None:
    """Applies a gradient to some rows, where the ops are placed.

    The optimizer's own rule runs on these rows of the variable and of its
    slots; others are not touched. That is Keras' result for every rule that
    leaves rows with a zero gradient alone: SGD, Adagrad, and Ftrl for a table
    that starts at zeros, with a constant learning rate and no
    `l2_shrinkage_regularization_strength` (Keras' dense Ftrl sets rows that no
    gradient ever reached to zero). A rule that moves them all the same (the
    decaying moments of Adam and RMSprop, momentum, weight decay, the moving
    average of weights) moves a row here only when it is looked up, like the
    "lazy" optimizers of TF1's contrib; TF1's own Adam decayed every row's
    moments, at a cost that grew with the table.

    Args:
        optimizer: The part that owns `variable`.
        variable: The variable, one row per index of axis 0.
        ids: int64 `(n,)`, unique.
        gradient: `(n, ...)`.
        rate: Scalar float32.
        iteration: Scalar int64: updates before this one.

    Raises:
        ValueError: as `check_rows`.
    """
    check_rows(optimizer, variable)
    decay = _decay(optimizer, variable)
    rate = tf.cast(rate, variable.dtype)
    own = slots(optimizer, variable)
    fused = _FUSED_ROWS.get(type(optimizer))
    if fused is not None and not decay and not optimizer.use_ema:
        with keras.StatelessScope([(optimizer.iterations, iteration)]):
            if fused(optimizer, variable, ids, gradient, rate):
                return
    row, *row_slots = [RowView(v.value, ids) for v in (variable, *own)]
    with (
        keras.StatelessScope([(optimizer.iterations, iteration)]),
        _swapped(optimizer, variable, row_slots),
    ):
        if decay:
            row.assign_sub(row.rows * (decay * rate))
        optimizer.update_step(gradient, row, rate)
    if optimizer.use_ema:
        # The base class makes this slot before all others.
        average = row_slots[0]
        weight = _average_weight(optimizer, iteration)
        average.assign_sub(
            (average.rows - row.rows) * tf.cast(weight, row.dtype)
        )
    for view in (row, *row_slots):
        view.scatter()


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


def begin_step(
    optimizer: keras.optimizers.Optimizer, iteration: tf.Tensor
) -> None:
    """Updates what an optimizer keeps for all its variables together.

    Only Nadam does: the running product of its momentum schedule. Unlike the
    counters it is read, multiplied and written, so several workers may lose a
    factor between them.
    """
    if isinstance(optimizer, keras.optimizers.Nadam):
        product = nadam_product(optimizer).value
        power = tf.pow(0.96, tf.cast(iteration + 1, product.dtype))
        product.assign(product * optimizer.beta_1 * (1.0 - 0.5 * power))


def shared_name(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> str:
    """Name of one that an optimizer keeps for all its variables together."""
    is_nadam = isinstance(optimizer, keras.optimizers.Nadam)
    if is_nadam and variable is nadam_product(optimizer):
        return "momentum_product"  # Keras gives it no name of its own.
    return variable.name


def slots(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> list[keras.Variable]:
    """The slots of `variable`, in the order in which they were made."""
    index = variable_index(optimizer, variable)
    own = [each[index] for each in slot_lists(optimizer).values()]
    return [slot for slot in own if slot is not None]


def _rule_slots(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> list[keras.Variable]:
    """The slots of `variable` that the optimizer's own rule uses.

    The moving average of `use_ema` is the base class's, made before them.
    """
    return slots(optimizer, variable)[int(optimizer.use_ema) :]


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


@contextlib.contextmanager
def _swapped(
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


def _decay(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> float | None:
    """The weight decay that applies to `variable`."""
    decay = optimizer.weight_decay
    if isinstance(optimizer, keras.optimizers.Muon):
        # It trains some variables by AdamW, and these alone have a velocity.
        index = variable_index(optimizer, variable)
        if optimizer.adam_velocities[index] is not None:
            decay = optimizer.adam_weight_decay
    if decay and uses_weight_decay(optimizer, variable):
        return decay
    return None


def _average_weight(
    optimizer: keras.optimizers.Optimizer, iteration: tf.Tensor
) -> tf.Tensor:
    """How far the moving average goes: all the way at the first update."""
    later = tf.cast(iteration > 0, tf.float32)
    return 1.0 - later * optimizer.ema_momentum


def _fused_sgd(
    optimizer: keras.optimizers.SGD,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> bool:
    if optimizer.momentum:
        return False
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.value.handle, alpha=rate, delta=gradient
    )
    return True


def _fused_sgd_rows(
    optimizer: keras.optimizers.SGD,
    variable: keras.Variable,
    ids: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> bool:
    if optimizer.momentum:
        return False
    variable.value.scatter_sub(tf.IndexedSlices(gradient * rate, ids))
    return True


def _same_adagrad(optimizer: keras.optimizers.Adagrad) -> bool:
    """Whether TensorFlow's kernel gives Keras' result.

    Keras adds epsilon under the root, the kernel beside it: the same to float
    precision unless an accumulator is near zero.
    """
    return optimizer.initial_accumulator_value >= 1e-2


def _fused_adagrad(
    optimizer: keras.optimizers.Adagrad,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> bool:
    if not _same_adagrad(optimizer):
        return False
    (accumulator,) = _rule_slots(optimizer, variable)
    tf.raw_ops.ResourceApplyAdagradV2(
        var=variable.value.handle,
        accum=accumulator.value.handle,
        lr=rate,
        epsilon=0.0,
        grad=gradient,
    )
    return True


def _fused_adagrad_rows(
    optimizer: keras.optimizers.Adagrad,
    variable: keras.Variable,
    ids: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> bool:
    if not _same_adagrad(optimizer):
        return False
    (accumulator,) = _rule_slots(optimizer, variable)
    tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=variable.value.handle,
        accum=accumulator.value.handle,
        lr=rate,
        epsilon=0.0,
        grad=gradient,
        indices=ids,
    )
    return True


def _fused_adam(
    optimizer: keras.optimizers.Adam,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> bool:
    if optimizer.amsgrad:
        return False
    steps = tf.cast(optimizer.iterations.value + 1, rate.dtype)
    momentum, velocity = _rule_slots(optimizer, variable)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.value.handle,
        m=momentum.value.handle,
        v=velocity.value.handle,
        beta1_power=tf.pow(optimizer.beta_1, steps),
        beta2_power=tf.pow(optimizer.beta_2, steps),
        lr=rate,
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        epsilon=optimizer.epsilon,
        grad=gradient,
    )
    return True


def _ftrl_arguments(
    optimizer: keras.optimizers.Ftrl,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> dict[str, Any]:
    accumulator, linear = _rule_slots(optimizer, variable)
    return {
        "var": variable.value.handle,
        "accum": accumulator.value.handle,
        "linear": linear.value.handle,
        "grad": gradient,
        "lr": rate,
        "l1": optimizer.l1_regularization_strength,
        "l2": optimizer.l2_regularization_strength
        + optimizer.beta / (2.0 * rate),
        "l2_shrinkage": optimizer.l2_shrinkage_regularization_strength,
        "lr_power": optimizer.learning_rate_power,
    }


def _fused_ftrl(
    optimizer: keras.optimizers.Ftrl,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> bool:
    tf.raw_ops.ResourceApplyFtrlV2(
        **_ftrl_arguments(optimizer, variable, gradient, rate)
    )
    return True


def _fused_ftrl_rows(
    optimizer: keras.optimizers.Ftrl,
    variable: keras.Variable,
    ids: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> bool:
    tf.raw_ops.ResourceSparseApplyFtrlV2(
        **_ftrl_arguments(optimizer, variable, gradient, rate), indices=ids
    )
    return True


# Kernels of TensorFlow that mean the same as a Keras update step; each returns
# whether it applied. Exact types only: a subclass may mean something else.
_FUSED = {
    keras.optimizers.SGD: _fused_sgd,
    keras.optimizers.Adagrad: _fused_adagrad,
    keras.optimizers.Adam: _fused_adam,
    keras.optimizers.Ftrl: _fused_ftrl,
}
_FUSED_ROWS = {
    keras.optimizers.SGD: _fused_sgd_rows,
    keras.optimizers.Adagrad: _fused_adagrad_rows,
    keras.optimizers.Ftrl: _fused_ftrl_rows,
}


def clip(
    optimizer: keras.optimizers.Optimizer, gradients: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Clips as `clipnorm`, `clipvalue`, `global_clipnorm` say.

    Runs on the worker, which holds all gradients: only clipped values travel.
    The gradient of a table is that of its unique rows, whose norm is that of
    the whole gradient.

    Args:
        optimizer: One of `parts`.
        gradients: Of all variables of that part.
    """
    if optimizer.loss_scale_factor is not None:
        gradients = [g / optimizer.loss_scale_factor for g in gradients]
    if optimizer.clipnorm:
        return [tf.clip_by_norm(g, optimizer.clipnorm) for g in gradients]
    if optimizer.global_clipnorm:
        return tf.clip_by_global_norm(gradients, optimizer.global_clipnorm)[0]
    if optimizer.clipvalue:
        limit = optimizer.clipvalue
        return [tf.clip_by_value(g, -limit, limit) for g in gradients]
    return gradients


@keras.saving.register_keras_serializable(package="tfdist")
class MultiOptimizer(keras.optimizers.Optimizer):
    """Different optimizers for different variables of one model.

    What `tf.estimator.DNNLinearCombinedClassifier` did with its
    `linear_optimizer` and `dnn_optimizer`, for any split of the variables.

    >>> optimizer = MultiOptimizer([
    ...     ("wide", keras.optimizers.Ftrl(0.1)),
    ...     ("", keras.optimizers.Adagrad(0.05)),
    ... ])

    Args:
        optimizers: `(pattern, optimizer)` pairs. A variable belongs to the
            first pair whose regular expression is found in its `path`; the
            empty pattern takes all that are left.
        name: Name of the optimizer.

    Raises:
        ValueError: no pair, or (when built) a variable that no pattern matches.
    """

    def __init__(
        self,
        optimizers: Sequence[tuple[str, keras.optimizers.Optimizer]],
        name: str = "multi_optimizer",
    ) -> None:
        if not optimizers:
            raise ValueError(
                "Argument `optimizers` must have at least one "
                f"(pattern, optimizer) pair. Received: {optimizers!r}."
            )
        # The learning rate is never used: each part has its own.
        super().__init__(learning_rate=0.0, name=name)
        self.patterns = [pattern for pattern, _ in optimizers]
        self.parts = [keras.optimizers.get(part) for _, part in optimizers]

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Builds each part for the variables that belong to it."""
        super().build(variables)
        for i, part in enumerate(self.parts):
            part.build([v for v in variables if self.owner(v) == i])

    @property
    def variables(self) -> list[keras.Variable]:
        """The counter of this optimizer and the variables of its parts."""
        return [
            self.iterations,
            *(v for part in self.parts for v in part.variables),
        ]

    def split(
        self, gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
    ) -> list[tuple[keras.optimizers.Optimizer, list]]:
        """`(part, [(gradient, variable), ...])` for each part with any."""
        pairs = list(zip(gradients, variables, strict=True))
        split = [
            (part, [p for p in pairs if self.owner(p[1]) == i])
            for i, part in enumerate(self.parts)
        ]
        return [(part, own) for part, own in split if own]

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """As `keras.optimizers.Optimizer.apply`, for use outside tfdist."""
        variables = trainable_variables or self._trainable_variables
        if not self.built:
            self.build(list(variables))
        for part, pairs in self.split(grads, variables):
            part.apply(*zip(*pairs, strict=True))
        self.iterations.assign_add(1)

    def owner(self, variable: keras.Variable) -> int:
        """Index of the part that updates `variable`."""
        for i, pattern in enumerate(self.patterns):
            if re.search(pattern, variable.path):
                return i
        raise ValueError(
            f"No pattern of {self.name!r} matches variable {variable.path!r}. "
            f"Patterns: {self.patterns}. End the list with an empty pattern to "
            "take all variables that are left."
        )

    def get_config(self) -> dict[str, Any]:
        """Configuration from which `from_config` makes the same optimizer."""
        parts = [keras.optimizers.serialize(part) for part in self.parts]
        return {
            "name": self.name,
            "optimizers": list(zip(self.patterns, parts, strict=True)),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict | None = None
    ) -> MultiOptimizer:
        """Makes an optimizer from `get_config()`."""
        parts = [
            (pattern, keras.optimizers.deserialize(part, custom_objects))
            for pattern, part in config["optimizers"]
        ]
        return cls(parts, name=config["name"])

"""Updates applied where the variable lives (design decision D2).

A worker pushes gradients; the optimizer's arithmetic runs on the parameter
server that holds the variable and its slots, as it did in TF1. Keras' own
`Optimizer.apply` would run it in the caller, and count `iterations` by reading,
adding and writing, which loses steps as soon as two workers do it.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist._tf.private import (
    counter,
    moving_averages,
    nadam_product,
    uses_weight_decay,
    variable_index,
)
from tfdist.training.kernels import fused_update
from tfdist.training.multi_optimizer import MultiOptimizer
from tfdist.training.slots import RowView, slots

# Their steps depend on norms or products over all rows.
_WHOLE_VARIABLE = (keras.optimizers.Lamb, keras.optimizers.Muon)


def build(optimizer: Optimizer, variables: Sequence[keras.Variable]) -> None:
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
            with tf.device(variable.value.device):
                _average(part, variable).value.assign(variable.value)


def parts(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that `optimizer` consists of, usually itself alone."""
    # The one that applies gradients, once their scale is undone.
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    is_multi = isinstance(optimizer, MultiOptimizer)
    return optimizer.parts if is_multi else [optimizer]


def owner(optimizer: Optimizer, variable: keras.Variable) -> int:
    """Index in `parts(optimizer)` of the one that updates `variable`."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    is_multi = isinstance(optimizer, MultiOptimizer)
    return optimizer.owner(variable) if is_multi else 0


def part_names(optimizer: Optimizer) -> list[str]:
    """A name for each of `parts`; the second of two Adagrads is `adagrad_1`."""
    names = [part.name for part in parts(optimizer)]
    return [
        f"{name}_{names[:i].count(name)}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]


def check(optimizer: Optimizer, remote: bool) -> None:
    """Refuses what is not computed, or not where several workers share slots.

    Keras 3.15 on TensorFlow does not compute the rule of `ScheduleFreeAdamW`:
    `fit` starts its slots at zero instead of at the variables, and
    `update_step` reads a slot after it has changed it.

    Raises:
        ValueError: naming each option.
    """
    several = len(parts(optimizer)) > 1
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    for part in parts(optimizer):
        accumulates = part.gradient_accumulation_steps
        unsupported = {
            "gradient_accumulation_steps": accumulates
            and (remote or several or scaled),
            "ema_overwrite_frequency": part.use_ema
            and part.ema_overwrite_frequency,
            "LossScaleOptimizer": scaled and remote,
            "ScheduleFreeAdamW": isinstance(
                part, keras.optimizers.ScheduleFreeAdamW
            ),
        }
        used = [name for name, value in unsupported.items() if value]
        if used:
            where = "on parameter servers " if remote else ""
            raise ValueError(
                f"Optimizer {part.name!r} uses {', '.join(used)}, which "
                f"updates {where}do not support. For a fixed loss scale use "
                "loss_scale_factor."
            )


def check_rows(optimizer: Optimizer, variable: keras.Variable) -> None:
    """Raises `ValueError` for a rule that cannot update some rows."""
    own = slots(optimizer, variable)
    has_other_shapes = any(v.shape != variable.shape for v in own)
    if has_other_shapes or isinstance(optimizer, _WHOLE_VARIABLE):
        raise ValueError(
            f"The rule of {type(optimizer).__name__} is about a variable as a "
            f"whole, so it cannot update some rows of {variable.path!r}. Use "
            "tfdist.MultiOptimizer to give tables another optimizer, for "
            "example Adagrad."
        )


def learning_rate(
    optimizer: Optimizer,
    iteration: tf.Tensor,
    values: Sequence[tuple[keras.Variable, tf.Tensor]],
) -> tf.Tensor:
    """The learning rate of one of `parts`, a float32 scalar.

    `values` are those of variables that need not be read again.
    """
    known = [(counter(optimizer), iteration), *values]
    with keras.StatelessScope(known):
        return tf.cast(optimizer.learning_rate, tf.float32)


def update(
    optimizer: Optimizer,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    iteration: tf.Tensor,
    ids: tf.Tensor | None = None,
) -> None:
    """Applies a gradient; the caller opens the variable's device scope.

    With `ids` the optimizer's own rule runs on these rows of the variable and
    of its slots; others are not touched. That is Keras' result for every rule
    that leaves rows with a zero gradient alone: SGD, Adagrad, and Ftrl for a
    table that starts at zeros, with a constant learning rate and no
    `l2_shrinkage_regularization_strength` (Keras' dense Ftrl sets rows that no
    gradient ever reached to zero). A rule that moves them all the same (the
    decaying moments of Adam and RMSprop, momentum, weight decay, the moving
    average of weights) moves a row here only when it is looked up, like the
    "lazy" optimizers of TF1's contrib; TF1's own Adam decayed every row's
    moments, at a cost that grew with the table.

    Args:
        optimizer: The part that owns `variable`.
        variable: The variable.
        gradient: Of the variable's shape, or of that of its rows.
        rate: Scalar float32, from `learning_rate`.
        iteration: Scalar int64: updates before this one.
        ids: int64, unique: the rows. Default: all, the gradient is dense.
    """
    decay = _decay(optimizer, variable)
    rate = tf.cast(rate, variable.dtype)
    views: list[RowView] = []
    scope = keras.StatelessScope([(counter(optimizer), iteration)])
    with scope:
        if ids is not None:
            check_rows(optimizer, variable)
            is_plain = not (decay or optimizer.use_ema)
            if is_plain and fused_update(
                optimizer, variable, gradient, rate, ids
            ):
                return
            for whole in (variable, *slots(optimizer, variable)):
                views.append(RowView(whole.value, ids))
                # The constructor would have made tensors of them.
                scope.state_mapping[id(whole)] = views[-1]
        target = variable.value
        if decay:
            target.assign_sub(tf.convert_to_tensor(target) * (decay * rate))
        if views or not fused_update(optimizer, variable, gradient, rate):
            optimizer.update_step(gradient, variable, rate)
        if optimizer.use_ema:
            # All the way to the variable at the first update.
            later = tf.cast(iteration > 0, tf.float32)
            weight = tf.cast(1.0 - later * optimizer.ema_momentum, rate.dtype)
            average = _average(optimizer, variable).value
            difference = tf.convert_to_tensor(average) - target
            average.assign_sub(difference * weight)
    for view in views:
        view.scatter()
    if ids is None and variable.constraint is not None:
        target.assign(variable.constraint(target))


def begin_step(optimizer: Optimizer, iteration: tf.Tensor) -> None:
    """Updates what an optimizer keeps for all its variables together.

    Only Nadam does: the product of its momentum schedule, which is read,
    multiplied and written, so several workers may lose a factor between them.
    """
    if isinstance(optimizer, keras.optimizers.Nadam):
        product = nadam_product(optimizer).value
        power = tf.pow(0.96, tf.cast(iteration + 1, product.dtype))
        product.assign(product * optimizer.beta_1 * (1.0 - 0.5 * power))


def clip(optimizer: Optimizer, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Clips all gradients of a part as its options say.

    The gradient of a table is that of its unique rows, whose norm is the same.
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


def _average(optimizer: Optimizer, variable: keras.Variable) -> keras.Variable:
    """The moving average of `variable` that `use_ema=True` keeps."""
    return moving_averages(optimizer)[variable_index(optimizer, variable)]


def _decay(optimizer: Optimizer, variable: keras.Variable) -> float | None:
    """The weight decay that applies to `variable`."""
    decay = optimizer.weight_decay
    if isinstance(optimizer, keras.optimizers.Muon):
        # It trains some variables by AdamW, and these alone have a velocity.
        index = variable_index(optimizer, variable)
        if optimizer.adam_velocities[index] is not None:
            decay = optimizer.adam_weight_decay
    return decay if uses_weight_decay(optimizer, variable) else None

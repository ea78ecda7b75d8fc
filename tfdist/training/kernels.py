"""TensorFlow's fused update kernels, for the Keras rules that they match.

An update takes one op instead of the five or ten of Keras' own step.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist.training.slots import slots

_K, _OPS = keras.optimizers, tf.raw_ops


def is_fused(optimizer: Optimizer, by_rows: bool) -> bool:
    """Whether a fused op exists for the rule, on rows or a whole variable."""
    # Exact types only: a subclass may change the rule.
    rule = type(optimizer)
    if rule is _K.SGD:
        return not optimizer.momentum
    if rule is _K.Adagrad:
        # Keras adds epsilon under the root, the kernel does not: results agree
        # to float precision unless an accumulator is close to epsilon.
        return optimizer.epsilon <= 1e-5 * optimizer.initial_accumulator_value
    if rule is _K.Adam:
        return not (by_rows or optimizer.amsgrad)
    return rule is _K.Ftrl


def fused_update(
    optimizer: Optimizer,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    ids: tf.Tensor | None = None,
) -> None:
    """Applies a gradient with one op, if `is_fused`; see `optimizers.update`.

    The op locks the variable and its slots (in the order of their addresses),
    so workers that update the same numbers lose no update. Ops on whole
    variables and `ResourceScatterNdSub` lock, `ResourceScatterSub` does not.
    """
    handle = variable.value.handle
    if type(optimizer) is _K.SGD:
        if ids is None:
            _OPS.ResourceApplyGradientDescent(
                var=handle, alpha=rate, delta=gradient
            )
        else:
            _OPS.ResourceScatterNdSub(
                ref=handle, indices=ids[:, tf.newaxis], updates=gradient * rate
            )
        return
    arguments_of, names, kernel, of_rows = _RULES[type(optimizer)]
    arguments = arguments_of(optimizer, rate)
    own = slots(optimizer, variable).of_rule
    for name, slot in zip(names, own, strict=True):
        arguments[name] = slot.value.handle
    if ids is not None:
        kernel, arguments["indices"] = of_rows, ids
    kernel(var=handle, grad=gradient, use_locking=True, **arguments)


def _adam(optimizer: keras.optimizers.Adam, rate: tf.Tensor) -> dict[str, Any]:
    steps = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, rate.dtype)
    return {
        "beta1_power": tf.pow(tf.cast(optimizer.beta_1, rate.dtype), steps),
        "beta2_power": tf.pow(tf.cast(optimizer.beta_2, rate.dtype), steps),
        "lr": rate,
        "beta1": optimizer.beta_1,
        "beta2": optimizer.beta_2,
        "epsilon": optimizer.epsilon,
    }


def _ftrl(optimizer: keras.optimizers.Ftrl, rate: tf.Tensor) -> dict[str, Any]:
    return {
        "lr": rate,
        "l1": optimizer.l1_regularization_strength,
        "l2": optimizer.l2_regularization_strength
        + optimizer.beta / (2.0 * rate),
        "l2_shrinkage": optimizer.l2_shrinkage_regularization_strength,
        "lr_power": optimizer.learning_rate_power,
    }


# For each rule: its arguments, the argument names of its slots, the op for a
# whole variable and the op for some rows.
_RULES = {
    _K.Adagrad: (
        lambda _, rate: {"lr": rate, "epsilon": 0.0},
        ["accum"],
        _OPS.ResourceApplyAdagradV2,
        _OPS.ResourceSparseApplyAdagradV2,
    ),
    _K.Adam: (_adam, ["m", "v"], _OPS.ResourceApplyAdam, None),
    _K.Ftrl: (
        _ftrl,
        ["accum", "linear"],
        _OPS.ResourceApplyFtrlV2,
        _OPS.ResourceSparseApplyFtrlV2,
    ),
}

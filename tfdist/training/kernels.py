"""TensorFlow's fused update kernels, for the Keras rules they equal.

One op instead of the five or ten of Keras' own step.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist.training.slots import rule_slots

_K, _OPS = keras.optimizers, tf.raw_ops


def fused_update(
    optimizer: Optimizer,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    ids: tf.Tensor | None = None,
) -> bool:
    """Applies a gradient by one op, if there is one; returns whether.

    See `optimizers.update`.
    """
    # Exact types only: a subclass may mean something else.
    rule = type(optimizer)
    if rule is _K.SGD and not optimizer.momentum:
        if ids is None:
            _OPS.ResourceApplyGradientDescent(
                var=variable.value.handle, alpha=rate, delta=gradient
            )
        else:
            variable.value.scatter_sub(tf.IndexedSlices(gradient * rate, ids))
        return True
    if rule not in _RULES:
        return False
    arguments_of, names, whole, of_rows = _RULES[rule]
    kernel = whole if ids is None else of_rows
    arguments = kernel and arguments_of(optimizer, rate)
    if arguments is None:
        return False
    own = rule_slots(optimizer, variable)
    for name, slot in zip(names, own, strict=True):
        arguments[name] = slot.value.handle
    if ids is not None:
        arguments["indices"] = ids
    kernel(var=variable.value.handle, grad=gradient, **arguments)
    return True


def _adagrad(
    optimizer: keras.optimizers.Adagrad, rate: tf.Tensor
) -> dict[str, Any] | None:
    # Keras adds epsilon under the root, the kernel beside it: the same to float
    # precision unless an accumulator is near zero.
    if optimizer.initial_accumulator_value < 1e-2:
        return None
    return {"lr": rate, "epsilon": 0.0}


def _adam(
    optimizer: keras.optimizers.Adam, rate: tf.Tensor
) -> dict[str, Any] | None:
    if optimizer.amsgrad:
        return None
    steps = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, rate.dtype)
    return {
        "beta1_power": tf.pow(optimizer.beta_1, steps),
        "beta2_power": tf.pow(optimizer.beta_2, steps),
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


# For each rule: its arguments; names of its slots, the op for a whole variable
# and that for some rows.
_RULES = {
    _K.Adagrad: (
        _adagrad,
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

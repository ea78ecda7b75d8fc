"""TensorFlow's fused update kernels, for the Keras rules they equal.

One op instead of the five or ten of Keras' own step. Each function applies a
gradient on the current device and returns True, or returns False where the
options of the optimizer mean something else than the kernel.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.training.slots import rule_slots


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


def _adagrad_arguments(
    optimizer: keras.optimizers.Adagrad,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> dict[str, Any]:
    (accumulator,) = rule_slots(optimizer, variable)
    return {
        "var": variable.value.handle,
        "accum": accumulator.value.handle,
        "lr": rate,
        "epsilon": 0.0,
        "grad": gradient,
    }


def _fused_adagrad(
    optimizer: keras.optimizers.Adagrad,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> bool:
    if not _same_adagrad(optimizer):
        return False
    tf.raw_ops.ResourceApplyAdagradV2(
        **_adagrad_arguments(optimizer, variable, gradient, rate)
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
    tf.raw_ops.ResourceSparseApplyAdagradV2(
        **_adagrad_arguments(optimizer, variable, gradient, rate), indices=ids
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
    steps = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, rate.dtype)
    momentum, velocity = rule_slots(optimizer, variable)
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
    accumulator, linear = rule_slots(optimizer, variable)
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
DENSE = {
    keras.optimizers.SGD: _fused_sgd,
    keras.optimizers.Adagrad: _fused_adagrad,
    keras.optimizers.Adam: _fused_adam,
    keras.optimizers.Ftrl: _fused_ftrl,
}
ROWS = {
    keras.optimizers.SGD: _fused_sgd_rows,
    keras.optimizers.Adagrad: _fused_adagrad_rows,
    keras.optimizers.Ftrl: _fused_ftrl_rows,
}

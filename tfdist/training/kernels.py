"""TensorFlow's fused update kernels, for the Keras rules they equal.

One op instead of the five or ten of Keras' own step. Each rule applies a
gradient on the current device (to the rows `ids`, if any) and returns True, or
returns False where the optimizer's options mean something else.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.training.slots import rule_slots


def fused_update(
    optimizer: keras.optimizers.Optimizer,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    ids: tf.Tensor | None = None,
) -> bool:
    """Applies a gradient by one op, if there is one; returns whether.

    See `optimizers.update`, and `update_rows` for `ids`.
    """
    # Exact types only: a subclass may mean something else.
    rule = _RULES.get(type(optimizer))
    return rule is not None and rule(optimizer, variable, gradient, rate, ids)


def _sgd(
    optimizer: keras.optimizers.SGD,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    ids: tf.Tensor | None,
) -> bool:
    if optimizer.momentum:
        return False
    if ids is None:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.value.handle, alpha=rate, delta=gradient
        )
    else:
        variable.value.scatter_sub(tf.IndexedSlices(gradient * rate, ids))
    return True


def _adagrad(
    optimizer: keras.optimizers.Adagrad,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    ids: tf.Tensor | None,
) -> bool:
    # Keras adds epsilon under the root, the kernel beside it: the same to float
    # precision unless an accumulator is near zero.
    if optimizer.initial_accumulator_value < 1e-2:
        return False
    (accumulator,) = rule_slots(optimizer, variable)
    arguments = {
        "var": variable.value.handle,
        "accum": accumulator.value.handle,
        "lr": rate,
        "epsilon": 0.0,
        "grad": gradient,
    }
    if ids is None:
        tf.raw_ops.ResourceApplyAdagradV2(**arguments)
    else:
        tf.raw_ops.ResourceSparseApplyAdagradV2(**arguments, indices=ids)
    return True


def _adam(
    optimizer: keras.optimizers.Adam,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    ids: tf.Tensor | None,
) -> bool:
    if optimizer.amsgrad or ids is not None:
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


def _ftrl(
    optimizer: keras.optimizers.Ftrl,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    ids: tf.Tensor | None,
) -> bool:
    accumulator, linear = rule_slots(optimizer, variable)
    arguments = {
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
    if ids is None:
        tf.raw_ops.ResourceApplyFtrlV2(**arguments)
    else:
        tf.raw_ops.ResourceSparseApplyFtrlV2(**arguments, indices=ids)
    return True


_RULES = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adam: _adam,
    keras.optimizers.Ftrl: _ftrl,
}

"""Updates that do not happen at every step: accumulation, loss scaling.

Both are for processes that hold their variables themselves: on parameter
servers the gradients of several workers would be mixed, at any step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist._tf.private import accumulators, variable_index
from tfdist.training.exchange import StepGradients, push
from tfdist.training.layout import Layout

ConditionalUpdate = Callable[[StepGradients], tf.Tensor]
"""Applies gradients when it is time; whether the step is an update."""


def conditional_update(
    optimizer: Optimizer, layout: Layout
) -> ConditionalUpdate | None:
    """What decides whether a step's update happens; None: it always does.

    Raises:
        ValueError: gradients of tables are to be accumulated: each step has
            other rows.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return functools.partial(_unscale, optimizer, layout)
    if not optimizer.gradient_accumulation_steps:
        return None
    if layout.groups:
        raise ValueError(
            f"Optimizer {optimizer.name!r} accumulates the gradients of "
            f"{optimizer.gradient_accumulation_steps} steps, which a "
            "PartitionedEmbedding does not support. Use larger batches, or "
            "keras.layers.Embedding."
        )
    return functools.partial(_accumulate, optimizer, layout)


def _accumulate(
    optimizer: Optimizer, layout: Layout, found: StepGradients
) -> tf.Tensor:
    """Applies the mean of so many steps' gradients, at the last of them.

    As `gradient_accumulation_steps` of Keras, whose `fit` cannot do it with
    several replicas.
    """
    steps = optimizer.gradient_accumulation_steps
    every = accumulators(optimizer)
    sums = [every[variable_index(optimizer, v)].value for v in layout.dense]
    for gradient, total in zip(found.dense, sums, strict=True):
        if gradient is not None:
            total.assign_add(gradient)

    def update() -> None:
        pairs = list(zip(found.dense, sums, strict=True))
        dense = [g if g is None else total / steps for g, total in pairs]
        push(layout, dataclasses.replace(found, dense=dense))
        for gradient, total in pairs:
            if gradient is not None:
                total.assign(tf.zeros_like(total))

    tf.cond((found.iteration + 1) % steps == 0, update, lambda: None)
    return tf.constant(True)


def _unscale(
    optimizer: keras.optimizers.LossScaleOptimizer,
    layout: Layout,
    found: StepGradients,
) -> tf.Tensor:
    """Applies gradients that are finite; finds a scale that keeps them so.

    As `keras.optimizers.LossScaleOptimizer`, which `mixed_float16` models are
    compiled with.
    """
    count, scale = optimizer.step_counter.value, optimizer.dynamic_scale.value
    now = tf.identity(scale)
    gradients = [g for g in [*found.dense, *found.rows] if g is not None]
    finite = tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    )
    dense, rows = (
        [g if g is None else g / tf.cast(now, g.dtype) for g in each]
        for each in (found.dense, found.rows)
    )

    def update() -> None:
        push(layout, dataclasses.replace(found, dense=dense, rows=rows))

    tf.cond(finite, update, lambda: None)
    last = tf.cast(optimizer.dynamic_growth_steps - 1, count.dtype)
    grows = finite & tf.equal(count, last)
    factor = tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5)
    goes_on = finite & ~grows
    count.assign(tf.where(goes_on, count + 1, tf.zeros_like(count)))
    scale.assign(now * factor)
    return finite

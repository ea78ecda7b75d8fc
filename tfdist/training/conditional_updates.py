"""Updates that do not happen at every step: accumulation, loss scaling.

Both are for processes that hold their variables themselves: on parameter
servers the gradients of several workers would be mixed, at any step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist._tf.private import accumulators, variable_index
from tfdist.training.layout import Layout
from tfdist.training.push import StepGradients

Apply = Callable[[StepGradients], None]


class Accumulation:
    """Applies the mean of so many steps' gradients, at the last of them.

    As Keras does for `gradient_accumulation_steps`; its `fit` cannot do it
    with several replicas.

    Raises:
        ValueError: the step looks up tables: each step has other rows.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, layout: Layout
    ) -> None:
        if layout.groups:
            raise ValueError(
                f"Optimizer {optimizer.name!r} accumulates the gradients of "
                f"{optimizer.gradient_accumulation_steps} steps, which a "
                "PartitionedEmbedding does not support. Use larger batches, or "
                "keras.layers.Embedding."
            )
        self._steps = optimizer.gradient_accumulation_steps
        every = accumulators(optimizer)
        self._sums = [every[variable_index(optimizer, v)] for v in layout.dense]

    def __call__(self, found: StepGradients, apply: Apply) -> tf.Tensor:
        """Calls `apply` when it is time.

        Returns:
            Scalar bool: whether the step counts for the optimizer. Each does.
        """
        pairs = [
            (gradient, total.value)
            for gradient, total in zip(found.dense, self._sums, strict=True)
            if gradient is not None
        ]
        for gradient, total in pairs:
            total.assign_add(gradient)

        def update() -> None:
            means = iter([total / self._steps for _, total in pairs])
            dense = [g if g is None else next(means) for g in found.dense]
            apply(dataclasses.replace(found, dense=dense))
            for _, total in pairs:
                total.assign(tf.zeros_like(total))

        is_last = (found.iteration + 1) % self._steps == 0
        tf.cond(is_last, update, lambda: None)
        return tf.constant(True)


class LossScaling:
    """Applies gradients that are finite, and finds a scale that keeps them so.

    As `keras.optimizers.LossScaleOptimizer`, which `mixed_float16` models are
    compiled with.
    """

    def __init__(self, optimizer: keras.optimizers.LossScaleOptimizer) -> None:
        self._optimizer = optimizer

    def __call__(self, found: StepGradients, apply: Apply) -> tf.Tensor:
        """Calls `apply` if every gradient is finite; see `Accumulation`."""
        count = self._optimizer.step_counter.value
        scale = self._optimizer.dynamic_scale.value
        now = tf.identity(scale)
        gradients = [g for g in [*found.dense, *found.rows] if g is not None]
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
        )
        dense, rows = (
            [g if g is None else g / tf.cast(now, g.dtype) for g in each]
            for each in (found.dense, found.rows)
        )
        unscaled = dataclasses.replace(found, dense=dense, rows=rows)
        tf.cond(finite, lambda: apply(unscaled), lambda: None)
        last = tf.cast(self._optimizer.dynamic_growth_steps - 1, count.dtype)
        grows = finite & tf.equal(count, last)
        factor = tf.where(finite, tf.where(grows, 2.0, 1.0), 0.5)
        goes_on = finite & ~grows
        count.assign(tf.where(goes_on, count + 1, tf.zeros_like(count)))
        scale.assign(now * factor)
        return finite


def conditional_update(
    optimizer: keras.optimizers.Optimizer, layout: Layout
) -> Accumulation | LossScaling | None:
    """What decides whether a step's update happens; None: it always does."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return LossScaling(optimizer)
    if optimizer.gradient_accumulation_steps:
        return Accumulation(optimizer, layout)
    return None

"""The optimizer's update, each part of it on the device of its variable."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.pipeline.micro_batches import Gradient
from tfdist.training import optimizers


def check(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an optimizer that a pipeline does not apply.

    Raises:
        ValueError: it skips updates, or see `optimizers.check`.
    """
    optimizers.check(optimizer, remote=False)
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    steps = [
        part.gradient_accumulation_steps for part in optimizers.parts(optimizer)
    ]
    if scaling or any(steps):
        raise ValueError(
            f"Optimizer {optimizer.name!r} skips some updates, which a "
            "Pipeline does not support. Received: "
            f"{type(optimizer).__name__} with gradient_accumulation_steps="
            f"{steps[0]}. Instead of accumulation, use larger batches and more "
            "micro-batches; instead of LossScaleOptimizer, bfloat16 or "
            "loss_scale_factor."
        )


def apply(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    gradients: Sequence[Gradient],
) -> None:
    """Applies gradients, of which some may be None, and counts the step."""
    parts = optimizers.parts(optimizer)
    iteration = tf.convert_to_tensor(optimizer.iterations.value)
    for i, part in enumerate(parts):
        rate = optimizers.learning_rate(part, iteration, [])
        optimizers.begin_step(part, iteration)
        own = [
            (variable, gradient)
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None
            and optimizers.owner(optimizer, variable) == i
        ]
        for variable, gradient in _clipped(part, own):
            with tf.device(variable.value.device):
                optimizers.update(part, variable, gradient, rate, iteration)
    counters = [o.iterations for o in (optimizer, *parts)]
    for counter in {id(c): c for c in counters}.values():
        counter.assign_add(1)


def _clipped(
    part: keras.optimizers.Optimizer,
    pairs: list[tuple[keras.Variable, Gradient]],
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """With gradients that are dense, and clipped as the optimizer says."""
    clipped = []
    for variable, gradient in pairs:
        with tf.device(variable.value.device):
            gradient = tf.convert_to_tensor(gradient)
            if not part.global_clipnorm:
                (gradient,) = optimizers.clip(part, [gradient])
            elif part.loss_scale_factor is not None:
                gradient /= part.loss_scale_factor
        clipped.append(gradient)
    if part.global_clipnorm and clipped:
        # Each is scaled where it is; only norms meet.
        clipped, _ = tf.clip_by_global_norm(clipped, part.global_clipnorm)
    variables = [variable for variable, _ in pairs]
    return list(zip(variables, clipped, strict=True))

"""The scale of a loss, and updates that happen if it was not too large."""

from __future__ import annotations

import dataclasses

import keras
import tensorflow as tf

from tfdist.training.exchange import StepGradients
from tfdist.training.layout import Layout


def unscaled(found: StepGradients) -> StepGradients:
    """Undoes the scale of the loss, before replicas add up what they found."""
    scale = found.scale
    if scale is None:
        return found
    dense, rows = (
        [g if g is None else g / tf.cast(scale, g.dtype) for g in each]
        for each in (found.dense, found.rows)
    )
    return dataclasses.replace(found, dense=dense, rows=rows)


def checked(found: StepGradients) -> StepGradients:
    """Says whether all gradients are finite, if the loss has a scale."""
    if found.scale is None:
        return found
    gradients = [g for g in [*found.dense, *found.rows] if g is not None]
    finite = [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    return dataclasses.replace(found, finite=tf.reduce_all(finite))


def adapt_scale(
    optimizer: keras.optimizers.LossScaleOptimizer,
    layout: Layout,
    found: StepGradients,
) -> None:
    """Finds a scale that keeps gradients finite, as Keras does.

    Workers that change it at the same time may undo what another does, which
    one of their next steps does again.
    """
    finite, used = found.finite, found.scale
    assert finite is not None
    assert used is not None
    count, scale = optimizer.step_counter.value, optimizer.dynamic_scale.value
    with tf.device(layout.device_of(count)):
        after = tf.convert_to_tensor(count) + 1
        grows = finite & (after >= optimizer.dynamic_growth_steps)
        count.assign(tf.where(finite & ~grows, after, 0))
    with tf.device(layout.device_of(scale)):
        now = tf.convert_to_tensor(scale)
        # Of those that find one too large at the same time, the first halves.
        lower = tf.where(finite, now, tf.minimum(now, used * 0.5))
        scale.assign(tf.where(grows, now * 2.0, lower))

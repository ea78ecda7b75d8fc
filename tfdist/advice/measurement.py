"""Seconds of a step, measured on this machine."""

from __future__ import annotations

import numbers
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_REPEATS = 5


def measure(model_fn: Callable[[], keras.Model], batch: Any) -> float:
    """Measures a step on this machine's first device.

    It is a forward and a backward pass, without the optimizer's update.

    Args:
        model_fn: Returns a built model, which is allocated here.
        batch: `(x, y)` as a dataset yields it; the model's compiled loss is
            differentiated. Or a batch size: then the inputs are zeros, and the
            mean of the outputs is differentiated.

    Returns:
        Seconds, the median of five steps, for `Workload(compute_secs=...)`.

    Example:
    >>> def model_fn():
    ...     return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> measure(model_fn, 8) > 0
    True
    """
    model = model_fn()
    if isinstance(batch, numbers.Integral):
        x, y = _zeros(model, int(batch)), None
    else:
        x, y = batch

    @tf.function
    def step() -> tuple[tf.Tensor, list[Any]]:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            if y is None:
                means = map(tf.reduce_mean, tf.nest.flatten(outputs))
                loss = tf.add_n([tf.cast(mean, tf.float32) for mean in means])
            else:
                loss = model.compute_loss(x=x, y=y, y_pred=outputs)
        weights = [weight.value for weight in model.trainable_weights]
        return loss, tape.gradient(loss, weights)

    def seconds() -> float:
        start = time.perf_counter()
        step()[0].numpy()  # A loss on the host has been computed.
        return time.perf_counter() - start

    seconds()  # Traces.
    return statistics.median(seconds() for _ in range(_REPEATS))


def _zeros(model: keras.Model, batch_size: int) -> Any:
    def zeros(tensor: keras.KerasTensor) -> tf.Tensor:
        shape = [1 if n is None else n for n in tensor.shape[1:]]
        return tf.zeros([batch_size, *shape], tensor.dtype)

    inputs = (
        model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    )
    return tf.nest.map_structure(zeros, inputs)

"""Seconds of a step and of a batch, measured on this machine."""

from __future__ import annotations

import dataclasses
import numbers
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

_REPEATS = 5
_BATCHES = 20


@dataclasses.dataclass(frozen=True)
class Measured:
    """What `measure` found on this machine.

    Attributes:
        compute_secs: A forward and backward pass of one batch.
        input_secs: Preparing a batch; 0.0 if no dataset was given.
    """

    compute_secs: float
    input_secs: float


def measure(
    model_fn: Callable[[], keras.Model],
    batch: Any,
    *,
    dataset: tf.data.Dataset | None = None,
) -> Measured:
    """Measures a step on this machine's first device, for a `Workload`.

    The optimizer's update is not part of the step.

    Args:
        model_fn: Returns a built model, which is allocated here.
        batch: `(x, y)` as the dataset yields it; the model's compiled loss is
            differentiated. Or a batch size: then the inputs are zeros, and the
            mean of the outputs is differentiated.
        dataset: Whose batches are timed, without the first. Default: none.

    Returns:
        A `Measured`: the median of five steps, the mean of twenty batches.

    Example:
    >>> def model_fn():
    ...     return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> measure(model_fn, 8).compute_secs > 0
    True

    Raises:
        ValueError: The dataset has too few batches.
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

    def run() -> None:
        step()[0].numpy()  # A loss on the host has been computed.

    run()  # Traces.
    return Measured(
        statistics.median(_timed(run) for _ in range(_REPEATS)),
        0.0 if dataset is None else _input_secs(dataset),
    )


def _zeros(model: keras.Model, batch_size: int) -> Any:
    def zeros(tensor: keras.KerasTensor) -> tf.Tensor:
        shape = [1 if n is None else n for n in tensor.shape[1:]]
        return tf.zeros([batch_size, *shape], tensor.dtype)

    inputs = (
        model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    )
    return tf.nest.map_structure(zeros, inputs)


def _input_secs(dataset: tf.data.Dataset) -> float:
    """Mean of many: what was prefetched comes at once, the rest later."""
    batches = iter(dataset)
    try:
        next(batches)
        some = range(_BATCHES)
        return _timed(lambda: [next(batches) for _ in some]) / _BATCHES
    except StopIteration:
        raise ValueError(
            f"Argument `dataset` must have more than {_BATCHES} batches. "
            f"Received: dataset={dataset}. Add `.repeat()`."
        ) from None


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

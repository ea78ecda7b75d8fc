"""The part of a step that only computes, compiled as the model asks for."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.training.compiled_model import training_of

_log = logging.getLogger(__name__)


def forward_pass(
    model: keras.Model,
    batch: Any,
    training: bool,
    aside: contextlib.AbstractContextManager | None = None,
) -> tuple[tf.Tensor, Mapping[str, Any]]:
    """Loss, and results of the metrics, which are updated `aside`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    y_pred = model(x, **training_of(model, training))
    loss = model.compute_loss(x, y, y_pred, sample_weight, training=training)
    with aside or contextlib.nullcontext():
        results = model.compute_metrics(x, y, y_pred, sample_weight)
    return loss, results


def compiled_computation(
    function: Callable,
    model: keras.Model,
    element_spec: Any,
    *,
    has_tables: bool,
    has_replicas: bool,
) -> Callable:
    """`function`, compiled by XLA if the model says so and it can be."""
    reason = None
    if has_tables:
        reason = "it reads another number of rows in each step"
    elif any(s.dtype == tf.string for s in tf.nest.flatten(element_spec)):
        reason = "XLA knows no strings"
    compiled = model.jit_compile and not reason
    if model.jit_compile and reason:
        _log.warning(
            'Model %r has jit_compile=True (which "auto" stands for where '
            "there is a GPU), but XLA compiles nothing of a step: %s.",
            model.name,
            reason,
        )
    if has_replicas and not compiled and _is_synchronized(model):
        # No function may wait for the other replicas of this process.
        return function
    compiled_function = tf.function(
        function, autograph=False, jit_compile=compiled or None
    )

    def traced_alone(*args: Any) -> Any:
        # On a thread of its own Keras sees no replicas; where it does, it
        # divides its own losses by their number, but none that a model
        # computes itself, which would count for each.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            trace = compiled_function.get_concrete_function
            traced = thread.submit(trace, *specs(args)).result()
        return traced(*args)

    return traced_alone if has_replicas else compiled_function


def specs(values: Any) -> Any:
    """The specs of tensors; all else as it is."""
    return tf.nest.map_structure(
        lambda t: tf.type_spec_from_value(t) if tf.is_tensor(t) else t, values
    )


def _is_synchronized(model: keras.Model) -> bool:
    """Whether a layer looks at the batches of all replicas."""
    return any(
        getattr(layer, "synchronized", False)
        or (hasattr(layer, "layers") and _is_synchronized(layer))
        for layer in model.layers
    )

"""The model that a model function has returned: what a step makes of it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)


def overrides(model: keras.Model, method: str) -> bool:
    """Whether a model has another `method` than `keras.Model`."""
    own = getattr(getattr(model, method), "__func__", None)
    return own is not getattr(keras.Model, method)


def refuse_own(model: keras.Model, method: str, instead: str) -> None:
    """Raises `ValueError` if a model overrides a method; says what to do."""
    if overrides(model, method):
        raise ValueError(
            f"{type(model).__name__} overrides `{method}`, which can be used "
            "on one device alone: on parameter servers and between replicas "
            "tfdist itself has gradients applied and metrics added up. "
            f"Override `{instead}` instead, or train on one device."
        )


def checked_model(model: Any) -> keras.Model:
    """What a model function has returned, if it can be used.

    Raises `TypeError` or `ValueError` if it can't.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "The model function must return a `keras.Model`. Received: "
            f"{model!r} of type {type(model).__name__}."
        )
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            f"Model {model.name!r} must be compiled with an optimizer and a "
            "loss. Call `model.compile(optimizer=..., loss=...)` in the model "
            "function."
        )
    if model.run_eagerly:
        raise ValueError(
            f"Model {model.name!r} is compiled with run_eagerly=True, but "
            "tfdist runs many steps in one `tf.function`, which workers get "
            "as a graph. Leave it out. To debug a step, call "
            "`model.train_on_batch` with a few batches, or use `tf.print`."
        )
    # An adversarial network has no `call`; only its parts are ever built.
    steps_itself = overrides(model, "train_step") and model.trainable_variables
    if not (model.built or steps_itself):
        raise ValueError(
            f"Model {model.name!r} has no variables yet. Give it its input "
            "shape in the model function: start it with `keras.Input(...)` or "
            "call `model.build(input_shape)`."
        )
    return model


def training_of(model: keras.Model, training: bool) -> dict[str, bool]:
    """The argument of `call` that says so, where a model has it."""
    has = "training" in inspect.signature(model.call).parameters
    return {"training": training} if has else {}


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
    traced = tf.function(
        function, autograph=False, jit_compile=compiled or None
    )

    def traced_alone(*args: Any) -> Any:
        # On a thread of its own Keras sees no replicas; where it does, it
        # divides its own losses by their number, but none that a model
        # computes itself, which would count for each.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            trace = traced.get_concrete_function
            concrete = thread.submit(trace, *specs(args)).result()
        return concrete(*args)

    return traced_alone if has_replicas else traced


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

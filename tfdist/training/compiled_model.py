"""The model that a model function has returned: what tfdist cannot train."""

from __future__ import annotations

import inspect
from typing import Any

import keras


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

    Raises:
        TypeError: it is no Keras model.
        ValueError: it is not compiled, or to run eagerly, or has no variables
            yet.
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

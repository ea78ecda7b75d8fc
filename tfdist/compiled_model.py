"""The model that a model function has returned: checked, its metrics built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf


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


def build_metrics(model: keras.Model, element_spec: Any) -> None:
    """Lets Keras make its loss and metric variables, here on the chief.

    Keras makes them when it first sees a target and a prediction; both are
    shown as zeros of the right shapes, so no parameter is read.
    """
    batch = tf.nest.map_structure(
        lambda s: tf.zeros([d or 1 for d in s.shape], s.dtype), element_spec
    )
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    symbols = tf.nest.map_structure(
        lambda t: keras.KerasTensor(
            t.shape, keras.backend.standardize_dtype(t.dtype)
        ),
        x,
    )
    y_pred = tf.nest.map_structure(
        lambda t: tf.zeros(t.shape, t.dtype),
        _output_spec(model, symbols),
    )
    model.compute_loss(x, y, y_pred, sample_weight, training=False)
    model.compute_metrics(x, y, y_pred, sample_weight)


def _output_spec(model: keras.Model, x: Any) -> Any:
    """Like what the model returns.

    `keras.Model(x, [y])` returns the tensor, and says that it returns a list.
    """
    spec = model.compute_output_spec(x, training=False)
    is_functional = getattr(model, "outputs", None) is not None
    if is_functional and isinstance(spec, list | tuple) and len(spec) == 1:
        return spec[0]
    return spec


def check_metrics(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> None:
    """Raises `ValueError` unless the sum of a metric's states is its state."""
    for variable in variables:
        if variable.aggregation != "sum":
            raise ValueError(
                f"Metric variable {variable.path!r} of model {model.name!r} "
                f"has aggregation={variable.aggregation!r}, so its values on "
                "several workers cannot be added up. Metrics whose variables "
                'have aggregation="sum" (all of Keras\') can.'
            )


def check_metric_names(model: keras.Model) -> None:
    """Raises if a metric has a name that results use for something else.

    Args:
        model: A model whose metrics are built, as `ModelStep` builds them.

    Raises:
        ValueError: a metric is called "loss" or "global_step".
    """
    names: list[str] = []
    for metric in model.metrics:
        result = metric.result()
        names += result if isinstance(result, Mapping) else [metric.name]
    # One is Keras' own, or replaces it.
    for name, most in (("loss", 1), ("global_step", 0)):
        if names.count(name) > most:
            raise ValueError(
                f"Model {model.name!r} has a metric called {name!r}. Results "
                "of training and evaluation use the names 'loss' (the mean "
                "loss) and 'global_step' themselves. Give the metric another "
                "`name`."
            )

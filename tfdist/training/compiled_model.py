"""The model that a model function has returned: checked, its metrics built."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

# A metric, and the arguments of its `update_state`.
Update = tuple[keras.metrics.Metric, tuple[Any, ...], dict[str, Any]]


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
    before = {id(v): v.numpy() for v in model.metrics_variables}
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
    for variable in model.metrics_variables:
        variable.assign(before.get(id(variable), np.zeros(variable.shape)))
    model.reset_metrics()


def training_of(model: keras.Model, training: bool) -> dict[str, bool]:
    """The argument of `call` that says so, where a model has it."""
    has = "training" in inspect.signature(model.call).parameters
    return {"training": training} if has else {}


def _output_spec(model: keras.Model, x: Any) -> Any:
    """Like what the model returns.

    `keras.Model(x, [y])` returns the tensor, and says that it returns a list.
    """
    spec = model.compute_output_spec(x, **training_of(model, False))
    is_functional = getattr(model, "outputs", None) is not None
    if is_functional and isinstance(spec, list | tuple) and len(spec) == 1:
        return spec[0]
    return spec


def loss_tracker(model: keras.Model) -> keras.metrics.Mean | None:
    """The metric that Keras has for the loss; a step counts by itself."""
    trackers = (
        metric
        for metric in model.metrics
        if type(metric) is keras.metrics.Mean and metric.name == "loss"
    )
    return next(trackers, None)


def own_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of a model whose classes are not Keras' own."""
    own: list[keras.metrics.Metric] = []
    for metric in model.metrics:
        is_list = _is_keras(metric) and hasattr(metric, "metrics")
        each = metric.metrics if is_list else [metric]
        own += [m for m in each if not _is_keras(m)]
    return own


def _is_keras(metric: keras.metrics.Metric) -> bool:
    return type(metric).__module__.startswith("keras.")


@contextlib.contextmanager
def noted_updates(model: keras.Model) -> Iterator[list[Update]]:
    """Notes with which arguments the model's own metrics are updated."""
    updates: list[Update] = []

    def noting(metric: keras.metrics.Metric) -> Callable[..., None]:
        update_state = metric.update_state

        def note(*args: Any, **kwargs: Any) -> None:
            updates.append((metric, args, kwargs))
            update_state(*args, **kwargs)

        return note

    own = own_metrics(model)
    for metric in own:
        metric.update_state = noting(metric)
    try:
        yield updates
    finally:
        for metric in own:
            del metric.update_state


def check_metrics(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    updates: Sequence[Update],
) -> None:
    """Raises `ValueError` unless the sum of a metric's states is its state.

    Args:
        model: A model.
        variables: Those of its metrics.
        updates: From `noted_updates`; they are tried on numbers.
    """
    for variable in variables:
        if variable.aggregation != "sum":
            raise ValueError(
                f"Metric variable {variable.path!r} of model {model.name!r} "
                f"has aggregation={variable.aggregation!r}, so its values on "
                "several workers cannot be added up. Metrics whose variables "
                'have aggregation="sum" (all of Keras\') can.'
            )
    for update in updates:
        for seed in range(4):
            variable = _no_sum(*update, np.random.default_rng(seed))
            if variable is not None:
                raise ValueError(
                    f"Metric {update[0].name!r} of model {model.name!r} "
                    f"updates its variable {variable.path!r} by something "
                    "else than an addition, or does not start it at zero, so "
                    "its values on several workers cannot be added up. Keep "
                    "sums and counts (`assign_add`), of which `result` "
                    "computes the metric, or train in one process."
                )


def _no_sum(
    metric: keras.metrics.Metric,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rng: np.random.Generator,
) -> keras.Variable | None:
    """A variable whose value after two batches is no sum of that after each."""
    variables = metric.variables
    start = [v.numpy() for v in variables]

    def after(values: Sequence[Any], batch: Any) -> list[np.ndarray]:
        states = list(zip(variables, values, strict=True))
        with keras.StatelessScope(states) as scope:
            metric.update_state(*batch[0], **batch[1])
        return [np.asarray(scope.get_current_value(v)) for v in variables]

    one, other = (
        tf.nest.map_structure(lambda t: _like(t, rng), (args, kwargs))
        for _ in range(2)
    )
    try:
        both = after(after(start, one), other)
        each = [after(start, one), after(start, other)]
    except Exception as error:
        _log.warning(
            "Whether the states of metric %r add up could not be found out by "
            "an update with random numbers; it is taken to be so: %s",
            metric.name,
            error,
        )
        return None
    for variable, value, *parts in zip(variables, both, *each, strict=True):
        if not np.allclose(value, sum(parts), rtol=1e-3, atol=1e-6):
            return variable
    return None


def _like(tensor: Any, rng: np.random.Generator) -> Any:
    """Numbers that may be labels or predictions, like a symbolic tensor."""
    if not tf.is_tensor(tensor):
        return tensor
    size = [4 if d is None else d for d in tensor.shape]
    if tensor.dtype.is_floating:
        return tf.constant(rng.uniform(size=size), tensor.dtype)
    bits = tf.constant(rng.integers(0, 2, size))
    if tensor.dtype == tf.string:
        return tf.strings.as_string(bits)
    return tf.cast(bits, tensor.dtype)


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

"""One step of a compiled Keras model, as a function of values.

Keras' own `train_step` updates metric and counter variables as it goes, which
loses updates when several workers share them: `keras.Variable.assign_add`
reads, adds, then writes. Here a step takes the states of its metrics and
returns the new ones (design decision D3); what it does change for good, it
changes by operations that the variable's own device executes atomically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import optimizers
from tfdist._private import SEED_STATE_NAME

Batch = Any
States = list[tf.Tensor]


class ModelStep:
    """Training and evaluation steps of one compiled Keras model.

    Metric states travel as a list of tensors: the weighted sum of the losses,
    the weight, then the model's metric variables. States that start at zero
    add up: the sum over any split of the examples is the metric of them all.

    Args:
        model: A compiled, built `keras.Model`. Its `compute_loss` and
            `compute_metrics` are used; its `train_step` is not.
        element_spec: `tf.TypeSpec` structure of one batch, as
            `dataset.element_spec` gives it; metrics are built from it.

    Raises:
        TypeError: `model` is no Keras model.
        ValueError: `model` is not compiled or not built, or overrides
            `train_step`.
    """

    def __init__(self, model: keras.Model, element_spec: Any) -> None:
        _check_model(model)
        self.model = model
        _build_metrics(model, element_spec)
        self._metrics = list(model.metrics_variables)
        _check_metrics(model, self._metrics)
        self._seeds = [v for v in model.non_trainable_variables if _is_seed(v)]
        self._moving = [
            v for v in model.non_trainable_variables if not _is_seed(v)
        ]

    def zero_states(self) -> States:
        """States of metrics that have seen no example."""
        scalar = tf.zeros([], tf.float32)
        return [scalar, scalar] + [
            tf.zeros(v.shape, v.dtype) for v in self._metrics
        ]

    def train(self, batch: Batch, step: tf.Tensor, states: States) -> States:
        """Reads the parameters, computes gradients, applies them.

        Args:
            batch: `x`, `(x, y)` or `(x, y, sample_weight)`.
            step: Scalar int64: the number of this step in the job. Dropout
                and other random layers draw from a seed of this step, so two
                workers never share a mask.
            states: Metric states before the step.

        Returns:
            Metric states after the step.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        model, optimizer = self.model, self.model.optimizer
        trainable = [v.value for v in model.trainable_variables]
        before = [(v, tf.identity(v.value)) for v in self._moving]
        seeds = [(v, _fold_in(v, step)) for v in self._seeds]
        scope = self._scope(states, before + seeds)
        with scope:
            with tf.GradientTape() as tape:
                y_pred = model(x, training=True)
                loss = model.compute_loss(
                    x, y, y_pred, sample_weight, training=True
                )
                scaled_loss = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled_loss, trainable)
            model.compute_metrics(x, y, y_pred, sample_weight)
        optimizers.apply_gradients(
            optimizer, gradients, model.trainable_variables
        )
        for variable, value in before:
            _move(variable.value, value, scope.get_current_value(variable))
        return self._states_after(scope, states, loss, x)

    def evaluate(self, batch: Batch, states: States) -> States:
        """Updates metric states by one batch; changes nothing else."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        scope = self._scope(states)
        with scope:
            y_pred = self.model(x, training=False)
            loss = self.model.compute_loss(
                x, y, y_pred, sample_weight, training=False
            )
            self.model.compute_metrics(x, y, y_pred, sample_weight)
        return self._states_after(scope, states, loss, x)

    def pack(self, states: States) -> tf.Tensor:
        """All states in one float64 vector: one message, one copy."""
        return tf.concat(
            [tf.reshape(tf.cast(s, tf.float64), [-1]) for s in states], axis=0
        )

    def result(self, packed: np.ndarray) -> dict[str, float]:
        """Values of loss and metrics from (a sum of) packed states.

        Args:
            packed: float64 vector as from `pack`.

        Returns:
            Metric name to value; `loss` is the mean over examples. Empty if
            the states have seen no example.
        """
        loss, weight, *rest = np.split(packed, self._offsets())
        if not weight.item():
            return {}
        for variable, value in zip(self._metrics, rest, strict=True):
            value = value.reshape(variable.shape)
            variable.value.assign(tf.cast(value, variable.dtype))
        results = self.model.get_metrics_result()
        results["loss"] = loss.item() / weight.item()
        return _flat_floats(results)

    def _offsets(self) -> np.ndarray:
        sizes = [1, 1] + [int(np.prod(v.shape)) for v in self._metrics]
        return np.cumsum(sizes)[:-1]

    def _scope(
        self,
        states: States,
        values: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
    ) -> keras.StatelessScope:
        metrics = zip(self._metrics, states[2:], strict=True)
        return keras.StatelessScope([*metrics, *values], collect_losses=True)

    def _states_after(
        self,
        scope: keras.StatelessScope,
        states: States,
        loss: tf.Tensor,
        x: Any,
    ) -> States:
        """As Keras does, batches weigh by their number of examples."""
        weight = tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)
        loss_sum = states[0] + tf.cast(loss, tf.float32) * weight
        metrics = [scope.get_current_value(v) for v in self._metrics]
        return [loss_sum, states[1] + weight, *metrics]


def _check_model(model: Any) -> None:
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
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} has no variables yet. Give it its input "
            "shape in the model function: start it with `keras.Input(...)` or "
            "call `model.build(input_shape)`."
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"{type(model).__name__} overrides `train_step`, which tfdist "
            "does not call: it owns the training loop. Override "
            "`compute_loss` and `compute_metrics` instead."
        )


def _build_metrics(model: keras.Model, element_spec: Any) -> None:
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
        model.compute_output_spec(symbols, training=False),
    )
    model.compute_loss(x, y, y_pred, sample_weight, training=False)
    model.compute_metrics(x, y, y_pred, sample_weight)


def _check_metrics(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> None:
    for variable in variables:
        if variable.aggregation != "sum":
            raise ValueError(
                f"Metric variable {variable.path!r} of model {model.name!r} "
                f"has aggregation={variable.aggregation!r}, so its values on "
                "several workers cannot be added up. Metrics whose variables "
                'have aggregation="sum" (all of Keras\') can.'
            )


def _is_seed(variable: keras.Variable) -> bool:
    return variable.path.endswith(SEED_STATE_NAME)


def _fold_in(seed_state: keras.Variable, step: tf.Tensor) -> tf.Tensor:
    """This step's seed of one generator, from its state at the start.

    The state is read once, while the step is traced: it never changes.
    """
    with tf.init_scope():
        start = seed_state.numpy()
    folded = tf.random.fold_in(tf.cast(start, tf.int64), step)
    return tf.cast(folded, seed_state.dtype)


def _move(variable: tf.Variable, before: tf.Tensor, after: tf.Tensor) -> None:
    """Moves a moving average by what this step adds to it.

    As TF1's `assign_moving_average`: adding a difference is atomic on the
    variable's device, so no worker undoes what another one has done.
    """
    if variable.dtype.is_floating:
        variable.assign_add(after - before)
    else:
        variable.assign(after)


def _flat_floats(
    results: Mapping[str, Any], prefix: str = ""
) -> dict[str, float]:
    flat = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat |= _flat_floats(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = float(value)
    return flat

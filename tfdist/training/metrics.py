"""A model's metrics, with states as tensors to be summed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf import private_keras
from tfdist.embeddings import lookups
from tfdist.training.compiled_model import forward_pass, trace_on_spec
from tfdist.training.forward import Forward, TapedScope, Values
from tfdist.training.replicas import mean_to_sum

States = list[tf.Tensor]
"""The weighted sum of losses, the weight, then the metrics' variables."""


def build_metrics(model: keras.Model, element_spec: Any) -> None:
    """Lets Keras create its loss and metric variables, by a symbolic pass.

    Raises `ValueError` if a metric is called "loss" or "global_step".
    """

    def run(batch: Any) -> None:
        # A table lookup is dozens of ops, none of which would be run.
        with lookups.answered_by(lookups.Zeros()):
            forward_pass(model, batch, False)

    trace_on_spec(run, element_spec)
    model.reset_metrics()
    names: list[str] = []
    for metric in model.metrics:
        result = metric.result()
        names += result if isinstance(result, Mapping) else [metric.name]
    # One "loss" is Keras' own metric, or replaces it.
    for name, most in (("loss", 1), ("global_step", 0)):
        if names.count(name) > most:
            raise ValueError(
                f"Model {model.name!r} has a metric called {name!r}. The names "
                "'loss' (the mean loss) and 'global_step' are reserved in "
                "results. Give the metric another `name`."
            )


def loss_tracker(model: keras.Model) -> keras.metrics.Mean | None:
    """Keras' own metric of the loss, if listed; steps track the loss too."""
    tracker = private_keras.loss_tracker(model)
    return tracker if any(m is tracker for m in model.metrics) else None


def non_additive(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    forwards: Sequence[Forward],
    must_add_up: bool,
) -> set[int]:
    """Returns the ids of metric variables whose values may not be sums.

    Raises:
        ValueError: A value is not a sum, but they `must_add_up` over workers.
    """
    names, found = _own_metrics(model, variables), set()
    for variable in variables:
        if must_add_up and variable.aggregation != "sum":
            raise ValueError(
                f"Metric variable {variable.path!r} of model {model.name!r} "
                f"has aggregation={variable.aggregation!r}: its values on "
                "several workers cannot be added up. Use "
                'aggregation="sum", as all metrics of Keras do.'
            )
        if id(variable) not in names:
            continue
        name = names[id(variable)]
        adds = all(f.adds_to(variable, variables) for f in forwards)
        # Keras only resets variables of metrics in `model.metrics`.
        is_none = not adds or (name and np.any(variable))
        if must_add_up and is_none:
            raise ValueError(
                f"Metric {(name or variable.path)!r} of model {model.name!r} "
                f"updates its variable {variable.path!r} other than by "
                "addition, or does not start it at zero, so its values on "
                "several workers cannot be added up. Keep sums and counts "
                "(`assign_add`) from which `result` computes the metric, or "
                "train in one process."
            )
        # Without a pass to inspect, any of them may not be a sum.
        if is_none or (name and not forwards):
            found.add(id(variable))
    return set() if must_add_up else found


def _own_metrics(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> dict[int, str]:
    """The names of metrics that are not Keras', by the id of their variables.

    The name is "" if no metric in `model.metrics` has the variable.
    """
    names: dict[int, str] = {}
    by_keras: set[int] = set()
    for metric in model.metrics:
        is_list = _is_keras(metric) and hasattr(metric, "metrics")
        for each in metric.metrics if is_list else [metric]:
            if _is_keras(each):
                by_keras |= {id(v) for v in each.variables}
            else:
                names |= {id(v): each.name for v in each.variables}
    others = {id(v) for v in variables} - by_keras
    return dict.fromkeys(others, "") | names


def _is_keras(metric: keras.metrics.Metric) -> bool:
    return type(metric).__module__.startswith("keras.")


class MetricStates:
    """States of a model's loss and of the `variables` of its metrics.

    States add up or, if the variable's id is in `kept`, stay in the variable,
    from which a step that `trains` continues: see `ModelStep`. The functions
    `results` compute results from values of `variables`, the last one for
    evaluations; by default Keras does. With `has_loss`, the loss is a result.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: list[keras.Variable],
        *,
        kept: set[int],
        trains: bool,
        results: Sequence[Callable[..., Any]],
        has_loss: bool = True,
    ) -> None:
        self.model = model
        self._metrics = variables
        self._results, self._has_loss = results, has_loss
        listed = {id(v) for v in model.metrics_variables}
        self._start = [
            v.numpy() if id(v) in listed else np.zeros(v.shape, v.dtype)
            for v in variables
        ]
        self._sizes = [1, 1, *(v.size for v in self._start)]
        self._is_kept = [id(v) in kept for v in variables]
        self._lasts = [trains and is_kept for is_kept in self._is_kept]
        self.reset()

    def zero_states(self) -> States:
        """The states before any example; those kept in variables continue."""
        states = [tf.zeros([], tf.float32)] * 2
        known = zip(self._metrics, self._start, self._lasts, strict=True)
        for v, start, lasts in known:
            if lasts:
                states.append(tf.convert_to_tensor(v.value))
            elif np.any(start):
                states.append(tf.constant(start))
            else:  # Avoids a large constant.
                states.append(tf.zeros(v.shape, v.dtype))
        return states

    def pack(self, states: States) -> tf.Tensor:
        """Packs all states into one float64 vector: one message, one copy."""
        self._assign(states[2:])
        flat = [tf.reshape(tf.cast(s, tf.float64), [-1]) for s in states]
        return tf.concat(flat, axis=0)

    def joined(self, earlier: Any, later: np.ndarray) -> np.ndarray:
        """Combines packed states of two dispatches; 0.0 stands for none."""
        kept = np.repeat([False, False, *self._is_kept], self._sizes)
        return np.where(kept, later, earlier + later)

    def result(
        self, packed: np.ndarray, evaluated: bool = False
    ) -> dict[str, float]:
        """Returns loss and metrics by name, from (a sum of) packed states.

        `loss` is the mean over examples. The result is empty without examples.
        `evaluated`: whether the states of a training step are an evaluation's.
        """
        loss, weight, *values = self._unpacked(packed)
        if not weight:
            return {}
        if self._results:
            results_of = self._results[-1 if evaluated else 0]
            results = flat_floats(results_of(*values))
        else:
            # A result may be the variable itself.
            with self._scope([loss, weight, *values]):
                results = flat_floats(self.model.get_metrics_result())
        if self._has_loss:
            tracker = loss_tracker(self.model)
            others = (m.name for m in self.model.metrics if m is not tracker)
            if "loss" not in others:
                results["loss"] = loss / weight
        return results

    @contextlib.contextmanager
    def shown(self, packed: np.ndarray) -> Iterator[None]:
        """A context in which the model's metric variables have these states."""
        try:
            self._assign(self._unpacked(packed)[2:], every=True)
            yield
        finally:
            self._assign(self._start, every=True)

    def _unpacked(self, packed: np.ndarray) -> list[Any]:
        """The sum of losses, the weight, and values of the metric variables."""
        loss, weight, *rest = np.split(packed, np.cumsum(self._sizes)[:-1])
        known = {}
        if self._has_loss and (tracker := loss_tracker(self.model)):
            known = {id(tracker.total): loss, id(tracker.count): weight}
        values = [
            tf.cast(known.get(id(v), value).reshape(v.shape), v.dtype)
            for v, value in zip(self._metrics, rest, strict=True)
        ]
        return [loss.item(), weight.item(), *values]

    def reset(self) -> None:
        """Resets the states that are kept in metric variables."""
        self._assign(self._start)

    def resume_metrics(self, packed: np.ndarray) -> bool:
        """Restores kept states from packed ones; returns whether any exist."""
        if any(self._lasts):
            self._assign(self._unpacked(packed)[2:])
        return any(self._lasts)

    def _scope(self, states: States, values: Values = ()) -> TapedScope:
        """A scope in which metrics have these states, and others `values`."""
        metrics = zip(self._metrics, states[2:], strict=True)
        return TapedScope([*metrics, *values])

    def _after(
        self, scope: TapedScope, states: States, loss: tf.Tensor, batch: Any
    ) -> States:
        """The states after a batch, weighted by its size as in Keras."""
        weight = num_examples(batch)
        loss_sum = states[0] + mean_to_sum(tf.cast(loss, tf.float32), weight)
        metrics = [scope.get_current_value(v) for v in self._metrics]
        for variable, value in zip(self._metrics, metrics, strict=True):
            value.set_shape(variable.shape)  # Keras 3.12 loses it.
        # A model may compute NaN from a batch without examples.
        pairs = zip(metrics, states[2:], strict=True)
        metrics = [tf.where(weight > 0, new, old) for new, old in pairs]
        return [loss_sum, states[1] + weight, *metrics]

    def _assign(self, values: Sequence[Any], every: bool = False) -> None:
        """Assigns to the variables that training keeps, or to `every` one."""
        pairs = zip(self._metrics, values, strict=True)
        for (variable, value), lasts in zip(pairs, self._lasts, strict=True):
            if lasts or every:
                variable.value.assign(value)


def num_examples(batch: Any) -> tf.Tensor:
    """The number of examples in a batch, a scalar float32."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)


def flat_floats(results: Mapping[str, Any]) -> dict[str, float]:
    """Flattens results by Keras' names; arrays give one result per element.

    An array of one, such as a binary `F1Score`, keeps its name.

    >>> flat_floats({"loss": 1, "auc": {"a": 0.5}, "r2": [0.1, 0.2]})
    {'loss': 1.0, 'a': 0.5, 'r2/0': 0.1, 'r2/1': 0.2}
    """
    flat: dict[str, float] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            parts = flat_floats(value)
        elif np.ndim(value) and np.size(value) != 1:
            each = {str(i): part for i, part in enumerate(np.array(value))}
            parts = {f"{name}/{i}": v for i, v in flat_floats(each).items()}
        else:
            parts = {name: float(np.squeeze(value))}
        # Keras would keep only the last of two results with the same name.
        flat |= {f"{name}/{n}" if n in flat else n: v for n, v in parts.items()}
    return flat

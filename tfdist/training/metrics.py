"""A model's metrics: built before the first step, refused if no sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist._tf import private_keras
from tfdist.training.compiled_model import forward_pass, look_at
from tfdist.training.forward import Forward


def build_metrics(model: keras.Model, element_spec: Any) -> None:
    """Lets Keras make its loss and metric variables, here on the chief.

    Keras makes them when it first sees a target and a prediction.
    """
    look_at(lambda batch: forward_pass(model, batch, False), element_spec)
    model.reset_metrics()


def loss_tracker(model: keras.Model) -> keras.metrics.Mean | None:
    """The metric that Keras has for the loss; a step counts by itself."""
    tracker = private_keras.loss_tracker(model)
    return tracker if any(m is tracker for m in model.metrics) else None


def no_sums(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    forwards: Sequence[Forward],
    must_add_up: bool,
) -> set[int]:
    """Ids of the variables whose values might not add up over batches.

    They are those of metrics, listed in `model.metrics` or not, which some
    passes update. If several workers add them up, they `must_add_up`.

    Raises:
        ValueError: they must, and one does not.
    """
    names, found = _own_metrics(model, variables), set()
    for variable in variables:
        if must_add_up and variable.aggregation != "sum":
            raise ValueError(
                f"Metric variable {variable.path!r} of model {model.name!r} "
                f"has aggregation={variable.aggregation!r}, so its values on "
                "several workers cannot be added up. Metrics whose variables "
                'have aggregation="sum" (all of Keras\') can.'
            )
        if id(variable) not in names:
            continue
        name = names[id(variable)]
        adds = all(f.adds_to(variable, variables) for f in forwards)
        # Keras resets those alone that have a metric in `model.metrics`.
        is_none = not adds or (name and np.any(variable))
        if must_add_up and is_none:
            raise ValueError(
                f"Metric {(name or variable.path)!r} of model {model.name!r} "
                f"updates its variable {variable.path!r} by something else "
                "than an addition, or does not start it at zero, so its "
                "values on several workers cannot be added up. Keep sums and "
                "counts (`assign_add`), of which `result` computes the "
                "metric, or train in one process."
            )
        # Without a pass to look at, any might be none.
        if is_none or (name and not forwards):
            found.add(id(variable))
    return set() if must_add_up else found


def _own_metrics(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> dict[int, str]:
    """Names of metrics of other classes than Keras', by id of their variables.

    "" where `model.metrics` lists none that has the variable.
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


def check_metric_names(model: keras.Model) -> None:
    """Raises `ValueError` if a metric is called "loss" or "global_step"."""
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

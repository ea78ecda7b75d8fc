"""What `Estimator.predict` makes of a model's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def chosen(outputs: Any, keys: Sequence[str] | str) -> dict[str, Any]:
    """Returns the requested entries of a model's output."""
    keys = [keys] if isinstance(keys, str) else keys
    names = sorted(outputs) if isinstance(outputs, Mapping) else []
    if not set(keys) <= set(names):
        raise ValueError(
            "Argument `predict_keys` must name outputs of the model. Received: "
            f"predict_keys={list(keys)}; the model has {names or 'one tensor'}."
        )
    return {key: outputs[key] for key in keys}


def examples(outputs: Any) -> Iterator[Any]:
    """Yields each example's outputs, by the first dimension, which all share.

    >>> list(examples({"a": np.array([1, 2]), "b": np.array([[3], [4]])}))
    [{'a': np.int64(1), 'b': array([3])}, {'a': np.int64(2), 'b': array([4])}]
    """
    first, *others = {np.shape(a)[:1] for a in tf.nest.flatten(outputs)}
    if others or not first:
        shapes = tf.nest.map_structure(np.shape, outputs)
        raise ValueError(
            "The model's outputs cannot be split into examples, as their first "
            f"dimensions differ. Received: outputs of shapes {shapes}. Leave "
            "some out by `predict_keys`, or set yield_single_examples=False."
        )
    for i in range(*first):
        yield tf.nest.map_structure(lambda a, i=i: a[i], outputs)

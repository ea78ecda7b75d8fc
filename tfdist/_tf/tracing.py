"""Functions that TensorFlow traces, and where it can."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def traced(function: Callable[..., Any], **options: Any) -> Any:
    """A `tf.function` of its own, in which autograph converts nothing.

    TensorFlow counts traces by code, and would warn that `function` is retraced
    where many objects each have such a function. Of a partial it knows no code.

    >>> traced(lambda x: x + 1)(tf.constant(1)).numpy()
    np.int32(2)
    """
    return tf.function(functools.partial(function), autograph=False, **options)


def check_tensorflow() -> None:
    """Raises RuntimeError for graphs of TF1, or Keras on another backend."""
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "tfdist needs Keras with TensorFlow: set KERAS_BACKEND=tensorflow "
            "before Keras is imported. It computes by "
            f"{keras.backend.backend()!r} now, as that variable or "
            "~/.keras/keras.json says."
        )
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "tfdist needs eager execution, as TensorFlow 2 has it from the "
            "start. Leave out `tf.compat.v1.disable_v2_behavior()` and "
            "`tf.compat.v1.disable_eager_execution()`, and call it outside of "
            "`with tf.Graph().as_default()`."
        )

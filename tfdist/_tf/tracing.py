"""Functions that TensorFlow traces, and a check that it can do so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


def traced(function: Callable[..., Any], **options: Any) -> Any:
    """Returns a separate `tf.function`, without AutoGraph.

    TensorFlow counts traces per code object, and would warn of retracing if
    many objects each have such a function. A partial has no code object.

    >>> traced(lambda x: x + 1)(tf.constant(1)).numpy()
    np.int32(2)
    """
    return tf.function(functools.partial(function), autograph=False, **options)


def traced_once(function: Callable[..., Any], inline: bool = False) -> Any:
    """Like `traced`, for a function that the steps of a dispatch share.

    TensorFlow compiles each call by itself if it may `inline` them; otherwise
    a call begins only when all arguments are there.
    """
    options = {"experimental_attributes": {"_noinline": not inline}}
    return traced(function, reduce_retracing=True, **options)


def check_tensorflow() -> None:
    """Raises `RuntimeError` in TF1's graph mode or with another backend."""
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "tfdist needs Keras with TensorFlow: set KERAS_BACKEND=tensorflow "
            "before Keras is imported. The backend is "
            f"{keras.backend.backend()!r} now, as set by that variable or "
            "~/.keras/keras.json."
        )
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "tfdist needs eager execution, as TensorFlow 2 has it from the "
            "start. Leave out `tf.compat.v1.disable_v2_behavior()` and "
            "`tf.compat.v1.disable_eager_execution()`, and call it outside of "
            "`with tf.Graph().as_default()`."
        )

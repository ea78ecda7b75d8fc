"""`Trainable`: what a session trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.private_checkpoints import Saveable
from tfdist._tf.tracing import check_tensorflow
from tfdist.checkpoint.names import values_of
from tfdist.training.loop import Loop


@dataclasses.dataclass(frozen=True)
class Trainable:
    """The return value of `build_fn`: a step, its variables and its model.

    Attributes:
        step: Runs one step, increments `global_step` and returns scalars by
            name (`{"loss": ...}`), or a `tfdist.training.loop.Loop` that runs
            many.
        global_step: Scalar int64 variable that counts applied steps.
        variables: The variables to save in checkpoints, by name (see
            `tfdist.checkpoint.named_variables`). `global_step` is added.
        iterator: The iterator that `step` reads from, saved with each
            checkpoint. Default: the loop's iterator.
        model: The Keras model, for callbacks.
        min_ps: Minimum number of parameter servers that `build_fn` needs.

    Raises:
        ValueError: another variable is called "global_step".
        RuntimeError: TF1 graph mode, or Keras with a different backend.

    >>> tfdist.Trainable(
    ...     step=lambda: {"loss": 0.0},
    ...     global_step=tf.Variable(0, dtype=tf.int64),
    ...     variables={"weight": tf.Variable(1.0)},
    ... ).model is None
    True
    """

    step: Callable[[], Mapping[str, Any]] | Loop
    global_step: tf.Variable
    variables: Mapping[str, Saveable]
    iterator: tf.data.Iterator | None = None
    model: keras.Model | None = None
    min_ps: int = 1

    def __post_init__(self) -> None:
        """Checks the names, and that eager execution is enabled."""
        check_tensorflow()
        named = values_of(self.variables).get("global_step", self.global_step)
        if named is not self.global_step:
            raise ValueError(
                "`variables` has a 'global_step' that is not the `global_step` "
                "argument, which is saved under that name. Rename the variable."
            )

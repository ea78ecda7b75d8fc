"""Steps that a model's own `train_step` or `test_step` defines.

Adversarial networks, distillation and the like override these: then the model
applies its gradients itself, to variables in this process. For a `train_step`
where they are elsewhere, see `own_step.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.private_checkpoints import Saveable
from tfdist.training.compiled_model import (
    checked_model,
    refuse_new_variables,
    refuse_unlisted,
)
from tfdist.training.forward import draws
from tfdist.training.metrics import States, flat_floats
from tfdist.training.own_step import checked_logs, with_others
from tfdist.training.step import Batch


class KerasStep:
    """As `ModelStep`, for other models, where all is in one process.

    A step is what `fit` and `evaluate` make of it: the model's method is traced
    as they trace it (with the `jit_compile` of `compile`) and updates weights,
    optimizers, metrics and random seeds in place. What the last one returns is
    logged; metrics are of all steps since they were reset: before each run of
    steps that does not `go_on`, and before an evaluation.

    Args:
        model: A compiled `keras.Model`, whose layers have their variables.
        element_spec: As of `ModelStep`.
        global_step: As of `ModelStep`.

    Raises:
        TypeError: `train_step` does not return a dictionary.
        ValueError: it makes variables of the model, or uses one of a layer
            that could be trained and is none of its weights, or returns a log
            called "global_step", or an array whose shape is not known.
    """

    def __init__(
        self,
        model: keras.Model,
        element_spec: Any,
        *,
        global_step: tf.Variable | None = None,
    ) -> None:
        self.model = checked_model(model)
        self.single_steps = False
        self._global_step = global_step
        self._shapes: Any = {}
        function = tf.function(autograph=False, jit_compile=model.jit_compile)
        self._test = function(functools.partial(self._logs, "test_step"))
        self._train = function(self._once_read)
        if global_step is not None:
            before = len(model.trainable_variables)
            # Makes what the first step would: metrics, slots of optimizers.
            trial = function(functools.partial(self._logs, "train_step"))
            traced = trial.get_concrete_function(element_spec)
            self._used = traced.variables
            # Those of one dispatch might draw the same.
            self.single_steps = bool(draws(traced.graph))
            refuse_new_variables(model, before)
            own = {id(v.value) for v in model.variables}
            others = [v for v in self._used if id(v) not in own]
            refuse_unlisted(model, [v.handle for v in others if v.trainable])

    def variables(self, named: Mapping[str, Saveable]) -> dict[str, Saveable]:
        """What a checkpoint holds: `named`, other optimizers' slots, seeds."""
        metrics = {id(v.value) for v in self.model.metrics_variables}
        used = [v for v in self._used if id(v) not in metrics]
        return with_others(named, used)

    def zero_states(self) -> States:
        """The logs of no step; an evaluation begins with them."""
        if self._global_step is None:
            self.model.reset_metrics()
        return []

    def train(self, batch: Batch, step: tf.Tensor, states: States) -> States:
        """The logs of the model's `train_step`, which counts if it worked."""
        assert self._global_step is not None
        logs = self._train(batch)
        read = tf.nest.flatten(batch, expand_composites=True)
        with tf.control_dependencies([*read, *logs]):
            self._global_step.assign_add(1)
        return logs

    def evaluate(self, batch: Batch, states: States) -> States:
        """Runs the model's `test_step`; returns the logs."""
        return self._test(batch)

    def _once_read(self, batch: Batch) -> States:
        """A step of which nothing happens, no count either, without a batch.

        To wait is said here: TensorFlow inlines the call, and forgets what that
        was to wait for.
        """
        read = tf.nest.flatten(batch, expand_composites=True)
        with tf.control_dependencies(read):
            return self._logs("train_step", batch)

    def _logs(self, method: str, batch: Batch) -> States:
        """What the method returns, flat; `_shapes` keeps the structure."""
        what = f"`{method}` of {type(self.model).__name__}"
        logs = checked_logs(what, getattr(self.model, method)(batch))
        self._shapes = tf.nest.map_structure(lambda t: t.shape, logs)
        return tf.nest.flatten(logs)

    def pack(self, states: States) -> tf.Tensor:
        """All logs in one float64 vector."""
        flat = [tf.reshape(tf.cast(s, tf.float64), [-1]) for s in states]
        return tf.concat([tf.zeros([0], tf.float64), *flat], axis=0)

    def joined(self, earlier: Any, later: np.ndarray) -> np.ndarray:
        """The logs of two dispatches: the later ones."""
        return later

    def result(self, packed: np.ndarray) -> dict[str, float]:
        """The packed logs by name, empty if no step has run."""
        if not packed.size:
            return {}
        shapes = tf.nest.flatten(self._shapes)
        ends = np.cumsum([shape.num_elements() for shape in shapes])
        parts = zip(np.split(packed, ends[:-1]), shapes, strict=True)
        values = [part.reshape(shape) for part, shape in parts]
        return flat_floats(tf.nest.pack_sequence_as(self._shapes, values))

    def reset(self) -> None:
        """Has the metrics of training begin anew."""
        self._before = [(v, v.numpy()) for v in self.model.metrics_variables]
        self.model.reset_metrics()

    @contextlib.contextmanager
    def shown(self, packed: np.ndarray) -> Iterator[None]:
        """In it they are what they were at the last `reset`."""
        try:
            self.go_on(packed)
            yield
        finally:
            self.model.reset_metrics()

    def go_on(self, packed: np.ndarray) -> bool:
        """Has them go on from the last `reset`; whether one had counted."""
        for variable, value in self._before:
            variable.assign(value)
        return any(np.any(value) for _, value in self._before)

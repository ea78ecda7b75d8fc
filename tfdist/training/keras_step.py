"""Steps that are defined by a model's own `train_step` or `test_step`.

Adversarial networks, distillation and similar models override these methods and
apply their gradients themselves, to variables in this process. For a
`train_step` whose variables are elsewhere, see `own_step.py`.
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
from tfdist.training import compiled_model
from tfdist.training.forward import draws
from tfdist.training.metrics import States, flat_floats
from tfdist.training.own_step import checked_logs, with_others
from tfdist.training.step import Batch


class KerasStep:
    """Like `ModelStep`, for models with their own steps, in one process.

    Steps run as in `fit` and `evaluate`: the model's method is traced in the
    same way (with the `jit_compile` of `compile`) and updates weights,
    optimizers, metrics and random seeds in place. Logs are those of the last
    step; metrics cover all steps since the last reset, which happens before
    each run of steps that does not `resume_metrics` and before each evaluation.

    Args:
        model: A compiled `keras.Model` whose layers are built.
        element_spec: See `ModelStep`.
        global_step: See `ModelStep`.

    Raises:
        TypeError: `train_step` does not return a dictionary.
        ValueError: `train_step` creates variables of the model, uses a
            trainable variable that is not one of its weights, or returns a log
            called "global_step" or an array of unknown shape.
    """

    def __init__(
        self,
        model: keras.Model,
        element_spec: Any,
        *,
        global_step: tf.Variable | None = None,
    ) -> None:
        self.model = compiled_model.checked_model(model)
        self.single_steps = False
        self._global_step = global_step
        self._shapes: Any = {}
        function = tf.function(autograph=False, jit_compile=model.jit_compile)
        self._test = function(functools.partial(self._logs, "test_step"))
        self._train = function(self._once_read)
        if global_step is not None:
            before = len(model.trainable_variables)
            # Creates what the first step would: metrics, slots of optimizers.
            trial = function(functools.partial(self._logs, "train_step"))
            traced = trial.get_concrete_function(element_spec)
            self._used = traced.variables
            # Steps of one dispatch might draw the same random numbers.
            self.single_steps = bool(draws(traced.graph))
            compiled_model.refuse_new_variables(model, before)
            own = {id(v.value) for v in model.variables}
            others = [v for v in self._used if id(v) not in own]
            handles = [v.handle for v in others if v.trainable]
            compiled_model.refuse_unlisted(model, handles)

    def variables(self, named: Mapping[str, Saveable]) -> dict[str, Saveable]:
        """All that a checkpoint stores: `named`, other slots, and seeds."""
        metrics = {id(v.value) for v in self.model.metrics_variables}
        used = [v for v in self._used if id(v) not in metrics]
        return with_others(named, used)

    def zero_states(self) -> States:
        """Returns empty logs; resets metrics before an evaluation."""
        if self._global_step is None:
            self.model.reset_metrics()
        return []

    def train(self, batch: Batch, step: tf.Tensor, states: States) -> States:
        """Runs the model's `train_step` and counts it; returns the logs."""
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
        """Runs a step after its batch was read; without one it does nothing.

        The dependencies are here because TensorFlow inlines the call and drops
        those of the call itself.
        """
        read = tf.nest.flatten(batch, expand_composites=True)
        with tf.control_dependencies(read):
            return self._logs("train_step", batch)

    def _logs(self, method: str, batch: Batch) -> States:
        """Returns the method's logs, flat; `_shapes` keeps the structure."""
        what = f"`{method}` of {type(self.model).__name__}"
        logs = checked_logs(what, getattr(self.model, method)(batch))
        self._shapes = tf.nest.map_structure(lambda t: t.shape, logs)
        return tf.nest.flatten(logs)

    def pack(self, states: States) -> tf.Tensor:
        """Packs all logs into one float64 vector."""
        flat = [tf.reshape(tf.cast(s, tf.float64), [-1]) for s in states]
        return tf.concat([tf.zeros([0], tf.float64), *flat], axis=0)

    def joined(self, earlier: Any, later: np.ndarray) -> np.ndarray:
        """Combines the logs of two dispatches: returns the later ones."""
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
        """Resets the metrics of training."""
        self._before = [(v, v.numpy()) for v in self.model.metrics_variables]
        self.model.reset_metrics()

    @contextlib.contextmanager
    def shown(self, packed: np.ndarray) -> Iterator[None]:
        """A context in which metrics are as before the last `reset`."""
        try:
            self.resume_metrics(packed)
            yield
        finally:
            self.model.reset_metrics()

    def resume_metrics(self, packed: np.ndarray) -> bool:
        """Undoes the last `reset`; returns whether any metric had a state."""
        for variable, value in self._before:
            variable.assign(value)
        return any(np.any(value) for _, value in self._before)

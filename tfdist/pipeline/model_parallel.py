"""Layers on different devices, in a pipeline of micro-batches.

A model too large for one device is cut into stages, each on a device of its
own: its variables, their optimizer slots and every op of the stage. For devices
to work at the same time, a batch goes through in micro-batches: while the
second stage has the first of them, the first stage has the next.

A stage is a `tf.device` scope of one graph, and TensorFlow sends what another
device needs, also one of another process: `/job:worker/task:1/device:GPU:0`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_positive
from tfdist.pipeline import micro_batches
from tfdist.pipeline.micro_batches import DeviceSchedule, Gradient, Passes, Work
from tfdist.pipeline.stages import (
    Devices,
    Layers,
    Stage,
    check_variables,
    resolve_devices,
)
from tfdist.training import metrics, optimizers


class Pipeline(keras.Model):
    """A chain of stages, each on a device, trained in micro-batches.

    A Keras model: `fit`, `evaluate`, `predict`, `export`, `tfdist.Estimator`
    and checkpoints work. Training gives the weights that the same layers have
    on one device, but for rounding: the gradients of the micro-batches add up
    to that of the whole batch's loss. Three kinds of layers differ by nature:
    BatchNorm normalizes over a micro-batch, Dropout draws a mask for each, and
    what a layer adds by `add_loss` is the mean over them.

    With several rows of `devices` there are as many replicas, each with its
    share of the batch (in-graph replication). Variables and slots are on the
    devices of the first row; in every step the others get copies and send
    gradients back. Moving averages and the like become the mean over replicas.

    The gradient of an embedding is as large as its table, and an id that a
    batch repeats counts once, with the sum; Keras' own Adam squares each apart.
    The graph has every stage once for each micro-batch, so tracing takes longer
    the more there are; with an Estimator, let a dispatch be one step
    (`RunConfig(steps_per_dispatch=1)`).

    >>> model = Pipeline(
    ...     keras.Input([4]),
    ...     [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)],
    ...     devices=["CPU:0", "CPU:0"],
    ...     num_micro_batches=2,
    ... )
    >>> model.compile("sgd", "mse")
    >>> x, y = keras.ops.ones([6, 4]), keras.ops.ones([6, 1])
    >>> loss = model.train_on_batch(x, y)

    Args:
        inputs: `keras.Input`, or a structure of them, for the first stage.
        stages: Each a layer, or a list of layers that follow one another; a
            Keras model is a layer too. Each takes what the one before returns,
            a tensor or a structure of them. Layers keep what they change in
            Keras variables; no variable is in two stages.
        devices: One for each stage, by a name that `tf.device` takes, also of
            another task of the cluster that
            `tf.config.experimental_connect_to_cluster` has joined; or a list
            of such lists, one for each replica. Default: the GPUs of this
            task, else its CPUs; where they are too few, neighbours share one.
        num_micro_batches: Into how many parts each replica cuts its share of
            the batch. The more, the less time devices wait (`bubble`), until
            a part is too small to keep one busy.
        name: Name of the model.

    Attributes:
        stages: Tuple of `tfdist.pipeline.Stage`.
        devices: A tuple of full device names for each replica.
        num_micro_batches: As given.

    Raises:
        ValueError: there is no stage, or not a device for each; a device does
            not exist; a stage has variables elsewhere, or in common with
            another; `num_micro_batches` is below 1; this is in the scope of a
            `tf.distribute` strategy.
        TypeError: a stage is no layer.
    """

    def __init__(
        self,
        inputs: Any,
        stages: Sequence[Layers],
        devices: Devices | None = None,
        *,
        num_micro_batches: int = 4,
        name: str = "pipeline",
    ) -> None:
        if tf.distribute.has_strategy():
            raise ValueError(
                "A Pipeline does its own data parallelism, so it cannot be "
                "made in the scope of a strategy. Received: "
                f"{tf.distribute.get_strategy()!r}. Give `devices` a list for "
                "each replica instead."
            )
        check_positive("num_micro_batches", num_micro_batches)
        rows = resolve_devices(devices, len(stages))
        own = tuple(map(Stage, range(len(stages)), stages, rows[0]))
        outputs = inputs
        for stage in own:
            with tf.device(stage.device):  # Layers make their variables here.
                outputs = stage.call(outputs)
        check_variables(own)
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        self.stages = own
        self.devices = rows
        self.num_micro_batches = num_micro_batches
        self._metrics_built_for: int | None = None
        # XLA compiles for one device; Keras warns who asks for it.
        self.supports_jit = False

    @property
    def losses(self) -> list[tf.Tensor]:
        """Those of all layers, each computed on the device of its stage."""
        losses = []
        for stage in self.stages:
            with tf.device(stage.device):
                losses += [x for layer in stage.layers for x in layer.losses]
        return losses

    def call(
        self, inputs: Any, training: bool | None = None, mask: Any = None
    ) -> Any:
        """Runs the stages one after the other, on the batch as a whole."""
        del mask  # Layers find it with the tensors.
        for stage in self.stages:
            with tf.device(stage.device):
                inputs = stage.call(inputs, training)
        return inputs

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on a batch, as a pipeline; returns the logs.

        Raises:
            ValueError: the optimizer skips updates.
            tf.errors.InvalidArgumentError: the batch does not divide.
        """
        _check_optimizer(self.optimizer)
        with tf.init_scope():
            optimizers.build(self.optimizer, self.trainable_variables)
        batch = keras.utils.unpack_x_y_sample_weight(data)
        self._build_metrics(batch)
        passes = self._passes(DeviceSchedule(), *batch)
        with tf.device(self.stages[-1].device):
            logs = self._logs(passes, *batch)
        weights = [weight for stage in self.stages for weight in stage.weights]
        gradients = [gradient for own in passes.gradients for gradient in own]
        _apply(self.optimizer, weights, gradients)
        for stage, states in zip(self.stages, passes.states, strict=True):
            with tf.device(stage.device):
                for i, value in states.items():
                    stage.states[i].assign(value)
        return logs

    def timeline(self, data: Any) -> list[Work]:
        """Measures which device does what when, for a batch; trains nothing.

        The clocks of several machines should agree. What a GPU does ends here
        when it is queued, not when it is done: use `tf.profiler` there.
        """
        batch = keras.utils.unpack_x_y_sample_weight(data)
        self._build_metrics(batch)
        schedule = DeviceSchedule(timed=True)

        @tf.function(autograph=False)
        def run() -> Passes:
            # All of it: TensorFlow does not compute what nobody asks for.
            return self._passes(schedule, *batch)

        run()  # The first run also allocates.
        times = np.array(run().times)
        times = (times - times.min()).reshape(-1, 2).tolist()
        timed = [
            dataclasses.replace(work, start=start, end=end)
            for work, (start, end) in zip(schedule.work, times, strict=True)
        ]
        return sorted(timed, key=lambda work: work.start)

    def variable_devices(self) -> dict[str, str]:
        """Path of every variable, slot and counter to its device."""
        variables = list(self.variables)
        if self.optimizer is not None:
            variables += self.optimizer.variables
        return {v.path: v.value.device for v in variables}

    def _build_metrics(self, batch: tuple[Any, ...]) -> None:
        """Has Keras make its metrics, which it could not in the passes."""
        tracker = id(metrics.loss_tracker(self))  # `compile` renews it.
        if self._metrics_built_for != tracker:
            known = itertools.takewhile(lambda part: part is not None, batch)
            with tf.init_scope():
                metrics.build_metrics(self, tuple(known))
            self._metrics_built_for = tracker

    def _passes(
        self, schedule: DeviceSchedule, x: Any, y: Any, sample_weight: Any
    ) -> Passes:
        """Takes a batch forward and back; changes no variable."""
        values = [stage.values() for stage in self.stages]
        variables = [v for stage in self.stages for v in stage.variables]
        known = zip(variables, itertools.chain(*values), strict=True)
        scope = keras.StatelessScope(list(known))
        x = self._divisible(x)

        def loss(y_pred: Any) -> tf.Tensor:
            with scope:  # Metrics that a loss updates wait for `_logs`.
                return self.compute_loss(x, y, y_pred, sample_weight)

        passes = functools.partial(
            micro_batches.forward_and_back,
            self.stages,
            self.devices,
            self.num_micro_batches,
            schedule,
            self.optimizer.scale_loss,
            loss,
            values,
            x,
        )
        if tf.executing_eagerly():
            return passes()
        # `tf.function` would have stateful ops (the LSTM of cuDNN, the clock)
        # wait for one another in the order of the program: no two stages would
        # work at the same time. A wrapped function has no such order.
        return tf.compat.v1.wrap_function(passes, [])()

    def _divisible(self, x: Any) -> Any:
        """The inputs, if they can be cut."""
        parts = len(self.devices) * self.num_micro_batches
        first = tf.nest.flatten(x)[0]
        message = (
            f"A batch must divide into {parts} parts: {len(self.devices)} "
            f"replicas x {self.num_micro_batches} micro-batches. Choose "
            "another `num_micro_batches`, or batch the dataset with "
            f"`drop_remainder=True`. Received: a batch of shape {first.shape}."
        )
        rest = keras.ops.shape(first)[0] % parts
        with tf.control_dependencies(
            [tf.debugging.assert_equal(rest, 0, message)]
        ):
            return tf.nest.map_structure(tf.identity, x)

    def _logs(
        self, passes: Passes, x: Any, y: Any, sample_weight: Any
    ) -> dict[str, tf.Tensor]:
        """Loss and metrics of the whole batch, as Keras computes them."""
        micro_batches.set_masks(passes.y_pred, passes.masks)
        loss = self.compute_loss(x, y, passes.y_pred, sample_weight)
        tracker = metrics.loss_tracker(self)
        assert tracker is not None  # The model is compiled.
        tracker.update_state(
            loss + tf.cast(passes.added_loss, loss.dtype),
            sample_weight=tf.shape(tf.nest.flatten(x)[0])[0],
        )
        return self.compute_metrics(x, y, passes.y_pred, sample_weight)


def bubble(num_stages: int, num_micro_batches: int) -> float:
    """Share of its time that a device waits, if all stages take equally long.

    It waits while the first micro-batch comes and the last one goes.

    >>> [round(bubble(2, m), 2) for m in (1, 2, 4, 8)]
    [0.5, 0.33, 0.2, 0.11]
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def _check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses an optimizer that skips updates."""
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    parts = optimizers.parts(optimizer)
    part = next((p for p in parts if p.gradient_accumulation_steps), optimizer)
    if scaling or part.gradient_accumulation_steps:
        raise ValueError(
            f"Optimizer {part.name!r} skips some updates, which a Pipeline "
            f"does not support. Received: {type(optimizer).__name__} with "
            f"gradient_accumulation_steps={part.gradient_accumulation_steps}. "
            "Instead of accumulation, use larger batches and more micro-"
            "batches; instead of LossScaleOptimizer, bfloat16 or "
            "loss_scale_factor."
        )


def _apply(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    gradients: Sequence[Gradient],
) -> None:
    """Applies gradients, each where its variable is, and counts the step."""
    parts = optimizers.parts(optimizer)
    iteration = tf.convert_to_tensor(optimizer.iterations.value)
    for i, part in enumerate(parts):
        rate = optimizers.learning_rate(part, iteration, [])
        optimizers.begin_step(part, iteration)
        own = [
            (variable, gradient)
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None
            and optimizers.owner(optimizer, variable) == i
        ]
        for variable, gradient in _clipped(part, own):
            with tf.device(variable.value.device):
                optimizers.update(part, variable, gradient, rate, iteration)
    counters = [o.iterations for o in (optimizer, *parts)]
    for counter in {id(c): c for c in counters}.values():
        counter.assign_add(1)


def _clipped(
    part: keras.optimizers.Optimizer,
    pairs: list[tuple[keras.Variable, Gradient]],
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """With gradients that are dense, and clipped as the optimizer says."""
    clipped = []
    for variable, gradient in pairs:
        with tf.device(variable.value.device):
            gradient = tf.convert_to_tensor(gradient)
            if not part.global_clipnorm:
                (gradient,) = optimizers.clip(part, [gradient])
            elif part.loss_scale_factor is not None:
                gradient /= part.loss_scale_factor
        clipped.append(gradient)
    if part.global_clipnorm and clipped:
        # Each is scaled where it is; only norms meet.
        clipped, _ = tf.clip_by_global_norm(clipped, part.global_clipnorm)
    variables = [variable for variable, _ in pairs]
    return list(zip(variables, clipped, strict=True))

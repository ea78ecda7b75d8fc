"""Layers on different devices, in a pipeline of micro-batches.

A model that is too large for one device is split into stages. Each stage has
its variables, their slot variables and all of its ops on its own device. A
batch is processed in micro-batches, so that devices work concurrently: while
the second stage processes the first micro-batch, the first one processes the
next.

A stage is a `tf.device` scope in one graph. TensorFlow sends tensors to other
devices, also of other processes (`/job:worker/task:1/device:GPU:0`).
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
    """A chain of stages, each on its own device, trained in micro-batches.

    It is a Keras model that supports `fit`, `evaluate`, `predict`, `export`,
    `tfdist.Estimator` and checkpoints. Apart from rounding, training yields the
    same weights as on one device: the gradients of the micro-batches add up to
    that of the whole batch's loss. Three kinds of layers necessarily differ:
    BatchNorm normalizes over a micro-batch, Dropout draws a mask for each, and
    a loss added with `add_loss` is the mean over micro-batches.

    With several rows of `devices`, there are as many replicas, each with its
    share of the batch (in-graph replication). Variables and slots are on the
    devices of the first row; in every step, the other rows receive copies and
    return gradients. States such as moving averages become the mean over
    replicas.

    The gradient of an embedding is as large as its table, and repeated ids in
    a batch are summed before they are squared, unlike in Keras' own Adam. The
    graph contains each stage once per micro-batch, so tracing takes longer with
    more micro-batches; with an Estimator, use dispatches of one step
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
        stages: Layers, or lists of consecutive layers; a Keras model is a
            layer, too. Each takes the outputs of the previous one: a tensor or
            a structure of tensors. Layers must keep their state in Keras
            variables, and no two stages may share a variable.
        devices: A device name per stage, as for `tf.device`, possibly in
            another task of a cluster joined with
            `tf.config.experimental_connect_to_cluster`; or a list of such
            lists, one per replica. Default: the GPUs of this task, or else its
            CPUs; if there are too few, adjacent stages share one.
        num_micro_batches: The number of parts into which each replica splits
            its share of the batch. With more parts, devices wait less
            (`bubble`), until a part is too small to keep a device busy.
        name: The name of the model.

    Attributes:
        stages: A tuple of `tfdist.pipeline.Stage`.
        devices: A tuple of full device names for each replica.
        num_micro_batches: As given.

    Raises:
        ValueError: there is no stage; the number of devices is not that of the
            stages; a device does not exist; a stage has variables on another
            device, or shares some; `num_micro_batches` is below 1; the call is
            in the scope of a `tf.distribute` strategy.
        TypeError: a stage is not a layer.
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
                "A Pipeline does its own data parallelism, so do not create it "
                "in the scope of a strategy. Instead, pass `devices` a list of "
                "devices for each replica. Received: "
                f"{tf.distribute.get_strategy()!r}."
            )
        check_positive("num_micro_batches", num_micro_batches)
        rows = resolve_devices(devices, len(stages))
        own = tuple(map(Stage, range(len(stages)), stages, rows[0]))
        outputs = inputs
        for stage in own:
            with tf.device(stage.device):  # Layers create variables here.
                outputs = stage.call(outputs)
        check_variables(own)
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        self.stages = own
        self.devices = rows
        self.num_micro_batches = num_micro_batches
        self._metrics_built_for: int | None = None
        # XLA compiles for one device; Keras warns if it is requested.
        self.supports_jit = False

    @property
    def losses(self) -> list[tf.Tensor]:
        """The losses of all layers, computed on the devices of their stages."""
        losses = []
        for stage in self.stages:
            with tf.device(stage.device):
                losses += [x for layer in stage.layers for x in layer.losses]
        return losses

    def call(
        self, inputs: Any, training: bool | None = None, mask: Any = None
    ) -> Any:
        """Runs the stages one after another, on the whole batch."""
        del mask  # Layers find masks on their tensors.
        for stage in self.stages:
            with tf.device(stage.device):
                inputs = stage.call(inputs, training)
        return inputs

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on a batch in micro-batches; returns the logs.

        Raises:
            ValueError: the optimizer skips updates.
            tf.errors.InvalidArgumentError: the batch is not divisible.
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
        """Measures the work of each device for a batch, without training.

        The clocks of several machines should agree. A GPU's work ends here
        when it is queued, not when it is done; use `tf.profiler` for GPUs.
        """
        batch = keras.utils.unpack_x_y_sample_weight(data)
        self._build_metrics(batch)
        schedule = DeviceSchedule(timed=True)

        @tf.function(autograph=False)
        def run() -> Passes:
            # Return everything: TensorFlow skips ops that have no effect.
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
        """Maps paths of all variables, slots and counters to their devices."""
        variables = list(self.variables)
        if self.optimizer is not None:
            variables += self.optimizer.variables
        return {v.path: v.value.device for v in variables}

    def _build_metrics(self, batch: tuple[Any, ...]) -> None:
        """Lets Keras create its metrics, which it cannot do in the passes."""
        tracker = id(metrics.loss_tracker(self))  # `compile` renews it.
        if self._metrics_built_for != tracker:
            known = itertools.takewhile(lambda part: part is not None, batch)
            with tf.init_scope():
                metrics.build_metrics(self, tuple(known))
            self._metrics_built_for = tracker

    def _passes(
        self, schedule: DeviceSchedule, x: Any, y: Any, sample_weight: Any
    ) -> Passes:
        """Runs both passes of a batch; changes no variable."""
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
        # `tf.function` would run stateful ops (cuDNN's LSTM, the clock) in
        # program order, so that no two stages would work at the same time. A
        # wrapped function does not order them.
        return tf.compat.v1.wrap_function(passes, [])()

    def _divisible(self, x: Any) -> Any:
        """Returns the inputs if they are divisible into micro-batches."""
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
        """Returns Keras' loss and metrics of the whole batch."""
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
    """Returns the share of time that a device waits, with equal stages.

    It waits until the first micro-batch arrives and after the last one leaves.

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
            "Instead of gradient accumulation, use larger batches and more "
            "micro-batches. Instead of LossScaleOptimizer, use bfloat16 or "
            "loss_scale_factor."
        )


def _apply(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    gradients: Sequence[Gradient],
) -> None:
    """Applies gradients on their variables' devices, and counts the step."""
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
    """Converts gradients to dense ones, clipped by the optimizer."""
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
        # Each is scaled on its device; only the norms are transferred.
        clipped, _ = tf.clip_by_global_norm(clipped, part.global_clipnorm)
    variables = [variable for variable, _ in pairs]
    return list(zip(variables, clipped, strict=True))

"""The forward and the backward pass of a batch, in micro-batches.

A function of the values of all variables that changes none, so that its ops
wait for what they need and for nothing else:

    stage 0   F0 F1 F2 F3                 B0 B1 B2 B3
    stage 1      F0 F1 F2 F3  loss  B0 B1 B2 B3

This is the schedule of GPipe (Huang et al., 2019). The loss waits for the
predictions for the whole batch, so it may be any function of them; that costs
nothing, since the last stage goes forward through all of the batch before it
goes back. Activations are kept until then.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfdist._tf.private import SEED_STATE_NAME, mask_of, set_mask
from tfdist.pipeline.schedule import DeviceSchedule, Work
from tfdist.pipeline.stages import Stage

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


class Passes(NamedTuple):
    """What both passes of a batch give.

    Attributes:
        gradients: Of each stage, those of its weights.
        states: Of each stage, index of a state to its new value; only of those
            that have changed.
        y_pred: Predictions for the whole batch.
        masks: Keras' mask of each of them, or None.
        added_loss: What layers have added to the loss, a scalar.
        times: Those of the device schedule.
    """

    gradients: list[list[Gradient]]
    states: list[dict[int, tf.Tensor]]
    y_pred: Any
    masks: list[tf.Tensor | None]
    added_loss: tf.Tensor
    times: list[tf.Tensor]


def forward_and_back(
    stages: Sequence[Stage],
    devices: Sequence[Sequence[str]],
    num_micro_batches: int,
    schedule: DeviceSchedule,
    scale_loss: Callable[[tf.Tensor], tf.Tensor],
    loss: Callable[[Any], tf.Tensor],
    values: list[list[tf.Tensor]],
    x: Any,
) -> Passes:
    """Runs both passes.

    Args:
        stages: The stages.
        devices: A row for each replica.
        num_micro_batches: Of each replica.
        schedule: Keeps the devices in order.
        scale_loss: Scales a loss for the backward pass.
        loss: From predictions for the whole batch to a scalar.
        values: Of each stage, those of its variables, on its device.
        x: Inputs; divisible by the number of all micro-batches.
    """
    num_parts = len(devices) * num_micro_batches
    weight = scale_loss(tf.constant(1 / num_parts))
    replicas = [
        _Replica(i, stages, row, values, schedule, weight)
        for i, row in enumerate(devices)
    ]
    order = list(itertools.product(replicas, range(num_micro_batches)))
    with tf.device("CPU:0"):  # It was read here; only parts are sent.
        parts = _split(x, num_parts)
    y_preds = [
        replica.forward(k, part)
        for (replica, k), part in zip(order, parts, strict=True)
    ]
    with tf.device(stages[-1].device):
        y_pred, masks = _joined(y_preds)
        parts = _split(
            _gradients(lambda: scale_loss(loss(y_pred)), _floats(y_pred)),
            num_parts,
        )
    for (replica, k), part in zip(order, parts, strict=True):
        replica.backward(k, part)
    with tf.device(stages[-1].device):
        added = [tf.cast(x, tf.float32) for r in replicas for x in r.losses]
        added_loss = tf.add_n([tf.zeros([]), *added]) / num_parts
    return Passes(
        [
            _summed(i, stage, own, replicas, scale_loss)
            for i, (stage, own) in enumerate(zip(stages, values, strict=True))
        ],
        [_changed_states(i, stage, replicas) for i, stage in enumerate(stages)],
        y_pred,
        masks,
        added_loss,
        schedule.times,
    )


class _Replica:
    """A copy of the pipeline, at work on its share of a batch.

    Gradients are taken stage by stage, each on its device; the backward ops of
    a tape over all stages would be on one.
    """

    def __init__(
        self,
        index: int,
        stages: Sequence[Stage],
        devices: Sequence[str],
        values: list[list[tf.Tensor]],
        schedule: DeviceSchedule,
        weight: tf.Tensor,
    ) -> None:
        self._index, self._stages, self._devices = index, stages, devices
        self._schedule, self._weight = schedule, weight
        # Of each stage, values of its variables, before the batch and so far.
        self.initial = [
            _copy(stage, own, device, index)
            for stage, own, device in zip(stages, values, devices, strict=True)
        ]
        self.values = list(self.initial)
        # Of each stage, those of its weights, summed so far.
        self.gradients: list[list[Gradient]] = [
            [None] * len(stage.weights) for stage in stages
        ]
        self.losses: list[tf.Tensor] = []  # Of all layers and micro-batches.
        self._backward: dict[int, list[Callable]] = {}

    def forward(self, micro_batch: int, x: Any) -> Any:
        """Takes a micro-batch through all stages; returns predictions."""
        self._backward[micro_batch] = []
        for i in range(len(self._stages)):
            x, backward = self._stage(i, micro_batch, x)
            self._backward[micro_batch].append(backward)
        return x

    def backward(self, micro_batch: int, gradients: list[Gradient]) -> None:
        """Takes it back, from the gradients of its predictions."""
        for backward in reversed(self._backward.pop(micro_batch)):
            gradients = backward(gradients)

    def _stage(
        self, i: int, micro_batch: int, inputs: Any
    ) -> tuple[Any, Callable[[list[Gradient]], list[Gradient]]]:
        """Outputs of a stage, and what makes gradients of its inputs."""
        stage = self._stages[i]
        weights = self.values[i][: len(stage.weights)]
        sources = [*weights, *(_floats(inputs) if i else [])]
        known = zip(stage.variables, self.values[i], strict=True)
        tape = tf.GradientTape(watch_accessed_variables=False)
        scope = keras.StatelessScope(list(known), collect_losses=True)
        work = Work(self._devices[i], self._index, i, micro_batch, True)

        def forward() -> Any:
            with tape, scope:
                tape.watch(sources)
                return stage.call(inputs, training=True)

        outputs = self._schedule.run(work, inputs, forward)
        states = [scope.get_current_value(v) for v in stage.states]
        self.values[i] = [*weights, *states]
        self.losses += scope.losses

        def backward(gradients: list[Gradient]) -> list[Gradient]:
            pairs = zip(_floats(outputs), gradients, strict=True)
            reached = [(y, dy) for y, dy in pairs if dy is not None]
            if not reached and not scope.losses:
                return [None] * (len(sources) - len(weights))

            def compute() -> tuple[list[Gradient], list[Gradient]]:
                added = [
                    (x, tf.cast(self._weight, x.dtype)) for x in scope.losses
                ]
                targets, seeds = zip(*reached, *added, strict=True)
                found = tape.gradient(targets, sources, output_gradients=seeds)
                summed = map(_sum, self.gradients[i], found)
                return list(summed), found[len(weights) :]

            self.gradients[i], of_inputs = self._schedule.run(
                dataclasses.replace(work, forward=False),
                [gradient for _, gradient in reached],
                compute,
            )
            return of_inputs

        return outputs, backward


def _copy(
    stage: Stage, values: list[tf.Tensor], device: str, index: int
) -> list[tf.Tensor]:
    """The values, for a replica; each but the first draws other seeds."""
    # Also where nothing is copied the device is said: a loop that reads a value
    # without one would pass it through the default device.
    with tf.device(device):
        return [
            _other_seed(value, index)
            if index and variable.path.endswith(SEED_STATE_NAME)
            else tf.identity(value)
            for variable, value in zip(stage.variables, values, strict=True)
        ]


def _other_seed(state: tf.Tensor, index: int) -> tf.Tensor:
    seed = tf.random.fold_in(tf.cast(state, tf.int64), index)
    return tf.cast(seed, state.dtype)


def _summed(
    i: int,
    stage: Stage,
    values: list[tf.Tensor],
    replicas: list[_Replica],
    scale_loss: Callable[[tf.Tensor], tf.Tensor],
) -> list[Gradient]:
    """Gradients over all replicas and of regularizers, with the variables."""
    regularizers = [variable.regularizer for variable in stage.weights]
    weights = values[: len(regularizers)]

    def penalty() -> tf.Tensor:
        pairs = zip(regularizers, weights, strict=True)
        penalties = [function(x) for function, x in pairs if function]
        return scale_loss(tf.add_n([tf.zeros([]), *penalties]))

    with tf.device(stage.device):
        of_replicas = [replica.gradients[i] for replica in replicas]
        columns = zip(_gradients(penalty, weights), *of_replicas, strict=True)
        return [functools.reduce(_sum, column) for column in columns]


def _changed_states(
    i: int, stage: Stage, replicas: list[_Replica]
) -> dict[int, tf.Tensor]:
    """The new states: means over replicas; a counter is the first one's."""
    changed, start = {}, len(stage.weights)
    with tf.device(stage.device):
        for j, before in enumerate(replicas[0].initial[i][start:]):
            after = [replica.values[i][start + j] for replica in replicas]
            if after[0] is not before:
                mean = len(after) > 1 and before.dtype.is_floating
                changed[j] = tf.add_n(after) / len(after) if mean else after[0]
    return changed


def _gradients(
    loss: Callable[[], tf.Tensor], sources: list[tf.Tensor]
) -> list[Gradient]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        value = loss()
    return tape.gradient(value, sources)


def _sum(a: Gradient, b: Gradient) -> Gradient:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([a.values, b.values], axis=0),
            tf.concat([a.indices, b.indices], axis=0),
            a.dense_shape,
        )
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


def _floats(structure: Any) -> list[tf.Tensor]:
    """Those that have a gradient."""
    return [t for t in tf.nest.flatten(structure) if t.dtype.is_floating]


def _split(structure: Any, num_parts: int) -> list[Any]:
    """As many structures, of equal parts along axis 0; None stays None."""
    cut = [
        [None] * num_parts if t is None else tf.split(t, num_parts)
        for t in tf.nest.flatten(structure)
    ]
    return [
        tf.nest.pack_sequence_as(structure, part)
        for part in zip(*cut, strict=True)
    ]


def _joined(parts: list[Any]) -> tuple[Any, list[tf.Tensor | None]]:
    """The structure of which these are the parts, and its masks."""
    masks = [
        None
        if mask_of(column[0]) is None
        else tf.concat([mask_of(t) for t in column], axis=0)
        for column in zip(*map(tf.nest.flatten, parts), strict=True)
    ]
    whole = tf.nest.map_structure(lambda *t: tf.concat(t, axis=0), *parts)
    set_masks(whole, masks)
    return whole, masks


def set_masks(structure: Any, masks: list[tf.Tensor | None]) -> None:
    """Gives each tensor its mask, where a Keras loss looks for it."""
    for tensor, mask in zip(tf.nest.flatten(structure), masks, strict=True):
        if mask is not None:
            set_mask(tensor, mask)

"""The forward and the backward pass of a batch, in micro-batches.

The passes are a function of the values of all variables, and change none, so
that ops only wait for their inputs:

    stage 0   F0 F1 F2 F3                 B0 B1 B2 B3
    stage 1      F0 F1 F2 F3  loss  B0 B1 B2 B3

This is the schedule of GPipe (Huang et al., 2019). The loss may be any function
of the predictions for the whole batch. Waiting for all of them costs nothing,
since the last stage completes its forward passes before the backward passes.
Activations are kept until then.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tfdist._tf.private import now
from tfdist._tf.private_keras import SEED_STATE_NAME, mask_of, set_mask
from tfdist.pipeline.stages import Stage
from tfdist.training.forward import TapedScope

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


@dataclasses.dataclass(frozen=True)
class Work:
    """One unit of a device's work: a stage, for one micro-batch.

    Attributes:
        device: The full name of the device.
        replica, stage: Their indices.
        micro_batch: The index among the micro-batches of the replica.
        forward: Whether this is the forward pass.
        start, end: Seconds since the start of the batch's first unit.
    """

    device: str
    replica: int
    stage: int
    micro_batch: int
    forward: bool
    start: float = 0.0
    end: float = 0.0


class DeviceSchedule:
    """Makes each device run one unit of work at a time, in order of `run`.

    Otherwise a device would start all it can, and the first micro-batch would
    leave the first stage as late as the last one. If `timed`, it reads the
    clock of the device's machine when the inputs are available and the device
    is free, and when the outputs are available.
    """

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._last: dict[str, list[tf.Tensor]] = {}
        self.work: list[Work] = []  # Without their times.
        self.times: list[tf.Tensor] = []  # Start and end of each unit.

    def run(self, work: Work, inputs: Any, compute: Callable[[], Any]) -> Any:
        """Returns `compute()`, on the device, after its previous work."""
        self.work.append(work)
        with tf.device(work.device):
            with tf.control_dependencies(self._last.get(work.device, [])):
                start = self._clock(inputs)
                with tf.control_dependencies(start):
                    outputs = compute()
            self._last[work.device] = _tensors(outputs) + self._clock(outputs)
        return outputs

    def _clock(self, needed: Any) -> list[tf.Tensor]:
        """Reads the time when `needed` is available, if `timed`."""
        if not self._timed:
            return []
        with tf.control_dependencies(_tensors(needed)):
            self.times.append(now())
        return self.times[-1:]


def _tensors(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [t for t in flat if t is not None]


class Passes(NamedTuple):
    """The results of both passes of a batch."""

    gradients: list[list[Gradient]]  # Per stage, of its weights.
    states: list[dict[int, tf.Tensor]]  # Per stage, those that changed.
    y_pred: Any  # For the whole batch.
    masks: list[tf.Tensor | None]  # Keras' masks of `y_pred`.
    added_loss: tf.Tensor  # Losses of layers, a scalar.
    times: list[tf.Tensor]  # From the device schedule.


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

    `devices` has a row per replica. `loss` returns the scalar loss for the
    predictions of the whole batch, and is scaled for the backward pass.
    `values` holds, per stage, the values of its variables, on its device. `x`
    must be divisible into micro-batches.
    """
    num_parts = len(devices) * num_micro_batches
    weight = scale_loss(tf.constant(1 / num_parts))
    replicas: list[list[_StageCopy]] = [[] for _ in devices]
    for i, row in enumerate(devices):
        places = zip(stages, row, values, strict=True)
        for j, (stage, device, own) in enumerate(places):
            work = Work(device, i, j, 0, True)
            copy = _StageCopy(stage, work, own, schedule, weight)
            replicas[i].append(copy)
    order = list(itertools.product(replicas, range(num_micro_batches)))
    with tf.device("CPU:0"):  # It was read here; only its parts are sent.
        parts = _split(x, num_parts)
    y_preds = []
    for (replica, k), part in zip(order, parts, strict=True):
        for copy in replica:
            part = copy.forward(k, part)
        y_preds.append(part)
    with tf.device(stages[-1].device):
        y_pred, masks = _joined(y_preds)
        found = _gradients(lambda: scale_loss(loss(y_pred)), _floats(y_pred))
        parts = _split(found, num_parts)
    for (replica, k), part in zip(order, parts, strict=True):
        for copy in reversed(replica):
            part = copy.backward.pop(k)(part)
    copies = list(zip(*replicas, strict=True))  # Per stage.
    pairs = zip(copies, values, strict=True)
    losses = [x for own in copies for copy in own for x in copy.losses]
    with tf.device(stages[-1].device):
        added = [tf.zeros([]), *(tf.cast(x, tf.float32) for x in losses)]
        added_loss = tf.add_n(added) / num_parts
    return Passes(
        [_summed(own, before, scale_loss) for own, before in pairs],
        [_changed_states(own) for own in copies],
        y_pred,
        masks,
        added_loss,
        schedule.times,
    )


class _StageCopy:
    """A stage of one replica, for its share of a batch.

    Gradients are computed stage by stage, each on its device; with one tape
    over all stages, all backward ops would be on the same device.
    """

    def __init__(
        self,
        stage: Stage,
        work: Work,
        values: list[tf.Tensor],
        schedule: DeviceSchedule,
        weight: tf.Tensor,
    ) -> None:
        self.stage, self._work = stage, work
        self._schedule, self._weight = schedule, weight
        # Needed even if nothing is copied: a loop that reads a value without a
        # device would pass it through the default device.
        with tf.device(work.device):
            # Values of the variables before the batch, and now.
            self.before = [
                _other_seed(value, work.replica)
                if work.replica and variable.path.endswith(SEED_STATE_NAME)
                else tf.identity(value)
                for variable, value in zip(stage.variables, values, strict=True)
            ]
        self.values = self.before
        # Gradients of the weights, summed so far.
        self.gradients: list[Gradient] = [None] * len(stage.weights)
        self.losses: list[tf.Tensor] = []  # Losses added by layers.
        # By micro-batch: maps gradients of the outputs to those of the inputs.
        self.backward: dict[int, Callable] = {}

    def forward(self, micro_batch: int, inputs: Any) -> Any:
        """Runs the forward pass of a micro-batch; prepares the backward one."""
        stage = self.stage
        work = dataclasses.replace(self._work, micro_batch=micro_batch)
        weights = self.values[: len(stage.weights)]
        sources = [*weights, *(_floats(inputs) if work.stage else [])]
        known = list(zip(stage.variables, self.values, strict=True))
        tape = tf.GradientTape(watch_accessed_variables=False)
        scope = TapedScope(known)
        for variable, value in known[: len(weights)]:
            scope.tape(variable, value)

        def forward() -> Any:
            with tape, scope:
                tape.watch(sources)
                return stage.call(inputs, training=True)

        outputs = self._schedule.run(work, inputs, forward)
        states = [scope.get_current_value(v) for v in stage.states]
        self.values = [*weights, *states]
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
                with scope:  # Recomputation (`keras.remat`) reads weights.
                    found = tape.gradient(
                        targets, sources, output_gradients=seeds
                    )
                summed = map(_sum, self.gradients, found)
                return list(summed), found[len(weights) :]

            self.gradients, of_inputs = self._schedule.run(
                dataclasses.replace(work, forward=False),
                [gradient for _, gradient in reached],
                compute,
            )
            return of_inputs

        self.backward[micro_batch] = backward
        return outputs


def _other_seed(state: tf.Tensor, replica: int) -> tf.Tensor:
    seed = tf.random.fold_in(tf.cast(state, tf.int64), replica)
    return tf.cast(seed, state.dtype)


def _summed(
    copies: Sequence[_StageCopy],
    values: list[tf.Tensor],
    scale_loss: Callable[[tf.Tensor], tf.Tensor],
) -> list[Gradient]:
    """Sums gradients over replicas and regularizers, on the stage's device."""
    stage = copies[0].stage
    regularizers = [variable.regularizer for variable in stage.weights]
    weights = values[: len(regularizers)]

    def penalty() -> tf.Tensor:
        pairs = zip(regularizers, weights, strict=True)
        penalties = [function(x) for function, x in pairs if function]
        return scale_loss(tf.add_n([tf.zeros([]), *penalties]))

    with tf.device(stage.device):
        found = [_gradients(penalty, weights), *(c.gradients for c in copies)]
        return [functools.reduce(_sum, of) for of in zip(*found, strict=True)]


def _changed_states(copies: Sequence[_StageCopy]) -> dict[int, tf.Tensor]:
    """Returns new states: means over replicas; counters of the first one."""
    stage, changed = copies[0].stage, {}
    first = len(stage.weights)
    with tf.device(stage.device):
        for j, before in enumerate(copies[0].before[first:]):
            after = [copy.values[first + j] for copy in copies]
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
        values = tf.concat([a.values, b.values], axis=0)
        indices = tf.concat([a.indices, b.indices], axis=0)
        return tf.IndexedSlices(values, indices, a.dense_shape)
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


def _floats(structure: Any) -> list[tf.Tensor]:
    """Returns the tensors that can have a gradient."""
    return [t for t in tf.nest.flatten(structure) if t.dtype.is_floating]


def _split(structure: Any, num_parts: int) -> list[Any]:
    """Splits a structure into equal parts along axis 0; None stays None."""
    cut = [
        [None] * num_parts if t is None else tf.split(t, num_parts)
        for t in tf.nest.flatten(structure)
    ]
    pack = functools.partial(tf.nest.pack_sequence_as, structure)
    return [pack(part) for part in zip(*cut, strict=True)]


def _joined(parts: list[Any]) -> tuple[Any, list[tf.Tensor | None]]:
    """Joins the parts of a structure; also returns its masks."""
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
    """Sets the mask of each tensor, for Keras losses."""
    for tensor, mask in zip(tf.nest.flatten(structure), masks, strict=True):
        if mask is not None:
            set_mask(tensor, mask)

"""The forward and the backward pass of a batch, in micro-batches.

A function of the values of all variables that changes none, so that its ops
wait for what they need and for nothing else:

    stage 0   F0 F1 F2 F3                 B0 B1 B2 B3
    stage 1      F0 F1 F2 F3  loss  B0 B1 B2 B3

This is the schedule of GPipe (Huang et al., 2019). The loss waits for the
predictions for the whole batch, so it may be any function of them; that costs
nothing, since the last stage goes forward through all of it before it goes
back. Activations are kept until then.
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
    """What a device does without a break: a stage, for one micro-batch.

    Attributes:
        device: Full name of the device.
        replica, stage: Their indices.
        micro_batch: Index among the micro-batches of the replica.
        forward: Whether it is the forward pass.
        start, end: Seconds since the first work of the batch began.
    """

    device: str
    replica: int
    stage: int
    micro_batch: int
    forward: bool
    start: float = 0.0
    end: float = 0.0


class DeviceSchedule:
    """Has each device do one work after the other, in the order of `run`.

    Else it would begin all that it can, and the first micro-batch would leave
    the first stage as late as the last one. A `timed` one reads the clock of
    the device's machine when inputs are there and the device is free, and when
    outputs are.
    """

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._last: dict[str, list[tf.Tensor]] = {}
        self.work: list[Work] = []  # What was run, without its times.
        self.times: list[tf.Tensor] = []  # Start and end of each.

    def run(self, work: Work, inputs: Any, compute: Callable[[], Any]) -> Any:
        """Returns `compute()`, on the device, after the work before."""
        self.work.append(work)
        with tf.device(work.device):
            with tf.control_dependencies(self._last.get(work.device, [])):
                start = self._clock(inputs)
                with tf.control_dependencies(start):
                    outputs = compute()
            self._last[work.device] = _tensors(outputs) + self._clock(outputs)
        return outputs

    def _clock(self, needed: Any) -> list[tf.Tensor]:
        """The time when all of `needed` is there, if it is asked for."""
        if not self._timed:
            return []
        with tf.control_dependencies(_tensors(needed)):
            self.times.append(now())
        return self.times[-1:]


def _tensors(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [t for t in flat if t is not None]


class Passes(NamedTuple):
    """What both passes of a batch give."""

    gradients: list[list[Gradient]]  # Of each stage, those of its weights.
    states: list[dict[int, tf.Tensor]]  # Of each stage, those that changed.
    y_pred: Any  # For the whole batch.
    masks: list[tf.Tensor | None]  # Keras' mask of each of them.
    added_loss: tf.Tensor  # What layers have added, a scalar.
    times: list[tf.Tensor]  # Those of the device schedule.


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

    There is a row of `devices` for each replica. The scalar `loss` of the whole
    batch's predictions is scaled for the backward pass. Of each stage, `values`
    are those of its variables, on its device. `x` divides into micro-batches.
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
    with tf.device("CPU:0"):  # It was read here; only parts are sent.
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
            part = copy.backward(k, part)
    copies = list(zip(*replicas, strict=True))  # Of each stage.
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
    """A stage of one replica, at work on its share of a batch.

    Gradients are taken stage by stage, each on its device; the backward ops of
    a tape over all stages would be on one.
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
        # Said also where nothing is copied: a loop that reads a value without a
        # device would pass it through the default one.
        with tf.device(work.device):
            # Values of its variables: before the batch, and so far.
            self.before = [
                _other_seed(value, work.replica)
                if work.replica and variable.path.endswith(SEED_STATE_NAME)
                else tf.identity(value)
                for variable, value in zip(stage.variables, values, strict=True)
            ]
        self.values = self.before
        # Of its weights, summed so far.
        self.gradients: list[Gradient] = [None] * len(stage.weights)
        self.losses: list[tf.Tensor] = []  # That layers have added.
        self._backward: dict[int, Callable] = {}

    def forward(self, micro_batch: int, inputs: Any) -> Any:
        """Takes a micro-batch through the stage."""
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
                with scope:  # What `keras.remat` recomputes reads weights.
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

        self._backward[micro_batch] = backward
        return outputs

    def backward(
        self, micro_batch: int, gradients: list[Gradient]
    ) -> list[Gradient]:
        """Takes it back: from gradients of the outputs to those of inputs."""
        return self._backward.pop(micro_batch)(gradients)


def _other_seed(state: tf.Tensor, replica: int) -> tf.Tensor:
    seed = tf.random.fold_in(tf.cast(state, tf.int64), replica)
    return tf.cast(seed, state.dtype)


def _summed(
    copies: Sequence[_StageCopy],
    values: list[tf.Tensor],
    scale_loss: Callable[[tf.Tensor], tf.Tensor],
) -> list[Gradient]:
    """Gradients over all replicas and of regularizers, with the variables."""
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
    """The new states: means over replicas; a counter is the first one's."""
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
    """Those that have a gradient."""
    return [t for t in tf.nest.flatten(structure) if t.dtype.is_floating]


def _split(structure: Any, num_parts: int) -> list[Any]:
    """As many structures, of equal parts along axis 0; None stays None."""
    cut = [
        [None] * num_parts if t is None else tf.split(t, num_parts)
        for t in tf.nest.flatten(structure)
    ]
    pack = functools.partial(tf.nest.pack_sequence_as, structure)
    return [pack(part) for part in zip(*cut, strict=True)]


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

"""The forward and the backward pass of a batch, in micro-batches.

A function of the values of all variables that changes none, so that its ops
wait for what they need and for nothing else:

    stage 0   F0 F1 F2 F3                 B0 B1 B2 B3
    stage 1      F0 F1 F2 F3  loss  B0 B1 B2 B3

This is the schedule of GPipe (Huang et al., 2019). The loss waits for the
predictions for the whole batch, which costs nothing: the last stage goes
forward through all of it before it goes back. So the loss may be any function
of the batch. Activations are kept until the way back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist._tf.private import SEED_STATE_NAME, mask_of, set_mask
from tfdist.pipeline.stages import Stage, Values

Gradient = tf.Tensor | tf.IndexedSlices | None
# From predictions for the whole batch to a scalar.
Loss = Callable[[Any], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device does without a break: a stage, for one micro-batch.

    Attributes:
        device: Full name of the device.
        replica: Index of the replica.
        stage: Index of the stage.
        micro_batch: Index among the micro-batches of the replica.
        forward: Whether it is the forward pass.
        start: Seconds since the first work of the batch began.
        end: Seconds since then.
    """

    device: str
    replica: int
    stage: int
    micro_batch: int
    forward: bool
    start: float = 0.0
    end: float = 0.0


class Turns:
    """Has each device do one work after the other, as the schedule says.

    Else it would begin all that it can, and the first micro-batch would leave
    the first stage as late as the last one.

    Args:
        timed: Whether to read the clock of the device's machine when the
            inputs of a work are there and its turn has come, and when its
            outputs are there.

    Attributes:
        work: What was traced, without its times.
        times: Start and end of the first, of the second, and so on.
    """

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._last: dict[str, list[tf.Tensor]] = {}
        self.work: list[Work] = []
        self.times: list[tf.Tensor] = []

    @contextlib.contextmanager
    def turn(self, work: Work, needed: Any) -> Iterator[list[Any]]:
        """A scope for the ops of a work, on its device, after the one before.

        Args:
            work: What will be traced.
            needed: Structure of tensors: its inputs.

        Yields:
            A list to which the caller adds the outputs.
        """
        outputs: list[Any] = []
        self.work.append(work)
        with tf.device(work.device):
            with tf.control_dependencies(self._last.get(work.device, [])):
                start = self._now(needed)
                with tf.control_dependencies(start):
                    yield outputs
            self._last[work.device] = _tensors(outputs) + self._now(outputs)

    def _now(self, needed: Any) -> list[tf.Tensor]:
        """The time when all of `needed` is there, if it is asked for."""
        if not self._timed:
            return []
        with tf.control_dependencies(_tensors(needed)):
            time = tf.timestamp()
        self.times.append(time)
        return [time]


class Passes(NamedTuple):
    """What both passes of a batch give.

    Attributes:
        gradients: Of each stage, those of its weights.
        states: Of each stage, index of a state to its new value; only of those
            that have changed.
        y_pred: Predictions for the whole batch.
        masks: Keras' mask of each of them, or None.
        added_loss: What layers have added to the loss, a scalar.
        times: `Turns.times`.
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
    turns: Turns,
    scaled: Callable[[tf.Tensor], tf.Tensor],
    loss: Loss,
    values: list[Values],
    x: Any,
) -> Passes:
    """Runs both passes.

    Args:
        stages: The stages.
        devices: A row for each replica.
        num_micro_batches: Of each replica.
        turns: Keeps the devices in order.
        scaled: Scales a loss for the backward pass.
        loss: Loss of the predictions.
        values: Of each stage, on its device.
        x: Inputs; divisible by the number of all micro-batches.
    """
    num_parts = len(devices) * num_micro_batches
    weight = scaled(tf.constant(1 / num_parts))
    replicas = [
        _Replica(i, stages, row, values, turns, weight)
        for i, row in enumerate(devices)
    ]
    schedule = list(itertools.product(replicas, range(num_micro_batches)))
    with tf.device("CPU:0"):  # It was read here; only parts are sent.
        parts = _split(x, num_parts)
    y_preds = [
        replica.forward(k, part)
        for (replica, k), part in zip(schedule, parts, strict=True)
    ]
    with tf.device(stages[-1].device):
        y_pred, masks = _joined(y_preds)
        gradients = _gradients(lambda: scaled(loss(y_pred)), _floats(y_pred))
        parts = _split(gradients, num_parts)
    for (replica, k), part in zip(schedule, parts, strict=True):
        replica.backward(k, part)
    with tf.device(stages[-1].device):
        added = [tf.cast(x, tf.float32) for r in replicas for x in r.losses]
        added_loss = tf.add_n([tf.zeros([]), *added]) / num_parts
    return Passes(
        [
            _summed(i, stage, own.weights, replicas, scaled)
            for i, (stage, own) in enumerate(zip(stages, values, strict=True))
        ],
        [_changed(i, stage, replicas) for i, stage in enumerate(stages)],
        y_pred,
        masks,
        added_loss,
        turns.times,
    )


class _Forward(NamedTuple):
    """What the way back through a stage needs of the way forward."""

    tape: tf.GradientTape
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    losses: list[tf.Tensor]


class _Replica:
    """A copy of the pipeline, at work on its share of a batch.

    Gradients are taken stage by stage, each on its device; the backward ops of
    a tape over all stages would be on one.

    Attributes:
        initial_states: Of each stage, values of its states before the batch.
        states: The same, so far.
        gradients: Of each stage, those of its weights, summed so far.
        losses: What layers have added, in every micro-batch.
    """

    def __init__(
        self,
        index: int,
        stages: Sequence[Stage],
        devices: Sequence[str],
        values: list[Values],
        turns: Turns,
        weight: tf.Tensor,
    ) -> None:
        self._index = index
        self._stages = stages
        self._devices = devices
        self._turns = turns
        self._weight = weight
        self._kept: dict[tuple[int, int], _Forward] = {}
        copies = [
            _copy(stage, own, device, index)
            for stage, own, device in zip(stages, values, devices, strict=True)
        ]
        self._weights = [copy.weights for copy in copies]
        self.initial_states = [copy.states for copy in copies]
        self.states = list(self.initial_states)
        self.gradients = [[None] * len(copy.weights) for copy in copies]
        self.losses: list[tf.Tensor] = []

    def forward(self, micro_batch: int, x: Any) -> Any:
        """Takes a micro-batch through all stages; returns predictions."""
        for i in range(len(self._stages)):
            x = self._forward(i, micro_batch, x)
        return x

    def backward(self, micro_batch: int, gradients: list[Gradient]) -> None:
        """Takes it back, from the gradients of its predictions."""
        for i in reversed(range(len(self._stages))):
            gradients = self._backward(i, micro_batch, gradients)

    def _turn(
        self, i: int, micro_batch: int, forward: bool, needed: Any
    ) -> contextlib.AbstractContextManager[list[Any]]:
        work = Work(self._devices[i], self._index, i, micro_batch, forward)
        return self._turns.turn(work, needed)

    def _forward(self, i: int, micro_batch: int, inputs: Any) -> Any:
        stage, weights = self._stages[i], self._weights[i]
        sources = _floats(inputs) if i else []
        known = stage.known(Values(weights, self.states[i]))
        tape = tf.GradientTape(watch_accessed_variables=False)
        scope = keras.StatelessScope(known, collect_losses=True)
        with self._turn(i, micro_batch, True, inputs) as given:
            with tape, scope:
                tape.watch([*weights, *sources])
                outputs = stage.call(inputs, training=True)
            given.append(outputs)
        self.states[i] = [scope.get_current_value(v) for v in stage.states]
        self.losses += scope.losses
        self._kept[i, micro_batch] = _Forward(
            tape, sources, _floats(outputs), list(scope.losses)
        )
        return outputs

    def _backward(
        self, i: int, micro_batch: int, gradients: list[Gradient]
    ) -> list[Gradient]:
        """Gradients of the inputs of a stage, from those of its outputs."""
        tape, inputs, outputs, losses = self._kept.pop((i, micro_batch))
        reached = [
            pair
            for pair in zip(outputs, gradients, strict=True)
            if pair[1] is not None
        ]
        if not reached and not losses:
            return [None] * len(inputs)
        weights = self._weights[i]
        needed = [gradient for _, gradient in reached]
        with self._turn(i, micro_batch, False, needed) as given:
            reached += [(x, tf.cast(self._weight, x.dtype)) for x in losses]
            targets, seeds = zip(*reached, strict=True)
            found = tape.gradient(
                targets, [*weights, *inputs], output_gradients=seeds
            )
            before = self.gradients[i]
            self.gradients[i] = [
                _sum(*pair)
                for pair in zip(before, found[: len(weights)], strict=True)
            ]
            given += [self.gradients[i], found[len(weights) :]]
        return found[len(weights) :]


def _copy(stage: Stage, values: Values, device: str, index: int) -> Values:
    """The values, for a replica; each but the first draws other seeds.

    Where nothing is copied, the device is still said: a loop that reads a
    value of no said device would pass it through the default one.
    """
    with tf.device(device):
        return Values(
            [tf.identity(value) for value in values.weights],
            [
                _other_seed(value, index)
                if index and variable.path.endswith(SEED_STATE_NAME)
                else tf.identity(value)
                for variable, value in zip(
                    stage.states, values.states, strict=True
                )
            ],
        )


def _other_seed(state: tf.Tensor, index: int) -> tf.Tensor:
    seed = tf.random.fold_in(tf.cast(state, tf.int64), index)
    return tf.cast(seed, state.dtype)


def _summed(
    i: int,
    stage: Stage,
    weights: list[tf.Tensor],
    replicas: list[_Replica],
    scaled: Callable[[tf.Tensor], tf.Tensor],
) -> list[Gradient]:
    """Gradients over all replicas and of regularizers, with the variables."""

    def penalty() -> tf.Tensor:
        penalties = [
            variable.regularizer(weight)
            for variable, weight in zip(stage.weights, weights, strict=True)
            if variable.regularizer is not None
        ]
        return scaled(tf.add_n([tf.zeros([]), *penalties]))

    with tf.device(stage.device):
        of_replicas = [replica.gradients[i] for replica in replicas]
        return [
            functools.reduce(_sum, gradients)
            for gradients in zip(
                _gradients(penalty, weights), *of_replicas, strict=True
            )
        ]


def _changed(
    i: int, stage: Stage, replicas: list[_Replica]
) -> dict[int, tf.Tensor]:
    """The new states: means over replicas; a counter is the first one's."""
    with tf.device(stage.device):
        changed = {}
        for j, before in enumerate(replicas[0].initial_states[i]):
            after = [replica.states[i][j] for replica in replicas]
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


def _tensors(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [t for t in flat if t is not None]


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
    columns = list(zip(*map(tf.nest.flatten, parts), strict=True))
    masks = [
        None
        if mask_of(column[0]) is None
        else tf.concat([mask_of(t) for t in column], axis=0)
        for column in columns
    ]
    whole = tf.nest.pack_sequence_as(
        parts[0], [tf.concat(column, axis=0) for column in columns]
    )
    set_masks(whole, masks)
    return whole, masks


def set_masks(structure: Any, masks: list[tf.Tensor | None]) -> None:
    """Gives each tensor its mask, where a Keras loss looks for it."""
    for tensor, mask in zip(tf.nest.flatten(structure), masks, strict=True):
        if mask is not None:
            set_mask(tensor, mask)

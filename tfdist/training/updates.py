"""Applies and counts the updates of an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist.embeddings.routing import Route
from tfdist.training import exchange, optimizers
from tfdist.training.counters import Counters
from tfdist.training.exchange import Requests, StepGradients
from tfdist.training.fence import Fence
from tfdist.training.layout import Layout, Updated
from tfdist.training.replicas import Replicas

Gradients: TypeAlias = list[tuple[keras.Variable, tf.Tensor | None]]
Take: TypeAlias = Callable[[Optimizer, Gradients], None]


@dataclasses.dataclass(frozen=True)
class Update:
    """Applies and counts the updates of one optimizer."""

    optimizer: Optimizer
    layout: Layout
    counters: Counters

    def __call__(
        self,
        found: StepGradients,
        read: Sequence[tf.Tensor] = (),
        fence: Fence | None = None,
        following: Sequence[Route] = (),
    ) -> Requests:
        """Applies a step's gradients and counts it; see `exchange.push`."""
        if found.scale is not None:  # If it was too large, no update happens.
            finite = [
                tf.reduce_all(tf.math.is_finite(gradient))
                for gradient in (*found.dense, *found.rows)
                if gradient is not None
            ]
            found = dataclasses.replace(found, finite=tf.reduce_all(finite))
        arrived, requests = exchange.push(self.layout, found, fence, following)
        if found.finite is not None:
            self._adapt_scale(found.finite, found.scale)
        self.counters.count(
            self.layout.device_of, arrived, read, fence, found.finite
        )
        return requests

    def _adapt_scale(self, finite: tf.Tensor, used: tf.Tensor) -> None:
        """Adapts the loss scale to keep gradients finite, as Keras does.

        Workers that change the scale at the same time may undo each other's
        changes, which one of their next steps then repeats.
        """
        optimizer, device_of = self.optimizer, self.layout.device_of
        count = optimizer.step_counter.value
        scale = optimizer.dynamic_scale.value
        with tf.device(device_of(count)):
            after = tf.convert_to_tensor(count) + 1
            grows = finite & (after >= optimizer.dynamic_growth_steps)
            count.assign(tf.where(finite & ~grows, after, 0))
        with tf.device(device_of(scale)):
            now = tf.convert_to_tensor(scale)
            # If several find it too large at the same time, the first halves.
            lower = tf.where(finite, now, tf.minimum(now, used * 0.5))
            scale.assign(tf.where(grows, now * 2.0, lower))


def unscaled(found: StepGradients) -> StepGradients:
    """Undoes the loss scale, before gradients of replicas are added up."""
    scale = found.scale
    if scale is None:
        return found
    dense, rows = (
        [g if g is None else g / tf.cast(scale, g.dtype) for g in each]
        for each in (found.dense, found.rows)
    )
    return dataclasses.replace(found, dense=dense, rows=rows)


class UpdatesAtOnce:
    """Updates on replicas, each applied where the step calls its optimizer.

    Creates the slots of optimizers that were not compiled with the model.
    """

    def __init__(
        self,
        updated: Mapping[Optimizer, list[keras.Variable]],
        moving: Sequence[keras.Variable],
        replicas: Replicas,
        global_step: tf.Variable,
    ) -> None:
        self._moving, self._replicas = moving, replicas
        self._global_step = global_step
        self._updates = {}
        for optimizer, variables in updated.items():
            with replicas.strategy.scope(), keras.name_scope(optimizer.name):
                optimizers.build(optimizer, variables)
            layout = Layout(Updated(optimizer, variables), [], remote=False)
            counters = Counters(optimizer, None)
            self._updates[optimizer] = Update(optimizer, layout, counters)

    def of_share(self, size: tf.Tensor) -> Take:
        """Returns a `Take` for the gradients of a replica's `size` examples."""

        def take(optimizer: Optimizer, gradients: Gradients) -> None:
            update, replicas = self._updates[optimizer], self._replicas
            layout, own = update.layout, {id(v): g for v, g in gradients}
            none = Requests([], {s.device: {} for s in layout.servers})
            dense = [own.get(id(v)) for v in layout.dense]
            with keras.StatelessScope():
                now, rates, scale = update.counters.of_step()
                found = StepGradients(none, dense, [], [], rates, now, scale)
                found = exchange.over_replicas(
                    layout, unscaled(found), replicas, size
                )
                replicas.update(update, found)

        return take

    def end_step(self, deltas: list[tf.Tensor | None], size: tf.Tensor) -> None:
        """Adds the replicas' mean `deltas` to `moving`; counts the step."""
        moving = self._moving
        sums = {i for i, v in enumerate(moving) if v.aggregation == "sum"}
        means, _ = self._replicas.mean(deltas, size, sums)

        def end(means: Sequence[tf.Tensor | None]) -> None:
            for variable, delta in zip(moving, means, strict=True):
                if delta is not None:
                    exchange.add(variable.value, delta)
            self._global_step.assign_add(1)

        self._replicas.update(end, means)

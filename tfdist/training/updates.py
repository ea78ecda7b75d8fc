"""How an optimizer updates what it trains, and counts that."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist.embeddings.routing import Route
from tfdist.training import optimizers
from tfdist.training.conditional_updates import (
    adapt_scale,
    checked,
    unscaled,
)
from tfdist.training.counters import Counters
from tfdist.training.exchange import (
    Requests,
    StepGradients,
    over_replicas,
    push,
)
from tfdist.training.fence import Fence
from tfdist.training.layout import Layout, Updated
from tfdist.training.replicas import Replicas

Gradients: TypeAlias = list[tuple[keras.Variable, tf.Tensor | None]]
Take: TypeAlias = Callable[[Optimizer, Gradients], None]


@dataclasses.dataclass(frozen=True)
class Update:
    """How an optimizer updates what it trains."""

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
        """Applies and counts what a step has found; see `push`."""
        found = checked(found)
        arrived, requests = push(self.layout, found, fence, following)
        if found.finite is not None:
            adapt_scale(self.optimizer, self.layout, found)
        self.counters.count(
            self.layout.device_of, arrived, read, fence, found.finite
        )
        return requests


class UpdatesAtOnce:
    """Updates on replicas, each before what follows it in the step.

    Makes the slots of optimizers that were not compiled with the model.
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
            optimizers.check(optimizer, remote=False)
            with replicas.strategy.scope(), keras.name_scope(optimizer.name):
                optimizers.build(optimizer, variables)
            layout = Layout(Updated(optimizer, variables), [], remote=False)
            counters = Counters(optimizer, None)
            self._updates[optimizer] = Update(optimizer, layout, counters)

    def of_share(self, size: tf.Tensor) -> Take:
        """Takes what a replica finds in its share, of `size` examples."""

        def take(optimizer: Optimizer, gradients: Gradients) -> None:
            update = self._updates[optimizer]
            layout, own = update.layout, {id(v): g for v, g in gradients}
            none = Requests([], {s.device: {} for s in layout.servers})
            dense = [own.get(id(v)) for v in layout.dense]
            with keras.StatelessScope():
                now, rates, scale = update.counters.now()
                found = StepGradients(none, dense, [], [], rates, now, scale)
                found = unscaled(found)
                found = over_replicas(layout, found, self._replicas, size)
                self._replicas.update(update, found)

        return take

    def end_step(
        self, deltas: Sequence[tf.Tensor | None], size: tf.Tensor
    ) -> None:
        """Adds to `moving` the means of what replicas found, and counts."""
        pairs = zip(self._moving, deltas, strict=True)
        changed = [(v, delta) for v, delta in pairs if delta is not None]
        means, _ = self._replicas.mean([delta for _, delta in changed], size)

        def end(means: list[tf.Tensor]) -> None:
            for (variable, _), delta in zip(changed, means, strict=True):
                variable.value.assign_add(delta)
            self._global_step.assign_add(1)

        self._replicas.update(end, means)

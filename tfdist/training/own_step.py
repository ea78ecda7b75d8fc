"""A model's own `train_step` on replicas and on parameter servers.

With parameter servers or partitioned tables, it runs as a function of values,
and the gradients that it passes to `optimizer.apply`, once, are sent to the
variables' devices. Otherwise replicas apply each update at once (`updates.py`).
For a single process, see `keras_step.py`.
"""

from __future__ import annotations

import contextvars
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist._tf.private_checkpoints import Saveable
from tfdist._tf.private_keras import held_optimizers, trained
from tfdist.embeddings import lookups
from tfdist.embeddings.routing import Group
from tfdist.training import optimizer_checks
from tfdist.training.compiled_model import refuse_new_variables
from tfdist.training.exchange import Parameters, answers
from tfdist.training.forward import Forward, TapedScope
from tfdist.training.layout import Layout
from tfdist.training.metrics import num_examples
from tfdist.training.updates import Gradients, Take

_take: contextvars.ContextVar[Take | None] = contextvars.ContextVar(
    "take", default=None
)


class OwnStep:
    """The `train_step` of a model, with control over its updates."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._name = f"`train_step` of {type(model).__name__}"
        self._updates: list[tuple[Optimizer, Gradients]] = []
        self._means: dict[str, keras.metrics.Mean] = {}
        for optimizer in held_optimizers(model):
            _hand_over(optimizer)

    def trace(self, batch: Any) -> dict[str, Any]:
        """Returns the logs; records which optimizers update what."""
        self._updates, before = [], len(self._model.trainable_variables)
        try:
            return self.logs(batch, lambda *given: self._updates.append(given))
        finally:
            refuse_new_variables(self._model, before)

    def logs(self, batch: Any, take: Take) -> dict[str, Any]:
        """Runs `train_step` on a batch; its optimizers call `take`."""
        token = _take.set(take)
        try:
            logs = checked_logs(self._name, self._model.train_step(batch))
        finally:
            _take.reset(token)
        for name, mean in self._means.items():
            if not tf.is_tensor(logs[name]) or logs[name].shape.rank:
                raise ValueError(
                    f"{self._name} must return results of metrics, or scalars. "
                    f"Received: {name!r}, {logs[name]}. Use `tf.reduce_mean`."
                )
            mean.update_state(logs[name], sample_weight=num_examples(batch))
            logs[name] = mean.result()
        return logs

    def gradients(
        self,
        scope: TapedScope,
        batch: Any,
        layout: Layout,
        read: Parameters,
        tables: Sequence[Any],
    ) -> list[tf.Tensor | None]:
        """The gradients that the step applies to dense variables and rows."""
        sources = [*layout.dense, *(group.shards[0] for group in layout.groups)]
        values = [*read.values[: len(layout.dense)], *read.rows]
        for variable, value in zip(sources, values, strict=True):
            scope.tape(variable, value)
        taken: dict[int, tf.Tensor | None] = {}

        def rows_of(group: Group) -> tf.Tensor:
            return scope.get_current_value(group.shards[0])

        def take(_: Optimizer, gradients: Gradients) -> None:
            taken.update((id(v), gradient) for v, gradient in gradients)
            scope.has_ended = True

        given = answers(layout, read, tables, rows_of)
        with scope, lookups.answered_by(given):
            self.logs(batch, take)
        given.check_all_given()
        return [taken.get(id(v)) for v in sources]

    def means(
        self, forward: Forward, states: Sequence[keras.Variable]
    ) -> list[keras.Variable]:
        """Creates means for non-metric logs; returns their variables."""
        names = forward.no_results(states)
        means = {name: keras.metrics.Mean(name=name) for name in names}
        self._means |= means
        return [v for mean in means.values() for v in mean.variables]

    def updated(self) -> dict[Optimizer, list[keras.Variable]]:
        """The variables of each optimizer, in the order of their use."""
        found: dict[Optimizer, dict[int, keras.Variable]] = {}
        for optimizer, gradients in self._updates:
            own = found.setdefault(optimizer, {})
            own.update((id(v), v) for v, _ in gradients)
        return {each: list(own.values()) for each, own in found.items()}

    def used(self, seeds: Sequence[keras.Variable]) -> list[tf.Variable]:
        """The variables that steps continue from: slots and `seeds`."""
        slots = [v for optimizer in self.updated() for v in optimizer.variables]
        return [v.value for v in (*seeds, *slots)]

    def check(self, forward: Forward, has_replicas: bool) -> None:
        """Raises `ValueError` for a step that only works in one process."""
        compiled, updated = self._model.optimizer, self.updated()
        for each in updated:
            optimizer_checks.check_overridden(each)
        known = {id(v) for v in self._model.trainable_variables}
        slots = {id(v) for each in (compiled, *updated) for v in each.variables}
        what = ""
        for variable in forward.updated:
            if id(variable) in known | slots:
                what = (
                    f"assigns {variable.path!r}, which its optimizer updates "
                    "unless its layer has `trainable = False`"
                )
        for variable in itertools.chain.from_iterable(updated.values()):
            if id(variable) not in known:
                what = f"updates {variable.path!r}, not a trainable weight"
        used = [optimizer for optimizer, _ in self._updates]
        if used != [compiled] and (forward.tables or not has_replicas):
            what = (
                f"applies gradients {len(used)} times (by "
                f"{[each.name for each in used]}), not once by the compiled "
                "optimizer"
            )
        where, others = "between replicas", ""
        if has_replicas and forward.tables:
            where += " of a model with a PartitionedEmbedding"
        elif not has_replicas:
            where = "on parameter servers"
            others = "by all-reduce, mirrored devices or "
        if what:
            raise ValueError(
                f"The {self._name} {what}, which does not work {where}. "
                f"Override `compute_loss` instead, or train {others}in one "
                "process."
            )


def checked_logs(what: str, logs: Any) -> dict[str, Any]:
    """Converts a model's logs to tensors; raises an error for invalid logs."""
    if not isinstance(logs, Mapping):
        raise TypeError(
            f"{what} must return a dictionary of logs. Received: {logs!r}."
        )
    if "global_step" in logs:
        raise ValueError(
            f"{what} must not return a log called 'global_step', a name that "
            "is reserved in results."
        )
    logs = tf.nest.map_structure(tf.convert_to_tensor, dict(logs))
    for name, log in logs.items():
        for part in tf.nest.flatten(log):
            if not part.shape.is_fully_defined():
                raise ValueError(
                    f"{what} must return scalars, or arrays of a known "
                    f"shape. Received: {name!r} of shape {part.shape}. Use "
                    "`tf.reduce_mean`."
                )
    return logs


def with_others(
    named: Mapping[str, Saveable], used: Sequence[tf.Variable]
) -> dict[str, Saveable]:
    """All that a checkpoint stores: `named`, and other variables `used`."""
    known: set[int] = set()
    for whole in named.values():
        known |= {id(v) for v in getattr(whole, "variables", [whole])}
    every = dict(named)
    for variable in used:
        if id(variable) not in known:
            name = own = "train_step/" + variable.name.removesuffix(":0")
            numbers = itertools.count(1)
            while name in every:
                name = f"{own}_{next(numbers)}"
            every[name] = variable
    return every


def _hand_over(optimizer: Optimizer) -> None:
    """Makes an optimizer pass gradients to the caller of an `OwnStep`."""
    own = optimizer.apply

    def apply(
        grads: Sequence[Any],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        take = _take.get()
        if take is None:
            own(grads, trainable_variables)
            return
        variables = trainable_variables or trained(optimizer)
        # Sums the slices of each row of `IndexedSlices`.
        gradients = [g if g is None else tf.convert_to_tensor(g) for g in grads]
        take(optimizer, list(zip(variables, gradients, strict=True)))

    optimizer.apply = apply

"""One step of a compiled Keras model, as a function of values.

Keras' own `train_step` updates metrics and counters in place, which loses
updates when workers share them: `keras.Variable.assign_add` reads, adds, then
writes. Here a step takes metric states as arguments and returns the new ones;
it makes lasting changes only by operations that the variable's own device
executes atomically.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist._tf.private import single_replica_view
from tfdist._tf.private_checkpoints import Saveable
from tfdist.data import input_fns
from tfdist.embeddings import lookups
from tfdist.training import compiled_model, exchange, optimizer_checks
from tfdist.training.aggregation import Contribution
from tfdist.training.compiled_model import overrides
from tfdist.training.counters import Counters, step_seeds
from tfdist.training.exchange import Lookups, Parameters, Requests
from tfdist.training.fence import Fence
from tfdist.training.forward import TapedScope
from tfdist.training.metrics import (
    MetricStates,
    States,
    build_metrics,
    non_additive,
    num_examples,
)
from tfdist.training.own_step import OwnStep, with_others
from tfdist.training.passes import EVALUATION, PREDICTION, TRAINING, Passes
from tfdist.training.replicas import Replicas
from tfdist.training.staleness import StalenessCounter
from tfdist.training.updates import Update, UpdatesAtOnce, unscaled

Batch = Any


class StartedStep(NamedTuple):
    """A step that has its batch and possibly its parameters."""

    batch: Batch
    step: tf.Tensor
    seeds: list[tf.Tensor]
    lookups: Lookups
    requests: Requests | None = None  # None: not sent to the servers yet.
    read: Parameters | None = None
    before: tf.Tensor | None = None  # The result of `StalenessCounter.read`.


class ModelStep(MetricStates):
    """Training and evaluation steps of one compiled Keras model.

    Metric states are a list of tensors that can be summed over any split of the
    batches. A state that cannot (a maximum) is kept in the metric's variable
    from batch to batch, which only works in one process.

    Args:
        model: A compiled and built `keras.Model`. The step calls its
            `compute_loss` and `compute_metrics`, or an overridden `train_step`.
        element_spec: `dataset.element_spec` of the batches.
        global_step: Scalar int64 variable that counts applied steps; only
            training needs it.
        remote: Whether the variables live in other processes.
        replicas: The replicas that run each step in sync, each in its replica
            context. Default: none.
        metrics: Whether batches have targets; False for `predict` only.

    Attributes:
        staleness: Counts the staleness of updates; None unless `remote`.
        update: Applies gradients, in training.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: `model` is not compiled or not built; its `train_step` does
            what only a single process can do; batches do not match its inputs;
            ids of a lookup or results depend on something they must not; or
            states of a metric cannot be summed where they have to be.

    >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> data = tf.data.Dataset.from_tensors((tf.ones([4, 2]), tf.ones([4, 1])))
    >>> step = tfdist.training.ModelStep(model, data.element_spec)
    >>> step.predict(next(iter(data))).shape
    TensorShape([4, 1])
    """

    def __init__(
        self,
        model: keras.Model,
        element_spec: Any,
        *,
        global_step: tf.Variable | None = None,
        remote: bool = False,
        replicas: Replicas | None = None,
        metrics: bool = True,
    ) -> None:
        self.model = compiled_model.checked_model(model)
        self.single_steps = False
        trains = global_step is not None and metrics
        own = trains and overrides(model, "train_step")
        self._own = OwnStep(model) if own else None
        input_fns.check_batches(model, element_spec, metrics and not own)
        if remote:
            optimizer_checks.check(model.optimizer)
        if trains:
            optimizer_checks.check_overridden(model.optimizer)
        if trains and replicas and not own:
            compiled_model.check_sums(model)
        self._remote, self._replicas = remote, replicas
        self._element_spec = element_spec
        self.staleness: StalenessCounter | None = None
        if metrics and not own:
            build_metrics(model, element_spec)
        self._passes = Passes(model, self._own, remote, bool(replicas))
        self._seeds, metric_variables = self._passes.seeds, self._passes.metrics
        method = "train_step" if own else "compute_metrics"
        own_results = metrics and overrides(model, method)
        modes = [TRAINING] if trains else []
        is_evaluated = metrics and remote and not overrides(model, "test_step")
        if (is_evaluated and not own) or (own_results and not trains):
            modes.append(EVALUATION)
        forwards = [self._passes.forward(m, element_spec) for m in modes]
        self._many, kept, what = remote or bool(replicas), set(), ""
        if own_results:
            what = f"`{method}` of {type(model).__name__}"
        if metrics:
            kept = non_additive(model, metric_variables, forwards, self._many)
        super().__init__(
            model,
            metric_variables,
            kept=kept,
            trains=trains,
            results=[
                f.results(metric_variables, what) for f in forwards if what
            ],
            has_loss=not own,
        )
        if global_step is not None and trains:
            self._prepare_training(global_step, element_spec)

    def _prepare_training(
        self, global_step: tf.Variable, element_spec: Any
    ) -> None:
        model, replicas = self.model, self._replicas
        if self._remote:
            self.staleness = StalenessCounter(global_step)
        self._counters = Counters(model.optimizer, global_step)
        forward = self._passes.forward(TRAINING, element_spec)
        self._layout = self._passes.layout(
            TRAINING, element_spec, self._counters.reads
        )
        forward.check_stand_ins()
        if self._many:
            forward.check_draws()
        else:  # Steps of one dispatch might draw the same random numbers.
            self.single_steps = bool(forward.draws())
        compiled_model.refuse_unlisted(model, *forward.unlisted())
        self._layout.check_read(forward.read)
        self._layout.check_updated(forward.updated)
        self.update = Update(model.optimizer, self._layout, self._counters)
        self._at_once: UpdatesAtOnce | None = None
        if self._own and replicas and not self.tables:
            self._at_once = UpdatesAtOnce(
                self._own.updated(), self._layout.moving, replicas, global_step
            )
        self._compute = compiled_model.compiled_computation(
            self._gradients,
            model,
            element_spec,
            has_tables=bool(self.tables),
            has_replicas=bool(replicas),
            at_once=bool(self._at_once),
            keeps_seed=not self._many,
        )

    def variables(self, named: Mapping[str, Saveable]) -> dict[str, Saveable]:
        """Everything a checkpoint stores; see `KerasStep.variables`."""
        if not self._own:
            return dict(named)
        return with_others(named, self._own.used(self._seeds))

    @property
    def tables(self) -> list[Any]:
        """The partitioned tables that training looks up."""
        return self._passes.tables[TRAINING]

    def train(
        self,
        batch: Batch,
        step: tf.Tensor,
        states: States,
        fence: Fence | None = None,
        contribution: Contribution | None = None,
    ) -> States:
        """Reads parameters, computes and applies gradients, counts the step.

        Args:
            batch: `x`, `(x, y)` or `(x, y, sample_weight)`.
            step: Scalar int64: the number of this step in the job, from 0.
                Schedules and Adam's bias correction depend on it, and so do the
                seeds of random layers: no two workers share a dropout mask.
            states: Metric states before the step; returns those after it.
            fence: The fence that updates must pass on each parameter server.
            contribution: Receives the gradients instead of `update`.
        """
        begun = self.begin(batch, step, contribution)
        if self._at_once:
            return self._train_at_once(batch, begun.seeds, states)
        return self.end(begun, states, fence, contribution)[0]

    def begin(
        self,
        batch: Batch,
        step: tf.Tensor,
        contribution: Contribution | None = None,
    ) -> StartedStep:
        """Prepares a step that has not read anything yet; see `train`."""
        forward = self._passes.forward(TRAINING, batch)
        # No two replicas or workers draw the same random numbers.
        one_of = self._replicas or contribution
        own = [one_of.index()] if one_of else []
        seeds = step_seeds(self._seeds, step, *own)
        calls = forward.calls(batch, seeds, self._replicas)
        found = exchange.looked_up(self._layout, calls)
        return StartedStep(batch, step, seeds, found)

    def read(self, begun: StartedStep) -> StartedStep:
        """Reads the parameters of a step unless it already has them."""
        if begun.read:
            return begun
        before, found = self.staleness and self.staleness.read(), begun.lookups
        asked = begun.requests or exchange.request(self._layout, found.routes)
        read = exchange.pull(self._layout, found, asked)
        return begun._replace(requests=asked, read=read, before=before)

    def end(
        self,
        begun: StartedStep,
        states: States,
        fence: Fence | None = None,
        contribution: Contribution | None = None,
        following: Iterable[StartedStep] = (),
    ) -> tuple[States, StartedStep | None]:
        """Completes a step; see `train`.

        The ids that the next step of `following` looks up are sent along with
        the gradients. That step is returned as well, for a later `end`.
        """
        layout, replicas = self._layout, self._replicas
        batch, step, seeds, _, requests, read, before = self.read(begun)
        assert requests
        assert read
        iteration, rates, scale = self._counters.of_step(
            step, read.values[len(layout.dense) + len(layout.moving) :]
        )
        dense, rows, deltas, states = self._compute(batch, seeds, read, states)
        found = exchange.StepGradients(
            requests, dense, rows, deltas, rates, iteration, scale
        )
        found, begun_next = unscaled(found), None
        if replicas:
            size = num_examples(batch)
            replicas.update(
                lambda found: self.update(found, _flat(batch)),
                exchange.over_replicas(layout, found, replicas, size),
            )
        elif contribution:
            contribution(found, fence)
        else:
            begun_next = next(iter(following), None)
            routes = begun_next.lookups.routes if begun_next else ()
            asked = self.update(found, _flat(batch), fence, routes)
            begun_next = begun_next and begun_next._replace(requests=asked)
        if self.staleness:
            self.staleness.count(before)
        return states, begun_next

    def _train_at_once(
        self, batch: Batch, seeds: list[tf.Tensor], states: States
    ) -> States:
        """Runs a `train_step` on replicas, each update where it is called."""
        assert self._own
        assert self._at_once
        self._passes.use_seed_generator()
        before = [tf.convert_to_tensor(v.value) for v in self._layout.moving]
        moving = zip(self._layout.moving, before, strict=True)
        drawn = zip(self._seeds, seeds, strict=True)
        scope = self._scope(states, [*moving, *drawn])
        for variable in self._layout.dense:
            # Keras looks for regularized variables only in the scope.
            scope.state_mapping[id(variable)] = variable.value
        size = num_examples(batch)
        with scope, single_replica_view():
            self._own.logs(batch, self._at_once.of_share(size))
        self._at_once.end_step(self._deltas(scope, before), size)
        return self._after(scope, states, tf.zeros([]), batch)

    def _gradients(
        self,
        batch: Batch,
        seeds: list[tf.Tensor],
        read: Parameters,
        states: States,
    ) -> tuple[list[Any], list[tf.Tensor], list[Any], States]:
        """The part of a step that touches no variable.

        Returns `dense`, `rows`, `deltas` of `StepGradients`, and metric states.
        """
        layout = self._layout
        self._passes.use_seed_generator()
        values = zip(layout.reads, read.values, strict=True)
        drawn = zip(self._seeds, seeds, strict=True)
        scope = self._scope(states, [*values, *drawn])
        before = [scope.get_current_value(v) for v in layout.moving]
        forward = self._passes.forward(TRAINING, batch)
        given = batch, layout, read, forward.tables
        if self._own:
            loss, gradients = tf.zeros([]), self._own.gradients(scope, *given)
        else:
            loss, gradients = compiled_model.gradients_of_loss(
                self.model, scope, *given
            )
        if all(gradient is None for gradient in gradients):
            raise ValueError(
                "The loss depends on no trainable variable: every gradient is "
                f"None. Variables: {[v.path for v in layout.dense]}. If the "
                "model uses them in a `tf.function`, remove that decorator."
            )
        if not self._own:
            layout.warn_of_missing(gradients)
        num = len(layout.dense)
        rows = [
            tf.zeros_like(row) if g is None or group.part is None else g
            for row, g, group in zip(
                read.rows, gradients[num:], layout.groups, strict=True
            )
        ]
        after = self._after(scope, states, loss, batch)
        return gradients[:num], rows, self._deltas(scope, before), after

    def _deltas(
        self, scope: TapedScope, before: list[tf.Tensor]
    ) -> list[tf.Tensor | None]:
        """Returns `StepGradients.deltas`."""
        layout = self._layout

        def change(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor | None:
            if new is old:
                return None
            return new if layout.assigns else exchange.difference(new, old)

        values = map(scope.get_current_value, layout.moving)
        return list(map(change, values, before))

    def evaluate(self, batch: Batch, states: States) -> States:
        """Updates metric states with one batch; changes nothing else.

        Raises `ValueError` if the model overrides `test_step`.
        """
        compiled_model.refuse_test_step(self.model)
        if self._own:
            compiled_model.refuse_evaluation(self.model)
        # Keras weights losses of single outputs by the static batch size, if
        # known. It must be the dataset's, not that of this batch.
        flat, spec = _flat(batch), self._element_spec
        if len(_flat(spec)) != len(flat):  # Only one may have sample weights.
            spec = batch
        relaxed = [
            tf.compat.v1.placeholder_with_default(
                t, t.shape.most_specific_compatible_shape(s.shape)
            )
            for t, s in zip(flat, _flat(spec), strict=True)
        ]
        # A ragged or sparse tensor takes the size from `spec`, too.
        batch = tf.nest.pack_sequence_as(spec, relaxed, expand_composites=True)
        with self._reading(EVALUATION, batch, states) as scope:
            loss, _ = compiled_model.forward_pass(self.model, batch, False)
        return self._after(scope, states, loss, batch)

    def evaluate_alone(self, batch: Batch) -> tf.Tensor:
        """Returns the packed metric states of one batch."""
        return self.pack(self.evaluate(batch, self.zero_states()))

    def predict(self, batch: Batch) -> Any:
        """Returns the result of the model's `predict_step` for one batch."""
        with self._reading(PREDICTION, batch, self.zero_states()):
            return self.model.predict_step(batch)

    @contextlib.contextmanager
    def _reading(
        self, mode: str, batch: Batch, states: States
    ) -> Iterator[TapedScope]:
        """A scope for inference, which takes one message from each server."""
        if not self._remote:
            # Keras looks for these variables only in the scope.
            regularized = [
                (v, tf.convert_to_tensor(v.value))
                for v in self.model.trainable_variables
                if v.regularizer is not None
            ]
            with self._scope(states, regularized) as scope:
                yield scope
            return
        layout = self._passes.layout(mode, batch)
        forward = self._passes.forward(mode, batch)
        seeds = step_seeds(self._seeds)
        found = exchange.looked_up(layout, forward.calls(batch, seeds, None))
        requests = exchange.request(layout, found.routes)
        read = exchange.pull(layout, found, requests)
        given = exchange.answers(layout, read, forward.tables)
        values = zip(layout.reads, read.values, strict=True)
        drawn = zip(self._seeds, seeds, strict=True)
        scope = self._scope(states, [*values, *drawn])
        with scope, lookups.answered_by(given):
            yield scope
        given.check_all_given()


def _flat(batch: Any) -> list[Any]:
    return tf.nest.flatten(batch, expand_composites=True)

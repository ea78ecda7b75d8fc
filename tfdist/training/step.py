"""One step of a compiled Keras model, as a function of values.

Keras' own `train_step` updates metric and counter variables as it goes, which
loses updates when several workers share them: `keras.Variable.assign_add`
reads, adds, then writes. Here a step takes the states of its metrics and
returns the new ones (design decision D3); what it does change for good, it
changes by operations that the variable's own device executes atomically.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.data import input_fns
from tfdist.embeddings import lookups
from tfdist.training import optimizers
from tfdist.training.compiled_model import (
    checked_model,
    compiled_computation,
    forward_pass,
    overrides,
    refuse_own,
    specs,
)
from tfdist.training.conditional_updates import conditional_update
from tfdist.training.counters import Counters, step_seeds
from tfdist.training.exchange import (
    Parameters,
    StepGradients,
    answers,
    over_replicas,
    pull,
    push,
)
from tfdist.training.fence import Fence
from tfdist.training.forward import Forward
from tfdist.training.layout import Layout, is_seed
from tfdist.training.metric_states import MetricStates, States, num_examples
from tfdist.training.metrics import (
    build_metrics,
    check_metric_names,
    no_sums,
)
from tfdist.training.replicas import Replicas
from tfdist.training.staleness import StalenessCounter

# A model may look up other tables in each.
_TRAINING, _EVALUATION, _PREDICTION = "training", "evaluation", "prediction"

Batch = Any


class ModelStep(MetricStates):
    """Training and evaluation steps of one compiled Keras model.

    Metric states travel as a list of tensors that add up: the sum over any
    split of the batches is the state of them all. Where it is not (a maximum),
    one process hands the state on from batch to batch, in the metric's
    variable; several tasks refuse the metric.

    Args:
        model: A compiled, built `keras.Model`. Its `compute_loss` and
            `compute_metrics` are used. One that overrides `train_step` or
            `test_step` is for `KerasStep`.
        element_spec: `tf.TypeSpec` structure of one batch, as
            `dataset.element_spec` gives it; metrics are built from it.
        global_step: Scalar int64 variable that counts applied steps; only
            training needs it.
        remote: Whether the variables live in other processes.
        replicas: Those that run each step together with this one. Then a step
            runs in the context of a replica. Default: none.
        metrics: Whether batches have targets; False for `predict` alone.

    Attributes:
        model: The model.
        staleness: What counts the staleness of updates; None unless `remote`.

    Raises:
        TypeError: `model` is no Keras model.
        ValueError: `model` is not compiled or not built; it overrides
            `train_step`, and is to be trained; the batches are not what it
            reads; ids of a table's lookup, or results, depend on what they
            must not; states of a metric do not add up where they must.

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
        self.model = checked_model(model)
        input_fns.check_batches(model, element_spec, targets=metrics)
        trains = global_step is not None and metrics
        if trains:
            refuse_own(model, "train_step", "compute_loss")
        optimizers.check(model.optimizer, remote)
        self._remote = remote
        self._replicas = replicas
        self._forwards: dict[Any, Forward] = {}
        self._tables: dict[str, list[Any]] = {}
        self._layouts: dict[str, Layout] = {}
        self._shapes = [s.shape for s in _flat(element_spec)]
        self.staleness: StalenessCounter | None = None
        if metrics:
            build_metrics(model, element_spec)
            check_metric_names(model)
        self._metrics = list(model.metrics_variables)
        self._seeds = [v for v in model.non_trainable_variables if is_seed(v)]
        own_results = metrics and overrides(model, "compute_metrics")
        modes = [_TRAINING] if trains else []
        is_evaluated = metrics and remote and not overrides(model, "test_step")
        if is_evaluated or (own_results and not trains):
            modes.append(_EVALUATION)
        forwards = [self._forward(mode, element_spec) for mode in modes]
        must_add_up, results = bool(remote or replicas), None
        if own_results:
            what = f"`compute_metrics` of {type(model).__name__}"
            results = forwards[0].results(self._metrics, what)
        super().__init__(
            model,
            self._metrics,
            kept=no_sums(model, self._metrics, forwards, must_add_up)
            if metrics
            else set(),
            trains=trains,
            results=results,
        )
        if global_step is not None and trains:
            self._prepare_training(global_step, element_spec)

    def _prepare_training(
        self, global_step: tf.Variable, element_spec: Any
    ) -> None:
        model = self.model
        if self._remote:
            self.staleness = StalenessCounter(global_step)
        self._counters = Counters(model.optimizer, global_step)
        self._layout = self._layout_for(_TRAINING, element_spec)
        self._layout.check_read(self._forward(_TRAINING, element_spec).read)
        self._compute = compiled_computation(
            self._gradients,
            model,
            element_spec,
            has_tables=bool(self.tables),
            has_replicas=bool(self._replicas),
        )
        self._conditional = conditional_update(model.optimizer, self._layout)

    @property
    def tables(self) -> list[Any]:
        """The partitioned tables that training looks up."""
        return self._tables[_TRAINING]

    def _forward(self, mode: str, batch: Any) -> Forward:
        """The graph of a pass over batches like `batch`, or of its spec."""
        spec = specs(batch)
        key = mode, repr([(s.shape, s.dtype) for s in _flat(spec)])
        while key not in self._forwards:
            with tf.init_scope():
                forward = self._traced(mode, spec)
            own = [*self.model.variables, *self._seeds, *self._metrics]
            known = {id(v) for v in own}
            others = [v for v in forward.updated if id(v) not in known]
            # Those of Keras' global generator, and of metrics not listed.
            self._seeds += [v for v in others if is_seed(v)]
            self._metrics += [v for v in others if not is_seed(v)]
            if not others:
                self._forwards[key] = forward
                tables = list(dict.fromkeys(forward.tables))
                self._tables.setdefault(mode, tables)
        return self._forwards[key]

    def _traced(self, mode: str, spec: Any) -> Forward:
        model = self.model

        def run(batch: Batch) -> Mapping[str, Any]:
            if mode == _PREDICTION:
                model.predict_step(batch)
                return {}
            return forward_pass(model, batch, mode == _TRAINING)[1]

        fixed = [v for v in model.non_trainable_variables if not is_seed(v)]
        # Slots are none of a model's business.
        scalars = [v for v in model.optimizer.variables if not len(v.shape)]
        return Forward(
            run,
            spec,
            lambda *number: step_seeds(self._seeds, *number),
            (2 if self._replicas else 1) if mode == _TRAINING else 0,
            [*model.trainable_variables, *fixed, *self._metrics, *scalars],
        )

    def _layout_for(self, mode: str, batch: Batch) -> Layout:
        """Where the variables are that a pass reads."""
        if mode not in self._layouts:
            self._forward(mode, batch)
            every = itertools.chain.from_iterable(self._tables.values())
            self._layouts[mode] = Layout(
                self.model,
                self._tables[mode],
                remote=self._remote,
                others=list(every),
                rates=self._counters.rates if mode == _TRAINING else (),
            )
        return self._layouts[mode]

    def train(
        self,
        batch: Batch,
        step: tf.Tensor,
        states: States,
        fence: Fence | None = None,
    ) -> States:
        """Reads the parameters, computes gradients, applies and counts them.

        Args:
            batch: `x`, `(x, y)` or `(x, y, sample_weight)`.
            step: Scalar int64: the number of this step in the job, from 0.
                Dropout and other random layers draw from a seed of this step,
                so two workers never share a mask; learning-rate schedules and
                Adam's bias correction count by it.
            states: Metric states before the step.
            fence: What the updates must pass on each parameter server.

        Returns:
            Metric states after the step.
        """
        layout, replicas = self._layout, self._replicas
        before = self.staleness and self.staleness.read()
        # No two replicas draw the same random numbers.
        number = [step, *([replicas.index()] if replicas else [])]
        calls = self._forward(_TRAINING, batch).calls(batch, number)
        read, requests = pull(layout, calls)
        iteration = self._counters.iteration(step, not self._conditional)
        num = len(layout.dense) + len(layout.moving)
        rates = self._counters.learning_rates(iteration, read.values[num:])
        read = read._replace(values=read.values[:num])
        dense, rows, deltas, states = self._compute(batch, number, read, states)
        found = StepGradients(requests, dense, rows, deltas, rates, iteration)
        if replicas:
            replicas.update(
                lambda found: self._update(found, batch),
                over_replicas(layout, found, replicas, num_examples(batch)),
            )
        else:
            self._update(found, batch, fence)
        if self.staleness:
            self.staleness.count(before)
        return states

    def _update(
        self, found: StepGradients, batch: Batch, fence: Fence | None = None
    ) -> None:
        """Applies and counts what a step has found."""
        arrived, is_update = {}, None
        if self._conditional:
            is_update = self._conditional(dataclasses.replace(found, deltas=[]))
            pairs = zip(self._layout.moving, found.deltas, strict=True)
            for variable, delta in pairs:
                variable.value.assign_add(delta)
        else:
            arrived = push(self._layout, found, fence)
        self._counters.count(
            self._layout.device_of, arrived, _flat(batch), fence, is_update
        )

    def _gradients(
        self,
        batch: Batch,
        number: list[tf.Tensor],
        read: Parameters,
        states: States,
    ) -> tuple[list[Any], list[tf.Tensor], list[tf.Tensor], States]:
        """The part of a step that touches no variable.

        Returns `StepGradients.dense`, `rows`, `deltas`, and metric states.
        """
        layout = self._layout
        variables = [*layout.dense, *layout.moving]
        values = list(zip(variables, read.values, strict=True))
        num = len(layout.dense)
        seeds = step_seeds(self._seeds, *number)
        scope = self._scope(states, [*values, *seeds])
        tables = self._forward(_TRAINING, batch).tables
        with scope, tf.GradientTape() as tape:
            watched = [*read.values[:num], *read.rows]
            tape.watch(watched)
            given = answers(layout, read, tables)
            with lookups.answered_by(given):
                loss, _ = forward_pass(
                    self.model, batch, True, tape.stop_recording()
                )
            given.check_all_given()
            # Keras divides its own losses by this, where it sees replicas.
            loss *= tf.distribute.get_strategy().num_replicas_in_sync
            scaled_loss = self.model.optimizer.scale_loss(loss)
        gradients = [
            # `IndexedSlices` are summed up, row by row.
            g if g is None else tf.convert_to_tensor(g)
            for g in tape.gradient(scaled_loss, watched)
        ]
        if all(gradient is None for gradient in gradients):
            raise ValueError(
                "The loss depends on no trainable variable: every gradient is "
                f"None. Variables: {[v.path for v in layout.dense]}."
            )
        rows = [
            tf.zeros_like(row) if gradient is None else gradient
            for row, gradient in zip(read.rows, gradients[num:], strict=True)
        ]
        deltas = [scope.get_current_value(v) - old for v, old in values[num:]]
        after = self._after(scope, states, loss, batch)
        return gradients[:num], rows, deltas, after

    def evaluate(self, batch: Batch, states: States) -> States:
        """Updates metric states by one batch; changes nothing else.

        Raises:
            ValueError: the model overrides `test_step`.
        """
        refuse_own(self.model, "test_step", "compute_metrics")
        # Keras weighs losses of single outputs by a batch's static size, if
        # any: the dataset's, not that of the batch at hand.
        relaxed = [
            tf.compat.v1.placeholder_with_default(
                t, t.shape.most_specific_compatible_shape(shape)
            )
            for t, shape in zip(_flat(batch), self._shapes, strict=True)
        ]
        batch = tf.nest.pack_sequence_as(batch, relaxed, expand_composites=True)
        with self._reading(_EVALUATION, batch, states) as scope:
            loss, _ = forward_pass(self.model, batch, False)
        return self._after(scope, states, loss, batch)

    def evaluate_alone(self, batch: Batch) -> tf.Tensor:
        """Packed metric states of one batch."""
        return self.pack(self.evaluate(batch, self.zero_states()))

    def predict(self, batch: Batch) -> Any:
        """What the model's `predict_step` returns for one batch."""
        with self._reading(_PREDICTION, batch, self.zero_states()):
            return self.model.predict_step(batch)

    @contextlib.contextmanager
    def _reading(
        self, mode: str, batch: Batch, states: States
    ) -> Iterator[keras.StatelessScope]:
        """A scope for inference; from each server it reads one message."""
        if not self._remote:
            # Keras looks for these in the scope alone.
            regularized = [
                (v, tf.convert_to_tensor(v.value))
                for v in self.model.trainable_variables
                if v.regularizer is not None
            ]
            with self._scope(states, regularized) as scope:
                yield scope
            return
        layout = self._layout_for(mode, batch)
        forward = self._forward(mode, batch)
        read, _ = pull(layout, forward.calls(batch, []))
        given = answers(layout, read, forward.tables)
        values = zip(layout.reads, read.values, strict=True)
        scope = self._scope(states, [*values, *step_seeds(self._seeds)])
        with scope, lookups.answered_by(given):
            yield scope
        given.check_all_given()


def _flat(batch: Any) -> list[Any]:
    return tf.nest.flatten(batch, expand_composites=True)

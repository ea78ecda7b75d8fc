"""One step of a compiled Keras model, as a function of values.

Keras' own `train_step` updates metric and counter variables as it goes, which
loses updates when several workers share them: `keras.Variable.assign_add`
reads, adds, then writes. Here a step takes the states of its metrics and
returns the new ones (design decision D3); what it does change for good, it
changes by operations that the variable's own device executes atomically.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf import private
from tfdist._tf.private import SEED_STATE_NAME
from tfdist.data import input_fns
from tfdist.embeddings import lookups
from tfdist.training import compiled_model, gates, optimizers
from tfdist.training.exchange import Exchange, Pulled
from tfdist.training.fence import Fence
from tfdist.training.forward import Forward
from tfdist.training.replicas import Replicas, mean_to_sum
from tfdist.training.staleness import StalenessCounter

# A model may look up other tables in each.
_TRAINING, _EVALUATION, _PREDICTION = "training", "evaluation", "prediction"

_log = logging.getLogger(__name__)

Batch = Any
States = list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class _StepGradients:
    """What a step has found out, before it changes anything.

    Attributes:
        pulled: What it has read.
        gradients: Of the variables read as a whole, None where there is none.
        rows: Gradients of the rows of each group of tables.
        deltas: What to add to each moving average.
        rates: Learning rate of each part of the optimizer.
        iteration: The optimizer's iteration.
    """

    pulled: Pulled
    gradients: list[tf.Tensor | None]
    rows: list[tf.Tensor | None]
    deltas: list[tf.Tensor]
    rates: list[tf.Tensor]
    iteration: tf.Tensor


class ModelStep:
    """Training and evaluation steps of one compiled Keras model.

    Metric states travel as a list of tensors: the weighted sum of the losses,
    the weight, then the model's metric variables. They add up: the sum over
    any split of the batches is the metric of them all. Where it is not (a
    maximum), one process hands the state on from batch to batch, in the
    metric's variable; several tasks refuse the metric.

    Args:
        model: A compiled, built `keras.Model`. Its `compute_loss` and
            `compute_metrics` are used. One that overrides `train_step` or
            `test_step` is for `tfdist.training.keras_step`.
        element_spec: `tf.TypeSpec` structure of one batch, as
            `dataset.element_spec` gives it; metrics are built from it.
        global_step: Scalar int64 variable that counts applied steps; only
            training needs it.
        remote: Whether the variables live in other processes.
        replicas: Those that run each step together with this one; None for
            none. Then a step runs in the context of a replica.
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
        input_fns.check_batches(model, element_spec, targets=metrics)
        if global_step is not None and metrics:
            compiled_model.refuse_own(model, "train_step", "compute_loss")
        optimizers.check(model.optimizer, remote)
        if metrics:
            compiled_model.build_metrics(model, element_spec)
            compiled_model.check_metric_names(model)
        self._metrics = list(model.metrics_variables)
        self._seeds = [v for v in model.non_trainable_variables if _is_seed(v)]
        self._global_step = global_step
        self._remote = remote
        self._replicas = replicas
        self._forwards: dict[Any, Forward] = {}
        self._tables: dict[str, list[Any]] = {}
        self._exchanges: dict[str, Exchange] = {}
        self._ahead: int | None = None
        self.staleness: StalenessCounter | None = None
        self._results: Callable[..., Any] | None = None
        self._shapes = [s.shape for s in _flat(element_spec)]
        if metrics:
            self._look(element_spec)
        self._prepare_metrics()
        if global_step is not None and metrics:
            self._prepare_training(element_spec)

    def _look(self, element_spec: Any) -> None:
        """Sees what the model does with a batch; refuses what cannot be."""
        model = self.model
        modes = [] if self._global_step is None else [_TRAINING]
        if self._remote and not compiled_model.overrides(model, "test_step"):
            modes += [_EVALUATION]
        own_results = compiled_model.overrides(model, "compute_metrics")
        if own_results and not modes:
            modes = [_EVALUATION]
        with compiled_model.noted_updates(model) as updates:
            for mode in modes:
                self._forward(mode, element_spec)
        if self._remote or self._replicas:
            compiled_model.check_metrics(model, self._metrics, updates)
        if own_results:
            forward = self._forward(modes[0], element_spec)
            self._results = forward.results(
                self._metrics, f"`compute_metrics` of {type(model).__name__}"
            )

    def _prepare_metrics(self) -> None:
        """Where the states of metrics start, and which are passed on.

        In one process those of metrics that are not Keras' own may be any
        function of the state before: they stay in the metric's variables.
        """
        listed = {id(v) for v in self.model.metrics_variables}
        self._start = [
            v.numpy() if id(v) in listed else np.zeros(v.shape, v.dtype)
            for v in self._metrics
        ]
        passed_on: set[int] = set()
        if not (self._remote or self._replicas):
            own = compiled_model.own_metrics(self.model)
            passed_on = {id(v) for metric in own for v in metric.variables}
        self._is_passed_on = [id(v) in passed_on for v in self._metrics]

    def _prepare_training(self, element_spec: Any) -> None:
        model, remote = self.model, self._remote
        if remote:
            self.staleness = StalenessCounter(self._global_step)
        self._parts = optimizers.parts(model.optimizer)
        self._exchange = self._exchange_for(_TRAINING, element_spec)
        self._exchange.check_read(self._forward(_TRAINING, element_spec).read)
        self._compute = self._computation(element_spec)
        self._gate = gates.gate(
            model.optimizer,
            self._exchange.dense,
            has_tables=bool(self._exchange.shards),
        )
        self._moving = _moving(self._exchange)
        rates = [part.learning_rate for part in self._parts]
        self._rates = [r for r in rates if isinstance(r, keras.Variable)]

    @property
    def tables(self) -> list[Any]:
        """The partitioned tables that training looks up."""
        return self._tables[_TRAINING]

    def _forward(self, mode: str, batch: Any) -> Forward:
        """The graph of a pass over batches like `batch`, or of its spec."""
        spec = _specs(batch)
        key = mode, repr([(s.shape, s.dtype) for s in _flat(spec)])
        while key not in self._forwards:
            with tf.init_scope():
                forward = self._traced(mode, spec)
            own = [*self.model.variables, *self._seeds, *self._metrics]
            known = {id(v) for v in own}
            others = [v for v in forward.updated if id(v) not in known]
            # Those of Keras' global generator, and of metrics not listed.
            self._seeds += [v for v in others if _is_seed(v)]
            self._metrics += [v for v in others if not _is_seed(v)]
            if not others:
                self._forwards[key] = forward
                tables = list(dict.fromkeys(forward.tables))
                self._tables.setdefault(mode, tables)
        return self._forwards[key]

    def _traced(self, mode: str, spec: Any) -> Forward:
        def run(batch: Batch) -> Mapping[str, Any]:
            if mode == _PREDICTION:
                self.model.predict_step(batch)
                return {}
            return self._pass(batch, mode == _TRAINING)[1]

        model = self.model
        fixed = [v for v in model.non_trainable_variables if not _is_seed(v)]
        # Slots are none of a model's business.
        scalars = [v for v in model.optimizer.variables if not len(v.shape)]
        return Forward(
            run,
            spec,
            self._seeds_of,
            (2 if self._replicas else 1) if mode == _TRAINING else 0,
            [*model.trainable_variables, *fixed, *self._metrics, *scalars],
        )

    def _seeds_of(
        self, *number: tf.Tensor
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Every generator's seed, in the step with a number."""
        return [(v, _fold_in(v, *number)) for v in self._seeds]

    def _exchange_for(self, mode: str, batch: Batch) -> Exchange:
        """What moves the variables that a pass reads."""
        if mode not in self._exchanges:
            self._forward(mode, batch)
            every = itertools.chain.from_iterable(self._tables.values())
            self._exchanges[mode] = Exchange(
                self.model, self._tables[mode], self._remote, list(every)
            )
        return self._exchanges[mode]

    def zero_states(self) -> States:
        """States of metrics that have seen no example.

        Of a metric whose states do not add up, that of its last step.
        """
        scalar = tf.zeros([], tf.float32)
        trains = self._global_step is not None
        return [scalar, scalar] + [
            tf.convert_to_tensor(v.value)
            if trains and passed_on
            else tf.constant(start)
            if np.any(start)
            else tf.zeros(v.shape, v.dtype)
            for v, start, passed_on in zip(
                self._metrics, self._start, self._is_passed_on, strict=True
            )
        ]

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
        exchange = self._exchange
        before = self.staleness and self.staleness.read()
        # No two replicas draw the same random numbers.
        number = [step, *([self._replicas.index()] if self._replicas else [])]
        calls = self._forward(_TRAINING, batch).calls(batch, number)
        pulled = exchange.pull(
            [*exchange.dense, *self._moving, *self._rates], calls
        )
        values = iter(pulled.values)
        dense = list(itertools.islice(values, len(exchange.dense)))
        moving = list(itertools.islice(values, len(self._moving)))
        rates, iteration = self._learning_rates(step, list(values))
        gradients, rows, deltas, states = self._compute(
            batch,
            number,
            dense,
            moving,
            pulled.rows,
            pulled.positions,
            [lookups.length(ids) for _, ids in calls],
            states,
        )
        found = _StepGradients(
            pulled, gradients, rows, deltas, rates, iteration
        )
        if self._replicas:
            found = self._over_replicas(found, _num_examples(batch))
            self._replicas.update(
                lambda found: self._update(found, batch), found
            )
        else:
            self._update(found, batch, fence)
        if self.staleness:
            self.staleness.count(before)
        return states

    def _over_replicas(
        self, found: _StepGradients, size: tf.Tensor
    ) -> _StepGradients:
        """What one replica would have found in the global batch."""
        known = [g for g in found.gradients if g is not None]
        sums, total = self._replicas.mean([*known, *found.deltas], size)
        summed = iter(sums)
        gradients = [g if g is None else next(summed) for g in found.gradients]
        pulled, rows = self._exchange.over_replicas(
            found.pulled,
            [
                g if g is None else mean_to_sum(g, size) / total
                for g in found.rows
            ],
            self._replicas.gather,
        )
        return dataclasses.replace(
            found,
            pulled=pulled,
            gradients=gradients,
            rows=rows,
            deltas=list(summed),
        )

    def _update(
        self, found: _StepGradients, batch: Batch, fence: Fence | None = None
    ) -> None:
        """Applies and counts what a step has found."""
        moves = list(zip(self._moving, found.deltas, strict=True))
        if not self._gate:
            arrived = self._apply(found, moves, fence)
            self._count(arrived, batch, fence)
            return

        def apply(
            gradients: list[tf.Tensor | None], rows: list[tf.Tensor | None]
        ) -> None:
            now = dataclasses.replace(found, gradients=gradients, rows=rows)
            self._apply(now, [])

        counts = self._gate(found.gradients, found.rows, found.iteration, apply)
        for variable, delta in moves:
            variable.value.assign_add(delta)
        self._count({}, batch, counts=counts)

    def _apply(
        self,
        found: _StepGradients,
        moves: Sequence[tuple[keras.Variable, tf.Tensor]],
        fence: Fence | None = None,
    ) -> dict[str, tf.Tensor]:
        """Updates variables and slots; see `Exchange.push`."""
        for part in self._parts:
            optimizers.begin_step(part, found.iteration)
        gradients, rows = self._exchange.clipped(found.gradients, found.rows)
        return self._exchange.push(
            found.pulled,
            gradients,
            rows,
            moves,
            found.rates,
            found.iteration,
            fence,
        )

    def _learning_rates(
        self, step: tf.Tensor, values: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Learning rate of each part, and the optimizer's iteration."""
        counter = private.counter(self.model.optimizer)
        if self._gate:
            # A step may not count.
            iteration = tf.cast(counter.value, tf.int64)
        else:
            if self._ahead is None:
                # Differs from 0 where a trained optimizer starts a new job.
                # Read once, before any step is under way: both move on.
                with tf.init_scope():
                    self._ahead = int(counter.numpy()) - int(
                        self._global_step.numpy()
                    )
            iteration = step + self._ahead
        known = list(zip(self._rates, values, strict=True))
        rates = [
            optimizers.learning_rate(part, iteration, known)
            for part in self._parts
        ]
        return rates, iteration

    def _count(
        self,
        arrived: Mapping[str, tf.Tensor],
        batch: Batch,
        fence: Fence | None = None,
        counts: tf.Tensor | None = None,
    ) -> None:
        """Counts the step; atomic on the server that holds the counter.

        For the optimizers it is none where `counts` is false. Only once the
        gradients have arrived there, or else the batch was read: a step that
        failed before, or that found no batch, does not count.
        """
        counters = {
            id(counter): counter.value
            for counter in map(
                private.counter, (self.model.optimizer, *self._parts)
            )
        }
        read = _flat(batch)
        for counter in (self._global_step, *counters.values()):
            device = self._exchange.device_of(counter)
            gradients = arrived.get(device)
            needed = read if gradients is None else [gradients]
            with tf.device(device):
                one = tf.ones([1], counter.dtype)
            if counts is not None and counter is not self._global_step:
                one = tf.cast([counts], counter.dtype)
            if gradients is None and fence:
                one = fence.passed(device, fence.generation, one)
            with tf.device(device), tf.control_dependencies(needed):
                counter.assign_add(one[0])

    def _pass(
        self, batch: Batch, training: bool, aside: Any = None
    ) -> tuple[tf.Tensor, Mapping[str, Any]]:
        """Loss, and results of the metrics, which are updated `aside`."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        model = self.model
        y_pred = model(x, **compiled_model.training_of(model, training))
        loss = model.compute_loss(
            x, y, y_pred, sample_weight, training=training
        )
        with aside or contextlib.nullcontext():
            results = model.compute_metrics(x, y, y_pred, sample_weight)
        return loss, results

    def _gradients(
        self,
        batch: Batch,
        number: list[tf.Tensor],
        dense: list[tf.Tensor],
        moving: list[tf.Tensor],
        rows: list[tf.Tensor],
        positions: list[tf.Tensor],
        lengths: list[Any],
        states: States,
    ) -> tuple[
        list[tf.Tensor | None], list[tf.Tensor], list[tf.Tensor], States
    ]:
        """The part of a step that touches no variable.

        Returns:
            Gradients of `dense` (None where the loss does not depend on one)
            and of `rows`, what to add to each of `moving`, and the new metric
            states.
        """
        scope = self._scope(
            states,
            [
                *zip(self._exchange.dense, dense, strict=True),
                *zip(self._moving, moving, strict=True),
                *self._seeds_of(*number),
            ],
        )
        tables = self._forward(_TRAINING, batch).tables
        calls = list(zip(tables, lengths, strict=True))
        with scope, tf.GradientTape() as tape:
            tape.watch([*dense, *rows])
            answers = self._exchange.answers(rows, positions, calls)
            with lookups.at(answers):
                loss, _ = self._pass(batch, True, tape.stop_recording())
            answers.check_all_given()
            # Keras divides its own losses by this, where it sees replicas.
            loss *= tf.distribute.get_strategy().num_replicas_in_sync
            scaled_loss = self.model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, [*dense, *rows])
        gradients = self._exchange.summed(gradients)
        deltas = [
            scope.get_current_value(v) - before
            for v, before in zip(self._moving, moving, strict=True)
        ]
        return (
            gradients[: len(dense)],
            gradients[len(dense) :],
            deltas,
            self._states_after(scope, states, loss, batch),
        )

    def _computation(self, element_spec: Any) -> Callable:
        """`_gradients`, compiled by XLA if the model says so and it can be."""
        reason = None
        if self.tables:
            reason = "it reads another number of rows in each step"
        elif any(s.dtype == tf.string for s in tf.nest.flatten(element_spec)):
            reason = "XLA knows no strings"
        compiled = self.model.jit_compile and not reason
        if self.model.jit_compile and reason:
            _log.warning(
                'Model %r has jit_compile=True (which "auto" stands for where '
                "there is a GPU), but XLA compiles nothing of a step: %s.",
                self.model.name,
                reason,
            )
        if self._replicas and not compiled and _is_synchronized(self.model):
            # No function may wait for the other replicas of this process.
            return self._gradients
        function = tf.function(
            self._gradients, autograph=False, jit_compile=compiled or None
        )

        def alone(*args: Any) -> Any:
            # On a thread of its own Keras sees no replicas; where it does, it
            # divides its own losses by their number, but none that a model
            # computes itself, which would count for each.
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                trace = function.get_concrete_function
                traced = thread.submit(trace, *_specs(args)).result()
            return traced(*args)

        return alone if self._replicas else function

    def evaluate(self, batch: Batch, states: States) -> States:
        """Updates metric states by one batch; changes nothing else.

        Raises:
            ValueError: the model overrides `test_step`.
        """
        compiled_model.refuse_own(self.model, "test_step", "compute_metrics")
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
            loss, _ = self._pass(batch, training=False)
        return self._states_after(scope, states, loss, batch)

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
        exchange = self._exchange_for(mode, batch)
        calls = self._forward(mode, batch).calls(batch, [])
        variables = [*exchange.dense, *_moving(exchange)]
        pulled = exchange.pull(variables, calls)
        answers = exchange.answers(
            pulled.rows,
            pulled.positions,
            [(table, lookups.length(ids)) for table, ids in calls],
        )
        values = list(zip(variables, pulled.values, strict=True))
        values += self._seeds_of()
        with self._scope(states, values) as scope, lookups.at(answers):
            yield scope
        answers.check_all_given()

    def pack(self, states: States) -> tf.Tensor:
        """All states in one float64 vector: one message, one copy."""
        if self._global_step is not None:
            for variable, state, passed_on in zip(
                self._metrics, states[2:], self._is_passed_on, strict=True
            ):
                if passed_on:
                    variable.value.assign(state)
        return tf.concat(
            [tf.reshape(tf.cast(s, tf.float64), [-1]) for s in states], axis=0
        )

    def joined(self, earlier: Any, later: np.ndarray) -> np.ndarray:
        """Packed states of two dispatches in one; 0.0 is of none."""
        sizes = [1, 1, *(v.size for v in self._start)]
        passed_on = np.repeat([False, False, *self._is_passed_on], sizes)
        return np.where(passed_on, later, earlier + later)

    def result(self, packed: np.ndarray) -> dict[str, float]:
        """Values of loss and metrics from (a sum of) packed states.

        Args:
            packed: float64 vector as from `pack`.

        Returns:
            Metric name to value; `loss` is the mean over examples. Empty if
            the states have seen no example.
        """
        loss, weight, *rest = np.split(packed, self._offsets())
        if not weight.item():
            return {}
        tracker = compiled_model.loss_tracker(self.model)
        of_loss = (
            {id(tracker.total): loss, id(tracker.count): weight}
            if tracker
            else {}
        )
        values = [
            tf.cast(of_loss.get(id(v), value).reshape(v.shape), v.dtype)
            for v, value in zip(self._metrics, rest, strict=True)
        ]
        if self._results:
            results = flat_floats(self._results(*values))
        else:
            # A result may be the variable itself.
            with self._scope([loss, weight, *values]):
                results = flat_floats(self.model.get_metrics_result())
        if any(self._is_passed_on) and self._global_step is not None:
            self.model.reset_metrics()
        return results | {"loss": loss.item() / weight.item()}

    def _offsets(self) -> np.ndarray:
        sizes = [1, 1] + [int(np.prod(v.shape)) for v in self._metrics]
        return np.cumsum(sizes)[:-1]

    def _scope(
        self,
        states: States,
        values: Sequence[tuple[keras.Variable, tf.Tensor]] = (),
    ) -> keras.StatelessScope:
        metrics = zip(self._metrics, states[2:], strict=True)
        return keras.StatelessScope([*metrics, *values], collect_losses=True)

    def _states_after(
        self,
        scope: keras.StatelessScope,
        states: States,
        loss: tf.Tensor,
        batch: Batch,
    ) -> States:
        """As Keras does, batches weigh by their number of examples."""
        weight = _num_examples(batch)
        loss_sum = states[0] + mean_to_sum(tf.cast(loss, tf.float32), weight)
        metrics = [scope.get_current_value(v) for v in self._metrics]
        return [loss_sum, states[1] + weight, *metrics]


def _num_examples(batch: Batch) -> tf.Tensor:
    """Scalar float32."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return tf.cast(tf.shape(tf.nest.flatten(x)[0])[0], tf.float32)


def _flat(batch: Any) -> list[Any]:
    return tf.nest.flatten(batch, expand_composites=True)


def _specs(values: Any) -> Any:
    """The specs of tensors; all else as it is."""
    return tf.nest.map_structure(
        lambda t: tf.type_spec_from_value(t) if tf.is_tensor(t) else t, values
    )


def _moving(exchange: Exchange) -> list[keras.Variable]:
    """Variables that a step moves by what it adds to them."""
    return [v for v in exchange.fixed if not _is_seed(v)]


def _is_seed(variable: keras.Variable) -> bool:
    return variable.path.endswith(SEED_STATE_NAME)


def _is_synchronized(model: keras.Model) -> bool:
    """Whether a layer looks at the batches of all replicas."""
    return any(
        getattr(layer, "synchronized", False)
        or (hasattr(layer, "layers") and _is_synchronized(layer))
        for layer in model.layers
    )


def _fold_in(seed_state: keras.Variable, *numbers: tf.Tensor) -> tf.Tensor:
    """This step's seed of one generator, from its state at the start.

    The state is read once, while the step is traced: it never changes.
    """
    with tf.init_scope():
        start = seed_state.numpy()
    folded = tf.cast(start, tf.int64)
    for number in numbers:
        folded = tf.random.fold_in(folded, number)
    return tf.cast(folded, seed_state.dtype)


def flat_floats(
    results: Mapping[str, Any], prefix: str = ""
) -> dict[str, float]:
    """Results by name, one number each.

    >>> flat_floats({"loss": 1, "auc": {"a": 0.5}, "r2": [0.1, 0.2]})
    {'loss': 1.0, 'auc/a': 0.5, 'r2/0': 0.1, 'r2/1': 0.2}
    """
    flat = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat |= flat_floats(value, f"{prefix}{name}/")
        elif np.ndim(value):
            parts = {str(i): part for i, part in enumerate(np.array(value))}
            flat |= flat_floats(parts, f"{prefix}{name}/")
        else:
            flat[prefix + name] = float(value)
    return flat

"""Passes over a model: their graphs, tables and layouts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf import private_keras
from tfdist.training import compiled_model
from tfdist.training.forward import Forward
from tfdist.training.layout import Layout, is_seed
from tfdist.training.own_step import OwnStep
from tfdist.training.summed_losses import SummedLosses

_log = logging.getLogger(__name__)

# A model may look up different tables in each mode.
TRAINING, EVALUATION, PREDICTION = "training", "evaluation", "prediction"
# Traces until all variables are known: seeds, unlisted metrics, log means.
_TRACES = 5


class Passes:
    """Graphs, tables and layouts of passes, for each mode and batch spec.

    Args:
        model: A compiled and built model.
        own: Its own training step, if it has one.
        remote: See `ModelStep`.
        has_replicas: Whether several replicas run each step in sync.

    Attributes:
        seeds: The states of random generators that passes draw from.
        metrics: The metric variables that passes update. Both lists grow.
        tables: For each mode, the tables that the model looks up.
    """

    def __init__(
        self,
        model: keras.Model,
        own: OwnStep | None,
        remote: bool,
        has_replicas: bool,
    ) -> None:
        self._model, self._own = model, own
        self._remote, self._has_replicas = remote, has_replicas
        self.seeds = [v for v in model.non_trainable_variables if is_seed(v)]
        # A model's own `metrics` may list one twice.
        metrics = {id(v): v for v in model.metrics_variables}
        self.metrics = [*metrics.values()]
        self.tables: dict[str, list[Any]] = {}
        self._forwards: dict[Any, Forward] = {}
        self._layouts: dict[str, Layout] = {}
        self._has_warned = False
        self._generator = private_keras.seed_generator()

    def use_seed_generator(self) -> None:
        """Makes this thread draw from the passes' global seed generator."""
        private_keras.use_seed_generator(self._generator)

    def forward(self, mode: str, batch: Any) -> Forward:
        """The graph of a pass over batches like `batch`, or with that spec."""
        spec = compiled_model.specs(batch)
        flat = tf.nest.flatten(spec, expand_composites=True)
        key = mode, repr([(s.shape, s.dtype) for s in flat])
        if key in self._forwards:
            return self._forwards[key]
        for _ in range(_TRACES):
            # In `tf.init_scope` no tape would record.
            forward = compiled_model.on_own_thread(self._traced, mode, spec)
            own = [*self._model.variables, *self.seeds, *self.metrics]
            known = {id(v) for v in own}
            others = [v for v in forward.updated if id(v) not in known]
            if self._own and mode == TRAINING:
                self._own.check(forward, self._has_replicas)
                others = others or self._own.means(forward, self.metrics)
            if not others:
                self._forwards[key] = forward
                if self._has_replicas and mode == TRAINING:
                    self._warn_of(self._sums.names)
                tables = list(dict.fromkeys(forward.tables))
                self.tables.setdefault(mode, tables)
                return forward
            # Those of Keras' global generator and of unlisted metrics.
            self.seeds += [v for v in others if is_seed(v)]
            metrics = [v for v in others if not is_seed(v)]
            self._check_kept(metrics)
            self.metrics += metrics
        raise ValueError(
            f"Model {self._model.name!r} creates new variables each time it is "
            f"called: {[v.path for v in others]}. Create them once, in its "
            "`__init__` or `build`."
        )

    def _warn_of(self, sums: Sequence[str]) -> None:
        if sums and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Model %r minimizes a sum over the examples of a batch (%s). "
                "Between replicas a step minimizes the mean over the shares of "
                "the batch, so this sum is divided by the number of replicas. "
                "Use the mean over the examples instead, with another learning "
                "rate.",
                self._model.name,
                ", ".join(sums),
            )

    def _check_kept(self, metrics: list[keras.Variable]) -> None:
        """Raises `ValueError` for variables that are not metrics, nor saved."""
        for variable in metrics:
            if variable.aggregation != "sum":
                raise ValueError(
                    f"Model {self._model.name!r} updates {variable.path!r}, "
                    "which is neither one of its `variables` nor a metric's, "
                    "so no checkpoint would contain it. Make it a weight of a "
                    "layer (`add_weight(trainable=False)`). The states of an "
                    "RNN with `stateful=True` are not weights: pass an "
                    "`initial_state`, or omit `stateful`."
                )

    def _traced(self, mode: str, spec: Any) -> Forward:
        model = self._model
        self.use_seed_generator()

        def run(batch: Any) -> Mapping[str, Any]:
            if mode == PREDICTION:
                model.predict_step(batch)
                return {}
            self._sums = SummedLosses(batch)
            if self._own is not None:
                with self._sums.watch_tapes():
                    return self._own.trace(batch)
            loss, results = compiled_model.forward_pass(
                model, batch, mode == TRAINING
            )
            self._sums.check(loss)
            return results

        fixed = [v for v in model.non_trainable_variables if not is_seed(v)]
        # Only scalars: a model does not read slots.
        scalars = [v for v in model.optimizer.variables if not len(v.shape)]
        read = [*model.trainable_variables, *fixed, *self.metrics, *scalars]
        forward = Forward(run, spec, list(self.seeds), read)
        self._generator = private_keras.seed_generator()
        return forward

    def layout(
        self, mode: str, batch: Any, rates: Sequence[keras.Variable] = ()
    ) -> Layout:
        """The layout of variables that a pass reads, including `rates`."""
        if mode not in self._layouts:
            self.forward(mode, batch)
            self._layouts[mode] = Layout(
                self._model,
                self.tables[mode],
                remote=self._remote,
                assigns=not (self._remote or self._has_replicas),
                others=[*itertools.chain(*self.tables.values())],
                rates=rates,
            )
        return self._layouts[mode]

"""`Estimator`: a model function and a directory of checkpoints.

Like `tf.estimator.Estimator`, but `model_fn` returns a compiled Keras model
instead of an `EstimatorSpec`. Each method rebuilds the model and reads its
variables from a checkpoint: all state is in the directory.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.arguments import check_at_least
from tfdist._tf.tf1_arguments import tf1_arguments
from tfdist._tf.tracing import traced
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import runs_in_its_cluster
from tfdist.cluster.strategies import local_strategy
from tfdist.data import audit, input_fns
from tfdist.data.input_fns import InputFn
from tfdist.estimator import building, predictions, results
from tfdist.estimator.building import ModelFn
from tfdist.estimator.chief_hooks import chief_hooks
from tfdist.estimator.evaluator import Evaluator
from tfdist.estimator.on_workers import RemoteForward
from tfdist.estimator.run_config import RunConfig, configured
from tfdist.estimator.saved_models import ServingModelFn, export_saved_model
from tfdist.estimator.specs import EvalSpec, TrainSpec
from tfdist.estimator.warm_start import WarmStartHook, WarmStartSettings
from tfdist.hooks.saving_hooks import CheckpointSaverListener
from tfdist.hooks.session_run_hook import SessionRunHook
from tfdist.placement import planner
from tfdist.placement.plans import Plan
from tfdist.placement.variables import describe
from tfdist.session.monitored_session import MonitoredTrainingSession
from tfdist.training import optimizers
from tfdist.training.compiled_model import has_own_step
from tfdist.training.loop import metrics_from_states

_log = logging.getLogger(__name__)


class Estimator:
    """A model function and a configuration, trained by `train_and_evaluate`.

    >>> def model_fn():
    ...     model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    ...     model.compile(optimizer="sgd", loss="mse")
    ...     return model
    >>> def input_fn():
    ...     return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat()
    >>> config = tfdist.RunConfig(directory, log_step_count_steps=None)
    >>> estimator = tfdist.Estimator(model_fn, config)
    >>> estimator = estimator.train(input_fn, max_steps=2)
    >>> sorted(estimator.evaluate(input_fn, steps=1))
    ['global_step', 'loss']

    Args:
        model_fn: Returns a compiled Keras model; a model without an input
            shape is built from the dataset's `element_spec`. Called inside the
            strategy's scope, and again for each rebuilt copy. A custom
            `train_step` is used if the strategy supports what it does, else
            refused (see `DIFFERS_FROM_FIT.md`). A custom `test_step` runs on
            the evaluator or chief, and on a cluster `predict_step` on workers.
        config: The configuration. Default: `RunConfig(model_dir)`.
        warm_start_from: Where a new job takes its weights from: a checkpoint,
            a directory of checkpoints, or `WarmStartSettings`.
        model_dir: Directory of the job, if `config` does not set one.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: neither `model_dir` nor `config` is given, or the two name
            different directories.
    """

    @tf1_arguments
    def __init__(
        self,
        model_fn: ModelFn,
        config: RunConfig | None = None,
        warm_start_from: WarmStartSettings | str | os.PathLike | None = None,
        *,
        model_dir: str | None = None,
    ) -> None:
        building.check_model_fn(model_fn)
        self._warm_start = (
            None if warm_start_from is None else WarmStartHook(warm_start_from)
        )
        self.model_fn = model_fn
        self.config = configured(config, model_dir)
        self._trained_to = -1  # The step at which the last `train` call ended.

    @property
    def model_dir(self) -> str:
        """Directory of checkpoints, summaries and exports."""
        return self.config.model_dir

    def eval_dir(self, name: str | None = None) -> str:
        """The summary directory of the evaluation called `name`.

        >>> config = tfdist.RunConfig("job", summary_dir="logs")
        >>> tfdist.Estimator(keras.Sequential, config).eval_dir()
        'logs/eval'
        """
        config = self.config
        return results.eval_dir(config.summary_dir or config.model_dir, name)

    def latest_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint, or None."""
        return checkpoints.latest(self.model_dir)

    @runs_in_its_cluster
    def train(
        self,
        input_fn: InputFn,
        hooks: Iterable[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Iterable[CheckpointSaverListener] | None = None,
    ) -> Estimator:
        """Trains from the latest checkpoint, if there is one.

        Call it in one process, on the chief, or in all processes of all-reduce.

        Args:
            input_fn: As for `TrainSpec`. In one process, the checkpoint's
                dataset resumes at its saved position, or restarts if it was
                exhausted; a different dataset starts from the beginning, with
                a warning (TF always started over). A restarted process does
                not reread an exhausted dataset, unless `steps` is given.
            hooks: As for `TrainSpec`.
            steps: Steps to run from the latest checkpoint, also in a restarted
                process; jobs that may be restarted should use `max_steps`.
            max_steps: Step at which training ends; warns if the checkpoint has
                already reached it. If neither is given: until the data ends.
            saving_listeners: Called for each checkpoint.

        Returns:
            This estimator.

        Raises:
            TypeError: `input_fn` returns no dataset, or `model_fn` no model.
            ValueError: both `steps` and `max_steps`, or one not positive; a
                checkpoint of a different model; a model that is not compiled
                or does not match the dataset; an empty dataset.
            NanLossDuringTrainingError: the loss or a weight is not finite.
            RuntimeError: called inside a strategy's scope.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(
                "Only one of `steps` and `max_steps` can be given. Received: "
                f"steps={steps}, max_steps={max_steps}."
            )
        check_at_least("steps", steps, 1)
        given: Any = hooks, saving_listeners
        spec, config = TrainSpec(input_fn, max_steps, *given), self.config
        building.seed_initializers(config)
        storage.check_writable(self.model_dir)
        self._audit(input_fn)
        if steps is not None:
            path = self.latest_checkpoint()
            max_steps = steps + (checkpoints.step_of(path) if path else 0)
        listeners, hooks = spec.saving_listeners, spec.hooks
        own: list[SessionRunHook] = []
        if self._warm_start:  # In each process of an all-reduce.
            own.append(self._warm_start)
        if config.cluster.is_chief:
            own += chief_hooks(config, input_fn, max_steps, listeners, hooks)
        local = self._local_strategy()
        try:
            session = MonitoredTrainingSession(
                lambda scope: building.build(
                    self.model_fn, config, scope, input_fn
                ),
                checkpoint_dir=self.model_dir,
                hooks=[*own, *hooks],
                save_checkpoint_secs=None,
                save_summaries_secs=None,
                log_step_count_steps=None,
                max_wait_secs=config.session_creation_timeout_secs,
                check_numerics=config.check_numerics,
                cluster=config.cluster,
                strategy=local,
            )
        except TimeoutError as error:
            path = self.latest_checkpoint()
            step = checkpoints.step_of(path) if path else -1
            if step < (max_steps or math.inf):
                raise
            # This process died after the others had ended, and was restarted.
            _log.warning("Nothing is trained after step %d. %s", step, error)
            return self
        with input_fns.named(input_fn), session:
            first_step, again = session.step, False
            results.warn_if_lost(self.model_dir, first_step, self._trained_to)
            # A restarted job does not reread exhausted data, unless by `steps`.
            knows = steps or (first_step == self._trained_to and not listeners)
            rereads = bool(knows and local and config.saves_checkpoints)
            while not session.should_stop():
                session.run()
                if session.input_ended and session.step == first_step:
                    self._check_was_read(session, input_fn, warns=not rereads)
                    session.unsaved = again = rereads
        self._trained_to = session.step
        if again:  # The checkpoint no longer holds the input's position.
            max_steps = None if steps else max_steps
            self.train(input_fn, hooks, steps, max_steps, listeners)
        return self

    def _check_was_read(
        self, session: MonitoredTrainingSession, input_fn: InputFn, warns: bool
    ) -> None:
        """Raises if the input had no batch, not even before a restart."""
        one_pass = session.restored_from and self.config.cluster.dispatcher
        if not (session.input_restored or one_pass):
            raise ValueError(
                "The dataset of input function "
                f"{input_fns.described(input_fn)} has no batch: no step was "
                "run, and nothing is exported. Are its files empty, or smaller "
                "than one batch with drop_remainder=True?"
            )
        if warns:
            _log.warning(
                "No step was run: the input had been read to its end when %s "
                "was saved. To train on it again, call `repeat()` in the input "
                "function.",
                session.restored_from,
            )

    def _audit(self, input_fn: InputFn) -> None:
        """Warns if two workers would read the same data."""
        wanted = self.config.audit_input
        if wanted is None:
            wanted = not input_fns.takes_context(input_fn)
        if not wanted or self.config.strategy_name != "ps":
            return
        if problem := audit.check_workers_differ(
            input_fn, self.config.cluster.num_workers, index_as_tensor=True
        ):
            _log.warning("%s", problem)

    @runs_in_its_cluster
    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Iterable[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, float]:
        """Evaluates a checkpoint and returns its metrics.

        On the chief of a cluster the workers compute, as for `predict`, unless
        there are hooks, or the model has its own `train_step` or `test_step`.

        Args:
            input_fn: As for `EvalSpec`, as are `hooks` and `name`.
            steps: Maximum number of batches; None for all.
            hooks: As for `EvalSpec`.
            checkpoint_path: Default: the latest checkpoint. If there is none,
                the warm-started or, with a warning, newly initialized model.
            name: As for `EvalSpec`.

        Returns:
            A dictionary of metrics by name, including `loss` and `global_step`.
        """
        given: Any = hooks
        spec = EvalSpec(input_fn, steps, name, given)
        warm_start = self._warm_start
        evaluator = Evaluator(self.model_fn, self.config, spec, warm_start)
        path = checkpoint_path or self.latest_checkpoint()

        def on_workers(batches: tf.data.Dataset) -> dict[str, float]:
            assert connected is not None
            with connected.step(batches, metrics=True) as (step, on_each_batch):
                if has_own_step(step.model):
                    return {}
                states = on_each_batch(step.evaluate_alone)
                return metrics_from_states(sum(states), step)

        connected = self._on_workers(path) if path and not hooks else None
        return evaluator.evaluate(path, on_workers if connected else None)

    @tf1_arguments
    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Sequence[str] | str | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields the model's outputs as NumPy arrays.

        On the chief of a cluster the variables stay on the parameter servers
        and the workers compute; this process reads the features. The death of
        a worker is tolerated; that of a parameter server is an error.

        Args:
            input_fn: As for `TrainSpec`; only the features are read.
            predict_keys: The key or keys to yield of a model that returns a
                dictionary. Default: all.
            checkpoint_path: As for `evaluate`.
            yield_single_examples: Whether to yield single examples, without
                the batch dimension, rather than batches.

        Raises:
            ValueError: the output has no such key, or cannot be split into
                examples.
        """
        path = checkpoint_path or self.latest_checkpoint()
        for outputs in self._outputs(input_fn, path):
            if predict_keys is not None:
                outputs = predictions.chosen(outputs, predict_keys)
            if yield_single_examples:
                yield from predictions.examples(outputs)
            else:
                yield outputs

    def _on_workers(self, path: str | None) -> RemoteForward | None:
        """Connects to workers that compute with a checkpoint's weights."""
        config = self.config
        if config.strategy_name != "ps" or not config.cluster.is_chief:
            return None
        return RemoteForward(self.model_fn, config, path, self._warm_start)

    def _outputs(self, input_fn: InputFn, path: str | None) -> Iterator:
        """Yields the model's output for each batch, as arrays."""
        connected = self._on_workers(path)
        dataset = input_fns.without_context(input_fn)()
        if connected:
            with connected.step(dataset, metrics=False) as (step, on_each):
                yield from on_each(step.predict)
            return
        model = self._restored(path, dataset.element_spec, targets=False)
        input_fns.check_batches(model, dataset.element_spec, targets=False)
        call = traced(model.predict_step, reduce_retracing=True)
        for batch in dataset:
            yield tf.nest.map_structure(lambda t: t.numpy(), call(batch))

    def restored_model(self, checkpoint_path: str | None = None) -> keras.Model:
        """Returns the model in this process, with a checkpoint's weights.

        The default is the latest checkpoint. If it holds the complete optimizer
        state, Keras' `fit` can resume from it. Partitioned tables are loaded
        whole into this process's memory.

        Raises:
            ValueError: no checkpoint, or one of a different model.
        """
        path = checkpoint_path or self._checkpoint()
        model = self._restored(path)
        optimizers.build(model.optimizer, model.trainable_variables)
        variables = checkpoints.named_variables(model)
        if variables.keys() <= checkpoints.saved_shapes(path).keys():
            checkpoints.restore(path, variables)
        return model

    @tf1_arguments
    def export_saved_model(
        self,
        export_dir_base: str,
        serving_model_fn: ServingModelFn | None = None,
        assets_extra: Mapping[str, str] | None = None,
        checkpoint_path: str | None = None,
    ) -> str:
        """Exports a checkpoint by `tfdist.estimator.export_saved_model`.

        Raises:
            ValueError: there is no checkpoint; the default is the latest.
        """
        model = self._restored(checkpoint_path or self._checkpoint())
        return export_saved_model(
            model, export_dir_base, serving_model_fn, assets_extra
        )

    def get_variable_names(self) -> list[str]:
        """Returns the variable names in the latest checkpoint, with slots."""
        return sorted(checkpoints.saved_shapes(self._checkpoint()))

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns the value of a variable in the latest checkpoint.

        Raises:
            ValueError: there is no such variable, or no checkpoint.
        """
        path = self._checkpoint()  # A newer one may be saved meanwhile.
        names = sorted(checkpoints.saved_shapes(path))
        if name not in names:
            raise ValueError(
                f"The latest checkpoint has no variable {name!r}. It has: "
                f"{names}."
            )
        return checkpoints.load_variable(path, name)

    def _checkpoint(self) -> str:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(f"There is no checkpoint in {self.model_dir!r}.")
        return path

    def _restored(
        self, path: str | None, element_spec: Any = None, targets: bool = True
    ) -> keras.Model:
        """Returns the model in this process, restored if there is a checkpoint.

        `element_spec` is used to build it if needed; default: training's.
        """
        if element_spec is None:
            element_spec = building.trained_element_spec(self.model_dir)
        model, is_given = building.make_model(
            self.model_fn, element_spec, targets
        )
        with results.reading(path):
            building.fill(model, path, self._warm_start)
        if not (path or self._warm_start or is_given):
            results.warn_of_untrained(self.model_dir)
        return model

    def plan(self, num_ps: int, **kwargs: Any) -> Plan:
        """Returns where planned placement would put the model's variables.

        Allocates nothing and needs no cluster; the arguments are those of
        `tfdist.placement.plan`.
        """
        return planner.plan(describe(self.model_fn), num_ps, **kwargs)

    def _local_strategy(self) -> tf.distribute.Strategy | None:
        """The strategy, if all its replicas belong to this process."""
        config = self.config
        if isinstance(config.strategy, tf.distribute.Strategy):
            return config.strategy
        if config.strategy_name in ("ps", "multi_worker_mirrored"):
            return None
        return local_strategy(config.strategy_name)

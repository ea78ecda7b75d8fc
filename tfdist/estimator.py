"""`train_and_evaluate`: one program, every task of a job.

The top of tfdist. Which part of the job this process does is read from the
environment (`Cluster.from_env()`), as `tf.estimator` did; the parts themselves
are the layers below, each usable alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import checkpoint, evaluation, servers
from tfdist import optimizers as optimizers_lib
from tfdist._private import reset_object_names
from tfdist.checkpoint import Checkpoints
from tfdist.cluster import Cluster
from tfdist.evaluation import Evaluator
from tfdist.exporters import Exporter
from tfdist.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    ProgressHook,
    SecondOrStepTimer,
    SessionRunHook,
    SummarySaverHook,
)
from tfdist.loop import CoordinatedLoop, LocalLoop, Loop
from tfdist.session import TrainingSession
from tfdist.step import ModelStep
from tfdist.strategy import parameter_server_strategy, placed_scope

_log = logging.getLogger(__name__)

ModelFn = Callable[[], keras.Model]
InputFn = Callable[..., tf.data.Dataset]

_DEFAULT_SAVE_SECS = 600
_UNSET: Any = object()


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a job runs; what it computes is the model function's matter.

    As `tf.estimator.RunConfig`, for the fields it shares with it.

    Attributes:
        model_dir: Directory of checkpoints, summaries and exports, shared by
            all tasks (`gs://` works).
        tf_random_seed: Seeds Python, NumPy and the initializers. Default: none.
        save_summary_steps: Steps between TensorBoard scalars; 0 for none.
        save_checkpoints_steps: Steps between checkpoints.
        save_checkpoints_secs: Seconds between checkpoints. At most one of the
            two; neither means every 600 s.
        keep_checkpoint_max: Most recent checkpoints kept; 0 or None keeps all.
        keep_checkpoint_every_n_hours: Also keeps one per so many hours.
        log_step_count_steps: Steps between progress lines.
        steps_per_dispatch: Steps a worker runs per request (decision D4).
            Default: up to ten, fewer for models of many variables.
        start_timeout_secs: Seconds the chief waits for workers and ps.
        evaluator_timeout_secs: Seconds the chief waits at the end for the
            evaluator's last result.
        cluster: Default: from the environment.

    Raises:
        ValueError: a value out of range, or both `save_checkpoints_*`.
    """

    model_dir: str
    _: dataclasses.KW_ONLY
    tf_random_seed: int | None = None
    save_summary_steps: int = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float | None = None
    log_step_count_steps: int = 100
    steps_per_dispatch: int | None = None
    start_timeout_secs: float = 300.0
    evaluator_timeout_secs: float = 600.0
    cluster: Cluster = dataclasses.field(default_factory=Cluster.from_env)

    def __post_init__(self) -> None:
        if not self.model_dir:
            raise ValueError("Argument `model_dir` must not be empty.")
        object.__setattr__(self, "model_dir", os.fspath(self.model_dir))
        if self.save_checkpoints_steps and self.save_checkpoints_secs:
            raise ValueError(
                "Only one of `save_checkpoints_steps` and "
                "`save_checkpoints_secs` can be set. Received: "
                f"save_checkpoints_steps={self.save_checkpoints_steps}, "
                f"save_checkpoints_secs={self.save_checkpoints_secs}."
            )
        for name, least in (
            ("save_summary_steps", 0),
            ("save_checkpoints_steps", 1),
            ("save_checkpoints_secs", 1e-9),
            ("keep_checkpoint_max", 0),
            ("keep_checkpoint_every_n_hours", 1e-9),
            ("log_step_count_steps", 1),
            ("steps_per_dispatch", 1),
            ("start_timeout_secs", 0),
            ("evaluator_timeout_secs", 0),
        ):
            _check_at_least(name, getattr(self, name), least)

    def checkpoint_timer(self) -> SecondOrStepTimer:
        """When to save."""
        if self.save_checkpoints_steps:
            return SecondOrStepTimer(every_steps=self.save_checkpoints_steps)
        return SecondOrStepTimer(
            every_secs=self.save_checkpoints_secs or _DEFAULT_SAVE_SECS
        )


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What to train on, as `tf.estimator.TrainSpec`.

    Attributes:
        input_fn: Returns a `tf.data.Dataset` of batches; may take a
            `tf.distribute.InputContext` that says which part of the data the
            calling worker shall read.
        max_steps: Step at which training ends; None: when the data ends.
        hooks: Run after tfdist's own.
    """

    input_fn: InputFn
    max_steps: int | None = None
    hooks: tuple[SessionRunHook, ...] = ()

    def __post_init__(self) -> None:
        _check_callable("input_fn", self.input_fn)
        _check_at_least("max_steps", self.max_steps, 1)
        object.__setattr__(self, "hooks", tuple(self.hooks))


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate on, as `tf.estimator.EvalSpec`.

    Attributes:
        input_fn: Returns a `tf.data.Dataset` of batches; takes nothing.
        steps: Batches per evaluation at most; None: the whole dataset.
        name: Results go to `<model_dir>/eval_<name>`. Default: `eval`.
        exporters: Exporters run after each evaluation.
        start_delay_secs: Seconds an evaluator task waits before it begins.
        throttle_secs: Least seconds between two evaluations; the final one is
            never delayed.
    """

    input_fn: InputFn
    steps: int | None = 100
    name: str | None = None
    exporters: tuple[Exporter, ...] = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        _check_callable("input_fn", self.input_fn)
        _check_at_least("steps", self.steps, 1)
        _check_at_least("start_delay_secs", self.start_delay_secs, 0)
        _check_at_least("throttle_secs", self.throttle_secs, 0)
        exporters = self.exporters
        if isinstance(exporters, Exporter):
            exporters = (exporters,)
        object.__setattr__(self, "exporters", _checked(exporters))


def _check_at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and value < least:
        wanted = f"at least {least}" if least >= 1 else "positive"
        wanted = "not negative" if least == 0 else wanted
        raise ValueError(
            f"Argument `{name}` must be {wanted}. Received: {name}={value}."
        )


def _check_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(
            f"Argument `{name}` must be callable. Received: {name}={value!r}."
        )


def _checked(exporters: Iterable[Exporter]) -> tuple[Exporter, ...]:
    exporters = tuple(exporters or ())
    names = [exporter.name for exporter in exporters]
    if len(set(names)) != len(names):
        raise ValueError(
            "Argument `exporters` must have unique names. Received: "
            f"names={names}."
        )
    return exporters


class Estimator:
    """A model function and a configuration, trained by `train_and_evaluate`.

    Args:
        model_fn: Returns a compiled, built Keras model. Called inside the
            strategy's scope, and again for each rebuilt copy.
        config: The configuration.
    """

    def __init__(self, model_fn: ModelFn, config: RunConfig) -> None:
        _check_callable("model_fn", model_fn)
        self.model_fn = model_fn
        self.config = config

    @property
    def model_dir(self) -> str:
        """Directory of checkpoints, summaries and exports."""
        return self.config.model_dir

    def latest_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint, or None."""
        return tf.train.latest_checkpoint(self.model_dir)

    def train(
        self,
        input_fn: InputFn,
        max_steps: int | None = None,
        hooks: Iterable[SessionRunHook] = (),
        saving_listeners: Iterable[CheckpointSaverListener] = (),
    ) -> int:
        """Trains from the latest checkpoint, if any, to `max_steps`.

        Must be called on the chief of a cluster or in a single process.

        Returns:
            The global step at the end.
        """
        config, cluster = self.config, self.config.cluster
        self._seed()
        _check_writable(self.model_dir)
        distributed = cluster.role == "chief"
        if distributed:
            strategy = parameter_server_strategy(
                cluster, start_timeout_secs=config.start_timeout_secs
            )
        else:
            strategy = tf.distribute.get_strategy()
        reset_object_names()
        with placed_scope(strategy, num_ps=cluster.num_ps):
            global_step = tf.Variable(
                0,
                dtype=tf.int64,
                trainable=False,
                name="global_step",
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
            model = self.model_fn()
            optimizers_lib.build(model.optimizer, model.trainable_variables)
        checkpoints = Checkpoints(
            self.model_dir,
            checkpoint.named_variables(model, global_step),
            config.keep_checkpoint_max,
            config.keep_checkpoint_every_n_hours,
        )
        restored = checkpoints.restore()
        if restored:
            _log.info("Restored %s.", restored)
        session = TrainingSession(
            self._loop(strategy, model, global_step, input_fn),
            global_step,
            [
                *self._hooks(checkpoints, saving_listeners),
                *hooks,
            ],
            max_steps=max_steps,
            restored=restored is not None,
        )
        session.train()
        return session.step

    def _loop(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        global_step: tf.Variable,
        input_fn: InputFn,
    ) -> Loop:
        input_fn = _with_context(input_fn)
        dataset = input_fn(tf.distribute.InputContext())
        step = ModelStep(model, dataset.element_spec)
        if self.config.cluster.role == "local":
            return LocalLoop(
                step, global_step, dataset, self.config.steps_per_dispatch
            )
        return CoordinatedLoop(
            step,
            global_step,
            input_fn,
            strategy=strategy,
            num_workers=self.config.cluster.num_workers,
            steps_per_dispatch=self.config.steps_per_dispatch,
        )

    def _hooks(
        self,
        checkpoints: Checkpoints,
        listeners: Iterable[CheckpointSaverListener],
    ) -> list[SessionRunHook]:
        config = self.config
        hooks: list[SessionRunHook] = [
            ProgressHook(
                config.log_step_count_steps,
                len(servers.server_tasks(config.cluster)),
            )
        ]
        if config.save_summary_steps:
            hooks.append(
                SummarySaverHook(self.model_dir, config.save_summary_steps)
            )
        hooks.append(
            CheckpointSaverHook(
                checkpoints, config.checkpoint_timer(), list(listeners)
            )
        )
        return hooks

    def _seed(self) -> None:
        """Seeds what initializes the model.

        On a cluster TensorFlow's global seed stays unset: it would give every
        worker the same shuffling.
        """
        seed = self.config.tf_random_seed
        if seed is None:
            return
        if self.config.cluster.role == "local":
            keras.utils.set_random_seed(seed)
        else:
            random.seed(seed)
            np.random.seed(seed)


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, float] | None, list[str | None]]:
    """Does this process's part of the job.

    As `tf.estimator.train_and_evaluate`. The chief (or the only process)
    trains; a separate evaluator task evaluates, else the chief does so after
    each checkpoint; workers and parameter servers serve and, unlike in TF1,
    end by themselves when the chief is done. The chief leaves last.

    Args:
        estimator: The model and configuration.
        train_spec: What to train on.
        eval_spec: What to evaluate on.

    Returns:
        The final metrics and the paths of the last exports, on the chief and
        in a single process; `(None, [])` in the other tasks (and on the chief
        when the evaluator did not finish in time).

    Raises:
        TypeError: an argument of another type.
    """
    for name, value, wanted in (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        if not isinstance(value, wanted):
            raise TypeError(
                f"Argument `{name}` must be a tfdist.{wanted.__name__}. "
                f"Received: {name}={value!r}."
            )
    cluster = estimator.config.cluster
    if cluster.role in ("worker", "ps"):
        servers.serve(cluster)
        return None, []
    evaluator = Evaluator(
        estimator.model_fn,
        eval_spec.input_fn,
        estimator.model_dir,
        steps=eval_spec.steps,
        name=eval_spec.name,
        exporters=eval_spec.exporters,
    )
    if cluster.role == "evaluator":
        evaluator.run_continuously(
            train_spec.max_steps,
            eval_spec.start_delay_secs,
            eval_spec.throttle_secs,
        )
        return evaluator.metrics, evaluator.exports
    result = _train_and_evaluate(estimator, train_spec, eval_spec, evaluator)
    if cluster.role == "chief":
        # Only now: after an error the servers wait for the chief's restart.
        servers.release(servers.server_tasks(cluster))
    return result


def _train_and_evaluate(
    estimator: Estimator,
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    evaluator: Evaluator,
) -> tuple[dict[str, float] | None, list[str | None]]:
    """The chief's part."""
    config = estimator.config
    separate = config.cluster.has_evaluator
    listeners = [] if separate else [_EvaluateAfterSave(evaluator, eval_spec)]
    last_step = estimator.train(
        train_spec.input_fn,
        train_spec.max_steps,
        train_spec.hooks,
        listeners,
    )
    evaluation.write_json(
        evaluation.done_path(config.model_dir),
        {"global_step": last_step, "time": time.time()},
    )
    if separate:
        result = evaluation.wait_for_result(
            evaluator.eval_dir, last_step, config.evaluator_timeout_secs
        )
        return (result["metrics"], result["exports"]) if result else (None, [])
    if evaluator.evaluated != estimator.latest_checkpoint():
        evaluator.evaluate(estimator.latest_checkpoint())
    evaluator.export(is_the_final_export=True)
    evaluator.publish()
    return evaluator.metrics, evaluator.exports


class _EvaluateAfterSave(CheckpointSaverListener):
    """Evaluates on the chief, where there is no evaluator task."""

    def __init__(self, evaluator: Evaluator, eval_spec: EvalSpec) -> None:
        self._evaluator = evaluator
        self._throttle_secs = eval_spec.throttle_secs
        self._not_before = 0.0

    def after_save(self, session: TrainingSession, path: str) -> None:
        """Evaluates `path`, unless the last one or too soon."""
        if session.should_stop() or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + self._throttle_secs
        self._evaluator.evaluate(path)
        self._evaluator.export(is_the_final_export=False)
        self._evaluator.publish()


def _with_context(
    input_fn: InputFn,
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """The user's input function, made to take an `InputContext`."""
    if inspect.signature(input_fn).parameters:
        return input_fn
    return lambda context: input_fn()


def _check_writable(model_dir: str) -> None:
    """Fails before training, not at the first checkpoint."""
    try:
        tf.io.gfile.makedirs(model_dir)
        probe = os.path.join(model_dir, ".writable")
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except tf.errors.OpError as error:
        raise ValueError(
            f"model_dir {model_dir!r} cannot be written: {error.message}"
        ) from error

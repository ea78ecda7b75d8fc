"""`train_and_evaluate`: one program, every task of a job.

The top of tfdist. Which part of the job this process does is read from the
environment (`Cluster.from_env()`), as `tf.estimator` did; the parts themselves
are the layers below, each usable alone.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import checkpoint, evaluation, planner, servers
from tfdist import optimizers as optimizers_lib
from tfdist._private import reset_object_names
from tfdist.evaluation import Evaluator
from tfdist.hooks import NanTensorHook, StopAtStepHook
from tfdist.loop import CoordinatedLoop, LocalLoop, Loop
from tfdist.plans import Plan
from tfdist.progress import ProgressHook
from tfdist.saving_hooks import CheckpointSaverHook, CheckpointSaverListener
from tfdist.session import MonitoredTrainingSession, Trainable
from tfdist.session_run_hook import SessionRunHook
from tfdist.specs import (
    EvalSpec,
    InputFn,
    RunConfig,
    TrainSpec,
    check_callable,
    check_type,
)
from tfdist.step import ModelStep
from tfdist.strategy import placed_scope, placement_by_name
from tfdist.summary_hooks import (
    StalenessHook,
    StepCounterHook,
    SummarySaverHook,
)
from tfdist.variables import describe

_log = logging.getLogger(__name__)

ModelFn = Callable[[], keras.Model]


class Estimator:
    """A model function and a configuration, trained by `train_and_evaluate`.

    Args:
        model_fn: Returns a compiled, built Keras model. Called inside the
            strategy's scope, and again for each rebuilt copy.
        config: The configuration.
    """

    def __init__(self, model_fn: ModelFn, config: RunConfig) -> None:
        check_callable("model_fn", model_fn)
        if isinstance(model_fn, keras.Model):
            raise TypeError(
                "Argument `model_fn` must be a function that returns a "
                "compiled model, since each task builds its own. Received: "
                f"the model {model_fn.name!r}."
            )
        check_type("config", config, RunConfig)
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
        config = self.config
        self._seed()
        _check_writable(self.model_dir)
        saver = CheckpointSaverHook(
            self.model_dir,
            save_steps=config.save_checkpoints_steps,
            save_secs=config.checkpoint_secs,
            listeners=list(saving_listeners),
            max_to_keep=config.keep_checkpoint_max,
            keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        )
        directory, every = self.model_dir, config.log_step_count_steps
        # At multiples of their intervals, where TF1 began at step 1: so they
        # cut the steps into the same pieces as the checkpoints.
        own: list[SessionRunHook] = [
            StepCounterHook(
                every, output_dir=directory, at_first_step=False, log=False
            ),
            _LogStart(max_steps),
            NanTensorHook(),
            ProgressHook(
                every,
                max_steps=max_steps,
                tasks_alive=lambda: session.tasks_alive(),
            ),
        ]
        if config.save_summary_steps:
            own.append(
                SummarySaverHook(
                    config.save_summary_steps,
                    output_dir=directory,
                    at_first_step=False,
                )
            )
        if max_steps is not None:
            own.append(StopAtStepHook(last_step=max_steps))
        if config.cluster.role == "chief":
            own.append(StalenessHook(directory, every))
        with MonitoredTrainingSession(
            lambda strategy: self._build(strategy, input_fn),
            checkpoint_dir=self.model_dir,
            chief_only_hooks=[*own, saver],
            hooks=hooks,
            save_checkpoint_secs=None,
            save_checkpoint_steps=None,
            save_summaries_steps=None,
            log_step_count_steps=None,
            max_wait_secs=config.session_creation_timeout_secs,
            max_to_keep=config.keep_checkpoint_max,
            cluster=config.cluster,
        ) as session:
            while not session.should_stop():
                session.run()
        return session.step

    def plan(self, num_ps: int, **kwargs: Any) -> Plan:
        """Where a planned placement would put the model's variables.

        Nothing is allocated and no cluster is needed.

        Args:
            num_ps: Number of parameter servers.
            **kwargs: As for `tfdist.planner.plan`.
        """
        return planner.plan(describe(self.model_fn), num_ps, **kwargs)

    def _build(
        self, strategy: tf.distribute.Strategy, input_fn: InputFn
    ) -> Trainable:
        """Everything that training needs, made in the strategy's scope."""
        global_step, model = self._create_variables(strategy)
        variables = checkpoint.named_variables(model, global_step)
        _log.info("%s", describe_placement(variables))
        loop = self._loop(strategy, model, global_step, input_fn)
        return Trainable(loop, global_step, variables, model=model)

    def _create_variables(
        self, strategy: tf.distribute.Strategy
    ) -> tuple[tf.Variable, keras.Model]:
        """The step counter, on the first server as in TF1, and the model."""
        num_ps = self.config.cluster.num_ps
        placement, specs = self.config.placement, ()
        if num_ps and placement != "round_robin":
            specs = describe(self.model_fn)
        if isinstance(placement, str):
            placement = placement_by_name(placement, specs, num_ps or 1)
        with placed_scope(strategy, num_ps=num_ps):
            global_step = tf.Variable(
                0,
                dtype=tf.int64,
                trainable=False,
                name="global_step",
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        reset_object_names()
        with placed_scope(
            strategy, num_ps=num_ps, placement=placement, specs=specs
        ):
            model = self.model_fn()
            optimizers_lib.build(model.optimizer, model.trainable_variables)
        return global_step, model

    def _loop(
        self,
        strategy: tf.distribute.Strategy,
        model: keras.Model,
        global_step: tf.Variable,
        input_fn: InputFn,
    ) -> Loop:
        input_fn = _with_context(input_fn)
        dataset = input_fn(tf.distribute.InputContext())
        step = ModelStep(
            model,
            dataset.element_spec,
            global_step=global_step,
            remote=self.config.cluster.role == "chief",
        )
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
        check_type(name, value, wanted)
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
    listeners = []
    if not separate:
        listeners.append(
            _EvaluateAfterSave(evaluator, eval_spec, train_spec.max_steps)
        )
    last_step = estimator.train(
        train_spec.input_fn,
        train_spec.max_steps,
        train_spec.hooks,
        listeners,
    )
    evaluation.announce_end(config.model_dir, last_step)
    if separate:
        result = evaluation.wait_for_result(
            config.model_dir,
            eval_spec.name,
            last_step,
            config.evaluator_timeout_secs,
        )
        return (result["metrics"], result["exports"]) if result else (None, [])
    if evaluator.evaluated != estimator.latest_checkpoint():
        evaluator.evaluate(estimator.latest_checkpoint())
    evaluator.export(is_the_final_export=True)
    evaluator.publish()
    return evaluator.metrics, evaluator.exports


class _EvaluateAfterSave(CheckpointSaverListener):
    """Evaluates on the chief, where there is no evaluator task."""

    def __init__(
        self, evaluator: Evaluator, eval_spec: EvalSpec, max_steps: int | None
    ) -> None:
        self._evaluator = evaluator
        self._max_steps = max_steps
        self._throttle_secs = eval_spec.throttle_secs
        self._not_before = 0.0

    def after_save(
        self, session: MonitoredTrainingSession, global_step_value: int
    ) -> None:
        """Evaluates what was saved, unless it is the last one or too soon."""
        at_start = not session.secs_in_steps
        at_end = session.should_stop() or global_step_value == self._max_steps
        if at_start or at_end or time.monotonic() < self._not_before:
            return
        self._not_before = time.monotonic() + self._throttle_secs
        path = tf.train.latest_checkpoint(session.checkpoint_dir)
        self._evaluator.evaluate(path)
        self._evaluator.export(is_the_final_export=False)
        self._evaluator.publish()


class _LogStart(SessionRunHook):
    """Says where training begins, and plainly when there is nothing to do."""

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps

    def after_create_session(
        self, session: MonitoredTrainingSession, coord: tf.train.Coordinator
    ) -> None:
        """Logs a line."""
        step, restored = session.step, session.restored_from
        if restored is None:
            _log.info("Training starts from newly initialized variables.")
        elif self._max_steps is None or step < self._max_steps:
            _log.info("Training continues at step %d from %s.", step, restored)
        else:
            _log.warning(
                "This job is finished already: %s is at step %d, and "
                "max_steps is %d. No step is run. Raise max_steps to train "
                "on, or choose another model_dir to train anew.",
                restored,
                step,
                self._max_steps,
            )


def describe_placement(variables: Mapping[str, checkpoint.Saveable]) -> str:
    """One line about which task holds how many variables and bytes.

    The shards of a table count one by one.

    >>> describe_placement({"a": tf.Variable([1.0]), "b": tf.Variable([2.0])})
    'This process holds 2 variables, 8 bytes.'
    """
    held: dict[str, list[int]] = defaultdict(list)
    for variable in itertools.chain.from_iterable(
        getattr(v, "variables", [v]) for v in variables.values()
    ):
        device = tf.DeviceSpec.from_string(variable.device)
        remote = device.job not in (None, "localhost")
        task = f"{device.job}:{device.task}" if remote else "This process"
        size = variable.dtype.size * (variable.shape.num_elements() or 0)
        held[task].append(size)
    return (
        "; ".join(
            f"{task} holds {len(sizes)} variables, {_bytes(sum(sizes))}"
            for task, sizes in sorted(held.items())
        )
        + "."
    )


def _bytes(number: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def _with_context(
    input_fn: InputFn,
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """The user's input function, made to take an `InputContext`."""
    parameters = inspect.signature(input_fn).parameters.values()
    if any(p.default is p.empty for p in parameters):
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

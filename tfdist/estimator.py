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
from tfdist.checkpoint import Checkpoints
from tfdist.evaluation import Evaluator
from tfdist.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    ProgressHook,
    SessionRunHook,
    SummarySaverHook,
)
from tfdist.loop import CoordinatedLoop, LocalLoop, Loop
from tfdist.plans import Plan
from tfdist.session import TrainingSession
from tfdist.specs import (
    EvalSpec,
    InputFn,
    RunConfig,
    TrainSpec,
    check_callable,
    check_type,
)
from tfdist.step import ModelStep
from tfdist.strategy import (
    parameter_server_strategy,
    placed_scope,
    placement_by_name,
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
        global_step, model = self._create_variables(strategy)
        variables = checkpoint.named_variables(model, global_step)
        _log.info("%s", describe_placement(variables))
        checkpoints = Checkpoints(
            self.model_dir,
            variables,
            config.keep_checkpoint_max,
            config.keep_checkpoint_every_n_hours,
        )
        restored = checkpoints.restore()
        _log_start(restored, int(global_step.numpy()), max_steps)
        session = TrainingSession(
            self._loop(strategy, model, global_step, input_fn),
            global_step,
            [*self._hooks(checkpoints, saving_listeners), *hooks],
            max_steps=max_steps,
            restored=restored is not None,
        )
        session.train()
        return session.step

    def plan(self, num_ps: int, **kwargs: Any) -> Plan:
        """Where a planned placement would put the model's variables.

        Nothing is allocated and no cluster is needed.

        Args:
            num_ps: Number of parameter servers.
            **kwargs: As for `tfdist.planner.plan`.
        """
        return planner.plan(describe(self.model_fn), num_ps, **kwargs)

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

    def _hooks(
        self,
        checkpoints: Checkpoints,
        listeners: Iterable[CheckpointSaverListener],
    ) -> list[SessionRunHook]:
        config = self.config
        hooks: list[SessionRunHook] = [
            ProgressHook(config.log_step_count_steps)
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
    listeners = [] if separate else [_EvaluateAfterSave(evaluator, eval_spec)]
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


def _log_start(restored: str | None, step: int, max_steps: int | None) -> None:
    """Says where training begins, and plainly when there is nothing to do."""
    if restored is None:
        _log.info("Training starts from newly initialized variables.")
    elif max_steps is None or step < max_steps:
        _log.info("Training continues at step %d from %s.", step, restored)
    else:
        _log.warning(
            "This job is finished already: %s is at step %d, and max_steps is "
            "%d. No step is run. Raise max_steps to train on, or choose "
            "another model_dir to train anew.",
            restored,
            step,
            max_steps,
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

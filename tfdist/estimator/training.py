"""`train_and_evaluate`: one program for every task of a job.

As in `tf.estimator`, the environment determines the task of this process
(`Cluster.from_env()`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any

from tfdist._tf import storage
from tfdist._tf.arguments import check_type
from tfdist.checkpoint import checkpoints
from tfdist.cluster import servers
from tfdist.cluster.spec import runs_in_its_cluster
from tfdist.data import data_service
from tfdist.estimator import results
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.evaluator import Evaluator
from tfdist.estimator.specs import EvalSpec, TrainSpec
from tfdist.hooks.saving_hooks import CheckpointSaverListener, saver_of
from tfdist.hooks.session_run_hook import Session, SessionRunHook
from tfdist.session import recovery
from tfdist.training.compiled_model import has_own_step

_log = logging.getLogger(__name__)


@runs_in_its_cluster
def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec | None
) -> tuple[dict[str, float] | None, list[str | None]]:
    """Runs this process's task of the job.

    The chief (or the only process) trains; an evaluator task evaluates. Without
    an evaluator, each checkpoint except the initial one is evaluated before
    training continues (a restored one not yet evaluated, before any step): by
    the workers or, if the EvalSpec has hooks or the model its own `train_step`
    or `test_step`, by the chief, which also exports. Workers, parameter servers
    and the tasks of a tf.data service (`tfdist.one_pass`) serve. The chief
    exits last.

    >>> def model_fn():
    ...     model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    ...     model.compile(optimizer="sgd", loss="mse")
    ...     return model
    >>> def input_fn():
    ...     return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat()
    >>> config = tfdist.RunConfig(directory, log_step_count_steps=None)
    >>> metrics, exports = tfdist.train_and_evaluate(
    ...     tfdist.Estimator(model_fn, config),
    ...     tfdist.TrainSpec(input_fn, max_steps=2),
    ...     tfdist.EvalSpec(input_fn, steps=1),
    ... )
    >>> metrics["global_step"]
    2

    Like `tf.estimator.train_and_evaluate`, in the same order, except for the
    differences of `tfdist.MonitoredTrainingSession` and `tfdist.Exporter` and:

    * All tasks end by themselves, an evaluator even if training ends before
      `max_steps`. The chief and the evaluator return results, not None.
    * The export of the last checkpoint is always the final one, even if the
      data ended before `max_steps`. A checkpoint exported before it was known
      to be the last is exported again.
    * A job that has already reached `max_steps` is evaluated and exported,
      because its last process may have died before doing so: if its other
      tasks have ended, after `session_creation_timeout_secs`.
    * An empty training input is an error.
    * It writes `training_done.json`, which ends an evaluator, and `latest.json`
      in the evaluation's directory.

    Args:
        estimator: The model and configuration.
        train_spec: What to train on.
        eval_spec: What to evaluate on. None: no evaluation.

    Returns:
        The final metrics and the paths of the last exports; `(None, [])` from
        workers and servers, without an `eval_spec`, and from the chief when the
        evaluator failed or did not finish in time.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: the estimator's configuration has no checkpoints, or an
            evaluation would have no end.
    """
    check_type("estimator", estimator, Estimator)
    check_type("train_spec", train_spec, TrainSpec)
    check_type("eval_spec", eval_spec, EvalSpec | None)
    if not estimator.config.saves_checkpoints:
        raise ValueError(
            "`train_and_evaluate` evaluates checkpoints, and there are none. "
            "Set `save_checkpoints_steps` or `save_checkpoints_secs` of the "
            "RunConfig. Received: None or 0 for both."
        )
    cluster = estimator.config.cluster
    if cluster.role in ("dispatcher", "data_worker"):
        work_dir = os.path.join(estimator.model_dir, "data_service")
        path = results.done_path(estimator.model_dir)
        known = None, results.read_json(path)  # The second: an earlier job's.
        data_service.serve(
            cluster, work_dir, lambda: results.read_json(path) not in known
        )
        return None, []
    on_ps = estimator.config.strategy_name == "ps"
    if on_ps and cluster.role in ("worker", "ps"):
        servers.serve(cluster, restart=recovery.restart_process)
        return None, []
    if cluster.role == "worker":
        hooks, max_steps = train_spec.hooks, train_spec.max_steps
        estimator.train(train_spec.input_fn, hooks, max_steps=max_steps)
        return None, []
    evaluator = result = None
    if eval_spec:
        evaluator = Evaluator(estimator.model_fn, estimator.config, eval_spec)
    if cluster.role != "evaluator":
        result = _train_and_evaluate(estimator, train_spec, evaluator)
        if on_ps:
            # Only now: after an error the servers wait for a restart.
            servers.release(cluster)
    elif evaluator:
        wait_secs = estimator.config.session_creation_timeout_secs
        evaluator.run_continuously(train_spec.max_steps, wait_secs)
        result = evaluator.result
    return (result["metrics"], result["exports"]) if result else (None, [])


def _train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, evaluator: Evaluator | None
) -> dict[str, Any] | None:
    """Runs the chief's task; returns the last result, if there is one."""
    config, max_steps = estimator.config, train_spec.max_steps
    separate = config.cluster.has_evaluator
    storage.check_writable(config.model_dir)
    hooks, listeners = [*train_spec.hooks], [*train_spec.saving_listeners]
    if evaluator and not separate:
        evaluator.begin()
        # Creating a dataset may run TensorFlow ops, which is not allowed before
        # the processes of an all-reduce job are connected.
        if config.strategy_name != "multi_worker_mirrored":
            evaluator.check_ends()
        has_workers = config.strategy_name == "ps"
        after_save = _EvaluateAfterSave(evaluator, max_steps, has_workers)
        listeners.append(after_save)
        # First, so that callbacks see its results.
        hooks.insert(0, _EvaluateRestored(after_save))
    results.retract_end(config.model_dir)
    estimator.train(train_spec.input_fn, hooks, None, max_steps, listeners)
    path = estimator.latest_checkpoint()
    assert path is not None  # Training ends with one.
    if evaluator and not (separate or evaluator.result):
        evaluator.evaluate(path)
        evaluator.export(is_the_final_export=True)
    last_step = checkpoints.step_of(path)
    results.announce_end(config.model_dir, last_step)
    if evaluator and separate:
        name, secs = evaluator.spec.name, config.evaluator_timeout_secs
        return results.wait_for_result(config.model_dir, name, last_step, secs)
    return evaluator.result if evaluator else None


@dataclasses.dataclass(eq=False)
class _EvaluateAfterSave(CheckpointSaverListener):
    """Evaluates on the chief, where there is no evaluator task."""

    evaluator: Evaluator
    max_steps: int | None
    has_workers: bool
    not_before = 0.0
    exported_the_last = told_later = False

    def before_save(self, session: Session, global_step_value: int) -> None:
        """Lets training continue if this checkpoint will not be evaluated."""
        self.told_later = time.monotonic() < self.not_before

    def after_save(self, session: Session, global_step_value: int) -> None:
        """Evaluates the checkpoint, unless initial or throttled."""
        if not session.secs_in_steps:
            return
        self.exported_the_last = False
        at_end = session.should_stop() or global_step_value == self.max_steps
        if not self.told_later:
            self.evaluate(session, is_the_last=at_end)
        elif not at_end:
            _log.info(
                "The checkpoint of step %d is not evaluated, because "
                "EvalSpec(throttle_secs=%g) limits how often that is done.",
                global_step_value,
                self.evaluator.spec.throttle_secs,
            )

    def end(self, session: Session, global_step_value: int) -> None:
        """Evaluates and exports the last checkpoint, unless already done."""
        if not self.exported_the_last:
            self.evaluate(session, is_the_last=True)

    def evaluate(
        self, session: Session, is_the_last: bool, path: str | None = None
    ) -> None:
        """Evaluates and exports checkpoint `path`; default: the newest."""
        assert session.checkpoint_dir is not None
        start = time.monotonic()
        path = path or checkpoints.latest(session.checkpoint_dir)
        assert path is not None  # It was just saved.
        if not self.evaluator.has_evaluated(path):
            # Workers cannot evaluate a model with its own step.
            here = has_own_step(session.model) or not self.has_workers
            self.evaluator.evaluate(path, None if here else session.evaluate)
        self.evaluator.export(is_the_final_export=is_the_last)
        self.exported_the_last = is_the_last
        self.not_before = start + self.evaluator.spec.throttle_secs


@dataclasses.dataclass(eq=False)
class _EvaluateRestored(SessionRunHook):
    """Evaluates a restored checkpoint whose evaluation a failure interrupted.

    Before, it refuses input of which an evaluation would fail or never end.
    """

    after_save: _EvaluateAfterSave

    def after_create_session(self, session: Session, coord: Any) -> None:
        after_save, path = self.after_save, session.restored_from
        after_save.evaluator.check_input(session.model)
        saver = saver_of(session.checkpoint_dir, session.hooks)
        # A checkpoint saved on SIGTERM or before a restart is not evaluated.
        on_time = saver and session.step % (saver.save_steps or 1) == 0
        if (
            path
            and on_time
            and session.step not in (0, after_save.max_steps)
            and time.monotonic() >= after_save.not_before
            and not after_save.evaluator.has_published(path)
        ):
            after_save.evaluate(session, is_the_last=False, path=path)

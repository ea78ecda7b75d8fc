"""`train_and_evaluate`: one program, every task of a job.

The top of tfdist. Which part of the job this process does is read from the
environment (`Cluster.from_env()`), as `tf.estimator` did; the parts themselves
are the layers below, each usable alone.
"""

from __future__ import annotations

import time

import tensorflow as tf

from tfdist import checkpoint, evaluation, servers
from tfdist.estimator import Estimator
from tfdist.evaluation import Evaluator
from tfdist.saving_hooks import CheckpointSaverListener
from tfdist.session import MonitoredTrainingSession
from tfdist.specs import EvalSpec, TrainSpec, check_type, without_context


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
        without_context(eval_spec.input_fn),
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
        servers.release(cluster)
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
    listeners = [*train_spec.saving_listeners]
    if not separate:
        listeners.append(
            _EvaluateAfterSave(evaluator, eval_spec, train_spec.max_steps)
        )
    estimator.train(
        train_spec.input_fn,
        hooks=train_spec.hooks,
        max_steps=train_spec.max_steps,
        saving_listeners=listeners,
    )
    last_step = checkpoint.step_of(estimator.latest_checkpoint())
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

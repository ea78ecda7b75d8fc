"""Early stopping by the results of the evaluations.

As `tf.estimator.experimental` had it: the hooks read what the evaluator, which
may be another machine, wrote to `<model_dir>/eval`, and stop the training.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable
from typing import Any

from tfdist._tf.arguments import check_callable
from tfdist.hooks.events import ScalarReader
from tfdist.hooks.session_run_hook import (
    Logs,
    RunContext,
    SessionRunHook,
    TimedHook,
)

_log = logging.getLogger(__name__)
_Compare = Callable[[float, float], bool]
_Values = dict[int, float]  # Of a metric, by the step of the evaluation.


def make_early_stopping_hook(
    estimator: Any,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """A hook that stops training when `should_stop_fn()` says so.

    As `tf.estimator.experimental.make_early_stopping_hook`: asked after the
    first step, then at the given interval. It belongs into
    `TrainSpec(hooks=...)`.

    Args:
        estimator: Unused; it keeps the place it has in TF1.
        should_stop_fn: Whether to stop.
        run_every_secs: Seconds between questions.
        run_every_steps: Steps between questions. Exactly one must be given:
            `run_every_secs=None`, then.

    >>> hook = tfdist.hooks.make_early_stopping_hook(
    ...     None, lambda: True, run_every_secs=None, run_every_steps=10
    ... )
    >>> with tfdist.MonitoredTrainingSession(build_fn, hooks=[hook]) as session:
    ...     logs = session.run()
    >>> session.should_stop()
    True
    """
    del estimator
    check_callable("should_stop_fn", should_stop_fn)
    return _StopHook(
        should_stop_fn,
        run_every_secs=run_every_secs,
        run_every_steps=run_every_steps,
    )


def stop_if_higher_hook(
    estimator: Any,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Stops when an evaluation's metric is above `threshold`.

    As `tf.estimator.experimental.stop_if_higher_hook`.

    Args:
        estimator: Whose evaluations: has `eval_dir()`, or `model_dir`.
        metric_name: Name of the metric.
        threshold: The metric's bound.
        eval_dir: Where the results are. Default: that of `estimator`.
        min_steps: Evaluations before this step do not count.
        run_every_secs: As for `make_early_stopping_hook`.
        run_every_steps: As for `make_early_stopping_hook`.

    Raises:
        ValueError: in training, when an evaluation has no such metric.

    >>> hook = tfdist.hooks.stop_if_higher_hook(
    ...     None, "accuracy", 0.9, eval_dir=directory
    ... )
    """
    stops = functools.partial(_any, operator.gt, threshold)
    metric = estimator, metric_name, eval_dir, min_steps
    return _metric_hook(stops, *metric, run_every_secs, run_every_steps)


def stop_if_lower_hook(
    estimator: Any,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Stops when an evaluation's metric is below `threshold`.

    As `stop_if_higher_hook` otherwise.

    >>> hook = tfdist.hooks.stop_if_lower_hook(
    ...     None, "loss", 0.1, eval_dir=directory
    ... )
    """
    stops = functools.partial(_any, operator.lt, threshold)
    metric = estimator, metric_name, eval_dir, min_steps
    return _metric_hook(stops, *metric, run_every_secs, run_every_steps)


def stop_if_no_increase_hook(
    estimator: Any,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Stops when a metric has not risen for so many steps.

    As `tf.estimator.experimental.stop_if_no_increase_hook`: compares the steps
    of the evaluations, not the step of the training. Training stops when an
    evaluation is `max_steps_without_increase` steps or more after the best one
    before it. The other arguments are those of `stop_if_higher_hook`.

    >>> hook = tfdist.hooks.stop_if_no_increase_hook(
    ...     None, "accuracy", max_steps_without_increase=500, eval_dir=directory
    ... )
    """
    stops = functools.partial(_stalls, operator.gt, max_steps_without_increase)
    metric = estimator, metric_name, eval_dir, min_steps
    return _metric_hook(stops, *metric, run_every_secs, run_every_steps)


def stop_if_no_decrease_hook(
    estimator: Any,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Stops when a metric has not fallen for so many steps.

    As `stop_if_no_increase_hook` otherwise.

    >>> hook = tfdist.hooks.stop_if_no_decrease_hook(
    ...     None, "loss", max_steps_without_decrease=500, eval_dir=directory
    ... )
    """
    stops = functools.partial(_stalls, operator.lt, max_steps_without_decrease)
    metric = estimator, metric_name, eval_dir, min_steps
    return _metric_hook(stops, *metric, run_every_secs, run_every_steps)


class _StopHook(TimedHook):
    def __init__(
        self, should_stop_fn: Callable[[], bool], **cadence: Any
    ) -> None:
        super().__init__(**cadence)
        self._should_stop_fn = should_stop_fn

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        if self._should_stop_fn():
            _log.info("Stopping early, at step %d.", context.session.step)
            context.request_stop()


def _metric_hook(
    stops: Callable[[_Values], bool],
    estimator: Any,
    metric_name: str,
    eval_dir: str | None,
    min_steps: int,
    *cadence: Any,
) -> SessionRunHook:
    """A hook that asks `stops` of a metric's values, once there are some."""
    directory = eval_dir or eval_dir_of(estimator)
    reader = ScalarReader(directory)

    def should_stop() -> bool:
        values = {}
        for step, metrics in reader.read().items():
            if step < min_steps:
                continue
            if metric_name not in metrics:
                raise ValueError(
                    f"The evaluation of step {step} in {directory} has no "
                    f"metric {metric_name!r}. It has: {sorted(metrics)}."
                )
            values[step] = metrics[metric_name]
        if not (values and stops(values)):
            return False
        _log.info("Of the evaluations, by step: %s is %s.", metric_name, values)
        return True

    return make_early_stopping_hook(estimator, should_stop, *cadence)


def _any(passes: _Compare, bound: float, values: _Values) -> bool:
    return any(passes(value, bound) for value in values.values())


def _stalls(better: _Compare, most_steps: int, values: _Values) -> bool:
    """Whether an evaluation is so many steps after the best before it."""
    best, best_step, longest = None, 0, 0
    for step, value in values.items():
        if best is None or better(value, best):
            best, best_step = value, step
        longest = max(longest, step - best_step)
    return longest >= most_steps


def eval_dir_of(estimator: Any) -> str:
    """Where its evaluations write: its `eval_dir()`, or `<model_dir>/eval`."""
    if callable(getattr(estimator, "eval_dir", None)):
        return estimator.eval_dir()
    return os.path.join(estimator.model_dir, "eval")

"""Early stopping based on evaluation results.

As in `tf.estimator.experimental`, the hooks read what the evaluator, possibly
on another machine, wrote to `<model_dir>/eval`, and stop training.
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
from tfdist.hooks.session_run_hook import RunContext, SessionRunHook, TimedHook

_log = logging.getLogger(__name__)
_Compare = Callable[[float, float], bool]
_Values = dict[int, float]  # Of a metric, by the step of the evaluation.


def make_early_stopping_hook(
    estimator: Any,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Returns a hook that stops training when `should_stop_fn()` is true.

    Like `tf.estimator.experimental.make_early_stopping_hook`, it checks after
    the first step, then at the given interval. Pass it to
    `TrainSpec(hooks=...)`.

    Args:
        estimator: Unused; keeps the argument order of TF1.
        should_stop_fn: Returns whether to stop.
        run_every_secs: Seconds between checks.
        run_every_steps: Steps between checks. Exactly one must be given, so
            set `run_every_secs=None` with it.

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

    class StopHook(TimedHook):
        def on_trigger(self, context: RunContext, logs: Any) -> None:
            if should_stop_fn():
                _log.info("Stopping early, at step %d.", context.session.step)
                context.request_stop()

    return StopHook(
        run_every_secs=run_every_secs, run_every_steps=run_every_steps
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
    """Returns a hook that stops when a metric is above `threshold`.

    Like `tf.estimator.experimental.stop_if_higher_hook`.

    Args:
        estimator: The evaluated estimator, with `eval_dir()` or `model_dir`.
        metric_name: Name of the metric.
        threshold: The metric's bound.
        eval_dir: Directory of the results. Default: that of `estimator`.
        min_steps: Evaluations before this step are ignored.
        run_every_secs: As for `make_early_stopping_hook`.
        run_every_steps: As for `make_early_stopping_hook`.

    Raises:
        ValueError: in training, if an evaluation lacks the metric.

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
    """Returns a hook that stops when a metric is below `threshold`.

    Otherwise like `stop_if_higher_hook`.

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
    """Returns a hook that stops when a metric has stopped increasing.

    Like `tf.estimator.experimental.stop_if_no_increase_hook`, it compares the
    steps of evaluations, not the current training step. Training stops when an
    evaluation is at least `max_steps_without_increase` steps after the best one
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
    """Returns a hook that stops when a metric has stopped decreasing.

    Otherwise like `stop_if_no_increase_hook`.

    >>> hook = tfdist.hooks.stop_if_no_decrease_hook(
    ...     None, "loss", max_steps_without_decrease=500, eval_dir=directory
    ... )
    """
    stops = functools.partial(_stalls, operator.lt, max_steps_without_decrease)
    metric = estimator, metric_name, eval_dir, min_steps
    return _metric_hook(stops, *metric, run_every_secs, run_every_steps)


def _metric_hook(
    stops: Callable[[_Values], bool],
    estimator: Any,
    metric_name: str,
    eval_dir: str | None,
    min_steps: int,
    *cadence: Any,
) -> SessionRunHook:
    """Returns a hook that calls `stops` with a metric's values, if any."""
    directory = eval_dir or eval_dir_of(estimator)
    reader = ScalarReader(directory)

    def should_stop() -> bool:
        values = {}
        for step, metrics in reader.read().items():
            if step < min_steps:
                continue
            if metric_name not in metrics:
                raise ValueError(
                    "Argument `metric_name` must be a metric of the evaluation "
                    f"of step {step} in {directory}: {sorted(metrics)}. "
                    f"Received: metric_name={metric_name!r}."
                )
            values[step] = metrics[metric_name]
        if not (values and stops(values)):
            return False
        _log.info("%s in each evaluation, by step: %s.", metric_name, values)
        return True

    return make_early_stopping_hook(estimator, should_stop, *cadence)


def _any(passes: _Compare, bound: float, values: _Values) -> bool:
    return any(passes(value, bound) for value in values.values())


def _stalls(better: _Compare, most_steps: int, values: _Values) -> bool:
    """Whether an evaluation is `most_steps` after the best one before it."""
    best, best_step, longest = None, 0, 0
    for step, value in values.items():
        if best is None or better(value, best):
            best, best_step = value, step
        longest = max(longest, step - best_step)
    return longest >= most_steps


def eval_dir_of(estimator: Any) -> str:
    """Returns the estimator's `eval_dir()`, or `<model_dir>/eval`."""
    if callable(getattr(estimator, "eval_dir", None)):
        return estimator.eval_dir()
    return os.path.join(estimator.model_dir, "eval")

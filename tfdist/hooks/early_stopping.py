"""Early stopping by the results of the evaluations.

As `tf.estimator.experimental` had it: the hooks read what the evaluator, which
may be another machine, wrote to `<model_dir>/eval`, and stop the training.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Iterator
from typing import Any

from tfdist.hooks.events import read_scalars
from tfdist.hooks.session_run_hook import (
    Logs,
    SessionRunContext,
    SessionRunHook,
    TimedHook,
    check_exactly_one,
)

_log = logging.getLogger(__name__)
_Compare = Callable[[float, float], bool]


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
        run_every_secs: Seconds between questions; must be None where
            `run_every_steps` is given.
        run_every_steps: Steps between questions.

    Raises:
        TypeError: `should_stop_fn` is not callable.
        ValueError: both or neither interval is given, or it is not positive.

    >>> hook = tfdist.hooks.make_early_stopping_hook(
    ...     None, lambda: True, run_every_secs=None, run_every_steps=10
    ... )
    >>> hooks = [hook, tfdist.StopAtStepHook(last_step=100)]
    >>> with tfdist.MonitoredTrainingSession(build_fn, hooks=hooks) as session:
    ...     while not session.should_stop():
    ...         logs = session.run()
    >>> session.step
    1
    """
    del estimator
    return _StopOnPredicateHook(should_stop_fn, run_every_secs, run_every_steps)


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
        min_steps: Evaluations of earlier steps do not count.
        run_every_secs: As for `make_early_stopping_hook`.
        run_every_steps: As for `make_early_stopping_hook`.

    Raises:
        ValueError: as `make_early_stopping_hook`; in training, when an
            evaluation has no such metric.

    >>> hook = tfdist.hooks.stop_if_higher_hook(
    ...     None, "accuracy", 0.9, eval_dir=directory
    ... )
    """
    results = _Results(estimator, eval_dir, metric_name, min_steps)
    return _StopOnPredicateHook(
        lambda: results.crossed(operator.gt, threshold),
        run_every_secs,
        run_every_steps,
    )


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
    ...     None, "accuracy", 0.9, eval_dir=directory
    ... )
    """
    results = _Results(estimator, eval_dir, metric_name, min_steps)
    return _StopOnPredicateHook(
        lambda: results.crossed(operator.lt, threshold),
        run_every_secs,
        run_every_steps,
    )


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
    results = _Results(estimator, eval_dir, metric_name, min_steps)
    return _StopOnPredicateHook(
        lambda: results.stalled(operator.gt, max_steps_without_increase),
        run_every_secs,
        run_every_steps,
    )


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
    ...     None, "accuracy", max_steps_without_decrease=500, eval_dir=directory
    ... )
    """
    results = _Results(estimator, eval_dir, metric_name, min_steps)
    return _StopOnPredicateHook(
        lambda: results.stalled(operator.lt, max_steps_without_decrease),
        run_every_secs,
        run_every_steps,
    )


class _StopOnPredicateHook(TimedHook):
    def __init__(
        self,
        should_stop_fn: Callable[[], bool],
        run_every_secs: float | None,
        run_every_steps: int | None,
    ) -> None:
        if not callable(should_stop_fn):
            raise TypeError(
                "Argument `should_stop_fn` must be a function without "
                f"arguments. Received: {should_stop_fn!r}."
            )
        check_exactly_one(
            run_every_secs=run_every_secs, run_every_steps=run_every_steps
        )
        super().__init__(run_every_secs, run_every_steps)
        self._should_stop_fn = should_stop_fn

    def on_trigger(self, context: SessionRunContext, logs: Logs) -> None:
        if self._should_stop_fn():
            _log.info("Stopping early, at step %d.", context.session.step)
            context.request_stop()


class _Results:
    """What the evaluations say about a metric, read again at each question."""

    def __init__(
        self,
        estimator: Any,
        eval_dir: str | None,
        metric_name: str,
        min_steps: int,
    ) -> None:
        self._directory = eval_dir or eval_dir_of(estimator)
        self._metric_name = metric_name
        self._min_steps = min_steps

    def _values(self) -> Iterator[tuple[int, float]]:
        for step, metrics in read_scalars(self._directory).items():
            if step < self._min_steps:
                continue
            if self._metric_name not in metrics:
                raise ValueError(
                    f"The evaluation of step {step} in {self._directory} has "
                    f"no metric called {self._metric_name!r}. It has: "
                    f"{sorted(metrics)}."
                )
            yield step, metrics[self._metric_name]

    def crossed(self, is_beyond: _Compare, threshold: float) -> bool:
        """Whether any evaluation is beyond the threshold."""
        for step, value in self._values():
            if is_beyond(value, threshold):
                _log.info(
                    "%s is %g at step %d; the threshold for early stopping is "
                    "%g.",
                    self._metric_name,
                    value,
                    step,
                    threshold,
                )
                return True
        return False

    def stalled(self, is_better: _Compare, max_steps: int) -> bool:
        """Whether an evaluation is `max_steps` after the best before it."""
        best, best_step = None, 0
        for step, value in self._values():
            if best is None or is_better(value, best):
                best, best_step = value, step
            if step - best_step >= max_steps:
                _log.info(
                    "%s was best at step %d (%g), %d steps before step %d.",
                    self._metric_name,
                    best_step,
                    best,
                    step - best_step,
                    step,
                )
                return True
        return False


def eval_dir_of(estimator: Any) -> str:
    """Where the evaluations of `estimator` write, its `eval_dir()` or default.

    >>> from types import SimpleNamespace
    >>> eval_dir_of(SimpleNamespace(model_dir="job"))
    'job/eval'
    """
    if callable(getattr(estimator, "eval_dir", None)):
        return estimator.eval_dir()
    return os.path.join(estimator.model_dir, "eval")

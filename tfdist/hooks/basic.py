"""Hooks of `tf.compat.v1.train` that stop, log, check and collect values.

Names, arguments and cadences are TF1's; docstrings state the differences.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.tf1_arguments import tf1_arguments
from tfdist.hooks.session_run_hook import (
    Logs,
    RunContext,
    RunValues,
    Session,
    SessionRunHook,
    TimedHook,
    check_exactly_one,
    resolve,
)

_log = logging.getLogger(__name__)

NanLossDuringTrainingError = tf.compat.v1.train.NanLossDuringTrainingError


class StopAtStepHook(SessionRunHook):
    """Requests a stop at a step.

    Like `tf.compat.v1.train.StopAtStepHook`, but never exceeds the step: no run
    is longer than the remaining steps, and a session that is already there runs
    no step, with a warning (TF1 ran one more).

    Args:
        num_steps: Steps to run, counted from the first session; a recovery in
            the same process does not restart the count, but a restart of the
            process does.
        last_step: Global step at which to stop. Exactly one must be given.

    >>> hook = tfdist.StopAtStepHook(last_step=1_000)
    >>> hook.steps_until_next(step=990)
    10
    """

    wants_none_under_way = warns = True

    def __init__(
        self, num_steps: int | None = None, last_step: int | None = None
    ) -> None:
        check_exactly_one(num_steps=num_steps, last_step=last_step)
        self._num_steps = num_steps or 0
        self._last_step = last_step or 0

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Computes the last step once, and stops if it has been reached."""
        if not self._last_step:
            self._last_step = session.step + self._num_steps
        if session.step >= self._last_step:
            session.request_stop()
            if self.warns:
                _log.warning(
                    "No step is run: the job is at step %d, and StopAtStepHook "
                    "stops it at step %d.%s",
                    session.step,
                    self._last_step,
                    " This hook counted `num_steps` from its first session: "
                    "create a new hook to continue." * bool(self._num_steps),
                )

    def steps_until_next(self, step: int) -> int | None:
        """Returns the remaining steps."""
        return max(1, self._last_step - step)

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Stops at the last step."""
        if run_context.session.step >= self._last_step:
            run_context.request_stop()


class LoggingTensorHook(TimedHook):
    """Logs values every N steps, every N seconds, or at the end.

    Like `tf.compat.v1.train.LoggingTensorHook`: it logs the first step, then
    every N steps (1, 4, 7 for N=3), by the global step.

    Args:
        tensors: Names of logs or variables, or variables; or a dict from the
            tags to log to these.
        every_n_iter: Steps between lines.
        every_n_secs: Seconds between lines. Exactly one must be given; none
            is needed with `at_end`.
        at_end: Whether to log the final values: the logs of the last run, and
            the current values of the variables.
        formatter: Maps a dict of values by tag to the line. Default:
            `a = 1, b = 2 (0.123 sec)`.

    >>> hook = tfdist.LoggingTensorHook(["loss"], every_n_iter=100)
    >>> hook.steps_until_next(step=0)  # The first step is always logged.
    1
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[Any],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
    ) -> None:
        self._only_at_end = at_end and every_n_iter is every_n_secs is None
        super().__init__(
            at_first_step=not self._only_at_end,
            every_n_secs=math.inf if self._only_at_end else every_n_secs,
            every_n_iter=every_n_iter,
        )
        if isinstance(tensors, Mapping):
            self._tensors = dict(sorted(tensors.items()))
        else:
            self._tensors = {
                # Keras' names are the last part of their paths.
                getattr(t, "path", getattr(t, "name", t)): t
                for t in tensors
            }
        self._at_end = at_end
        self._formatter = formatter

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Writes a line."""
        self._write(context.session)

    def end(self, session: Session) -> None:
        """Logs the final values if `at_end` is true."""
        if self._at_end:
            self._secs, _ = self._timer.update_last_triggered_step(session.step)
            self._write(session)

    def _write(self, session: Session) -> None:
        values = resolve(self._tensors, self._logs, session.variables)
        if self._formatter:
            _log.info("%s", self._formatter(values))
            return
        with np.printoptions(suppress=True):
            line = ", ".join(f"{tag} = {v}" for tag, v in values.items())
        if self._secs is not None and not self._only_at_end:
            line += f" ({self._secs:.3f} sec)"
        _log.info("%s", line)


class NanTensorHook(SessionRunHook):
    """Stops training when the loss is NaN.

    Like `tf.compat.v1.train.NanTensorHook`. The loss of a run of many steps is
    their mean, so a NaN in any step is found. The session calls these hooks
    before those that save. A NaN may not reach the loss (`relu(NaN)` is 0 on
    some CPUs): the session's `check_numerics` checks the weights themselves.

    Args:
        loss_tensor: Name of the loss in the logs, or of a variable. None:
            "loss" or, if that is not logged, as with a custom `train_step`,
            all logs.
        fail_on_nan_loss: Whether to raise an error rather than request a stop.
            In the latter case, saving the last checkpoint still fails if
            weights are NaN, unless `check_numerics=False` (TF1 saved them). As
            in TF1, an `Estimator` has its own hook, which raises.

    Raises:
        NanLossDuringTrainingError: in `after_run`, when the loss is NaN.

    >>> build = lambda: tfdist.Trainable(
    ...     lambda: {"loss": float("nan")}, tf.Variable(0, dtype=tf.int64), {}
    ... )
    >>> hooks = [tfdist.NanTensorHook()]
    >>> with tfdist.MonitoredTrainingSession(build, hooks=hooks) as session:
    ...     session.run()
    Traceback (most recent call last):
    tensorflow...NanLossDuringTrainingError: NaN loss during training.
    """

    def __init__(
        self, loss_tensor: str | None = "loss", fail_on_nan_loss: bool = True
    ) -> None:
        self._loss = loss_tensor
        self._fail_on_nan_loss = fail_on_nan_loss

    def steps_until_next(self, step: int) -> None:
        """Allows any number of steps: one NaN makes their mean NaN."""

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Checks the loss, if any step ran."""
        session, logs = run_context.session, run_values.results
        if not logs:
            return
        names = self._loss or ("loss" if "loss" in logs else list(logs))
        loss = resolve(names, logs, session.variables)
        if not np.isnan(loss).any():
            return
        level = logging.ERROR if self._fail_on_nan_loss else logging.WARNING
        _log.log(
            level,
            "The loss is NaN at step %d. Look for NaN among features and "
            "targets, and for a learning rate that is too large.",
            session.step,
        )
        if self._fail_on_nan_loss:
            raise NanLossDuringTrainingError
        run_context.request_stop()


class FinalOpsHook(SessionRunHook):
    """Evaluates values at the end of training.

    Like `tf.compat.v1.train.FinalOpsHook`.

    >>> hook = FinalOpsHook({"weights": "dense/kernel"})
    >>> hook.final_ops_values is None  # Until the session ends.
    True

    Args:
        final_ops: A structure of variables and names of variables, or a
            function that takes the session and returns any value.

    Attributes:
        final_ops_values: The values; None before the end.
    """

    @tf1_arguments
    def __init__(self, final_ops: Any) -> None:
        self._final_ops = final_ops
        self.final_ops_values: Any = None

    def end(self, session: Session) -> None:
        """Evaluates the values."""
        ops = self._final_ops
        if callable(ops):
            self.final_ops_values = ops(session)
        else:
            self.final_ops_values = resolve(ops, {}, session.variables)

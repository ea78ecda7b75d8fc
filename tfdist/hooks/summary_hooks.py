"""Hooks that write to TensorBoard: scalars, speed, staleness, profiles."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.tf1_arguments import tf1_arguments
from tfdist.data import input_wait
from tfdist.embeddings.growing import growing_of
from tfdist.hooks.events import event_file
from tfdist.hooks.session_run_hook import (
    Logs,
    RunContext,
    RunValues,
    Session,
    TimedHook,
)
from tfdist.training import staleness

_log = logging.getLogger(__name__)


class SummarySaverHook(TimedHook):
    """Writes the logs (the loss and the metrics) as scalars.

    Like `tf.compat.v1.train.SummarySaverHook`: it writes the first step, then
    every N steps (1, 4, 7 for N=3). The scalars are the logs of the run that
    ends at that step, instead of a graph's `summary_op`. After a recovery
    TensorBoard discards the points of steps that are run again.

    Args:
        save_steps: Steps between summaries.
        save_secs: Seconds between summaries. Exactly one must be given.
        output_dir: Directory of the event file; must be given.
        at_first_step: Whether to write the first step, as in TF1. If not,
            summaries are written at multiples of N, together with checkpoints,
            and do not shorten runs.

    >>> saver = tfdist.hooks.SummarySaverHook(2, output_dir=directory)
    >>> hooks = [saver, tfdist.StopAtStepHook(last_step=4)]
    >>> with tfdist.MonitoredTrainingSession(build_fn, hooks=hooks) as session:
    ...     while not session.should_stop():
    ...         logs = session.run()
    >>> list(tfdist.hooks.read_scalars(directory))
    [1, 3]
    """

    @tf1_arguments
    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | None = None,
        *,
        at_first_step: bool = True,
    ) -> None:
        super().__init__(
            at_first_step, save_secs=save_secs, save_steps=save_steps
        )
        if not output_dir:
            raise ValueError(
                "Argument `output_dir` must be the directory of the event "
                f"file. Received: output_dir={output_dir!r}."
            )
        self._file = event_file(output_dir)
        self._start_step: int | None = None

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Stores the step at which the session starts."""
        super().after_create_session(session, coord)
        self._start_step = session.step

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Writes the session's start, and logs when the timer triggers."""
        if self._start_step is not None:
            self._file.write_start(self._start_step + 1)
            self._start_step = None
        super().after_run(run_context, run_values)

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Writes the logs."""
        self._file.write(context.session.step, logs)


class StepCounterHook(TimedHook):
    """Logs steps per second, including time for checkpoints and evaluations.

    Like `tf.compat.v1.train.StepCounterHook`, with tag `global_step/sec`; the
    first step starts the clock, so the first rate is written at step N + 1. It
    also writes `input_wait`, the fraction of the steps' time spent waiting for
    data, from 0 to 1.

    Args:
        every_n_steps: Steps between rates.
        every_n_secs: Seconds between rates. Exactly one must be given, so set
            `every_n_steps=None` with it.
        output_dir: Directory of the event file; None to log only.
        at_first_step: As for `SummarySaverHook`.
        log: Whether to also log the rate.

    >>> hook = tfdist.hooks.StepCounterHook(every_n_steps=500)
    >>> hook.steps_until_next(step=0)
    1
    """

    @tf1_arguments
    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | None = None,
        *,
        at_first_step: bool = True,
        log: bool = True,
    ) -> None:
        super().__init__(
            at_first_step,
            every_n_secs=every_n_secs,
            every_n_steps=every_n_steps,
        )
        self._file = event_file(output_dir) if output_dir else None
        self._log = log
        self._warnings = 0

    def begin(self) -> None:
        """Forgets an earlier session."""
        super().begin()
        self._since: tuple[float, int, np.ndarray] | None = None

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Starts the clock again after a recovery."""
        super().after_create_session(session, coord)
        self._seen_step: int | None = None
        if self._timer.last_triggered_step() is not None:
            self._since = (time.monotonic(), session.step, session.input_secs)

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Measures when the timer triggers; warns if the step is stuck."""
        super().after_run(run_context, run_values)
        session = run_context.session
        stands = session.step == self._seen_step and not session.should_stop()
        if stands and self._warnings < 5:
            self._warnings += 1
            _log.warning(
                "The global step did not advance: it is still %d after a run. "
                "Check that the step increments it.",
                session.step,
            )
        self._seen_step = session.step

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Writes the rate since the last trigger."""
        session = context.session
        now = (time.monotonic(), session.step, session.input_secs)
        since, self._since = self._since, now
        if since is None:
            return
        rate = (now[1] - since[1]) / max(now[0] - since[0], 1e-9)
        if self._log:
            _log.info("global_step/sec: %g", rate)
        if self._file:
            waited = input_wait.share(now[2] - since[2])
            scalars = {"global_step/sec": rate, "input_wait": waited}
            self._file.write(session.step, scalars)


class StalenessHook(TimedHook):
    """Writes the staleness of asynchronous updates.

    Writes a histogram and percentiles of all updates so far, and logs a line at
    the end; writes nothing if `session.staleness` is None.

    Args:
        output_dir: Directory of the event file.
        every_n_steps: Steps between summaries.

    >>> hook = tfdist.hooks.StalenessHook(directory, every_n_steps=500)
    """

    def __init__(self, output_dir: str, every_n_steps: int = 100) -> None:
        super().__init__(False, every_n_secs=None, every_n_steps=every_n_steps)
        self._file = event_file(output_dir)

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Writes the histogram and its percentiles."""
        counts = context.session.staleness
        if counts is None or not counts.any():
            return
        most = int(np.flatnonzero(counts)[-1])
        scalars = {
            f"staleness/p{percent}": staleness.percentile(counts, percent)
            for percent in staleness.PERCENTILES
        }
        scalars["staleness/max"] = most
        seen = {"staleness": counts[: most + 1]}
        self._file.write(context.session.step, scalars, seen)

    def end(self, session: Session) -> None:
        """Logs the staleness of all updates."""
        if session.staleness is not None:
            _log.info("%s", staleness.describe(session.staleness))


class DynamicEmbeddingHook(TimedHook):
    """Writes the `counters` of each `DynamicEmbedding` in the model.

    Servers count their own ids, which takes about 4 ms per million rows; an
    `Estimator` does so as often as it saves. Writes nothing if the model has no
    such table.

    Args:
        output_dir: Directory of the event file.
        every_n_steps: Steps between summaries.
        every_n_secs: Seconds between summaries. Exactly one must be given.

    >>> hook = tfdist.hooks.DynamicEmbeddingHook(directory, every_n_secs=60)
    """

    def __init__(
        self,
        output_dir: str,
        every_n_steps: int | None = None,
        every_n_secs: float | None = None,
    ) -> None:
        super().__init__(
            False, every_n_secs=every_n_secs, every_n_steps=every_n_steps
        )
        self._file = event_file(output_dir)

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Writes the scalars of each table."""
        self._write(context.session)

    def end(self, session: Session) -> None:
        """Writes the final scalars."""
        if self._timer.last_triggered_step() != session.step:
            self._write(session)

    def _write(self, session: Session) -> None:
        variables = session.model.variables if session.model else []
        found = (growing_of(variable) for variable in variables)
        tables = {each.table.path: each.table for each in found if each}
        for path, table in tables.items():
            counts = table.counters().items()
            scalars = {f"{path}/{name}": count for name, count in counts}
            self._file.write(session.step, scalars)


class ProfilerHook(TimedHook):
    """Profiles one step every N steps or seconds.

    Like `tf.compat.v1.train.ProfilerHook`, it skips the first step, which is
    traced, then profiles steps N, 2N and so on. Each profile covers a single
    step in this process only and is written to `<output_dir>/profile-<step>`,
    for TensorBoard's profiler (TF1 wrote `timeline-<step>.json`).

    Args:
        save_steps: Steps between profiles.
        save_secs: Seconds between profiles. Exactly one must be given.
        output_dir: Directory of the profiles.

    >>> hook = tfdist.hooks.ProfilerHook(save_steps=1_000, output_dir=directory)
    """

    @tf1_arguments
    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str = "",
    ) -> None:
        super().__init__(save_secs=save_secs, save_steps=save_steps)
        self._directory = output_dir
        self._profiling = False

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Stops the profile of a failed run."""
        super().after_create_session(session, coord)
        self._stop()

    def steps_until_next(self, step: int) -> int | None:
        """Returns the steps before the profiled one, or 1 for that one."""
        if self._timer.should_trigger_for_step(step + 1):
            return 1
        steps = self._timer.steps_until_next(step)
        return steps and steps - 1

    def before_run(self, run_context: RunContext) -> None:
        """Starts the profiler, if the timer triggers at the next step."""
        step = run_context.session.step
        if self._timer.last_triggered_step() is None:
            self._timer.update_last_triggered_step(step)
        elif self._timer.should_trigger_for_step(step + 1):
            directory = os.path.join(self._directory, f"profile-{step + 1}")
            tf.profiler.experimental.start(directory)
            self._profiling = True

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Writes the profile."""
        if self._profiling:
            step = run_context.session.step
            self._timer.update_last_triggered_step(step)
            _log.info("Saving the profile of step %d.", step)
            self._stop()

    def end(self, session: Session) -> None:
        """Stops the profiler if the input ended during a profiled run."""
        self._stop()

    def _stop(self) -> None:
        if self._profiling:
            self._profiling = False
            tf.profiler.experimental.stop()

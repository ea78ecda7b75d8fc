"""Hooks that show training progress and warn of unread data."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any, TextIO

import numpy as np

from tfdist.data import input_wait
from tfdist.data.input_fns import InputFn, described
from tfdist.hooks.session_run_hook import (
    Logs,
    RunContext,
    RunValues,
    Session,
    SessionRunHook,
    TimedHook,
)

_log = logging.getLogger(__name__)
_LEAST_SECS = 2.0


def _mark(session: Session) -> np.ndarray:
    """Returns steps, their seconds, CPU and wall time, and input seconds."""
    clocks = time.process_time(), time.monotonic()
    steps = session.step, session.secs_in_steps
    return np.array([*steps, *clocks, *session.input_secs])


class ProgressHook(TimedHook):
    """Shows training progress: lines in a log, or one updating terminal line.

    Steps per second exclude checkpoints and evaluations; the input's share is
    the fraction of the steps' time spent waiting for data. Both are measured
    over the interval, or the last two seconds if that is longer: workers run
    ahead, so an interval may take almost no time.

    If workers run the steps, the line also shows the chief's CPU usage above
    50 %. Near 100 % the chief cannot dispatch faster, and more workers do not
    help: raise `RunConfig(steps_per_dispatch=...)`.

    Args:
        log_steps: Steps between lines.
        stream: The stream to write to. Default: standard output.
        max_steps: Step at which training ends, if known.
        coordinates: Whether workers run the steps.

    >>> progress = tfdist.hooks.ProgressHook(2, max_steps=4)
    >>> hooks = [progress, tfdist.StopAtStepHook(last_step=4)]
    >>> with tfdist.MonitoredTrainingSession(build_fn, hooks=hooks) as session:
    ...     while not session.should_stop():
    ...         logs = session.run()  # doctest: +ELLIPSIS
    step ...
    """

    def __init__(
        self,
        log_steps: int,
        stream: TextIO | None = None,
        *,
        max_steps: int | None = None,
        coordinates: bool = False,
    ) -> None:
        super().__init__(False, log_secs=None, log_steps=log_steps)
        self._coordinates = coordinates
        self._stream = stream or sys.stdout
        self._max_steps = max_steps
        self._marks: list[np.ndarray] = []
        self._lines = 0

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Starts the first interval, or a new one after a recovery."""
        self._timer.start(session.step)
        self._marks = [_mark(session)]
        self._traces = True

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Writes a line."""
        # The first steps include tracing, so they predict nothing.
        self._write(context.session, with_time_left=self._lines > 0)

    def end(self, session: Session) -> None:
        """Writes the last step's line, if missing, and ends the line."""
        if session.step != self._marks[-1][0]:
            self._write(session, with_time_left=False)
        if self._lines and self._stream.isatty():
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, session: Session, with_time_left: bool) -> None:
        marks, now = self._marks, _mark(session)
        while len(marks) > 1 and now[1] - marks[1][1] >= _LEAST_SECS:
            del marks[0]
        steps, secs, cpu_secs, wall_secs, *input_secs = now - marks[0]
        if self._traces:  # The first steps are not representative.
            marks.clear()
            self._traces = False
        marks.append(now)
        self._lines += 1
        line = progress_line(
            session.step,
            self._max_steps,
            steps / max(secs, 1e-9),
            self._logs,
            with_time_left=with_time_left and session.step != self._max_steps,
            tasks_alive=session.tasks_alive(),
            input_share=input_wait.share(input_secs),
            chief_share=cpu_secs / wall_secs if self._coordinates else 0.0,
        )
        # The cursor goes back, so that whatever comes next replaces the line.
        terminal = self._stream.isatty()
        self._stream.write(f"\x1b[K{line}\r" if terminal else f"{line}\n")
        self._stream.flush()


def progress_line(
    step: int,
    max_steps: int | None,
    steps_per_sec: float,
    logs: Logs,
    with_time_left: bool = True,
    tasks_alive: str = "",
    input_share: float = 0.0,
    chief_share: float = 0.0,
) -> str:
    """Returns a line about the progress of training.

    >>> progress_line(500, 2000, 100.0, {"loss": 0.5})
    'step  500 of 2000 ( 25 %),  100 steps/s, loss 0.5000, 0:15 left'
    >>> progress_line(500, None, 100.0, {}, input_share=0.372)
    'step 500,  100 steps/s (input 37 %)'
    >>> progress_line(500, None, 100.0, {}, input_share=0.02, chief_share=0.97)
    'step 500,  100 steps/s (input 2 %, chief 97 %)'
    """
    width = len(str(max_steps or ""))
    parts = [f"step {step:{width}d}"]
    if max_steps:
        parts[0] += f" of {max_steps} ({100 * step // max_steps:3d} %)"
    digits = 0 if steps_per_sec >= 10 else 2
    parts.append(f"{steps_per_sec:4.{digits}f} steps/s")
    shares = ("input", input_share, 0.01), ("chief", chief_share, 0.5)
    large = [
        f"{name} {100 * s:.0f} %" for name, s, least in shares if s >= least
    ]
    if large:
        parts[-1] += f" ({', '.join(large)})"
    parts += [f"{name} {value:.4f}" for name, value in logs.items()]
    if max_steps and steps_per_sec and with_time_left:
        minutes, seconds = divmod(round((max_steps - step) / steps_per_sec), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    if tasks_alive:
        parts.append(tasks_alive)
    return ", ".join(parts)


class UnreadDataHook(SessionRunHook):
    """Warns when a worker is lost for long, and again at the end of the job.

    If the input function assigns fixed shards, that worker's stays unread.
    """

    def __init__(self, input_fn: InputFn, after_secs: float = 60.0) -> None:
        self._input_fn = input_fn
        self._num_workers = 0
        self._after_secs = after_secs
        self._since: dict[str, int] = {}

    def steps_until_next(self, step: int) -> None:
        """Allows any number of steps: the limit is in seconds."""

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Warns of workers lost since the last run."""
        session = run_context.session
        self._num_workers = session.num_workers
        missing = session.missing_workers(self._after_secs)
        before = self._since
        self._since = {name: before.get(name, session.step) for name in missing}
        if set(missing) - set(before):
            _log.warning(
                "%s gone for %g s or more: %s of the examples are not being "
                "read, because the input function %s assigns a fixed share to "
                "each worker. Use a reader of tfdist.data with context=context,"
                " which redistributes the examples in each pass.",
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}",
                self._after_secs,
                self._share(),
                described(self._input_fn),
            )

    def end(self, session: Session) -> None:
        """Warns again that only part of the data was used."""
        if self._since:
            _log.warning(
                "Training ended without %s: %s of the examples have not been "
                "read since step %d.",
                ", ".join(self._since),
                self._share(),
                min(self._since.values()),
            )

    def _share(self) -> str:
        return f"{len(self._since) / self._num_workers:.0%}"

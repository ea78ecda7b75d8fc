"""How far training is: a line in a log, one moving line in a terminal."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TextIO

import numpy as np

from tfdist.data import input_wait
from tfdist.hooks.session_run_hook import (
    Logs,
    Session,
    SessionRunContext,
    TimedHook,
)

_LEAST_SECS = 2.0


class _Mark(NamedTuple):
    """How far a session is."""

    step: int
    secs: float
    input_secs: np.ndarray

    @classmethod
    def of(cls, session: Session) -> _Mark:
        return cls(session.step, session.secs_in_steps, session.input_secs)


class ProgressHook(TimedHook):
    """Says how far training is: a line in a log, one moving line in a terminal.

    Steps per second are those of the steps alone: neither checkpoints nor
    evaluations in between slow them down. The input's share is that of their
    time in which they waited for data. Both are of the interval, or, where
    lines follow fast, of the last two seconds: workers are steps ahead, so
    that every other interval may seem to take no time.

    Args:
        log_steps: Steps between lines.
        stream: Where to; a terminal gets one line that is overwritten.
            Default: standard output.
        max_steps: Step at which training ends, if it is known.

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
    ) -> None:
        super().__init__(every_steps=log_steps, at_first_step=False)
        self._stream = stream or sys.stdout
        self._max_steps = max_steps
        self._marks: list[_Mark] = []
        self._lines = 0

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Starts the first interval, again after a recovery."""
        self._timer.update_last_triggered_step(session.step)
        self._marks = [_Mark.of(session)]
        self._traces = True

    def on_trigger(self, context: SessionRunContext, logs: Logs) -> None:
        """Writes a line."""
        # The first steps are traced as well: they predict nothing.
        self._write(context.session, with_time_left=self._lines > 0)

    def end(self, session: Session) -> None:
        """Writes the last step's line, if it has none, and leaves the line."""
        if session.step != self._timer.last_triggered_step():
            self._write(session, with_time_left=False)
        if self._lines and self._stream.isatty():
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, session: Session, with_time_left: bool) -> None:
        marks, now = self._marks, _Mark.of(session)
        while len(marks) > 1 and now.secs - marks[1].secs >= _LEAST_SECS:
            del marks[0]
        since = marks[0]
        if self._traces:  # The first steps tell nothing of the next.
            marks.clear()
            self._traces = False
        marks.append(now)
        self._lines += 1
        line = progress_line(
            session.step,
            self._max_steps,
            (now.step - since.step) / max(now.secs - since.secs, 1e-9),
            self._logs,
            with_time_left=with_time_left and session.step != self._max_steps,
            tasks_alive=session.tasks_alive(),
            input_share=input_wait.share(now.input_secs - since.input_secs),
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
) -> str:
    """One line about the progress of training.

    >>> progress_line(500, 2000, 100.0, {"loss": 0.5})
    'step  500 of 2000 ( 25 %),  100 steps/s, loss 0.5000, 0:15 left'
    >>> progress_line(500, None, 100.0, {}, input_share=0.372)
    'step 500,  100 steps/s (input 37 %)'
    """
    width = len(str(max_steps or ""))
    parts = [f"step {step:{width}d}"]
    if max_steps:
        parts[0] += f" of {max_steps} ({100 * step // max_steps:3d} %)"
    digits = 0 if steps_per_sec >= 10 else 2
    parts.append(f"{steps_per_sec:4.{digits}f} steps/s")
    if input_share >= 0.01:
        parts[-1] += f" (input {100 * input_share:.0f} %)"
    parts += [f"{name} {value:.4f}" for name, value in logs.items()]
    if max_steps and steps_per_sec and with_time_left:
        minutes, seconds = divmod(round((max_steps - step) / steps_per_sec), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    if tasks_alive:
        parts.append(tasks_alive)
    return ", ".join(parts)

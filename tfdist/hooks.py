"""What happens around the steps: checkpoints, summaries, progress.

A hook in TF1 ran after every single step. Here many steps run in one go, so a
hook also says how many may pass before it wants to look (`steps_until_next`);
the session runs the smallest such number, and cadences stay exact.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

import tensorflow as tf

from tfdist.checkpoint import Checkpoints

if TYPE_CHECKING:
    from tfdist.session import TrainingSession

_log = logging.getLogger(__name__)


class SessionRunHook:
    """Base of all hooks; every method does nothing."""

    def after_create_session(self, session: TrainingSession) -> None:
        """The model is initialized or restored; no step has run yet."""

    def steps_until_next(self, step: int) -> int | None:
        """How many steps may run before `after_run`; None for any number."""
        return None

    def after_run(
        self, session: TrainingSession, logs: dict[str, float]
    ) -> None:
        """Steps have run; `logs` are the loss and metrics of these steps."""

    def end(self, session: TrainingSession) -> None:
        """Training ended without an error."""


class SecondOrStepTimer:
    """Triggers every so many seconds or steps.

    As `tf.compat.v1.train.SecondOrStepTimer`: the first call triggers.

    Args:
        every_secs: Seconds between triggers.
        every_steps: Steps between triggers. Exactly one must be given.
        clock: Returns seconds.

    Raises:
        ValueError: both or neither are given, or one is not positive.
    """

    def __init__(
        self,
        every_secs: float | None = None,
        every_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ValueError(
                "Exactly one of `every_secs` and `every_steps` must be given. "
                f"Received: every_secs={every_secs}, every_steps={every_steps}."
            )
        if (every_secs or every_steps or 0) <= 0:
            raise ValueError(
                "The interval must be positive. Received: "
                f"every_secs={every_secs}, every_steps={every_steps}."
            )
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._clock = clock
        self._last: tuple[float, int] | None = None

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether the interval has passed at `step`."""
        if self._last is None:
            return True
        last_time, last_step = self._last
        if step == last_step:
            return False
        if self._every_secs is not None:
            return self._clock() >= last_time + self._every_secs
        return step >= last_step + self._every_steps

    def update_last_triggered_step(
        self, step: int
    ) -> tuple[float, int] | tuple[None, None]:
        """Starts the next interval; returns seconds and steps of this one."""
        now = self._clock()
        last, self._last = self._last, (now, step)
        return (now - last[0], step - last[1]) if last else (None, None)

    def steps_until_next(self, step: int) -> int | None:
        """Steps until the next trigger, None where seconds decide."""
        if self._every_steps is None or self._last is None:
            return None
        return max(1, self._last[1] + self._every_steps - step)


class _TimedHook(SessionRunHook):
    """A hook that acts whenever its timer triggers."""

    def __init__(self, timer: SecondOrStepTimer) -> None:
        self._timer = timer

    def after_create_session(self, session: TrainingSession) -> None:
        self._timer.update_last_triggered_step(session.step)

    def steps_until_next(self, step: int) -> int | None:
        return self._timer.steps_until_next(step)


class CheckpointSaverListener:
    """Is told of every checkpoint."""

    def after_save(self, session: TrainingSession, path: str) -> None:
        """Checkpoint `path` is complete; training is paused."""


class CheckpointSaverHook(_TimedHook):
    """Saves at the start, on a timer, and at the end.

    Args:
        checkpoints: Where to.
        timer: When to.
        listeners: Told after each save but the one at the start.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        timer: SecondOrStepTimer,
        listeners: Sequence[CheckpointSaverListener] = (),
    ) -> None:
        super().__init__(timer)
        self._checkpoints = checkpoints
        self._listeners = list(listeners)
        self._saved_step: int | None = None

    def after_create_session(self, session: TrainingSession) -> None:
        """Saves the initial state, unless it has just been restored."""
        super().after_create_session(session)
        if not session.restored:
            self._checkpoints.save(session.step)
        self._saved_step = session.step

    def after_run(
        self, session: TrainingSession, logs: dict[str, float]
    ) -> None:
        """Saves when the timer triggers."""
        if self._timer.should_trigger_for_step(session.step):
            self._save(session)

    def end(self, session: TrainingSession) -> None:
        """Saves the last step."""
        if self._saved_step != session.step:
            self._save(session)

    def _save(self, session: TrainingSession) -> None:
        path = self._checkpoints.save(session.step)
        _log.info("Saved %s.", path)
        self._saved_step = session.step
        self._timer.update_last_triggered_step(session.step)
        for listener in self._listeners:
            listener.after_save(session, path)


class SummarySaverHook(_TimedHook):
    """Writes loss, metrics and `global_step/sec` for TensorBoard.

    Args:
        directory: Of the event file.
        save_steps: Steps between summaries.
    """

    def __init__(self, directory: str, save_steps: int) -> None:
        super().__init__(SecondOrStepTimer(every_steps=save_steps))
        self._writer = tf.summary.create_file_writer(directory)

    def after_run(
        self, session: TrainingSession, logs: dict[str, float]
    ) -> None:
        """Writes when the timer triggers, and after the last step."""
        due = self._timer.should_trigger_for_step(session.step)
        if not (due or session.should_stop()) or not logs:
            return
        secs, steps = self._timer.update_last_triggered_step(session.step)
        write_scalars(
            self._writer,
            {**logs, "global_step/sec": steps / secs},
            session.step,
        )

    def end(self, session: TrainingSession) -> None:
        """Closes the event file."""
        self._writer.close()


def write_scalars(
    writer: tf.summary.SummaryWriter, scalars: dict[str, float], step: int
) -> None:
    """Writes scalars of one step and flushes."""
    with writer.as_default(step=step):
        for name, value in scalars.items():
            tf.summary.scalar(name, value)
    writer.flush()


class ProgressHook(_TimedHook):
    """Says how far training is: a line in a log, one moving line in a terminal.

    Steps per second are those of the steps alone: neither checkpoints nor
    evaluations in between slow them down.

    Args:
        log_steps: Steps between lines.
        stream: Where to; a terminal gets one line that is overwritten.
            Default: standard output.
    """

    def __init__(self, log_steps: int, stream: TextIO | None = None) -> None:
        super().__init__(SecondOrStepTimer(every_steps=log_steps))
        self._stream = stream or sys.stdout
        self._secs_before = 0.0
        self._lines = 0

    def after_run(
        self, session: TrainingSession, logs: dict[str, float]
    ) -> None:
        """Writes a line when the timer triggers, and after the last step."""
        last = session.should_stop()
        if not (last or self._timer.should_trigger_for_step(session.step)):
            return
        _, steps = self._timer.update_last_triggered_step(session.step)
        secs = session.secs_in_steps - self._secs_before
        self._secs_before = session.secs_in_steps
        line = progress_line(
            session.step,
            session.max_steps,
            steps / max(secs, 1e-9),
            logs,
            # The first steps are traced as well: they predict nothing.
            with_time_left=self._lines > 0 and not last,
        )
        self._lines += 1
        if self._stream.isatty():
            # The cursor goes back, so that whatever comes next replaces it.
            self._stream.write(f"\x1b[K{line}" + ("\n" if last else "\r"))
        else:
            self._stream.write(f"{line}\n")
        self._stream.flush()


def progress_line(
    step: int,
    max_steps: int | None,
    steps_per_sec: float,
    logs: dict[str, float],
    with_time_left: bool = True,
) -> str:
    """One line about the progress of training.

    >>> progress_line(500, 2000, 100.0, {"loss": 0.5})
    'step  500 of 2000 ( 25 %),  100 steps/s, loss 0.5000, 0:15 left'
    """
    width = len(str(max_steps or ""))
    parts = [f"step {step:{width}d}"]
    if max_steps:
        parts[0] += f" of {max_steps} ({100 * step // max_steps:3d} %)"
    digits = 0 if steps_per_sec >= 10 else 2
    parts.append(f"{steps_per_sec:4.{digits}f} steps/s")
    parts += [f"{name} {value:.4f}" for name, value in logs.items()]
    if max_steps and steps_per_sec and with_time_left:
        minutes, seconds = divmod(round((max_steps - step) / steps_per_sec), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return ", ".join(parts)

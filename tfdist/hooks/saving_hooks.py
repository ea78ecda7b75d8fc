"""Checkpoints, on a timer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from os import PathLike
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist._tf import storage
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.hooks.session_run_hook import (
    Hook,
    Logs,
    RunContext,
    RunValues,
    SecondOrStepTimer,
    Session,
    TimedHook,
)

_log = logging.getLogger(__name__)

CheckpointSaverListener: TypeAlias = tf.compat.v1.train.CheckpointSaverListener
"""TensorFlow's own: `begin()`, `before_save(session, global_step_value)`,
`after_save(session, global_step_value)`, `end(session, global_step_value)`."""

USE_DEFAULT: Any = object()
"""A cadence that was not given, where None means none."""


class Sparing(float):
    """Seconds between checkpoints, or more where they cost over 1 %."""


DEFAULT_SAVE_SECS = Sparing(60)


class CheckpointSaverHook(TimedHook):
    """Saves a new job's first state, on a timer, and at the end.

    As `tf.compat.v1.train.CheckpointSaverHook`, but what has just been restored
    from `checkpoint_dir` is not saved again; no graph is written, and the base
    name is always `model.ckpt`; on SIGTERM the current step is saved, without
    the listeners, which may take longer than the process has.

    On parameter servers and in one process steps go on while a checkpoint is
    written, of values as they were (see `tfdist.checkpoint.held`). What it
    fails with is logged, and raised after a later step, if there is one: at the
    end and on SIGTERM it is saved anew. One that comes due meanwhile waits for
    it if `save_steps` are given; by seconds, it is taken when that is complete.
    The first and the last one are waited for, and so is one under way before a
    recovery and after SIGTERM.

    Args:
        checkpoint_dir: Where to.
        save_secs: Seconds between checkpoints.
        save_steps: Steps between checkpoints, which are at multiples of it,
            where TF1 counts from the step restored. Exactly one must be given.
        listeners: Told of every checkpoint, also of the first state. One whose
            `after_save` returns True stops training, unless at the start or at
            the end. `after_save` is called at the step that was saved, so no
            step runs before the checkpoint is complete; or, if every listener
            has a true attribute `told_later` after `before_save`, after the
            first run of steps that finds it complete.
        max_to_keep: Most recent checkpoints kept; None or 0 keeps all.
        keep_checkpoint_every_n_hours: In addition keeps one per so many hours.

    Attributes:
        checkpoint_dir, save_secs, save_steps: As given.
        last_path: Path of the last checkpoint that this hook wrote, or None.

    >>> saver = tfdist.hooks.CheckpointSaverHook(directory, save_steps=2)
    >>> hooks = [saver, tfdist.StopAtStepHook(last_step=3)]
    >>> with tfdist.MonitoredTrainingSession(build_fn, hooks=hooks) as session:
    ...     while not session.should_stop():
    ...         logs = session.run()
    >>> sorted(f for f in os.listdir(directory) if f.endswith(".index"))
    ['model.ckpt-0.index', 'model.ckpt-2.index', 'model.ckpt-3.index']
    """

    wants_none_under_way = True

    def __init__(
        self,
        checkpoint_dir: str | PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        *,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
    ) -> None:
        super().__init__(save_secs=save_secs, save_steps=save_steps)
        self.checkpoint_dir = storage.check_no_pattern(checkpoint_dir)
        self.save_secs, self.save_steps = save_secs, save_steps
        self._own_listeners = list(listeners or ())
        self._listeners = self._own_listeners
        self._keep = (max_to_keep, keep_checkpoint_every_n_hours)
        self._checkpoints: Checkpoints
        self._saved_step: int | None = None
        self._stale = False
        self._begun: tuple[int, Future[str]] | None = None
        self.last_path: str | None = None

    def tell_also(self, listeners: Sequence[CheckpointSaverListener]) -> None:
        """Has it tell these, too, in place of those of an earlier call."""
        self._listeners = [*self._own_listeners, *listeners]

    def replaces(self, *cadence: float | None) -> None:
        """Warns if the session that it saves for was given a cadence, too."""
        if {*cadence} - {USE_DEFAULT, None, 0}:
            _log.warning(
                "The session's save_checkpoint_secs and save_checkpoint_steps "
                "are not used: its hooks have a CheckpointSaverHook of %r.",
                self.checkpoint_dir,
            )

    def begin(self) -> None:
        """Begins the listeners."""
        super().begin()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Saves the state, unless it is that of the newest checkpoint."""
        self._forget_failure(wait=False)  # Which the session recovers from.
        self._tell(session, wait=False)
        self._checkpoints = session.checkpoints(
            self.checkpoint_dir, *self._keep
        )
        if session.is_chief:  # Else it may be writing one.
            self._checkpoints.remove_unfinished()
        restored, latest = session.restored_from, self._checkpoints.latest
        if restored and latest and storage.same_path(restored, latest):
            self._saved_step = session.step
            self._checkpoints.prepare()
        else:
            self._save(session)
        self._timer.start(session.step)

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Saves; if training ends, and nobody evaluates, `end` does."""
        session, ends = context.session, context.stop_requested
        if ends and not self._listeners:
            return  # An evaluator task sees the last step once, as it stays.
        session.wait_for_steps()
        if ends:
            session.average_weights()
        self._timer.update_last_triggered_step(session.step)
        if self._save(session, wait=ends):
            context.request_stop()

    def before_run(self, run_context: RunContext) -> None:
        """Saves a step again if a callback has set something since."""
        session = run_context.session
        step = self._begun[0] if self._begun else self._saved_step
        self._hear(session)
        if self._stale and session.step == step:
            if self._tell(session):
                run_context.request_stop()
            self._begin(session)
            self._complete()

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Tells of what has been written, and saves if it is time to."""
        if self._tell(run_context.session, wait=False):
            run_context.request_stop()
        if self._begun is None or self.save_steps:
            super().after_run(run_context, run_values)

    def end(self, session: Session) -> None:
        """Saves the last step, if it is not saved as it is now."""
        self._forget_failure()
        self._tell(session)
        self._hear(session)
        if self._stale or self._saved_step != session.step:
            self._save(session)
        for listener in self._listeners:
            listener.end(session, session.step)

    def on_preemption(self, session: Session) -> None:
        """Saves this step, if it is not saved."""
        self._forget_failure()
        self._complete()
        self._hear(session)
        if self._stale or self._saved_step != session.step:
            self._begin(session)
            self._complete()

    def _save(self, session: Session, wait: bool = True) -> bool:
        """Saves, with the listeners; says whether one wants to stop."""
        stops = self._tell(session)
        for listener in self._listeners:
            listener.before_save(session, session.step)
            wait |= not getattr(listener, "told_later", False)
        self._begin(session, wait)
        return self._tell(session, wait) or stops

    def _tell(self, session: Session, wait: bool = True) -> bool:
        """Tells the listeners of what is complete; as `_save`."""
        stops = False
        for listener in self._listeners if self._complete(wait) else ():
            if listener.after_save(session, self._saved_step):
                stops, step = True, session.step
                _log.info("%r requests a stop at step %d.", listener, step)
        return stops

    def _hear(self, session: Session) -> None:
        """Has every saver know if something was set since it saved."""
        for hook in session.hooks if session.unsaved else ():
            if isinstance(hook, CheckpointSaverHook):
                hook._stale = True
        session.unsaved = False

    def _begin(self, session: Session, wait: bool = True) -> None:
        self._hear(session)
        step, self._stale = session.step, False
        self._begun = step, self._checkpoints.save_behind(step, not wait)

    def _forget_failure(self, wait: bool = True) -> None:
        """Forgets an error that was logged, since it is saved again."""
        begun = self._begun
        if begun and (wait or begun[1].done()) and begun[1].exception():
            self._begun = None

    def _complete(self, wait: bool = True) -> bool:
        """Whether what was begun has been written by now."""
        if self._begun is None or not (wait or self._begun[1].done()):
            return False
        (step, written), self._begun = self._begun, None
        self.last_path = written.result()
        is_first, self._saved_step = self._saved_step is None, step
        # The first one is waited for, traces, and tells nothing of the others.
        if isinstance(self.save_secs, Sparing) and not is_first:
            secs = max(self.save_secs, 100 * self._checkpoints.cost_secs)
            self._timer = SecondOrStepTimer(every_secs=secs)
            self._timer.update_last_triggered_step(step)
        return True


def saver_of(
    directory: str | None, hooks: Iterable[Hook]
) -> CheckpointSaverHook | None:
    """The first of `hooks` that saves in `directory`."""
    savers = [h for h in hooks if isinstance(h, CheckpointSaverHook)]
    for saver in savers if directory else ():
        if storage.same_path(saver.checkpoint_dir, str(directory)):
            return saver
    return None

"""Checkpoints, on a timer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from os.path import normpath
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.hooks.session_run_hook import (
    Logs,
    Session,
    SessionRunContext,
    TimedHook,
)

_log = logging.getLogger(__name__)

CheckpointSaverListener: TypeAlias = tf.compat.v1.train.CheckpointSaverListener
"""TensorFlow's own: `begin()`, `before_save(session, global_step_value)`,
`after_save(session, global_step_value)`, `end(session, global_step_value)`."""

USE_DEFAULT: Any = object()
"""A cadence that was not given, where None means none."""


class CheckpointSaverHook(TimedHook):
    """Saves a new job's first state, on a timer, and at the end.

    As `tf.compat.v1.train.CheckpointSaverHook`, but what has just been restored
    from `checkpoint_dir` is not saved again; no graph is written, and the base
    name is always `model.ckpt`; on SIGTERM the current step is saved, without
    the listeners, which may take longer than the process has.

    Args:
        checkpoint_dir: Where to.
        save_secs: Seconds between checkpoints.
        save_steps: Steps between checkpoints. Exactly one must be given.
        listeners: Told of every checkpoint, the one of the first state
            included. One whose `after_save` returns True stops training,
            unless at the start or at the end.
        max_to_keep: Most recent checkpoints kept; None or 0 keeps all.
        keep_checkpoint_every_n_hours: In addition keeps one per so many hours.

    Attributes:
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
        checkpoint_dir: str,
        save_secs: float | None = None,
        save_steps: int | None = None,
        *,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
    ) -> None:
        super().__init__(save_secs=save_secs, save_steps=save_steps)
        self._directory = checkpoint_dir
        self._listeners = list(listeners or ())
        self._keep = (max_to_keep, keep_checkpoint_every_n_hours)
        self._checkpoints: Checkpoints
        self._saved_step: int | None = None
        self.last_path: str | None = None

    def begin(self) -> None:
        """Begins the listeners."""
        super().begin()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Saves the state, unless it is that of the newest checkpoint."""
        self._checkpoints = session.checkpoints(self._directory, *self._keep)
        restored, latest = session.restored_from, self._checkpoints.latest
        if restored and latest and normpath(restored) == normpath(latest):
            self._saved_step = session.step
            self._checkpoints.prepare()
        else:
            self._save(session)
        self._timer.update_last_triggered_step(session.step)

    def on_trigger(self, context: SessionRunContext, logs: Logs) -> None:
        """Saves."""
        session = context.session
        session.wait_for_steps()
        self._timer.update_last_triggered_step(session.step)
        if self._save(session):
            context.request_stop()

    def end(self, session: Session) -> None:
        """Saves the last step, if it is not saved."""
        if self._saved_step != session.step:
            self._save(session)
        for listener in self._listeners:
            listener.end(session, session.step)

    def on_preemption(self, session: Session) -> None:
        """Saves this step, if it is not saved."""
        if self._saved_step != session.step:
            self._write(session.step)

    def _save(self, session: Session) -> bool:
        """Saves, with the listeners; says whether one wants to stop."""
        step = session.step
        for listener in self._listeners:
            listener.before_save(session, step)
        self._write(step)
        stops = False
        for listener in self._listeners:
            if listener.after_save(session, step):
                _log.info("%r requests a stop at step %d.", listener, step)
                stops = True
        return stops

    def _write(self, step: int) -> None:
        self.last_path = self._checkpoints.save(step)
        self._saved_step = step
        _log.info("Saved %s.", self.last_path)

"""`CheckpointSaverHook`: saves checkpoints on a timer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from os import PathLike
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.tf1_arguments import tf1_arguments
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
"""Marks a cadence that was not given, since None means no checkpoints."""


class AutomaticSecs(float):
    """Seconds between checkpoints, or more if saving takes over 1 % of time."""


DEFAULT_SAVE_SECS = AutomaticSecs(60)


class CheckpointSaverHook(TimedHook):
    """Saves the initial state of a new job, on a timer, and at the end.

    Like `tf.compat.v1.train.CheckpointSaverHook`, but a state just restored
    from `checkpoint_dir` is not saved again; no graph is written, and the base
    name is always `model.ckpt`; on SIGTERM the current step is saved without
    calling the listeners, which might not finish in time.

    On parameter servers and in one process, steps continue while a checkpoint
    of the held values is written (see `tfdist.checkpoint.held`). An error is
    logged and raised after a later step, if there is one; at the end and on
    SIGTERM the checkpoint is saved again instead. If another checkpoint is due
    meanwhile, it waits for the first one with `save_steps`; with `save_secs`
    it is taken once that is complete. Training waits for the first and the last
    checkpoint, and a recovery or SIGTERM for one being written.

    Args:
        checkpoint_dir: Directory of the checkpoints.
        save_secs: Seconds between checkpoints.
        save_steps: Steps between checkpoints, which are saved at its multiples
            (TF1 counts from the restored step). Exactly one must be given.
        listeners: Called for every checkpoint, including the initial one. If
            `after_save` returns True, training stops, except at the start or
            the end. `after_save` is called at the saved step, so no step runs
            before the checkpoint is complete; or, if every listener has a true
            attribute `told_later` after `before_save`, after the first run of
            steps that finds the checkpoint complete.
        max_to_keep: Number of recent checkpoints kept; None or 0 keeps all.
            Default: 5, or what the session or `RunConfig` says.
        keep_checkpoint_every_n_hours: Also keeps one checkpoint every n hours.
            Default: none, or what the session or `RunConfig` says.

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

    @tf1_arguments
    def __init__(
        self,
        checkpoint_dir: str | PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        *,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        max_to_keep: int | None = USE_DEFAULT,
        keep_checkpoint_every_n_hours: float | None = USE_DEFAULT,
    ) -> None:
        super().__init__(save_secs=save_secs, save_steps=save_steps)
        self.checkpoint_dir = storage.check_no_pattern(checkpoint_dir)
        self.save_secs, self.save_steps = save_secs, save_steps
        self._own_listeners = list(listeners or ())
        self._listeners = self._own_listeners
        self._keep = max_to_keep, keep_checkpoint_every_n_hours
        self._checkpoints: Checkpoints
        self._saved_step: int | None = None
        self._stale = False
        self._begun: tuple[int, Future[str]] | None = None
        self.last_path: str | None = None

    def add_listeners(
        self, listeners: Sequence[CheckpointSaverListener]
    ) -> None:
        """Adds listeners, replacing those of an earlier call."""
        self._listeners = [*self._own_listeners, *listeners]

    def keeps(self, max_to_keep: int | None, hours: float | None) -> None:
        """Determines what the constructor left to the default."""
        most, every = self._keep
        most = max_to_keep if most is USE_DEFAULT else most
        self._keep = most, hours if every is USE_DEFAULT else every

    def replaces(self, *cadence: float | None) -> None:
        """Warns if the session was given a cadence that this hook replaces."""
        if {*cadence} - {USE_DEFAULT, None, 0}:
            _log.warning(
                "The session's save_checkpoint_secs and save_checkpoint_steps "
                "are not used: its CheckpointSaverHook for %r replaces them.",
                self.checkpoint_dir,
            )

    def begin(self) -> None:
        """Calls `begin` of the listeners."""
        super().begin()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Saves the state, unless restored from the newest checkpoint."""
        self._forget_failure(wait=False)  # The session recovers from it.
        self._tell(session, wait=False)
        self.keeps(5, None)
        self._checkpoints = session.checkpoints(
            self.checkpoint_dir, *self._keep
        )
        if session.is_chief:  # On others, the chief may be writing one.
            self._checkpoints.remove_unfinished()
        restored, latest = session.restored_from, self._checkpoints.latest
        if restored and latest and storage.same_path(restored, latest):
            self._saved_step = session.step
            self._checkpoints.prepare()
        else:
            self._save(session)
        self._timer.start(session.step)

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Saves, unless training ends without listeners: then `end` does."""
        session, ends = context.session, context.stop_requested
        if ends and not self._listeners:
            return  # An evaluator task then sees the last step once, final.
        session.wait_for_steps()
        if ends:
            session.average_weights()
        self._timer.update_last_triggered_step(session.step)
        if self._save(session, wait=ends):
            context.request_stop()

    def before_run(self, run_context: RunContext) -> None:
        """Saves a step again if a callback has set a saved variable since."""
        session = run_context.session
        step = self._begun[0] if self._begun else self._saved_step
        self._hear(session)
        if self._stale and session.step == step:
            if self._tell(session):
                run_context.request_stop()
            self._begin(session)
            self._complete()

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Notifies listeners of written checkpoints, and saves if due."""
        if self._tell(run_context.session, wait=False):
            run_context.request_stop()
        if self._begun is None or self.save_steps:
            super().after_run(run_context, run_values)

    def end(self, session: Session) -> None:
        """Saves the last step, unless its current state is saved already."""
        self._forget_failure()
        self._tell(session)
        self._hear(session)
        if self._stale or self._saved_step != session.step:
            self._save(session)
        for listener in self._listeners:
            listener.end(session, session.step)

    def on_preemption(self, session: Session) -> None:
        """Saves this step, unless its current state is saved already."""
        self._forget_failure()
        self._complete()
        self._hear(session)
        if self._stale or self._saved_step != session.step:
            self._begin(session)
            self._complete()

    def _save(self, session: Session, wait: bool = True) -> bool:
        """Saves and calls the listeners; returns whether one wants to stop."""
        stops = self._tell(session)
        for listener in self._listeners:
            listener.before_save(session, session.step)
            wait |= not getattr(listener, "told_later", False)
        self._begin(session, wait)
        return self._tell(session, wait) or stops

    def _tell(self, session: Session, wait: bool = True) -> bool:
        """Notifies listeners of a complete checkpoint; returns as `_save`."""
        stops = False
        for listener in self._listeners if self._complete(wait) else ():
            if listener.after_save(session, self._saved_step):
                stops, step = True, session.step
                _log.info("%r requests a stop at step %d.", listener, step)
        return stops

    def _hear(self, session: Session) -> None:
        """Marks all savers as stale if variables were set since they saved."""
        for hook in session.hooks if session.unsaved else ():
            if isinstance(hook, CheckpointSaverHook):
                hook._stale = True
        session.unsaved = False

    def _begin(self, session: Session, wait: bool = True) -> None:
        self._hear(session)
        step, self._stale = session.step, False
        self._begun = step, self._checkpoints.save_behind(step, not wait)

    def _forget_failure(self, wait: bool = True) -> None:
        """Drops an error that was logged, since the state is saved again."""
        begun = self._begun
        if begun and (wait or begun[1].done()) and begun[1].exception():
            self._begun = None

    def _complete(self, wait: bool = True) -> bool:
        """Whether the checkpoint that was begun has now been written."""
        if self._begun is None or not (wait or self._begun[1].done()):
            return False
        (step, written), self._begun = self._begun, None
        self.last_path = written.result()
        is_first, self._saved_step = self._saved_step is None, step
        # The first save blocks and traces, so its cost is not representative.
        if isinstance(self.save_secs, AutomaticSecs) and not is_first:
            secs = max(self.save_secs, 100 * self._checkpoints.cost_secs)
            self._timer = SecondOrStepTimer(every_secs=secs)
            self._timer.update_last_triggered_step(step)
        return True


def saver_of(
    directory: str | None, hooks: Iterable[Hook]
) -> CheckpointSaverHook | None:
    """Returns the first of `hooks` that saves in `directory`, or None."""
    savers = [h for h in hooks if isinstance(h, CheckpointSaverHook)]
    for saver in savers if directory else ():
        if storage.same_path(saver.checkpoint_dir, str(directory)):
            return saver
    return None


def cadence(secs: Any, steps: Any, **default: float) -> dict[str, Any]:
    """Returns a cadence as keyword arguments; if given, without the default."""
    both = {"save_secs": secs, "save_steps": steps}
    given = {k: v for k, v in both.items() if v is not USE_DEFAULT}
    return {k: v or None for k, v in (given or default).items()}

"""What `fit` and its callbacks remember, kept in the job's directory."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist._tf import storage
from tfdist.checkpoint import checkpoints
from tfdist.estimator import results
from tfdist.hooks.callbacks import KerasCallbackHook
from tfdist.hooks.session_run_hook import (
    RunContext,
    RunValues,
    Session,
    SessionRunHook,
)

_log = logging.getLogger(__name__)

# What callbacks of Keras need to go on where an earlier process has ended.
_MEMORY: dict[type, Sequence[str]] = {
    keras.callbacks.EarlyStopping: ("best", "best_epoch", "wait"),
    keras.callbacks.ModelCheckpoint: ("best",),
    keras.callbacks.ReduceLROnPlateau: ("best", "cooldown_counter", "wait"),
}
_RESTORES = "restore_best_weights"
# An epoch, its logs, and what callbacks knew after it, by `_key`.
Row: TypeAlias = tuple[int, dict[str, Any], dict[str, Any]]


class EpochHistory(keras.callbacks.History):
    """A `History` that also keeps its epochs one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.history: dict[str, list[Any]] = {}

    def on_epoch_end(
        self, epoch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Appends the logs of an epoch, as Keras does."""
        super().on_epoch_end(epoch, logs)
        self.rows.append((epoch, {**(logs or {})}))

    def replay(self, earlier: Iterable[Row]) -> None:
        """Puts epochs of an earlier process before its own."""
        rows = [*((epoch, logs) for epoch, logs, _ in earlier), *self.rows]
        self.rows.clear()
        self.history.clear()
        self.epoch: list[int] = []
        for epoch, logs in rows:
            self.on_epoch_end(epoch, logs)


@dataclasses.dataclass(eq=False)
class HistoryKeeper(SessionRunHook):
    """Keeps the `History` of a call for its next process, and that it ended.

    It ends once the last checkpoint is saved: callbacks may have set the best
    weights, which a process that dies before has lost. Keras' callbacks that
    wait for a better value go on waiting for it, and not for the first one.
    """

    path: str
    steps_per_epoch: int
    max_steps: int
    hook: KerasCallbackHook
    history: EpochHistory
    callbacks: Sequence[keras.callbacks.Callback]
    # What an earlier process has done, evaluated and saved.
    earlier: Sequence[Row] = ()
    evaluated: int = -1
    step: int = 0
    rows: list[Row] = dataclasses.field(default_factory=list)
    _begun = False

    def read(self) -> bool:
        """Reads what is there of this call; returns whether it has ended."""
        found = results.read_json(self.path)
        newest = checkpoints.latest(os.path.dirname(self.path))
        if not (found and newest):
            return False
        # From the name, because the checkpoint may be damaged.
        self.step = int(newest.rpartition("-")[2])
        ended, at_step = found["ended"], found["global_step"]
        if 0 < ended < self.max_steps or (ended and self.step > at_step):
            return False  # Callbacks begin another part of the job.
        has_ended = ended > 0 and self.step == at_step
        self.earlier = found["epochs"]
        if not has_ended:
            self._forget_after(self.step)
        if found["evaluated_step"] <= self.step:
            self.evaluated = found["evaluated_step"]
            self.begin()
        if has_ended and self.step < self.max_steps:
            _log.warning(
                "A callback stopped this job at step %d. No step is run. Raise "
                "`epochs` to continue, or delete %s.",
                self.step,
                self.path,
            )
        return has_ended

    def _forget_after(self, step: int) -> None:
        """Leaves out the epochs that run again."""
        done = step // self.steps_per_epoch
        self.earlier = [row for row in self.earlier if row[0] < done]

    def begin(self) -> None:
        """Lets the hook begin after what an earlier process has evaluated."""
        self.hook.evaluated_step = self.evaluated
        self._begun = False

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Restores what callbacks knew, which begin before this hook."""
        if self._begun:
            return  # After a recovery, callbacks have gone on.
        self._begun = True
        self._forget_after(session.step)  # The newest checkpoint was damaged.
        memories = self.earlier[-1][2] if self.earlier else {}
        for callback in self.callbacks:
            path = getattr(callback, "filepath", "{")
            if "{" in path or tf.io.gfile.exists(path):  # Else it was deleted.
                vars(callback).update(memories.get(_key(callback), {}))
            if self.earlier and getattr(callback, _RESTORES, False):
                _log.warning(
                    "%s starts over: the best weights of the %d epochs before "
                    "were lost with the process. ModelCheckpoint("
                    "save_best_only=True) keeps them in a file.",
                    type(callback).__name__,
                    len(self.earlier),
                )

    def steps_until_next(self, step: int) -> None:
        """Any number: `KerasCallbackHook` ends the epochs."""

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Writes the history once an epoch has ended."""
        if len(self.history.rows) > len(self.rows):
            self._write(run_context.session, ended=0)

    def end(self, session: Session) -> None:
        """Writes that no call for so many steps, or fewer, trains any more."""
        assert session.model is not None
        stopped = session.model.stop_training  # Else by its steps, or a hook.
        self._write(session, self.max_steps if stopped else session.step)

    def _write(self, session: Session, ended: int) -> None:
        pairs = ((_key(c), _memory_of(c)) for c in self.callbacks)
        memories = {key: memory for key, memory in pairs if memory}
        new = self.history.rows[len(self.rows) :]
        self.rows += [(epoch, logs, memories) for epoch, logs in new]
        if session.is_chief:
            found = {
                "global_step": session.step,
                "ended": ended,
                "evaluated_step": self.hook.evaluated_step,
                "epochs": [*self.earlier, *self.rows],
            }
            storage.write_text(self.path, json.dumps(found, default=_plain))


def _memory_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns what the next process must know to go on with a callback."""
    if getattr(callback, _RESTORES, False):
        return {}  # Without the best weights, later ones would count as them.
    own = (_MEMORY[kind] for kind in _MEMORY if isinstance(callback, kind))
    return {name: vars(callback)[name] for name in next(own, ())}


def _key(callback: keras.callbacks.Callback) -> str:
    """Tells a callback from others, also in the next process."""
    options = "monitor", "mode", "filepath"
    given = [f"{name}={getattr(callback, name, None)}" for name in options]
    return f"{type(callback).__name__}({', '.join(given)})"


def _plain(value: Any) -> Any:
    """Converts what is no number of Python: callbacks may log anything."""
    return value.tolist() if hasattr(value, "tolist") else str(value)

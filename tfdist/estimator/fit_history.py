"""The `History` of `fit`, kept in the job's directory."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import keras

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

    def replay(self, earlier: Iterable[tuple[int, dict[str, Any]]]) -> None:
        """Puts epochs of an earlier process before its own."""
        rows, self.rows = [*earlier, *self.rows], []
        self.history.clear()
        self.epoch: list[int] = []
        for epoch, logs in rows:
            self.on_epoch_end(epoch, logs)


@dataclasses.dataclass(eq=False)
class HistoryKeeper(SessionRunHook):
    """Keeps the `History` of a call for its next process, and that it ended.

    It ends once the last checkpoint is saved: callbacks may have set the best
    weights, which a process that dies before has lost.
    """

    path: str
    max_steps: int
    hook: KerasCallbackHook
    history: EpochHistory
    # What an earlier process has done, evaluated and saved.
    earlier: Sequence[tuple[int, dict[str, Any]]] = ()
    evaluated: int = -1
    step: int = 0
    written = 0  # The number of epochs.

    def read(self, steps_per_epoch: int) -> bool:
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
        done = self.step // steps_per_epoch  # Later epochs run again.
        self.earlier = [
            (epoch, logs)
            for epoch, logs in found["epochs"]
            if has_ended or epoch < done
        ]
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

    def begin(self) -> None:
        """Lets the hook begin after what an earlier process has evaluated."""
        self.hook.evaluated_step = self.evaluated

    def steps_until_next(self, step: int) -> None:
        """Any number: `KerasCallbackHook` ends the epochs."""

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Writes the history once an epoch has ended."""
        if len(self.history.rows) > self.written:
            self._write(run_context.session, ended=0)

    def end(self, session: Session) -> None:
        """Writes that no call for so many steps, or fewer, trains any more."""
        assert session.model is not None
        stopped = session.model.stop_training  # Else by its steps, or a hook.
        self._write(session, self.max_steps if stopped else session.step)

    def _write(self, session: Session, ended: int) -> None:
        self.written = len(self.history.rows)
        if session.is_chief:
            found = {
                "global_step": session.step,
                "ended": ended,
                "evaluated_step": self.hook.evaluated_step,
                "epochs": [*self.earlier, *self.history.rows],
            }
            storage.write_text(self.path, json.dumps(found, default=_plain))


def _plain(value: Any) -> Any:
    """Converts what is no number of Python: callbacks may log anything."""
    return value.tolist() if hasattr(value, "tolist") else str(value)

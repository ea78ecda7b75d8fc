"""Runs a loop from its first or restored step to its last, with its hooks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import tensorflow as tf

from tfdist.hooks import SessionRunHook
from tfdist.loop import EndOfInput, Loop

_log = logging.getLogger(__name__)

_CHUNK_SECS = 2.0


class TrainingSession:
    """Steps and hooks until `max_steps`, the end of the input, or a request.

    Args:
        loop: Runs the steps.
        global_step: Scalar int64 variable that counts applied steps.
        hooks: Called in this order.
        max_steps: Value of `global_step` at which training ends, None for no
            limit.
        restored: Whether the state comes from a checkpoint.

    Attributes:
        step: Steps applied in the job so far.
        secs_in_steps: Seconds this session has spent in steps, without hooks.
    """

    def __init__(
        self,
        loop: Loop,
        global_step: tf.Variable,
        hooks: Sequence[SessionRunHook],
        *,
        max_steps: int | None,
        restored: bool,
    ) -> None:
        self.max_steps = max_steps
        self.restored = restored
        self.step = int(global_step.numpy())
        self._loop = loop
        self._global_step = global_step
        self._hooks = list(hooks)
        self._stop = False
        self._steps_per_sec = 0.0
        self.secs_in_steps = 0.0

    def request_stop(self) -> None:
        """Ends training after the hooks have seen the current steps."""
        self._stop = True

    def should_stop(self) -> bool:
        """Whether training is at its end."""
        at_end = self.max_steps is not None and self.step >= self.max_steps
        return self._stop or at_end

    def train(self) -> None:
        """Runs to the end."""
        for hook in self._hooks:
            hook.after_create_session(self)
        while not self.should_stop():
            logs = self._run_chunk()
            for hook in self._hooks:
                hook.after_run(self, logs)
        for hook in self._hooks:
            hook.end(self)

    def _run_chunk(self) -> dict[str, float]:
        """As many steps as every hook allows, and about two seconds' worth."""
        wishes = [hook.steps_until_next(self.step) for hook in self._hooks]
        if self.max_steps is not None:
            wishes.append(self.max_steps - self.step)
        wishes.append(max(100, int(self._steps_per_sec * _CHUNK_SECS)))
        start, first_step = time.monotonic(), self.step
        try:
            logs = self._loop.run(min(w for w in wishes if w is not None))
        except EndOfInput as end:
            self.request_stop()
            logs = end.logs
        self.step = int(self._global_step.numpy())
        secs = time.monotonic() - start
        self.secs_in_steps += secs
        if self._stop:
            _log.info("The training input ended at step %d.", self.step)
        self._steps_per_sec = (self.step - first_step) / max(secs, 1e-9)
        return logs

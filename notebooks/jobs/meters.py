"""What the programs of several lessons measure with."""

import json
import time
from collections.abc import Iterable
from typing import Any

import tfdist
from tfdist.hooks.session_run_hook import SessionRunContext, SessionRunValues


class Meter(tfdist.SessionRunHook):
    """Marks steps and times; in the end prints a line of JSON.

    Args:
        every: Steps from one mark to the next. The first ones build functions
            and are before the first mark.
        row: What stands in the line beside what `found` returns.
    """

    def __init__(self, every: int, **row: Any) -> None:
        self.every = every
        self.marks = []
        self._row = row

    def steps_until_next(self, step: int) -> int:
        """To the next mark."""
        return self.every - step % self.every

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """A mark: the step, the time, and what else is measured."""
        more = self.measured(run_values)
        step = run_context.session.step
        self.marks.append((step, time.perf_counter(), *more))

    def end(self, session: tfdist.MonitoredTrainingSession) -> None:
        """Prints what was found."""
        print(json.dumps(self._row | self.found(session)), flush=True)

    def measured(self, run_values: SessionRunValues) -> Iterable[float]:
        """What to mark beside step and time. Default: nothing."""
        return ()

    def found(self, session: tfdist.MonitoredTrainingSession) -> dict[str, Any]:
        """What to print."""
        return {"marks": self.marks}

    def per_step(self) -> list[float]:
        """Seconds of a step, and what else was measured, from first to last."""
        (first, *start), *_, (last, *end) = self.marks
        steps = last - first
        return [(b - a) / steps for a, b in zip(start, end, strict=True)]

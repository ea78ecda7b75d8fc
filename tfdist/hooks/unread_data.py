"""Says which share of the data nobody reads while a worker is gone.

An input function that shards by its `InputContext` gives a worker a part of the
data for good. The readers of tfdist deal the examples again in each pass, so
what a dead worker held goes to the others; of any other this hook speaks.
"""

from __future__ import annotations

import logging

from tfdist.data.input_fns import InputFn, described
from tfdist.hooks.session_run_hook import (
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)

_log = logging.getLogger(__name__)


class UnreadDataHook(SessionRunHook):
    """Warns when a worker is gone for long, and again at the end of the job.

    Args:
        input_fn: That of training, to name it.
        num_workers: How many workers share the data.
        after_secs: Seconds that a worker may be gone. Default: a minute.
    """

    def __init__(
        self, input_fn: InputFn, num_workers: int, after_secs: float = 60.0
    ) -> None:
        self._input_fn = input_fn
        self._num_workers = num_workers
        self._after_secs = after_secs
        self._since: dict[str, int] = {}

    def steps_until_next(self, step: int) -> None:
        """Any number: it asks for seconds."""

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Warns of workers that have gone since the last run."""
        session = run_context.session
        missing = session.missing_workers(self._after_secs)
        before = self._since
        self._since = {name: before.get(name, session.step) for name in missing}
        if set(missing) - set(before):
            _log.warning(
                "%s gone for %g s or more: nobody reads %s of the examples "
                "now, because input function %s gives every worker a share of "
                "its own. The readers of tfdist.data, with context=context, "
                "deal the examples again in each pass.",
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}",
                self._after_secs,
                self._share(),
                described(self._input_fn),
            )

    def end(self, session: Session) -> None:
        """Says it again: the results are those of a part of the data."""
        if self._since:
            _log.warning(
                "Training ended without %s: nobody has read %s of the examples "
                "since step %d.",
                ", ".join(self._since),
                self._share(),
                min(self._since.values()),
            )

    def _share(self) -> str:
        return f"{len(self._since) / self._num_workers:.0%}"

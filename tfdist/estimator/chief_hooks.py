"""The hooks that an `Estimator` adds on the chief to the user's hooks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tfdist._tf.private_keras import replaces_fit
from tfdist.data.input_fns import InputFn
from tfdist.estimator.run_config import RunConfig
from tfdist.hooks import saving_hooks, summary_hooks
from tfdist.hooks.basic import NanTensorHook, StopAtStepHook
from tfdist.hooks.progress import ProgressHook, UnreadDataHook
from tfdist.hooks.session_run_hook import Session, SessionRunHook

_log = logging.getLogger(__name__)


def chief_hooks(
    config: RunConfig,
    input_fn: InputFn,
    max_steps: int | None,
    listeners: Sequence[saving_hooks.CheckpointSaverListener],
    hooks_of_user: Sequence[SessionRunHook] = (),
) -> list[SessionRunHook]:
    """Returns all of the chief's own hooks.

    As in TF1, a user's hook that saves to the same directory replaces the
    default saver and notifies its listeners. The hooks trigger at multiples of
    their intervals, so that dispatches end where checkpoints are due.
    """
    if package := replaces_fit():
        _log.warning(
            "%r has replaced keras.Model.fit, but tfdist does not call it, so "
            "nothing is logged there. Pass the tracker's callback to "
            "fit(callbacks=...) or KerasCallbackHook.",
            package,
        )
    directory = config.summary_dir or config.model_dir
    every = config.log_step_count_steps
    on_ps = config.strategy_name == "ps"
    hooks: list[SessionRunHook] = [_LogStart(max_steps), NanTensorHook(None)]
    if every is not None:
        counter = summary_hooks.StepCounterHook(
            every, output_dir=directory, at_first_step=False, log=False
        )
        progress = ProgressHook(every, max_steps=max_steps, coordinates=on_ps)
        hooks += [counter, progress]
    if summary_steps := config.save_summary_steps:
        summaries = summary_hooks.SummarySaverHook(
            summary_steps, output_dir=directory, at_first_step=False
        )
        hooks.append(summaries)
    if on_ps:
        hooks.append(UnreadDataHook(input_fn))
        if every is not None:
            hooks.append(summary_hooks.StalenessHook(directory, every))
    if max_steps is not None:
        hooks.append(StopAtStepHook(last_step=max_steps))
        hooks[-1].warns = False  # `_LogStart` does.
    saver = saving_hooks.saver_of(config.model_dir, hooks_of_user)
    if saver:
        saver.add_listeners(listeners)
        hours = config.keep_checkpoint_every_n_hours
        saver.keeps(config.keep_checkpoint_max, hours)
    elif config.saves_checkpoints:
        saver = saving_hooks.CheckpointSaverHook(
            config.model_dir,
            config.save_checkpoints_secs or None,
            config.save_checkpoints_steps or None,
            listeners=listeners,
            max_to_keep=config.keep_checkpoint_max,
            keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        )
        hooks.append(saver)
    elif listeners:
        raise ValueError(
            "Argument `saving_listeners` has listeners, but no checkpoints are "
            "saved. Set `save_checkpoints_steps` or `save_checkpoints_secs` in "
            "the RunConfig."
        )
    if saver:
        cadence = saver.save_steps, saver.save_secs
        hooks.append(summary_hooks.DynamicEmbeddingHook(directory, *cadence))
    return hooks


class _LogStart(SessionRunHook):
    """Logs where training starts or resumes, or that it is finished."""

    def __init__(self, max_steps: int | None) -> None:
        self._max_steps = max_steps

    def after_create_session(self, session: Session, coord: Any) -> None:
        step, restored = session.step, session.restored_from
        if restored is None:
            _log.info("Training starts from newly initialized variables.")
        elif self._max_steps is None or step < self._max_steps:
            _log.info("Training continues at step %d from %s.", step, restored)
        else:
            _log.warning(
                "This job is already finished: %s is at step %d, and max_steps "
                "is %d. No step is run. Raise max_steps (for fit: epochs) to "
                "continue, or choose another model_dir to train from step 0.",
                restored,
                step,
                self._max_steps,
            )

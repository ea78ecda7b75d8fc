"""The hooks that an `Estimator` gives its chief beside the user's."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.data.input_fns import InputFn
from tfdist.estimator.specs import RunConfig
from tfdist.estimator.warm_start import WarmStartHook
from tfdist.hooks.basic import NanTensorHook, StopAtStepHook
from tfdist.hooks.progress import ProgressHook, UnreadDataHook
from tfdist.hooks.saving_hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
)
from tfdist.hooks.session_run_hook import SessionRunHook
from tfdist.hooks.summary_hooks import (
    StalenessHook,
    StepCounterHook,
    SummarySaverHook,
)


def chief_hooks(
    config: RunConfig,
    input_fn: InputFn,
    max_steps: int | None,
    warm_start: WarmStartHook | None,
    listeners: Sequence[CheckpointSaverListener],
) -> list[SessionRunHook]:
    """All of the chief's own hooks, the one that saves at the end.

    They act at multiples of their intervals, where TF1 began at step 1: so
    they cut the steps into the same pieces as the checkpoints.
    """
    directory, every = config.model_dir, config.log_step_count_steps
    hooks: list[SessionRunHook] = [NanTensorHook(None)]
    if every is not None:
        counter = StepCounterHook(
            every, output_dir=directory, at_first_step=False, log=False
        )
        hooks += [counter, ProgressHook(every, max_steps=max_steps)]
    if warm_start:
        hooks.append(warm_start)
    if config.save_summary_steps:
        hooks.append(
            SummarySaverHook(
                config.save_summary_steps,
                output_dir=directory,
                at_first_step=False,
            )
        )
    if config.strategy_name == "ps":
        hooks.append(UnreadDataHook(input_fn, config.cluster.num_workers))
        if every is not None:
            hooks.append(StalenessHook(directory, every))
    if max_steps is not None:
        hooks.append(StopAtStepHook(last_step=max_steps))
    if config.saves_checkpoints:
        hooks.append(
            CheckpointSaverHook(
                directory,
                save_steps=config.save_checkpoints_steps or None,
                save_secs=config.save_checkpoints_secs or None,
                listeners=listeners,
                max_to_keep=config.keep_checkpoint_max,
                keep_checkpoint_every_n_hours=(
                    config.keep_checkpoint_every_n_hours
                ),
            )
        )
    elif listeners:
        raise ValueError(
            "Argument `saving_listeners` has listeners, and there are no "
            "checkpoints. Set `save_checkpoints_steps` or "
            "`save_checkpoints_secs` of the RunConfig."
        )
    return hooks

"""The hooks that a session has by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.hooks.saving_hooks import CheckpointSaverHook
from tfdist.hooks.summary_hooks import StepCounterHook, SummarySaverHook

Hook: TypeAlias = tf.compat.v1.train.SessionRunHook

USE_DEFAULT: Any = object()
"""An argument that was not given, where None means something."""


def cadence(
    secs: Any, steps: Any, default_secs: float | None, default_steps: int | None
) -> dict[str, Any]:
    """Seconds and steps between two; giving one drops the other's default."""
    if secs is USE_DEFAULT and steps is USE_DEFAULT:
        secs, steps = default_secs, default_steps
    return {
        "save_secs": None if secs is USE_DEFAULT else secs or None,
        "save_steps": None if steps is USE_DEFAULT else steps or None,
    }


def default_hooks(
    checkpoint_dir: str | None,
    summary_dir: str | None,
    checkpoints: Mapping[str, Any],
    summaries: Mapping[str, Any],
    log_step_count_steps: int | None,
    **keep: Any,
) -> list[Hook]:
    """The chief's own hooks, in TF1's order.

    Args:
        checkpoint_dir: Where checkpoints go; None for none.
        summary_dir: Where summaries go; None for none.
        checkpoints: From `cadence`.
        summaries: From `cadence`.
        log_step_count_steps: Steps between measurements of the speed.
        **keep: Which checkpoints `CheckpointSaverHook` keeps.
    """
    hooks: list[Hook] = []
    if summary_dir and log_step_count_steps:
        hooks.append(
            StepCounterHook(log_step_count_steps, output_dir=summary_dir)
        )
    if summary_dir and any(summaries.values()):
        hooks.append(SummarySaverHook(**summaries, output_dir=summary_dir))
    if checkpoint_dir and any(checkpoints.values()):
        hooks.append(CheckpointSaverHook(checkpoint_dir, **checkpoints, **keep))
    return hooks

"""Checks, before the first step, for unsupported optimizer options."""

from __future__ import annotations

import keras
from keras.optimizers import Optimizer

from tfdist._tf import private_keras
from tfdist.training.optimizers import limit, parts


def check(optimizer: Optimizer) -> None:
    """Raises `ValueError` for options that fail if workers share slots.

    Only the step number tells which step ends an accumulation; with a scaled
    loss, some steps do not count.
    """
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    for part in parts(optimizer):
        if scaled and part.gradient_accumulation_steps:
            raise ValueError(
                f"Optimizer {part.name!r} accumulates gradients of a loss "
                "scaled by LossScaleOptimizer, which updates on parameter "
                "servers do not support. Use mixed_bfloat16, which needs no "
                "scale, or auto_scale_loss=False with a loss_scale_factor, or "
                "larger batches instead of gradient_accumulation_steps."
            )


def check_overridden(optimizer: Optimizer) -> None:
    """Raises `ValueError` if an optimizer overrides methods nothing calls."""
    for each in (optimizer, *parts(optimizer)):
        for name in private_keras.METHODS_OF_ALL_GRADIENTS:
            method = getattr(type(each), name)
            if method.__module__.partition(".")[0] not in ("keras", "tfdist"):
                raise ValueError(
                    f"Optimizer {type(each).__name__} overrides `{name}`, "
                    "which takes all gradients at once. tfdist updates each "
                    "variable where it is, with `update_step`. Override that, "
                    "or train in one process with a `train_step`."
                )


def check_norms(optimizer: Optimizer, remote: bool) -> None:
    """Raises `ValueError` if clipping needs the norm of a distributed sum."""
    by_norm = ("clipnorm", "global_clipnorm") if remote else ("clipnorm",)
    clips = any(limit(optimizer, name) for name in by_norm)
    if clips and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"Optimizer {optimizer.name!r} clips accumulated gradients by "
            "their norm, which is not supported on parameter servers, nor "
            "with a table in several shards. Use clipvalue, or larger batches "
            "instead of gradient_accumulation_steps."
        )

"""Refuses Keras callbacks that cannot work in tfdist's training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from tfdist._tf import versions
from tfdist._tf.private_keras import profiles
from tfdist.training.multi_optimizer import MultiOptimizer

Callback: TypeAlias = keras.callbacks.Callback

_INSTEAD = {
    versions.OrbaxCheckpoint: "Use RunConfig(save_checkpoints_steps=...) to "
    "save checkpoints, or ModelCheckpoint to save Keras files.",
    keras.callbacks.ProgbarLogger: "Use ProgressHook to show the progress.",
    keras.callbacks.SwapEMAWeights: "Evaluations read checkpoints, where it "
    "cannot swap weights; they contain the averages too. Remove it.",
    keras.callbacks.CallbackList: "Pass its callbacks one by one.",
}

_SETS_RATE = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)
_NEVER_CALLED = ("on_test_batch_begin", "on_test_batch_end")


def reason_against(callback: Callback, with_evaluations: bool) -> str | None:
    """Returns why a callback would not work as under `fit`, or None."""
    for kind, instead in _INSTEAD.items():
        if isinstance(callback, kind):
            return instead
    if isinstance(callback, keras.callbacks.TensorBoard):
        if profiles(callback):
            return "Set profile_batch=0, and profile steps with ProfilerHook."
        if callback.update_freq != "epoch":
            return (
                f"Received: update_freq={callback.update_freq!r}. Set it to "
                "'epoch', and write every N steps with SummarySaverHook."
            )
    monitor = monitored(callback)
    monitors = getattr(callback, "save_best_only", True)
    if monitors and monitor.startswith("val_") and not with_evaluations:
        return (
            f"It monitors {monitor!r}: pass `eval_dir`, the directory that "
            "the evaluations write to (to `fit`: validation_data), or set "
            "monitor='loss'."
        )
    if never := overrides(callback, *_NEVER_CALLED):
        return (
            f"It overrides {never[0]}, which is never called: evaluations run "
            "separately. Use EvalSpec(hooks=...) for their batches, "
            f"on_test_end for their results. {without(callback, never)}"
        )
    return None


def monitored(callback: Callback) -> str:
    """The name of the metric that a callback monitors, or ""."""
    return getattr(callback, "monitor", None) or ""


def overrides(callback: Callback, *methods: str) -> list[str]:
    """The names among `methods` that a callback implements outside Keras."""

    def is_own(name: str) -> bool:
        module = getattr(type(callback), name).__module__
        return name in vars(callback) or not module.startswith("keras.")

    return list(filter(is_own, methods))


def without(callback: Callback, methods: Sequence[str]) -> str:
    """Returns how to disable methods, even of a library's callback."""
    return (
        f"To disable this, use a subclass of {type(callback).__name__} with "
        f"`{' = '.join(methods)} = keras.callbacks.Callback.{methods[0]}`."
    )


def check_model(callback: Callback, model: keras.Model) -> None:
    """Raises `ValueError` if a callback cannot work with this model."""
    frequencies = ("histogram_freq", "embeddings_freq")
    pulls = any(getattr(callback, name, 0) for name in frequencies)
    if pulls and any("/job:ps" in v.value.device for v in model.variables):
        raise ValueError(
            f"{type(callback).__name__} with histogram_freq or embeddings_freq "
            "would pull whole tables from the parameter servers. Set both to 0."
        )
    optimizer = model.optimizer  # Or a LossScaleOptimizer of it.
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    several = isinstance(optimizer, MultiOptimizer)
    if several and isinstance(callback, _SETS_RATE):
        raise ValueError(
            f"{type(callback).__name__} sets one learning rate, but each "
            "optimizer of a MultiOptimizer has its own. Give each a schedule "
            "(keras.optimizers.schedules) instead."
        )


def check_writers(callback: Callback) -> None:
    """Raises `ValueError` for summary writers older than the cluster."""
    for name, value in vars(callback).items():
        if not isinstance(value, tf.summary.SummaryWriter):
            continue
        try:
            value.flush()
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(
                f"{type(callback).__name__} has a summary writer, `{name}`, "
                "created before this process joined its cluster; TensorFlow "
                "loses such writers. Create it in `set_model`, which each "
                "session calls, after `super().set_model(model)`."
            ) from error

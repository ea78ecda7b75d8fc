"""Keras callbacks in tfdist's training loop (design decision D1).

A callback was written for `fit`: batch after batch in one process. What of that
has a meaning here is called; one that relies on the rest is refused.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import keras

from tfdist._tf.arguments import check_positive
from tfdist.hooks.events import read_scalars
from tfdist.hooks.session_run_hook import (
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    warn_of_single_steps,
)
from tfdist.training.multi_optimizer import MultiOptimizer

_INSTEAD = {
    (keras.callbacks.ModelCheckpoint, keras.callbacks.OrbaxCheckpoint): (
        "RunConfig(save_checkpoints_steps=...) and BestExporter save the model."
    ),
    keras.callbacks.BackupAndRestore: "Every job goes on from its last "
    "checkpoint by itself.",
    keras.callbacks.TerminateOnNaN: "NanTensorHook stops training when the "
    "loss is NaN, before it is saved.",
    keras.callbacks.ProgbarLogger: "ProgressHook shows the progress.",
    keras.callbacks.SwapEMAWeights: "The evaluation runs on another machine, "
    "whose weights it cannot swap.",
    keras.callbacks.CallbackList: "Give its callbacks one by one.",
}

_SETS_RATE = (
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
)
_NEVER_CALLED = (
    "on_batch_begin",
    "on_train_batch_begin",
    *(
        f"on_{mode}_{what}"
        for mode in ("test", "predict")
        for what in ("begin", "end", "batch_begin", "batch_end")
    ),
)


class KerasCallbackHook(SessionRunHook):
    """Runs Keras callbacks in a session.

    An epoch is `steps_per_epoch` steps of the job: epoch 2 of 100 begins at
    step 200. Differences from `fit` are:

    * `on_train_batch_end` has the logs of its step alone. Where a callback
      overrides it, steps run one by one, which a warning tells.
    * The logs of an epoch are the means over its steps of the logs of its
      runs: exact for means over batches of one size, not for others (AUC).
    * `val_` metrics are those of the newest evaluation in `eval_dir`, in the
      first epoch that ends after it; epochs without a new one have none.
    * After a recovery the steps since the last checkpoint run again. An epoch
      that had ended is not reported a second time. After a restart of the
      process callbacks start over, at the epoch where the job is.

    `model.stop_training = True` requests a stop. A learning rate that a
    callback sets reaches the optimizer's variable, also on a parameter server.
    `TensorBoard(profile_batch=...)` does nothing here: use `ProfilerHook`.

    Args:
        callbacks: The callbacks.
        steps_per_epoch: Steps of an epoch.
        eval_dir: Where the evaluations write (`<model_dir>/eval`); needed for
            callbacks that monitor a `val_` metric.

    Raises:
        ValueError: a callback has no meaning here; the message says why and
            what does its work instead.

    >>> losses = []
    >>> callback = keras.callbacks.LambdaCallback(
    ...     on_epoch_end=lambda epoch, logs: losses.append(logs["loss"])
    ... )
    >>> hook = tfdist.hooks.KerasCallbackHook([callback], steps_per_epoch=200)
    >>> hook.steps_until_next(step=150)
    50
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        steps_per_epoch: int,
        eval_dir: str | None = None,
    ) -> None:
        check_positive("steps_per_epoch", steps_per_epoch)
        for callback in callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(
                    "Argument `callbacks` must be a list of "
                    f"keras.callbacks.Callback. Received: {callback!r}."
                )
            if reason := _reason_against(callback, eval_dir is not None):
                raise ValueError(
                    f"{type(callback).__name__} cannot run in tfdist's "
                    f"training loop. {reason}"
                )
        self._callbacks = list(callbacks)
        # TensorBoard overrides all, and does nothing there but by batches.
        by_batches = [
            callback
            for callback in callbacks
            if _overrides(callback, "on_train_batch_end", "on_batch_end")
            and not isinstance(callback, keras.callbacks.TensorBoard)
        ]
        for callback in by_batches:
            warn_of_single_steps(
                f"{type(callback).__name__}.on_train_batch_end",
                "Let it act at the end of an epoch instead, if that is enough.",
            )
        self._each_batch = bool(by_batches)
        self._steps_per_epoch = steps_per_epoch
        self._eval_dir = eval_dir
        self.begin()

    def begin(self) -> None:
        """Forgets an earlier session."""
        self._begun = False
        self._step = 0
        self._epoch = -1  # The one under way, or -1 between two.
        self._ended_epoch = -1
        self._evaluated_step = -1
        self._forget_logs()

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Gives the callbacks the model, which is another after a recovery."""
        model = getattr(session, "model", None)
        if model is None:
            raise ValueError(
                "KerasCallbackHook needs a session that trains a Keras model; "
                "this one runs a plain step function. Use hooks instead."
            )
        params = {"steps": self._steps_per_epoch, "epochs": None, "verbose": 0}
        model.stop_training = False
        for callback in self._callbacks:
            _check_model(callback, model)
            callback.set_params(params)
            callback.set_model(model)
        if not self._begun:
            self._call("on_train_begin")
            self._begun = True
        self._step, self._epoch = session.step, -1

    def steps_until_next(self, step: int) -> int:
        """Steps until the epoch ends, or one where a callback sees each."""
        rest = self._steps_per_epoch - step % self._steps_per_epoch
        return 1 if self._each_batch else rest

    def before_run(self, run_context: SessionRunContext) -> None:
        """Begins an epoch."""
        if self._epoch < 0:
            self._epoch = run_context.session.step // self._steps_per_epoch
            self._forget_logs()
            self._call("on_epoch_begin", self._epoch)

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Reports the run, and the epoch if it is over."""
        session = run_context.session
        steps, self._step = session.step - self._step, session.step
        if steps > 0:
            self._logged_steps += steps
            for name, value in run_values.results.items():
                self._sums[name] += value * steps
            batch = (session.step - 1) % self._steps_per_epoch
            self._call("on_train_batch_end", batch, dict(run_values.results))
        if session.step // self._steps_per_epoch > self._epoch:
            self._end_epoch()
        if session.model.stop_training:
            run_context.request_stop()

    def end(self, session: Session) -> None:
        """Ends an epoch that was begun, as `fit` does, and training."""
        if self._epoch >= 0 and self._logged_steps:
            self._end_epoch()
        self._call("on_train_end")

    def _end_epoch(self) -> None:
        epoch, self._epoch = self._epoch, -1
        if epoch <= self._ended_epoch:
            return
        self._ended_epoch = epoch
        logs = {k: v / self._logged_steps for k, v in self._sums.items()}
        results = read_scalars(self._eval_dir) if self._eval_dir else {}
        newest = max(results, default=-1)
        if newest > self._evaluated_step:  # No epoch had it yet.
            self._evaluated_step = newest
            logs |= {f"val_{k}": v for k, v in results[newest].items()}
        self._call("on_epoch_end", epoch, logs)

    def _forget_logs(self) -> None:
        self._logged_steps = 0
        self._sums: dict[str, float] = collections.defaultdict(float)

    def _call(self, method: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(*args)


def _reason_against(
    callback: keras.callbacks.Callback, with_evaluations: bool
) -> str | None:
    """Why a callback would not do what it does under `fit`; None: it does."""
    for kind, instead in _INSTEAD.items():
        if isinstance(callback, kind):
            return instead
    if isinstance(callback, keras.callbacks.TensorBoard):
        # It overrides all methods; by epochs it does without those of batches.
        if callback.update_freq == "epoch":
            return None
        return (
            f"update_freq={callback.update_freq!r} counts batches. "
            "SummarySaverHook writes by steps."
        )
    if getattr(callback, "restore_best_weights", False):
        return (
            "restore_best_weights=True would set the weights after the last "
            "checkpoint. BestExporter keeps the best model."
        )
    monitor = getattr(callback, "monitor", None) or ""
    if monitor.startswith("val_") and not with_evaluations:
        return (
            f"It monitors {monitor!r}: pass `eval_dir`, the directory where "
            "the evaluations write, or let it monitor 'loss'."
        )
    if never := _overrides(callback, *_NEVER_CALLED):
        return (
            f"It overrides {never[0]}, which is never called: many steps run "
            "in one go, and evaluations apart from training."
        )
    return None


def _overrides(callback: keras.callbacks.Callback, *methods: str) -> list[str]:
    """Those of `methods` that a callback, or its class, has of its own."""
    return [
        name
        for name in methods
        if name in vars(callback)
        or getattr(type(callback), name)
        is not getattr(keras.callbacks.Callback, name)
    ]


def _check_model(
    callback: keras.callbacks.Callback, model: keras.Model
) -> None:
    """Fails for a callback that would not work with this model."""
    frequencies = ("histogram_freq", "embeddings_freq")
    pulls = any(getattr(callback, name, 0) for name in frequencies)
    if pulls and any("/job:ps" in v.value.device for v in model.variables):
        raise ValueError(
            f"{type(callback).__name__} with histogram_freq or embeddings_freq "
            "would pull whole tables from the parameter servers. Set both to 0."
        )
    if isinstance(callback, _SETS_RATE) and isinstance(
        model.optimizer, MultiOptimizer
    ):
        raise ValueError(
            f"{type(callback).__name__} sets one learning rate, but the parts "
            "of a MultiOptimizer have their own. Give them a schedule "
            "(keras.optimizers.schedules)."
        )

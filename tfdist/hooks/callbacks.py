"""Keras callbacks in tfdist's training loop.

Callbacks are written for `fit`, which runs batch after batch in one process.
Methods that have a meaning here are called; a callback that relies on others is
refused, and the error names an alternative. `CALLBACKS.md` lists all callbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.arguments import check_positive
from tfdist._tf.private_keras import assigned, resume_at
from tfdist.hooks import callback_checks as checks
from tfdist.hooks.callback_checks import Callback, overrides, without
from tfdist.hooks.events import ScalarReader
from tfdist.hooks.session_run_hook import (
    RunContext,
    RunValues,
    Session,
    SessionRunHook,
    warn_of_single_steps,
)
from tfdist.training.counters import refuse_counters
from tfdist.training.loop import Logs

_log = logging.getLogger(__name__)

# Callbacks that write run on the chief only, so that each file has one writer.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_SET_NOTHING = (
    *_WRITERS,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,  # Nothing after a step.
    keras.callbacks.TerminateOnNaN,
)
_OF_BATCHES = (
    *("on_batch_begin", "on_batch_end"),
    *("on_train_batch_begin", "on_train_batch_end"),
)


class KerasCallbackHook(SessionRunHook):
    """Runs Keras callbacks in a session.

    An epoch is `steps_per_epoch` steps of the job: with 100 steps per epoch,
    epoch 2 begins at step 200. At the end of an epoch, and when
    `ModelCheckpoint(save_freq=...)` saves, no step is running: the weights are
    those of that step, also on parameter servers. `model.stop_training = True`
    requests a stop. A learning rate or weights set by a callback reach the
    variables, also on parameter servers, and the last checkpoint. Differences:

    * Batch callbacks receive the logs of their step only (logs since the epoch
      began, for metrics that do not add up, a custom `train_step`, and a
      `ModelCheckpoint` that saves by batches). They make each step a separate
      dispatch, with a warning. The model's metrics are of the epoch so far,
      even if the model was evaluated meanwhile. On parameter servers, later
      steps are under way: what a batch callback reads or sets is the state
      after some of them, and a stop comes after those handed out already, at
      most at the end of the epoch. With `backup_workers=0` none is under way.
    * `val_` metrics come from the newest evaluation in `eval_dir`, in the first
      epoch that ends after it, with `on_test_begin` and `on_test_end`; epochs
      without a new evaluation have none. Callbacks that keep the best weights
      skip epochs whose end was not evaluated. To evaluate each, save at every
      epoch and use `EvalSpec(throttle_secs=0)` without an evaluator task.
    * In all-reduce every process must have the hook, and runs the callbacks
      with the chief's logs. Keras' callbacks that write, and their subclasses,
      run on the chief only, and therefore must not set variables.
    * After a recovery the steps since the last checkpoint run again, but no
      callback is told twice of the end of an epoch, unless the failure came
      while it was told: then it is called again. After a restart of the process
      (in all-reduce, of any), callbacks start over at the current epoch, and
      forget a stop that they requested (`fit` keeps more: see `CALLBACKS.md`);
      its logs cover only the steps since then. A `LearningRateScheduler` that
      multiplies the current rate does so again; compute it from the epoch. If
      the process dies between the last checkpoint of an epoch and the end of
      its callbacks, for example in an evaluation, some are never told of it,
      and what they set is lost.
    * The checkpoint at the end of an epoch is rewritten if a callback then sets
      a saved variable. Changes after a batch are in the next checkpoint, and
      evaluations use checkpoints. If an epoch runs again, learning rates set at
      its end are set again, but weights are not, with a warning.

    Args:
        callbacks, steps_per_epoch: The callbacks and the steps of an epoch.
        eval_dir: Directory of the evaluations (`<model_dir>/eval`); required by
            callbacks that monitor a `val_` metric.
        epochs: The value of `params["epochs"]` for callbacks.

    Raises:
        ValueError: an unsupported callback; the message names an alternative.
        TypeError: an element is not a callback.

    >>> losses = []
    >>> callback = keras.callbacks.LambdaCallback(
    ...     on_epoch_end=lambda epoch, logs: losses.append(logs["loss"])
    ... )
    >>> hook = tfdist.hooks.KerasCallbackHook([callback], steps_per_epoch=200)
    >>> hook.steps_until_next(step=150)
    50
    """

    wants_none_under_way = True
    _so_far: Any  # The logs of the current epoch, if there are any.

    def __init__(
        self,
        callbacks: Sequence[Callback],
        steps_per_epoch: int,
        eval_dir: str | None = None,
        epochs: int | None = None,
    ) -> None:
        check_positive("steps_per_epoch", steps_per_epoch)
        self._steps_per_epoch = steps_per_epoch
        self._cadences = [steps_per_epoch]
        self._given: list[Callback] = []
        for callback in callbacks:
            if not isinstance(callback, keras.callbacks.Callback):
                raise TypeError(
                    "Argument `callbacks` must be a list of "
                    f"keras.callbacks.Callback. Received: {callback!r}."
                )
            if reason := checks.reason_against(callback, eval_dir is not None):
                raise ValueError(
                    f"{type(callback).__name__} cannot run in tfdist's "
                    f"training loop. {reason}"
                )
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                _log.warning(
                    "BackupAndRestore is ignored, and backup_dir=%r is not "
                    "used: every session resumes from its last checkpoint. See "
                    "RunConfig(save_checkpoints_steps=...).",
                    callback.backup_dir,
                )
            else:
                self._add(callback)
        self._evaluations = ScalarReader(eval_dir) if eval_dir else None
        self._params = dict(steps=steps_per_epoch, epochs=epochs, verbose=0)
        self.begin()

    def _add(self, callback: Callback) -> None:
        """Adds a callback, and the cadence of steps it requires."""
        if of_batches := overrides(callback, *_OF_BATCHES):
            self.single_steps = True
            warn_of_single_steps(
                f"{type(callback).__name__}.{of_batches[0]}",
                "If possible, use a method for the end of an epoch instead. "
                + without(callback, of_batches),
            )
        self._given.append(callback)
        if not type(callback).__module__.startswith(("keras.", "tfdist.")):
            self.sets_variables = True
        elif not isinstance(callback, _SET_NOTHING):
            sets = getattr(callback, "restore_best_weights", True)
            self.sets_variables |= sets
        if _saves_by_batches(callback):
            self._cadences.append(callback.save_freq)

    def begin(self) -> None:
        """Forgets an earlier session."""
        self._begun = False
        self._step = 0
        self._callbacks: list[Callback] = []
        self._epoch = -1  # The current epoch, or -1 between two.
        self._begun_epoch = self._ended_epoch = -1
        # Of the ended epoch: callbacks not yet told, and whether others stop.
        self._left: list[Callback] = []
        self._stops = False
        # Scalars that callbacks set at the end of an epoch; None for tensors.
        self._set: dict[int, dict[str, float | None]] = {}
        self.evaluated_step = -1  # The newest one reported.
        self._logs: dict[str, float] = {}  # Of the last completed epoch.
        self._so_far = None

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Sets the callbacks' model, which is rebuilt after a recovery."""
        model = getattr(session, "model", None)
        if model is None:
            raise ValueError(
                "KerasCallbackHook needs a session that trains a Keras model, "
                "but this one runs a plain step function. Use hooks instead."
            )
        model.stop_training = False
        not_here = () if session.is_chief else _WRITERS
        self._callbacks = [
            each for each in self._given if not isinstance(each, not_here)
        ]
        for callback in self._callbacks:
            checks.check_model(callback, model)
            callback.set_params(self._params)
            callback.set_model(model)
            checks.check_writers(callback)
            if _saves_by_batches(callback):
                resume_at(callback, session.step, self._steps_per_epoch)
            if isinstance(callback, keras.callbacks.CSVLogger):
                callback.append |= session.step > 0  # Rows of this job.
        self._step, self._epoch = session.step, -1
        epoch, done = divmod(session.step, self._steps_per_epoch)
        if not self._begun:
            self._call("on_train_begin", {})
            self._begun = True
        elif done and epoch <= self._begun_epoch:  # Before the recovery.
            self._epoch, self._so_far = epoch, None
        elif not done and 0 < epoch == self._begun_epoch + 1:
            # A failure at the end of the epoch: in a callback, another hook,
            # an evaluation, or before what callbacks then set was saved.
            self._epoch, self._so_far = epoch - 1, dict(self._so_far or {})
            self._end_epoch(session)
            if model.stop_training:
                session.request_stop()

    def steps_until_next(self, step: int) -> int:
        """Returns the steps until the epoch ends or a callback saves."""
        if self._callbacks and self._callbacks[0].model.stop_training:
            return 1  # Like `fit`, which checks after each batch.
        return min(every - step % every for every in self._cadences)

    def before_run(self, run_context: RunContext) -> None:
        """Begins an epoch and a batch."""
        epoch, batch = divmod(run_context.session.step, self._steps_per_epoch)
        if self._epoch < 0:
            self._epoch, self._so_far = epoch, None
            self._call("on_epoch_begin", epoch, {})
            self._begun_epoch = max(epoch, self._begun_epoch)
            # A callback may have evaluated the model; skipped on a cluster.
            if not run_context.session.num_workers:
                run_context.session.model.reset_metrics()
        elif isinstance(self._so_far, Logs) and self._so_far.resume_metrics():
            self._check_epochs(run_context.session)
        if self.single_steps:
            self._call("on_train_batch_begin", batch, {})

    def note_logs(self, session: Session, logs: Mapping[str, float]) -> None:
        """Adds the logs to those of the epoch."""
        if isinstance(logs, dict) and self._step < session.step:
            # The logs of a plain step function replace earlier ones.
            together = getattr(logs, "after", lambda earlier: logs)
            self._so_far = together(self._so_far)

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Reports the run, and the epoch if it has ended."""
        session = run_context.session
        before, self._step = self._step, session.step
        logs = run_values.results
        if isinstance(logs, dict) and before < self._step:
            batch = (session.step - 1) % self._steps_per_epoch
            # Keras' own callbacks read only their logs, not the metrics.
            shown = self._metrics if self.single_steps else nullcontext
            with shown():
                for callback in self._callbacks:
                    # As in `fit`, however an epoch is split into runs.
                    whole = _saves_by_batches(callback)
                    own = self._so_far if whole else logs
                    callback.on_train_batch_end(batch, dict(own))
        if session.step // self._steps_per_epoch > self._epoch:
            self._end_epoch(session)
        if session.model.stop_training:
            run_context.request_stop()

    def _check_epochs(self, session: Session) -> None:
        """Refuses hooks with different epochs, as metrics reset with each."""
        hooks = (h for h in session.hooks if isinstance(h, KerasCallbackHook))
        epochs = {hook._steps_per_epoch for hook in hooks}
        if len(epochs) > 1:
            raise ValueError(
                "This model's metrics can be reset only by the epochs of one "
                "KerasCallbackHook, as they do not add up over runs of steps "
                "(or its `train_step` updates them). Pass all callbacks to one "
                f"hook. Received hooks with steps_per_epoch={sorted(epochs)}."
            )

    def end(self, session: Session) -> None:
        """Ends a partial epoch, like `fit`, and then training."""
        if self._epoch >= 0 and self._so_far is not None:
            self._end_epoch(session)
        with self._metrics():
            self._call("on_train_end", self._logs)
        session.unsaved |= self.sets_variables

    def _found(self) -> tuple[int, dict[str, float], dict[str, float]]:
        """Returns the newest evaluation's step and metrics, and epoch logs.

        The metrics are empty if an earlier epoch has reported them. Evaluations
        of later steps predate a return to an earlier checkpoint.
        """
        results = self._evaluations.read() if self._evaluations else {}
        newest = max((s for s in results if s <= self._step), default=-1)
        new = results[newest] if newest > self.evaluated_step else {}
        return newest, new, dict(self._so_far or {})

    def _end_epoch(self, session: Session) -> None:
        epoch, self._epoch = self._epoch, -1
        # In all-reduce, all processes use the results that the chief has read.
        evaluated, results, logs = session.agreed(self._found)
        if epoch <= self._ended_epoch:
            self._set_again(session, epoch)
        else:
            self._ended_epoch, self._logs, self._stops = epoch, logs, False
            self._left = [*self._callbacks]
            if results:
                self.evaluated_step = evaluated
                self._logs |= {f"val_{k}": v for k, v in results.items()}
                with self._metrics(), self._noting_what_is_set(session, epoch):
                    self._call("on_test_begin", {})
                    self._call("on_test_end", results)
        if epoch < self._ended_epoch:
            return
        assert session.model is not None
        session.model.stop_training |= self._stops
        while self._left:
            callback = self._left[0]
            before = {**vars(callback)}
            try:
                with self._metrics(), self._noting_what_is_set(session, epoch):
                    self._call_at_end(callback, epoch, evaluated)
            except Exception:  # After a recovery it is called again.
                vars(callback).update(before)
                raise
            self._stops = session.model.stop_training
            del self._left[0]

    @contextmanager
    def _noting_what_is_set(
        self, session: Session, epoch: int
    ) -> Iterator[None]:
        """Notes what callbacks set at the end of an epoch."""
        with assigned() as given:
            yield
        assert session.model is not None
        refuse_counters(session.model.optimizer, given)
        held = _held(session.model)
        paths = {v.path for v in given if v.path in held and held[v.path] is v}
        for path in paths:
            session.unsaved, value = True, None
            if not len(held[path].shape):  # Whole tables are not read.
                value = float(tf.convert_to_tensor(held[path]))
            self._set.setdefault(epoch, {})[path] = value

    def _set_again(self, session: Session, epoch: int) -> None:
        """Sets scalars again that callbacks had set before a recovery."""
        held = _held(session.model)
        for path, value in self._set.get(epoch, {}).items():
            if value is None:
                _log.warning(
                    "After a recovery, %r, set by a callback at the end of "
                    "epoch %d, is not set again.",
                    path,
                    epoch,
                )
            else:
                session.unsaved = True
                held[path].assign(value)

    def _call_at_end(
        self, callback: Callback, epoch: int, evaluated: int
    ) -> None:
        if evaluated == self._step or not _keeps_the_best(callback):
            callback.on_epoch_end(epoch, self._logs)
            return
        _log.warning(
            "%s skips epoch %d: its last step, %d, was not evaluated. To "
            "evaluate each epoch, use RunConfig(save_checkpoints_steps=%d) "
            "and EvalSpec(throttle_secs=0) without an evaluator task. Or "
            "use BestExporter to keep the best weights.",
            type(callback).__name__,
            epoch,
            self._step,
            self._steps_per_epoch,
        )

    def _metrics(self) -> AbstractContextManager[None]:
        """A context in which the model's metrics are of the epoch so far."""
        return getattr(self._so_far, "shown", nullcontext)()

    def _call(self, method: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(*args)


def _saves_by_batches(callback: Callback) -> bool:
    saves = isinstance(callback, keras.callbacks.ModelCheckpoint)
    return saves and callback.save_freq != "epoch"


def _held(model: Any) -> dict[str, Any]:
    """Returns the variables in a checkpoint of the model, by path."""
    slots = model.optimizer.variables if model.optimizer else []
    return {variable.path: variable for variable in (*model.weights, *slots)}


def _keeps_the_best(callback: Callback) -> bool:
    """Whether a callback keeps the best weights by a `val_` metric."""
    options = "save_best_only", "restore_best_weights"
    keeps = any(getattr(callback, option, False) for option in options)
    return keeps and checks.monitored(callback).startswith("val_")

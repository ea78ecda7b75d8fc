"""Keras callbacks in tfdist's training loop (design decision D1).

A callback was written for `fit`: batch after batch in one process. What of that
has a meaning here is called; one that relies on the rest is refused, with what
does its work instead. `CALLBACKS.md` is the table of all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.arguments import check_positive
from tfdist._tf.private_keras import assigned, go_on_at
from tfdist.hooks.callback_checks import (
    Callback,
    check_model,
    check_writers,
    monitored,
    overrides,
    reason_against,
    without,
)
from tfdist.hooks.events import ScalarReader
from tfdist.hooks.session_run_hook import (
    RunContext,
    RunValues,
    Session,
    SessionRunHook,
    warn_of_single_steps,
)
from tfdist.training.loop import Logs

_log = logging.getLogger(__name__)

# Files, and what listens to them, get one of each: the chief's.
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

    An epoch is `steps_per_epoch` steps of the job: epoch 2 of 100 begins at
    step 200. At its end, and where `ModelCheckpoint(save_freq=...)` saves, no
    step is under way: the weights are those of that step, also on parameter
    servers. `model.stop_training = True` requests a stop. A learning rate, or
    weights, that a callback sets reach the variables, also on a parameter
    server, and the last checkpoint. Differences from `fit` are:

    * Callbacks of batches have the logs of their step alone (of metrics that
      do not add up, with a `train_step` of its own, and where `ModelCheckpoint`
      saves, those since the epoch began), and have steps dispatched one by one,
      which a warning tells. The model's metrics are of the epoch so far, also
      where it was evaluated.
    * `val_` metrics are those of the newest evaluation in `eval_dir`, in the
      first epoch that ends after it, with `on_test_begin` and `on_test_end`;
      epochs without a new one have none. What keeps the best weights skips an
      epoch whose end was not evaluated. With a checkpoint for each epoch, and
      `EvalSpec(throttle_secs=0)` without an evaluator task, it is.
    * In all-reduce every process has to have the hook, and runs the callbacks
      with the chief's logs. The chief alone runs those of Keras that write, and
      subclasses of them, which so must set nothing.
    * After a recovery the steps since the last checkpoint run again, but no
      epoch is reported a second time. After a restart of the process callbacks
      start over, at the epoch where the job is. An epoch that was cut so has
      logs of the steps since; one that was cut in its last evaluation, no end.
    * A checkpoint of an epoch's end is written again if a callback then sets
      what it holds. What one sets after a batch is in the next checkpoint, and
      evaluations are of checkpoints. If an epoch runs again, its end sets rates
      again, but no weights, which a warning tells.

    Args:
        callbacks, steps_per_epoch: The callbacks, and the steps of an epoch.
        eval_dir: Where the evaluations write (`<model_dir>/eval`); needed for
            callbacks that monitor a `val_` metric.
        epochs: What callbacks find in `params["epochs"]`.

    Raises:
        ValueError: a callback has no meaning here; says what does its work.
        TypeError: one of them is no callback.

    >>> losses = []
    >>> callback = keras.callbacks.LambdaCallback(
    ...     on_epoch_end=lambda epoch, logs: losses.append(logs["loss"])
    ... )
    >>> hook = tfdist.hooks.KerasCallbackHook([callback], steps_per_epoch=200)
    >>> hook.steps_until_next(step=150)
    50
    """

    wants_none_under_way = True
    _so_far: Any  # The logs of the epoch under way, if there are any.

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
            if reason := reason_against(callback, eval_dir is not None):
                raise ValueError(
                    f"{type(callback).__name__} cannot run in tfdist's "
                    f"training loop. {reason}"
                )
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                _log.warning(
                    "Every session does what BackupAndRestore does: it goes on "
                    "from its last checkpoint. Nothing is written to backup_dir"
                    "=%r; see RunConfig(save_checkpoints_steps=...).",
                    callback.backup_dir,
                )
            else:
                self._add(callback)
        self._evaluations = ScalarReader(eval_dir) if eval_dir else None
        self._params = dict(steps=steps_per_epoch, epochs=epochs, verbose=0)
        self.begin()

    def _add(self, callback: Callback) -> None:
        """Adds a callback, and what it wants of the steps."""
        if of_batches := overrides(callback, *_OF_BATCHES):
            self.single_steps = True
            warn_of_single_steps(
                f"{type(callback).__name__}.{of_batches[0]}",
                "Let it act at the end of an epoch instead, if that is enough. "
                + without(callback, of_batches),
            )
        self._given.append(callback)
        if not type(callback).__module__.startswith("keras."):
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
        self._epoch = -1  # The one under way, or -1 between two.
        self._begun_epoch = self._ended_epoch = -1
        # What callbacks have set at the end of an epoch; None of no number.
        self._set: dict[int, dict[str, float | None]] = {}
        self._evaluated_step = -1
        self._logs: dict[str, float] = {}  # Of the epoch that ended last.
        self._so_far = None

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Gives the callbacks the model, which is another after a recovery."""
        model = getattr(session, "model", None)
        if model is None:
            raise ValueError(
                "KerasCallbackHook needs a session that trains a Keras model; "
                "this one runs a plain step function. Use hooks instead."
            )
        model.stop_training = False
        not_here = () if session.is_chief else _WRITERS
        self._callbacks = [
            each for each in self._given if not isinstance(each, not_here)
        ]
        for callback in self._callbacks:
            check_model(callback, model)
            callback.set_params(self._params)
            callback.set_model(model)
            check_writers(callback)
            if _saves_by_batches(callback):
                go_on_at(callback, session.step, self._steps_per_epoch)
        self._step, self._epoch = session.step, -1
        epoch, done = divmod(session.step, self._steps_per_epoch)
        if not self._begun:
            self._call("on_train_begin", {})
            self._begun = True
        elif done and epoch <= self._begun_epoch:  # Before the recovery.
            self._epoch, self._so_far = epoch, None
        elif not done and self._ended_epoch < epoch - 1 == self._begun_epoch:
            # What failed was another hook, or an evaluation, at its end.
            self._epoch, self._so_far = epoch - 1, dict(self._so_far or {})
            self._end_epoch(session)
            if model.stop_training:
                session.request_stop()

    def steps_until_next(self, step: int) -> int:
        """Steps until the epoch ends, or a callback saves."""
        if self._callbacks and self._callbacks[0].model.stop_training:
            return 1  # As `fit`, which looks after a batch.
        return min(every - step % every for every in self._cadences)

    def before_run(self, run_context: RunContext) -> None:
        """Begins an epoch, and a batch."""
        epoch, batch = divmod(run_context.session.step, self._steps_per_epoch)
        if self._epoch < 0:
            self._epoch, self._so_far = epoch, None
            self._call("on_epoch_begin", epoch, {})
            self._begun_epoch = max(epoch, self._begun_epoch)
            # A callback may have evaluated; nobody waits for it in a cluster.
            if not run_context.session.num_workers:
                run_context.session.model.reset_metrics()
        elif isinstance(self._so_far, Logs) and self._so_far.go_on():
            self._check_epochs(run_context.session)
        if self.single_steps:
            self._call("on_train_batch_begin", batch, {})

    def note_logs(self, session: Session, logs: Mapping[str, float]) -> None:
        """Adds them to those of the epoch."""
        if isinstance(logs, dict) and self._step < session.step:
            # A plain step function's are those of its last step, as in `fit`.
            together = getattr(logs, "after", lambda earlier: logs)
            self._so_far = together(self._so_far)

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Reports the run, and the epoch if it is over."""
        session = run_context.session
        before, self._step = self._step, session.step
        logs = run_values.results
        if isinstance(logs, dict) and before < self._step:
            batch = (session.step - 1) % self._steps_per_epoch
            # Keras' own callbacks read their logs alone.
            shown = self._metrics if self.single_steps else nullcontext
            with shown():
                for callback in self._callbacks:
                    # As under `fit`, whatever cuts an epoch into runs.
                    whole = _saves_by_batches(callback)
                    own = self._so_far if whole else logs
                    callback.on_train_batch_end(batch, dict(own))
        if session.step // self._steps_per_epoch > self._epoch:
            self._end_epoch(session)
        if session.model.stop_training:
            run_context.request_stop()

    def _check_epochs(self, session: Session) -> None:
        """Refuses epochs of others, where metrics begin anew with each."""
        hooks = (h for h in session.hooks if isinstance(h, KerasCallbackHook))
        epochs = {hook._steps_per_epoch for hook in hooks}
        if len(epochs) > 1:
            raise ValueError(
                "The model's metrics do not add up (one is no sum, or its "
                "`train_step` updates them), so they can begin anew with the "
                "epochs of one KerasCallbackHook alone. Received hooks of "
                f"steps_per_epoch={sorted(epochs)}. Give all callbacks to one."
            )

    def end(self, session: Session) -> None:
        """Ends an epoch that was begun, as `fit` does, and training."""
        if self._epoch >= 0 and self._so_far is not None:
            self._end_epoch(session)
        with self._metrics():
            self._call("on_train_end", self._logs)
        session.unsaved |= self.sets_variables

    def _found(self) -> tuple[int, dict[str, float], dict[str, float]]:
        """Step and metrics of the newest evaluation, and the epoch's logs.

        No metrics where an epoch has had them. Those of later steps are left by
        a job that has gone back to an earlier checkpoint since.
        """
        results = self._evaluations.read() if self._evaluations else {}
        newest = max((s for s in results if s <= self._step), default=-1)
        new = results[newest] if newest > self._evaluated_step else {}
        return newest, new, dict(self._so_far or {})

    def _end_epoch(self, session: Session) -> None:
        epoch, self._epoch = self._epoch, -1
        # All processes of an all-reduce job decide by what its chief has found.
        evaluated, results, self._logs = session.agreed(self._found)
        if epoch <= self._ended_epoch:
            self._set_again(session, epoch)
            return
        self._ended_epoch = epoch
        with self._metrics(), assigned() as given:
            if results:
                self._evaluated_step = evaluated
                self._logs |= {f"val_{k}": v for k, v in results.items()}
                self._call("on_test_begin", {})
                self._call("on_test_end", results)
            self._call_at_end(epoch, evaluated)
        held = _held(session.model)
        paths = {v.path for v in given if v.path in held and held[v.path] is v}
        for path in paths:
            session.unsaved, value = True, None
            if not len(held[path].shape):  # Whole tables are not read.
                value = float(tf.convert_to_tensor(held[path]))
            self._set.setdefault(epoch, {})[path] = value

    def _set_again(self, session: Session, epoch: int) -> None:
        """Sets the numbers that callbacks have, before a recovery."""
        held = _held(session.model)
        for path, value in self._set.get(epoch, {}).items():
            if value is None:
                _log.warning(
                    "Epoch %d has ended again after a recovery, and %r is not "
                    "set again, as a callback had at its end.",
                    epoch,
                    path,
                )
            else:
                session.unsaved = True
                held[path].assign(value)

    def _call_at_end(self, epoch: int, evaluated: int) -> None:
        for callback in self._callbacks:
            if evaluated == self._step or not _keeps_the_best(callback):
                callback.on_epoch_end(epoch, self._logs)
                continue
            _log.warning(
                "%s skips epoch %d, whose end (step %d) was not evaluated. "
                "RunConfig(save_checkpoints_steps=%d) and EvalSpec("
                "throttle_secs=0), without an evaluator task, evaluate each; "
                "else BestExporter keeps the best.",
                type(callback).__name__,
                epoch,
                self._step,
                self._steps_per_epoch,
            )

    def _metrics(self) -> AbstractContextManager[None]:
        """In it the model's metrics are those of the epoch so far."""
        return getattr(self._so_far, "shown", nullcontext)()

    def _call(self, method: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, method)(*args)


def _saves_by_batches(callback: Callback) -> bool:
    saves = isinstance(callback, keras.callbacks.ModelCheckpoint)
    return saves and callback.save_freq != "epoch"


def _held(model: Any) -> dict[str, Any]:
    """By their paths, the variables that a checkpoint of a model holds."""
    slots = model.optimizer.variables if model.optimizer else []
    return {variable.path: variable for variable in (*model.weights, *slots)}


def _keeps_the_best(callback: Callback) -> bool:
    """Whether it keeps weights for what an evaluation has found of them."""
    options = "save_best_only", "restore_best_weights"
    keeps = any(getattr(callback, option, False) for option in options)
    return keeps and monitored(callback).startswith("val_")

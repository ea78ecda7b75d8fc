"""One evaluation: a checkpoint's weights, a pass over the data, the hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist._tf.private import Saveable, reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.hooks.session_run_hook import HookRunner
from tfdist.training.compiled_model import checked_model, overrides
from tfdist.training.keras_step import KerasStep
from tfdist.training.step import ModelStep, States

_GRACE_SECS = 120.0

Hook: TypeAlias = tf.compat.v1.train.SessionRunHook


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be read."""


class EvaluationSession:
    """What the hooks of an evaluation get as their session.

    It has what a `MonitoredTrainingSession` has, as far as it makes sense
    here, so that hooks that only look (`LoggingTensorHook`, `NanTensorHook`,
    `FinalOpsHook`) serve both.

    Attributes:
        step: Batches evaluated so far; what hooks' timers count.
        global_step: Scalar int64 tensor, the step of the checkpoint; 0 without
            one.
        restored_from: Path of the checkpoint, or None.
        model: The model, with the checkpoint's weights.
        variables: Name to variable, without optimizer; `global_step` is among
            them.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Mapping[str, Saveable],
        global_step: int,
        restored_from: str | None,
    ) -> None:
        self.step = 0
        self.global_step = tf.constant(global_step, tf.int64)
        self.restored_from = restored_from
        self.model = model
        self.variables = {**variables, "global_step": self.global_step}
        self._stop = False

    def should_stop(self) -> bool:
        """Whether a hook asked to stop."""
        return self._stop

    def request_stop(self) -> None:
        """Ends the evaluation after this batch; its metrics count."""
        self._stop = True


class Evaluation:
    """Evaluates a model with the weights of one checkpoint after another.

    Args:
        model_fn: Returns the compiled model; called once.
        steps: Batches an evaluation reads at most; None for all.
        hooks: As of an `Evaluator`.
    """

    _step: ModelStep | KerasStep

    def __init__(
        self,
        model_fn: Callable[[], keras.Model],
        steps: int | None,
        hooks: Sequence[Hook],
    ) -> None:
        self._model_fn = model_fn
        self._steps = steps
        self._hooks = hooks
        self._is_built = False
        self._loaded: str | None = None

    def model(
        self, path: str | None, input_fn: Callable[[], tf.data.Dataset]
    ) -> keras.Model:
        """The model with the weights of checkpoint `path`."""
        if not self._is_built or self._loaded != path:
            self._build(input_fn().element_spec)
            self._load(path)
        return self._step.model

    def run(
        self, dataset: tf.data.Dataset, path: str | None
    ) -> tuple[dict[str, float], int]:
        """Metrics, and the step of the checkpoint.

        Raises:
            DamagedCheckpointError: `path` cannot be read.
        """
        self._build(dataset.element_spec)
        for hook in self._hooks:
            hook.begin()
        session = self._load(path)
        states, batches = self._step.zero_states(), iter(dataset)
        coord = tf.train.Coordinator()
        try:
            for hook in self._hooks:
                hook.after_create_session(session, coord)
            # As in TF1, either ends an evaluation, whoever raises it.
            with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                while not (
                    session.step == self._steps
                    or session.should_stop()
                    or coord.should_stop()
                ):
                    states = self._run_batch(batches, states, session)
            for hook in self._hooks:
                hook.end(session)
        finally:
            coord.request_stop()
        coord.join(stop_grace_period_secs=_GRACE_SECS)
        return self._metrics(states), int(session.global_step)

    def _build(self, element_spec: Any) -> None:
        if self._is_built:
            return
        reset_object_names()
        model = checked_model(self._model_fn())
        own = overrides(model, "test_step")
        self._step = (KerasStep if own else ModelStep)(model, element_spec)
        self._evaluate_batch = tf.function(
            self._step.evaluate, reduce_retracing=True
        )
        self._is_built = True

    def _load(self, path: str | None) -> EvaluationSession:
        model, global_step = self._step.model, 0
        variables = checkpoints.named_variables(model, optimizer=False)
        if path:
            try:
                checkpoints.restore(path, variables)
                global_step = checkpoints.step_of(path)
            except (tf.errors.OpError, IndexError, RuntimeError) as error:
                if isinstance(error, checkpoints.NO_DAMAGE):
                    raise
                raise DamagedCheckpointError(
                    f"Checkpoint {path} is damaged or gone. TensorFlow says: "
                    + str(error).partition("\n")[0]
                ) from error
        self._loaded = path
        return EvaluationSession(model, variables, global_step, path)

    def _run_batch(
        self,
        batches: tf.data.Iterator,
        states: States,
        session: EvaluationSession,
    ) -> States:
        around = HookRunner(self._hooks, session)
        states = self._evaluate_batch(next(batches), states)
        session.step += 1
        around.end(self._metrics(states) if self._hooks else {})
        if around.stop_requested:
            session.request_stop()
        return states

    def _metrics(self, states: States) -> dict[str, float]:
        return self._step.result(self._step.pack(states).numpy())

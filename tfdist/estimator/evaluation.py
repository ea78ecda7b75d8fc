"""A single evaluation: restore a checkpoint, iterate the data, run hooks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.private_checkpoints import Saveable
from tfdist._tf.tracing import traced
from tfdist.checkpoint import checkpoints
from tfdist.data.input_fns import without_context
from tfdist.estimator import results
from tfdist.estimator.building import ModelFn, fill, make_model
from tfdist.estimator.specs import EvalSpec
from tfdist.estimator.warm_start import WarmStartHook
from tfdist.hooks.session_run_hook import Hook, HookRunner, begin_all
from tfdist.training.compiled_model import overrides
from tfdist.training.keras_step import KerasStep
from tfdist.training.step import ModelStep

_GRACE_SECS = 120.0


@dataclasses.dataclass(eq=False)
class EvaluationSession:
    """The session passed to the hooks of an evaluation.

    It has the attributes of a `MonitoredTrainingSession` that read-only hooks
    use (`LoggingTensorHook`, `NanTensorHook`, `FinalOpsHook`).

    Attributes:
        step: Batches evaluated so far, which hooks' timers count.
        global_step: Scalar int64 tensor, the step of the checkpoint; 0 without
            one.
        restored_from: Path of the checkpoint, or None.
        model: The model, with the checkpoint's weights.
        variables: Variables by name, including `global_step` but without those
            of the optimizer.
    """

    model: keras.Model
    variables: Mapping[str, Saveable]
    global_step: tf.Tensor
    restored_from: str | None
    step: int = 0

    def __post_init__(self) -> None:
        self.variables = {**self.variables, "global_step": self.global_step}
        self.coord = tf.train.Coordinator()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"The session of an evaluation has no {name!r}. EvalSpec(hooks=...)"
            " takes hooks for evaluated batches (see EvaluationSession); hooks "
            "that save or measure training belong in TrainSpec(hooks=...)."
        )

    def should_stop(self) -> bool:
        """Whether a hook or a thread has requested a stop."""
        return self.coord.should_stop()

    def request_stop(self) -> None:
        """Stops the evaluation after this batch, which is still counted."""
        self.coord.request_stop()


class Evaluation:
    """Builds a model once and evaluates one checkpoint after another.

    Attributes:
        is_given: Whether a warm start or the model function has assigned
            weights to the model.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        spec: EvalSpec,
        warm_start: WarmStartHook | None = None,
    ) -> None:
        self._model_fn, self._spec = model_fn, spec
        self._warm_start = warm_start
        self._element_spec: Any = None  # Until the dataset has been created.
        self.is_given = warm_start is not None
        self._step: ModelStep | KerasStep | None = None
        self._session: EvaluationSession | None = None

    def forget(self, element_spec: Any) -> None:
        """Discards the loaded weights, after an evaluation by the workers."""
        self._session, self._element_spec = None, element_spec

    def model(self, path: str | None) -> keras.Model:
        """Returns the model with the weights of checkpoint `path`."""
        session = self._session
        if session is None or session.restored_from != path:
            if self._element_spec is None:
                dataset = without_context(self._spec.input_fn)()
                self._element_spec = dataset.element_spec
            _, session = self._load(path)
        return session.model

    def run(
        self, dataset: tf.data.Dataset, path: str | None
    ) -> tuple[dict[str, float], int]:
        """Returns the metrics and the step of the checkpoint."""
        hooks, self._element_spec = self._spec.hooks, dataset.element_spec
        step, session = self._load(path, hooks)
        states, batches = step.zero_states(), iter(dataset)

        def metrics() -> dict[str, float]:
            return step.result(step.pack(states).numpy())

        try:
            for hook in hooks:
                hook.after_create_session(session, session.coord)
            # As in TF1, either exception ends an evaluation, also from a hook.
            with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
                while not (
                    session.step == self._spec.steps or session.should_stop()
                ):
                    around = HookRunner(hooks, session)
                    states = self._evaluate_batch(next(batches), states)
                    session.step += 1
                    around.end(metrics() if hooks else {})
                    if around.context.stop_requested:
                        session.request_stop()
            for hook in hooks:
                hook.end(session)
        finally:
            session.request_stop()
        session.coord.join(
            stop_grace_period_secs=_GRACE_SECS, ignore_live_threads=True
        )
        return metrics(), int(session.global_step)

    def _load(
        self, path: str | None, hooks: Sequence[Hook] = ()
    ) -> tuple[ModelStep | KerasStep, EvaluationSession]:
        """Returns the step, with the weights of `path`, and a new session."""
        if self._step is None:
            model, given = make_model(self._model_fn, self._element_spec)
            self.is_given |= given
            kind = KerasStep if overrides(model, "test_step") else ModelStep
            self._step = kind(model, self._element_spec)
            self._evaluate_batch = traced(
                self._step.evaluate, reduce_retracing=True
            )
        begin_all(hooks)
        model = self._step.model
        with results.reading(path):
            variables = fill(model, path, self._warm_start)
            step = checkpoints.step_of(path) if path else 0
        global_step = tf.constant(step, tf.int64)
        session = EvaluationSession(model, variables, global_step, path)
        self._session = session
        return self._step, session

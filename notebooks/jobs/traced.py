"""A small job in this process, and a trace of what it does.

    trace({"save_checkpoints_steps": 10}, {"max_steps": 22})

The dictionaries are arguments of `RunConfig`, `TrainSpec` and `EvalSpec`.
"""

import tempfile
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.estimator.evaluation import EvaluationSession
from tfdist.hooks.session_run_hook import SessionRunContext, SessionRunValues

Arguments = dict[str, Any]

CONFIG = {"save_checkpoints_steps": 10, "log_step_count_steps": None}


def model_fn() -> keras.Model:
    """One weight, which begins at 0."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input([1], name="x"), layer])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def examples(batches: int | None = None) -> tf.data.Dataset:
    """So many batches, or without end; they pull the weight towards 2."""
    return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat(batches)


class Saves(tfdist.CheckpointSaverListener):
    """Notes each checkpoint."""

    def __init__(self, trace: list[str]) -> None:
        self._trace = trace

    def after_save(
        self, session: tfdist.MonitoredTrainingSession, global_step_value: int
    ) -> None:
        """One more."""
        self._trace.append(f"save {global_step_value}")


class Evaluations(tfdist.SessionRunHook):
    """Notes each evaluation, and on how many batches."""

    def __init__(self, trace: list[str]) -> None:
        self._trace = trace

    def begin(self) -> None:
        """Counts anew."""
        self._batches = 0

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """A batch."""
        self._batches += 1

    def end(self, session: EvaluationSession) -> None:
        """The checkpoint has been evaluated."""
        step = int(session.global_step)
        self._trace.append(f"evaluate {step} on {self._batches}")


class Pauses(tfdist.SessionRunHook):
    """Makes each step 50 ms longer."""

    def steps_until_next(self, step: int) -> int:
        """Each step."""
        return 1

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Waits."""
        time.sleep(0.05)


class Marks(tfdist.SessionRunHook):
    """Notes the time every hundred steps."""

    def __init__(self) -> None:
        self.times = []

    def steps_until_next(self, step: int) -> int:
        """Every hundred steps."""
        return 100 - step % 100

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """A hundred steps."""
        self.times.append(time.perf_counter())


def trace(
    config: Arguments | None = None,
    train: Arguments | None = None,
    evaluate: Arguments | None = None,
    *,
    train_batches: int | None = None,
    eval_batches: int | None = None,
    directory: str | None = None,
) -> list[str]:
    """Runs a job; returns its checkpoints and evaluations, in order."""
    trace = []
    config = CONFIG | (config or {})
    train = {"max_steps": 22, "saving_listeners": [Saves(trace)]} | (
        train or {}
    )
    hooks = [Evaluations(trace)]
    default = {"steps": 3, "throttle_secs": 0, "hooks": hooks}
    with tempfile.TemporaryDirectory() as another:
        tfdist.train_and_evaluate(
            tfdist.Estimator(
                model_fn, tfdist.RunConfig(directory or another, **config)
            ),
            tfdist.TrainSpec(lambda: examples(train_batches), **train),
            tfdist.EvalSpec(
                lambda: examples(eval_batches), **default | (evaluate or {})
            ),
        )
    return trace


def step_secs(steps_per_dispatch: int) -> float:
    """Seconds of a step, in the fastest of nine hundreds after the first.

    What else the machine does can only make a hundred slower.
    """
    marks = Marks()
    with tempfile.TemporaryDirectory() as directory:
        config = tfdist.RunConfig(
            directory,
            steps_per_dispatch=steps_per_dispatch,
            log_step_count_steps=None,
        )
        estimator = tfdist.Estimator(model_fn, config)
        estimator.train(examples, [marks], max_steps=1000)
    return float(np.diff(marks.times).min()) / 100


def secs_until_evaluated(cluster: tfdist.Cluster, delay: float) -> float:
    """Plays the chief up to step 10, then an evaluator with a delay.

    Returns:
        Seconds from its start to its first evaluation, of step 10.
    """
    with tempfile.TemporaryDirectory() as directory:
        config = tfdist.RunConfig(directory, **CONFIG)
        chief = tfdist.Estimator(model_fn, config).train(examples, max_steps=10)
        times = [time.perf_counter()]

        class ChiefAgain(tfdist.SessionRunHook):
            def end(self, session: EvaluationSession) -> None:
                times.append(time.perf_counter())
                if int(session.global_step) == 10:  # Now to the job's end.
                    chief.train(examples, max_steps=22)

        evaluate = {"start_delay_secs": delay, "hooks": [ChiefAgain()]}
        trace({"cluster": cluster}, evaluate=evaluate, directory=directory)
    return times[1] - times[0]

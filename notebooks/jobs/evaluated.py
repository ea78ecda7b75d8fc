"""Trains and evaluates: alone, or as the chief and the evaluator of a cluster.

Usage: evaluated.py MODEL_DIR, until there is a file MODEL_DIR/stop. A step
takes 20 ms and an evaluation about a second, in which they only wait.
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfdist
from tfdist.estimator.evaluation import EvaluationSession
from tfdist.hooks.session_run_hook import SessionRunContext, SessionRunValues


def model_fn() -> keras.Model:
    """One weight."""
    layer = keras.layers.Dense(1, use_bias=False)
    model = keras.Sequential([keras.Input([1]), layer])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def input_fn() -> tf.data.Dataset:
    """The same batch, without end."""
    return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat()


class Training(tfdist.SessionRunHook):
    """Slows training down; prints when each step was done."""

    def __init__(self) -> None:
        self._marks = []

    def steps_until_next(self, step: int) -> int:
        """Each step."""
        return 1

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Waits."""
        time.sleep(0.02)
        self._marks.append((time.time(), run_context.session.step))

    def end(self, session: tfdist.MonitoredTrainingSession) -> None:
        """Prints a line of JSON."""
        print(json.dumps({"trained": self._marks}), flush=True)


class Evaluation(tfdist.SessionRunHook):
    """Slows evaluations down; prints what was evaluated, and when."""

    def after_create_session(
        self, session: EvaluationSession, coord: tf.train.Coordinator
    ) -> None:
        """The weights are read."""
        self._start = time.time()

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Waits."""
        time.sleep(0.1)

    def end(self, session: EvaluationSession) -> None:
        """Prints a line of JSON."""
        step = int(session.global_step)
        row = {"evaluated": step, "from": self._start, "to": time.time()}
        print(json.dumps(row), flush=True)


def main(directory: str, max_steps: int | None = None) -> None:
    """Does this process's part of the job."""
    config = tfdist.RunConfig(
        directory, save_checkpoints_steps=30, log_step_count_steps=None
    )
    estimator = tfdist.Estimator(model_fn, config)
    stop = tfdist.make_early_stopping_hook(
        estimator,
        lambda: os.path.exists(os.path.join(directory, "stop")),
        run_every_secs=None,
        run_every_steps=10,
    )
    tfdist.train_and_evaluate(
        estimator,
        tfdist.TrainSpec(input_fn, max_steps, hooks=[Training(), stop]),
        tfdist.EvalSpec(
            input_fn,
            steps=10,
            hooks=[Evaluation()],
            start_delay_secs=0,
            throttle_secs=0,
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1])

"""Trains wide and deep with TF 2.15.1's Estimator, replicated between graphs.

    python -m benchmarks.contenders.wide_and_deep_estimator JSON

Chief and workers train, and start without delay. Requires TensorFlow 2.15.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import tensorflow as tf

from benchmarks import clicks, counters

_START_SECS = 120.0


class Together(tf.estimator.SessionRunHook):
    """Waits after the first step until each training task has run one."""

    def __init__(self, directory: str, names: list[str], own: str) -> None:
        self._files = [pathlib.Path(directory, f"{n}.up") for n in names]
        self._own = pathlib.Path(directory, f"{own}.up")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Signals the other tasks and waits for them, once."""
        if not self._files:
            return
        self._own.touch()
        deadline = time.monotonic() + _START_SECS
        while not all(file.exists() for file in self._files):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Some of {self._files} are missing.")
            time.sleep(0.02)
        self._files = []


class Window(tf.estimator.SessionRunHook):
    """Measures the steps between `first` and `last`."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._before: Any = None
        self.used: dict | None = None

    def before_run(self, run_context: Any) -> Any:
        """Fetches `global_step`, as the hook that stops training does too."""
        step = tf.compat.v1.train.get_global_step()
        return tf.estimator.SessionRunArgs(step)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Reads the counters at `first` and `last`."""
        step = int(run_values.results)
        if self._before is None and step >= self._first:
            self._before = step, counters.usage()
        elif self.used is None and step >= self._last:
            step_before, before = self._before
            self.used = counters.difference(
                before, counters.usage(), step - step_before
            )


def estimator(case: dict[str, Any], config: Any) -> Any:
    """Returns the canned Estimator with the sizes and rates of `clicks`."""
    columns = [
        tf.feature_column.categorical_column_with_identity(name, case["rows"])
        for name in clicks.FEATURES
    ]
    legacy = tf.keras.optimizers.legacy
    return tf.estimator.DNNLinearCombinedClassifier(
        linear_feature_columns=columns,
        linear_optimizer=legacy.Ftrl(clicks.WIDE_RATE),
        dnn_feature_columns=[
            tf.feature_column.embedding_column(column, clicks.DIM)
            for column in columns
        ],
        dnn_optimizer=legacy.Adagrad(clicks.DEEP_RATE),
        dnn_hidden_units=list(clicks.HIDDEN),
        config=config,
    )


def run_config(case: dict[str, Any]) -> Any:
    """Returns a configuration that saves only at the start and end."""
    return tf.estimator.RunConfig(
        case["directory"] + "/model",
        tf_random_seed=case["seed"],
        save_checkpoints_steps=1_000_000_000,
        experimental_max_worker_delay_secs=0,
    )


def main() -> None:
    """Runs this task; the chief writes the results."""
    case = json.loads(sys.argv[1])
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.ERROR)
    config = run_config(case)
    trainers = ["chief-0"] + [
        f"worker-{i}" for i in range(config.cluster_spec.num_tasks("worker"))
    ]
    pipelines = len(trainers)
    own = f"{config.task_type}-{config.task_id}"
    last = case["warm"] + case["steps"]
    window = Window(case["warm"], last)
    hooks = [Together(case["directory"], trainers, own)]
    if own == "chief-0":
        hooks.append(window)

    def input_fn() -> tf.data.Dataset:
        index = trainers.index(own) if own in trainers else 0
        return clicks.train(case["data"], pipelines, index)

    def eval_input_fn() -> tf.data.Dataset:
        return clicks.evaluation(case["data"])

    tf.estimator.train_and_evaluate(
        estimator(case, config),
        tf.estimator.TrainSpec(input_fn, max_steps=last + 20, hooks=hooks),
        tf.estimator.EvalSpec(eval_input_fn, steps=None),
    )
    if own != "chief-0":
        return
    del os.environ["TF_CONFIG"]  # From here on, this process runs alone.
    metrics = estimator(case, run_config(case)).evaluate(eval_input_fn)
    result = window.used | {"auc": float(metrics["auc"])}
    pathlib.Path(case["output"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

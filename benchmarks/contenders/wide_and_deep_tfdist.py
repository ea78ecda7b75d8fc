"""Trains wide and deep with tfdist's public API.

    python -m benchmarks.contenders.wide_and_deep_tfdist JSON

Runs one task of a cluster, or a single process. Like all contenders, it
computes only the loss in training; the AUC is computed later.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfdist
from benchmarks import clicks, counters


class Window(tfdist.SessionRunHook):
    """Measures the steps between `first` and `last`."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last
        self._before: counters.Usage | None = None
        self.used: dict | None = None

    def steps_until_next(self, step: int) -> int | None:
        """Makes a run end at `first` and at `last`."""
        for end in (self._first, self._last):
            if step < end:
                return end - step
        return None

    def after_run(
        self,
        run_context: tfdist.SessionRunContext,
        run_values: tfdist.SessionRunValues,
    ) -> None:
        """Reads the counters at `first` and `last`."""
        step = run_context.session.step
        if step == self._first:
            self._before = counters.usage()
        elif step == self._last:
            self.used = counters.difference(
                self._before, counters.usage(), self._last - self._first
            )


def estimator(
    case: dict[str, Any],
    metrics: list[str] | None = None,
    save_steps: int = 1_000_000_000,
) -> tfdist.Estimator:
    """Returns an Estimator with the model and configuration of `case`."""

    def table(rows: int, width: int, values: Any, name: str) -> Any:
        """Builds an embedding, on one server unless `case` has `shards`."""
        shards = case.get("shards")
        options = {"embeddings_initializer": values, "num_shards": shards}
        return tfdist.PartitionedEmbedding(rows, width, name=name, **options)

    def model_fn() -> keras.Model:
        wide = keras.optimizers.Ftrl(clicks.WIDE_RATE)
        deep = keras.optimizers.Adagrad(clicks.DEEP_RATE)
        optimizer = tfdist.MultiOptimizer([("wide", wide), ("", deep)])
        return clicks.keras_model(
            keras, case["rows"], table, optimizer, metrics
        )

    config = tfdist.RunConfig(
        case["directory"] + "/model",
        tf_random_seed=case["seed"],
        save_checkpoints_steps=save_steps,
        steps_per_dispatch=case.get("steps_per_dispatch"),
        **case.get("options", {}),
    )
    return tfdist.Estimator(model_fn, config)


def input_fn(
    case: dict[str, Any],
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """Returns an input function that gives each worker its own files."""
    return lambda context: clicks.train(
        case["data"], context.num_input_pipelines, context.input_pipeline_id
    )


def evaluation(case: dict[str, Any]) -> Callable[[], tf.data.Dataset]:
    """Returns an input function of held-out examples."""
    return lambda: clicks.evaluation(case["data"])


def main() -> None:
    """Runs this task; the chief writes the results."""
    case = json.loads(sys.argv[1])
    last = case["warm"] + case["steps"]
    window = Window(case["warm"], last)
    tfdist.train_and_evaluate(
        estimator(case),
        # A few more steps, so that the last measured step is a typical one.
        tfdist.TrainSpec(input_fn(case), max_steps=last + 20, hooks=[window]),
        tfdist.EvalSpec(evaluation(case), steps=None),
    )
    if window.used:
        os.environ.pop("TF_CONFIG", None)  # Evaluate in one process.
        metrics = estimator(case, ["auc"]).evaluate(evaluation(case))
        result = window.used | {"auc": metrics["auc"]}
        pathlib.Path(case["output"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

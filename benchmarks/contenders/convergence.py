"""Measures AUC by step of a wide-and-deep model, with tfdist's public API.

    python -m benchmarks.contenders.convergence JSON

Runs one task of a cluster, or a single process.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import keras

import tfdist
from benchmarks import clicks
from benchmarks.contenders.wide_and_deep_tfdist import estimator, input_fn


class Aucs(tfdist.Exporter):
    """Records the AUC of each evaluation instead of exporting."""

    def __init__(self) -> None:
        super().__init__("none")
        self.by_step: dict[int, float] = {}

    def export(
        self,
        model: keras.Model,
        export_path: str,
        eval_result: dict[str, float],
        is_the_final_export: bool,
    ) -> None:
        """Records the AUC."""
        step = int(eval_result["global_step"])
        self.by_step[step] = float(eval_result["auc"])


class Seconds(tfdist.CheckpointSaverListener):
    """Records the time in steps up to each checkpoint, without evaluations."""

    def __init__(self) -> None:
        self.by_step: dict[int, float] = {}

    def after_save(self, session: Any, global_step_value: int) -> None:
        """Records the seconds."""
        self.by_step[global_step_value] = session.secs_in_steps


def main() -> None:
    """Runs this task; the chief writes the AUCs."""
    case = json.loads(sys.argv[1])
    steps = case["points"] * case["every"]
    aucs, seconds = Aucs(), Seconds()
    tfdist.train_and_evaluate(
        estimator(case, ["auc"], save_steps=case["every"]),
        tfdist.TrainSpec(
            input_fn(case), max_steps=steps, saving_listeners=[seconds]
        ),
        tfdist.EvalSpec(
            lambda: clicks.evaluation(case["data"]),
            steps=None,
            exporters=[aucs],
            start_delay_secs=0,
            throttle_secs=0,
        ),
    )
    if aucs.by_step:
        found = {
            step: {"auc": auc, "secs": seconds.by_step[step]}
            for step, auc in aucs.by_step.items()
        }
        pathlib.Path(case["output"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

"""Reports the metrics of a hyperparameter tuning trial to Vertex AI.

The service reads a trial's metrics from a file on the chief's machine, with one
JSON object per line, as written by Google's `cloudml-hypertune`: all values but
the time are strings. The chief therefore also reports an evaluator's results.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping

from tfdist._tf import storage
from tfdist.hooks.events import ScalarReader
from tfdist.hooks.session_run_hook import Logs, RunContext, Session, TimedHook

_log = logging.getLogger(__name__)
_MOST_LINES = 100  # As many as cloudml-hypertune keeps.


def report_metrics(
    metrics: Mapping[str, float], path: str, trial: str = ""
) -> None:
    """Adds the metrics of one evaluation to the file of a trial.

    Existing entries of the same or a later step are removed.

    >>> path = os.path.join(directory, "metrics")
    >>> report_metrics({"auc": 0.75, "global_step": 10}, path)
    >>> sorted(json.loads(open(path).read()))
    ['auc', 'checkpoint_path', 'global_step', 'timestamp', 'trial']

    Args:
        metrics: Values by name, as returned by `tfdist.train_and_evaluate`. A
            metric that is not finite is omitted, with a warning: a trial
            without its metric counts as failed.
        path: A local file; the service sets CLOUD_ML_HP_METRIC_FILE.
        trial: The trial's number; the service sets CLOUD_ML_TRIAL_ID.
    """
    step = int(metrics.get("global_step", 0))
    common = {
        "checkpoint_path": "",
        "global_step": str(step),
        "timestamp": time.time(),
        "trial": trial,
    }
    path = os.path.abspath(path)
    lines = (storage.read_text(path) or "").splitlines()
    lines = [x for x in lines if int(json.loads(x)["global_step"]) < step]
    for name, value in metrics.items():
        if name == "global_step":
            continue
        if math.isfinite(value):
            lines.append(json.dumps({name: str(float(value)), **common}))
        else:
            _log.warning("Metric %r is %s and is not reported.", name, value)
    text = "".join(f"{line}\n" for line in lines[-_MOST_LINES:])
    storage.write_text(path, text)


class ReportMetricsHook(TimedHook):
    """Reports a trial's metrics during training, to allow early stopping.

    It reports on the chief only, whichever task evaluates.

    >>> hook = tfdist.estimator.ReportMetricsHook(directory, "metrics")
    >>> hook.steps_until_next(0)
    1

    Args:
        eval_dir: Directory of the evaluations: `Estimator.eval_dir()`.
        path, trial: As for `report_metrics`.
        every_secs: Seconds between two reads of `eval_dir`.
        tag: The metric that the job tunes. Training raises a ValueError if an
            evaluation lacks this metric. Default: not checked.
    """

    def __init__(
        self,
        eval_dir: str,
        path: str,
        trial: str = "",
        every_secs: float = 10,
        tag: str | None = None,
    ) -> None:
        super().__init__(every_secs=every_secs)
        self._reader = ScalarReader(eval_dir)
        self._trial, self._tag = (path, trial), tag
        self._reported = -1

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Reports new evaluations."""
        self.end(context.session)

    def end(self, session: Session) -> None:
        """Reports the remaining evaluations."""
        found = self._reader.read() if session.is_chief else {}
        for step, metrics in found.items():
            if step <= self._reported:
                continue
            self._reported = step
            if self._tag not in (None, *metrics):
                has = sorted(metrics)
                raise ValueError(
                    f"No metric tag={self._tag!r} in an evaluation of {has}."
                )
            report_metrics({**metrics, "global_step": step}, *self._trial)

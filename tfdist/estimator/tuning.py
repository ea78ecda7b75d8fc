"""What a trial of a hyperparameter tuning job tells Vertex AI.

The service reads a trial's metrics from a file on the chief's machine, one JSON
object a line, as Google's `cloudml-hypertune` writes it: every value a string
but the time. So the chief reports, also what an evaluator has computed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping

from tfdist._tf import storage

_log = logging.getLogger(__name__)


def report_metrics(
    metrics: Mapping[str, float], path: str, trial: str = ""
) -> None:
    """Writes the metrics of a trial, in place of those that are there.

    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = os.path.join(directory, "metrics")
    ...     report_metrics({"auc": 0.75, "global_step": 10}, path)
    ...     sorted(json.loads(open(path).read()))
    ['auc', 'checkpoint_path', 'global_step', 'timestamp', 'trial']

    Args:
        metrics: What `tfdist.train_and_evaluate` returns: name to value, with
            `global_step` among them. One that is no finite number is left out,
            with a warning: a trial without its metric counts as failed.
        path: A local file; the service sets CLOUD_ML_HP_METRIC_FILE.
        trial: Its number; the service sets CLOUD_ML_TRIAL_ID.
    """
    common = {
        "checkpoint_path": "",
        "global_step": str(int(metrics.get("global_step", 0))),
        "timestamp": time.time(),
        "trial": trial,
    }
    lines = []
    for name, value in metrics.items():
        if name == "global_step":
            continue
        if math.isfinite(value):
            line = {name: str(float(value)), **common}
            lines.append(json.dumps(line) + "\n")
        else:
            _log.warning(
                "Metric %r is %s and is not reported for this trial.",
                name,
                value,
            )
    storage.write_text(os.path.abspath(path), "".join(lines))

"""What a trial of a hyperparameter tuning job tells Vertex AI.

The service gives each trial other flags, and afterwards reads its metrics from
a file on the chief's machine, one JSON object a line, as Google's
`cloudml-hypertune` writes it: every value a string but the time. So the chief
reports, also where an evaluator on another machine has computed the metrics.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping

_log = logging.getLogger(__name__)


def report_metrics(
    metrics: Mapping[str, float], path: str, trial: str = ""
) -> None:
    """Writes the metrics of a trial, in place of those that are there.

    Args:
        metrics: What `tfdist.train_and_evaluate` returns: name to value, with
            `global_step` among them. All are written; the service picks the
            one that the job is tuned for. One that is no finite number is left
            out, with a warning: a trial without its metric counts as failed.
        path: A local file; the service sets CLOUD_ML_HP_METRIC_FILE.
        trial: Its number; the service sets CLOUD_ML_TRIAL_ID.
    """
    step = str(int(metrics.get("global_step", 0)))
    now, lines = time.time(), []
    for name, value in metrics.items():
        if name == "global_step":
            continue
        if not math.isfinite(value):
            _log.warning(
                "Metric %r is %s and is not reported for this trial.",
                name,
                value,
            )
            continue
        line = {
            name: str(float(value)),
            "checkpoint_path": "",
            "global_step": step,
            "timestamp": now,
            "trial": trial,
        }
        lines.append(json.dumps(line))
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    temporary = f"{path}.temp"
    with open(temporary, "w") as file:
        file.writelines(f"{line}\n" for line in lines)
    os.replace(temporary, path)

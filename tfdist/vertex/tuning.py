"""A hyperparameter tuning job on Vertex AI: many trials of one job."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.vertex.jobs import Job, checked, given

_SCALES = {
    "linear": "UNIT_LINEAR_SCALE",
    "log": "UNIT_LOG_SCALE",
    "reverse_log": "UNIT_REVERSE_LOG_SCALE",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a hyperparameter tuning job varies.

    Attributes:
        metric: Name under which the trainer reports it.
        goal: "MAXIMIZE" or "MINIMIZE".
        parameters: `ParameterSpec`s as JSON has them; `parameter` parses them.
            Each trial gets its values as flags, `--name=value`.
        max_trials: How many trials there are.
        parallel_trials: How many of them at once.
        algorithm: "GRID_SEARCH" or "RANDOM_SEARCH". Default: Bayesian.

    Example:
    >>> trial = Job(image="gcr.io/p/trainer:1", base_output_dir="gs://bkt/out")
    >>> rate = parameter("learning_rate=double:0.01:1:log")
    >>> Tuning(metric="auc", parameters=[rate]).job(trial)["maxTrialCount"]
    10
    """

    metric: str
    parameters: Sequence[Mapping[str, Any]]
    goal: str = "MAXIMIZE"
    max_trials: int = 10
    parallel_trials: int = 2
    algorithm: str | None = None

    def job(self, trial: Job, name: str = "tfdist") -> dict[str, Any]:
        """The `HyperparameterTuningJob`, each of whose trials is a job.

        Warns and raises as `Job.spec`.
        """
        study = {
            "metrics": [{"metricId": self.metric, "goal": self.goal}],
            "parameters": list(map(dict, self.parameters)),
            "algorithm": self.algorithm,
        }
        return checked(
            {
                "displayName": name,
                "studySpec": given(study),
                "maxTrialCount": self.max_trials,
                "parallelTrialCount": self.parallel_trials,
                "trialJobSpec": trial.unchecked_spec(),
            }
        )


def parameter(text: str) -> dict[str, Any]:
    """Parses a tuned flag from the command line.

    >>> parameter("learning_rate=double:0.01:1:log")["scaleType"]
    'UNIT_LOG_SCALE'
    >>> parameter("batch_size=discrete:64,128")["discreteValueSpec"]
    {'values': [64.0, 128.0]}
    >>> parameter("hidden_units=categorical:64|128,64")["categoricalValueSpec"]
    {'values': ['64', '128,64']}

    Args:
        text: name=double:MIN:MAX[:log|:reverse_log], name=int:MIN:MAX[:log...],
            name=discrete:NUMBER,... or name=categorical:VALUE|...

    Returns:
        A `ParameterSpec`, as JSON has it.

    Raises:
        ValueError: It is none of these.
    """
    name, _, rest = text.partition("=")
    kind, _, values = rest.partition(":")
    result: dict[str, Any] = {"parameterId": name}
    try:
        if kind == "categorical":
            return {
                **result,
                "categoricalValueSpec": {"values": values.split("|")},
            }
        if kind == "discrete":
            numbers = sorted(map(float, values.split(",")))
            return {**result, "discreteValueSpec": {"values": numbers}}
        low, high, scale = (*values.split(":"), "linear")[:3]
        number = {"double": float, "int": int}[kind]
        key = "doubleValueSpec" if kind == "double" else "integerValueSpec"
        result[key] = {"minValue": number(low), "maxValue": number(high)}
        return {**result, "scaleType": _SCALES[scale]}
    except (KeyError, ValueError):
        raise ValueError(
            "Argument `parameter` must be name=double:MIN:MAX[:log], "
            "name=int:MIN:MAX[:log], name=discrete:1,2,... or "
            f"name=categorical:a|b|... Received: {text!r}."
        ) from None

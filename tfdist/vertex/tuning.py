"""A hyperparameter tuning job on Vertex AI: many trials of one job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.vertex.jobs import Job, checked, flag, given

_SCALES = {
    "linear": "UNIT_LINEAR_SCALE",
    "log": "UNIT_LOG_SCALE",
    "reverse_log": "UNIT_REVERSE_LOG_SCALE",
}
_RANGES: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "double": ("doubleValueSpec", float),
    "int": ("integerValueSpec", int),
}


def _algorithm(text: str) -> str:
    """Returns the service's name for "grid" or "random"."""
    return f"{text.upper().removesuffix('_SEARCH')}_SEARCH"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """The search space and settings of a hyperparameter tuning job.

    The other fields are flags of `python -m tfdist.vertex`.

    Attributes:
        parameters: `ParameterSpec`s as JSON; `parameter` parses them. Each
            trial receives its values as flags, `--name=value`.

    >>> trial = Job(image="gcr.io/p/trainer:1", base_output_dir="gs://bkt/out")
    >>> rate = parameter("learning_rate=double:0.01:1:log")
    >>> Tuning(metric="auc", parameters=[rate]).job(trial)["maxTrialCount"]
    10
    """

    metric: str = flag(
        dataclasses.MISSING, "name of the metric that the trainer reports"
    )
    parameters: Sequence[Mapping[str, Any]]
    goal: str = flag(
        "MAXIMIZE",
        "whether to maximize or minimize the metric",
        type=str.upper,
        choices=("MAXIMIZE", "MINIMIZE"),
    )
    max_trials: int = flag(10, "total number of trials")
    parallel_trials: int = flag(2, "number of trials that run at once")
    algorithm: str | None = flag(
        None,
        "search algorithm; default: Bayesian",
        type=_algorithm,
        choices=("GRID_SEARCH", "RANDOM_SEARCH"),
    )
    stopping: str | None = flag(
        None, "rule that stops poor trials early", choices=("median",)
    )

    def job(self, trial: Job, name: str = "tfdist") -> dict[str, Any]:
        """Returns the `HyperparameterTuningJob` that runs trials of a job.

        Warns and raises as `Job.spec` does.
        """
        study: dict[str, Any] = {
            "metrics": [{"metricId": self.metric, "goal": self.goal}],
            "parameters": list(map(dict, self.parameters)),
            "algorithm": self.algorithm,
        }
        if self.stopping:
            study["medianAutomatedStoppingSpec"] = {}
        job = {
            "displayName": name,
            "studySpec": given(study),
            "maxTrialCount": self.max_trials,
            "parallelTrialCount": self.parallel_trials,
            "trialJobSpec": trial.unchecked_spec(),
        }
        return checked(job)


def parameter(text: str) -> dict[str, Any]:
    """Parses a tuned flag into a `ParameterSpec` as JSON.

    >>> parameter("learning_rate=double:0.01:1:log")["scaleType"]
    'UNIT_LOG_SCALE'
    >>> parameter("batch_size=discrete:64,128")["discreteValueSpec"]
    {'values': [64.0, 128.0]}
    >>> parameter("hidden_units=categorical:64|128,64")["categoricalValueSpec"]
    {'values': ['64', '128,64']}

    Raises:
        ValueError: `text` is none of name=double:MIN:MAX[:log|:reverse_log],
            name=int:MIN:MAX[:log...], name=discrete:NUMBER,... and
            name=categorical:VALUE|..., or the range is empty, or a logarithmic
            range is not positive.
    """
    name, _, rest = text.partition("=")
    kind, _, values = rest.partition(":")
    result: dict[str, Any] = {"parameterId": name}
    try:
        if not values:
            raise ValueError
        if kind == "categorical":
            result["categoricalValueSpec"] = {"values": values.split("|")}
        elif kind == "discrete":
            numbers = sorted(map(float, values.split(",")))
            result["discreteValueSpec"] = {"values": numbers}
        else:
            key, number = _RANGES[kind]
            low, high, *scales = values.split(":")
            (scale,) = scales or ["linear"]
            least, most = number(low), number(high)
            if least > most or (scale != "linear" and least <= 0):
                raise ValueError
            result[key] = {"minValue": least, "maxValue": most}
            result["scaleType"] = _SCALES[scale]
        return result
    except (KeyError, ValueError):
        raise ValueError(
            "Argument `parameter` must be name=double:MIN:MAX[:log], "
            "name=int:MIN:MAX[:log], name=discrete:1,2,... or "
            f"name=categorical:a|b|... Received: {text!r}."
        ) from None

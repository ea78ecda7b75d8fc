"""Validates a job file for Vertex AI before it is submitted.

gcloud forwards unknown fields. A file is therefore parsed into the service's
own message type, from the package google-cloud-aiplatform, and then checked
against rules whose violation the service reports only after machines have been
rented, or never. Errors that the service reports at submission (such as
unknown machine types and disks, or several chiefs) are left to the service.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.cluster.spec import REDUCTION_SERVERS

Fields = Mapping[str, Any]

_GCS = re.compile(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/[^/\s]+)*/?")
# Prebuilt images, whose names contain the Python version.
_OLD_PYTHON = re.compile(r"\.(cp|py)3(7|8|9|10)\b")
_SERVICES_OWN = ("TF_CONFIG", "CLUSTER_SPEC", "AIP_", "CLOUD_ML_")


def problems_of_job(spec: Any) -> list[str]:
    """Returns the problems of a job file, one sentence each.

    >>> problems_of_job({"base_output_directory": {}})
    ['base_output_directory is unknown. Use baseOutputDirectory.']

    Args:
        spec: A `CustomJobSpec`, or a `HyperparameterTuningJob` (it has a
            `studySpec`), as `yaml.safe_load` returns it.

    Raises:
        ImportError: google-cloud-aiplatform is not installed; install it with
            `pip install "tfdist[vertex]"`.
    """
    try:
        return rules_broken_by(_parsed(spec))
    except ValueError as e:
        return [str(e)]


def rules_broken_by(spec: Fields) -> list[str]:
    """Returns the problems of a job file that is known to be well-formed."""
    return [*(_tuning_rules(spec) if is_tuning(spec) else _job_rules(spec))]


def is_tuning(spec: Fields) -> bool:
    """Whether `spec` is a hyperparameter tuning job."""
    return "studySpec" in spec


def _parsed(spec: Any) -> dict[str, Any]:
    """Parses a file into the service's message type; returns its fields."""
    try:
        from google.cloud.aiplatform_v1 import types
        from google.protobuf import json_format
    except ImportError:
        raise ImportError(
            "Checking a job requires the package google-cloud-aiplatform, "
            "which defines the service's types. Install it with: "
            'pip install "tfdist[vertex]"'
        ) from None
    if not isinstance(spec, Mapping):
        raise ValueError(f"The file must be a mapping. Received: {spec!r:.80}.")
    if unknown := [*_snake_case(spec)]:
        raise ValueError("\n".join(unknown))
    tuning = is_tuning(spec)
    kind = types.HyperparameterTuningJob if tuning else types.CustomJobSpec
    try:
        parsed = json_format.ParseDict(spec, kind.pb(kind()))
    except json_format.ParseError as e:
        text = re.sub(r"Failed to parse (\w+) field: ", r"\1: ", str(e))
        text = " ".join(text.split()).rstrip(".")
        hint = " Put it in quotes." if "expected string" in text else ""
        raise ValueError(f"{text}.{hint}") from None
    return json_format.MessageToDict(parsed)


def _snake_case(value: Any, path: str = "") -> Iterator[str]:
    """Yields problems with snake_case fields, which only the parser accepts."""
    if isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _snake_case(entry, f"{path}[{i}]")
    if not isinstance(value, Mapping):
        return
    for key, entry in value.items():
        camel = re.sub(r"_([a-z])", lambda m: m[1].upper(), str(key))
        where = f"{path}.{key}".lstrip(".")
        if camel != key:
            yield f"{where} is unknown. Use {camel}."
        elif key != "labels":  # The user chooses the keys of labels.
            yield from _snake_case(entry, where)


def _job_rules(spec: Fields) -> Iterator[str]:
    pools = spec.get("workerPoolSpecs", [])
    if not pools or not pools[0]:
        yield "workerPoolSpecs must be a list of pools, with the chief's first."
        return
    chief, workers, third, evaluator = [*pools, {}, {}, {}][:4]
    # Protobuf's JSON represents 64-bit integers as strings.
    if int(evaluator.get("replicaCount", 0)) > 1:
        yield "workerPoolSpecs[3] is the evaluator: use one replica at most."
    if third and not workers:
        yield "workerPoolSpecs[2] requires workers in workerPoolSpecs[1]."
    if "/training/reductionserver" in _program(third).get("imageUri", ""):
        yield from _reduction_server_rules(chief, workers, evaluator)
    elif third and _accelerators(workers) > 1:
        yield (
            "workerPoolSpecs[1] has several GPUs on each machine, but with "
            "parameter servers a worker uses only one. Use more workers, or "
            "omit the parameter servers: all-reduce uses all GPUs."
        )
    if _accelerators(evaluator) > 1:
        yield "workerPoolSpecs[3] has several GPUs; an evaluator uses only one."
    scheduling = spec.get("scheduling", {})
    strategy = scheduling.get("strategy")
    if strategy == "SPOT" and _is_tpu_pod(chief):
        yield "A TPU of several machines (a pod) cannot be a spot VM."
    if "maxWaitDuration" in scheduling and strategy != "FLEX_START":
        yield (
            "scheduling.maxWaitDuration (--max_wait) requires the strategy "
            "FLEX_START (--flex_start)."
        )
    for i, pool in enumerate(pools):
        yield from (f"workerPoolSpecs[{i}]: {x}" for x in _pool_rules(pool))
    output = spec.get("baseOutputDirectory", {}).get("outputUriPrefix")
    if output is not None and not _GCS.fullmatch(output):
        yield (
            "baseOutputDirectory.outputUriPrefix must be gs://bucket/folder. "
            f"Received: {output!r:.80}."
        )


def _accelerators(pool: Fields) -> int:
    return pool.get("machineSpec", {}).get("acceleratorCount", 0)


def _program(pool: Fields) -> Fields:
    return pool.get("containerSpec") or pool.get("pythonPackageSpec") or {}


def _reduction_server_rules(
    chief: Fields, workers: Fields, evaluator: Fields
) -> Iterator[str]:
    if not (_accelerators(chief) and _accelerators(workers)):
        yield (
            "Reduction servers sum gradients that GPUs send through NCCL: the "
            "chief and the workers must have GPUs."
        )
    for pool in filter(None, (chief, workers, evaluator)):
        names = [entry.get("name") for entry in _program(pool).get("env", [])]
        if REDUCTION_SERVERS not in names:
            yield (
                f"With reduction servers every other pool must set the "
                f'variable {REDUCTION_SERVERS} to "1"; otherwise tfdist would '
                "treat them as parameter servers."
            )
            return


def _is_tpu_pod(pool: Fields) -> bool:
    """Whether a pool exceeds one machine: 8 cores (v2, v3), N chips (v5e)."""
    machine = pool.get("machineSpec", {})
    if machine.get("machineType", "") == "cloud-tpu":
        return _accelerators(pool) > 8
    on_one = re.search(r"tpu-(\d+)t$", machine.get("machineType", ""))
    chips = map(int, re.findall(r"\d+", machine.get("tpuTopology", "1")))
    return on_one is not None and math.prod(chips) > int(on_one[1])


def _pool_rules(pool: Fields) -> Iterator[str]:
    program = _program(pool)
    image = program.get("executorImageUri", "")
    if _OLD_PYTHON.search(image):
        yield (
            "tfdist needs Python 3.11 or later, but the newest prebuilt image "
            "has Python 3.10 and TensorFlow 2.17. Build your own image "
            f"(see vertex/README.md). Received: {image!r:.80}."
        )
    for entry in program.get("env", []):
        if entry.get("name", "").startswith(_SERVICES_OWN):
            yield f"the variable {entry['name']} is set by the service itself."


def _tuning_rules(job: Fields) -> Iterator[str]:
    trial = job.get("trialJobSpec", {})
    flags = {
        arg.lstrip("-").partition("=")[0]
        for pool in trial.get("workerPoolSpecs", [])
        for arg in _program(pool).get("args", [])
        if arg.startswith("-")
    }
    for parameter in job.get("studySpec", {}).get("parameters", []):
        name = parameter.get("parameterId", "")
        if not name.isidentifier():
            yield f"parameter {name!r} is not named like a trainer flag."
        if name in flags:
            yield f"Remove {name} from the args, because it is tuned."
    for name in sorted(flags & {"model_dir", "summary_dir", "export_dir"}):
        yield (
            f"Remove {name} from the args: all trials would share it. The "
            "service gives each trial its own folder."
        )
    yield from (f"trialJobSpec: {problem}" for problem in _job_rules(trial))

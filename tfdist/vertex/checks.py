"""What is wrong with a job file for Vertex AI, before it is submitted.

gcloud forwards fields that it does not know, and the service looks at the rest
only after the job was accepted. Here a file is compared with the fields of
`CustomJobSpec` and `HyperparameterTuningJob`, then with the rules that its
worker pools, machines, names and paths have to obey. Everything works on what
`yaml.safe_load` returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.cluster.spec import REDUCTION_SERVERS
from tfdist.vertex import machine_types as machines

_POOLS = ("the chief", "the workers", "the ps", "the evaluator")
_ENV = [{"name": str, "value": str}]
_POOL = {
    "machineSpec": {
        "machineType": str,
        "acceleratorType": str,
        "acceleratorCount": int,
        "gpuPartitionSize": str,
        "tpuTopology": str,
        "reservationAffinity": dict,
    },
    "replicaCount": int,
    "diskSpec": {"bootDiskType": str, "bootDiskSizeGb": int},
    "nfsMounts": [dict],
    "lustreMounts": [dict],
    "containerSpec": {
        "imageUri": str,
        "command": [str],
        "args": [str],
        "env": _ENV,
    },
    "pythonPackageSpec": {
        "executorImageUri": str,
        "packageUris": [str],
        "pythonModule": str,
        "args": [str],
        "env": _ENV,
    },
}
CUSTOM_JOB_SPEC = {
    "persistentResourceId": str,
    "workerPoolSpecs": [_POOL],
    "scheduling": {
        "timeout": str,
        "restartJobOnWorkerRestart": bool,
        "strategy": str,
        "disableRetries": bool,
        "maxWaitDuration": str,
    },
    "serviceAccount": str,
    "network": str,
    "reservedIpRanges": [str],
    "pscInterfaceConfig": dict,
    "baseOutputDirectory": {"outputUriPrefix": str},
    "protectedArtifactLocationId": str,
    "tensorboard": str,
    "enableWebAccess": bool,
    "enableDashboardAccess": bool,
    "experiment": str,
    "experimentRun": str,
    "models": [str],
}
_PARAMETER = {
    "parameterId": str,
    "doubleValueSpec": {
        "minValue": float,
        "maxValue": float,
        "defaultValue": float,
    },
    "integerValueSpec": {
        "minValue": int,
        "maxValue": int,
        "defaultValue": int,
    },
    "categoricalValueSpec": {"values": [str], "defaultValue": str},
    "discreteValueSpec": {"values": [float], "defaultValue": float},
    "scaleType": str,
    "conditionalParameterSpecs": [dict],
}
TUNING_JOB = {
    "name": str,
    "displayName": str,
    "studySpec": {
        "decayCurveStoppingSpec": dict,
        "medianAutomatedStoppingSpec": dict,
        "convexAutomatedStoppingSpec": dict,
        "metrics": [{"metricId": str, "goal": str, "safetyConfig": dict}],
        "parameters": [_PARAMETER],
        "algorithm": str,
        "observationNoise": str,
        "measurementSelectionType": str,
        "studyStoppingConfig": dict,
    },
    "maxTrialCount": int,
    "parallelTrialCount": int,
    "maxFailedTrialCount": int,
    "trialJobSpec": CUSTOM_JOB_SPEC,
    "labels": dict,
    "encryptionSpec": dict,
}

_BUCKET = r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"
_GCS = re.compile(rf"gs://{_BUCKET}(/[^/\s]+)*/?")
_IMAGE = re.compile(
    r"[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)+"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
# The prebuilt images, whose Python is in their name.
_OLD_PYTHON = re.compile(r"\.(cp|py)3(7|8|9|10)\b")
_EMAIL = re.compile(r"[A-Za-z0-9._-]+@[A-Za-z0-9.-]+\.[a-z]+")
_NETWORK = re.compile(r"projects/\d+/global/networks/[a-z][a-z0-9-]*")
_TENSORBOARD = re.compile(r"projects/[^/]+/locations/[^/]+/tensorboards/[^/]+")
_DURATION = re.compile(r"[1-9][0-9]*(\.[0-9]+)?s")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SERVICES_OWN = ("TF_CONFIG", "CLUSTER_SPEC", "AIP_", "CLOUD_ML_")
_STRATEGIES = ("STANDARD", "SPOT", "FLEX_START")
_DISKS = ("pd-ssd", "pd-standard", "hyperdisk-balanced")
_VALUE_SPECS = tuple(key for key in _PARAMETER if key.endswith("ValueSpec"))
_SCALES = ("UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE")


def problems_of_job(spec: Any) -> list[str]:
    """What is wrong with a custom job.

    >>> problems_of_job({"workerPoolSpecs": [], "base_output_directory": {}})
    ['base_output_directory is unknown here; baseOutputDirectory is meant.']

    Args:
        spec: A `CustomJobSpec` as JSON has it.

    Returns:
        A sentence for each problem; those of fields alone, if there are any.
    """
    problems = list(_field_problems(spec, CUSTOM_JOB_SPEC, ""))
    return problems or [
        *_pools_problems(spec.get("workerPoolSpecs", [])),
        *_settings_problems(spec),
    ]


def problems_of_tuning_job(job: Any) -> list[str]:
    """What is wrong with a hyperparameter tuning job.

    Args:
        job: A `HyperparameterTuningJob` as JSON has it.

    Returns:
        As `problems_of_job`.
    """
    problems = list(_field_problems(job, TUNING_JOB, ""))
    return problems or [
        *_study_problems(job),
        *(
            f"trialJobSpec: {problem}"
            for problem in problems_of_job(job.get("trialJobSpec", {}))
        ),
    ]


def _field_problems(value: Any, schema: Any, path: str) -> Iterator[str]:
    """Unknown fields and values of another type."""
    if isinstance(schema, dict):
        if not isinstance(value, Mapping):
            yield f"{path or 'The file'} must be a mapping. {_received(value)}"
            return
        prefix = f"{path}." if path else ""
        for key, entry in value.items():
            if key in schema:
                yield from _field_problems(entry, schema[key], prefix + key)
            else:
                yield _unknown(prefix, key, schema)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{path} must be a list. {_received(value)}"
            return
        for i, entry in enumerate(value):
            yield from _field_problems(entry, schema[0], f"{path}[{i}]")
    elif not _is_a(value, schema):
        names = {str: "a string, in quotes", dict: "a mapping", bool: "boolean"}
        kind = names.get(schema, "a number")
        yield f"{path} must be {kind}. {_received(value)}"


def _is_a(value: Any, kind: type) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)


def _unknown(prefix: str, key: Any, schema: Mapping[str, Any]) -> str:
    camel = re.sub(r"_([a-z])", lambda m: m[1].upper(), str(key))
    if camel in schema:
        return f"{prefix}{key} is unknown here; {camel} is meant."
    return f"{prefix}{key} is unknown here. Known: {', '.join(schema)}."


def _received(value: Any) -> str:
    text = repr(value)
    return f"Received: {text if len(text) < 80 else text[:80] + ' ...'}."


def _pools_problems(pools: list[Mapping[str, Any]]) -> Iterator[str]:
    """The rules that hold between worker pools, then those of each."""
    if not 1 <= len(pools) <= 4 or not pools[0]:
        yield (
            "workerPoolSpecs must be a list of one to four pools: the chief, "
            "the workers, the parameter servers and the evaluator; {} leaves "
            "one of the last three out."
        )
        return
    chief, workers, third, evaluator = [*pools, {}, {}, {}][:4]
    if chief.get("replicaCount") != 1:
        yield "workerPoolSpecs[0] is the chief: its replicaCount must be 1."
    if evaluator.get("replicaCount", 1) > 1:
        yield "workerPoolSpecs[3] is the evaluator: there can be only one."
    if third and not workers:
        yield "workerPoolSpecs[2] is there, and no workers that would need it."
    if third and _is_reduction_server(third):
        yield from _reduction_server_problems(chief, workers, third, evaluator)
    if any(map(_is_tpu, pools)) and len(pools) > 1:
        yield "A TPU job must have a single worker pool."
    for i, pool in enumerate(pools):
        if pool:
            where = f"workerPoolSpecs[{i}] ({_POOLS[i]})"
            yield from (f"{where}: {text}" for text in _pool_problems(pool))


def _is_reduction_server(pool: Mapping[str, Any]) -> bool:
    image = pool.get("containerSpec", {}).get("imageUri", "")
    return "/training/reductionserver" in image


def _reduction_server_problems(
    chief: Mapping[str, Any],
    workers: Mapping[str, Any],
    third: Mapping[str, Any],
    evaluator: Mapping[str, Any],
) -> Iterator[str]:
    if _gpus(third):
        yield "Reduction servers have no GPUs."
    if not (_gpus(chief) and _gpus(workers)):
        yield (
            "Reduction servers add up what GPUs send by NCCL: the chief and "
            "the workers must have GPUs."
        )
    for pool in filter(None, (chief, workers, evaluator)):
        names = [entry.get("name") for entry in _program(pool).get("env", [])]
        if REDUCTION_SERVERS not in names:
            yield (
                f"With reduction servers every other pool must set the "
                f'variable {REDUCTION_SERVERS} to "1"; tfdist would take them '
                "for parameter servers."
            )
            return


def _gpus(pool: Mapping[str, Any]) -> int:
    return pool.get("machineSpec", {}).get("acceleratorCount", 0)


def _is_tpu(pool: Mapping[str, Any]) -> bool:
    return machines.is_tpu(pool.get("machineSpec", {}).get("machineType", ""))


def _program(pool: Mapping[str, Any]) -> Mapping[str, Any]:
    return pool.get("containerSpec") or pool.get("pythonPackageSpec") or {}


def _pool_problems(pool: Mapping[str, Any]) -> Iterator[str]:
    machine = pool.get("machineSpec", {})
    problem = machines.problem_with(
        machine.get("machineType", ""),
        machine.get("acceleratorType"),
        machine.get("acceleratorCount", 0),
        machine.get("tpuTopology"),
    )
    if problem:
        yield problem
    replicas = pool.get("replicaCount", 0)
    if replicas < 1:
        yield f"replicaCount must be 1 or more. {_received(replicas)}"
    if replicas > 1 and _is_tpu(pool):
        yield f"A TPU job must have one replica. {_received(replicas)}"
    disk = pool.get("diskSpec", {})
    size = disk.get("bootDiskSizeGb", 100)
    if not 100 <= size <= 64000:
        yield f"bootDiskSizeGb must be 100 to 64000. {_received(size)}"
    if disk.get("bootDiskType", "pd-ssd") not in _DISKS:
        yield f"bootDiskType must be one of {', '.join(_DISKS)}."
    yield from _program_problems(pool)


def _program_problems(pool: Mapping[str, Any]) -> Iterator[str]:
    """The rules for what a pool runs."""
    if bool(pool.get("containerSpec")) == bool(pool.get("pythonPackageSpec")):
        yield "it needs a containerSpec or a pythonPackageSpec, one of the two."
        return
    program = _program(pool)
    is_package = "pythonPackageSpec" in pool
    image = program.get("executorImageUri" if is_package else "imageUri", "")
    if not _IMAGE.fullmatch(image):
        yield (
            "the image must be named as registry/path:tag, such as "
            "us-central1-docker.pkg.dev/my-project/tfdist/trainer:1. "
            f"{_received(image)}"
        )
    if is_package:
        yield from _package_problems(program, image)
    for entry in program.get("env", []):
        name = entry.get("name", "")
        if not _VARIABLE.fullmatch(name) or "value" not in entry:
            yield f"env entries need a name and a value. {_received(entry)}"
        if name.startswith(_SERVICES_OWN):
            yield f"the variable {name} is set by the service itself."


def _package_problems(program: Mapping[str, Any], image: str) -> Iterator[str]:
    if _OLD_PYTHON.search(image):
        yield (
            "tfdist needs Python 3.11, and the prebuilt images end at 3.10 "
            "with TensorFlow 2.17: build an image of your own "
            f"(vertex/README.md). {_received(image)}"
        )
    uris = program.get("packageUris", [])
    if not uris or not program.get("pythonModule"):
        yield "pythonPackageSpec needs packageUris and a pythonModule."
    for uri in uris:
        if not _GCS.fullmatch(uri) or not uri.endswith((".tar.gz", ".whl")):
            yield f"a package is gs://bucket/name.tar.gz. {_received(uri)}"


def _settings_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    """The rules for what all pools share."""
    scheduling = spec.get("scheduling", {})
    strategy = scheduling.get("strategy", "STANDARD")
    if strategy not in _STRATEGIES:
        yield (
            f"scheduling.strategy must be one of {', '.join(_STRATEGIES)}. "
            f"{_received(strategy)}"
        )
    first = (spec.get("workerPoolSpecs") or [{}])[0].get("machineSpec", {})
    if strategy == "SPOT" and machines.is_tpu_pod(
        first.get("machineType", ""),
        first.get("acceleratorCount", 0),
        first.get("tpuTopology"),
    ):
        yield "A TPU of several machines (a pod) cannot be a spot VM."
    for key in ("timeout", "maxWaitDuration"):
        if key in scheduling and not _DURATION.fullmatch(scheduling[key]):
            yield (
                f'scheduling.{key} must be seconds, such as "86400s". '
                f"{_received(scheduling[key])}"
            )
    output = spec.get("baseOutputDirectory", {}).get("outputUriPrefix")
    if output is not None and not _GCS.fullmatch(output):
        yield (
            "baseOutputDirectory.outputUriPrefix must be gs://bucket/folder. "
            f"{_received(output)}"
        )
    if "tensorboard" in spec and not (
        output is not None and "serviceAccount" in spec
    ):
        yield "tensorboard needs baseOutputDirectory and serviceAccount."
    for key, pattern, example in (
        ("serviceAccount", _EMAIL, "name@project.iam.gserviceaccount.com"),
        ("network", _NETWORK, "projects/123456/global/networks/name"),
        (
            "tensorboard",
            _TENSORBOARD,
            "projects/123456/locations/us-central1/tensorboards/789",
        ),
    ):
        if key in spec and not pattern.fullmatch(spec[key]):
            yield f"{key} must be like {example}. {_received(spec[key])}"


def _study_problems(job: Mapping[str, Any]) -> Iterator[str]:
    """The rules of hyperparameter tuning."""
    study = job.get("studySpec", {})
    most, at_once = (
        job.get("maxTrialCount", 1),
        job.get("parallelTrialCount", 1),
    )
    if not 1 <= at_once <= most:
        yield (
            "parallelTrialCount must be 1 to maxTrialCount. Received: "
            f"{at_once} of {most}."
        )
    goals = [metric.get("goal") for metric in study.get("metrics", [])]
    if not goals or not set(goals) <= {"MAXIMIZE", "MINIMIZE"}:
        yield "studySpec.metrics needs a metricId, and MAXIMIZE or MINIMIZE."
    ids = [entry.get("parameterId") for entry in study.get("parameters", [])]
    if not ids or len(ids) != len(set(ids)):
        yield f"studySpec.parameters need different names. {_received(ids)}"
    given = {
        arg.lstrip("-").partition("=")[0]
        for pool in job.get("trialJobSpec", {}).get("workerPoolSpecs", [])
        for arg in _program(pool).get("args", [])
        if arg.startswith("-")
    }
    for parameter in study.get("parameters", []):
        name = parameter.get("parameterId", "")
        if name in given:
            yield f"{name} is tuned: it must not be among the args as well."
        for problem in _parameter_problems(parameter):
            yield f"parameter {name}: {problem}"


def _parameter_problems(parameter: Mapping[str, Any]) -> Iterator[str]:
    if not _VARIABLE.fullmatch(parameter.get("parameterId", "")):
        yield "its name must be that of a flag of the trainer."
    kinds = [key for key in _VALUE_SPECS if key in parameter]
    if len(kinds) != 1:
        yield f"it must have exactly one of {', '.join(_VALUE_SPECS)}."
        return
    values = parameter[kinds[0]]
    scale = parameter.get("scaleType", _SCALES[0])
    if scale not in _SCALES:
        yield f"scaleType must be one of {', '.join(_SCALES)}."
    if kinds[0] in ("categoricalValueSpec", "discreteValueSpec"):
        listed = values.get("values", [])
        if len(set(listed)) < 2 or len(set(listed)) < len(listed):
            yield f"it needs two different values or more. {_received(listed)}"
        if kinds[0] == "discreteValueSpec" and listed != sorted(listed):
            yield f"its values must ascend. {_received(listed)}"
        return
    low, high = values.get("minValue"), values.get("maxValue")
    if low is None or high is None or low >= high:
        yield f"minValue must be less than maxValue. {_received(values)}"
    elif scale != _SCALES[0] and low <= 0:
        yield f"a logarithmic scale begins above 0. {_received(low)}"

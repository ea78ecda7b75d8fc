"""What is wrong with a job file for Vertex AI, before it is submitted.

gcloud forwards fields that it does not know. So a file is parsed into the
service's own message type, of the package google-cloud-aiplatform. Then come
the rules that the service reports late, when machines have been rented, or
never. What it says clearly when a job is submitted (which GPUs a machine type
can have, which values a parameter) is left to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.cluster.spec import REDUCTION_SERVERS

Fields = Mapping[str, Any]

_POOLS = ("the chief", "the workers", "the ps", "the evaluator")
_GCS = re.compile(r"gs://[a-z0-9][a-z0-9._-]+[a-z0-9](/[^/\s]+)*/?")
_IMAGE = re.compile(r"[^\s/]+(/[^\s/]+)+")
# The prebuilt images, whose Python is in their name.
_OLD_PYTHON = re.compile(r"\.(cp|py)3(7|8|9|10)\b")
# Families of machine types that come with their GPUs.
_WITH_GPUS = re.compile(r"(a[2-9]x?|g[2-9])-")
_TPU = re.compile(r"cloud-tpu$|ct\d|tpu")
_SERVICES_OWN = ("TF_CONFIG", "CLUSTER_SPEC", "AIP_", "CLOUD_ML_")


def problems_of_job(spec: Any) -> list[str]:
    """What is wrong with a job file.

    Needs google-cloud-aiplatform: `pip install "tfdist[vertex]"`.

    >>> problems_of_job({"base_output_directory": {}})
    ['base_output_directory is unknown here; baseOutputDirectory is meant.']

    Args:
        spec: A `CustomJobSpec`, or a `HyperparameterTuningJob` (it has a
            `studySpec`), as `yaml.safe_load` returns it.

    Returns:
        A sentence for each problem.

    Raises:
        ImportError: The package is not installed.
    """
    try:
        return rules_broken_by(_parsed(spec))
    except ValueError as e:
        return [str(e)]


def rules_broken_by(spec: Fields) -> list[str]:
    """`problems_of_job` for what is known to be well-formed."""
    return [*(_tuning_rules(spec) if is_tuning(spec) else _job_rules(spec))]


def is_tuning(spec: Fields) -> bool:
    """Whether this is a hyperparameter tuning job."""
    return "studySpec" in spec


def _parsed(spec: Any) -> dict[str, Any]:
    """The fields of a file that the service's message type understands."""
    try:
        from google.cloud.aiplatform_v1 import types
        from google.protobuf import json_format
    except ImportError:
        raise ImportError(
            "Checking a job file needs the package google-cloud-aiplatform, "
            "which has the types of the service: "
            'pip install "tfdist[vertex]"'
        ) from None
    if not isinstance(spec, Mapping):
        raise ValueError(f"The file must be a mapping. {_received(spec)}")
    unknown = [*_snake_case(spec)]
    if unknown:
        raise ValueError("\n".join(unknown))
    message = (
        types.HyperparameterTuningJob
        if is_tuning(spec)
        else types.CustomJobSpec
    )
    try:
        parsed = json_format.ParseDict(spec, message.pb(message()))
    except json_format.ParseError as e:
        text = re.sub(r"Failed to parse (\w+) field: ", r"\1: ", str(e))
        text = " ".join(text.split()).rstrip(".")
        hint = " Put it in quotes." if "expected string" in text else ""
        raise ValueError(f"{text}.{hint}") from None
    return json_format.MessageToDict(parsed)


def _snake_case(value: Any, path: str = "") -> Iterator[str]:
    """Fields that the parser takes, and that gcloud and the rules do not."""
    if isinstance(value, list):
        for i, entry in enumerate(value):
            yield from _snake_case(entry, f"{path}[{i}]")
    if not isinstance(value, Mapping):
        return
    for key, entry in value.items():
        camel = re.sub(r"_([a-z])", lambda m: m[1].upper(), str(key))
        where = f"{path}.{key}".lstrip(".")
        if camel != key:
            yield f"{where} is unknown here; {camel} is meant."
        elif key != "labels":  # Whose keys are the user's own.
            yield from _snake_case(entry, where)


def _received(value: Any) -> str:
    return f"Received: {value!r:.80}."


def _job_rules(spec: Fields) -> Iterator[str]:
    pools = spec.get("workerPoolSpecs", [])
    if not 1 <= len(pools) <= 4 or not pools[0]:
        yield (
            "workerPoolSpecs must be a list of one to four pools: the chief, "
            "the workers, the parameter servers and the evaluator; {} leaves "
            "one of the last three out."
        )
        return
    chief, workers, third, evaluator = [*pools, {}, {}, {}][:4]
    if _replicas(chief) != 1:
        yield "workerPoolSpecs[0] is the chief: its replicaCount must be 1."
    if _replicas(evaluator) > 1:
        yield "workerPoolSpecs[3] is the evaluator: there can be only one."
    if third and not workers:
        yield "workerPoolSpecs[2] is there, and no workers that would need it."
    if "/training/reductionserver" in _program(third).get("imageUri", ""):
        yield from _reduction_server_rules(chief, workers, evaluator)
    if any(_TPU.match(_machine_type(pool)) for pool in pools if pool):
        yield from _tpu_rules(spec)
    for i, pool in enumerate(pools):
        if pool:
            where = f"workerPoolSpecs[{i}] ({_POOLS[i]})"
            yield from (f"{where}: {text}" for text in _pool_rules(pool))
    output = spec.get("baseOutputDirectory", {}).get("outputUriPrefix")
    if output is not None and not _GCS.fullmatch(output):
        yield (
            "baseOutputDirectory.outputUriPrefix must be gs://bucket/folder. "
            f"{_received(output)}"
        )


def _replicas(pool: Fields) -> int:
    """Protobuf's JSON has 64-bit integers as text."""
    return int(pool.get("replicaCount", 0))


def _machine_type(pool: Fields) -> str:
    return pool.get("machineSpec", {}).get("machineType", "")


def _accelerators(pool: Fields) -> int:
    return pool.get("machineSpec", {}).get("acceleratorCount", 0)


def _program(pool: Fields) -> Fields:
    return pool.get("containerSpec") or pool.get("pythonPackageSpec") or {}


def _reduction_server_rules(
    chief: Fields, workers: Fields, evaluator: Fields
) -> Iterator[str]:
    if not (_accelerators(chief) and _accelerators(workers)):
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


def _tpu_rules(spec: Fields) -> Iterator[str]:
    pools = spec["workerPoolSpecs"]
    machine_type = _machine_type(pools[0])
    if len(pools) > 1 or _replicas(pools[0]) > 1:
        yield "A TPU job must have a single worker pool of one replica."
    if not machine_type.startswith(("cloud-tpu", "ct5lp-")):
        yield f"TensorFlow does not run on {machine_type}: TPU v5e is the last."
    # On one machine there are 8 cores (v2, v3), or the chips of its name (v5e).
    topology = pools[0].get("machineSpec", {}).get("tpuTopology", "1")
    chips = map(int, re.findall(r"\d+", topology))
    on_one = re.search(r"-(\d+)t$", machine_type)
    is_pod = _accelerators(pools[0]) > 8 or (
        on_one is not None and math.prod(chips) > int(on_one[1])
    )
    if is_pod and spec.get("scheduling", {}).get("strategy") == "SPOT":
        yield "A TPU of several machines (a pod) cannot be a spot VM."


def _pool_rules(pool: Fields) -> Iterator[str]:
    machine_type = _machine_type(pool)
    if _WITH_GPUS.match(machine_type) and not _accelerators(pool):
        yield (
            f"{machine_type} comes with GPUs: acceleratorType and "
            "acceleratorCount must name them, such as NVIDIA_L4 and 1."
        )
    if _replicas(pool) < 1:
        yield f"replicaCount must be 1 or more. {_received(_replicas(pool))}"
    size = pool.get("diskSpec", {}).get("bootDiskSizeGb", 100)
    if not 100 <= size <= 64000:
        yield f"bootDiskSizeGb must be 100 to 64000. {_received(size)}"
    program = _program(pool)
    if not program:
        yield "it needs a containerSpec or a pythonPackageSpec."
        return
    image = program.get("executorImageUri") or program.get("imageUri", "")
    if not _IMAGE.fullmatch(image):
        yield (
            "the image must be named as registry/path:tag, such as "
            "us-central1-docker.pkg.dev/my-project/tfdist/trainer:1. "
            f"{_received(image)}"
        )
    if "pythonPackageSpec" in pool and _OLD_PYTHON.search(image):
        yield (
            "tfdist needs Python 3.11, and the prebuilt images end at 3.10 "
            "with TensorFlow 2.17: build an image of your own "
            f"(vertex/README.md). {_received(image)}"
        )
    for uri in program.get("packageUris", []):
        if not _GCS.fullmatch(uri) or not uri.endswith((".tar.gz", ".whl")):
            yield f"a package is gs://bucket/name.tar.gz. {_received(uri)}"
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
            yield f"parameter {name!r} must be called as a flag of the trainer."
        if name in flags:
            yield f"{name} is tuned: it must not be among the args as well."
    yield from (f"trialJobSpec: {problem}" for problem in _job_rules(trial))

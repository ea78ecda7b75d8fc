import copy
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
import yaml
from google.cloud.aiplatform_v1.types import (
    CustomJobSpec,
    HyperparameterTuningJob,
)
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.vertex import command, job_file, jobs, kubernetes
from tfdist.vertex.checks import problems_of_job
from tfdist.vertex.exports import copy_export
from tfdist.vertex.jobs import Job, Machine
from tfdist.vertex.tuning import Tuning, parameter

ROOT = Path(__file__).parents[2]
IMAGE = "us-central1-docker.pkg.dev/my-project/tfdist/trainer:1"
OUTPUT = "gs://my-bucket/clicks"
COMMON = [f"--image={IMAGE}", f"--base_output_dir={OUTPUT}"]
REDUCTION = jobs.REDUCTION_SERVER_IMAGE


def as_proto(spec):
    """The spec through the service's own types, which refuse what is unknown.

    And back to JSON, in camelCase.
    """
    kind = HyperparameterTuningJob if "studySpec" in spec else CustomJobSpec
    message = json_format.ParseDict(spec, kind.pb(kind()))
    return json_format.MessageToDict(message)


def with_int64_as_text(spec):
    """Protobuf's JSON has 64-bit integers as strings."""
    spec = copy.deepcopy(spec)
    for pool in spec.get("trialJobSpec", spec)["workerPoolSpecs"]:
        if pool:
            pool["replicaCount"] = str(pool["replicaCount"])
    for entry in spec.get("studySpec", {}).get("parameters", []):
        if "integerValueSpec" in entry:
            entry["integerValueSpec"] = {
                key: str(value)
                for key, value in entry["integerValueSpec"].items()
            }
    return spec


def generated(capsys, *flags):
    """What the command prints for these flags, parsed, and the text."""
    assert command.main([*COMMON, *flags]) == 0
    text = capsys.readouterr().out
    return yaml.safe_load(text), text


# --- Shapes ------------------------------------------------------------------

N1, HIGHCPU = "n1-standard-4", "n1-highcpu-16"
RESERVATION = "projects/p/zones/us-central1-a/reservations/mine"
A100 = ["--machine=a2-highgpu-1g", "--accelerator=NVIDIA_TESLA_A100"]

# name: (flags, [(replicas, machine type, accelerator) of each pool])
SHAPES = {
    "one machine": ([], [(1, N1, None)]),
    "one machine, one GPU": (
        ["--machine=n1-standard-8", "--accelerator=NVIDIA_TESLA_T4"],
        [(1, "n1-standard-8", "NVIDIA_TESLA_T4:1")],
    ),
    "one machine, 8 V100": (
        ["--machine=n1-standard-96", "--accelerator=NVIDIA_TESLA_V100:8"],
        [(1, "n1-standard-96", "NVIDIA_TESLA_V100:8")],
    ),
    "one machine with its own GPUs": (
        [
            *["--machine=a2-highgpu-4g", "--boot_disk_gb=500"],
            "--accelerator=NVIDIA_TESLA_A100:4",
        ],
        [(1, "a2-highgpu-4g", "NVIDIA_TESLA_A100:4")],
    ),
    "one machine, 8 L4": (
        ["--machine=g2-standard-96", "--accelerator=NVIDIA_L4:8"],
        [(1, "g2-standard-96", "NVIDIA_L4:8")],
    ),
    "one machine, 8 H200, spot": (
        [
            *["--machine=a3-ultragpu-8g", "--spot"],
            "--accelerator=NVIDIA_H200_141GB:8",
        ],
        [(1, "a3-ultragpu-8g", "NVIDIA_H200_141GB:8")],
    ),
    "one machine of a series to come": (
        ["--machine=z9-standard-4"],
        [(1, "z9-standard-4", None)],
    ),
    "one machine and an evaluator": (
        ["--evaluator"],
        [(1, N1, None), None, None, (1, N1, None)],
    ),
    "ps": (
        ["--workers=4", "--ps=2", "--ps_machine=n1-highmem-8"],
        [(1, N1, None), (4, N1, None), (2, "n1-highmem-8", None)],
    ),
    "ps and evaluator": (
        [
            "--workers=4",
            "--ps=2",
            "--evaluator",
            "--chief_machine=e2-highmem-2",
        ],
        [
            (1, "e2-highmem-2", None),
            (4, N1, None),
            (2, N1, None),
            (1, N1, None),
        ],
    ),
    "ps, workers with GPUs, evaluator with one": (
        [
            *["--workers=2", "--ps=1", "--evaluator"],
            *["--accelerator=NVIDIA_TESLA_T4"],
            *["--evaluator_accelerator=NVIDIA_TESLA_T4"],
        ],
        [
            (1, N1, None),
            (2, N1, "NVIDIA_TESLA_T4:1"),
            (1, N1, None),
            (1, N1, "NVIDIA_TESLA_T4:1"),
        ],
    ),
    "ps, largest": (
        ["--workers=1000", "--ps=200", "--spot", "--timeout=3d"],
        [(1, N1, None), (1000, N1, None), (200, N1, None)],
    ),
    "all-reduce": (["--workers=3"], [(1, N1, None), (3, N1, None)]),
    "all-reduce, queued, any reservation": (
        [
            *["--workers=1", "--flex_start", "--max_wait=3d"],
            "--reservation=any",
        ],
        [(1, N1, None), (1, N1, None)],
    ),
    "all-reduce of GPUs": (
        [
            *["--workers=3", "--machine=a2-ultragpu-2g"],
            "--accelerator=NVIDIA_A100_80GB:2",
        ],
        [
            (1, "a2-ultragpu-2g", "NVIDIA_A100_80GB:2"),
            (3, "a2-ultragpu-2g", "NVIDIA_A100_80GB:2"),
        ],
    ),
    "all-reduce and evaluator": (
        ["--workers=3", "--evaluator"],
        [(1, N1, None), (3, N1, None), None, (1, N1, None)],
    ),
    "reduction servers": (
        [*A100, "--workers=3", "--reduction_servers=5"],
        [
            (1, "a2-highgpu-1g", "NVIDIA_TESLA_A100:1"),
            (3, "a2-highgpu-1g", "NVIDIA_TESLA_A100:1"),
            (5, HIGHCPU, None),
        ],
    ),
    "reduction servers and evaluator": (
        [
            *[*A100, "--workers=1", "--reduction_servers=2", "--evaluator"],
            "--reduction_machine=n1-highcpu-32",
        ],
        [
            (1, "a2-highgpu-1g", "NVIDIA_TESLA_A100:1"),
            (1, "a2-highgpu-1g", "NVIDIA_TESLA_A100:1"),
            (2, "n1-highcpu-32", None),
            (1, N1, None),
        ],
    ),
    "TPU v3": (
        ["--machine=cloud-tpu", "--accelerator=TPU_V3:8", "--spot"],
        [(1, "cloud-tpu", "TPU_V3:8")],
    ),
    "TPU v2 pod": (
        ["--machine=cloud-tpu", "--accelerator=TPU_V2:32"],
        [(1, "cloud-tpu", "TPU_V2:32")],
    ),
    "TPU v5e": (
        ["--machine=ct5lp-hightpu-4t", "--tpu_topology=4x4"],
        [(1, "ct5lp-hightpu-4t", None)],
    ),
    "everything set": (
        [
            *["--workers=2", "--ps=1", "--evaluator", "--boot_disk_gb=200"],
            *["--module=my.task", "--env=NAME=a=b", "--timeout=90m"],
            *["--spot", "--disable_retries", "--restart_job_on_worker_restart"],
            *["--service_account=me@my-project.iam.gserviceaccount.com"],
            *["--network=projects/123/global/networks/default"],
            *["--tensorboard=projects/1/locations/us-central1/tensorboards/2"],
            *["--web_access", "--persistent_resource=my-machines"],
            *["--network_attachment=my-attachment"],
            *["--boot_disk_type=pd-standard", f"--reservation={RESERVATION}"],
            *["--", "--max_steps=10", "--train_files=gs://b/*.csv", "--x"],
        ],
        [(1, N1, None), (2, N1, None), (1, N1, None), (1, N1, None)],
    ),
}
FULL_POOLS = [name for name, (_, pools) in SHAPES.items() if None not in pools]
WITH_A_GAP = sorted(set(SHAPES) - set(FULL_POOLS))


def summary(pool):
    """Replicas, machine type and accelerators of a worker pool."""
    if not pool:
        return None
    machine = pool["machineSpec"]
    gpu = machine.get("acceleratorType")
    return (
        pool["replicaCount"],
        machine["machineType"],
        gpu and f"{gpu}:{machine['acceleratorCount']}",
    )


def test_there_are_enough_shapes():
    assert len(SHAPES) >= 15


@pytest.mark.parametrize("name", SHAPES)
def test_shape(capsys, name):
    flags, pools = SHAPES[name]
    spec, text = generated(capsys, *flags)
    assert [summary(pool) for pool in spec["workerPoolSpecs"]] == pools
    # Nothing unknown, everything camelCase: it survives the service's types.
    assert as_proto(spec) == with_int64_as_text(spec)
    assert problems_of_job(spec) == []
    assert not re.search(r"[&*]id\d", text)


@pytest.mark.parametrize("name", FULL_POOLS)
def test_command_names_the_file(capsys, name):
    _, text = generated(capsys, *SHAPES[name][0], "--")
    assert "--config=job.yaml" in text.partition("\nworkerPoolSpecs")[0]
    assert "--worker-pool-spec" not in text


def test_everything_that_was_set(capsys):
    spec, text = generated(capsys, *SHAPES["everything set"][0])
    chief, _, ps, _ = spec["workerPoolSpecs"]
    assert chief["containerSpec"] == {
        "imageUri": IMAGE,
        "command": ["python", "-m", "my.task"],
        "args": ["--max_steps=10", "--train_files=gs://b/*.csv", "--x"],
        "env": [
            {"name": "GRPC_FAIL_FAST", "value": "use_caller"},
            {"name": "NAME", "value": "a=b"},
        ],
    }
    assert {"name": "GLIBC_TUNABLES", "value": "glibc.malloc.hugetlb=1"} in ps[
        "containerSpec"
    ]["env"]
    assert [pool.get("diskSpec") for pool in spec["workerPoolSpecs"]] == [
        None,
        {"bootDiskType": "pd-standard", "bootDiskSizeGb": 200},
        None,
        None,
    ]
    machines = [pool["machineSpec"] for pool in spec["workerPoolSpecs"]]
    assert [machine.get("reservationAffinity") for machine in machines] == [
        None,
        {
            "reservationAffinityType": "SPECIFIC_RESERVATION",
            "key": "compute.googleapis.com/reservation-name",
            "values": [RESERVATION],
        },
        None,
        None,
    ]
    del spec["workerPoolSpecs"]
    assert spec == {
        "persistentResourceId": "my-machines",
        "pscInterfaceConfig": {"networkAttachment": "my-attachment"},
        "enableWebAccess": True,
        "scheduling": {
            "timeout": "5400s",
            "restartJobOnWorkerRestart": True,
            "strategy": "SPOT",
            "disableRetries": True,
        },
        "baseOutputDirectory": {"outputUriPrefix": OUTPUT},
        "serviceAccount": "me@my-project.iam.gserviceaccount.com",
        "network": "projects/123/global/networks/default",
        "tensorboard": "projects/1/locations/us-central1/tensorboards/2",
    }
    assert text.startswith("# chief, 2 workers, 1 ps, evaluator. Made by:\n")


def test_a_job_that_waits_for_machines(capsys):
    spec, _ = generated(
        capsys, *SHAPES["all-reduce, queued, any reservation"][0]
    )
    assert spec["scheduling"] == {
        "restartJobOnWorkerRestart": True,
        "strategy": "FLEX_START",
        "maxWaitDuration": "259200s",
    }
    for pool in spec["workerPoolSpecs"]:
        assert pool["machineSpec"]["reservationAffinity"] == {
            "reservationAffinityType": "ANY_RESERVATION"
        }


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], None),
        (["--workers=2", "--ps=1"], None),
        (["--workers=2"], True),
        (["--workers=2", "--no-restart_job_on_worker_restart"], False),
        (["--restart_job_on_worker_restart"], True),
    ],
)
def test_all_reduce_restarts_together(capsys, flags, expected):
    spec, _ = generated(capsys, *flags)
    scheduling = spec.get("scheduling", {})
    assert scheduling.get("restartJobOnWorkerRestart") is expected


def test_reduction_servers_run_googles_image_and_the_others_know(capsys):
    spec, text = generated(
        capsys, *SHAPES["reduction servers and evaluator"][0]
    )
    *others, reduction, evaluator = spec["workerPoolSpecs"]
    assert reduction["containerSpec"] == {"imageUri": REDUCTION}
    for pool in [*others, evaluator]:
        assert {"name": "TFDIST_REDUCTION_SERVERS", "value": "1"} in pool[
            "containerSpec"
        ]["env"]
    assert "google-reduction-server" in text


def test_a_package_instead_of_an_image(capsys):
    flags = [
        f"--base_output_dir={OUTPUT}",
        "--package=gs://my-bucket/tfdist-0.1.0.tar.gz",
        "--executor_image=gcr.io/my-project/python:3.11",
        *["--workers=2", "--ps=1", "--", "--max_steps=5"],
    ]
    assert command.main(flags) == 0
    spec = yaml.safe_load(capsys.readouterr().out)
    assert spec["workerPoolSpecs"][1]["pythonPackageSpec"] == {
        "executorImageUri": "gcr.io/my-project/python:3.11",
        "packageUris": ["gs://my-bucket/tfdist-0.1.0.tar.gz"],
        "pythonModule": "trainer.task",
        "args": ["--max_steps=5"],
        "env": [{"name": "GRPC_FAIL_FAST", "value": "use_caller"}],
    }
    assert as_proto(spec) == with_int64_as_text(spec)


def test_tpu_tells_what_the_image_needs(capsys):
    _, text = generated(capsys, *SHAPES["TPU v3"][0])
    assert "has no package for TPUs" in text


# --- Tuning ------------------------------------------------------------------

TUNING = [
    "--metric=auc",
    "--parameter=learning_rate=double:0.001:1:log",
    "--parameter=embedding_dim=int:4:64",
    "--parameter=batch_size=discrete:64,128,256",
    "--parameter=hidden_units=categorical:64|128,64",
    *["--max_trials=20", "--parallel_trials=4"],
]


@pytest.mark.parametrize("shape", SHAPES)
def test_tuning(capsys, shape):
    flags = [
        *TUNING,
        *("--goal=minimize", "--algorithm=random", "--stopping=median"),
    ]
    job, text = generated(capsys, *flags, *SHAPES[shape][0])
    plain, _ = generated(capsys, *SHAPES[shape][0])
    assert as_proto(job) == with_int64_as_text(job)
    assert job["trialJobSpec"] == plain
    assert (job["maxTrialCount"], job["parallelTrialCount"]) == (20, 4)
    assert job["studySpec"]["algorithm"] == "RANDOM_SEARCH"
    assert job["studySpec"]["medianAutomatedStoppingSpec"] == {}
    assert job["studySpec"]["metrics"] == [
        {"metricId": "auc", "goal": "MINIMIZE"}
    ]
    assert "gcloud ai hp-tuning-jobs create" in text
    assert text.startswith("# 20 trials of ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "a=double:1e-5:1",
            {"doubleValueSpec": {"minValue": 1e-5, "maxValue": 1}},
        ),
        ("a=int:1:3:log", {"integerValueSpec": {"minValue": 1, "maxValue": 3}}),
        ("a=discrete:1,2.5", {"discreteValueSpec": {"values": [1, 2.5]}}),
        ("a=categorical:x|y", {"categoricalValueSpec": {"values": ["x", "y"]}}),
    ],
)
def test_parameter(text, expected):
    parsed = parameter(text)
    assert parsed.pop("parameterId") == "a"
    parsed.pop("scaleType", None)
    assert parsed == expected


@pytest.mark.parametrize(
    "values",
    [
        "double:0.1:1:log:linear",
        "double:1:0.1",
        "double:0:1:log",
        "int:0:8:reverse_log",
        "categorical:",
    ],
)
def test_parameter_without_values(values):
    with pytest.raises(ValueError, match="must be name=double:MIN:MAX"):
        parameter(f"a={values}")


# --- The text ----------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=12), max_size=4),
    st.dictionaries(
        st.from_regex(r"[B-Z_][A-Za-z0-9_]{0,8}", fullmatch=True), st.text()
    ),
)
def test_any_arguments_survive_the_yaml(args, env):
    job = Job(
        image=IMAGE, base_output_dir=OUTPUT, workers=2, ps=1, args=args, env=env
    )
    spec = job.spec()
    text = command.to_yaml(
        spec, shape=job.shape, made_by=args, submit=[*args, "--config=job.yaml"]
    )
    assert yaml.safe_load(text) == spec


@pytest.mark.parametrize("value", ["1e-3", "1E5", "0o17", "y", "N", "-.5e3"])
def test_what_gcloud_would_take_for_a_number_is_quoted(value):
    """`yaml` reads it as a string without quotes; gcloud and Go do not."""
    text = command.to_yaml(
        Job(image=IMAGE, base_output_dir=OUTPUT, args=["--a", value]).spec(),
        shape="chief",
        made_by=[],
        submit=[],
    )
    assert f"- '{value}'\n" in text


@pytest.mark.parametrize(
    "values",
    [["--a=1", "--b"], ["a,b:c", "d"], [",:;|!~%@", "x"], ["^a^b", "c"]],
)
def test_gcloud_splits_a_list_where_it_was_joined(values):
    delimiter, joined = ",", job_file._list_flag(values)
    if joined.startswith("^"):  # `gcloud topic escaping`.
        delimiter, joined = joined[1:].split("^", 1)
    assert joined.split(delimiter) == values


def test_a_word_of_several_lines_is_read_by_bash_as_it_was():
    word = "é\n\\n'\t$x\u2028"
    text = command.to_yaml(
        Job(image=IMAGE, base_output_dir=OUTPUT).spec(),
        shape="chief",
        made_by=["printf", "%s", word],
        submit=[],
    )
    line = text.splitlines()[1].removeprefix("#")
    for locale in ("C", "C.UTF-8"):
        done = subprocess.run(
            ["bash", "-c", line],
            env={**os.environ, "LC_ALL": locale},
            capture_output=True,
            check=True,
        )
        assert done.stdout.decode() == word


@settings(deadline=None)
@given(
    st.builds(
        dict,
        workers=st.integers(0, 3),
        ps=st.integers(0, 2),
        reduction_servers=st.integers(0, 2),
        evaluator=st.booleans(),
        spot=st.booleans(),
        machine=st.builds(
            Machine,
            machine_type=st.sampled_from(
                [
                    N1,
                    "n1-standard-32",
                    "a2-highgpu-1g",
                    "cloud-tpu",
                    "e2-highmem-2",
                ]
            ),
            accelerator_type=st.sampled_from(
                [None, "NVIDIA_TESLA_T4", "NVIDIA_TESLA_V100", "TPU_V3"]
            ),
            accelerator_count=st.sampled_from([0, 1, 2, 8, 32]),
        ),
    )
)
def test_a_job_is_refused_or_understood_by_the_service(shape):
    try:
        spec = Job(image=IMAGE, base_output_dir=OUTPUT, **shape).spec()
    except ValueError:
        return
    assert as_proto(spec) == with_int64_as_text(spec)
    assert [len(spec["workerPoolSpecs"]) <= 4, spec["workerPoolSpecs"][0]]


# --- Bad input ---------------------------------------------------------------

WORKERS = ["--workers=2", "--ps=1"]

# name: (flags, part of the message)
BAD = {
    "image and package": (
        ["--package=gs://b/t.tar.gz"],
        "Pass the program to run as exactly one of `image`",
    ),
    "no image": (["--image="], "exactly one of `image` and `packages`"),
    "ps without workers": (["--ps=2"], "Argument `ps` needs `workers`"),
    "a GPU that is not": (
        ["--accelerator=NVIDIA_A1000"],
        "Invalid enum value NVIDIA_A1000 for enum type",
    ),
    "no bucket": (["--base_output_dir="], "--base_output_dir=gs://bucket/"),
    "a bucket without gs://": (
        ["--base_output_dir=my-bucket/out"],
        "must be gs://bucket/folder. Received: 'my-bucket/out'",
    ),
    "an empty folder in the path": (
        ["--base_output_dir=gs://my-bucket//out"],
        "must be gs://bucket/folder",
    ),
    "a package without a place": (
        ["--image=", "--package=gs://bucket/t.tar.gz"],
        "Argument `packages` needs an `executor_image`",
    ),
    "an image for packages, and no packages": (
        ["--executor_image=python:3.11"],
        "install them in. With `image`, omit it",
    ),
    "a prebuilt image": (
        [
            *["--image=", "--package=gs://bucket/t.tar.gz"],
            "--executor_image=us-docker.pkg.dev/vertex-ai/training/"
            "tf-gpu.2-17.py310:latest",
        ],
        "tfdist needs Python 3.11 or later, but the newest prebuilt image",
    ),
    "spot with a TPU pod": (
        ["--machine=cloud-tpu", "--accelerator=TPU_V2:32", "--spot"],
        "(a pod) cannot be a spot VM",
    ),
    "spot with a v5e pod": (
        ["--machine=ct5lp-hightpu-4t", "--tpu_topology=4x4", "--spot"],
        "(a pod) cannot be a spot VM",
    ),
    "reduction servers and ps": (
        [*WORKERS, "--reduction_servers=1"],
        "Argument `reduction_servers` needs `workers` and excludes `ps`",
    ),
    "reduction servers without GPUs": (
        ["--workers=2", "--reduction_servers=1"],
        "the chief and the workers must have GPUs",
    ),
    "several GPUs for a worker of parameter servers": (
        [*WORKERS, "--accelerator=NVIDIA_TESLA_T4:2"],
        "workerPoolSpecs[1] has several GPUs on each machine, but with "
        "parameter servers a worker uses only one",
    ),
    "several GPUs for an evaluator": (
        ["--evaluator", "--evaluator_accelerator=NVIDIA_TESLA_T4:2"],
        "workerPoolSpecs[3] has several GPUs; an evaluator uses only one",
    ),
    "spot and a queue": (
        ["--spot", "--flex_start"],
        "Set at most one of `flex_start` and `spot`",
    ),
    "a longest wait without a queue": (
        ["--max_wait=1h"],
        "(--max_wait) requires the strategy FLEX_START",
    ),
    "a reservation of a job with a gap": (
        ["--evaluator", "--reservation=any"],
        "gcloud accepts this only in flags",
    ),
    "a variable of the service": (
        ["--env=TF_CONFIG={}"],
        "the variable TF_CONFIG is set by the service itself",
    ),
    "a variable without value": (["--env=A"], "must be NAME=VALUE"),
    "a number of workers": (["--workers=-1"], "an integer from 0 to 1000"),
    "a timeout without unit": (["--timeout=90"], "must have the form 90m"),
    "an unknown flag": (["--worker=1"], "unrecognized arguments: --worker=1"),
    "a metric alone": (["--metric=auc"], "Pass both of --metric and"),
    "how to tune, and nothing to tune": (
        ["--max_trials=3", "--goal=minimize", "--stopping=median"],
        "--goal requires --metric.\n"
        "--max_trials requires --metric.\n"
        "--stopping requires --metric.",
    ),
    "how to search, and nothing to tune": (
        ["--parallel_trials=3", "--algorithm=random"],
        "--parallel_trials requires --metric.\n--algorithm requires --metric.",
    ),
    "machines of roles that the job lacks": (
        [
            *["--workers=1", "--chief_machine=a", "--ps_machine=a"],
            *["--evaluator_machine=a", "--evaluator_accelerator=TPU_V3:8"],
            "--reduction_machine=a",
        ],
        "--chief_machine requires --ps.\n"
        "--ps_machine requires --ps.\n"
        "--evaluator_machine requires --evaluator.\n"
        "--evaluator_accelerator requires --evaluator.\n"
        "--reduction_machine requires --reduction_servers.",
    ),
    "a bad parameter": (
        ["--metric=auc", "--parameter=a=double:1"],
        "Argument `parameter` must be name=double:MIN:MAX[:log]",
    ),
    "a tuned flag that is given": (
        [*TUNING, "--", "--learning_rate=0.1"],
        "Remove learning_rate from the args",
    ),
    "a tuned flag with a bad name": (
        ["--metric=auc", "--parameter=learning-rate=int:1:2"],
        "'learning-rate' is not named like a trainer flag",
    ),
    "variables of a job with a gap": (
        ["--evaluator", "--env=A=b"],
        "gcloud accepts this only in flags",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(capsys, name):
    flags, message = BAD[name]
    with pytest.raises(SystemExit) as info:
        command.main([*COMMON, *flags])
    out, err = capsys.readouterr()
    assert info.value.code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""  # Nothing is left in job.yaml.


def test_a_default_can_be_said_of_what_the_job_lacks(capsys):
    plain, _ = generated(capsys)
    flags = [f"--ps_machine={N1}", f"--reduction_machine={HIGHCPU}"]
    flags += ["--max_trials=10", "--parallel_trials=2", "--goal=maximize"]
    assert generated(capsys, *flags)[0] == plain


def test_every_problem_is_listed(capsys):
    with pytest.raises(SystemExit):
        command.main([*COMMON, "--env=TF_CONFIG={}", "--base_output_dir=b"])
    err = capsys.readouterr().err
    assert "workerPoolSpecs[0]: the variable TF_CONFIG is set by" in err
    assert "outputUriPrefix must be gs://bucket/folder" in err


# --- Files that somebody wrote -----------------------------------------------


def good():
    return Job(
        image=IMAGE, base_output_dir=OUTPUT, workers=2, ps=1, evaluator=True
    ).spec()


def change(path, value):
    """A good job in which one thing is another."""
    spec = good()
    *parents, last = path
    place = spec
    for key in parents:
        place = place[key]
    place[last] = value
    return spec


POOLS = "workerPoolSpecs"
HAND_WRITTEN = {
    "snake case": (
        change(["base_output_directory"], {}),
        "base_output_directory is unknown. Use baseOutputDirectory",
    ),
    "a typo": (
        change(["scheduling"], {"time": "1s"}),
        'has no field named "time" at "CustomJobSpec.scheduling"',
    ),
    "a mapping for a list": (
        change([POOLS], good()[POOLS][0]),
        "repeated field workerPoolSpecs must be in []",
    ),
    "a wrapped job": ({"jobSpec": good()}, 'has no field named "jobSpec"'),
    "a number as a variable": (
        change([POOLS, 0, "containerSpec", "env", 0, "value"], 1),
        "workerPoolSpecs: env: value: expected string or bytes-like object, "
        "got 'int'. Put it in quotes.",
    ),
    "true as a number": (
        change([POOLS, 1, "replicaCount"], True),
        "Bool value True is not acceptable for integer field",
    ),
    "two evaluators": (
        change([POOLS, 3, "replicaCount"], 2),
        "the evaluator: use one replica at most",
    ),
    "ps without workers": (
        change([POOLS, 1], {}),
        "workerPoolSpecs[2] requires workers in workerPoolSpecs[1]",
    ),
    "no chief": (
        change([POOLS, 0], {}),
        "must be a list of pools, with the chief's first",
    ),
    "no pools": ({}, "must be a list of pools, with the chief's first"),
    "image and package": (
        change([POOLS, 0, "pythonPackageSpec"], {"pythonModule": "a.b"}),
        'should not have multiple "task" oneof fields',
    ),
    "strategy": (
        change(["scheduling"], {"strategy": "PREEMPTIBLE"}),
        "Invalid enum value PREEMPTIBLE",
    ),
    "timeout": (
        change(["scheduling"], {"timeout": "24h"}),
        "scheduling: timeout: Duration must end with letter",
    ),
    "reduction servers that nobody knows of": (
        change([POOLS, 2, "containerSpec", "imageUri"], REDUCTION),
        'must set the variable TFDIST_REDUCTION_SERVERS to "1"',
    ),
    "a list": ([], "The file must be a mapping. Received: []"),
    "a bad goal": (
        {"studySpec": {"metrics": [{"goal": "MAX"}]}, "trialJobSpec": good()},
        "Invalid enum value MAX",
    ),
    "a field of a trial": (
        {"studySpec": {}, "trialJobSpec": {"worker_pool_specs": []}},
        "trialJobSpec.worker_pool_specs is unknown. Use workerPoolSpecs",
    ),
    "nothing": (None, "The file must be a mapping. Received: None"),
    "a folder of all trials": (
        {
            "studySpec": {},
            "trialJobSpec": change(
                [POOLS, 0, "containerSpec", "args"], ["--model_dir=gs://b/m"]
            ),
        },
        "Remove model_dir from the args: all trials would share it",
    ),
    "a trial that is wrong": (
        {"studySpec": {}, "trialJobSpec": change([POOLS, 0], {})},
        "trialJobSpec: workerPoolSpecs must be",
    ),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_check_of_a_file(tmp_path, capsys, name):
    spec, message = HAND_WRITTEN[name]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec))
    with pytest.raises(SystemExit) as info:
        command.main([f"--check={path}"])
    assert info.value.code == 2
    assert message in capsys.readouterr().err


def test_check_of_a_good_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(good()))
    assert command.main([f"--check={path}"]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is not valid YAML"), (None, "No such file or directory")],
)
def test_check_of_no_file(tmp_path, capsys, text, message):
    path = tmp_path / "job.yaml"
    if text:
        path.write_text(text)
    with pytest.raises(SystemExit):
        command.main([f"--check={path}"])
    assert message in capsys.readouterr().err


# --- Without the service's types ---------------------------------------------


@pytest.fixture
def no_types(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform_v1", None)


def test_what_was_not_checked_is_said(no_types):
    job = Job(image=IMAGE, base_output_dir=OUTPUT)
    with pytest.warns(UserWarning, match=r"not checked.*tfdist\[vertex\]"):
        assert job.spec()["baseOutputDirectory"] == {"outputUriPrefix": OUTPUT}


@pytest.mark.filterwarnings("ignore:The names and values")
@pytest.mark.parametrize("name", SHAPES)
def test_the_job_is_the_same(name, capsys, monkeypatch):
    expected = generated(capsys, *SHAPES[name][0])
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform_v1", None)
    assert generated(capsys, *SHAPES[name][0]) == expected


@pytest.mark.filterwarnings("ignore:The names and values")
def test_tfdists_own_rules_hold(no_types):
    with pytest.raises(ValueError, match="must be gs://bucket/folder"):
        Job(image=IMAGE, base_output_dir="my-bucket").spec()


@pytest.mark.filterwarnings("ignore:The names and values")
def test_a_file_is_not_checked_by_halves(no_types, tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(good()))
    with pytest.raises(SystemExit) as info:
        command.main([f"--check={path}"])
    assert info.value.code == 2
    assert 'pip install "tfdist[vertex]"' in capsys.readouterr().err


# --- The shipped files -------------------------------------------------------

BUILD = ROOT / "vertex" / "cloudbuild.yaml"  # No job; see test_gcloud.py.
FILES = sorted(set((ROOT / "vertex").glob("*.yaml")) - {BUILD})


def test_there_are_files():
    names = {path.name for path in FILES}
    assert names >= {
        *("ps.yaml", "all_reduce.yaml", "one_machine.yaml", "tuning.yaml")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_is_what_the_command_in_it_makes(path, capsys):
    text = path.read_text()
    made_by = text.partition("# Submit")[0].split("tfdist.vertex", 1)[1]
    argv = shlex.split(re.sub(r"\\\n#", "", made_by))
    assert command.main(argv) == 0
    assert capsys.readouterr().out == text
    assert command.main([f"--check={path}"]) == 0
    spec = yaml.safe_load(text)
    assert as_proto(spec) == with_int64_as_text(spec)


# --- The module --------------------------------------------------------------


def test_copy_export(tmp_path, monkeypatch):
    """On a store: tests/_tf/test_storage.py."""
    root = str(tmp_path)
    older, newer = f"{root}/export/1", f"{root}/export/2/"
    for folder, files in (
        (older, ["saved_model.pb", "variables/old", "assets/words"]),
        (newer, ["saved_model.pb", "fingerprint.pb", "variables/new"]),
    ):
        for name in files:
            path = os.path.join(folder, name)
            tf.io.gfile.makedirs(os.path.dirname(path))
            tf.io.gfile.GFile(path, "w").write(path)
    directory = f"{root}/model/"  # As the service writes it.
    copy_export(older, directory)
    tf.io.gfile.GFile(f"{root}/model/mine", "w").write("")
    copied, copy_file = [], tf.io.gfile.copy
    monkeypatch.setattr(
        tf.io.gfile,
        "copy",
        lambda *args, **kwargs: (
            copied.append(args[0]) or copy_file(*args, **kwargs)
        ),
    )
    copy_export(newer, directory)
    assert copied[-1] == f"{newer}saved_model.pb"
    found = {
        os.path.join(folder, name).removeprefix(directory)
        for folder, _, names in tf.io.gfile.walk(directory)
        for name in names
    }
    assert {name.lstrip("/") for name in found} == {
        *("saved_model.pb", "fingerprint.pb", "variables/new", "mine")
    }
    with tf.io.gfile.GFile(f"{root}/model/saved_model.pb") as file:
        assert file.read() == f"{newer}saved_model.pb"
    copy_export(newer, newer.rstrip("/"))  # It is there.
    assert tf.io.gfile.exists(f"{newer}variables/new")
    with pytest.raises(ValueError, match="must be a SavedModel"):
        copy_export(f"{root}/export", directory)


def test_flags_that_are_one_string():
    """They were taken for as many flags as it has letters."""
    with pytest.raises(TypeError, match="`args` must be a list"):
        Job(image=IMAGE, base_output_dir=OUTPUT, args="--max_steps=10")
    with pytest.raises(TypeError, match=r"`packages` must be .*='gs://b/a.whl"):
        Job(
            packages="gs://b/a.whl",
            executor_image=IMAGE,
            base_output_dir=OUTPUT,
        )
    with pytest.raises(TypeError, match="`egress` must be a list"):
        kubernetes.Job(image=IMAGE, egress="10.0.0.0/8:443")


def test_tuning_of_the_library():
    tuning = Tuning(metric="auc", parameters=[parameter("a=int:1:2")])
    with pytest.raises(ValueError, match="must be gs://bucket/folder"):
        tuning.job(Job(image=IMAGE, base_output_dir="my-bucket"))


def test_it_works_without_tensorflow():
    code = (
        "import sys; from tfdist.vertex.command import main; "
        f"main({COMMON}); sys.exit('tensorflow' in sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )

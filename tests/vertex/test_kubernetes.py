import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tfdist.cluster.spec import Cluster
from tfdist.vertex import kubernetes
from tfdist.vertex.kubernetes import Job

ROOT = Path(__file__).parents[2]
COMMON = ["--image=registry/trainer:1"]

# name: (flags, role -> number of its tasks)
SHAPES = {
    "one machine": ([], {"chief": 1}),
    "one machine with GPUs": (["--gpus=4"], {"chief": 1}),
    "and an evaluator": (["--evaluator"], {"chief": 1, "evaluator": 1}),
    "all-reduce": (["--workers=3", "--gpus=1"], {"chief": 1, "worker": 3}),
    "ps": (
        ["--workers=4", "--ps=2", "--gpus=1"],
        {"chief": 1, "worker": 4, "ps": 2},
    ),
    "ps and evaluator": (
        [
            *["--workers=2", "--ps=1", "--evaluator", "--name=clicks-7"],
            *["--namespace=training", "--cpu=500m", "--memory=4Gi"],
            *[
                "--service_account=trainer",
                "--max_restarts=2",
                "--",
                "--a=$(B)",
            ],
        ],
        {"chief": 1, "worker": 2, "ps": 1, "evaluator": 1},
    ),
}


def generated(capsys, *flags):
    """The objects that the command prints for these flags, and the text."""
    assert kubernetes.main([*COMMON, *flags]) == 0
    text = capsys.readouterr().out
    return list(yaml.safe_load_all(text)), text


def pods(objects):
    """Address -> environment of each pod, as Kubernetes makes them."""
    (service,) = (o for o in objects if o["kind"] == "Service")
    assert service["spec"]["clusterIP"] == "None"
    result = {}
    for job in (o for o in objects if o["kind"] == "Job"):
        template = job["spec"]["template"]
        labels, spec = template["metadata"]["labels"], template["spec"]
        assert spec["subdomain"] == service["metadata"]["name"]
        assert service["spec"]["selector"].items() <= labels.items()
        domain = f"{spec['subdomain']}.{job['metadata']['namespace']}.svc"
        for index in range(job["spec"]["completions"]):
            address = f"{job['metadata']['name']}-{index}.{domain}:2222"
            result[address] = environment(spec["containers"][0], index)
    return result


def environment(container, index):
    """The variables of a container; each may use those before it."""
    values = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            path = entry["valueFrom"]["fieldRef"]["fieldPath"]
            assert path.endswith("['batch.kubernetes.io/job-completion-index']")
            values[entry["name"]] = str(index)
        else:
            values[entry["name"]] = re.sub(
                r"\$\((\w+)\)", lambda m: values[m[1]], entry["value"]
            )
    return values


def containers(objects):
    """Role -> container, of either kind of job."""
    for thing in objects:
        if thing["kind"] == "Job":
            role = thing["metadata"]["name"].rpartition("-")[2]
            yield role, thing["spec"]["template"]["spec"]["containers"][0]
        elif thing["kind"] == "TFJob":
            for role, spec in thing["spec"]["tfReplicaSpecs"].items():
                yield role.lower(), spec["template"]["spec"]["containers"][0]


# --- Plain objects -----------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_every_pod_knows_its_place(capsys, name):
    flags, replicas = SHAPES[name]
    objects, _ = generated(capsys, *flags)
    tasks = pods(objects)
    assert len(tasks) == sum(replicas.values())
    told = {
        address: Cluster.from_env(variables)
        for address, variables in tasks.items()
    }
    for address, cluster in told.items():
        assert cluster.address == address
        assert cluster.has_evaluator == ("evaluator" in replicas)
        assert cluster.num_ps == replicas.get("ps", 0)
        assert cluster.num_workers == replicas.get("worker", 0)
    jobs = [cluster.task_type for cluster in told.values()]
    assert {job: jobs.count(job) for job in jobs} == replicas


def test_every_host_name_is_a_label_of_dns(capsys):
    objects, _ = generated(
        capsys, f"--name={'a' * 40}", "--workers=1000", "--ps=1", "--evaluator"
    )
    for address in pods(objects):
        assert all(len(label) <= 63 for label in address.split("."))


def test_only_the_job_reaches_itself(capsys):
    for kind in ("plain", "tfjob"):
        objects, text = generated(capsys, f"--kind={kind}", "--workers=1")
        (policy,) = (o for o in objects if o["kind"] == "NetworkPolicy")
        wanted = policy["spec"]["podSelector"]["matchLabels"]
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        assert policy["spec"]["ingress"] == [
            {"from": [{"podSelector": {"matchLabels": wanted}}]}
        ]
        templates = re.findall(r"tfdist-job: (\S+)", text)
        assert set(templates) == set(wanted.values())
        assert "authenticate nobody" in text
        assert "automountServiceAccountToken: false" in text


def test_a_mistake_of_the_chief_ends_its_job(capsys):
    objects, _ = generated(capsys, *SHAPES["ps"][0])
    failures = {
        job["metadata"]["name"]: job["spec"]["podFailurePolicy"]["rules"]
        for job in objects
        if job["kind"] == "Job"
    }
    actions = {
        name: [rule["action"] for rule in rules]
        for name, rules in failures.items()
    }
    assert actions == {
        "tfdist-chief": ["Ignore", "FailJob"],
        "tfdist-worker": ["Ignore"],
        "tfdist-ps": ["Ignore"],
    }
    # What the trainer and `tfdist.launch` take for permanent.
    codes = failures["tfdist-chief"][1]["onExitCodes"]["values"]
    assert all(0 < code < 128 for code in codes)
    assert all(
        job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
        for job in objects
        if job["kind"] == "Job"
    )


# --- Both kinds --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "tfjob"])
@pytest.mark.parametrize("name", SHAPES)
def test_containers(capsys, kind, name):
    flags, replicas = SHAPES[name]
    objects, text = generated(capsys, f"--kind={kind}", *flags)
    found = dict(containers(objects))
    assert set(found) == set(replicas)
    for role, container in found.items():
        assert container["name"] == "tensorflow"
        assert container["image"] == "registry/trainer:1"
        assert container["command"] == ["python", "-m", "trainer.task"]
        (port,) = container["ports"]
        assert port["containerPort"] == 2222
        variables = {entry["name"] for entry in container["env"]}
        assert ("TF_CONFIG" in variables) == (kind == "plain")
        assert ("GLIBC_TUNABLES" in variables) == (role == "ps")
        computes = role == "worker" or (
            role == "chief" and "ps" not in replicas
        )
        gpus = container["resources"].get("limits", {}).get("nvidia.com/gpu", 0)
        assert bool(gpus) == (computes and any("--gpus" in f for f in flags))
    assert "&id" not in text


def test_everything_that_was_set(capsys):
    objects, text = generated(capsys, *SHAPES["ps and evaluator"][0])
    for thing in objects:
        assert thing["metadata"]["namespace"] == "training"
        assert thing["metadata"]["name"].startswith("clicks-7")
    (chief,) = (o for o in objects if o["metadata"]["name"] == "clicks-7-chief")
    assert chief["spec"]["backoffLimit"] == 2
    pod = chief["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "trainer"
    container = pod["containers"][0]
    assert container["args"] == ["--a=$$(B)"]  # Not a variable.
    assert container["resources"] == {
        "requests": {"cpu": "500m", "memory": "4Gi"}
    }
    assert text.startswith("# chief, 2 workers, 1 ps, evaluator. Start it")


def test_tfjob(capsys):
    flags = ["--kind=tfjob", *SHAPES["ps and evaluator"][0]]
    objects, _ = generated(capsys, *flags)
    assert [o["kind"] for o in objects] == ["NetworkPolicy", "TFJob"]
    job = objects[1]
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert job["spec"]["runPolicy"] == {
        "cleanPodPolicy": "Running",
        "backoffLimit": 2,
    }
    specs = job["spec"]["tfReplicaSpecs"]
    assert {
        name: (spec["replicas"], spec["restartPolicy"])
        for name, spec in specs.items()
    } == {
        "Chief": (1, "ExitCode"),
        "Worker": (2, "ExitCode"),
        "PS": (1, "Always"),
        "Evaluator": (1, "OnFailure"),
    }


# --- Bad input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ps=1"], "Argument `ps` needs `workers`"),
        (["--name=Clicks"], "must be at most 40 small letters"),
        ([f"--name={'a' * 41}"], "must be at most 40 small letters"),
        (["--image="], "Argument `image` must name the container image"),
        (["--workers=-1"], "must be an integer from 0 to 1000"),
        (["--kind=job"], "invalid choice: 'job'"),
    ],
)
def test_bad_input(capsys, flags, message):
    with pytest.raises(SystemExit) as info:
        kubernetes.main([*COMMON, *flags])
    out, err = capsys.readouterr()
    assert (info.value.code, out) == (2, "")
    assert message in err


def test_no_image(capsys):
    with pytest.raises(SystemExit):
        kubernetes.main([])
    assert "Argument `image` must name" in capsys.readouterr().err


# --- The module --------------------------------------------------------------


def test_it_starts_without_tensorflow():
    code = (
        "import sys, tfdist.kubernetes as k; sys.exit('numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_tf_config_is_that_of_the_cluster():
    job = Job(name="a", image="i", workers=1, ps=1, evaluator=True)
    address = "a-worker-0.a.default.svc:2222"
    told = json.loads(pods(job.plain())[address]["TF_CONFIG"])
    assert told == json.loads(job.cluster.tf_config("worker", 0))

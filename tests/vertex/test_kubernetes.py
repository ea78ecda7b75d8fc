import copy
import ipaddress
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
DOCKERFILE = ROOT / "vertex" / "Dockerfile"
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
                "--a=$(B)$$c",
                "--rate",
                "1e-3",
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


def as_the_controller_makes_them(jobset):
    """The headless Service and the Jobs of a JobSet."""
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    metadata, spec = jobset["metadata"], copy.deepcopy(jobset["spec"])
    subdomain = spec["network"]["subdomain"]
    assert spec["network"]["enableDNSHostnames"]
    service = {"clusterIP": "None", "selector": {}}
    yield {
        "kind": "Service",
        "metadata": {**metadata, "name": subdomain},
        "spec": service,
    }
    for replicated in spec["replicatedJobs"]:
        for number in range(replicated["replicas"]):
            name = f"{metadata['name']}-{replicated['name']}-{number}"
            job = copy.deepcopy(replicated["template"])
            job["spec"]["template"]["spec"]["subdomain"] = subdomain
            yield {"kind": "Job", "metadata": {**metadata, "name": name}, **job}


def pods(objects):
    """Address -> environment of each pod, as Kubernetes makes them."""
    for jobset in [o for o in objects if o["kind"] == "JobSet"]:
        objects = [*as_the_controller_makes_them(jobset)]
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


def templates(objects):
    """Role -> spec of its pods, of any kind of job."""
    for thing in objects:
        if thing["kind"] == "Job":
            role = thing["metadata"]["name"].rpartition("-")[2]
            yield role, thing["spec"]["template"]["spec"]
        elif thing["kind"] == "JobSet":
            for job in thing["spec"]["replicatedJobs"]:
                spec = job["template"]["spec"]["template"]["spec"]
                yield job["name"], spec
        elif thing["kind"] == "TFJob":
            for role, spec in thing["spec"]["tfReplicaSpecs"].items():
                yield role.lower(), spec["template"]["spec"]


def containers(objects):
    """Role -> container, of any kind of job."""
    for role, spec in templates(objects):
        yield role, spec["containers"][0]


# --- Plain objects -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "jobset"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_pod_knows_its_place(capsys, kind, name):
    flags, replicas = SHAPES[name]
    objects, _ = generated(capsys, f"--kind={kind}", *flags)
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


@pytest.mark.parametrize("kind", ["plain", "jobset"])
def test_every_host_name_is_a_label_of_dns(capsys, kind):
    flags = ["--workers=1000", "--ps=1", "--evaluator", f"--kind={kind}"]
    objects, _ = generated(capsys, f"--name={'a' * 40}", *flags)
    for address in pods(objects):
        assert all(len(label) <= 63 for label in address.split("."))


def test_a_jobset_is_done_when_its_chief_is(capsys):
    objects, _ = generated(capsys, "--kind=jobset", *SHAPES["ps"][0])
    assert [o["kind"] for o in objects] == ["NetworkPolicy", "JobSet"]
    spec = objects[1]["spec"]
    assert {*spec} == {
        *("network", "successPolicy", "failurePolicy", "replicatedJobs")
    }
    assert spec["successPolicy"] == {
        "operator": "All",
        "targetReplicatedJobs": ["chief"],
    }
    assert spec["failurePolicy"] == {"maxRestarts": 0}
    plain, _ = generated(capsys, *SHAPES["ps"][0])
    for job, alone in zip(spec["replicatedJobs"], plain[2:], strict=True):
        assert {*job} == {"name", "replicas", "template"}
        # The controller sets the subdomain; addresses have a number more.
        mine, theirs = job["template"]["spec"], alone["spec"]
        env = mine["template"]["spec"]["containers"][0]["env"]
        assert ".tfdist.default.svc:2222" in env[-1]["value"]
        env[-1]["value"] = env[-1]["value"].replace("-0-", "-")
        assert mine == theirs


def policy(objects):
    (found,) = (o for o in objects if o["kind"] == "NetworkPolicy")
    return found["spec"]


def allows(spec, address, port, protocol="TCP"):
    """Whether a pod may connect to a host outside of the cluster."""
    for rule in spec["egress"]:
        blocks = [
            x["ipBlock"]["cidr"] for x in rule.get("to", []) if "ipBlock" in x
        ]
        there = "to" not in rule or any(
            ipaddress.ip_address(address) in ipaddress.ip_network(block)
            for block in blocks
        )
        wanted = {"protocol": protocol, "port": port}
        if there and ("ports" not in rule or wanted in rule["ports"]):
            return True
    return False


def test_ways_out_of_the_pods(capsys):
    closed = policy(generated(capsys, "--", "--model_dir=/mnt/job")[0])
    assert allows(closed, "10.0.0.10", 53, "UDP")
    assert allows(closed, "169.254.20.10", 53)
    assert not allows(closed, "142.250.1.207", 443)
    assert not allows(closed, "169.254.169.254", 80)
    google = policy(generated(capsys, "--", "--model_dir=gs://b/job")[0])
    assert allows(google, "142.250.1.207", 443)
    assert allows(google, "169.254.169.254", 80)
    assert allows(google, "169.254.169.252", 988)
    assert not allows(google, "142.250.1.207", 80)
    flags = ["--egress=199.36.153.8/30:443", "--egress=10.1.0.0/16:9000"]
    own = policy(generated(capsys, *flags, "--", "--model_dir=gs://b/job")[0])
    assert allows(own, "199.36.153.9", 443)
    assert allows(own, "10.1.2.3", 9000)
    assert allows(own, "169.254.169.254", 80)
    assert not allows(own, "142.250.1.207", 443)


def test_only_the_job_reaches_itself(capsys):
    for kind in ("plain", "jobset", "tfjob"):
        objects, text = generated(capsys, f"--kind={kind}", "--workers=1")
        spec = policy(objects)
        wanted = spec["podSelector"]["matchLabels"]
        own = [{"podSelector": {"matchLabels": wanted}}]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        assert spec["ingress"] == [{"from": own}]
        assert {"to": own} in spec["egress"]
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


@pytest.mark.parametrize("kind", ["plain", "jobset", "tfjob"])
def test_pods_have_no_rights(capsys, kind):
    flags = [f"--kind={kind}", *SHAPES["ps and evaluator"][0]]
    found = dict(templates(generated(capsys, *flags)[0]))
    assert set(found) == {"chief", "worker", "ps", "evaluator"}
    for pod in found.values():
        user = pod["securityContext"].pop("runAsUser")
        assert f"USER {user}:{user}\n" in DOCKERFILE.read_text()
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
        assert volume == {"name": mount["name"], "emptyDir": {}}
        assert mount["mountPath"] == "/tmp"
        # Keras and pip's kin write below it.
        assert {"name": "HOME", "value": "/tmp"} in container["env"]


@pytest.mark.parametrize("kind", ["plain", "jobset", "tfjob"])
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
        assert ("TF_CONFIG" in variables) == (kind != "tfjob")
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
    # Not a variable, and not the number 0.001.
    assert container["args"] == ["--a=$$(B)$$$$c", "--rate", "1e-3"]
    assert "'1e-3'" in text
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
        (["--name=Clicks"], "must be at most 40 lowercase letters"),
        ([f"--name={'a' * 41}"], "must be at most 40 lowercase letters"),
        (
            ["--namespace=A b"],
            "`namespace` must be at most 63 lowercase letters",
        ),
        (["--image="], "Argument `image` must name the container image"),
        (["--workers=-1"], "must be an integer from 0 to 1000"),
        (["--kind=job"], "invalid choice: 'job'"),
        (
            ["--workers=1", "--ps=1", "--gpus=2"],
            "must be at most 1 with `ps`, because a worker then uses only one",
        ),
        (["--egress=10.0.0.1"], "`egress` must have the form 10.0.0.0/8:443"),
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
    assert told == json.loads(job.cluster().tf_config("worker", 0))

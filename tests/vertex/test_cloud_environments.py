"""The trainer in the environments of real services, as real processes.

Recorded were the variables; each task gets a port of its own in place of 2222,
because here all hosts are one.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
import yaml

from tests.trainer.test_task_end_to_end import data_flags, write_csv
from tests.vertex.test_kubernetes import pods
from tfdist.estimator import tuning
from tfdist.hooks.events import read_scalars
from tfdist.vertex.kubernetes import Job

ROOT = Path(__file__).parents[2]
MAX_STEPS = 40


def can_map_names():
    command = ["unshare", "-rnm", "mount", "--bind", "/etc/hosts", "/etc/hosts"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(command, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not can_map_names(),
    reason="the system refuses a namespace in which host names are mapped",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("job")
    write_csv(path / "train.csv", 500, seed=0)
    write_csv(path / "eval.csv", 100, seed=1)
    return path


# --- What the services set ---------------------------------------------------

ID = "1d969d3ba6"
VERTEX_JOB = {"python_module": "", "package_uris": [], "job_args": []}


def vertex_pools(*replicas):
    """Vertex AI's names for the replicas of its worker pools."""
    return {
        f"workerpool{pool}": [
            f"cmle-training-workerpool{pool}-{ID}-{i}:2222" for i in range(n)
        ]
        for pool, n in enumerate(replicas)
    }


def vertex_cluster_spec(pools, pool, index):
    return {
        "cluster": pools,
        "environment": "cloud",
        "task": {"type": f"workerpool{pool}", "index": index},
        "job": json.dumps(VERTEX_JOB),
        "open_ports": [3333],
    }


def vertex(*replicas, tf_config=True, chief="chief"):
    """Task -> variables, for one job with so many replicas in its pools."""
    pools = vertex_pools(*replicas)
    jobs = (chief, "worker", "ps", "evaluator")
    cluster = {
        jobs[pool]: pools[f"workerpool{pool}"]
        for pool in range(min(len(replicas), 3))
    }
    tasks = {}
    for pool, count in enumerate(replicas):
        for index in range(count):
            spec = vertex_cluster_spec(pools, pool, index)
            variables = {"CLUSTER_SPEC": spec}
            if tf_config:
                variables["TF_CONFIG"] = {
                    "cluster": cluster,
                    "environment": "cloud",
                    "job": VERTEX_JOB,
                    "task": {
                        "cloud": ID,
                        "index": index,
                        "trial": "1",
                        "type": jobs[pool],
                    },
                }
            tasks[f"{jobs[pool]}:{index}"] = variables
    return tasks


def kubeflow(**replicas):
    """Task -> variables, as the training operator v1.9 sets them."""
    cluster = {
        job: [f"tfdist-{job}-{i}.default.svc:2222" for i in range(n)]
        for job, n in replicas.items()
    }
    return {
        f"{job}:{index}": {
            "TF_CONFIG": {
                "cluster": cluster,
                "task": {"type": job, "index": index},
                "environment": "cloud",
            }
        }
        for job, n in replicas.items()
        for index in range(n)
    }


def kubernetes(**replicas):
    """Task -> variables, as Kubernetes makes them of our plain objects."""
    tasks = {}
    for variables in pods(
        Job(name="a", image="i", **replicas).plain()
    ).values():
        tf_config = json.loads(variables["TF_CONFIG"])
        task = tf_config["task"]
        tasks[f"{task['type']}:{task['index']}"] = {"TF_CONFIG": tf_config}
    return tasks


def aip_variables(base):
    """Made of baseOutputDirectory; each ends in a slash."""
    return {
        "AIP_MODEL_DIR": f"{base}/model/",
        "AIP_CHECKPOINT_DIR": f"{base}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{base}/logs/",
    }


def check_folders(base):
    """Each thing is where a part of the service looks for it."""
    # An upload of the model.
    signatures = tf.saved_model.load(str(base / "model")).signatures
    assert "serving_default" in signatures
    assert (base / "model" / "assets.extra" / "schema.json").exists()
    # The managed TensorBoard; `eval` is another run of it.
    assert read_scalars(str(base / "logs"))[MAX_STEPS]["global_step/sec"] > 0
    assert read_scalars(str(base / "logs" / "eval"))[MAX_STEPS]["auc"] > 0.5
    # A task that starts again.
    index = base / "checkpoints" / f"model.ckpt-{MAX_STEPS}.index"
    assert index.exists()
    events = {path.parent for path in base.rglob("*tfevents*")}
    assert events == {base / "logs", base / "logs" / "eval"}


def vertex_all_reduce(*replicas):
    """The third pool runs Google's reduction servers, not our program."""
    return {
        task: {**variables, "TFDIST_REDUCTION_SERVERS": 1}
        for task, variables in vertex(*replicas).items()
        if not task.startswith("ps")
    }


# Before each landing; a soak runs all.
OFTEN = "Vertex AI", "Kubernetes"
ENVIRONMENTS = {
    "Vertex AI": vertex(1, 2, 1, 1),
    "Vertex AI, a master and no evaluator": vertex(1, 1, 2, chief="master"),
    "Vertex AI, CLUSTER_SPEC alone": vertex(1, 1, 1, 1, tf_config=False),
    "Vertex AI, reduction servers": vertex_all_reduce(1, 1, 2, 1),
    "Kubeflow": kubeflow(chief=1, worker=1, ps=1, evaluator=1),
    "Kubernetes": kubernetes(workers=1, ps=1),
}


def on_loopback(tasks):
    """The hosts' names, and the variables with a port for each of them."""
    text = json.dumps(tasks)
    addresses = sorted(
        {
            address
            for variables in tasks.values()
            for variable in variables.values()
            if isinstance(variable, dict)
            for job in variable["cluster"].values()
            for address in job
        }
    )
    for port, address in enumerate(addresses, 20000):
        text = text.replace(address, address.replace(":2222", f":{port}"))
    variables = {
        task: {name: json.dumps(value) for name, value in values.items()}
        for task, values in json.loads(text).items()
    }
    return [address.partition(":")[0] for address in addresses], variables


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        n if n in OFTEN else pytest.param(n, marks=pytest.mark.soak)
        for n in ENVIRONMENTS
    ],
)
def test_every_task_runs_to_the_end(directory, tmp_path, name):
    hosts, tasks = on_loopback(ENVIRONMENTS[name])
    for variables in tasks.values():
        variables |= aip_variables(tmp_path)
        variables["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "trainer.task", *data_flags(directory)]
    job = {
        "hosts": hosts,
        "tasks": tasks,
        "command": [*command, f"--max_steps={MAX_STEPS}", "--log_steps=20"],
    }
    done = subprocess.run(
        [
            *["unshare", "-rnm", sys.executable],
            str(ROOT / "tests" / "hosts_on_loopback.py"),
        ],
        input=json.dumps(job),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=330,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    outputs = {task: output for task, (_, output) in result.items()}
    codes = {task: code for task, (code, _) in result.items()}
    said = "\n".join(f"{k}: {v[-1000:]}" for k, v in outputs.items())
    assert codes == dict.fromkeys(tasks, 0), said
    (chief,) = {"chief:0", "master:0"} & set(tasks)
    assert f"Evaluation after {MAX_STEPS} steps:" in outputs[chief]
    check_folders(tmp_path)
    assert not list(tmp_path.glob("runs"))


# --- Tuning ------------------------------------------------------------------

TRIALS = [
    {"learning_rate": "0.01", "hidden_units": "64,32", "embedding_dim": "4"},
    {"learning_rate": "1", "hidden_units": "128,64", "embedding_dim": "4"},
    {"learning_rate": "0.2", "hidden_units": "64,32", "embedding_dim": "32"},
]


def trial(directory, number, values):
    """Starts a trial as the service does: a replica with flags of its own."""
    (pool,) = yaml.safe_load((ROOT / "vertex" / "tuning.yaml").read_text())[
        "trialJobSpec"
    ]["workerPoolSpecs"]
    container = pool["containerSpec"]
    program, *command = container["command"]
    assert program == "python"
    spec = vertex_cluster_spec(vertex_pools(1), 0, 0)
    spec["task"]["trial"] = number
    folder = directory / number
    folder.mkdir()
    return subprocess.Popen(
        [
            *[sys.executable, *command, *container["args"]],
            *[word for k, v in values.items() for word in (f"--{k}", v)],
            *[*data_flags(directory), f"--max_steps={MAX_STEPS}"],
            *["--tuning_metric=auc", "--log_steps=20"],
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CLUSTER_SPEC": json.dumps(spec),
            **aip_variables(folder),
            "CLOUD_ML_TRIAL_ID": number,
            "CLOUD_ML_HP_METRIC_FILE": f"{folder}/metrics/output.metrics",
        },
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=(folder / "stdout").open("w"),
        stderr=(folder / "stderr").open("w"),
    )


@pytest.fixture(scope="module")
def trials(directory):
    """The folder of each trial, when all of them have ended."""
    started = [
        trial(directory, str(number), values)
        for number, values in enumerate(TRIALS, 1)
    ]
    folders = [directory / str(n) for n in range(1, len(started) + 1)]
    try:
        for process, folder in zip(started, folders, strict=True):
            code = process.wait(timeout=300)
            assert code == 0, (folder / "stderr").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
    return folders


@pytest.mark.slow
def test_trials_leave_the_metric_file_of_the_service(trials):
    tuned = yaml.safe_load((ROOT / "vertex" / "tuning.yaml").read_text())
    (wanted,) = tuned["studySpec"]["metrics"]
    reported = []
    for number, folder in enumerate(trials, 1):
        path = folder / "metrics" / "output.metrics"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        by_name = {}
        for line in lines:
            # As cloudml-hypertune 0.1.0.dev6 writes it.
            assert isinstance(line.pop("timestamp"), float)
            assert line.pop("trial") == str(number)
            assert 0 < int(line.pop("global_step")) <= MAX_STEPS
            assert line.pop("checkpoint_path") == ""
            ((name, value),) = line.items()
            by_name[name] = float(value)
            assert isinstance(value, str)
        assert set(by_name) == {"loss", "auc", "accuracy"}
        check_folders(folder)
        text = (folder / "stdout").read_text()
        assert f"{wanted['metricId']:<14}{by_name['auc']:>8.4f}" in text
        reported.append(by_name[wanted["metricId"]])
    assert len(set(reported)) == len(TRIALS)


@pytest.mark.slow
def test_logs_have_severities(trials):
    """Vertex AI shows all of stderr as errors, JSON on stdout as it says."""
    for folder in trials:
        entries = [
            json.loads(line)
            for line in (folder / "stdout").read_text().splitlines()
            if line.startswith("{")
        ]
        assert len(entries) > 3
        assert {"INFO"} <= {entry["severity"] for entry in entries}
        assert any(
            entry["message"].startswith("Training starts from newly")
            for entry in entries
        )
        stderr = (folder / "stderr").read_text().splitlines()
        assert not [line for line in stderr if "step" in line.lower()]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_report(tmp_path, caplog):
    path = tmp_path / "new" / "output.metrics"
    metrics = {"auc": 0.75, "loss": float("nan"), "global_step": 10}
    tuning.report_metrics(metrics, str(path), "3")
    (line,) = read(path)
    assert line.pop("timestamp") > 0
    assert line == {
        "auc": "0.75",
        "checkpoint_path": "",
        "global_step": "10",
        "trial": "3",
    }
    assert "Metric 'loss' is nan and is not reported" in caplog.text
    tuning.report_metrics({"auc": 0.8, "global_step": 30}, str(path))
    tuning.report_metrics({"auc": 0.9, "global_step": 20}, str(path))
    # A recovery has undone step 30.
    reported = [(line["auc"], line["global_step"]) for line in read(path)]
    assert reported == [("0.75", "10"), ("0.9", "20")]
    for step in range(30, 200):
        tuning.report_metrics({"auc": 1.0, "global_step": step}, str(path))
    assert [int(x["global_step"]) for x in read(path)] == [*range(100, 200)]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_report_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuning.report_metrics({"auc": 1.0, "global_step": 1}, "metrics")
    assert len(read(tmp_path / "metrics")) == 1

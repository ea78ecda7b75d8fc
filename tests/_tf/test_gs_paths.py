"""A job whose every path is `gs://`, on a storage that fails now and then."""

import collections
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from serving_checks import example

from tests import gs_job, storage_server
from tests.session.test_recovery import wait_for_exit
from tfdist.estimator import results
from tfdist.estimator.saved_models import list_exports
from tfdist.hooks.events import read_scalars
from tfdist.launch.testing import LocalCluster, assert_nothing_left

ROOT = Path(__file__).parents[2]
BUCKET = "gs://bucket"
JOB = f"{BUCKET}/job"
TASKS = ["chief:0", "ps:0", "worker:0", "evaluator:0"]
STORAGE = "worker:1"  # The next free name; it is no worker.
FAULT_RATE = 0.05

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of the storage, with the data of the job in it."""
    directory = tmp_path_factory.mktemp("gs")
    bucket = directory / "storage" / "bucket"
    bucket.mkdir(parents=True)
    store = storage_server.Store(directory / "storage")
    store.write("bucket", "words.txt", "\n".join(gs_job.COLOURS).encode())
    for seed, name in enumerate(["train-0.csv", "train-1.csv", "eval.csv"]):
        store.write("bucket", name, "\n".join(rows(500, seed)).encode())
    return directory


def rows(count, seed):
    """Examples whose label depends on a number and a word."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        size, colour = rng.normal(), rng.integers(3)
        label = int(rng.random() < 1 / (1 + np.exp(-2 * size - colour + 1)))
        yield f"{size:.4f},{gs_job.COLOURS[colour]},{label}"


@pytest.fixture(scope="module")
def run(directory):
    """What the tasks and the storage of a whole job said."""
    bundle, own = storage_server.certificate(directory)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in storage_server.environment(port, bundle).items():
            patch.setenv(name, value)
        patch.setenv("TMPDIR", str(directory))  # Of what is uploaded.
        cluster = LocalCluster(
            [sys.executable, "-m", "tests.gs_job", f"--bucket={BUCKET}"],
            **{"ps": 1, "workers": 1, "evaluator": True, "cwd": ROOT},
            absent=TASKS,
        )
    storage = storage_server.command(
        directory / "storage",
        own,
        f"--port={port}",
        f"--fault_rate={FAULT_RATE}",
    )
    with cluster as job:
        assert job.add_task("worker", command=storage) == STORAGE
        job.wait_for_line(STORAGE, "^port")
        for task in TASKS:
            job.start(task)
        job.wait_for_line("chief:0", r"^INFO Saved .*-40\.", timeout_secs=300)
        job.kill("chief:0")
        job.wait_for_line("evaluator:0", "Evaluation of", timeout_secs=300)
        job.start("chief:0")
        assert job.wait(timeout_secs=300) == 0
        assert [wait_for_exit(job, task) for task in TASKS] == [0] * 4
        outputs = {task: job.output(task) for task in [*TASKS, STORAGE]}
    assert_nothing_left(job)
    assert job.exit_codes()["chief:0"] == [-9, 0]
    return outputs


@pytest.fixture(scope="module")
def storage(directory, run):
    """The storage after the job, without faults, for this process."""
    server = storage_server.Running(directory)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.close()


def test_the_killed_chief_resumes(run):
    output = run["chief:0"]
    assert "Training starts from newly initialized variables." in output
    continues = re.findall(
        r"Training continues at step (\d+) from (\S+)\.", output
    )
    ((step, path),) = continues
    assert 40 <= int(step) < gs_job.MAX_STEPS
    assert path == f"{JOB}/model.ckpt-{step}"


def test_requests_failed(run):
    """About as many as were to, of every kind; and more than enough."""
    lines = [line.split() for line in run[STORAGE].splitlines()[1:]]
    faults = collections.Counter(fault for _, fault, _, _ in lines)
    normal = faults.pop("-")
    methods = collections.Counter(line[2] for line in lines)
    print(f"{len(lines)} requests: {dict(methods)}; {dict(faults)}")
    assert set(faults) == set(storage_server.Faults.kinds)
    assert faults.total() > 30
    share = faults.total() / (normal + faults.total())
    assert share == pytest.approx(FAULT_RATE, abs=0.02)


def test_evaluations(storage, run):
    path = tf.train.latest_checkpoint(JOB)
    assert path == f"{JOB}/model.ckpt-{gs_job.MAX_STEPS}"
    result = results.read_json(f"{JOB}/eval/{results.RESULT_FILE}")
    metrics = result["metrics"]
    assert result["final"]
    assert metrics["global_step"] == gs_job.MAX_STEPS
    assert metrics["auc"] > 0.75
    returned = str((metrics, result["exports"]))
    assert f"Returned {returned}." in run["chief:0"]
    written = read_scalars(f"{JOB}/eval")
    assert written[gs_job.MAX_STEPS]["auc"] == pytest.approx(metrics["auc"])
    assert gs_job.MAX_STEPS in read_scalars(JOB)


def test_what_is_left(storage):
    """The newest checkpoints and exports, and nothing half-done."""
    names = storage.store.names("bucket")
    indices = [name for name in names if name.endswith(".index")]
    kept = [
        n for n in indices if re.fullmatch(r"job/model\.ckpt-\d+\.index", n)
    ]
    assert len(kept) == gs_job.KEEP
    assert not [name for name in names if "//" in name]
    # A checkpoint under way when its chief was killed is removed at its end.
    assert not [
        name for name in names if re.search(r"_temp|temp-|\.temp", name)
    ]
    # Each has exported more than once.
    for name in ("best", "latest"):
        assert len(list_exports(f"{JOB}/export/{name}")) == 1
    best = json.loads(storage.store.read("bucket", "job/export/best/best.json"))
    losses = [
        scalars["loss"] for scalars in read_scalars(f"{JOB}/eval").values()
    ]
    assert best["best_eval_result"]["loss"] == pytest.approx(min(losses))


def test_predictions_of_the_export_are_the_local_ones(storage, tmp_path):
    """Of the checkpoint, copied and read by a model in this process."""
    for path in tf.io.gfile.glob(f"{JOB}/model.ckpt-{gs_job.MAX_STEPS}.*"):
        tf.io.gfile.copy(path, str(tmp_path / os.path.basename(path)))
    local = gs_job.estimator(BUCKET, str(tmp_path)).predict(
        lambda: gs_job.eval_input_fn(BUCKET),
        checkpoint_path=str(tmp_path / f"model.ckpt-{gs_job.MAX_STEPS}"),
    )
    wanted = np.stack([output["probabilities"] for output in local])
    export = list_exports(f"{JOB}/export/latest")[-1]
    serve = tf.saved_model.load(export).signatures["predict"]
    batch = gs_job.eval_input_fn(BUCKET).unbatch().batch(500)
    features, _ = batch.get_single_element()
    columns = zip(
        *(features[k].numpy() for k in ("size", "colour")), strict=True
    )
    examples = [example(size=[s], colour=[c.decode()]) for s, c in columns]
    outputs = serve(examples=tf.constant(examples))
    assert wanted.shape == (500, 2)
    np.testing.assert_allclose(outputs["probabilities"], wanted, rtol=1e-5)


_WITHOUT_CREDENTIALS = """
import json
from small_models import logistic, batches
import tfdist
from tfdist.checkpoint import checkpoints
from tfdist.estimator.evaluator import Evaluator

directory = "gs://bucket/job"
estimator = tfdist.Estimator(logistic, tfdist.RunConfig(directory))
config = tfdist.RunConfig(directory)
evaluator = Evaluator(logistic, config, tfdist.EvalSpec(batches))
for act in (
    lambda: estimator.train(batches, max_steps=1),
    lambda: evaluator.run_continuously(1),
    lambda: checkpoints.latest(directory),
):
    try:
        act()
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


def test_without_credentials(tmp_path):
    """Each role says so at its start."""
    server = storage_server.Running(tmp_path)
    (tmp_path / "storage" / "bucket").mkdir()
    environment = {
        **os.environ,
        **server.environment,
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
    }
    del environment["GOOGLE_AUTH_TOKEN_FOR_TESTING"]
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CREDENTIALS],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    server.close()
    train, evaluate, latest = map(json.loads, done.stdout.splitlines())
    for kind, message in (train, evaluate):
        assert kind == "ValueError"
        assert message.startswith(f"model_dir '{JOB}' cannot be written: ")
        assert "response code 401" in message
    assert "gcloud auth application-default login" in evaluate[1]
    # Not None, with which a job would begin anew.
    assert latest[0] == "PermissionDeniedError"

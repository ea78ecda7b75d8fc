"""Every feature under every strategy: `tests.strategy_checks`, once for each.

The models are alike in all of them, so the weights must be those of one device.
"""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from strategy_checks import examples

import tfdist
from tfdist.checkpoint import checkpoints
from tfdist.cluster import servers, strategies
from tfdist.cluster.spec import Cluster
from tfdist.estimator.run_config import RunConfig
from tfdist.launch.testing import LocalCluster

ROOT = Path(__file__).parents[2]
# In this order: each restores a checkpoint of those before as well.
STRATEGIES = ("one_device", "mirrored", "multi_worker_mirrored", "ps")
TASKS = {
    "multi_worker_mirrored": {"workers": 1},
    "ps": {"ps": 1, "workers": 1},
}
STEPS, DEADLINE_SECS = 20, 600


def run(directory, strategy, others, *flags):
    """What the leader reports."""
    report = directory / "report.json"
    command = [sys.executable, "-m", "tests.strategy_checks", *flags]
    command += [f"--directory={directory}", f"--strategy={strategy}"]
    command += [f"--report={report}", "--restore_from", *others]
    if strategy in TASKS:
        with LocalCluster(command, cwd=ROOT, **TASKS[strategy]) as job:
            exit_code = job.wait(timeout_secs=DEADLINE_SECS)
            assert exit_code == 0, job.output("chief:0")
    else:
        subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_SECS)
    return json.loads(report.read_text())


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def reports(directory):
    return {
        strategy: run(directory, strategy, STRATEGIES[:i])
        for i, strategy in enumerate(STRATEGIES)
    }


@pytest.fixture(scope="module")
def restores(reports, directory):
    """By strategy, what it made of the checkpoints of all others."""
    made = {name: dict(report["restored"]) for name, report in reports.items()}
    for i, strategy in enumerate(STRATEGIES[:-1], 1):
        later = run(directory, strategy, STRATEGIES[i:], "--restores_only")
        made[strategy] |= later["restored"]
    return made


def weights(directory, strategy, feature, steps=STEPS):
    path = f"{directory}/{strategy}/{feature}/model.ckpt-{steps}"
    return {
        name: checkpoints.load_variable(path, name)
        for name in checkpoints.saved_shapes(path)
        if "seed_generator" not in name
    }


def assert_alike(ours, wanted, tolerance):
    assert ours.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(
            ours[name], value, atol=tolerance, rtol=tolerance, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("feature", ["rich", "jit_compile"])
def test_weights_are_those_of_one_device(reports, directory, strategy, feature):
    # The order in which a server's threads add is chance; Adam magnifies it.
    tolerance = 5e-4 if strategy == "ps" else 2e-5
    assert_alike(
        weights(directory, strategy, feature),
        weights(directory, "one_device", feature),
        tolerance,
    )
    # The last five steps' metrics, loss included.
    found, wanted = reports[strategy][feature], reports["one_device"][feature]
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # An example that crosses a threshold of the AUC changes it by 6e-4.
        tolerance = 2e-3 if strategy == "ps" and name == "auc" else 1e-4
        assert found[name] == pytest.approx(value, abs=tolerance), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norm_of_each_replica(reports, strategy):
    """Its own share normalizes a replica: close to one device, not equal."""
    wanted = reports["one_device"]["batch_norm"]["loss"]
    assert reports[strategy]["batch_norm"]["loss"] == pytest.approx(
        wanted, abs=0.1
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_replica_has_masks_of_its_own(reports, strategy):
    metrics = reports[strategy]["dropout"]
    assert metrics["mean_of_squares"] - metrics["mean"] ** 2 > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluate_and_predict(reports, strategy):
    ours, wanted = reports[strategy], reports["one_device"]
    assert ours["evaluated"] == pytest.approx(wanted["evaluated"], abs=1e-4)
    np.testing.assert_allclose(
        ours["predicted"], wanted["predicted"], atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_export(reports, strategy):
    x, ids, _, _ = examples()
    # As any server: no tfdist in sight.
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(
            session, ["serve"], reports[strategy]["exported"]
        )
        signature = loaded.signature_def["serving_default"]
        served = session.run(
            {k: v.name for k, v in signature.outputs.items()},
            {signature.inputs["x"].name: x, signature.inputs["ids"].name: ids},
        )
    np.testing.assert_allclose(
        served["click"], reports["one_device"]["predicted"], atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumes(reports, directory, strategy):
    assert reports[strategy]["resumed"] == STEPS + 7
    # The input goes on where it was.
    if strategy != "ps":
        assert_alike(
            weights(directory, strategy, "rich", STEPS + 7),
            weights(directory, "one_device", "rich", STEPS + 7),
            2e-5,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "other"), itertools.permutations(STRATEGIES, 2)
)
def test_goes_on_from_a_checkpoint_of_another(
    reports, restores, strategy, other
):
    found = restores[strategy][other]
    assert found["step"] == STEPS + 5
    wanted = reports[other]["evaluated"]
    assert found["evaluated"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_model_that_was_made_elsewhere(reports):
    message = "with variable 'dense.*kernel', which was not created"
    assert re.search(message, reports["mirrored"]["made_elsewhere"])


@pytest.mark.slow
def test_no_tpu(tmp_path):
    code = (
        "import tfdist, small_models as m; "
        f"config = tfdist.RunConfig({str(tmp_path)!r}, strategy='tpu'); "
        "tfdist.Estimator(m.logistic, config).train(m.batches)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "RuntimeError: There is no TPU that this process can" in done.stderr


@pytest.mark.parametrize(
    ("strategy", "jobs", "message"),
    [
        ("ring", None, "must be 'auto' or one of .*'mirrored'.*'ring'"),
        ("ps", None, "'ps' does not fit this process, which is one local"),
        ("multi_worker_mirrored", None, "does not fit this process"),
        ("mirrored", {"chief": ["a:1"], "worker": ["b:1"]}, "others no clus"),
        ("ps", {"chief": ["a:1"], "worker": ["b:1"]}, "parameter servers"),
    ],
)
def test_strategy_that_does_not_fit(tmp_path, strategy, jobs, message):
    cluster = Cluster.from_jobs(jobs, "chief", 0) if jobs else Cluster()
    with pytest.raises(ValueError, match=message):
        RunConfig(str(tmp_path), strategy=strategy, cluster=cluster)


def test_graphs_of_tensorflow_1_are_refused(tmp_path):
    """Where `disable_v2_behavior()`, say, still stands in a ported program."""
    config = RunConfig(str(tmp_path))
    doors = [
        lambda: RunConfig(str(tmp_path)),
        lambda: tfdist.Trainable(dict, tf.Variable(0, dtype=tf.int64), {}),
        lambda: tfdist.fit(keras.Sequential, np.ones([2, 1])),
    ]
    with tf.Graph().as_default():
        for door in doors:
            with pytest.raises(RuntimeError, match="needs eager execution"):
                door()
    assert config == RunConfig(str(tmp_path))


def test_keras_by_another_library_is_refused(tmp_path, monkeypatch):
    """With PyTorch itself the variables are of a kind that nobody expects."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(RuntimeError, match="backend is 'torch' now"):
        RunConfig(str(tmp_path))


def test_within_the_scope_of_another_strategy(tmp_path):
    """It is not that of the next job either."""
    estimator = tfdist.Estimator(keras.Sequential, RunConfig(str(tmp_path)))
    scope = tf.distribute.MirroredStrategy(["CPU:0"]).scope()
    with scope, pytest.raises(RuntimeError, match="which is now 'one_device'"):
        estimator.train(lambda: tf.data.Dataset.range(1))
    name = estimator.config.strategy_name
    assert strategies.local_strategy(name) is tf.distribute.get_strategy()


def test_all_reduce_with_functions_that_run_eagerly():
    cluster = Cluster.from_jobs({"worker": ["a:1", "b:1"]}, "worker", 0)
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(RuntimeError, match="run_functions_eagerly"):
            strategies.multi_worker_strategy(cluster)
    finally:
        tf.config.run_functions_eagerly(False)


def test_grpc_fail_fast_of_the_user(monkeypatch):
    """It is `true` while the chief connects, and the user's afterwards."""
    seen = []

    class Strategy:
        def __init__(self, resolver):
            seen.append(os.environ["GRPC_FAIL_FAST"])
            if len(seen) == 1:
                raise tf.errors.UnavailableError(None, None, "not yet")

    monkeypatch.setattr(servers, "_POLL_SECS", 0.0)
    for users, afterwards in (("false", "false"), (None, "use_caller")):
        seen.clear()
        monkeypatch.delenv("GRPC_FAIL_FAST", raising=False)
        if users is not None:
            monkeypatch.setenv("GRPC_FAIL_FAST", users)
        strategies._connect(Strategy.__new__(Strategy), None)
        assert seen == ["true", "true"]
        assert os.environ["GRPC_FAIL_FAST"] == afterwards


# A process that joins two all-reduce jobs, whose constructor waits in C with
# Python's lock, as TensorFlow's does.
JOIN = """
import ctypes, faulthandler, sys
import tensorflow as tf
from tfdist.cluster import Cluster, meeting, strategies
meeting.meet = lambda cluster, *args: cluster
waits = [0.7, 60.0]
def construct(resolver):
    ctypes.PyDLL(None).usleep(int(waits.pop(0) * 1e6))
tf.distribute.MultiWorkerMirroredStrategy = construct
faulthandler.dump_traceback_later(0.5, file=sys.stdout)
for port in (1, 2):
    jobs = {"worker": [f"127.0.0.1:{port}", "127.0.0.1:3"]}
    cluster = Cluster.from_jobs(jobs, "worker", 0)
    strategies.multi_worker_strategy(cluster, start_timeout_secs=2.0)
    print("joined", port, flush=True)
"""


def test_joining_may_take_for_ever():
    with strategies._time_limit(math.inf):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 1e8
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
def test_joining_keeps_the_users_timer_and_has_one_of_its_own():
    done = subprocess.run(
        [sys.executable, "-c", JOIN],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGALRM
    assert "Timeout (0:00:00.500000)!" in done.stdout
    assert "joined 1" in done.stdout
    assert "joined 2" not in done.stdout
    assert "in multi_worker_strategy" in done.stderr

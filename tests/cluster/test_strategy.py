import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.placement.scope import placed_scope
from tfdist.placement.variables import VariableSpec

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]
JOBS = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What the chief of a real cluster of 2 ps and 2 workers found."""
    path = tmp_path_factory.mktemp("cluster") / "report.json"
    output = path.with_suffix(".log")
    with output.open("w") as log:
        code = subprocess.run(
            [
                *[sys.executable, "-m", "tfdist.launch"],
                *["--ps=2", "--workers=2", "--max_restarts=0"],
                *[str(HERE / "cluster_checks.py"), str(path)],
            ],
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=240,
        ).returncode
    assert code == 0, output.read_text()
    ends = re.findall(r"\[launch\] (\S+) +exit code 0 ", output.read_text())
    assert sorted(ends) == ["chief:0", "ps:0", "ps:1", "worker:0", "worker:1"]
    return json.loads(path.read_text())


def tasks(devices):
    """Name -> index of the parameter server, for devices that are on one."""
    pattern = r"/job:ps/replica:0/task:(\d)/device:CPU:0"
    return {n: int(re.fullmatch(pattern, d)[1]) for n, d in devices.items()}


# --- On a real cluster -------------------------------------------------------


def test_every_variable_slot_and_counter_is_on_a_ps(report):
    placed = tasks(report["devices"])
    assert set(placed.values()) == {0, 1}
    # Four weights, two slots each, learning rate, iterations, global_step.
    assert len(placed) == 4 + 8 + 3
    assert "global_step" in placed
    assert any("iteration" in name for name in placed)


def test_slots_are_beside_their_variable(report):
    placed = tasks(report["devices"])
    for path in report["order"]:
        slots = [n for n in placed if n.startswith(f"{path}/")]
        assert len(slots) == 2
        assert {placed[slot] for slot in slots} == {placed[path]}


def test_variables_take_turns(report):
    placed = tasks(report["devices"])
    order = ["global_step", *report["order"]]
    assert [placed[name] for name in order] == [0, 1, 0, 1, 0]


def test_metrics_are_on_the_chief(report):
    assert report["metric_devices"]
    assert all("/job:chief/" in d for d in report["metric_devices"])


def test_counters_are_exact(report):
    assert report["counters"] == [[37, 37], [38, 38], [138, 138]]


def test_metrics_are_those_of_keras(report):
    assert report["logs"] == pytest.approx(report["expected_logs"], rel=1e-4)


def test_each_worker_reads_its_own_data(report):
    assert 0 < report["share_of_worker_1"] < 1


@pytest.mark.parametrize("length", ["finite", "unknown"])
def test_end_of_input_is_exact(report, length):
    assert report[f"steps_of_{length}_input"] == [2 * 23] * 2
    # Four steps a dispatch, until fewer batches remain.
    assert report[f"sizes_of_{length}_input"] == [[1, 4], [1, 4]]


def test_a_placement_is_obeyed(report):
    assert report["all_on_one"] == ["/job:ps/replica:0/task:1/device:CPU:0"]


# --- Without one -------------------------------------------------------------


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(),
        Cluster.from_jobs(JOBS, "worker", 0),
        Cluster.from_jobs({"chief": ["c:1"], "worker": ["w:1"]}, "chief", 0),
    ],
    ids=["local", "worker", "no_ps"],
)
def test_only_the_chief_connects(cluster):
    with pytest.raises(ValueError, match="Only the chief of a cluster with"):
        parameter_server_strategy(cluster)


def test_missing_tasks_end_in_an_error():
    cluster = Cluster.from_jobs(
        {"chief": ["[::1]:1"], "worker": ["[::1]:2"], "ps": ["[::1]:3"]},
        "chief",
        0,
    )
    with pytest.raises(TimeoutError, match=r"ps:0 at \[::1\]:3 \(not up\)"):
        parameter_server_strategy(cluster, start_timeout_secs=0)


def test_scope_of_one_process_places_nothing():
    with placed_scope(tf.distribute.get_strategy()):
        variable = tf.Variable(1.0)
    assert "ps" not in variable.device


@pytest.mark.parametrize(
    ("placement", "message"),
    [(lambda spec: 2, "2"), (lambda spec: -1, "-1"), (lambda s: "0", "'0'")],
)
def test_placement_on_a_task_that_is_not_there(placement, message):
    scope = placed_scope(
        tf.distribute.get_strategy(), num_ps=2, placement=placement
    )
    with pytest.raises((ValueError, TypeError), match=message), scope:
        tf.Variable(1.0, name="v")


def test_another_model_than_the_planned_one():
    scope = placed_scope(
        tf.distribute.get_strategy(),
        num_ps=1,
        specs=[VariableSpec("kernel", (3, 1))],
    )
    with pytest.raises(ValueError, match="'kernel' of shape"), scope:
        pass

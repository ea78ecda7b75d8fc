"""On a cluster too, errors are raised, and a hook sees each step."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from silent_job import NAN_AT, SAVE_STEPS, STEPS

from tfdist.launch.testing import LocalCluster

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CLUSTERS = {"ps": {"ps": 2, "workers": 2}, "all-reduce": {"workers": 1}}
DEADLINE_SECS = 240


def run(directory, cluster, *flags):
    """The leader's exit code and output."""
    command = [sys.executable, "-m", "tests.silent_job"]
    command += [f"--directory={directory}", "--jobs", *flags]
    with LocalCluster(command, cwd=ROOT, **CLUSTERS[cluster]) as job:
        code = job.wait(timeout_secs=DEADLINE_SECS)
        return code, job.output("chief:0")


@pytest.fixture(scope="module", params=CLUSTERS)
def ran(request, tmp_path_factory):
    """A directory of jobs and their reports, and the leader's output."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "ps":
        code, output = run(
            directory, "ps", "counts", "nan", "no_batch", "--go_on"
        )
        assert code == 0, output
        return directory, output
    # In all-reduce a leader's failure ends the job, so each needs its own.
    output = ""
    for jobs in (["counts", "nan"], ["no_batch"]):
        code, more = run(directory, "all-reduce", *jobs)
        assert code == 1, more
        output += more
    return directory, output


def report(directory, name):
    return json.loads((directory / f"{name}.json").read_text())


def test_a_hook_of_tf1_sees_each_step_once(ran):
    directory, output = ran
    assert report(directory, "counts") == list(range(1, STEPS + 1))
    assert output.count("Counts is called after every step") == 2  # Two jobs.


def test_nan_weights_are_not_saved(ran):
    directory, _ = ran
    kind, message = report(directory, "nan")
    assert kind == "NonFiniteVariablesError"
    assert "hidden/kernel" in message
    newest = tf.train.latest_checkpoint(str(directory / "nan"))
    good = int(newest.rpartition("-")[2])
    assert f"the last good checkpoint is {newest}." in message
    # Either of the two workers may read the batch of NaNs.
    assert NAN_AT - SAVE_STEPS <= good <= 2 * NAN_AT
    for index in (directory / "nan").glob("*.index"):
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        for key, dtype in reader.get_variable_to_dtype_map().items():
            if dtype.is_floating:
                assert np.isfinite(reader.get_tensor(key)).all()


def test_no_batch(ran):
    directory, output = ran
    kind, message = report(directory, "no_batch")
    assert kind == "ValueError"
    assert "The dataset of input function `empty`" in message
    assert output.count("Ended at step") == 1  # Of the job that counts.
    left = {path.name for path in (directory / "no_batch").iterdir()}
    assert not left & {"export", "eval", "training_done.json"}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_hook_that_raises_what_a_lost_server_would(tmp_path, cluster):
    """The third occurrence is a user error, even if the process restarts."""
    code, output = run(tmp_path, cluster, "raises")
    assert code == 1, output
    assert output.count("Failed at step 4: the user's own") == 2
    assert "UnavailableError: the user's own" in output

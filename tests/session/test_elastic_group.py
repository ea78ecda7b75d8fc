"""All-reduce groups that change size: real processes, real signals."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.cluster.test_all_reduce import start, wait_until_gone
from tests.cluster.test_size import ask_for
from tests.recovery_job import HURRY
from tests.session.test_elastic import Resizable
from tests.session.test_recovery import tensors
from tfdist.checkpoint import checkpoints
from tfdist.launch.testing import assert_nothing_left

pytestmark = pytest.mark.slow

STEPS = 300
PLAIN = [f"--max_steps={STEPS}", "--plain"]
CONTINUES = r"^\[chief:0\] .*Training continues at step (\d+) "


class Group(Resizable):
    module = "tests.all_reduce_job"

    def goes_on_with(self, number, count=1):
        """Waits until a group of this many workers has run a step."""
        group = rf"^\[chief:0\] INFO Takes part: chief, {number} worker"
        self.wait_for(rf"(?:{group}(?:.|\n)*?){{{count}}}step +\d")

    def resizes(self):
        pattern = r"^\[chief:0\] WARNING workers: (\d -> \d): this process"
        return re.findall(pattern, self.output, re.MULTILINE)

    def digests(self):
        """The step and weights at which the processes ended."""
        pattern = r"^\[(\S+)\] step (\d+) digest (\w+)$"
        found = re.findall(pattern, self.output, re.MULTILINE)
        return {task: (step, digest) for task, step, digest in found}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights of a group of two processes that does not change."""
    model_dir = tmp_path_factory.mktemp("undisturbed")
    with Group(model_dir, ["--workers=1"], *PLAIN) as job:
        job.end()
    return weights(model_dir)


def weights(model_dir):
    path = tf.train.latest_checkpoint(model_dir)
    assert checkpoints.step_of(path) == STEPS
    return tensors(path)


@pytest.mark.alone
def test_2_to_3_to_2_processes(tmp_path, undisturbed):
    """Each step uses each example once, whichever process computes it."""
    launcher = ["--workers=1:2"]
    flags = [*PLAIN, "--pace_secs=0.3", "--save_steps=100000"]
    with Group(tmp_path / "model", launcher, *flags) as job:
        job.goes_on_with(1)
        job.resize(2)
        job.goes_on_with(2)
        job.resize(1)
        job.goes_on_with(1, 2)
        job.wait_for(r"^\[launch\] worker:1: exit code 0; the job has 1")
        job.end()
    assert job.resizes() == ["1 -> 2", "2 -> 1"]
    saved = re.findall(r"Saved .*-(\d+)\.$", job.output, re.MULTILINE)
    restored = re.findall(CONTINUES, job.output, re.MULTILINE)
    assert restored == saved[1:3]  # Not a step is made twice.
    after = weights(tmp_path / "model")
    assert after.keys() == undisturbed.keys()
    for name, value in undisturbed.items():
        np.testing.assert_allclose(after[name], value, atol=2e-4, err_msg=name)
    digests = job.digests()
    assert digests["chief:0"] == digests["worker:0"]


@pytest.mark.alone
def test_one_that_is_gone_for_good(tmp_path, undisturbed):
    """The others resume from the last checkpoint; later it returns."""
    launcher = ["--workers=1:2", "--max_restarts=0", "--last_call_timeout=3"]
    flags = [*PLAIN, "--pace_secs=0.3", "--save_steps=20"]
    with Group(tmp_path / "model", launcher, *flags) as job:
        job.goes_on_with(1)
        job.resize(2)
        job.goes_on_with(2)
        job.kill_once("worker:0")
        job.wait_for(r"worker:0: SIGKILL; out of restarts. The job goes on")
        job.goes_on_with(1, 2)
        job.end()
    after = weights(tmp_path / "model")
    for name, value in undisturbed.items():
        np.testing.assert_allclose(after[name], value, atol=2e-4, err_msg=name)
    digests = job.digests()
    assert digests["chief:0"] == digests["worker:1"]


@pytest.mark.alone
def test_what_would_change_the_global_batch(tmp_path):
    """48 examples can be divided among 2, 3 or 4 processes, but not 5."""
    launcher = ["--workers=1:4"]
    flags = ["--own_batches", "--max_steps=400", "--pace_secs=0.3"]
    with Group(tmp_path / "model", launcher, *flags) as job:
        job.goes_on_with(1)
        job.resize(4)
        job.wait_for(
            r"ERROR Refused: workers: 1 -> 4. The global batch of 48 "
            "examples is not divisible by 5 replicas"
        )
        job.goes_on(2)
        assert not job.resizes()
        job.resize(3)
        job.goes_on_with(3)
        job.end()
    assert job.resizes() == ["1 -> 3"]
    assert len(set(job.digests().values())) == 1
    assert len(job.digests()) == 4


def test_batches_of_one_size_are_refused(tmp_path):
    launcher = ["--workers=1:2", "--max_restarts=0"]
    flags = ["--own_batches", "--fixed_batch"]
    with Group(tmp_path, launcher, *flags) as job:
        job.wait_for("ValueError: A group that changes its size keeps the gl")


@pytest.mark.alone
def test_by_the_file_elsewhere(tmp_path):
    model_dir = tmp_path / "model"
    ask_for(model_dir, 1)
    flags = ["--max_steps=300", "--plain", "--pace_secs=0.3"]
    with start(model_dir, *flags, absent=["worker:1"]) as job:
        job.wait_for_line("chief:0", "Takes part: chief, 1 worker")
        job.wait_until_step(20, timeout_secs=120)
        job.start("worker:1")
        ask_for(model_dir, 2)
        job.wait_for_line(
            "chief:0", "Takes part: chief, 2 workers", timeout_secs=120
        )
        ask_for(model_dir, 1)
        wait_until_gone(job, ["worker:1"])
        (model_dir / HURRY).touch()
        assert job.exit_codes()["worker:1"] == [0]
        assert job.wait(timeout_secs=240) == 0
    path = tf.train.latest_checkpoint(model_dir)
    assert checkpoints.step_of(path) == 300
    assert_nothing_left(job)

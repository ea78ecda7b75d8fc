"""All-reduce between real processes: what they learn, and what it takes to
disturb them. `-s` shows how long each recovery took.
"""

import functools
import re
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf

from tests.recovery_job import HURRY
from tfdist.checkpoint import checkpoints
from tfdist.launch.testing import LocalCluster

# The alone: faults at times of their own, which a busy machine would shift.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TASKS = ("chief:0", "worker:0", "worker:1")
STEPS = 60
DIGEST = r"^step (\d+) digest (\w+)$"
DEADLINE_SECS = 240


def command(model_dir, *flags):
    module = [sys.executable, "-m", "tests.all_reduce_job"]
    return [*module, f"--model_dir={model_dir}", *flags]


def start(model_dir, *flags, **cluster):
    logs = f"{model_dir}-logs"
    return LocalCluster(
        command(model_dir, *flags),
        workers=2,
        cwd=ROOT,
        log_dir=logs,
        **cluster,
    )


def digests(job):
    """The step and the weights with which each process has ended."""
    return {
        re.search(DIGEST, job.output(task), re.MULTILINE).groups()
        for task in TASKS
    }


def wait_until_gone(job, tasks, timeout_secs=DEADLINE_SECS):
    deadline = time.monotonic() + timeout_secs
    while any(job.pid(task) is not None for task in tasks):
        assert time.monotonic() < deadline, {t: job.output(t) for t in tasks}
        time.sleep(0.1)


@functools.cache
def undisturbed(directory, own_batches):
    flags = ["--own_batches"] if own_batches else []
    with start(directory, f"--max_steps={STEPS}", *flags) as job:
        assert job.wait(timeout_secs=DEADLINE_SECS) == 0
        wait_until_gone(job, TASKS)
        return digests(job)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("all_reduce")


@pytest.mark.alone
@pytest.mark.parametrize(
    ("task", "harm", "own_batches"),
    [
        pytest.param("worker:1", "kill", False, marks=pytest.mark.soak),
        ("worker:0", "freeze", True),
        ("chief:0", "kill", True),
    ],
)
def test_ends_as_if_undisturbed(directory, tmp_path, own_batches, task, harm):
    wanted = undisturbed(directory / f"own-{own_batches}", own_batches)
    assert len(wanted) == 1
    flags = [f"--max_steps={STEPS}", "--pace_secs=0.4", "--wait_secs=100"]
    flags += ["--own_batches"] if own_batches else []
    with start(tmp_path / "model", *flags, restart_secs=1.0) as job:
        step = job.wait_until_step(30, timeout_secs=DEADLINE_SECS)
        began = time.monotonic()
        getattr(job, harm)(task, **({} if harm == "kill" else {"for_secs": 25}))
        job.wait_for_line(
            "chief:0",
            r"Training continues at step (\d+)",
            timeout_secs=DEADLINE_SECS,
        )
        print(
            f"\n{harm} {task} at step {step}: continues after "
            f"{time.monotonic() - began:.1f} s"
        )
        assert job.wait(timeout_secs=DEADLINE_SECS) == 0
        wait_until_gone(job, TASKS)
        assert digests(job) == wanted
        if harm == "kill":
            assert job.exit_codes()[task][0] == -9
    path = tf.train.latest_checkpoint(tmp_path / "model")
    assert checkpoints.step_of(path) == STEPS


@pytest.mark.alone
def test_one_that_dies_while_the_chief_saves(directory, tmp_path):
    """No collective fails: the chief waits for what each process has read."""
    wanted = undisturbed(directory / "own-True", True)
    flags = [f"--max_steps={STEPS}", "--own_batches"]
    flags += [f"--dies_once={tmp_path / 'mark'}"]
    with start(tmp_path / "model", *flags, restart_secs=1.0) as job:
        assert job.wait(timeout_secs=100) == 0
        wait_until_gone(job, TASKS)
        assert job.exit_codes()["worker:1"][0] == -9
        assert digests(job) == wanted
        failed = r"Failed at step 20: worker:1: (not up|was started again)\. "
        assert re.search(failed, job.output("chief:0"))


def test_one_that_fails_later_is_waited_for(directory, tmp_path):
    """The chief says why."""
    wanted = undisturbed(directory / "own-True", True)
    flags = [f"--max_steps={STEPS}", "--own_batches", "--by_error"]
    flags += [f"--dies_once={tmp_path / 'mark'}"]
    with start(tmp_path / "model", *flags, restart_secs=1.0) as job:
        assert job.wait(timeout_secs=DEADLINE_SECS) == 0
        wait_until_gone(job, TASKS)
        assert job.exit_codes()["worker:1"][0] == 1
        assert digests(job) == wanted
        reason = (
            "worker:1 has failed: ValueError: A line is damaged. The others"
        )
        assert reason in job.output("chief:0")


@pytest.mark.alone
@pytest.mark.parametrize("task", ["chief:0", "worker:1"])
def test_one_that_is_told_to_end(directory, tmp_path, task):
    """All save and begin anew: not a step is made twice."""
    wanted = undisturbed(directory / "own-True", True)
    flags = [f"--max_steps={STEPS}", "--own_batches", "--save_steps=1000"]
    with start(
        tmp_path / "model", *flags, "--pace_secs=1", restart_secs=0.0
    ) as job:
        job.wait_until_step(10, timeout_secs=DEADLINE_SECS)
        assert job.terminate(task).effect == "exit code 143"
        (tmp_path / "model" / HURRY).touch()
        assert job.wait(timeout_secs=DEADLINE_SECS) == 0
        wait_until_gone(job, TASKS)
        assert digests(job) == wanted
        said = job.output("chief:0")
    leaves = {
        "chief:0": "Told to end (SIGTERM); exit code 143",
        "worker:1": "worker:1 received SIGTERM: this process restarts",
    }
    assert leaves[task] in said
    saved = re.findall(r"Saved .*-(\d+)\.$", said, re.MULTILINE)
    continued = re.findall(r"Training continues at step (\d+) ", said)
    assert continued == saved[1:2]


def test_another_program_is_named(tmp_path):
    with start(tmp_path / "model", "--stranger=worker:1") as job:
        wait_until_gone(job, TASKS)
        assert set(map(tuple, job.exit_codes().values())) == {(1,)}
        expected = (
            r"must run the same program. They differ:\n"
            r"  learning rate of adam: 0.01 in chief:0, 0.02 in worker:1\n"
            r"  beta_1 of adam: 0.9 in chief:0, 0.8 in worker:1\n"
            r"(.*\n)*  variable \S*dense\S*: float32 \(28, 16\) in chief:0, "
            r"float32 \(28, 17\) in worker:1"
        )
        assert re.search(expected, job.output("chief:0"))


@pytest.mark.alone  # Within a minute, not after `--wait_secs`.
@pytest.mark.parametrize("task", ["chief:0", "worker:1"])
def test_an_error_in_one_ends_all(tmp_path, task):
    with start(tmp_path / "m", f"--fails={task}", "--wait_secs=240") as job:
        wait_until_gone(job, TASKS, timeout_secs=60)
        assert set(map(tuple, job.exit_codes().values())) == {(1,)}
        for name in TASKS:
            told = "" if name == task else f"RuntimeError: {task} has failed: "
            reason = rf"^{told}\S*NotFoundError: .*no_vocabulary.txt; No such"
            assert re.search(reason, job.output(name), re.MULTILINE)


def test_a_leader_names_the_error_of_one_that_starts_again(tmp_path):
    with start(tmp_path / "model", "--fails=worker:1", "--by_error") as job:
        reason = r"worker:1 has failed: UnavailableError: 503 of a storage"
        job.wait_for_line("chief:0", f"Failed at step 0: {reason}")


def test_a_leader_that_exits_ends_all(tmp_path):
    with start(tmp_path / "model", "--exits=chief:0") as job:
        wait_until_gone(job, TASKS, timeout_secs=60)
        codes = {task: set(codes) for task, codes in job.exit_codes().items()}
        assert codes == {"chief:0": {3}, "worker:0": {1}, "worker:1": {1}}
        reason = r"^RuntimeError: chief:0 has failed: SystemExit: 3$"
        for name in TASKS[1:]:
            assert re.search(reason, job.output(name), re.MULTILINE)


UNKNOWN = ["--unknown_size", "--steps_per_dispatch=1"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], r"number of batches: .*5 in worker:1"),
        (UNKNOWN, "The training input of worker:1 ended at step 5, but"),
    ],
)
def test_data_that_end_in_one_end_all(tmp_path, flags, reason):
    """Others would wait for its gradients, forever."""
    with start(tmp_path / "model", "--short=worker:1", *flags) as job:
        wait_until_gone(job, TASKS)
        assert set(map(tuple, job.exit_codes().values())) == {(1,)}
        assert re.search(reason, job.output("chief:0"))


@pytest.mark.alone  # Within a minute.
def test_a_checkpoint_of_another_model_ends_every_process(tmp_path):
    variables = {"another/kernel": tf.Variable([1.0])}
    checkpoints.Checkpoints(str(tmp_path / "model"), variables).save(3)
    with start(tmp_path / "model", "--late=worker:0") as job:
        wait_until_gone(job, TASKS, timeout_secs=60)
        assert set(map(tuple, job.exit_codes().values())) == {(1,)}
        reason = r"ValueError: Checkpoint \S+ does not fit the model:"
        assert re.search(f"^{reason}", job.output("chief:0"), re.MULTILINE)
        for task in TASKS[1:]:
            message = f"^RuntimeError: chief:0 has failed: {reason}"
            assert re.search(message, job.output(task), re.MULTILINE)


def test_an_input_that_shards_twice_is_named(tmp_path):
    with start(tmp_path / "model", "--shards_itself", "--max_steps=5") as job:
        assert job.wait(timeout_secs=DEADLINE_SECS) == 0
        wait_until_gone(job, TASKS)
        assert (
            "The first global batch of worker:0, worker:1 differs from "
            "that of chief:0."
        ) in job.output("chief:0")


@pytest.mark.alone
def test_missing_process_is_named(tmp_path):
    flags = ["--wait_secs=8"]
    with start(tmp_path / "model", *flags, absent=["worker:1"]) as job:
        wait_until_gone(job, TASKS[:2], timeout_secs=60)
        for task in TASKS[:2]:
            assert job.exit_codes()[task] == [1]
            address = f"127.0.0.1:{job.ports()['worker:1']}"
            assert re.search(
                rf"TimeoutError: 1 task\(s\) of the cluster did not come up "
                rf"within 8 s: worker:1 at {address} \(not up\)",
                job.output(task),
            )

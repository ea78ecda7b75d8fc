"""Checkpoints written while steps continue, and deaths meanwhile.

Real processes, real signals.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.session.test_recovery import (
    CHIEF,
    CONTINUES,
    ROOT,
    found,
    last_saved,
    next_line,
    tensors,
    wait_for_exit,
)
from tfdist.checkpoint import checkpoints
from tfdist.launch.testing import LocalCluster, assert_nothing_left

# Faults occur at fixed times, which a busy machine would shift.
pytestmark = [pytest.mark.alone, pytest.mark.slow]

MAX_STEPS, SAVE_STEPS = 600, 100


def command(model_dir, *flags):
    job = [sys.executable, "-m", "tests.saving_job"]
    return [*job, f"--model_dir={model_dir}", *flags]


def start(tmp_path, *flags):
    return LocalCluster(
        command(tmp_path / "model", *flags),
        ps=2,
        workers=1,
        cwd=ROOT,
        log_dir=tmp_path / "logs",
        restart_secs=1.0,
    )


@pytest.fixture(scope="module")
def alone_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("alone")


@functools.cache
def replayed(model_dir, steps):
    """What one process saves at certain steps without any fault."""
    flags = f"--save_at={[*steps]}", f"--max_steps={max(steps)}"
    alone = command(model_dir, *flags, "--step_secs=0", "--save_secs=9999")
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, timeout=900)
    assert not done.returncode, done.stderr[-3000:]
    return {step: tensors(f"{model_dir}/model.ckpt-{step}") for step in steps}


def assert_are_of_their_steps(model_dir, alone_dir, ahead=0, since=MAX_STEPS):
    """Every checkpoint has exactly the values of its step.

    From step `since` on, a value may be up to `ahead` steps newer.
    """
    saved = {
        checkpoints.step_of(path): tensors(path)
        for path in checkpoints.listed(str(model_dir))
    }
    steps = {s + more for s in saved for more in range(1 + ahead)}
    expected = replayed(alone_dir, tuple(sorted(steps)))
    for step, values in saved.items():
        assert values.keys() == expected[step].keys()
        for name, value in values.items():
            equal = value == expected[step][name]
            for more in range(1, 1 + ahead if step >= since else 1):
                equal |= value == expected[step + more][name]
            assert np.all(equal), (step, name)
    return sorted(saved)


def steps_while_writing(output):
    """How many steps ran before each checkpoint was complete."""
    made, at = [], 0
    for line in output.splitlines():
        if match := re.match(r"At (\d+)\.", line):
            at = int(match[1])
        elif match := re.match(r"INFO Saved .*-(\d+)\.", line):
            made.append(at - int(match[1]))
    return made


def kill_in_mid_write(job, model_dir, task):
    """Kills a task while a checkpoint is written; returns its step."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pid = job.pid(task)
        while not (writing := list(model_dir.glob("*_temp"))):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        if pid is None:
            time.sleep(0.2)
            continue
        os.kill(pid, signal.SIGKILL)
        step = re.search(r"-(\d+)_temp", writing[0].name)[1]
        time.sleep(0.3)
        # A dead chief's servers may still write its index: that is ignored.
        newest = checkpoints.latest(str(model_dir))
        if newest is None or checkpoints.step_of(newest) < int(step):
            return int(step)
    raise AssertionError("Every checkpoint was complete too early.")


@pytest.mark.parametrize("tasks", [(), ("ps:0", CHIEF)], ids=["well", "killed"])
def test_each_is_of_its_step(tmp_path, alone_dir, tasks):
    model_dir, lost = tmp_path / "model", []
    flags = f"--max_steps={MAX_STEPS}", f"--save_steps={SAVE_STEPS}"
    with start(tmp_path, *flags) as job:
        job.wait_until_step(150, timeout_secs=120)
        for task in tasks:
            lost.append(kill_in_mid_write(job, model_dir, task))
            job.wait_until_step(lost[-1] + 50, timeout_secs=120)
        assert job.wait(timeout_secs=120) == 0
        output = job.output(CHIEF)
    assert_nothing_left(job)
    begun = re.findall(r"continues at step (\d+)", output)
    assert list(map(int, begun)) == [step - SAVE_STEPS for step in lost]
    assert max(steps_while_writing(output)) > 0
    assert steps_while_writing(output)[-1] == 0  # The last is waited for.
    assert last_saved(output) == MAX_STEPS
    steps = assert_are_of_their_steps(model_dir, alone_dir)
    assert steps == [*range(0, MAX_STEPS + 1, SAVE_STEPS)]
    assert not list(model_dir.glob("*_temp*"))


def test_killed_at_random_moments(tmp_path):
    """A job that saves every second restores correct, second-old values.

    A dead worker leaves a half-applied step that another repeats, so values
    may be of that step or the next one. It is therefore killed last.
    """
    model_dir, lost = tmp_path / "model", []
    random = np.random.default_rng()
    with start(tmp_path, "--max_steps=100000", "--save_secs=1") as job:
        for task in ("ps:0", CHIEF, "ps:1", "worker:0"):
            job.wait_until_step((job.step or 0) + 100, timeout_secs=120)
            time.sleep(random.uniform(0, 1.5))
            step = int(found(job, r"^At (\d+)\.")[-1])
            assert job.kill(task).effect == "SIGKILL"
            if task != "worker:0":
                continues = next_line(job, CONTINUES, lost)
                lost.append(step - int(continues[1]))
        job.wait_until_step(step + 200, timeout_secs=120)
        os.kill(job.pid(CHIEF), signal.SIGTERM)
        assert wait_for_exit(job, CHIEF) == 143
    print("steps lost:", lost)
    steps = assert_are_of_their_steps(
        model_dir, tmp_path / "one", ahead=1, since=step
    )
    assert steps[-1] > step
    assert max(lost) < 400

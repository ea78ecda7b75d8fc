"""Every row of the failure table in `tfdist/session/__init__.py`.

Real processes, real signals. `-s` shows how long each took.
"""

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfdist.checkpoint import checkpoints
from tfdist.launch.testing import LocalCluster, assert_nothing_left

# Faults occur at fixed times, which a busy machine would shift.
pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
CHIEF = "chief:0"
SAVE_STEPS = 100
PROGRESS = r"^step +(\d+) .*"
FAILED = r"Failed at step (\d+): .*"
RECOVERED = r"Recovered: at step (\d+), .*"
CONTINUES = r"Training continues at step (\d+) .*"
RESTARTED = "restarts itself"
BUILT = "ps:0 holds "


def command(model_dir, *flags):
    module = [sys.executable, "-m", "tests.recovery_job"]
    return [*module, f"--model_dir={model_dir}", *flags]


def start(model_dir, *flags, **cluster):
    logs = f"{model_dir}-logs"
    cluster = {"ps": 2, "workers": 2, "cwd": ROOT, "log_dir": logs, **cluster}
    return LocalCluster(command(model_dir, *flags), **cluster)


class Stopwatch:
    """Prints how long a test's events took."""

    def __init__(self, what):
        self._what = what
        self._start = time.monotonic()
        print()

    def secs(self):
        return time.monotonic() - self._start

    def say(self, event):
        print(f"[{self.secs():5.1f} s] {self._what}: {event}", flush=True)


def found(job, pattern, task=CHIEF):
    """All matches in a task's output so far."""
    return re.findall(pattern, job.output(task), re.MULTILINE)


def goes_on(job, lines=3, task=CHIEF, timeout_secs=90):
    """Waits for further progress; returns the step."""
    count = len(found(job, PROGRESS, task)) + lines
    return int(
        job.wait_for_line(
            task, PROGRESS, count=count, timeout_secs=timeout_secs
        )[1]
    )


def next_line(job, pattern, before, task=CHIEF, timeout_secs=90):
    """Waits for the first match beyond the `before` known ones."""
    return job.wait_for_line(
        task, pattern, count=len(before) + 1, timeout_secs=timeout_secs
    )


def wait_for_exit(job, task, timeout_secs=90):
    deadline = time.monotonic() + timeout_secs
    while job.pid(task) is not None:
        assert time.monotonic() < deadline, job.output(task)
        time.sleep(0.05)
    return job.exit_codes()[task][-1]


def last_saved(output):
    return int(re.findall(r"Saved .*-(\d+)\.$", output, re.MULTILINE)[-1])


def pids(job, *jobs):
    return {t: job.pid(t) for t in job.ports() if t.split(":")[0] in jobs}


def assert_ends_at(model_dir, max_steps):
    """Checks that the last checkpoint is complete and of exactly this step."""
    path = tf.train.latest_checkpoint(model_dir)
    assert checkpoints.step_of(path) == max_steps
    values = tensors(path)
    iterations = [v for name, v in values.items() if "iteration" in name]
    assert iterations == [max_steps]
    assert_is_finite(path)
    assert not list(Path(model_dir).glob("*_temp*"))


def assert_is_finite(path):
    for name, value in tensors(path).items():
        assert np.isfinite(value).all(), name


def tensors(path):
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    return {
        name: reader.get_tensor(name)
        for name in shapes
        if name.startswith("variables/")
    }


# --- Tasks killed one after the other in one job -----------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def job(model_dir):
    """An endless job whose tasks are restarted after a second."""
    with start(model_dir, restart_secs=1.0) as job:
        job.wait_until_step(SAVE_STEPS, timeout_secs=120)
        yield job
    assert_nothing_left(job)


@pytest.mark.slow
def test_nothing_is_traced_once_steps_run(job):
    """Tracing would block on a frozen task, and hold Python's global lock."""
    job.wait_for_line(CHIEF, r"Saved .*-300\.$")
    output = job.output(CHIEF)
    # The only evaluation of this job is that of step 100.
    _, _, later = output.partition("step     110 of")
    assert "functions are traced" in output
    assert "step     290 of" in later
    assert "functions are traced" not in later


def test_worker_killed_comes_back(job):
    before = found(job, RECOVERED), pids(job, "chief", "ps"), job.step
    watch = Stopwatch("worker killed")
    injection = job.kill("worker:1")
    assert injection.effect == "SIGKILL"
    assert goes_on(job) > before[2]
    watch.say("the job goes on")
    job.wait_for_line(CHIEF, "worker:1: not up")
    job.wait_for_line(CHIEF, "worker:1 is back")
    job.wait_for_line(CHIEF, r"worker:1 is back(.|\n)*2/2 workers$")
    watch.say("it is taken back")
    assert job.pid("worker:1") != injection.pid
    assert before[:2] == (found(job, RECOVERED), pids(job, "chief", "ps"))


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(["ps:0"], id="ps"),
        pytest.param(
            ["ps:1", "worker:0"], id="ps and worker", marks=pytest.mark.slow
        ),
    ],
)
def test_ps_killed_comes_back(job, killed):
    goes_on(job, 1)
    lines = (FAILED, CONTINUES, RECOVERED, RESTARTED, BUILT)
    before = [found(job, line) for line in lines]
    chief, old = job.pid(CHIEF), {task: job.pid(task) for task in killed}
    watch = Stopwatch(" and ".join(killed) + " killed")
    assert {job.kill(task).effect for task in killed} == {"SIGKILL"}
    line = next_line(job, FAILED, before[0])
    watch.say(line[0])
    assert killed[0] in line[0]
    # A checkpoint may have been in progress at the step that failed.
    under_way = int(line[1]) // SAVE_STEPS * SAVE_STEPS
    line = next_line(job, CONTINUES, before[1])
    saved = last_saved(job.output(CHIEF)[: line.start()])
    assert int(line[1]) in (saved, under_way)
    assert goes_on(job) > int(line[1])
    watch.say("first steps")
    failed, _, recovered, restarted, built = (
        len(found(job, pattern)) - len(seen)
        for pattern, seen in zip(lines, before, strict=True)
    )
    assert recovered + restarted == 1
    if killed == ["ps:0"]:
        # The model and its functions are kept, with newly allocated variables.
        assert (failed, restarted, built) == (1, 0, 0)
    else:
        # With a worker lost as well, the first attempt may also fail, and the
        # process may have to restart itself.
        assert failed in (1, 2), job.output(CHIEF)
    assert job.pid(CHIEF) == chief
    assert all(job.pid(task) != old[task] for task in killed)


@pytest.mark.slow
def test_second_chief_is_refused(job):
    before = found(job, RECOVERED), pids(job, "chief", "worker", "ps")
    watch = Stopwatch("second chief")
    same = job.add_task("chief", address_of=CHIEF)
    other = job.add_task("chief")
    for task, names_holder in (
        (same, f"127.0.0.1:{job.ports()[CHIEF]}, the chief's address"),
        (other, f"process {job.pid(CHIEF)} on host "),
    ):
        assert wait_for_exit(job, task) == 1
        watch.say(f"{task} is refused")
        assert "Another chief holds this job" in job.output(task)
        assert names_holder in job.output(task)
    step = job.step
    assert goes_on(job) > step
    chiefs = {same: None, other: None}
    assert before[0] == found(job, RECOVERED)
    assert before[1] | chiefs == pids(job, "chief", "worker", "ps")


@pytest.mark.slow
def test_chief_killed_and_started_again(job):
    goes_on(job, 1)
    before = found(job, CONTINUES)
    servers = pids(job, "worker", "ps")
    watch = Stopwatch("chief killed")
    injection = job.kill(CHIEF)
    assert injection.effect == "SIGKILL"
    line = next_line(job, CONTINUES, before)
    watch.say(line[0])
    assert int(line[1]) == last_saved(job.output(CHIEF)[: line.start()])
    assert goes_on(job, 1) > int(line[1])
    watch.say("first steps")
    assert job.pid(CHIEF) != injection.pid
    assert pids(job, "worker", "ps") == servers


@pytest.fixture(scope="module")
def second_life(job, model_dir):
    """The step at which SIGTERM stopped the job, and the next chief.

    The next chief has 137 steps left to run.
    """
    goes_on(job, 1)
    watch = Stopwatch("SIGTERM to the chief")
    job.set_restart_secs(CHIEF, None)
    job.terminate(CHIEF)
    watch.say("it has ended")
    assert job.exit_codes()[CHIEF][-1] == 143
    step = checkpoints.step_of(tf.train.latest_checkpoint(model_dir))
    more = command(model_dir, f"--max_steps={step + 137}", "--step_secs=0.1")
    chief = job.add_task("chief", address_of=CHIEF, command=more)
    goes_on(job, 1, chief)
    watch.say("first steps of the next chief")
    return step, chief


@pytest.mark.slow
def test_sigterm_to_the_chief_loses_nothing(job, second_life):
    step, chief = second_life
    assert "Told to end (SIGTERM)" in job.output(CHIEF)
    assert step == last_saved(job.output(CHIEF)) >= job.step
    assert int(found(job, CONTINUES, chief)[0]) == step


@pytest.mark.slow
def test_worker_stays_away(job, second_life, model_dir):
    """The job ends with a worker that had been killed and had rejoined."""
    step, chief = second_life
    watch = Stopwatch("worker stays away")
    job.set_restart_secs("worker:0", None)
    assert job.kill("worker:0").effect == "SIGKILL"
    goes_on(job, 1, chief)
    watch.say("the job goes on")
    assert wait_for_exit(job, chief) == 0
    watch.say("the job has ended")
    assert_ends_at(model_dir, step + 137)
    assert not found(job, RECOVERED, chief)
    for task in ("ps:0", "ps:1", "worker:1"):
        assert wait_for_exit(job, task) == 0


# --- Connections to the servers lost ------------------------------------------


@pytest.mark.slow
def test_workers_lose_their_connections_to_the_servers(tmp_path):
    """The step and its input fail, which must not count as the data's end."""
    told, model_dir = tmp_path / "told", tmp_path / "model"
    flags = [f"--cut_when={told}", "--max_steps=300", "--step_secs=0.01"]
    with start(model_dir, *flags, workers=1) as job:
        goes_on(job, 1)
        told.touch()
        assert wait_for_exit(job, CHIEF) == 0
        assert int(found(job, r"^Cut (\d+) connections", "worker:0")[0]) >= 2
        assert "input ended" not in job.output(CHIEF)
        assert not found(job, RECOVERED)
        assert_ends_at(model_dir, 300)
    assert_nothing_left(job)


# --- What ends a job ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.soak
def test_servers_start_anew_after_many_connections(tmp_path):
    """The restart costs one more recovery, but no step."""
    flags = ["--max_steps=900", "--most_connections=3"]
    with start(tmp_path / "model", *flags, restart_secs=1.0) as job:
        others = ["ps:1", "worker:0", "worker:1"]
        pids = [job.pid(task) for task in others]
        job.wait_until_step(150, timeout_secs=90)
        for _ in range(2):
            recovered = found(job, RECOVERED)
            job.kill("ps:0")
            next_line(job, RECOVERED, recovered)
        for task in others:
            job.wait_for_line(
                task,
                f"3 connections of a chief: this process {RESTARTED}",
                timeout_secs=90,
            )
        goes_on(job)
        assert [job.pid(task) for task in others] == pids
        assert job.wait(timeout_secs=120) == 0
    path = tf.train.latest_checkpoint(tmp_path / "model")
    assert checkpoints.step_of(path) == 900


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A worker and a ps that serve one chief after the other."""
    logs = tmp_path_factory.mktemp("ended")
    with start(logs, ps=1, workers=1, absent=[CHIEF]) as servers:
        yield servers
    assert_nothing_left(servers)


def add_chief(servers, model_dir, *flags):
    pace = ["--step_secs=0.005", "--save_steps=20", "--wait_secs=4"]
    return servers.add_task(
        "chief",
        address_of=CHIEF,
        command=command(model_dir, *pace, *flags),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "error", "where"),
    [
        (
            "--raise_at=65",
            "LookupError: A mistake of the user's.",
            'raise LookupError("A mistake of the user\'s.")',
        ),
        ("--bad_id_at=65", "InvalidArgumentError", "embedding"),
    ],
    ids=["in a hook", "in the input"],
)
def test_error_of_the_user_is_raised_once(
    servers, tmp_path, flag, error, where
):
    chief = add_chief(servers, tmp_path, flag)
    assert wait_for_exit(servers, chief) == 1
    output = servers.output(chief)
    assert len(re.findall(rf"^\S*{error}", output, re.MULTILINE)) == 1
    assert output.count("Traceback") == 1
    assert where in output
    assert "last checkpoint" not in output
    path = tf.train.latest_checkpoint(tmp_path)
    assert checkpoints.step_of(path) == 60
    assert_is_finite(path)


@pytest.mark.slow
def test_nan_keeps_the_last_good_checkpoint(servers, tmp_path):
    chief = add_chief(servers, tmp_path, "--nan_at=65")
    assert wait_for_exit(servers, chief) == 1
    output = servers.output(chief)
    assert len(re.findall("The loss is NaN at step", output)) == 1
    assert "NanLossDuringTrainingError" in output
    path = tf.train.latest_checkpoint(tmp_path)
    assert checkpoints.step_of(path) == 60
    assert_is_finite(path)


@pytest.mark.slow
def test_ps_stays_away(servers, tmp_path):
    """The error names it, also in the next chief, which never saw it."""
    address = re.escape(f"ps:0 at 127.0.0.1:{servers.ports()['ps:0']}")
    chief = add_chief(servers, tmp_path)
    goes_on(servers, 1, chief)
    for what in ("ps stays away", "ps missing at the start"):
        watch = Stopwatch(what)
        if chief is None:
            chief = add_chief(servers, tmp_path)
        else:
            assert servers.kill("ps:0").effect == "SIGKILL"
        assert wait_for_exit(servers, chief) == 1
        watch.say("the chief has ended")
        (line,) = found(servers, "^TimeoutError: .*", chief)
        assert re.search(rf"not come up within 4 s: {address} \(not up", line)
        chief = None
    servers.start("ps:0")


# --- Frozen, and merely slow -------------------------------------------------

NOTICED = r"worker:1 has not answered for"


@pytest.fixture(scope="module")
def frozen_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="module")
def frozen_job(frozen_dir):
    """A job whose tasks are not restarted: nothing may be killed.

    It saves so often that every fault coincides with a checkpoint.
    """
    with start(frozen_dir, "--save_steps=20") as job:
        job.wait_until_step(SAVE_STEPS, timeout_secs=120)
        yield job
    assert_nothing_left(job)


@pytest.mark.slow
@pytest.mark.soak
def test_worker_frozen(frozen_job):
    job = frozen_job
    before, chief = found(job, FAILED), job.pid(CHIEF)
    watch = Stopwatch("worker frozen")
    injection = job.freeze("worker:1", for_secs=40)
    assert injection.effect == "every thread stopped"
    job.wait_for_line(CHIEF, NOTICED, timeout_secs=30)
    watch.say("noticed")
    assert watch.secs() < 30
    step = goes_on(job)
    watch.say("the job goes on")
    job.wait_for_line(CHIEF, "worker:1 is back")
    job.wait_for_line(CHIEF, r"worker:1 is back(.|\n)*2/2 workers$")
    watch.say("it is taken back")
    assert watch.secs() > 40
    assert goes_on(job) > step
    assert found(job, FAILED) == before
    assert job.pid("worker:1") == injection.pid
    assert job.pid(CHIEF) == chief


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("ps", ["ps:0", "ps:1"])
def test_ps_frozen(frozen_job, ps):
    job = frozen_job
    goes_on(job, 1)
    waits = rf"Waiting for {ps} at .*\(connected, but"
    before = [found(job, p) for p in (RESTARTED, waits, CONTINUES)]
    chief = job.pid(CHIEF)
    watch = Stopwatch(f"{ps} frozen")
    injection = job.freeze(ps)
    assert injection.effect == "every thread stopped"
    line = next_line(job, f".*{RESTARTED}.*", before[0])
    watch.say(line[0])
    assert watch.secs() < 30
    assert ps in line[0]
    next_line(job, waits, before[1])
    job.resume(ps)
    line = next_line(job, CONTINUES, before[2])
    watch.say(line[0])
    assert int(line[1]) == last_saved(job.output(CHIEF)[: line.start()])
    assert goes_on(job, 1) > int(line[1])
    watch.say("first steps")
    assert (job.pid(CHIEF), job.pid(ps)) == (chief, injection.pid)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("secs", [10, 75])
def test_chief_frozen(frozen_job, secs):
    """Up to a minute it loses nothing; then the servers may free its state."""
    job = frozen_job
    step = goes_on(job, 1)
    before = found(job, FAILED), found(job, CONTINUES)
    servers = pids(job, "ps", "worker")
    watch = Stopwatch(f"chief frozen for {secs} s")
    injection = job.freeze(CHIEF, for_secs=secs)
    assert injection.effect == "every thread stopped"
    after = goes_on(job, timeout_secs=secs + 60)
    watch.say(f"goes on at step {after}")
    assert watch.secs() > secs
    if secs < 60:
        assert after > step
        assert before == (found(job, FAILED), found(job, CONTINUES))
    else:
        rebuilt = len(found(job, CONTINUES)) - len(before[1])
        assert (rebuilt, after > step) in [(0, True), (1, True), (1, False)]
    assert job.pid(CHIEF) == injection.pid
    assert pids(job, "ps", "worker") == servers


@pytest.mark.slow
@pytest.mark.soak
def test_network_cut(frozen_job):
    job = frozen_job
    if not job.private:
        pytest.skip("the system grants no private network")
    goes_on(job, 1)
    before, tasks = found(job, CONTINUES), pids(job, "chief", "ps", "worker")
    watch = Stopwatch("network cut")
    job.cut_network(for_secs=25)
    line = next_line(job, CONTINUES, before)
    watch.say(line[0])
    goes_on(job, 1)
    watch.say("first steps")
    assert pids(job, "chief", "ps", "worker") == tasks


@pytest.mark.slow
@pytest.mark.soak
def test_job_that_was_frozen_ends_exactly(frozen_job, frozen_dir):
    """Only the worker that had been frozen earlier remains."""
    job = frozen_job
    job.terminate(CHIEF)
    assert job.exit_codes()[CHIEF] == [143]
    step = checkpoints.step_of(tf.train.latest_checkpoint(frozen_dir))
    more = command(frozen_dir, f"--max_steps={step + 137}", "--step_secs=0.1")
    chief = job.add_task("chief", address_of=CHIEF, command=more)
    goes_on(job, 1, chief)
    assert job.freeze("worker:0").effect == "every thread stopped"
    assert wait_for_exit(job, chief) == 0
    assert_ends_at(frozen_dir, step + 137)


@pytest.mark.slow
@pytest.mark.soak
def test_long_step_is_not_taken_for_a_freeze(tmp_path):
    flags = ["--max_steps=437", "--long_at=60", "--long_secs=30"]
    with start(tmp_path, *flags, ps=1) as job:
        job.wait_until_step(100, timeout_secs=120)
        watch = Stopwatch("a step of 30 s")
        assert job.wait(timeout_secs=120) == 0
        watch.say("the job has ended")
        assert watch.secs() > 25  # The others take 4 s.
        assert not found(job, r"not answer|not up|is back|Failed at")
        assert_ends_at(tmp_path, 437)
    assert_nothing_left(job)

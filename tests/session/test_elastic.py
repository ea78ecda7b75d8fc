"""Workers join and leave while a job trains: real processes and signals."""

import json
import pathlib
import re
import subprocess
import sys
import time
from unittest import mock

import pytest
import tensorflow as tf

import tfdist
from tests.cluster.test_size import ask_for
from tests.data.test_one_pass import BATCH, Launched
from tests.recovery_job import HURRY
from tests.session.test_recovery import (
    CHIEF,
    RECOVERED,
    RESTARTED,
    ROOT,
    assert_ends_at,
    found,
    goes_on,
    start,
    wait_for_exit,
)
from tfdist.checkpoint import checkpoints
from tfdist.cluster.health import ServerFailure, ServerLostError
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.spec import Cluster
from tfdist.launch.testing import assert_nothing_left
from tfdist.training.loop import Loop, unwatched


class Resizable(Launched):
    """A job whose launcher can start more workers."""

    module = "tests.recovery_job"

    def __init__(self, model_dir, *args):
        super().__init__(model_dir, *args)
        self._hurry = pathlib.Path(model_dir, HURRY)

    def resize(self, *numbers):
        command = ["-m", "tfdist", "resize", *map(str, numbers)]
        launcher = f"--launcher={self._process.pid}"
        command = [sys.executable, *command, launcher]
        subprocess.run(command, check=True, cwd=ROOT, timeout=120)

    def goes_on(self, lines=3):
        """Waits for further progress."""
        step = r"^\[chief:0\] step +\d"
        count = len(re.findall(step, self.output, re.MULTILINE)) + lines
        self.wait_for(rf"(?:{step}(?:.|\n)*?){{{count}}}")

    def longest_pause(self, pattern):
        """Returns the seconds without progress until a line is written."""
        longest, count, since = 0.0, 0, time.monotonic()
        while not re.search(pattern, self.output, re.MULTILINE):
            assert self._process.poll() is None, self.output
            time.sleep(0.05)
            before = count
            count = len(re.findall(r"^\[chief:0\] step", self.output, re.M))
            now = time.monotonic()
            longest = max(longest, now - since)
            since = since if count == before else now
        return longest

    def serves_again(self, task):
        """Waits for a killed task, which may be back at once."""
        self.wait_for(rf"{task}: SIGKILL(.|\n)*INFO Task {task} serves")

    def end(self):
        """Waits for the remaining steps, which do not sleep."""
        self._hurry.touch()
        assert self._process.wait(180) == 0, self.output
        self._reader.join()


class Ahead(Loop):
    """A loop that runs as many steps ahead as it may."""

    resizable = True
    step = 0

    def run(self, num_steps, watch=unwatched, ahead=0):
        self.step += num_steps
        self._global_step.assign(self.step + ahead)
        return {"loss": 0.0}

    def wait_for_steps(self, watch=unwatched):
        self.step = int(self._global_step.numpy())

    def resize(self, cluster):
        self.num_workers = cluster.num_workers
        return True


def test_a_change_before_the_last_step():
    """The last step is not exceeded, though running steps are waited for."""
    jobs = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]}
    size = ClusterSize(Cluster.from_jobs(jobs, "chief", 0), None)
    made = []

    def build_fn():
        step = tf.Variable(0, dtype=tf.int64)
        made.append(Ahead(step))
        return tfdist.Trainable(made[-1], step, variables={})

    hook = tfdist.StopAtStepHook(last_step=150)
    with tfdist.MonitoredTrainingSession(build_fn, hooks=[hook]) as session:
        session._size, session._health = size, mock.Mock()
        session._health.missing.return_value = []
        size.size, size._due = 1, 2
        session.run()  # 100, and 50 are under way.
        assert session.should_stop()
        assert (session.step, session.num_workers) == (150, 2)
    assert (made[0].num_workers, size.due()) == (2, None)


class Stale(Ahead):
    """A loop that loses a server and whose functions fail from then on."""

    own_variables = ()
    is_kept = False

    def run(self, num_steps, watch=unwatched, ahead=0):
        if self.step == 2:
            if self.is_kept:
                raise tf.errors.AbortedError(None, None, "another incarnation")
            raise ServerLostError({"ps:0": ServerFailure.REPLACED})
        return super().run(1, watch)

    def begin_again(self):
        self.is_kept, self.step = True, 0


@pytest.mark.parametrize("compiles", [False, True])
def test_functions_that_fail_after_they_were_kept_are_made_anew(
    tmp_path, compiles
):
    """Immediately, if a worker was compiling one when a server died."""
    made = []

    def build_fn():
        step = tf.Variable(0, dtype=tf.int64)
        made.append(Stale(step) if not made else Ahead(step))
        made[-1].compiles = lambda: compiles
        return tfdist.Trainable(made[-1], step, variables={"step": step})

    with tfdist.MonitoredTrainingSession(
        build_fn, checkpoint_dir=str(tmp_path)
    ) as session:
        session._size = mock.Mock(shrinks=False, change=None)
        session._size.due.return_value = None
        while session.step < 3:
            session.run()
    assert [type(loop) for loop in made] == [Stale, Ahead]
    assert made[0].is_kept is not compiles


@pytest.mark.slow
@pytest.mark.alone
def test_1_to_3_to_2_by_the_launcher(tmp_path):
    launcher = ["--ps=2", "--workers=1:3"]
    flags = ["--max_steps=3000", "--save_steps=100000", "--step_secs=0.05"]
    flags += ["--dealt", "--words"]
    with Resizable(tmp_path / "model", launcher, *flags) as job:
        job.wait_for(r"^\[chief:0\] step .*1/1 workers$")
        assert "worker:1 pid" not in job.output
        job.resize(3)
        job.wait_for(r"^\[chief:0\] INFO workers: 1 -> 3$")
        job.wait_for(r"^\[chief:0\] step .*3/3 workers$")
        job.kill("worker:2")
        job.serves_again("worker:2")
        job.goes_on()
        job.resize(2)
        job.wait_for(r"^\[chief:0\] INFO workers: 3 -> 2$")
        job.wait_for(r"^\[chief:0\] step .*2/2 workers$")
        job.wait_for(r"^\[launch\] worker:2: exit code 0; the job has 2")
        # From here on it behaves like any job of two workers.
        job.kill("worker:0")
        job.serves_again("worker:0")
        assert not re.search("Failed at|Recovered|restarts itself", job.output)
        job.end()
    sizes = re.findall(r"^\[chief:0\] Dealt to (\d)", job.output, re.MULTILINE)
    assert sizes[-3:] == ["1", "3", "2"]
    assert len(re.findall(r"INFO workers: \d", job.output)) == 2
    auc = re.search(r"Evaluation of step 3000: .* auc ([\d.]+)", job.output)
    assert float(auc[1]) > 0.85
    assert "ended by launcher" not in job.output
    assert_ends_at(str(tmp_path / "model"), 3000)


@pytest.mark.slow
@pytest.mark.alone
def test_a_chief_that_restarts_keeps_the_size(tmp_path):
    launcher = ["--ps=2", "--workers=1:3"]
    flags = ["--max_steps=1200", "--save_steps=100"]
    with Resizable(tmp_path / "model", launcher, *flags) as job:
        job.goes_on()
        job.resize(2)
        job.wait_for(r"^\[chief:0\] INFO workers: 1 -> 2$")
        job.wait_for(r"^\[chief:0\] INFO Saved .*-200\.$")
        job.kill("chief:0")
        job.wait_for(r"SIGKILL; started(.|\n)*step .*2/2 workers$")
        job.kill("ps:1")
        job.wait_for(r"^\[chief:0\] WARNING Recovered")
        job.resize(3)
        job.wait_for(r"^\[chief:0\] INFO workers: 2 -> 3$")
        job.end()
    assert_ends_at(str(tmp_path / "model"), 1200)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.soak
def test_by_the_file_elsewhere(tmp_path):
    model_dir = tmp_path / "model"
    ask_for(model_dir, 1)
    flags = ["--max_steps=2000", "--save_steps=100000", "--step_secs=0.05"]
    absent = ["worker:1", "worker:2"]
    with start(model_dir, *flags, workers=3, absent=absent) as job:
        job.wait_for_line(CHIEF, "step .* 1/1 workers$")
        ask_for(model_dir, 3)
        job.start("worker:1")  # The other one comes later.
        job.wait_for_line(CHIEF, "INFO workers: 1 -> 2$")
        job.start("worker:2")
        job.wait_for_line(CHIEF, "INFO workers: 2 -> 3$")
        job.wait_for_line(CHIEF, "step .* 3/3 workers$")
        ask_for(model_dir, 9)
        job.wait_for_line(CHIEF, "ERROR The cluster stays as it is.* names 3")
        ask_for(model_dir, 1)
        job.wait_for_line(CHIEF, "INFO workers: 3 -> 1$")
        for task in absent:
            assert wait_for_exit(job, task) == 0
        goes_on(job)
        assert not found(job, f"{RECOVERED}|{RESTARTED}")
        assert wait_for_exit(job, CHIEF) == 0
    assert_ends_at(str(model_dir), 2000)
    assert_nothing_left(job)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.soak
def test_a_worker_that_died_is_let_go(tmp_path):
    """TensorFlow would wait for the dead worker: the chief restarts itself."""
    model_dir = tmp_path / "model"
    flags = ["--max_steps=1200", "--save_steps=100000"]
    with start(model_dir, *flags, workers=2) as job:
        goes_on(job)
        job.kill("worker:1")
        step = goes_on(job)
        ask_for(model_dir, 1)
        job.wait_for_line(CHIEF, f"workers: 2 -> 1: this process {RESTARTED}")
        line = job.wait_for_line(CHIEF, r"Training continues at step (\d+) ")
        assert int(line[1]) >= step  # None is lost.
        job.wait_for_line(CHIEF, "step .* 1/1 workers$")
        assert wait_for_exit(job, CHIEF) == 0
    assert_ends_at(str(model_dir), 1200)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.soak
def test_synchronous_steps(tmp_path):
    """The size of their accumulators depends on the number of workers."""
    model_dir = tmp_path / "model"
    ask_for(model_dir, 2)
    flags = ["--max_steps=600", "--backup_workers=1", "--save_steps=100000"]
    with start(model_dir, *flags, workers=3) as job:
        step = goes_on(job)
        ask_for(model_dir, 3)
        job.wait_for_line(CHIEF, f"workers: 2 -> 3: this process {RESTARTED}")
        line = job.wait_for_line(CHIEF, r"Training continues at step (\d+) ")
        assert int(line[1]) >= step
        job.wait_for_line(CHIEF, "step .* 3/3 workers$")
        assert wait_for_exit(job, CHIEF) == 0
    path = tf.train.latest_checkpoint(model_dir)
    assert checkpoints.step_of(path) == 600


@pytest.mark.slow
@pytest.mark.alone
def test_other_parameter_servers(tmp_path):
    """Their variables are redistributed from a checkpoint of this very step."""
    launcher = ["--ps=1:3", "--workers=1:2"]
    flags = ["--max_steps=1400", "--save_steps=100000", "--dynamic"]
    with Resizable(tmp_path / "model", launcher, *flags) as job:
        job.goes_on()
        for before, after in ((1, 3), (3, 2)):
            job.resize(f"--ps={after}", "2")
            change = rf"WARNING ps: {before} -> {after}: this process"
            without_step = job.longest_pause(
                rf"{change}(?:.|\n)*?step .* {after}/{after} ps, 2/2 workers"
            )
            print(f"\n{before} to {after} ps: {without_step:.1f} s")
            end, begin = re.split(change, job.output)
            saved = re.findall(r"Saved .*-(\d+)\.\n", end)[-1]
            assert f"Training continues at step {saved} " in begin
        job.wait_for(r"^\[launch\] ps:2: exit code 0; the job has 2 ps")
        job.goes_on()
        job.kill("ps:1")
        job.wait_for(r"^\[chief:0\] WARNING Recovered")
        job.end()
    auc = re.search(r"Evaluation of step 1400: .* auc ([\d.]+)", job.output)
    assert float(auc[1]) > 0.85
    assert_ends_at(str(tmp_path / "model"), 1400)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.soak
def test_kills_around_a_change_of_the_parameter_servers(tmp_path):
    model_dir = tmp_path / "model"
    ask_for(model_dir, 2, ps=2)
    flags = ["--max_steps=2500"]
    cluster = {"ps": 3, "absent": ["ps:2"], "restart_secs": 1.0}
    with start(model_dir, *flags, **cluster) as job:
        job.wait_for_line(CHIEF, "step .* 2/2 ps, 2/2 workers$")
        ask_for(model_dir, 2, ps=3)
        goes_on(job)  # The third one is not up.
        ask_for(model_dir, 2, ps=4)
        job.wait_for_line(
            CHIEF, "ERROR The cluster stays as it is.* names .* 3"
        )
        goes_on(job)
        ask_for(model_dir, 2, ps=3)
        job.kill(CHIEF)
        job.start("ps:2")
        job.wait_for_line(CHIEF, "step .* 3/3 ps, 2/2 workers$")
        # One of the tasks to be removed dies before its removal.
        job.kill("ps:2")
        ask_for(model_dir, 1, ps=1)
        job.wait_for_line(CHIEF, "step .* 1/1 ps, 1/1 workers$")
        assert wait_for_exit(job, CHIEF) == 0  # It told the others nothing.
    assert_ends_at(str(model_dir), 2500)
    assert_nothing_left(job)


def test_other_parameter_servers_are_refused(tmp_path, caplog):
    """The log says why, and the file is restored."""
    jobs = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1", "p:2"]}
    ask_for(tmp_path, 1)

    def build_fn():
        step = tf.Variable(0, dtype=tf.int64)
        return tfdist.Trainable(Ahead(step), step, variables={}, min_ps=2)

    for checkpoint_dir, why in (
        (None, "The job saves no checkpoint to resume from."),
        (str(tmp_path / "model"), "Your `placement` has variables on ps:1"),
    ):
        size = ClusterSize(Cluster.from_jobs(jobs, "chief", 0), str(tmp_path))
        with tfdist.MonitoredTrainingSession(
            build_fn,
            checkpoint_dir=checkpoint_dir,
            hooks=[tfdist.StopAtStepHook(last_step=9)],  # Which saves nothing.
        ) as session:
            session._size, session._health = size, mock.Mock()
            size.wanted_ps = 1
            session.run()
            assert f"Refused: ps: 2 -> 1. {why}" in caplog.text
            assert size.change is None
        content = json.loads((tmp_path / "cluster.json").read_text())
        assert content == {"workers": 1, "ps": 2}


def test_a_member_that_cannot_be_taken_in_is_refused_once(tmp_path, caplog):
    """All-reduce with two of the three processes that the file requests."""
    jobs = {"chief": ["c:1"], "worker": ["w:1", "w:2"]}
    ask_for(tmp_path, 2, min_workers=1)

    def build_fn():
        step = tf.Variable(0, dtype=tf.int64)
        return tfdist.Trainable(Ahead(step), step, variables={})

    with tfdist.MonitoredTrainingSession(build_fn) as session:
        size = ClusterSize(Cluster.from_jobs(jobs, "chief", 0), str(tmp_path))
        session._size, size.size = size, 1
        for _ in range(3):
            session.run()
    assert caplog.text.count("Refused: workers: 1 -> 2. The job saves no") == 1


class OnePass(Resizable):
    module = "tests.one_pass_job"


@pytest.mark.slow
@pytest.mark.alone
def test_one_pass_of_a_job_that_is_resized(tmp_path):
    launcher = ["--ps=1", "--workers=1:3", "--data_workers=2"]
    flags = ["--examples=2000", "--pace_secs=0.04"]
    with OnePass(tmp_path, launcher, *flags) as job:
        job.wait_for(r"^\[chief:0\] step 50,")
        job.resize(3)
        job.wait_for(r"^\[chief:0\] INFO workers: 1 -> 3$")
        job.wait_for(r"^\[chief:0\] step 2\d\d,")
        job.resize(2)
        job.wait_for(r"^\[chief:0\] INFO workers: 3 -> 2$")
        examples, workers = job.counts()
    lost = examples.count(0)
    print(f"\n{lost} of 2000 lost; by worker: {workers}")
    assert set(examples) <= {0, 1}
    assert all(workers)
    # Batches on their way to the worker that left, as if it had died.
    assert lost <= 6 * BATCH

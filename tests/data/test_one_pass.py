"""Exactly one pass over the data: real servers, real clusters, real kills.

`-s` shows the counts.
"""

import collections
import contextlib
import doctest
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf

from tfdist import Cluster
from tfdist.data import data_service
from tfdist.data.data_service import one_pass, serve
from tfdist.launch import network
from tfdist.training import replicas

ROOT = Path(__file__).parents[2]
DEADLINE_SECS = 180
BATCH, BLOCK = 4, 20  # Of one_pass_job.py.
CONTEXT = tf.distribute.InputContext()


def addresses(num):
    """Of this machine, with free ports."""
    holders = network.reserve_ports(num)
    with contextlib.ExitStack() as stack:
        for holder in holders:
            stack.enter_context(holder)
        return [f"127.0.0.1:{h.getsockname()[1]}" for h in holders]


@contextlib.contextmanager
def service(journal):
    """The tf.data service of a cluster, whose chief is this process."""
    chief, dispatcher, data_worker = addresses(3)
    jobs = {
        "chief": [chief],
        "dispatcher": [dispatcher],
        "data_worker": [data_worker],
    }
    over = threading.Event()
    threads = [
        threading.Thread(
            target=serve,
            args=(Cluster.from_jobs(jobs, job, 0), journal, over.is_set),
        )
        for job in ("data_worker", "dispatcher")
    ]
    for thread in threads:
        thread.start()
    try:
        yield Cluster.from_jobs(jobs, "chief", 0)
    finally:
        over.set()
        for thread in threads:
            thread.join(DEADLINE_SECS)
            assert not thread.is_alive()


def test_fast_and_slow_readers_of_two_epochs(tmp_path):
    journal = str(tmp_path / "journal")
    with service(journal) as cluster:
        dataset = tf.data.Dataset.range(103).batch(4)

        def reader():
            return iter(one_pass(dataset, CONTEXT, cluster=cluster).repeat(2))

        readers = [reader(), reader()]
        seen = [collections.Counter(), collections.Counter()]
        while readers[0] or readers[1]:
            for i in (0, 1, 1, 1):
                try:
                    seen[i].update(next(readers[i]).numpy().tolist())
                except (StopIteration, TypeError):
                    readers[i] = None
        assert seen[0] + seen[1] == dict.fromkeys(range(103), 2)
        assert seen[0].total() < seen[1].total()
        # Whoever is started again gets nothing twice.
        assert list(reader()) == []
        assert os.path.exists(journal)
    assert not os.path.exists(journal)


@pytest.mark.parametrize(
    ("own", "missing"),
    [("chief", r"2 task.*: dispatcher:0 at .*, data_worker:0 at"), ("", "")],
)
def test_a_service_that_is_not_there(own, missing):
    chief, dispatcher, data_worker = addresses(3)
    jobs = {"chief": [chief], "worker": ["w:1"]}
    if not own:
        cluster = Cluster.from_jobs(jobs, "chief", 0)
        with pytest.raises(ValueError, match="--data_workers=1"):
            one_pass(tf.data.Dataset.range(3), CONTEXT, cluster=cluster)
        return
    jobs |= {"dispatcher": [dispatcher], "data_worker": [data_worker]}
    cluster = Cluster.from_jobs(jobs, "chief", 0)
    with pytest.raises(TimeoutError, match=missing):
        one_pass(
            tf.data.Dataset.range(3),
            CONTEXT,
            cluster=cluster,
            start_timeout_secs=0.2,
        )


def test_needs_the_context():
    with pytest.raises(TypeError, match="the input function gets"):
        one_pass(tf.data.Dataset.range(3), None)


def test_batches_without_examples_follow_those_with():
    batches = tf.data.Dataset.range(2).map(
        lambda i: {
            "dense": tf.ones([3, 2], tf.int32),
            "ragged": tf.RaggedTensor.from_row_lengths(
                tf.fill([2 * i + 2, 5], "x"), [i, i + 2, 0]
            ),
            "nested": tf.RaggedTensor.from_nested_row_lengths(
                tf.range(3), [[1, 0, 1], [1, 2]]
            ),
            "sparse": tf.sparse.from_dense(tf.ones([3, 4])),
        }
    )
    nothing = replicas.without_examples(batches.element_spec)
    padded = batches.concatenate(tf.data.Dataset.from_tensors(nothing).repeat())
    sizes = [
        [part.shape[0] for part in batch.values()] for batch in padded.take(4)
    ]
    assert sizes == [[3] * 4, [3] * 4, [0] * 4, [0] * 4]


@pytest.mark.parametrize("module", [data_service, replicas])
def test_doctests(module):
    assert doctest.testmod(module).failed == 0


# --- Clusters ----------------------------------------------------------------


class Launched:
    """A cluster of `tfdist.launch`, its output, and its processes."""

    module = "tests.one_pass_job"

    def __init__(self, model_dir, launcher, *flags):
        job = ["-m", self.module, f"--model_dir={model_dir}", *flags]
        command = ["-m", "tfdist.launch", *launcher, *job] if launcher else job
        self._process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self.output += line

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.kill()  # The kernel kills its tasks.
        self._process.wait()
        self._reader.join()

    def wait_for(self, pattern):
        deadline = time.monotonic() + DEADLINE_SECS
        while not (found := re.search(pattern, self.output, re.MULTILINE)):
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)
        return found

    def kill_once(self, task):
        """Kills a task."""
        self.wait_for(rf"{task} pid (\d+)\b")
        pid = re.findall(rf"{task} pid (\d+)\b", self.output)[-1]
        os.kill(int(pid), signal.SIGKILL)

    def kill(self, task):
        """Kills a task; it is started again."""
        self.kill_once(task)
        self.wait_for(rf"^\[launch\] {task}: SIGKILL; started again")

    def counts(self):
        """How often each row was trained on, once all have ended well."""
        assert self._process.wait(DEADLINE_SECS) == 0, self.output
        self._reader.join()
        assert "ended by launcher" not in self.output
        counts = json.loads(self.wait_for(r"counts (.*)$").group(1))
        examples = [round(count, 4) for count in counts["examples"]]
        return examples, [round(count) for count in counts["workers"]]


@pytest.mark.slow
@pytest.mark.alone
def test_every_example_once(tmp_path):
    launcher = ["--ps=1", "--workers=3", "--data_workers=2"]
    flags = ["--examples=800", "--epochs=2", "--pace_secs=0.03"]
    with Launched(tmp_path, launcher, *flags) as job:
        examples, workers = job.counts()
    print(f"\n1600 examples, by worker: {workers}")
    assert set(examples) == {2}
    assert sum(workers) == 1600
    assert workers[0] > workers[1] > workers[2] > 0
    assert not (tmp_path / "data_service").exists()


@pytest.mark.slow
@pytest.mark.alone
def test_what_a_death_costs(tmp_path):
    launcher = ["--ps=1", "--workers=3", "--data_workers=2"]
    deaths = {"worker:2": 20, "data_worker:1": 160, "dispatcher:0": 300}
    flags = ["--examples=1800", "--pace_secs=0.1"]
    with Launched(tmp_path, launcher, *flags) as job:
        for task, step in deaths.items():
            job.wait_for(rf"^\[chief:0\] step {step},")
            job.kill(task)
        examples, _ = job.counts()
    assert set(examples) <= {0, 1}
    lost = [i for i, count in enumerate(examples) if not count]
    # Examples are handed out in order, but for those that some buffer holds.
    starts = [0, 400, 1000, 1800]
    losses = {
        task: [i for i in lost if start <= i < end]
        for task, start, end in zip(deaths, starts, starts[1:], strict=False)
    }
    print("\n" + "\n".join(f"{t}: {len(x)}: {x}" for t, x in losses.items()))
    # One batch in its step, one in a `map`, two of each data worker under way.
    assert 0 < len(losses["worker:2"]) <= 6 * BATCH
    assert len(losses["data_worker:1"]) <= 2 * BLOCK
    assert losses["dispatcher:0"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "flags", "alone"),
    [
        # Fifty batches are worker 1's; there are fifteen others, whose share
        # of each is chance.
        pytest.param(
            ["--workers=2", "--data_workers=1"],
            ["--tail=200"],
            50 - 15,
            marks=pytest.mark.alone,
        ),
        ([], ["--replicas=2"], 1),
    ],
)
def test_replicas_with_uneven_ends(tmp_path, launcher, flags, alone):
    with Launched(tmp_path, launcher, "--examples=260", *flags) as job:
        examples, _ = job.counts()
        step = int(job.wait_for(r"input ended at step (\d+)").group(1))
    parts = collections.Counter(examples)
    print(f"\n{step} steps; examples by share of their step: {parts}")
    # How many replicas had a batch, to how many steps were such.
    steps = {round(1 / p): n * p / BATCH for p, n in parts.items()}
    assert sum(steps.values()) == pytest.approx(step, abs=0.1)
    assert all(abs(1 / p - round(1 / p)) < 0.01 for p in parts)
    assert steps[1] > alone - 0.1

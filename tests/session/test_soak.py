"""Thirty random faults and two changes of its size in one job.

It ends at its step, as if nothing were.
"""

import itertools
import json
import random
import re
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import tensorflow as tf

from tests.cluster.test_size import ask_for
from tfdist.checkpoint import checkpoints
from tfdist.launch.testing import (
    Fault,
    LocalCluster,
    assert_nothing_left,
)

ROOT = Path(__file__).parents[2]
MAX_STEPS = 9000
NUM_FAULTS = 30
TASKS = ["chief:0", "ps:0", "ps:1", "worker:0", "worker:1", "worker:2"]
SEED = 4
MEGABYTE = 1 << 20

pytestmark = [pytest.mark.slow, pytest.mark.soak]


def cluster(model_dir):
    command = [
        *[sys.executable, "-m", "tests.recovery_job"],
        *[f"--model_dir={model_dir}", f"--max_steps={MAX_STEPS}"],
        *["--step_secs=0.01", "--wait_secs=120"],
    ]
    return LocalCluster(
        command,
        ps=2,
        workers=3,
        restart_secs=2.0,
        cwd=ROOT,
        log_dir=f"{model_dir}-logs",
    )


def faults():
    draw = random.Random(SEED)
    drawn = [
        Fault(
            draw.choice(("kill", "freeze")),
            draw.choice(TASKS),
            at_step=draw.randint(200, MAX_STEPS - 500),
            for_secs=draw.uniform(3.0, 25.0),
        )
        for _ in range(NUM_FAULTS)
    ]
    return sorted(drawn, key=lambda fault: fault.at_step)


class Memory(threading.Thread):
    """Samples the memory of every process of every task.

    Without the pages of files: one that was forked has fewer of them than what
    it becomes where it restarts itself, which keeps the pid.
    """

    def __init__(self, job):
        super().__init__(daemon=True)
        self.samples = {}
        self._job = job
        self._stopped = threading.Event()

    def run(self):
        while not self._stopped.wait(1.0):
            for task in TASKS:
                pid = self._job.pid(task)
                if pid is None:
                    continue
                try:
                    memory = psutil.Process(pid).memory_info()
                except psutil.Error:
                    continue  # It is down just now.
                own = memory.rss - memory.shared
                self.samples.setdefault((task, pid), []).append(own)

    def stop(self):
        self._stopped.set()
        self.join()

    def growth(self):
        """Of each long-lived process, in the second half of its life.

        In the first half it still traces functions, and always grows.
        """
        return {
            name: (max(s[-20:]) - max(s[: len(s) // 2])) / MEGABYTE
            for name, s in self.samples.items()
            if len(s) > 120
        }


class Resizes(threading.Thread):
    """The job has two workers in the second third of its steps, else three."""

    def __init__(self, job, model_dir):
        super().__init__(daemon=True)
        self.asked = []
        self._job, self._model_dir = job, model_dir
        self._stopped = threading.Event()

    def run(self):
        for number, at_step in ((2, MAX_STEPS // 3), (3, 2 * MAX_STEPS // 3)):
            while (self._job.step or 0) < at_step:
                if self._stopped.wait(0.5):
                    return
            ask_for(self._model_dir, number)
            if number == 3 and self._job.pid("worker:2") is None:
                self._job.start("worker:2")
            self.asked.append(number)

    def stop(self):
        self._stopped.set()
        self.join()


def run(model_dir, some_faults):
    """Runs the job; returns what was injected, its result and its memory."""
    start = time.monotonic()
    with cluster(model_dir) as job:
        memory, resizes = Memory(job), Resizes(job, model_dir)
        memory.start()
        if some_faults:
            resizes.start()
        try:
            done = job.run(some_faults, timeout_secs=1500)
        finally:
            memory.stop()
            if some_faults:
                resizes.stop()
        assert not some_faults or resizes.asked == [2, 3]
        assert job.wait(timeout_secs=5) == 0
        codes = job.exit_codes()
    assert_nothing_left(job)
    path = tf.train.latest_checkpoint(model_dir)
    assert checkpoints.step_of(path) == MAX_STEPS
    assert not list(Path(model_dir).glob("*_temp*"))
    result = json.loads((Path(model_dir) / "eval/latest.json").read_text())
    assert result["metrics"]["global_step"] == MAX_STEPS
    print(f"\n{len(done)} faults, {time.monotonic() - start:.0f} s, {result}")
    return done, codes, result["metrics"], memory.growth()


def test_thirty_random_faults(tmp_path):
    planned = faults()
    assert {f.task for f in planned} == set(TASKS)
    assert {f.kind for f in planned} == {"kill", "freeze"}
    steps = [f.at_step for f in planned]
    assert min(b - a for a, b in itertools.pairwise(steps)) < 30

    _, _, undisturbed, _ = run(tmp_path / "undisturbed", [])
    done, codes, metrics, growth = run(tmp_path / "disturbed", planned)

    assert len(done) == NUM_FAULTS
    kills = [i for i in done if i.kind == "kill"]
    for task in TASKS:
        killed = [i for i in kills if i.task == task]
        assert codes[task].count(-9) >= len(killed)
    assert metrics["auc"] == pytest.approx(undisturbed["auc"], abs=0.02)
    assert metrics["loss"] == pytest.approx(undisturbed["loss"], abs=0.03)
    chief = (tmp_path / "disturbed-logs" / "chief-0.log").read_text()
    sizes = re.findall(r"^step .*/(\d) workers", chief, re.MULTILINE)
    assert {"2", "3"} <= {*sizes}
    recoveries = re.findall(r"Failed at step|restarts itself", chief)
    print(f"{len(recoveries)} recoveries; growth in MB: {growth}")
    assert recoveries
    # A leaked copy of traced functions would be 60 MB for each recovery.
    assert growth
    assert all(mb < 150 for mb in growth.values()), growth

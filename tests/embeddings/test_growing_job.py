"""Tables that grow on a real cluster, whose servers are killed in between."""

import itertools
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests import growing_job
from tests.growing_job import DELTA, GROWS, RECYCLES
from tfdist.checkpoint import checkpoints
from tfdist.embeddings.index import mixed
from tfdist.launch.testing import LocalCluster

ROOT = Path(__file__).parents[2]
CHIEF = "chief:0"
TASKS = {"ps": 2, "workers": 2, "cwd": ROOT}


def command(model_dir, *flags):
    module = [sys.executable, "-m", "tests.growing_job"]
    return [*module, f"--model_dir={model_dir}", *flags]


def seen_in(path, kind=GROWS):
    """How often each id was seen, by its number; every row is its own id's.

    Not at all: a step was cut off between the claim of the row and its update.
    """
    table, keys, counters = (
        checkpoints.load_variable(path, f"table/{name}")
        for name in ("embeddings", "keys", "counters")
    )
    keys, step = keys.ravel(), checkpoints.step_of(path)
    assert kind is RECYCLES or not counters.any()
    slots = np.flatnonzero(keys)
    numbers = np.arange(kind.new * (step + 1_000))
    ids = growing_job.id_of(numbers)
    number_of = dict(zip(mixed(tf.constant(ids)).numpy(), numbers, strict=True))
    found = np.array([number_of[key] for key in keys[slots]], np.int64)
    assert len(np.unique(found)) == len(found), "An id has two slots."
    first = growing_job.table(kind).initial_rows(ids[found]).numpy()
    times = (first - table[slots]) / DELTA
    np.testing.assert_allclose(times, np.round(times), atol=0.01)
    # Of two workers that add to one number at once, one may be lost, as in TF1.
    assert np.sum(np.round(times[:, 0]) != np.round(times[:, 1])) <= 3
    assert np.all(times >= -0.01)
    return dict(zip(found, np.round(times[:, 0]).astype(int), strict=True))


def paths(model_dir):
    """Its checkpoints, by step."""
    found = checkpoints.listed(str(model_dir))
    return {checkpoints.step_of(path): path for path in found}


@pytest.mark.slow
def test_workers_that_read_the_same_ids_make_one_slot_for_each(tmp_path):
    """Also in checkpoints that were saved while both went on."""
    steps = 400
    flags = f"--max_steps={steps}", "--save_steps=20"
    with LocalCluster(command(tmp_path, *flags), **TASKS) as job:
        assert job.wait(timeout_secs=200) == 0, job.output(CHIEF)
    saved = paths(tmp_path)
    assert [*saved] == [*range(steps, -20, -20)]
    for step, path in saved.items():
        seen = seen_in(path)
        # Each worker has had its batches in order.
        assert sorted(seen) == [*range(len(seen))]
        assert GROWS.new * step / 2 <= len(seen) <= GROWS.new * step
        assert all(seen.values())
        assert 0 <= step * GROWS.batch - sum(seen.values()) <= 3
    assert len(seen_in(saved[steps])) < GROWS.new * steps, (
        "They had no id together."
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param(GROWS, 3, marks=pytest.mark.soak),
        (RECYCLES, 3),
        pytest.param(RECYCLES, 20, marks=pytest.mark.soak),
    ],
)
def test_tasks_killed_while_they_insert(tmp_path, kind, kills):
    """Whatever is restored, each row is its own id's; the job goes on."""
    flags = ["--step_secs=0.005", "--save_steps=50"]
    if kind is RECYCLES:
        flags.append("--recycles")
    tasks = itertools.cycle(["ps:0", "worker:1", "ps:1"])
    with LocalCluster(
        command(tmp_path, *flags), restart_secs=0.5, **TASKS
    ) as job:
        job.wait_until_step(100, timeout_secs=120)
        for kill, task in zip(range(kills), tasks, strict=False):
            # At another moment of a step, or a save.
            time.sleep(0.1 * (kill % 7))
            step = job.step
            assert job.kill(task).effect == "SIGKILL"
            job.wait_until_step(step + 60, timeout_secs=120)
        continues = r"Training continues at step \d+"
        lost = kills - (kills + 1) // 3  # The second of each three is a worker.
        job.wait_for_line(CHIEF, continues, count=lost, timeout_secs=1)
    saved = paths(tmp_path)
    assert len(saved) >= 4
    for step, path in saved.items():
        times = [*seen_in(path, kind).values()]
        assert len(times) > 0 or step == 0
        # Each death has cut off one step of each worker at most.
        assert times.count(0) <= kills * 2 * kind.new
    counters = checkpoints.load_variable(saved[max(saved)], "table/counters")
    refused, not_admitted, evicted = counters.sum(axis=0)
    assert refused == 0
    assert (not_admitted > 0) == (evicted > 0) == (kind is RECYCLES)

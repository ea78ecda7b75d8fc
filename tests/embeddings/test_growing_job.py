"""Tables that grow on a real cluster, whose servers are killed in between."""

import collections
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import growing_job
from tests.growing_job import DELTA, GROWS, NUMBERS, RECYCLES
from tfdist.checkpoint import checkpoints, load_rows
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
    Also of how many ids the history says something else; of tables that forget,
    that it was seen less often.
    """
    ids, rows, _ = load_rows(path, "table")
    numbers = growing_job.number_of(ids)
    assert np.all((numbers >= 0) & (numbers < NUMBERS)), "It was nobody's id."
    assert len(np.unique(numbers)) == len(numbers), "An id has two slots."
    first = growing_job.table(kind).initial_rows(ids).numpy()
    exact = (first - rows) / DELTA
    times = np.round(exact)
    np.testing.assert_allclose(exact, times, atol=0.01)
    np.testing.assert_array_equal(times[:, 0], times[:, 1])
    assert np.all(times >= 0)
    found = np.zeros([NUMBERS, 2])
    found[numbers] = times
    history = checkpoints.load_variable(path, "history/embeddings") / -DELTA
    differs = found > history if kind is RECYCLES else found != history
    seen = dict(zip(numbers, times[:, 0].astype(int), strict=True))
    return seen, np.sum(np.any(differs, axis=1))


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
        seen, differ = seen_in(path)
        assert not differ
        # Each worker has had its batches in order.
        assert sorted(seen) == [*range(len(seen))]
        assert GROWS.new * step / 2 <= len(seen) <= GROWS.new * step
        assert all(seen.values())
        assert sum(seen.values()) == step * GROWS.batch
    assert len(seen_in(saved[steps])[0]) < GROWS.new * steps, (
        "They had no id together."
    )


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        pytest.param(GROWS, 20, marks=pytest.mark.soak),
        (RECYCLES, 3),
        pytest.param(RECYCLES, 20, marks=pytest.mark.soak),
    ],
)
def test_tasks_killed_while_they_insert(tmp_path, kind, kills):
    """Whatever is restored, each row is what its id's history gives."""
    flags = ["--step_secs=0.005", "--save_steps=50"]
    if kind is RECYCLES:
        flags.append("--recycles")
    tasks = (["ps:0", "worker:1", "ps:1"] * kills)[:kills]
    moments = np.random.default_rng(kills).uniform(0, 0.7, kills)
    with LocalCluster(
        command(tmp_path, *flags), restart_secs=0.5, **TASKS
    ) as job:
        job.wait_until_step(100, timeout_secs=120)
        since = time.monotonic()
        for task, moment in zip(tasks, moments, strict=True):
            time.sleep(moment)  # Of a step, or a save.
            step = job.step
            assert job.kill(task).effect == "SIGKILL"
            job.wait_until_step(step + 60, timeout_secs=120)
        secs = time.monotonic() - since
        continues = r"Training continues at step (\d+)"
        workers = tasks.count("worker:1")
        job.wait_for_line(
            CHIEF, continues, count=kills - workers, timeout_secs=1
        )
        told = job.output(CHIEF)
    saved = paths(tmp_path)
    print(
        f"kills {collections.Counter(tasks)}, in {secs:.0f} s; restored at",
        [int(step) for step in re.findall(continues, told)],
        f"saves cut off {told.count('Failed to save')}, whole {len(saved)}",
    )
    assert len(saved) >= 4
    differ = [0]
    for step, path in sorted(saved.items()):
        seen, now = seen_in(path, kind)
        times = [*seen.values()]
        differ.append(int(now))
        assert len(times) > 0 or step == 0
        # Each death has cut off one step of each worker at most.
        assert times.count(0) <= kills * 2 * kind.new
    print("rows that differ from their history:", differ)
    jumps = np.diff(differ)
    assert np.all(jumps <= kind.batch)
    # From a step that a worker's death has cut off they do for good; what was
    # saved while others updated it would in some checkpoints.
    assert kind is RECYCLES or np.all(jumps >= 0)
    assert kind is RECYCLES or np.count_nonzero(jumps) <= workers
    counters = checkpoints.load_variable(saved[max(saved)], "table/counters")
    refused, not_admitted, evicted = counters.sum(axis=0).tolist()
    print(f"{refused=}, {not_admitted=}, {evicted=}")
    # Steps of one dispatch are numbered before others that have begun: what a
    # worker finds may all have been seen after its step, and keeps its row.
    assert refused <= 0.02 * evicted
    assert (not_admitted > 0) == (evicted > 0) == (kind is RECYCLES)

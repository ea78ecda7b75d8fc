"""Who reads what while workers die, are slow, or come back: real clusters.

`-s` shows the figures.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tfdist.launch.testing import LocalCluster, assert_nothing_left

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEADLINE_SECS = 240


@pytest.fixture
def data(tmp_path):
    """Writes one file of numbered lines."""

    def write(size):
        path = tmp_path / "data.txt"
        path.write_text("".join(f"{i:05}\n" for i in range(size)))
        return [f"--files={path}", f"--examples={size}"]

    return write


def job(tmp_path, *arguments, **options):
    command = [sys.executable, "-m", "tests.dealing_job"]
    arguments = f"--model_dir={tmp_path / 'run'}", *arguments
    return LocalCluster(
        [*command, *arguments], ps=1, workers=3, cwd=ROOT, **options
    )


def ended(cluster):
    """Counts of the examples, and what the chief said."""
    assert cluster.wait(timeout_secs=DEADLINE_SECS) == 0
    said = cluster.output("chief:0")
    cluster.close()
    assert_nothing_left(cluster)
    counts = json.loads(re.search(r"counts (.*)", said)[1])["examples"]
    return np.array(counts), said


def test_what_a_dead_worker_held_others_read(tmp_path, data):
    """Two of three die for good: the third reads everything."""
    size = 1200
    with job(
        tmp_path, *data(size), "--max_steps=800", "--pace_secs=0.01"
    ) as cluster:
        cluster.wait_until_step(60, timeout_secs=DEADLINE_SECS)
        for worker in ("worker:1", "worker:2"):
            cluster.kill(worker)
            assert cluster.pid(worker) is None
        counts, said = ended(cluster)
    assert abs(counts.sum() - 8000) <= 2 * 10 * 10
    print("reads of an example, least and most:", counts.min(), counts.max())
    assert counts.min() >= 3
    assert "of the examples" not in said


def test_the_users_own_shards_are_named(tmp_path, data):
    """What nobody reads is said, after a while and at the end."""
    with job(
        tmp_path,
        *data(300),
        "--max_steps=1500",
        "--pace_secs=0.01",
        "--sharded",
    ) as cluster:
        cluster.wait_until_step(60, timeout_secs=DEADLINE_SECS)
        cluster.kill("worker:2")
        counts, said = ended(cluster)
    assert counts[2::3].max() < counts[0::3].min()
    warnings = re.findall(r"WARNING (.*of the examples.*)", said)
    assert len(warnings) == 2
    assert re.match(
        r"worker:2 is gone for 4 s or more: 33% of the examples are not being "
        r"read.* input function `main.<locals>.input_fn` \(.*dealing_job",
        warnings[0],
    )
    assert warnings[1].startswith("Training ended without worker:2: 33% of ")


def test_a_worker_that_comes_back_reads_on(tmp_path, data):
    """With a seed, too, each of its lives begins elsewhere."""
    size = 6000
    with job(
        tmp_path,
        *data(size),
        "--max_steps=420",
        "--pace_secs=0.05",
        restart_secs=0.5,
    ) as cluster:
        for life in range(1, 6):
            cluster.wait_until_step(70 * life, timeout_secs=DEADLINE_SECS)
            for worker in range(3):
                cluster.kill(f"worker:{worker}")
        counts, _ = ended(cluster)
    seen = (counts > 0.5).mean()
    print(f"seen of {size} in 6 lives of every worker: {seen:.0%}")
    assert seen > 0.35  # 420 steps read 70 %; the same first 70 steps, 12 %.


def test_a_slow_worker_holds_no_examples_back(tmp_path, data):
    """Its first share is read about as often as those of the others."""
    size = 600
    with job(
        tmp_path,
        *data(size),
        "--max_steps=1200",
        "--pace_secs=0.02",
        "--slow_secs=0.18",
    ) as cluster:
        counts, _ = ended(cluster)
    first = [counts[worker::3].mean() for worker in range(3)]
    print("mean reads of the examples of each first share:", np.round(first, 1))
    assert min(first) > 0.8 * max(first)

"""How stale updates are, and how stale they may be."""

import random
import re
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests.training.test_synchronous import CHIEF, TASKS, command, taken_in_all
from tfdist.launch.testing import LocalCluster
from tfdist.training import staleness


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 100))
def test_percentiles_are_those_of_numpy(values, percent):
    histogram = np.bincount(values, minlength=12)
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert staleness.percentile(histogram, percent) == expected


def test_updates_of_others_are_counted():
    global_step = tf.Variable(0, dtype=tf.int64)
    counter = staleness.StalenessCounter(global_step)
    for others in (0, 3, 3, 1000):
        before = counter.read()
        global_step.assign_add(others + 1)
        counter.count(before)
    histogram = counter.histogram()
    assert histogram.sum() == 4
    assert list(np.flatnonzero(histogram)) == [0, 3, staleness.MAX_STALENESS]
    assert histogram[3] == 2


@pytest.mark.parametrize("most", [0, 1, 4, 9])
def test_no_update_is_staler_than_the_bound(most):
    """Five threads as workers, one of them slow, with sizes of 1 to 3."""
    bound, landed, stale = staleness.StalenessBound(most), [], []

    def work(worker):
        draw = random.Random(worker)
        for _ in range(40):
            dispatch, size = object(), draw.randint(1, 3)
            while not bound.begin(dispatch, size):
                pass
            before = len(landed)  # The worst case: it reads but once.
            time.sleep(draw.random() * (0.005 if worker else 0.02))
            for own in range(size):
                stale.append(len(landed) - before - own)
                landed.append(worker)
            bound.end(dispatch)

    threads = [threading.Thread(target=work, args=[i]) for i in range(5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert max(stale) <= most
    assert max(stale) > 0 or not most


def test_a_dispatch_that_was_lost_holds_nobody_up():
    bound = staleness.StalenessBound(0)
    assert bound.begin("lost", 1)
    assert not bound.begin("next", 1)
    bound.end("lost")
    assert bound.begin("next", 1)
    bound.clear()
    assert bound.begin("after a failure", 1)
    bound.end("next")  # A late thread of before.
    assert not bound.begin("another", 1)


def test_sizes():
    bounds = [staleness.StalenessBound(most) for most in (0, 9, 99)]
    assert [bound.limited(10, num_workers=3) for bound in bounds] == [1, 2, 10]
    assert [bound.limited(10, num_workers=1) for bound in bounds] == [10] * 3


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 0, 2])
def test_a_cluster_keeps_the_bound(tmp_path, most):
    """Three workers, of which one is slow and another is killed."""
    flags = ["--count", "--max_steps=600", "--slow_secs=0.02"]
    if most is not None:
        flags.append(f"--max_staleness={most}")
    with LocalCluster(command(tmp_path, *flags), **TASKS) as job:
        job.wait_until_step(100, timeout_secs=60)
        assert job.kill("worker:0").effect == "SIGKILL"
        assert job.wait(timeout_secs=120) == 0, job.output(CHIEF)
        output = job.output(CHIEF)
    counted, worst = map(
        int, re.findall(r"staleness of (\d+) updates.* most (\d+)", output)[-1]
    )
    assert counted >= 400
    assert worst <= most if most is not None else worst > 2
    assert taken_in_all(tmp_path, 600) == pytest.approx(600, rel=1e-4)

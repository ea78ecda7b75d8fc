import logging
import re
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import slow
from small_models import batches, local_loop

from tfdist.data import input_fns, input_wait
from tfdist.launch.testing import LocalCluster, assert_nothing_left

SECS = st.floats(0.01, 2.0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=6), SECS)
def test_the_time_of_a_step_is_found(gaps, compute):
    """Whenever the batches come, one after the other."""
    there = np.cumsum(gaps)
    end = 0.0
    for arrival in there:
        end = max(end, arrival) + compute
    found = input_wait.computing(tf.constant(there), end).numpy()
    assert found == pytest.approx(len(gaps) * compute)


def sleep(secs):
    """An op that takes so long."""
    return tf.numpy_function(lambda: time.sleep(secs), [], [], stateful=True)


def slow_input(secs):
    """Batches that take so long to make, one after the other."""

    def wait(x, y):
        with tf.control_dependencies([sleep(secs)]):
            return tf.identity(x), y

    return batches().repeat().map(wait, num_parallel_calls=1)


def slow_model(secs):
    """A model whose step takes so long."""

    class Slow(keras.layers.Layer):
        def call(self, x):
            with tf.control_dependencies([sleep(secs)]):
                return tf.identity(x)

    model = keras.Sequential(
        [keras.Input([4]), Slow(), keras.layers.Dense(1, "sigmoid")]
    )
    model.compile("sgd", "binary_crossentropy")
    return model


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("may_end", "input_secs", "step_secs", "low", "high"),
    [
        (False, 0.05, 0.0, 0.85, 1.0),
        (False, 0.05, 0.025, 0.3, 0.6),
        (False, 0.0, 0.05, 0.0, 0.1),
        (False, 0.02, 0.05, 0.0, 0.2),
        # The batches of a dispatch are read before it.
        (True, 0.05, 0.0, 0.85, 1.0),
        (True, 0.05, 0.025, 0.3, 0.8),
        (True, 0.0, 0.05, 0.0, 0.25),
    ],
)
def test_share(may_end, input_secs, step_secs, low, high):
    data = slow_input(input_secs)
    data = data.take(100) if may_end else data
    loop, _ = local_loop(slow_model(step_secs), data, 5)
    loop.run(5)
    loop.input_secs()
    start = time.monotonic()
    loop.run(20)
    elapsed = time.monotonic() - start
    waited, total = loop.input_secs()
    assert total == pytest.approx(elapsed, rel=0.2)
    assert low <= input_wait.share([waited, total]) <= high
    assert not loop.input_secs().any()


# --- Who waits ---------------------------------------------------------------


@pytest.fixture
def said(monkeypatch, caplog):
    """What is said, after half a second instead of a minute."""
    monkeypatch.setattr(input_wait.InputWatch, "SECS", 0.5)
    # A thread that waits for a tenth of a minute would sleep on; when it wakes,
    # or that of another test does, two would look at once and both speak.
    monkeypatch.setattr(input_wait.InputWatch, "_thread", None)
    look, one = input_wait.InputWatch.look, threading.Lock()

    def look_alone(watch):
        with one:
            look(watch)

    monkeypatch.setattr(input_wait.InputWatch, "look", look_alone)
    caplog.set_level(logging.WARNING, "tfdist")
    return lambda: [
        r.getMessage() for r in caplog.records if r.name.startswith("tfdist")
    ]


@pytest.mark.parametrize("may_end", [*slow(False), True])
def test_a_process_that_waits_for_its_input_says_so(said, may_end):
    data = slow_input(1.2).take(50) if may_end else slow_input(1.2)
    loop, global_step = local_loop(slow_model(0.0), data, 2)
    start = time.monotonic()
    loop.run(2)
    elapsed = time.monotonic() - start
    assert int(global_step.numpy()) == 2
    # Once in half a second; the two waits take 1.2 s or longer each.
    assert 2 <= len(said()) <= elapsed / 0.5
    for line in said():
        assert re.fullmatch(
            r"Still waiting for the input of this process after \d+ s\.", line
        )


@pytest.mark.slow
@pytest.mark.parametrize("may_end", [False, True])
def test_a_process_that_computes_for_long_does_not(said, may_end):
    data = slow_input(0.0).take(50) if may_end else slow_input(0.0)
    loop, _ = local_loop(slow_model(1.2), data, 2)
    loop.run(2)
    time.sleep(1)
    assert not said()


def test_a_process_whose_input_has_failed_does_not(said):
    data = slow_input(0.0).map(
        lambda x, y: (tf.debugging.assert_all_finite(x / 0, "No."), y)
    )
    loop, _ = local_loop(slow_model(0.0), data, 2)
    with pytest.raises(tf.errors.InvalidArgumentError):
        loop.run(2)
    loop.run(0)
    time.sleep(1)
    assert not said()


def test_an_input_function_that_blocks_is_named(said):
    def blocks():
        time.sleep(1.4)
        return batches()

    start = time.monotonic()
    input_fns.without_context(blocks)()
    elapsed = time.monotonic() - start
    assert 1 <= len(said()) <= elapsed / 0.5
    for line in said():
        found = re.fullmatch(
            rf"Still waiting for input function `.*blocks` \({__file__}:\d+\) "
            r"after (\d+) s\.",
            line,
        )
        assert found
        assert int(found[1]) <= elapsed


@pytest.mark.slow
def test_the_chief_names_the_worker_that_waits_for_its_input(tmp_path):
    arrived = tmp_path / "arrived"
    job = [sys.executable, "-m", "tests.waiting_job", str(arrived)]
    root = Path(__file__).parents[2]
    with LocalCluster(job, ps=1, workers=2, cwd=root) as cluster:
        cluster.wait_for_line(
            "chief:0",
            r"Still waiting for the input of worker:1 after \d+ s\.",
            count=2,
            timeout_secs=120,
        )
        arrived.touch()
        assert cluster.wait(timeout_secs=120) == 0
        said = cluster.output("chief:0")
    assert_nothing_left(cluster)
    assert "input of worker:0" not in said

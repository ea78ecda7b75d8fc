"""Threads that update the same numbers, as workers do on a server."""

import functools
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import shared_updates_job
from tfdist._tf.private_keras import nadam_product
from tfdist.launch.testing import LocalCluster
from tfdist.training import kernels, optimizers
from tfdist.training.slots import named_slots

K, OPS = keras.optimizers, tf.raw_ops

ROWS, DIM = 2048, 16
# Of a thread; each of its steps makes so many updates.
STEPS, UPDATES = 5, 10

RULES = {
    "sgd": lambda: K.SGD(1 / 64),
    "adagrad": lambda: K.Adagrad(0.1),
    "adam": lambda: K.Adam(0.01),
    "ftrl": lambda: K.Ftrl(0.1, l1_regularization_strength=0.01),
    "nadam": lambda: K.Nadam(0.01),
    "momentum": lambda: K.SGD(0.1, momentum=0.9),
    "decay": lambda: K.SGD(0.1, weight_decay=0.01),
    "ema": lambda: K.Adagrad(0.1, use_ema=True, ema_momentum=0.9),
    "accumulation": lambda: K.SGD(1 / 64, gradient_accumulation_steps=2),
}

pytestmark = pytest.mark.slow


def gradient():
    """Sixteenths, of which sums are exact."""
    each = np.random.default_rng(0).integers(-32, 32, [ROWS, DIM])
    return tf.constant(each / 16, tf.float32)


def updated(make, by_rows, num_threads, steps=STEPS):
    """Variable and slots after equal updates, whose order makes no difference.

    All have the number of one iteration, at which accumulated gradients are
    due.
    """
    optimizer, iteration = make(), tf.constant(3, tf.int64)
    variable = keras.Variable(np.ones([ROWS, DIM], "float32"))
    optimizers.build(optimizer, [variable])
    optimizers.begin_step(optimizer, iteration)
    ids = tf.range(ROWS, dtype=tf.int64) if by_rows else None
    rate = tf.constant(optimizer.learning_rate.numpy())
    found = [(variable, gradient(), ids)]

    @tf.function
    def step():
        for _ in range(UPDATES):
            optimizers.apply(optimizer, found, rate, iteration, shared=True)

    at_once(step.get_concrete_function(), num_threads, steps)
    held = [variable, *named_slots(optimizer, variable).values()]
    return [v.numpy() for v in held]


def at_once(run, num_threads, times):
    """Has threads run a function so many times each."""
    meeting, done = threading.Barrier(num_threads), []

    def work():
        meeting.wait()
        for _ in range(times):
            run()
        done.append(None)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == num_threads


@functools.cache
def in_turns(name, by_rows):
    """What one thread makes of as many updates as four do."""
    return updated(RULES[name], by_rows, 1, 4 * STEPS)


def are_equal(name, by_rows):
    got = updated(RULES[name], by_rows, num_threads=4)
    pairs = zip(got, in_turns(name, by_rows), strict=True)
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "whole"])
@pytest.mark.parametrize("name", RULES)
def test_threads_lose_no_update(name, by_rows):
    assert are_equal(name, by_rows)


def without_lock(kernel):
    return lambda **arguments: kernel(**arguments | {"use_locking": False})


def unlocked(name, run, needed):
    run()


def scatter_sub(ref, indices, updates):
    OPS.ResourceScatterSub(resource=ref, indices=indices[:, 0], updates=updates)


@pytest.mark.parametrize(
    ("name", "by_rows"),
    [
        *((name, True) for name in RULES if name != "ema"),
        ("momentum", False),
    ],
)
def test_without_locks_they_would(name, by_rows, monkeypatch):
    """So the test above would see it."""
    monkeypatch.setattr(optimizers, "locked", unlocked)
    monkeypatch.setattr(OPS, "ResourceScatterNdSub", scatter_sub)
    for rule, (*others, of_rows) in kernels._RULES.items():
        entry = *others, of_rows and without_lock(of_rows)
        monkeypatch.setitem(kernels._RULES, rule, entry)
    if all(are_equal(name, by_rows) for _ in range(30)):
        pytest.fail("Threads never met.")


def begun(num_threads, times):
    """The product of factors of Nadam's momentum."""
    optimizer = K.Nadam(beta_1=0.9999)
    optimizers.build(optimizer, [keras.Variable(0.0)])

    @tf.function
    def step():
        for _ in tf.range(300):
            now = tf.constant(10**6, tf.int64)
            optimizers.begin_step(optimizer, now, shared=True)

    at_once(step.get_concrete_function(), num_threads, times)
    return nadam_product(optimizer).numpy()


def test_threads_lose_no_factor(monkeypatch):
    expected = begun(1, 4)
    assert begun(4, 1) == expected
    monkeypatch.setattr(optimizers, "locked", unlocked)
    if all(begun(4, 1) == expected for _ in range(30)):
        pytest.fail("Threads never met.")


def test_workers_lose_no_update(tmp_path):
    """Each table is what one worker alone would have made of it."""
    steps, root = 500, Path(__file__).parents[2]
    job = [sys.executable, "-m", "tests.shared_updates_job"]
    job += [str(steps), str(tmp_path)]
    with LocalCluster(job, ps=1, workers=3, cwd=root) as cluster:
        assert cluster.wait(timeout_secs=180) == 0, cluster.output("chief:0")
    found = np.load(tmp_path / "tables.npz")
    for rule, make in shared_updates_job.RULES.items():
        optimizer, row = make(), keras.Variable(np.zeros([1, 1], "float32"))
        for _ in range(steps):
            optimizer.apply([tf.ones([1, 1])], [row])
        np.testing.assert_allclose(found[rule], row.numpy()[0, 0], rtol=1e-5)

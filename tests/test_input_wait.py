import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import batches, local_loop

from tfdist import input_wait

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


@pytest.mark.parametrize(
    ("input_secs", "step_secs", "low", "high"),
    [
        (0.05, 0.0, 0.85, 1.0),
        (0.05, 0.025, 0.3, 0.6),
        (0.0, 0.05, 0.0, 0.1),
        (0.02, 0.05, 0.0, 0.2),
    ],
)
def test_share(input_secs, step_secs, low, high):
    loop, _ = local_loop(slow_model(step_secs), slow_input(input_secs), 5)
    loop.run(5)
    loop.input_secs()
    start = time.monotonic()
    loop.run(20)
    elapsed = time.monotonic() - start
    waited, total = loop.input_secs()
    assert total == pytest.approx(elapsed, rel=0.2)
    assert low <= input_wait.share([waited, total]) <= high
    assert not loop.input_secs().any()

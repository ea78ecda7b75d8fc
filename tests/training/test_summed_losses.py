"""Sums over the examples of a batch are found among the terms of a loss."""

import keras
import pytest
import tensorflow as tf

from tfdist.training.compiled_model import trace_on_spec
from tfdist.training.summed_losses import SummedLosses

SIZE = 8
MEANS = {
    "mean": tf.reduce_mean,
    "mean of the examples' sums": lambda e: tf.reduce_mean(tf.reduce_sum(e, 1)),
    "sum over their number": lambda e: (
        tf.reduce_sum(e) / tf.cast(tf.shape(e)[0], e.dtype)
    ),
    "Keras' loss": lambda e: keras.losses.MeanAbsoluteError()(e, 2 * e),
    "weighted losses": lambda e: keras.losses.MeanAbsoluteError()(
        e, 2 * e, sample_weight=e[:, 0]
    ),
    "sum of means": lambda e: keras.ops.sum(
        [tf.reduce_mean(e), 0.5 * tf.reduce_mean(e**2)]
    ),
}
SUMS = {
    "sum": tf.reduce_sum,
    "vector": lambda e: tf.reduce_mean(e, axis=1),
    "tf.nn.l2_loss": tf.nn.l2_loss,
    "sum over a constant": lambda e: 0.5 * tf.reduce_sum(e) / 100,
    "Keras' loss": lambda e: keras.losses.MeanAbsoluteError(reduction="sum")(
        e, 2 * e
    ),
    "term": lambda e: tf.reduce_mean(e) - tf.reduce_sum(e[:, 0]),
    "sum of a scalar": lambda e: keras.ops.mean(tf.reduce_sum(e)),
    "sum of sums": lambda e: keras.ops.sum(
        [tf.reduce_mean(e), tf.reduce_sum(e)]
    ),
}


def found_in(loss, size):
    found = []

    def run(batch):
        losses = SummedLosses(batch)
        losses.check(loss(batch["x"]))
        found.extend(losses.names)

    trace_on_spec(run, {"x": tf.TensorSpec([size, 3])})
    return found


@pytest.mark.parametrize("size", [None, SIZE])
@pytest.mark.parametrize("name", MEANS)
def test_means_over_the_examples_are_none(name, size):
    assert not found_in(MEANS[name], size)


@pytest.mark.parametrize("size", [None, SIZE])
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_the_examples_are_found(name, size):
    assert len(found_in(SUMS[name], size)) == 1


def test_a_sum_over_the_size_of_the_share_is_its_mean():
    assert not found_in(lambda e: tf.reduce_sum(e) / SIZE, SIZE)


def test_a_sum_over_weights_is_none_of_examples():
    kernel = tf.Variable(tf.ones([SIZE, SIZE]))
    penalty = keras.regularizers.L2(0.1)
    assert not found_in(lambda e: tf.reduce_mean(e) + penalty(kernel), SIZE)


def test_losses_of_no_known_shape_and_of_no_graph_are_none():
    def unknown(e):
        return tf.compat.v1.placeholder_with_default(e, shape=None)

    assert not found_in(lambda e: tf.ones([2, 3]) * unknown(e), None)
    with tf.init_scope():
        eager = tf.ones([3])
    assert not found_in(lambda _: eager, None)
    assert not found_in(lambda _: 1.0, None)


def test_tapes_are_watched_where_they_differentiate_by_variables():
    weight = keras.Variable(2.0)
    before = tf.GradientTape.gradient
    found = []

    def run(x):
        losses = SummedLosses(x)
        with losses.watch_tapes(), tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            score = weight * tf.reduce_mean(x, axis=1)
            loss = tf.reduce_mean(score)
        with losses.watch_tapes():
            # A gradient penalty, of each example's score by its inputs.
            tape.gradient(score, [x])
            tape.gradient(loss, [weight])
            assert not losses.names
            tape.gradient(score, [weight])
        found.extend(losses.names)

    trace_on_spec(run, tf.TensorSpec([None, 3]))
    assert len(found) == 1
    assert tf.GradientTape.gradient is before

"""Tables are learned wherever a loss looks them up, as under `fit`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import lookup_models
import numpy as np
import pytest
import tensorflow as tf
from lookup_models import weights as weights_of
from pace import slow
from small_models import local_loop

from tfdist import PartitionedEmbedding

ROOT = Path(__file__).parents[2]


def trained(number):
    model = lookup_models.made(number, ours=True)
    loop, _ = local_loop(model, lookup_models.dataset(number), 2)
    loop.run(lookup_models.STEPS)
    return weights_of(model)


def check_same(number, ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(
            mine,
            other,
            rtol=1e-4,
            atol=2e-5,
            err_msg=f"{number}: {lookup_models.drawn(number)}",
        )


@pytest.mark.parametrize("number", [0, *slow(1, 2, 3)])
def test_random_models_learn_what_fit_does(number):
    check_same(
        number, trained(number), weights_of(lookup_models.fitted(number))
    )


@pytest.mark.slow
def test_many_random_models_learn_what_fit_does():
    for number in range(100, 116):
        theirs = lookup_models.fitted(number)
        check_same(number, trained(number), weights_of(theirs))


def launched(directory, numbers, *tasks):
    log = directory / "log"
    with log.open("w") as file:
        code = subprocess.run(
            [
                *[sys.executable, "-m", "tfdist.launch", *tasks],
                *["--max_restarts=0", "tests/lookup_checks.py"],
                *[str(directory), *map(str, numbers)],
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=300,
        ).returncode
    assert code == 0, log.read_text()[-8000:]


def left(directory, number):
    return list(np.load(directory / f"{number}.npz").values())


@pytest.mark.slow
def test_parameter_servers_learn_and_evaluate_what_keras_does(tmp_path):
    numbers = range(300, 312)
    launched(tmp_path, numbers, "--ps=2", "--workers=1")
    for number in numbers:
        theirs = lookup_models.fitted(number)
        check_same(number, left(tmp_path, number), weights_of(theirs))
        expected = theirs.evaluate(
            lookup_models.dataset(number), verbose=0, return_dict=True
        )
        metrics = json.loads((tmp_path / f"{number}.json").read_text())
        assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_all_reduce_learns_what_fit_does(tmp_path):
    """Losses that are means over examples: else replicas cannot."""
    numbers = range(-404, -400)
    launched(tmp_path, numbers, "--ps=0", "--workers=1")
    for number in numbers:
        theirs = lookup_models.fitted(number)
        check_same(number, left(tmp_path, number), weights_of(theirs))


# --- Ids that are drawn ------------------------------------------------------


class Sampling(keras.Model):
    """Its loss knows each row's id, and rows begin as their ids.

    So the loss is zero if ids are the same where rows are read and where they
    are used. `draw`: from the shape to ids.
    """

    def __init__(self, draw, num_shards=2):
        super().__init__()
        self.table = PartitionedEmbedding(50, 1, num_shards, name="table")
        self.table.build()
        self.table.set_weights([np.arange(50.0)[:, None]])
        self.seeds = keras.random.SeedGenerator(3)
        self.dense = keras.layers.Dense(1)
        self.dense.build((None, 4))
        self.draw = draw
        self.drawn = self.add_weight(shape=[20], name="drawn", trainable=False)
        self.built = True

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        ids = self.draw(self, y_pred)
        rows = self.table(ids)[..., 0]
        if training:
            new = keras.ops.cast(keras.ops.ravel(ids)[:20], "float32")
            self.drawn.assign(new)
        ids = keras.ops.cast(ids, "float32")
        return keras.ops.mean(keras.ops.abs(rows - ids)) + 0 * keras.ops.mean(
            y_pred
        )


def sampling(draw):
    model = Sampling(draw)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def batches(size=40):
    x = np.random.default_rng(0).normal(size=[size, 4]).astype("float32")
    data = (x, np.zeros([size, 1], "float32"))
    return tf.data.Dataset.from_tensor_slices(data).batch(8).repeat()


def by_keras(model, y_pred):
    shape = [keras.ops.shape(y_pred)[0], 5]
    return keras.random.randint(shape, 0, 50, "int64", seed=model.seeds)


def by_the_global_generator(model, y_pred):
    return keras.random.randint([20], 0, 50, "int64")


@pytest.mark.parametrize("draw", [by_keras, by_the_global_generator])
def test_ids_are_drawn_once_a_step(draw):
    model = sampling(draw)
    loop, _ = local_loop(model, batches(), 1)
    drawn = []
    for _ in range(3):
        assert loop.run(1)["loss"] == 0.0
        drawn.append(model.drawn.numpy())
    # Other ids in each step, and more than one of them.
    assert len(np.unique(drawn, axis=0)) == 3
    assert len(np.unique(drawn)) > 5


def unrepeatable(model, y_pred):
    return tf.random.uniform([20], 0, 50, tf.int64)


def by_a_sampler(model, y_pred):
    labels = tf.zeros([1, 1], tf.int64)
    return tf.random.log_uniform_candidate_sampler(labels, 1, 20, True, 50)[0]


@tf.function
def _inside():
    return tf.random.uniform([20], 0, 50, tf.int64)


def of_rows(model, y_pred):
    rows = model.table(tf.range(20))
    return keras.ops.cast(rows[:, 0], "int64")


def nearest(model, y_pred):
    """Hard negatives: they depend on the model."""
    return tf.cast(tf.argsort(tf.abs(y_pred[:, 0])), tf.int64)


def scheduled(model, y_pred):
    late = keras.ops.cast(model.optimizer.iterations > 5, "int64")
    return tf.range(20, dtype=tf.int64) + late


def as_many_as_positive(model, y_pred):
    num = tf.shape(tf.where(y_pred > 0))[0]
    return tf.range(tf.cast(num, tf.int64))


def of_large_variables(model, y_pred):
    return tf.cast(model.large[:20], tf.int64)


def in_a_loop(model, y_pred):
    ids = tf.reshape(tf.range(20, dtype=tf.int64), [20, 1])
    rows = tf.map_fn(model.table, ids, fn_output_signature=tf.float32)
    return tf.cast(rows[:, 0, 0], tf.int64)


def in_a_condition(model, y_pred):
    ids = tf.range(20, dtype=tf.int64)
    rows = tf.cond(
        tf.reduce_sum(y_pred) > 0,
        lambda: model.table(ids),
        lambda: model.table(ids + 1),
    )
    return tf.cast(rows[:, 0], tf.int64)


def in_a_function(model, y_pred):
    ids = tf.range(20, dtype=tf.int64)
    return tf.cast(tf.function(model.table)(ids)[:, 0], tf.int64)


def of_the_whole(model, y_pred):
    model.add_loss(keras.ops.sum(model.table.shards[0]))
    return tf.range(20, dtype=tf.int64) + 0 * tf.cast(
        tf.size(model.losses), tf.int64
    )


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            unrepeatable,
            r"'table' come from a RandomUniformInt op.*keras.random",
        ),
        (lambda m, y: _inside(), "come from a RandomUniformInt op"),
        (by_a_sampler, "come from a LogUniformCandidateSampler op"),
        (of_rows, "'table' depend on the rows of a table"),
        (nearest, "'table' depend on variable 'dense"),
        (scheduled, "'table' depend on variable '.*iteration"),
        (as_many_as_positive, "'table' depend on variable 'dense"),
        (of_large_variables, "'table' depend on variable '.*large'"),
        (in_a_loop, "'table' is looked up inside a condition, a loop"),
        (in_a_condition, "'table' is looked up inside a condition, a loop"),
        (in_a_function, "'table' is looked up inside a condition, a loop"),
        (of_the_whole, "looks up rows of .* and also reads it as a whole"),
    ],
)
def test_ids_that_no_step_can_know_are_refused(draw, message):
    """When the step is made, before any batch is read."""
    model = sampling(draw)
    if draw is of_large_variables:
        model.large = model.add_weight(
            shape=[(1 << 24) + 1], trainable=False, name="large"
        )
    with pytest.raises(ValueError, match=message):
        local_loop(model, batches())
    # A `tf.map_fn` that raises leaves one, and strategies fail after that.
    assert tf.compat.v1.get_variable_scope().caching_device is None


def test_ids_of_a_vocabulary():
    with tf.init_scope():
        keys = tf.range(20, dtype=tf.int64)
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(keys, keys[::-1]), -1
        )
    model = sampling(lambda m, y: table.lookup(keys))
    loop, _ = local_loop(model, batches())
    assert loop.run(2)["loss"] == 0.0
    np.testing.assert_array_equal(model.drawn, np.arange(20)[::-1])


# --- What is computed from stand-ins is never executed -----------------------


def test_nothing_is_executed_on_stand_ins(capfd):
    """Neither checks, which would fail, nor what prints."""

    def draw(model, y_pred):
        kernel = tf.convert_to_tensor(model.dense.kernel)
        tf.debugging.assert_none_equal(kernel, 0.0)
        tf.debugging.check_numerics(tf.math.log(tf.abs(kernel)), "log")
        tf.print("kernel is", kernel[0, 0])
        return tf.range(20, dtype=tf.int64)

    model = sampling(draw)
    loop, _ = local_loop(model, batches(), 1)
    capfd.readouterr()
    assert loop.run(2)["loss"] == 0.0
    assert capfd.readouterr().err.count("kernel is") == 2


def test_lookups_that_change_from_call_to_call():
    calls = []

    def draw(model, y_pred):
        calls.append(1)
        if len(calls) > 2:
            model.table(tf.range(3))
        return tf.range(20, dtype=tf.int64)

    loop, _ = local_loop(sampling(draw), batches())
    with pytest.raises(ValueError, match="same tables in the same order"):
        loop.run(1)

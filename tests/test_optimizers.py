import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import MultiOptimizer, PartitionedEmbedding, optimizers
from tfdist._private import nadam_product, reset_object_names
from tfdist.checkpoint import named_variables
from tfdist.loop import LocalLoop
from tfdist.step import ModelStep

K = keras.optimizers

# Over 50 steps of float32 rounding, on values of size about one.
TOLERANCE = 2e-5

STEPS, BATCH = 50, 16


def schedule(rate):
    return K.schedules.ExponentialDecay(rate, 10, 0.9)


def sparing(optimizer, names):
    optimizer.exclude_from_weight_decay(var_names=names)
    return optimizer


def wide_and_deep(optimizer=None):
    return MultiOptimizer(
        [
            ("^wide/", K.Ftrl(0.1, l1_regularization_strength=0.001)),
            ("", optimizer or K.Adagrad(0.1)),
        ]
    )


# Their rule leaves a row without a gradient alone, as Keras' dense one does.
STILL = {
    "sgd": lambda: K.SGD(0.1),
    "sgd schedule": lambda: K.SGD(schedule(0.1)),
    "adagrad": lambda: K.Adagrad(0.1),
    "adagrad from zero": lambda: K.Adagrad(0.1, initial_accumulator_value=0.0),
    "adagrad schedule": lambda: K.Adagrad(schedule(0.1)),
    "ftrl": lambda: K.Ftrl(
        0.1,
        l1_regularization_strength=0.001,
        l2_regularization_strength=0.01,
        l2_shrinkage_regularization_strength=0.001,
        beta=0.1,
    ),
    "ftrl power": lambda: K.Ftrl(0.05, learning_rate_power=-0.3),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=0.05),
    "global_clipnorm": lambda: K.Adagrad(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.001),
    "loss_scale_factor": lambda: K.Adagrad(0.1, loss_scale_factor=8.0),
    "scaled clipnorm": lambda: K.SGD(0.1, loss_scale_factor=8.0, clipnorm=0.05),
    "multi": wide_and_deep,
    "multi global_clipnorm": lambda: wide_and_deep(
        K.SGD(0.1, global_clipnorm=0.05)
    ),
}
# Their rule moves every row in every step.
MOVING = {
    "momentum": lambda: K.SGD(0.05, momentum=0.9),
    "nesterov": lambda: K.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: K.Adam(0.01),
    "adam schedule": lambda: K.Adam(schedule(0.01)),
    "adam clipnorm": lambda: K.Adam(0.01, clipnorm=0.05),
    "amsgrad": lambda: K.Adam(0.01, amsgrad=True),
    "adamw": lambda: K.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: K.RMSprop(0.01, momentum=0.5),
    "centered": lambda: K.RMSprop(0.01, centered=True),
    "adadelta": lambda: K.Adadelta(0.5),
    "adamax": lambda: K.Adamax(0.01),
    "nadam": lambda: K.Nadam(0.01),
    "lion": lambda: K.Lion(0.001),
    "weight_decay": lambda: K.SGD(schedule(0.1), weight_decay=0.1),
    "spared": lambda: sparing(K.Adagrad(0.1, weight_decay=0.1), ["bias"]),
    "spared tables": lambda: sparing(
        K.Adagrad(0.1, weight_decay=0.1), ["embeddings"]
    ),
    "ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "adam ema": lambda: K.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "multi adam": lambda: wide_and_deep(K.Adam(0.01)),
}
# Not for tables.
WHOLE = {
    "lamb": lambda: K.Lamb(0.01),
    "adafactor": lambda: K.Adafactor(0.01),
    "muon": lambda: K.Muon(0.01, exclude_layers=["out"]),
    "muon decay": lambda: K.Muon(
        0.01, exclude_layers=["out"], weight_decay=0.1, adam_weight_decay=None
    ),
}


class DenseEmbedding(keras.layers.Layer):
    """A table whose gradient is dense, under the names of ours."""

    def __init__(self, rows, dim, name):
        super().__init__(name=name)
        self.rows, self.dim = rows, dim

    def build(self, shape):
        self.embeddings = self.add_weight(
            shape=(self.rows, self.dim), name="embeddings"
        )

    def call(self, ids):
        return keras.ops.matmul(
            keras.ops.one_hot(ids, self.rows), self.embeddings
        )


def table_model(optimizer, ours):
    """Two tables, one in three shards; moving statistics; a dense part."""
    reset_object_names()
    keras.utils.set_random_seed(1)
    if ours:
        deep = PartitionedEmbedding(20, 4, num_shards=3, name="deep")
        wide = PartitionedEmbedding(8, 4, name="wide")
    else:
        deep = DenseEmbedding(20, 4, name="deep")
        wide = DenseEmbedding(8, 4, name="wide")
    inputs = {
        "deep": keras.Input([5], dtype="int32", name="deep"),
        "wide": keras.Input([2], dtype="int32", name="wide"),
        "dense": keras.Input([3], name="dense"),
    }
    hidden = [
        keras.layers.Flatten()(deep(inputs["deep"])),
        keras.layers.Flatten()(wide(inputs["wide"])),
        inputs["dense"],
    ]
    return finished(inputs, keras.layers.Concatenate()(hidden), optimizer)


def dense_model(optimizer, ours):
    reset_object_names()
    keras.utils.set_random_seed(1)
    inputs = keras.Input([3])
    return finished(inputs, inputs, optimizer)


def finished(inputs, hidden, optimizer):
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dense(6, "tanh", kernel_regularizer="l2")(hidden)
    output = keras.layers.Dense(1, "sigmoid", name="out")(hidden)
    model = keras.Model(inputs, output)
    model.compile(optimizer, "binary_crossentropy")
    return model


def ids(rng, rows, length, every):
    """Ids with duplicates in each batch, of every row or of some."""
    batches = []
    for _ in range(STEPS):
        some = np.arange(rows) if every else rng.integers(0, rows, 4)
        batch = rng.choice(some, BATCH * length)
        batch[: len(some)] = some
        batches.append(rng.permutation(batch).reshape(BATCH, length))
    return np.concatenate(batches).astype("int32")


@functools.cache
def examples(every):
    rng = np.random.default_rng(0)
    x = {
        "deep": ids(rng, 20, 5, every),
        "wide": ids(rng, 8, 2, every),
        "dense": rng.normal(size=(STEPS * BATCH, 3)).astype("float32"),
    }
    y = rng.integers(0, 2, (STEPS * BATCH, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def values(model):
    """Every value that a checkpoint would hold, tables and slots whole."""
    return {
        name: np.concatenate([v.numpy() for v in variable.variables])
        if hasattr(variable, "variables")
        else variable.numpy()
        for name, variable in named_variables(model).items()
    }


def trained_by_keras(model, dataset, start):
    assign(model, start)
    # Else `fit` ends by replacing the weights with their moving averages.
    model.optimizer.finalize_variable_values = lambda variables: None
    model.fit(dataset, verbose=0, shuffle=False)
    return values(model)


def trained_by_us(model, dataset, start):
    assign(model, start)
    optimizers.build(model.optimizer, model.trainable_variables)
    global_step = tf.Variable(0, dtype=tf.int64)
    step = ModelStep(model, dataset.element_spec, global_step=global_step)
    LocalLoop(step, global_step, dataset).run(STEPS)
    assert int(model.optimizer.iterations.numpy()) == STEPS
    return values(model)


def assign(model, start):
    """Gives variables the values of `start`, by name."""
    for name, variable in named_variables(model, optimizer=False).items():
        first = 0
        for part in getattr(variable, "variables", [variable]):
            rows = slice(first, first + part.shape[0])
            part.assign(start[name][rows])
            first += part.shape[0]


def assert_trains_as_keras(make, model_fn, dataset):
    theirs = model_fn(make(), ours=False)
    start = values_without_slots(theirs)
    expected = trained_by_keras(theirs, dataset, start)
    got = trained_by_us(model_fn(make(), ours=True), dataset, start)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            got[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


def values_without_slots(model):
    rng = np.random.default_rng(5)
    return {
        name: np.abs(rng.normal(size=v.shape)) * 0.5
        for name, v in named_variables(model, optimizer=False).items()
    }


# --- Equality with Keras -----------------------------------------------------


@pytest.mark.parametrize("name", [*STILL, *MOVING])
def test_every_row_touched(name):
    make = (STILL | MOVING)[name]
    assert_trains_as_keras(make, table_model, examples(every=True))


@pytest.mark.parametrize("name", STILL)
def test_untouched_rows_stay(name):
    assert_trains_as_keras(STILL[name], table_model, examples(every=False))


@pytest.mark.parametrize("name", WHOLE)
def test_dense_variables_alone(name):
    dataset = examples(every=True).map(lambda x, y: (x["dense"], y))
    assert_trains_as_keras(WHOLE[name], dense_model, dataset)

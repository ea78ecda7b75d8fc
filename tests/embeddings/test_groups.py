"""Tables that grow alike are looked up and updated together."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import local_loop
from test_dynamic import OPTIMIZERS, dynamic

from tfdist import DynamicEmbedding
from tfdist._tf.private_keras import reset_object_names
from tfdist.embeddings.index import NO_ID, SEGMENT
from tfdist.training import optimizers
from tfdist.training.layout import Layout

BATCH, STEPS = 800, 10


def model_of(tables, optimizer="adagrad"):
    """All of which have the same ids, the first one twice."""
    reset_object_names()
    keras.utils.set_random_seed(1)
    ids = keras.Input([5], dtype="int64")
    several = keras.Input([None], dtype="int64", ragged=True)
    rows = [keras.layers.Flatten()(table(ids[:, :3])) for table in tables[:-1]]
    rows += [tables[0](ids[:, 3]), tables[-1](several)]
    output = keras.layers.Dense(1, name="out")(keras.ops.concatenate(rows, -1))
    model = keras.Model([ids, several], output)
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def data():
    """Ids that drift, so that a table sees more than it has rows."""
    rng, number = np.random.default_rng(0), BATCH * STEPS
    ids = rng.integers(0, 4_000, [number, 5]) + np.arange(number)[:, None]
    lengths = rng.integers(0, 4, number)
    several = tf.RaggedTensor.from_row_lengths(
        rng.integers(-50, 50, lengths.sum()), lengths
    )
    y = (ids[:, :1] % 2).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices(((ids, several), y))
    return dataset.batch(BATCH)


def tables(**kwargs):
    return [
        dynamic(1, name="a", **kwargs),
        dynamic(3, name="b", **kwargs),
        dynamic(2, capacity=3 * SEGMENT, name="c", **kwargs),
        dynamic(1, name="several", combiner="sum", **kwargs),
    ]


def learned(optimizer="adagrad", **kwargs):
    """All weights and slots, by name."""
    model = model_of(tables(**kwargs), optimizer)
    loop, _ = local_loop(model, data(), 1)
    loop.run(STEPS)
    every = [*model.weights, *model.optimizer.variables]
    return {v.path: v.numpy() for v in every}


def groups(made, optimizer="adagrad"):
    """Names of the tables of each group."""
    model = model_of(made, optimizer)
    optimizers.build(model.optimizer, model.trainable_variables)
    layout = Layout(model, made, remote=False)
    return [[t.name for t in group.tables] for group in layout.groups]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "counted", "kwargs"),
    [
        ("adagrad", [0], {}),
        ("adam", [0], {"embeddings_initializer": "normal"}),
        ("adam ema", [2], {"evict_after_steps": 2}),
        ("accumulates", [1], {"admit_after": 2}),
        ("sgd", [1], {"admit_after": 2, "evict_after_steps": 3}),
    ],
)
def test_a_group_learns_what_each_would_alone(
    optimizer, counted, kwargs, monkeypatch
):
    """Rows, slots, whose they are, and all that is counted."""
    together = learned(optimizer, **kwargs)
    monkeypatch.setattr(DynamicEmbedding, "group_key", property(id))
    alone = learned(optimizer, **kwargs)
    assert {*together} == {*alone}
    for name, wanted in alone.items():
        exact = wanted.dtype.kind == "i"
        np.testing.assert_allclose(
            *(together[name], wanted, 0 if exact else 1e-5),
            atol=0 if exact else 1e-6,
            err_msg=name,
        )
    counts = together["a/counters"].sum(axis=0)
    assert all(counts[counted] > 0), counts


def test_tables_of_the_same_options_are_a_group():
    names = [table.name for table in tables()]
    assert groups(tables()) == [names]
    made = tables()
    made[1] = dynamic(3, name="b", evict_after_steps=5)
    made[2] = dynamic(2, name="c", admit_after=2)
    assert groups(made) == [["a", "several"], ["b"], ["c"]]
    made[1] = dynamic(3, name="b", embeddings_initializer="normal")
    seeded = keras.initializers.RandomUniform(seed=4)
    made[2] = dynamic(2, name="c", embeddings_initializer=seeded)
    assert groups(made) == [["a", "c", "several"], ["b"]]
    made[2] = dynamic(2, name="c", trainable=False)
    assert groups(made) == [["a", "several"], ["b"], ["c"]]
    assert groups(tables(), "clips") == [[name] for name in names]


def test_the_id_that_means_none_names_its_table():
    model = model_of(tables())
    bad = data().map(lambda x, y: ((x[0], x[1] * 0 + NO_ID), y))
    loop, _ = local_loop(model, bad, 1)
    message = "Ids of table.*several.*must not be"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        loop.run(1)

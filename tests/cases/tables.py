"""Sharded tables learn the same as `keras.layers.Embedding`."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases import (
    EachStep,
    assert_weights_are_those_of,
    case,
    seeded,
)
from tfdist import PartitionedEmbedding

ROWS, STEPS, SHARDS = 9, 4, 3
_L = keras.layers


def _data():
    """Each half of the batch looks up every row, as often."""
    rng = np.random.default_rng(0)
    halves = [rng.permutation(np.tile(np.arange(ROWS), 2)) for _ in range(2)]
    ids = np.concatenate(halves).reshape([12, 3])
    return ids, rng.normal(size=[12, 1]).astype("float32")


def _model(table, head, **compiled):
    model = keras.Sequential([keras.Input([3], dtype="int64"), table, *head()])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **compiled})
    return model


def _flat():
    return [_L.Flatten(), _L.Dense(1)]


class _Dense(_L.Embedding):
    """Its gradient is a sum over duplicates, as the optimizer's rule needs it.

    From `keras.layers.Embedding` itself, Adagrad and others in Keras take each
    of the duplicates for a row of its own.
    """

    def call(self, ids):
        return keras.ops.matmul(
            keras.ops.one_hot(ids, self.input_dim), self.embeddings
        )


def _whole(**kwargs):
    kwargs.setdefault("embeddings_initializer", keras.initializers.Constant(1))
    return _Dense(ROWS, 2, name="table", **kwargs)


def _split(num_shards=SHARDS, **kwargs):
    kwargs.setdefault("embeddings_initializer", keras.initializers.Constant(1))
    return PartitionedEmbedding(ROWS, 2, num_shards, name="table", **kwargs)


def _train(job, model_fn, steps=STEPS, data=_data):
    estimator = job.estimator(model_fn)
    estimator.train(lambda: _input(data), hooks=[EachStep()], max_steps=steps)
    return estimator


def _input(data=_data):
    return tf.data.Dataset.from_tensors(data()).repeat()


def _learns_as(job, ours, reference, data=_data):
    """Trains; compares each weight with those of Keras' `fit`."""
    estimator = _train(job, ours, data=data)
    if job.is_chief:
        model = seeded(reference)
        model.fit(_input(data), steps_per_epoch=STEPS, verbose=0)
        # Of two workers, one may read before the other's update is written.
        apart = 3e-3 if job.strategy == "ps" else 1e-4
        assert_weights_are_those_of(estimator, model, apart, apart)
    return estimator


def _add(name, head=_flat, ours=None, compiled=dict, refused=None, **arguments):
    """A case of a table with `arguments`, and with `ours` beside them."""

    @case(name, refused)
    def run(job):
        _learns_as(
            job,
            lambda: _model(
                _split(**arguments, **(ours or {})), head, **compiled()
            ),
            lambda: _model(_whole(**arguments), head, **compiled()),
        )


def _gru():
    return [_L.GRU(2), _L.Dense(1)]


def _mean():
    return [_L.GlobalAveragePooling1D(), _L.Dense(1)]


_add("balanced")
_add("div", ours={"partition_strategy": "div"})
_add("mod", ours={"partition_strategy": "mod"}, refused="'balanced', 'div'")
_add("a shard for each row", ours={"num_shards": ROWS})
_add("one shard", ours={"num_shards": 1})
_add(
    "begins with a matrix",
    embeddings_initializer=keras.initializers.Constant(
        np.random.default_rng(2).normal(size=[ROWS, 2])
    ),
)
_add("adagrad", compiled=lambda: {"optimizer": "adagrad"})
_add("ftrl", compiled=lambda: {"optimizer": "ftrl"})
_add(
    "adam",
    compiled=lambda: {"optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3)},
)
_add("float64", dtype="float64")
_add(
    "float64, adam",
    compiled=lambda: {"optimizer": keras.optimizers.Adam(0.01, epsilon=1e-3)},
    dtype="float64",
)
_add("frozen", compiled=lambda: {"optimizer": "sgd"}, trainable=False)
_add("mask_zero, GRU", _gru, mask_zero=True)
_add("mask_zero, mean", _mean, mask_zero=True)
_add("l2 regularizer", embeddings_regularizer=keras.regularizers.L2(0.1))
_add("l1 regularizer", embeddings_regularizer=keras.regularizers.L1(0.1))
_add(
    "l2 regularizer, div",
    ours={"partition_strategy": "div"},
    embeddings_regularizer="l2",
)
_add(
    "max_norm of rows",
    embeddings_constraint=keras.constraints.MaxNorm(0.9, axis=1),
)
_add(
    "unit_norm of rows, adagrad",
    compiled=lambda: {"optimizer": "adagrad"},
    embeddings_constraint=keras.constraints.UnitNorm(axis=1),
)
_add(
    "non_neg",
    compiled=lambda: {"optimizer": keras.optimizers.SGD(3.0)},
    embeddings_constraint="non_neg",
)
_add(
    "max_norm across rows",
    embeddings_constraint="max_norm",
    refused="apply to each row alone.* axis=1",
)


class TwoTowers(keras.Model):
    """A model for retrieval; each tower is a `Sequential` without an input."""

    def __init__(self, table):
        super().__init__()
        self.user = keras.Sequential([table(name="user"), _L.GRU(2)])
        self.item = keras.Sequential([table(name="item"), _L.Flatten()])

    def call(self, ids):
        return {"user": self.user(ids), "item": self.item(ids[:, :1])}

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        scores = keras.ops.sum(y_pred["user"] * y_pred["item"], axis=1)
        return keras.ops.mean((scores - y[:, 0]) ** 2)


@case()
def towers_without_an_input(job):
    def of(table):
        model = TwoTowers(
            lambda name: table(
                ROWS, 2, name=name, embeddings_initializer="ones"
            )
        )
        model.compile("sgd")
        return model

    _learns_as(job, lambda: of(PartitionedEmbedding), lambda: of(_L.Embedding))


@case("a float64 model, adagrad, regularized")
def float64_model(job):
    def of(table):
        made = table(embeddings_regularizer="l2")
        assert made.variable_dtype == "float64"
        return _model(made, _flat, optimizer="adagrad")

    before = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        _learns_as(job, lambda: of(_split), lambda: of(_whole))
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(before)


@case()
def a_regularized_float64_table_in_a_float32_model(job):
    """Keras' own has a loss that it cannot add to that of the model."""
    table = {"embeddings_regularizer": "l2"}
    _learns_as(
        job,
        lambda: _model(_split(dtype="float64", **table), _flat),
        lambda: _model(_whole(**table), _flat),
    )


@case()
def mask_zero_of_a_loss(job):
    def data():
        ids, y = _data()
        return ids, y[:, None] + np.arange(3.0, dtype="float32")[:, None]

    _learns_as(
        job,
        lambda: _model(_split(mask_zero=True), lambda: [_L.Dense(1)]),
        lambda: _model(_whole(mask_zero=True), lambda: [_L.Dense(1)]),
        data,
    )


@case()
def mask_zero_with_a_combiner(job):
    _learns_as(
        job,
        lambda: _model(
            _split(mask_zero=True, combiner="mean"), lambda: [_L.Dense(1)]
        ),
        lambda: _model(_whole(mask_zero=True), _mean),
    )


@case()
def batches_without_an_id(job):
    def model_fn():
        ids = keras.Input([None], dtype="int64", ragged=True)
        rows = PartitionedEmbedding(ROWS, 2, num_shards=2, combiner="mean")
        model = keras.Model(ids, _L.Dense(1)(rows(ids)))
        model.compile("adagrad", "mse")
        return model

    def input_fn():
        rows = [[]] * 4
        if job.strategy != "ps":  # There two workers read at once.
            rows += [[1, 2], [], [], [5]] + [[]] * 4
        ids = tf.ragged.constant(rows, tf.int64, ragged_rank=1)
        data = tf.data.Dataset.from_tensor_slices(
            (ids, tf.ones([len(rows), 1]))
        )
        return data.ragged_batch(4).repeat()

    job.trains_as_fit(model_fn, input_fn)


@case()
def two_tables_of_different_strategies(job):
    def model_fn(table, kwargs):
        ids = keras.Input([3], dtype="int64")
        rows = [
            table(ROWS, 2, name=name, embeddings_initializer="ones", **own)(ids)
            for name, own in kwargs
        ]
        net = _L.Flatten()(_L.Concatenate()(rows))
        model = keras.Model(ids, _L.Dense(1)(net))
        model.compile("sgd", "mse")
        return model

    ours = {"num_shards": 4}, {"num_shards": 2, "partition_strategy": "div"}
    _learns_as(
        job,
        lambda: model_fn(
            PartitionedEmbedding, zip(("a", "b"), ours, strict=True)
        ),
        lambda: model_fn(_L.Embedding, [("a", {}), ("b", {})]),
    )


def _goes_on(job, before, after):
    """Half of the steps with one split of the table, half with another."""
    _train(job, lambda: _model(_split(**before), _flat), STEPS // 2)
    _learns_as(
        job,
        lambda: _model(_split(**after), _flat),
        lambda: _model(_whole(), _flat),
    )


@case()
def div_goes_on_balanced(job):
    _goes_on(job, {"partition_strategy": "div"}, {})


@case()
def balanced_goes_on_as_div(job):
    _goes_on(job, {}, {"partition_strategy": "div"})


@case()
def balanced_goes_on_in_other_shards(job):
    _goes_on(job, {"num_shards": 2}, {"num_shards": 5})


@case()
def one_piece_goes_on_in_shards(job):
    _goes_on(job, {"num_shards": 1}, {"num_shards": 7})


@case()
def evaluation_of_a_masked_and_regularized_table(job):
    arguments = {"mask_zero": True, "embeddings_regularizer": "l2"}
    estimator = _train(job, lambda: _model(_split(**arguments), _mean))

    def once():
        return tf.data.Dataset.from_tensors(_data())

    found = estimator.evaluate(once)
    if job.is_chief:
        model = seeded(lambda: _model(_whole(**arguments), _mean))
        model.fit(_input(), steps_per_epoch=STEPS, verbose=0)
        wanted = model.evaluate(once(), verbose=0)
        np.testing.assert_allclose(found["loss"], wanted, rtol=3e-3)

"""Growing tables learn the same as one with the full vocabulary."""

import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import EachStep, case, seeded
from tests.cases.custom_steps import OwnMean
from tests.cases.tables import ROWS, _data, _Dense
from tfdist import DynamicEmbedding, MultiOptimizer
from tfdist.embeddings.index import SEGMENT, mixed

STEPS, SHARDS = 4, 2
_L = keras.layers
# An id for each row of the table that it is compared with.
BIG = np.array([-(2**62), -1, 0, 1, 7, 2**31, 2**40, 2**62, 2**63 - 1])
WORDS = np.array([*"abcdefg", "a long word", "ß"])


def _table(num_shards=SHARDS, capacity=SHARDS * SEGMENT, **kwargs):
    kwargs.setdefault("embeddings_initializer", "normal")
    return DynamicEmbedding(
        2, capacity, num_shards=num_shards, name="table", **kwargs
    )


def _model(table, dtype="int64", optimizer="sgd", form=None, of=keras.Model):
    form = form or {}
    ids = keras.Input([None] if form else [3], dtype=dtype, **form)
    rows = table(ids)
    hidden = _L.Flatten()(rows) if len(rows.shape) > 2 else rows
    model = of(ids, _L.Dense(1, name="out")(hidden))
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse")
    return model


def _input(of=BIG, form=lambda ids: ids):
    ids, y = _data()
    batch = tf.data.Dataset.from_tensors((of[ids], y)).repeat()
    return batch.map(lambda ids, y: (form(ids), y))


def _rows(estimator, ids=BIG, table="table"):
    """The rows of ids in the newest checkpoint."""
    table, keys = (
        estimator.get_variable_value(f"{table}/{name}")
        for name in ("embeddings", "keys")
    )
    if ids.dtype.kind == "U":
        ids = tf.bitcast(tf.fingerprint(ids), tf.int64)
    ids = tf.cast(ids, tf.int64)
    found = [np.flatnonzero(keys == key) for key in mixed(ids)]
    assert [len(slots) for slots in found] == [1] * ROWS, found
    assert np.count_nonzero(keys) == ROWS
    return table[np.concatenate(found)]


def _train(job, model_fn, input_fn=_input, steps=STEPS):
    estimator = job.estimator(model_fn)
    estimator.train(input_fn, hooks=[EachStep()], max_steps=steps)
    return estimator


def _add(name, of=BIG, form=lambda ids: ids, refused=None, *, given=None, **kw):
    """A case of a table with `kw`, of ids in a form; the rest is the model."""
    given = given or {}
    dtype = {"U": "string"}.get(of.dtype.kind, str(of.dtype))

    @case(name, refused)
    def run(job):
        estimator = _train(
            job,
            lambda: _model(_table(**kw), dtype, **given),
            lambda: _input(of, form),
        )
        if not job.is_chief:
            return
        start = _table(**kw).initial_rows(of).numpy()
        optimizer = given.get("optimizer", "sgd")
        model = seeded(lambda: _reference(start, optimizer, kw))
        model.fit(_input(np.arange(ROWS)), steps_per_epoch=STEPS, verbose=0)
        # Of two workers, one may read before the other's update is written.
        apart = 3e-3 if job.strategy == "ps" else 1e-4
        close = {"rtol": apart, "atol": apart}
        wanted = model.get_layer("table").get_weights()[0]
        assert np.abs(wanted - start).max() > 3e-3
        np.testing.assert_allclose(_rows(estimator, of), wanted, **close)
        for name in ("kernel", "bias"):
            found = estimator.get_variable_value(f"out/{name}")
            wanted = getattr(model.get_layer("out"), name).numpy()
            np.testing.assert_allclose(found, wanted, **close)


def _reference(start, optimizer, kw):
    """A table of all rows, which begin at `start`."""
    # Or the layer after it would begin with other weights.
    initializer = kw.get("embeddings_initializer", "normal")
    table = _Dense(ROWS, 2, initializer, name="table")
    ids = keras.Input([3], dtype="int64")
    rows = table(ids)
    rows = keras.ops.mean(rows, 1) if "combiner" in kw else _L.Flatten()(rows)
    model = keras.Model(ids, _L.Dense(1, name="out")(rows))
    table.set_weights([start])
    model.compile(optimizer() if callable(optimizer) else optimizer, "mse")
    return model


_add("int64")
_add("one shard", num_shards=1)
_add("int32", np.arange(-4, 5, dtype="int32"))
_add("strings", WORDS)
_add("constant rows", embeddings_initializer="ones")
_add("uniform rows", embeddings_initializer="uniform")
_add("float64", dtype="float64")
_add("adagrad", given={"optimizer": lambda: keras.optimizers.Adagrad(0.1)})
_add(
    "ftrl",
    given={"optimizer": lambda: keras.optimizers.Ftrl(0.1)},
    embeddings_initializer="zeros",
)
_add(
    "adam",
    given={"optimizer": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3)},
)
_add(
    "clipnorm",
    given={"optimizer": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1)},
)
_add(
    "accumulates",
    given={
        "optimizer": lambda: keras.optimizers.SGD(
            0.1, gradient_accumulation_steps=2
        )
    },
)
_add(
    "LossScaleOptimizer",
    given={
        "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=8.0
        )
    },
)
_add(
    "tfdist.MultiOptimizer",
    given={
        "optimizer": lambda: MultiOptimizer(
            [("table", keras.optimizers.Adagrad(0.1)), ("", "sgd")]
        )
    },
)
_add(
    "own train_step",
    refused=dict.fromkeys(
        ["one process"], "Train with tfdist.fit or an Estimator, not with .*own"
    ),
    given={"of": OwnMean},
)
_add("evict_after_steps", evict_after_steps=2)
_add("combiner", combiner="mean")
_add("combiner, strings", WORDS, combiner="mean")
_add(
    "ragged",
    form=tf.RaggedTensor.from_tensor,
    given={"form": {"ragged": True}},
    combiner="mean",
)
_add(
    "sparse strings",
    WORDS,
    form=tf.sparse.from_dense,
    given={"form": {"sparse": True}},
    combiner="mean",
)
_add(
    "another initializer",
    embeddings_initializer="glorot_uniform",
    refused="`embeddings_initializer` must be constant",
)


@case()
def ids_that_come_again(job):
    """Two of four updates count an id; the others are its row's."""

    def model_fn():
        return _model(_table(admit_after=3, embeddings_initializer="zeros"))

    estimator = _train(job, model_fn, steps=2)
    if job.is_chief:
        assert not estimator.get_variable_value("table/keys").any()
    estimator = _train(job, model_fn)
    if job.is_chief:
        assert np.all(_rows(estimator) != 0)
        counters = estimator.get_variable_value("table/counters")
        assert counters.sum(axis=0).tolist() == [0, 2 * ROWS, 0]


class _Writes(tfdist.SessionRunHook):
    """The whole table of this process, for another one to compare."""

    def __init__(self, job):
        self._path = Path(job.model_dir, f"is chief: {job.is_chief}.npz")

    def end(self, session):
        table = session.model.get_layer("table").get_weights()
        part = self._path.with_suffix(".part.npz")
        np.savez(part, *table)
        part.rename(self._path)


def _assert_all_have_it(job):
    """Workers that train in step have each the whole table, the same."""
    if job.strategy != "all-reduce":
        return
    both = [Path(job.model_dir, f"is chief: {i}.npz") for i in (True, False)]
    end = time.monotonic() + 30
    while not both[1].exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    mine, theirs = map(np.load, both)
    for name in mine:
        assert mine[name].tobytes() == theirs[name].tobytes(), name


@case()
def ids_that_take_over(job):
    """The table is full, and keeps those that come; the same in each worker."""

    def input_fn():
        def batch(i):
            ids = 2_000 * i + tf.range(2_000, dtype=tf.int64)
            return tf.stack([ids] * 3, axis=1), tf.zeros([2_000, 1])

        return tf.data.Dataset.range(0, 8).map(batch).repeat()

    def model_fn():
        return _model(_table(1, SEGMENT, evict_after_steps=2))

    estimator = job.estimator(model_fn)
    hooks = [EachStep(), _Writes(job)]
    estimator.train(input_fn, hooks=hooks, max_steps=8)
    if job.is_chief:
        _assert_all_have_it(job)
        counters = estimator.get_variable_value("table/counters")
        evicted = counters.sum(axis=0)[2]
        held = np.count_nonzero(estimator.get_variable_value("table/keys"))
        assert held > 0.97 * SEGMENT
        # Workers may read the same batches.
        assert evicted > SEGMENT // 4


@case()
def evaluation_gives_no_row(job):
    estimator = _train(job, lambda: _model(_table()))
    if job.is_chief:
        others = np.arange(100, 100 + ROWS)
        estimator.evaluate(lambda: _input(others), steps=2)
        next(iter(estimator.predict(lambda: _input(others).map(_first))))
        _rows(estimator)


def _first(x, y):
    return x


@case()
def two_tables_one_of_them_twice(job):
    """Of one width; each knows its own ids, though they have the same."""

    def model_fn(tables):
        ids = keras.Input([3], dtype="int64")
        a, b = (tables(name) for name in "ab")
        both = [a(ids[:, :2]), b(ids), a(ids[:, 2:])]
        net = _L.Flatten()(_L.Concatenate(axis=1)(both))
        model = keras.Model(ids, _L.Dense(1, name="out")(net))
        model.compile("sgd", "mse")
        return model

    def growing(name):
        return DynamicEmbedding(2, 2 * SEGMENT, num_shards=2, name=name)

    estimator = _train(job, lambda: model_fn(growing))
    if job.is_chief:
        starts = {name: growing(name).initial_rows(BIG) for name in "ab"}
        model = seeded(
            lambda: model_fn(lambda name: _Dense(ROWS, 2, name=name))
        )
        for name, start in starts.items():
            model.get_layer(name).set_weights([start])
        model.fit(_input(np.arange(ROWS)), steps_per_epoch=STEPS, verbose=0)
        apart = 3e-3 if job.strategy == "ps" else 1e-4
        for name in "ab":
            wanted = model.get_layer(name).get_weights()[0]
            found = _rows(estimator, table=name)
            np.testing.assert_allclose(found, wanted, apart, apart)


@case()
def placed_by_bytes(job):
    """Keys are where the rows are, which is all that steps need."""
    estimator = job.estimator(lambda: _model(_table()), placement="greedy")
    estimator.train(_input, hooks=[EachStep()], max_steps=1)
    if job.is_chief:
        _rows(estimator)


@case()
def going_on_in_other_shards(job):
    """As one job would have learnt; no id changes its slot."""
    _train(job, lambda: _model(_table(2)), steps=2)
    estimator = _train(job, lambda: _model(_table(1)))
    if job.is_chief:
        start = _table().initial_rows(BIG).numpy()
        model = seeded(lambda: _reference(start, "sgd", {}))
        model.fit(_input(np.arange(ROWS)), steps_per_epoch=STEPS, verbose=0)
        apart = 3e-3 if job.strategy == "ps" else 1e-4
        wanted = model.get_layer("table").get_weights()[0]
        np.testing.assert_allclose(_rows(estimator), wanted, apart, apart)


@case()
def starting_with_the_rows_of_a_vocabulary(job):
    """And going on as the table with the vocabulary would."""

    def made(name, model_fn, **kwargs):
        config = job.estimator(model_fn).config
        config = config.replace(model_dir=f"{job.model_dir}/{name}")
        return tfdist.Estimator(lambda: seeded(model_fn), config, **kwargs)

    def listed():
        table = tfdist.PartitionedEmbedding(ROWS, 2, SHARDS, name="before")
        return _model(table)

    def rows():
        return _input(np.arange(ROWS))

    first = made("first", listed)
    first.train(rows, hooks=[EachStep()], max_steps=2)
    settings = tfdist.WarmStartSettings(
        f"{job.model_dir}/first/model.ckpt-2",
        var_name_to_prev_var_name={"table/embeddings": "before/embeddings"},
        var_name_to_ids={"table/embeddings": BIG},
    )
    model_fn = lambda: _model(_table(admit_after=100))  # noqa: E731
    second = made("second", model_fn, warm_start_from=settings)
    second.train(_input, hooks=[EachStep()], max_steps=2)
    first.train(rows, hooks=[EachStep()], max_steps=4)
    if job.is_chief:
        apart = 3e-3 if job.strategy == "ps" else 1e-4
        wanted = first.get_variable_value("before/embeddings")
        np.testing.assert_allclose(_rows(second), wanted, apart, apart)


@case(
    refused=r"(?s)table/keys: shape \(768, 16\) in the model, \(512, 16\) "
    "in the checkpoint.*tfdist rehash --checkpoint="
)
def going_on_with_another_capacity(job):
    _train(job, lambda: _model(_table()), steps=2)
    _train(job, lambda: _model(_table(capacity=3 * SEGMENT)))

from threading import Event

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import local_loop

from tfdist import DynamicEmbedding, PartitionedEmbedding
from tfdist._tf.private_keras import reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.embeddings.index import NO_ID, SEGMENT
from tfdist.training import optimizers
from tfdist.training.step import ModelStep

VOCABULARY, STEPS, BATCH = 60, 20, 16
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adam ema": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "accumulates": lambda: keras.optimizers.Adagrad(
        0.1, gradient_accumulation_steps=2
    ),
    "clips": lambda: keras.optimizers.SGD(0.5, clipnorm=0.1),
}


def dynamic(num_shards=1, capacity=None, name="table", **kwargs):
    capacity = capacity or num_shards * SEGMENT
    kwargs = {"output_dim": 4, "num_shards": num_shards, **kwargs}
    return DynamicEmbedding(capacity=capacity, name=name, **kwargs)


def model_of(table, optimizer="sgd", dtype="int64"):
    reset_object_names()
    keras.utils.set_random_seed(1)
    ids = keras.Input([3], dtype=dtype)
    hidden = keras.layers.Flatten()(table(ids))
    output = keras.layers.Dense(1, "sigmoid", name="out")(hidden)
    model = keras.Model(ids, output)
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def data(steps=STEPS, vocabulary=VOCABULARY, seed=0, of=lambda ids: ids):
    """Batches with new ids in most of them; the label tells an id's parity."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, [steps * BATCH, 3])
    y = (ids[:, :1] % 2).astype("float32")
    return tf.data.Dataset.from_tensor_slices((of(ids), y)).batch(BATCH)


@pytest.mark.parametrize("kind", ["dynamic", "partitioned"])
def test_a_model_may_build_it_again(kind):
    """As those of Keras Recommenders' guides do, in their own `build`."""
    partitioned = PartitionedEmbedding(9, 2, num_shards=2)
    table = dynamic(2) if kind == "dynamic" else partitioned
    table.build([None])
    variables = list(table.variables)
    table.build([None, 3])
    assert table.built
    assert table.variables == variables


def trained(model, dataset=None, steps=STEPS):
    loop, _ = local_loop(model, dataset or data(), 4)
    loop.run(steps)
    return model


def full(table, optimizer="sgd", of=lambda ids: ids, **kwargs):
    """With a full vocabulary, whose rows begin as those of `table`."""
    other = PartitionedEmbedding(VOCABULARY, 4, 2, name="table", **kwargs)
    model = model_of(other, optimizer)
    other.set_weights([table.initial_rows(of(np.arange(VOCABULARY))).numpy()])
    return model


def rows_of(table, ids=None):
    return np.asarray(table(np.arange(VOCABULARY) if ids is None else ids))


# --- In one process ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "num_shards"),
    [("adagrad", 3), *((name, 1) for name in OPTIMIZERS)],
)
def test_it_learns_what_a_full_vocabulary_does(optimizer, num_shards):
    model = model_of(dynamic(num_shards), optimizer)
    other = full(model.get_layer("table"), optimizer)
    before = rows_of(model.get_layer("table"))
    np.testing.assert_array_equal(before, rows_of(other.get_layer("table")))
    trained(model)
    trained(other)
    table = model.get_layer("table")
    after = rows_of(table)
    np.testing.assert_allclose(
        after, rows_of(other.get_layer("table")), rtol=1e-5, atol=1e-6
    )
    assert np.abs(after - before).max() > 1e-3
    for mine, theirs in zip(
        model.get_layer("out").get_weights(),
        other.get_layer("out").get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert table.num_ids() == VOCABULARY
    assert table.counters()["dropped_gradients"] == 0


@pytest.mark.slow
def test_inference_gives_no_id_a_row(tmp_path):
    model = trained(model_of(dynamic(2)))
    table = model.get_layer("table")
    before = table.get_weights()
    others = data(3, seed=1, of=lambda ids: ids + 10_000)
    step = ModelStep(model, others.element_spec)
    states = step.zero_states()
    for batch in others:
        states = step.evaluate(batch, states)
        step.predict(batch)
    model.evaluate(others, verbose=0)
    model.predict(others, verbose=0)
    model.export(tmp_path / "export", verbose=False)
    ids = np.concatenate([x for x, _ in others])
    for mine, was in zip(table.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, was)
    assert table.num_ids() == VOCABULARY
    # They read what a row would begin with.
    np.testing.assert_array_equal(table(ids[0]), table.initial_rows(ids[0]))


def test_gradients_without_room_are_dropped_and_counted():
    """Which shows in nothing else: other ids learn what they would."""
    table = dynamic()
    model = model_of(table)
    keys = table.get_weights()[1]
    rows, _, *others = table.get_weights()
    # Somebody else has all rows but a few.
    keys[:] = np.arange(2, 2 + SEGMENT).reshape(keys.shape)
    keys[::4, 0] = 0
    table.set_weights([rows, keys, *others])
    before = rows_of(table)
    trained(model)
    found = table.num_ids() - np.count_nonzero(keys)
    has_row = np.any(rows_of(table) != before, axis=1)
    assert has_row.sum() == found
    assert 0 < found < VOCABULARY
    # A gradient counts once in a step.
    lost = np.flatnonzero(~has_row)
    count = sum(np.isin(np.unique(ids), lost).sum() for ids, _ in data())
    assert table.counters()["refused"] == count
    assert np.all(table.get_weights()[0][keys.ravel() != 0] == 0)


def test_a_frozen_table_gives_no_id_a_row():
    table = dynamic(trainable=False)
    trained(model_of(table))
    assert table.num_ids() == 0


def last_seen(dataset):
    last = {}
    for step, (ids, _) in enumerate(dataset):
        last.update(dict.fromkeys(np.unique(ids), step + 1))
    return last


def test_seen_tells_the_last_update():
    """In a table that evicts; in others nothing is written."""
    for evicts in (1_000, None):
        table = dynamic(evict_after_steps=evicts)
        trained(model_of(table))
        _, keys, seen, _ = table.get_weights()
        assert not seen[keys.ravel() == 0].any()
        found = sorted(seen[keys.ravel() != 0])
        wanted = sorted(last_seen(data()).values())
        assert found == (wanted if evicts else [0] * len(wanted))


def test_two_tables_begin_with_other_rows():
    a, b = dynamic(name="a"), dynamic(name="b")
    assert np.all(a.initial_rows([1, 2]) != b.initial_rows([1, 2]))
    again = DynamicEmbedding.from_config(a.get_config())
    np.testing.assert_array_equal(again.initial_rows([1]), a.initial_rows([1]))


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation"),
    [
        ("zeros", 0, 0),
        ("ones", 1, 0),
        (keras.initializers.Constant(0.5), 0.5, 0),
        ("uniform", 0, 0.05 / 3**0.5),
        (keras.initializers.RandomUniform(1, 3, seed=4), 2, 1 / 3**0.5),
        ("normal", 0, 0.05),
        (keras.initializers.RandomNormal(3, 2), 3, 2),
    ],
)
def test_what_rows_begin_with(initializer, mean, deviation):
    table = dynamic(embeddings_initializer=initializer, output_dim=8)
    rows = table.initial_rows(np.arange(20_000)).numpy()
    assert rows.dtype == "float32"
    margin = 5 * deviation / rows.size**0.5 + 1e-6
    assert abs(rows.mean() - mean) <= margin
    assert abs(rows.std() - deviation) <= margin
    if deviation:
        correlations = np.corrcoef(rows.T) - np.eye(8)
        assert np.abs(correlations).max() < 0.04
        assert len(np.unique(rows)) > 0.98 * rows.size or rows.size > 1e5


@pytest.mark.slow
def test_a_file_of_keras(tmp_path):
    model = trained(model_of(dynamic(3)))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        rows_of(again.get_layer("table")), rows_of(model.get_layer("table"))
    )
    other = model_of(dynamic(2, capacity=3 * SEGMENT))
    other.get_layer("table").set_weights(model.get_layer("table").get_weights())
    np.testing.assert_array_equal(
        rows_of(other.get_layer("table")), rows_of(model.get_layer("table"))
    )


def words(ids):
    return np.char.add("word ", ids.astype(str))


# --- Checkpoints -------------------------------------------------------------


@pytest.mark.slow
def test_restores_bit_by_bit_into_other_shards(tmp_path):
    capacity = 5 * SEGMENT
    model = trained(model_of(dynamic(3, capacity), "adam ema"), steps=5)
    path = save(model, tmp_path / "3")
    shapes = checkpoints.saved_shapes(path)
    assert shapes["table/embeddings/adam/average"] == [capacity, 4]
    assert shapes["table/keys"] == [capacity // 16, 16]
    table, ids = model.get_layer("table"), np.arange(-10, 2 * VOCABULARY)
    for num_shards in (1, 3, 5):
        other = model_of(dynamic(num_shards, capacity), "adam ema")
        optimizers.build(other.optimizer, other.trainable_variables)
        named = checkpoints.named_variables(other)
        assert checkpoints.restore(path, named, exact=True)
        copy = save(other, tmp_path / f"into {num_shards}")
        for name in shapes:
            was, now = (
                checkpoints.load_variable(p, name) for p in (path, copy)
            )
            assert was.tobytes() == now.tobytes(), name
        restored = other.get_layer("table")
        assert np.array_equal(rows_of(restored, ids), rows_of(table, ids))
        assert restored.num_ids() == table.num_ids() > VOCABULARY // 2


def save(model, folder):
    named = checkpoints.named_variables(model)
    return checkpoints.Checkpoints(str(folder), named).save(5)


def test_ids_that_come_while_it_is_written_are_not_in_it(tmp_path, monkeypatch):
    """Keys, rows and slots are of one moment: each row is its own id's."""
    model = model_of(dynamic(3, 5 * SEGMENT), "adam")
    loop, _ = local_loop(model, data(), 1)
    loop.run(1)
    named = checkpoints.named_variables(model)
    before = {n: tf.convert_to_tensor(v).numpy() for n, v in named.items()}
    saved, opened = checkpoints.Checkpoints(str(tmp_path), named), Event()
    save = saved._manager.save
    monkeypatch.setattr(
        saved._manager, "save", lambda **k: opened.wait(60) and save(**k)
    )
    written, table = saved.save_behind(1), model.get_layer("table")
    was = table.num_ids()
    loop.run(STEPS - 1)
    assert table.num_ids() > was > 0
    opened.set()
    path = written.result(60)
    for name, value in before.items():
        found = checkpoints.load_variable(path, name)
        assert found.tobytes() == value.tobytes(), name


# --- Bad input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "`capacity` must be"),
        ({"capacity": -5}, "`capacity` must be"),
        ({"capacity": 1.5}, "`capacity` must be"),
        (
            {"capacity": 4097, "num_shards": 3},
            "`capacity` must be at least 4096 for each shard, here 12288, or "
            "`num_shards` at most 2. Received: capacity=4097, num_shards=3",
        ),
        ({"mask_zero": True}, r"not support \['mask_zero'\]"),
        ({"embeddings_regularizer": "l2"}, "not support"),
        ({"admit_after": 0}, "`admit_after` must be"),
        ({"admit_after": 128}, "`admit_after` must be at most 127"),
        ({"capacity": 2**35 + 1}, "`capacity` must be at most 34359738368"),
        ({"evict_after_steps": 2**31}, "must be at most 1073741824. Received"),
        ({"evict_after_steps": 0}, "`evict_after_steps` must be"),
        ({"evict_after_steps": 0.5}, "`evict_after_steps` must be"),
        ({"embeddings_initializer": "glorot_uniform"}, "uniform or normal"),
        (
            {"embeddings_initializer": keras.initializers.TruncatedNormal()},
            "must be constant .zeros, ones., uniform or normal",
        ),
        (
            {
                "embeddings_initializer": keras.initializers.RandomNormal(
                    seed=keras.random.SeedGenerator(1)
                )
            },
            "with a seed that is an int",
        ),
        (
            {"embeddings_initializer": lambda shape, dtype: 0},
            "must be constant",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    arguments = {"output_dim": 4, "capacity": 100, **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        DynamicEmbedding(**arguments)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_ids_of_another_type(dtype):
    message = f"'table' must be integers or strings. Received: {dtype}"
    with pytest.raises(TypeError, match=message):
        dynamic()(np.zeros([2, 3], dtype))
    with pytest.raises(TypeError, match=message):
        model_of(dynamic(), dtype=dtype)


def test_the_id_that_means_none():
    with pytest.raises(tf.errors.InvalidArgumentError, match="must not be"):
        dynamic()(np.array([5, NO_ID]))
    assert dynamic()(np.array([-1, NO_ID + 1, 2**63 - 1])).shape == [3, 4]


def test_a_batch_larger_than_the_table():
    model = model_of(dynamic())
    ids = np.arange(3 * SEGMENT).reshape([-1, 3])
    batch = tf.data.Dataset.from_tensors((ids, np.zeros([SEGMENT, 1])))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="capacity of several batches"
    ):
        trained(model, batch, 1)


def test_training_by_keras_is_refused():
    model = model_of(dynamic())
    with pytest.raises(LookupError, match="Train with tfdist"):
        model.fit(data(), verbose=0)
    frozen = model_of(dynamic(trainable=False))
    frozen.fit(data(), verbose=0)


def test_arrays_of_another_capacity():
    table, other = dynamic(), dynamic(capacity=2 * SEGMENT)
    for each in (table, other):
        each.build()
    with pytest.raises(ValueError, match="the same capacity"):
        table.set_weights(other.get_weights())

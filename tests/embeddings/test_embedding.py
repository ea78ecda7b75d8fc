import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import slow
from small_models import local_loop

from tfdist import PartitionedEmbedding
from tfdist._tf.private_keras import reset_object_names
from tfdist.embeddings.layer import logical_path, shard_of
from tfdist.placement.partitioners import (
    fixed_size_partitioner,
    variable_axis_size_partitioner,
)
from tfdist.training import optimizers

COMBINERS = ["sum", "mean", "sqrtn"]


def table_of(layer):
    """The whole table."""
    return in_order(layer, [shard.numpy() for shard in layer.shards])


def in_order(layer, pieces):
    """What is of the form of the shards, in the order of ids."""
    table = np.full([layer.input_dim, layer.output_dim], np.nan, "float32")
    for row, size, shard, start in layer.runs:
        table[row : row + size] = pieces[shard][start : start + size]
    return table


def built(rows, dim, seed=0, **kwargs):
    """A layer whose rows all differ."""
    layer = PartitionedEmbedding(rows, dim, **kwargs)
    layer.build()
    rng = np.random.default_rng(seed)
    for shard in layer.shards:
        shard.assign(rng.normal(size=shard.shape))
    return layer


def drawn_layer(data, combiner=None):
    rows = data.draw(st.integers(1, 40))
    return built(
        rows,
        data.draw(st.integers(1, 3)),
        num_shards=data.draw(st.integers(1, rows)),
        combiner=combiner,
        partition_strategy=data.draw(st.sampled_from(["balanced", "div"])),
        seed=data.draw(st.integers(0, 100)),
    )


@st.composite
def lists_of_ids(draw, layer, min_size=0):
    """A ragged batch: some examples have no id, some the same one twice."""
    one = st.integers(0, layer.input_dim - 1)
    some = st.lists(one, min_size=min_size, max_size=4)
    return draw(st.lists(some, min_size=1, max_size=4))


def random_weights(ids, seed):
    """Positive, as `tf.nn.safe_embedding_lookup_sparse` drops others."""
    rng = np.random.default_rng(seed)
    return [list(rng.uniform(0.5, 2.0, len(each))) for each in ids]


def ragged(lists, dtype):
    return tf.ragged.constant(lists, dtype, ragged_rank=1)


def sparse(lists, dtype):
    return ragged(lists, dtype).to_sparse()


def reference(layer, ids, weights):
    """TF1's own lookup in the table in one piece; zeros for no ids."""
    return tf.nn.safe_embedding_lookup_sparse(
        tf.constant(table_of(layer)),
        sparse(ids, tf.int64),
        None if weights is None else sparse(weights, tf.float32),
        combiner=layer.combiner,
    )


# --- Values ------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([tf.int32, tf.int64]))
def test_dense_ids(data, dtype):
    layer = drawn_layer(data)
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
    ids = tf.random.stateless_uniform(
        shape, [1, 2], 0, layer.input_dim, tf.int32
    )
    expected = tf.nn.embedding_lookup(table_of(layer), ids)
    got = layer(tf.cast(ids, dtype))
    assert got.shape == [*shape, layer.output_dim]
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_ragged_ids_without_combiner(data):
    layer = drawn_layer(data)
    ids = ragged(data.draw(lists_of_ids(layer)), tf.int64)
    got = layer(ids)
    np.testing.assert_array_equal(got.row_splits, ids.row_splits)
    expected = table_of(layer)[ids.flat_values.numpy()]
    np.testing.assert_array_equal(got.flat_values, expected)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("form", ["ragged", "sparse"])
@settings(max_examples=25, deadline=None)
@given(st.data(), st.booleans())
def test_combiners(form, combiner, data, weighted):
    layer = drawn_layer(data, combiner)
    ids = data.draw(lists_of_ids(layer))
    weights = random_weights(ids, seed=3) if weighted else None
    make = ragged if form == "ragged" else sparse
    arguments = [make(ids, tf.int64)]
    if weighted:
        arguments.append(make(weights, tf.float32))
    # `to_sparse` drops empty examples at the end; the reference too.
    expected = reference(layer, ids, weights)
    got = layer(*arguments)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("combiner", COMBINERS)
@settings(max_examples=15, deadline=None)
@given(st.data(), st.booleans())
def test_combiners_of_dense_ids(combiner, data, weighted):
    layer = drawn_layer(data, combiner)
    size = data.draw(st.integers(1, 4))
    ids = np.random.default_rng(size).integers(0, layer.input_dim, (3, size))
    weights = random_weights(ids, seed=3) if weighted else None
    arguments = [tf.constant(ids)]
    if weighted:
        arguments.append(tf.constant(weights, tf.float32))
    expected = reference(layer, ids.tolist(), weights)
    np.testing.assert_allclose(layer(*arguments), expected, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.data(), st.sampled_from([None, *COMBINERS]))
def test_gradients(data, combiner):
    layer = drawn_layer(data, combiner)
    ids = data.draw(lists_of_ids(layer, min_size=1))
    whole = tf.Variable(table_of(layer))
    with tf.GradientTape() as tape:
        rows = layer(ragged(ids, tf.int64))
        loss = tf.reduce_sum(tf.square(tf.concat(list(rows), 0)))
    gradient = tape.gradient(loss, [s.value for s in layer.shards])
    with tf.GradientTape() as tape:
        if combiner is None:
            flat = [i for each in ids for i in each]
            rows = tf.nn.embedding_lookup(whole, flat)
        else:
            rows = tf.nn.embedding_lookup_sparse(
                whole, sparse(ids, tf.int64), None, combiner=combiner
            )
        loss = tf.reduce_sum(tf.square(rows))
    expected = tf.convert_to_tensor(tape.gradient(loss, whole))
    got = [
        tf.zeros_like(s.value) if g is None else tf.convert_to_tensor(g)
        for g, s in zip(gradient, layer.shards, strict=True)
    ]
    np.testing.assert_allclose(in_order(layer, got), expected, atol=1e-5)


def test_compute_dtype_is_that_of_the_policy():
    layer = PartitionedEmbedding(5, 2, dtype="mixed_float16")
    assert layer(tf.constant([1])).dtype == tf.float16
    assert layer.shards[0].dtype == "float32"


# --- Inside a training step --------------------------------------------------


class Features(keras.layers.Layer):
    """Ragged ids from dense ones, of which -1 is none."""

    def __init__(self, form, **kwargs):
        super().__init__(**kwargs)
        self.form = form

    def call(self, ids):
        ids = tf.RaggedTensor.from_tensor(ids, padding=-1)
        return ids.to_sparse() if self.form == "sparse" else ids

    def compute_output_spec(self, ids):
        return keras.KerasTensor(ids.shape, ids.dtype)


def sum_model(tables, ids, width, optimizer="sgd"):
    """The sum over what `tables` answer; its gradient is one per row."""
    reset_object_names()
    inputs = keras.Input([width], dtype="int64")
    model = keras.Model(inputs, tables(ids(inputs)))
    model.compile(optimizer, lambda y, p: keras.ops.sum(p))
    return model


def trained(model, batch, steps=1):
    dataset = tf.data.Dataset.from_tensors(
        (tf.constant(batch, tf.int64), tf.ones([len(batch), 1]))
    ).repeat(steps)
    loop, _ = local_loop(model, dataset)
    loop.run(steps)
    return model


@pytest.mark.parametrize("num_shards", [*slow(1), 3])
@pytest.mark.parametrize(
    ("form", "combiner"),
    [("dense", None)]
    + list(itertools.product(["dense", "ragged", "sparse"], COMBINERS)),
)
def test_step_equals_the_gradient_outside(form, combiner, num_shards):
    batch = [[0, 6, 6], [2, 2, 3], [6, 0, 1]]
    if form != "dense":
        batch[1] = [2, -1, -1]
    layer = built(7, 2, num_shards=num_shards, combiner=combiner)
    ids = Features(form) if form != "dense" else (lambda x: x)
    model = sum_model(layer, ids, 3, keras.optimizers.SGD(0.1))
    before = table_of(layer)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(tf.constant(batch, tf.int64)))
    shards = [s.value for s in layer.shards]
    gradient = tape.gradient(loss, shards)
    gradient = [tf.convert_to_tensor(g) for g in gradient]
    expected = before - 0.1 * in_order(layer, gradient)
    trained(model, batch)
    np.testing.assert_allclose(table_of(layer), expected, rtol=1e-5)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("form", ["ragged", "sparse"])
def test_step_without_any_id(form, num_shards):
    layer = built(7, 2, num_shards=num_shards, combiner="mean")
    before = table_of(layer)
    trained(sum_model(layer, Features(form), 3), np.full([2, 3], -1))
    np.testing.assert_array_equal(table_of(layer), before)


def test_table_looked_up_twice():
    layer = built(6, 2, num_shards=2)
    before = table_of(layer)

    def twice(ids):
        return layer(ids[:, :1]) + 2.0 * layer(ids[:, 1:])

    model = sum_model(twice, lambda x: x, 2, keras.optimizers.SGD(0.1))
    trained(model, [[0, 0], [5, 0], [1, 5]])
    counts = np.array([1 + 2 + 2, 1, 0, 0, 0, 1 + 2])[:, None]
    np.testing.assert_allclose(table_of(layer), before - 0.1 * counts, 1e-5)


def test_tables_of_different_widths():
    wide, deep = built(6, 1, name="wide"), built(5, 3, num_shards=2)
    before = table_of(wide), table_of(deep)

    def both(ids):
        rows = keras.ops.sum(deep(ids), -1, keepdims=True)
        return rows + wide(ids)

    model = sum_model(both, lambda x: x, 1, keras.optimizers.SGD(0.1))
    trained(model, [[0], [4], [4]])
    counts = np.array([1, 0, 0, 0, 2])[:, None]
    np.testing.assert_allclose(table_of(wide)[:5], before[0][:5] - 0.1 * counts)
    np.testing.assert_allclose(table_of(deep), before[1] - 0.1 * counts, 1e-5)


def test_frozen_table_is_only_read():
    layer = built(6, 2, num_shards=2, trainable=False)
    before = table_of(layer)
    dense = keras.layers.Dense(1)
    model = sum_model(lambda ids: dense(layer(ids)), lambda x: x, 2)
    kernel = dense.kernel.numpy()
    trained(model, [[0, 5], [3, 3]])
    np.testing.assert_array_equal(table_of(layer), before)
    rows = before[[0, 5, 3, 3]].sum(axis=0)[:, None]
    np.testing.assert_allclose(dense.kernel, kernel - 0.01 * rows, rtol=1e-5)


def test_ids_that_depend_on_rows():
    first, second = built(6, 1), built(6, 2)

    def chained(ids):
        return second(keras.ops.cast(first(ids)[..., 0], "int64"))

    model = sum_model(chained, lambda x: x, 1)
    with pytest.raises(ValueError, match=r"ids of table .* depend on the rows"):
        trained(model, [[0]])


# --- Regularizer, constraint, mask -------------------------------------------


def test_regularizer_sees_each_row_of_the_batch_once():
    layer = built(20, 2, num_shards=3, embeddings_regularizer="l2")
    layer(tf.constant([[3, 3], [7, 3]]))
    expected = keras.regularizers.L2()(table_of(layer)[[3, 7]])
    np.testing.assert_allclose(layer.losses, [expected], rtol=1e-6)


def test_constraint_of_the_rows_of_the_batch():
    layer = built(7, 2, num_shards=3, embeddings_constraint="non_neg")
    before = table_of(layer)
    model = sum_model(layer, lambda x: x, 2, keras.optimizers.SGD(0.1))
    trained(model, [[0, 5], [5, 2]])
    counts = np.array([1, 0, 1, 0, 0, 2, 0])[:, None]
    expected = before - 0.1 * counts
    expected[[0, 2, 5]] = np.maximum(expected[[0, 2, 5]], 0)
    np.testing.assert_allclose(table_of(layer), expected, rtol=1e-5)
    assert (before[[0, 2, 5]] < 0).any()
    assert (before[[1, 3, 4, 6]] < 0).any()


def test_mask():
    layer = built(7, 2, num_shards=3, mask_zero=True)
    ids = tf.constant([[0, 5], [5, 2]])
    mask = [[False, True], [True, True]]
    assert layer.compute_mask(ids).numpy().tolist() == mask
    assert built(7, 2).compute_mask(ids) is None
    with pytest.raises(ValueError, match="Ragged ids have no padding"):
        layer(ragged([[0], [1, 2]], tf.int64))


# --- Bad input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"num_shards": 0}, ValueError, "`num_shards` .*num_shards=0"),
        ({"num_shards": -1}, ValueError, "num_shards=-1"),
        ({"num_shards": 1.5}, ValueError, "num_shards=1.5"),
        ({"num_shards": 6}, ValueError, "num_shards=6, num_rows=5"),
        ({"input_dim": 0}, ValueError, "input_dim=0"),
        ({"output_dim": -3}, ValueError, "output_dim=-3"),
        ({"combiner": "max"}, ValueError, "combiner='max'"),
        (
            {"partition_strategy": "mod"},
            ValueError,
            r"\('balanced', 'div'\). Received: partition_strategy='mod'",
        ),
        (
            {"embeddings_constraint": "unit_norm"},
            ValueError,
            "each row alone.* Received: 'unit_norm' with axis=0",
        ),
        (
            {"partitioner": fixed_size_partitioner(2, axis=1)},
            ValueError,
            "only axis 0 can be split",
        ),
        (
            {"partitioner": fixed_size_partitioner(2), "num_shards": 2},
            ValueError,
            "Only one of `num_shards` and `partitioner`",
        ),
        ({"partitioner": 3}, TypeError, "`partitioner` must be callable"),
    ],
)
def test_bad_arguments(kwargs, error, match):
    with pytest.raises(error, match=match):
        PartitionedEmbedding(**{"input_dim": 5, "output_dim": 2, **kwargs})


def test_partitioner():
    layer = PartitionedEmbedding(5, 2, partitioner=fixed_size_partitioner(2))
    assert layer.num_shards == 2


@pytest.mark.parametrize("dtype", [tf.string, tf.bool])
def test_ids_of_another_dtype(dtype):
    ids = tf.zeros([2], dtype) if dtype != tf.string else tf.constant(["a"])
    with pytest.raises(TypeError, match="integers. Received: " + dtype.name):
        built(5, 2)(ids)


EXACT = {"float16": 2048, "bfloat16": 256, "float32": 2**24}


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64", *EXACT])
def test_ids_of_any_number(dtype):
    layer = built(255, 2)
    ids = [[0, 253], [254, 7]]
    found = layer(tf.cast(ids, dtype))
    np.testing.assert_array_equal(found, layer.get_weights()[0][ids])
    assert layer(keras.Input([3], dtype=dtype)).shape == (None, 3, 2)


@pytest.mark.parametrize("dtype", EXACT)
def test_floats_that_would_mix_ids_up(dtype):
    largest = PartitionedEmbedding(EXACT[dtype], 1)
    assert largest(keras.Input([3], dtype=dtype)).shape == (None, 3, 1)
    assert tf.cast(EXACT[dtype], dtype) == tf.cast(EXACT[dtype] + 1, dtype)
    message = rf"Received: {dtype}, .* above {EXACT[dtype]}\. .*dtype='int64'"
    with pytest.raises(TypeError, match=message):
        PartitionedEmbedding(EXACT[dtype] + 1, 1)(keras.Input([3], dtype=dtype))


@pytest.mark.parametrize("value", [0.5, -0.1, float("nan"), float("inf")])
def test_ids_that_are_no_whole_numbers(value):
    message = "must be whole numbers"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        built(5, 2)(tf.constant([1.0, value]))


def test_floats_out_of_range_are_not_rounded_into_it():
    ids = tf.constant([2049], tf.float16)  # Is 2048.
    with pytest.raises(tf.errors.InvalidArgumentError, match="Received: from"):
        built(2048, 1)(ids)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_tower_that_is_a_sequential_without_an_input(policy):
    """Keras gives it an input of its first layer's compute dtype."""
    ids = tf.constant([[1], [4]], tf.int64)
    layer = PartitionedEmbedding(5, 2, dtype=policy)
    tower = keras.Sequential([layer, keras.layers.Flatten(dtype=policy)])
    np.testing.assert_allclose(
        tower(ids), layer.get_weights()[0][[1, 4]], rtol=1e-3
    )


def test_sparse_ids_need_a_combiner():
    with pytest.raises(ValueError, match="Sparse ids require a `combiner`"):
        built(5, 2)(sparse([[1]], tf.int64))


@pytest.mark.parametrize(
    "make", [ragged, sparse, lambda x, t: tf.constant(x, t)]
)
def test_weights_need_a_combiner(make):
    with pytest.raises(ValueError, match="requires a"):
        built(5, 2)(make([[1]], tf.int64), make([[1.0]], tf.float32))


OUTSIDE = [-1, 5, 2**40, -(2**40)]


@pytest.mark.parametrize("value", OUTSIDE)
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("traced", [False, True])
def test_ids_out_of_range(value, num_shards, traced):
    layer = built(5, 2, num_shards=num_shards, name="words")
    call = tf.function(layer) if traced else layer
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        call(tf.constant([1, value, 2], tf.int64))
    message = error.value.message
    assert "Ids of table words must be in [0, 5). Received:" in message
    assert str(value) in message


@pytest.mark.parametrize("value", OUTSIDE)
def test_ids_out_of_range_in_a_step(value):
    words, others = built(5, 2, num_shards=2, name="words"), built(9, 2)
    model = sum_model(lambda ids: words(ids) + others(ids * 0), lambda x: x, 2)
    before = table_of(words), table_of(others)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        trained(model, [[1, value]])
    assert "Ids of table] [words]" in error.value.message
    assert f"[Received:] [{value}]" in error.value.message
    np.testing.assert_array_equal(table_of(words), before[0])
    np.testing.assert_array_equal(table_of(others), before[1])
    # Nothing was applied, so nothing is counted.
    assert int(model.optimizer.iterations.numpy()) == 0


# --- Serialization -----------------------------------------------------------


def test_config():
    layer = PartitionedEmbedding(
        10, 4, num_shards=3, combiner="mean", embeddings_initializer="ones"
    )
    copy = PartitionedEmbedding.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    options = {
        "partition_strategy": "div",
        "embeddings_regularizer": "l2",
        "embeddings_constraint": "non_neg",
        "mask_zero": True,
    }
    config = PartitionedEmbedding(10, 4, **options).get_config()
    copy = PartitionedEmbedding.from_config(config)
    assert copy.get_config() == config
    assert isinstance(copy.embeddings_constraint, keras.constraints.NonNeg)
    split = PartitionedEmbedding(10, 4, partitioner=fixed_size_partitioner(4))
    copy = PartitionedEmbedding.from_config(split.get_config())
    assert copy.num_shards == 4


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("weighted", [False, True])
def test_ids_of_more_axes_are_combined_over_the_last(combiner, weighted):
    layer = built(10, 3, num_shards=2, combiner=combiner)
    lists = [[[1, 2], [], [9]], [], [[3, 3, 4]]]
    ids = tf.ragged.constant(lists, tf.int64)
    scale = tf.range(1.0, 7) if weighted else tf.ones([6])
    weights = ids.with_flat_values(scale)
    expected = tf.nn.safe_embedding_lookup_sparse(
        tf.constant(table_of(layer)),
        ids.to_sparse(),
        weights.to_sparse(),
        combiner=combiner,
    )
    given = weights if weighted else None
    rows = layer(ids, given)
    np.testing.assert_array_equal(rows.row_splits, ids.row_splits)
    np.testing.assert_allclose(rows.to_tensor(), expected, rtol=1e-5)
    given = weights.to_sparse() if weighted else None
    rows = layer(ids.to_sparse(), given)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    symbolic = keras.KerasTensor([3, 3, 3], "int64")
    assert rows.shape == layer.compute_output_spec(symbolic).shape


def test_sparse_ids_of_one_axis_are_one_example():
    layer = built(10, 3, combiner="sum")
    ids = tf.sparse.from_dense([0, 4, 5])
    expected = table_of(layer)[[4, 5]].sum(axis=0)
    np.testing.assert_allclose(layer(ids), expected, rtol=1e-6)
    spec = tf.SparseTensorSpec(None, tf.int32)  # Of any rank.
    traced = tf.function(lambda ids: layer(ids), input_signature=[spec])
    np.testing.assert_allclose(traced(ids), expected, rtol=1e-6)
    none = tf.SparseTensor(tf.zeros([0, 3], tf.int64), [], [2, 0, 4])
    assert layer(tf.cast(none, tf.int64)).shape == [2, 0, 3]


@pytest.mark.parametrize("inner", [None, "sum"])
def test_ragged_ids_of_equal_rows(inner):
    layer = built(10, 3, combiner=inner)
    ids = tf.RaggedTensor.from_row_lengths([[1, 2], [3, 4], [5, 5]], [1, 2])
    rows = table_of(layer)[ids.values.numpy()]
    expected = rows if inner is None else rows.sum(axis=1)
    np.testing.assert_allclose(layer(ids).values, expected, rtol=1e-6)


def saved_model():
    reset_object_names()
    layer = built(10, 4, num_shards=3, combiner="mean", name="words")
    inputs = keras.Input([2], dtype="int32")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        (tf.constant([[1, 2, 3]]), tf.ones([1, 1]), "a weight for each id"),
        (tf.ragged.constant([[1], [2]]), tf.ones([2, 1]), "a weight for each"),
        (
            tf.ragged.constant([[1, 2], [3]]),
            tf.ragged.constant([[1.0], [2.0, 3.0]]),
            "Weights and ids",
        ),
        (
            tf.ragged.constant([[1, 2], [3]]),
            tf.ragged.constant([[1.0, 2.0, 3.0]]),
            "Weights and ids|a weight for each id",
        ),
        (
            tf.sparse.from_dense([[1, 2], [3, 0]]),
            tf.sparse.from_dense([[1.0, 0.0], [2.0, 0.0]]),
            "Weights and ids",
        ),
        (
            tf.sparse.from_dense([[1, 0], [3, 0]]),
            tf.sparse.from_dense([[1.0, 0.0], [0.0, 2.0]]),
            "Weights and ids",
        ),
    ],
)
def test_weights_of_other_ids_are_refused(ids, weights, message):
    layer = PartitionedEmbedding(10, 2, combiner="mean")
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError), match=message
    ):
        layer(ids, weights)


def test_weights_are_one_table():
    table = np.arange(40.0).reshape([20, 2])
    for number, strategy in itertools.product([1, 3, 7], ["balanced", "div"]):
        layer = built(20, 2, num_shards=number, partition_strategy=strategy)
        layer.set_weights([table])
        np.testing.assert_array_equal(layer.get_weights(), [table])
        np.testing.assert_array_equal(
            layer(tf.constant([19, 0])), table[[19, 0]]
        )
    with pytest.raises(ValueError, match=r"\(20, 2\). Received .*\(3, 2\)"):
        layer.set_weights([table[:3]])


def test_file_of_shards_one_by_one():
    """As versions before this one wrote them."""
    table = np.arange(20.0).reshape([10, 2])
    store = {"0": table[:4], "1": table[4:7], "2": table[7:]}
    for number in 1, 3, 4:
        layer = built(10, 2, num_shards=number)
        layer.load_own_variables(store)
        np.testing.assert_array_equal(layer.get_weights()[0], table)


def test_file_of_another_class_of_layer(tmp_path):
    def model(layer):
        return keras.Sequential([keras.Input([], dtype="int64"), layer])

    path = tmp_path / "old.weights.h5"
    model(keras.layers.Embedding(10, 2)).save_weights(path)
    with pytest.raises(
        ValueError, match="another layer class: pass its array to `set_"
    ):
        model(PartitionedEmbedding(10, 2, num_shards=2)).load_weights(path)


IDS = np.array([[0, 9], [4, 4], [3, 7]], "int32")


def test_keras_file(tmp_path):
    model = saved_model()
    optimizers.build(model.optimizer, model.trainable_variables)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    np.testing.assert_array_equal(loaded(IDS), model(IDS))
    assert loaded.get_layer("words").num_shards == 3
    model.save_weights(tmp_path / "w.weights.h5")
    other = saved_model()
    other.get_layer("words").shards[1].assign(np.zeros([3, 4]))
    other.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(other(IDS), model(IDS))


def test_export_loads_in_the_c_loader(tmp_path):
    model = saved_model()
    model.export(tmp_path, verbose=False)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(
            session, ["serve"], str(tmp_path)
        )
        signature = loaded.signature_def["serving_default"]
        (given_,) = signature.inputs.values()
        (answer,) = signature.outputs.values()
        got = session.run(answer.name, {given_.name: IDS})
        with pytest.raises(tf.errors.InvalidArgumentError, match="words"):
            session.run(answer.name, {given_.name: IDS - 1})
    np.testing.assert_allclose(got, model(IDS), rtol=1e-6)


# --- Initial values ----------------------------------------------------------


def initial(initializer, num_shards=3, rows=9):
    layer = PartitionedEmbedding(
        rows,
        4,
        num_shards=num_shards,
        embeddings_initializer=initializer,
    )
    layer.build()
    return [shard.numpy() for shard in layer.shards]


RANDOM = {
    "uniform": lambda seed: keras.initializers.RandomUniform(seed=seed),
    "normal": lambda seed: keras.initializers.RandomNormal(seed=seed),
    "glorot": lambda seed: keras.initializers.GlorotUniform(seed=seed),
}


@pytest.mark.parametrize("name", RANDOM)
def test_shards_differ_and_a_seed_repeats(name):
    first, second, third = initial(RANDOM[name](5))
    assert not np.any(first == second)
    assert not np.any(second == third)
    again = initial(RANDOM[name](5))
    np.testing.assert_array_equal(again, [first, second, third])
    assert not np.any(initial(RANDOM[name](6))[0] == first)


@pytest.mark.parametrize("name", ["uniform", "normal", "glorot_uniform"])
def test_unseeded_initializers(name):
    keras.utils.set_random_seed(3)
    first = np.concatenate(initial(name))
    assert len(np.unique(first)) == first.size
    keras.utils.set_random_seed(3)
    np.testing.assert_array_equal(np.concatenate(initial(name)), first)
    assert not np.any(np.concatenate(initial(name)) == first)


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_constants(value):
    for shard in initial(keras.initializers.Constant(value)):
        assert (shard == value).all()
    if not value:
        assert not np.any(initial("zeros"))


def test_one_shard_draws_as_keras_does():
    keras.utils.set_random_seed(3)
    (ours,) = initial("uniform", num_shards=1)
    keras.utils.set_random_seed(3)
    theirs = keras.layers.Embedding(9, 4)
    theirs.build()
    np.testing.assert_array_equal(ours, theirs.embeddings)


def test_an_initializer_of_the_users():
    rows = []

    def initializer(shape, dtype=None):
        rows.append(shape[0])
        return tf.ones(shape, dtype)

    assert (np.concatenate(initial(initializer)) == 1).all()
    assert rows == [3, 3, 3]


@pytest.mark.parametrize(
    "constant",
    [
        keras.initializers.Constant,
        tf.constant_initializer,
        tf.compat.v1.constant_initializer,
    ],
)
@pytest.mark.parametrize("strategy", ["balanced", "div"])
@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_begins_with_a_matrix(num_shards, strategy, constant):
    matrix = np.random.default_rng(0).normal(size=[17, 3]).astype("float32")
    table = PartitionedEmbedding(
        17,
        3,
        num_shards,
        partition_strategy=strategy,
        embeddings_initializer=constant(matrix),
    )
    table.build()
    np.testing.assert_array_equal(table.get_weights()[0], matrix)


@pytest.mark.parametrize(
    "scaling",
    [
        keras.initializers.VarianceScaling,
        tf.compat.v1.variance_scaling_initializer,
    ],
)
@pytest.mark.parametrize("mode", ["fan_in", "fan_out", "fan_avg"])
def test_variance_is_that_of_the_whole_table(mode, scaling):
    """As in TF1, whatever the shards."""
    initializer = scaling(2.0, mode, seed=1)
    whole, *split = (
        np.std(np.concatenate(initial(initializer, num_shards, 6000)))
        for num_shards in (1, 4, 16)
    )
    np.testing.assert_allclose(split, [whole, whole], rtol=0.02)


def test_an_initializer_that_ignores_the_shape():
    matrix = tf.ones([9, 4])
    with pytest.raises(ValueError, match=r"\(3, 4\).* \(9, 4\).*Constant"):
        initial(lambda shape, dtype=None: matrix)


def test_weights_of_a_layer_that_is_not_built():
    """They would be drawn when it is."""
    with pytest.raises(ValueError, match="'words' has no weights"):
        PartitionedEmbedding(9, 4, name="words").set_weights([np.ones([9, 4])])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_bytes_of_a_shard_are_those_of_its_dtype(dtype):
    partitioner = variable_axis_size_partitioner(1 << 16)
    table = PartitionedEmbedding(1024, 64, partitioner=partitioner, dtype=dtype)
    assert table.num_shards == tf.as_dtype(dtype).size


# --- Names -------------------------------------------------------------------


def test_paths():
    split = PartitionedEmbedding(5, 2, num_shards=2, name="words")
    split.build()
    assert [s.path for s in split.shards] == [
        "words/embeddings_part_0",
        "words/embeddings_part_1",
    ]
    for shard in split.shards:
        assert shard_of(shard) == "words/embeddings"
        assert logical_path(shard) == "words/embeddings"
    whole = PartitionedEmbedding(5, 2, name="words")
    whole.build()
    assert shard_of(whole.shards[0]) is None
    assert logical_path(whole.shards[0]) == "words/embeddings"

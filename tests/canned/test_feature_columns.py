import canned_table
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.canned import feature_columns
from tfdist.canned.feature_columns import (
    Batch,
    checked_columns,
    look_up,
    read_vocabularies,
    shared_embeddings,
)
from tfdist.canned.layers import DenseFeatures

fc = tf.feature_column
NAMES = ["a", "b", "c"]


def words(**kwargs):
    return fc.categorical_column_with_vocabulary_list("f", NAMES, **kwargs)


def batch(column, features):
    return Batch(features, read_vocabularies([column]))


def ids(column, **features):
    return batch(column, features).ids(column)


def dense(column, **features):
    return batch(column, features).dense(column).numpy().tolist()


def counts(column, **features):
    return dense(fc.indicator_column(column), **features)


# The reference: TF 2.21 still has `input_layer`, for graphs.


def reference(columns, features):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        layer = tf.compat.v1.feature_column.input_layer(features(), columns)
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(tf.compat.v1.tables_initializer())
        return session.run(layer)


@pytest.mark.parametrize("sparse", [False, True])
def test_same_numbers_as_input_layer(tmp_path, sparse):
    linear, dnn = canned_table.columns(canned_table.write_words(tmp_path))
    weighted = fc.weighted_categorical_column(
        fc.categorical_column_with_hash_bucket("tags", 9), "tag_weights"
    )
    columns = [
        # Of a categorical column: how often each id occurs in an example.
        fc.indicator_column(c) if feature_columns.is_categorical(c) else c
        for c in (*linear, *dnn)
        if type(c).__name__ != "EmbeddingColumn"
    ]
    columns += [
        fc.embedding_column(weighted, 2, combiner, tf.initializers.constant(2))
        for combiner in ("sum", "mean", "sqrtn")
    ]

    def features():
        x, _ = canned_table.table(16, seed=3)
        x = {name: tf.constant(value) for name, value in x.items()}
        if sparse:
            for name in ("tags", "tag_weights"):
                x[name] = tf.sparse.from_dense(x[name])
        return x

    for column in columns:
        layer = DenseFeatures(column)
        layer.build()
        np.testing.assert_allclose(
            layer(features=batch(column, features())),
            reference([column], features),
            rtol=1e-5,
            err_msg=column.name,
        )


# Forms of features.


@pytest.mark.parametrize(
    "feature",
    [
        tf.ragged.constant([["b", "b", "c"], [], ["x"]]),
        tf.ragged.constant([["b", "b", "c"], [], ["x"]]).to_sparse(),
        tf.constant([["b", "", "b", "c"], [""] * 4, ["", "x", "", ""]]),
    ],
)
def test_several_values_of_an_example(feature):
    assert counts(words(), f=feature) == [[0, 2, 1], [0, 0, 0], [0, 0, 0]]
    table = tfdist.PartitionedEmbedding(3, 1, combiner="mean")
    table.build()
    table.shards[0].assign([[1.0], [2.0], [5.0]])
    rows = look_up(table, *ids(words(), f=feature))
    assert rows.numpy().tolist() == [[3.0], [0.0], [0.0]]


@pytest.mark.parametrize("column", [["f", "g"], None])
def test_cross_of_dense_and_sparse_values_is_the_same(column):
    # Names cross what is missing as well, columns do not.
    keys = column or [words(), fc.categorical_column_with_identity("g", 9)]
    cross = fc.crossed_column(keys, 1000)
    f = tf.constant([["a", "b"], ["c", ""], ["x", "a"]])
    g = tf.constant([[1, 2], [3, -1], [4, 4]], tf.int64)
    where = tf.where(tf.ones_like(g, tf.bool))
    if not column:
        where = tf.where((g >= 0) | (f != ""))
    sparse = {
        "f": tf.SparseTensor(where, tf.gather_nd(f, where), [3, 2]),
        "g": tf.SparseTensor(where, tf.gather_nd(g, where), [3, 2]),
    }
    assert counts(cross, f=f, g=g) == counts(cross, **sparse)


def test_width_that_is_not_known_while_tracing():
    cross = fc.crossed_column(["f", "g"], 50)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.string)] * 2)
    def traced(f, g):
        return ids(cross, f=f, g=g)[0].values

    f, g = tf.constant([["a", "b"], ["c", "d"]]), tf.constant([["x"], ["y"]])
    expected = ids(cross, f=f, g=g)[0].values
    assert expected.shape == (4,)
    np.testing.assert_array_equal(traced(f, g), expected)


def test_identity_keeps_what_is_out_of_range_for_the_table_to_refuse():
    column = fc.categorical_column_with_identity("f", 3)
    values, _ = ids(column, f=tf.constant([0, 2, 3, -1]))
    assert values.numpy().tolist() == [[0], [2], [3], [-1]]
    table = tfdist.PartitionedEmbedding(3, 1, combiner="sum")
    table.build()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[0, 3\)"):
        look_up(table, *ids(column, f=tf.constant([3])))


@pytest.mark.parametrize("dtype", ["uint8", "uint64"])
def test_an_unsigned_id_is_never_missing(dtype):
    column = fc.categorical_column_with_identity("f", 256)

    def own(f):
        return ids(column, f=f)[0]

    feature = tf.constant([[0], [255]], dtype)
    for read in (own, tf.function(own)):
        assert read(feature).numpy().tolist() == [[0], [255]]


def test_one_vocabulary_file_is_read_once(tmp_path):
    path = tmp_path / "words"
    path.write_text("b\na\n")
    column = fc.categorical_column_with_vocabulary_file("f", str(path))
    vocabularies = read_vocabularies([column, fc.indicator_column(column)])
    path.unlink()
    features = {"f": tf.constant(["a", "b", "z"])}
    got, _ = Batch(features, vocabularies).ids(column)
    assert got.numpy().tolist() == [[1], [0], [-1]]


def test_compressed_vocabulary(tmp_path):
    path = str(tmp_path / "words")
    with tf.io.TFRecordWriter(path, "GZIP") as writer:
        for word in (b"7", b"9"):
            writer.write(word)
    column = fc.categorical_column_with_vocabulary_file(
        "f", path, 2, dtype=tf.int64, file_format="tfrecord_gzip"
    )
    values, _ = ids(column, f=tf.constant([9, 8, 7]))
    assert values.numpy().tolist() == [[1], [-1], [0]]


def test_no_table_is_made():
    column = words(num_oov_buckets=2)
    vocabularies = read_vocabularies([column])
    traced = tf.function(lambda f: Batch({"f": f}, vocabularies).ids(column)[0])
    graph = traced.get_concrete_function(tf.TensorSpec([None], tf.string)).graph
    types = {op.type for op in graph.get_operations()}
    assert "StringToHashBucketFast" in types
    assert not [name for name in types if "Table" in name]


# What is refused.


def test_names_must_differ():
    other = fc.categorical_column_with_hash_bucket("f", 5)
    with pytest.raises(ValueError, match="different names"):
        checked_columns("columns", [words(), other])


@pytest.mark.parametrize("column", ["f", 3, {"f": 1}])
def test_no_column(column):
    with pytest.raises(TypeError, match="`columns` must hold columns"):
        checked_columns("columns", [column])


@pytest.mark.parametrize(
    "column_of",
    [
        lambda ids: fc.embedding_column(ids, 2),
        fc.indicator_column,
        lambda ids: shared_embeddings([ids], 2)[0],
        lambda ids: fc.embedding_column(
            fc.weighted_categorical_column(ids, "w"), 2
        ),
    ],
)
def test_a_column_of_a_sequence(column_of):
    """Of which TF 2.15 said so too; here it was named a feature's shape."""
    ids = fc.sequence_categorical_column_with_identity("f", 9)
    with pytest.raises(TypeError, match=r"except sequence.*Sequence"):
        checked_columns("columns", column_of(ids))


def test_embedding_with_an_option_that_tables_lack():
    column = fc.embedding_column(words(), 2, max_norm=1.0)
    with pytest.raises(ValueError, match="max_norm"):
        checked_columns("columns", column)


def test_shared_embeddings_of_one_name():
    column = fc.categorical_column_with_identity("g", 9)
    shared = [
        *shared_embeddings([words()], 2, shared_embedding_collection_name="t"),
        *shared_embeddings([column], 2, shared_embedding_collection_name="t"),
    ]
    with pytest.raises(ValueError, match="different names"):
        checked_columns("columns", shared)


def test_feature_that_is_missing():
    with pytest.raises(ValueError, match=r"'f' is missing.*\['g'\]"):
        ids(words(), g=tf.constant(["a"]))


def test_feature_of_another_type():
    with pytest.raises(ValueError, match=r"must be compatible\. key: f"):
        ids(words(), f=tf.constant([1]))


def test_numeric_column_that_gets_a_sparse_tensor():
    column = fc.numeric_column("f")
    feature = tf.sparse.from_dense([[1.0]])
    with pytest.raises(ValueError, match=r"must be a Tensor.*key: f"):
        dense(column, f=feature)


def test_numeric_column_that_gets_strings():
    column = fc.numeric_column("f")
    for feature in (tf.constant(["1"]), tf.sparse.from_dense([["1"]])):
        with pytest.raises(ValueError, match="'f' must have numbers"):
            dense(column, f=feature)


@pytest.mark.parametrize("shape", [[4, 2], [4, 2, 1]])
def test_numeric_column_that_gets_another_shape(shape):
    column = fc.numeric_column("f", shape=(3,))
    with pytest.raises(ValueError, match=r"of shape \(3,\)\. Received"):
        dense(column, f=tf.zeros(shape))


def test_numeric_column_of_a_matrix():
    column = fc.numeric_column("f", shape=(2, 3))
    feature = tf.reshape(tf.range(12.0), [2, 2, 3])
    assert dense(column, f=feature) == [[*range(6)], [*range(6, 12)]]


@pytest.mark.parametrize("shape", [[], [2, 3, 4]])
def test_categorical_column_that_gets_another_shape(shape):
    column = fc.categorical_column_with_identity("f", 3)
    with pytest.raises(ValueError, match=r"must be a tensor \(batch,\) or"):
        ids(column, f=tf.zeros(shape, tf.int64))


@pytest.mark.parametrize("sparse", [False, True])
def test_weights_of_zero_keep_their_value(sparse):
    column = fc.weighted_categorical_column(words(), "w")
    f, w = tf.constant([["a", "b"]]), tf.constant([[0.0, 2.0]])
    if sparse:
        f = tf.sparse.from_dense(f)
        w = f.with_values(w[0])
    assert counts(column, f=f, w=w) == [[0, 2, 0]]


@pytest.mark.parametrize(
    "weights",
    [
        tf.sparse.from_dense([[0.0, 1.0]]),
        tf.sparse.from_dense([[1.0, 1.0]]),
        tf.ones([1, 3]),
    ],
)
def test_weights_in_other_places(weights):
    column = fc.weighted_categorical_column(words(), "w")
    with pytest.raises(tf.errors.InvalidArgumentError, match="needs a weight"):
        ids(column, f=tf.constant([["a", ""]]), w=weights)


def test_vocabulary_file_that_is_too_short(tmp_path):
    path = tmp_path / "words"
    path.write_text("a\nb\n")
    column = fc.categorical_column_with_vocabulary_file("f", str(path), 3)
    with pytest.raises(ValueError, match="has 2 words, fewer than"):
        read_vocabularies([column])

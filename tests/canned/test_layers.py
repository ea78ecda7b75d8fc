"""The layers compared with TF 1's, which TF 2.21 still has for graphs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.canned import DenseFeatures, LinearModel, shared_embeddings

fc = tf.feature_column
v1 = tf.compat.v1
TAGS = fc.categorical_column_with_vocabulary_list("tags", ["a", "b", "c"])
SIZE = fc.numeric_column("size")
COLUMNS = [
    TAGS,
    SIZE,
    fc.bucketized_column(SIZE, [0.0]),
    fc.indicator_column(TAGS),
]
FEATURES = {
    "tags": [["a", "b"], ["c", ""], ["z", "a"]],
    "size": [[1.0], [-2.0], [0.5]],
    "p": [[0, 1], [2, -1], [3, 3]],
    "q": [[1, -1], [2, 2], [0, 3]],
}
TARGETS = np.array([[1.0], [0.0], [3.0]], "float32")
TABLE = np.arange(8, dtype="float32").reshape(4, 2) / 8


def trained_by_tf1(output_of, steps=3):
    """What TF 1's layer gives after some steps of gradient descent."""
    with tf.Graph().as_default(), v1.Session() as session:
        features = {name: tf.constant(v) for name, v in FEATURES.items()}
        output = output_of(features)
        loss = tf.reduce_mean(tf.square(output - TARGETS))
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(v1.global_variables_initializer())
        session.run(v1.tables_initializer())
        for _ in range(steps):
            session.run(train)
        return session.run(output)


def trained(layer, steps=3):
    """The same, of a Keras layer."""
    model = keras.Sequential([layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    features = {name: tf.constant(v) for name, v in FEATURES.items()}
    data = tf.data.Dataset.from_tensors((features, TARGETS))
    model.fit(data.repeat(steps), verbose=0)
    return model(features)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_linear_model_learns_what_that_of_tf1_does(combiner):
    wanted = trained_by_tf1(
        lambda features: v1.feature_column.linear_model(
            features, COLUMNS, sparse_combiner=combiner
        )
    )
    found = trained(LinearModel(COLUMNS, sparse_combiner=combiner))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_shared_table_learns_what_that_of_tf1_does(combiner):
    ids = [fc.categorical_column_with_identity(name, 4) for name in "qp"]
    arguments = (2, combiner, tf.constant_initializer(TABLE))
    wanted = trained_by_tf1(
        lambda features: v1.feature_column.input_layer(
            features, fc_shared(ids, *arguments)
        )
    )
    layer = DenseFeatures(shared_embeddings(ids, *arguments))
    np.testing.assert_allclose(trained(layer), wanted, rtol=1e-5)
    [table] = layer.weights
    assert table.path.endswith("p_q_shared_embedding/embeddings")


def fc_shared(ids, dimension, combiner, initializer):
    return v1.feature_column.shared_embedding_columns(
        ids, dimension, combiner, initializer
    )


def test_a_missing_value_looks_up_no_row():
    """Momentum would move row 0 in steps that have none of its ids."""
    ids = tf.constant([[0, 1]] * 4 + [[3, -1]] * 36)
    dense = tf.data.Dataset.from_tensor_slices(ids).batch(4)
    dense = dense.map(lambda p: ({"p": p}, tf.cast(p[:, 0], tf.float32)))

    def ragged(features, targets):
        p = tf.RaggedTensor.from_tensor(features["p"], padding=-1)
        return {"p": p.to_sparse()}, targets

    def model_fn():
        column = fc.categorical_column_with_identity("p", 4)
        model = keras.Sequential([LinearModel([column])])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    def weights(dataset):
        model, _ = tfdist.fit(
            model_fn, lambda: dataset, log_step_count_steps=None
        )
        return model.get_weights()

    found, wanted = weights(dense), weights(dense.map(ragged))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("make", [DenseFeatures, LinearModel])
def test_saved_as_a_keras_file(make, tmp_path):
    columns = [*COLUMNS[1:], fc.embedding_column(TAGS, 2)]
    inputs = {
        "tags": keras.Input([2], dtype="string", name="tags"),
        "size": keras.Input([1], name="size"),
    }
    model = keras.Model(inputs, make(columns)(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    features = {name: tf.constant(FEATURES[name]) for name in inputs}
    np.testing.assert_array_equal(loaded(features), model(features))


def test_a_shared_table_has_no_config():
    columns = shared_embeddings(
        [fc.categorical_column_with_identity("p", 4)], 2
    )
    with pytest.raises(NotImplementedError, match="save its weights"):
        DenseFeatures(columns).get_config()


def test_half_precision_keeps_numbers_whole_until_they_are_columns():
    column = fc.bucketized_column(SIZE, [0.99999])
    layer = DenseFeatures([column], dtype="mixed_float16")
    found = layer({"size": tf.constant([0.99998])})  # In 16 bits: 1.
    assert found.dtype == tf.float16
    assert found.numpy().tolist() == [[1.0, 0.0]]


def test_no_columns():
    with pytest.raises(ValueError, match="must have columns"):
        DenseFeatures([])

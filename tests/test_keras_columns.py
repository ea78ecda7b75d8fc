import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.canned.feature_columns import ColumnReader, is_categorical
from tfdist.canned.keras_columns import feature_column, feature_columns_of

layers = keras.layers
WORDS = ["a", "b", "c", "a", "z"]
NUMBERS = [3, 7, 7, 9, -2]
FLOATS = np.array([-1.5, 0.0, 0.5, 1.0, 2.0, 9.0], "float32")


def adapted(layer, data):
    layer.adapt(np.array(data))
    return layer


def read(column, **features):
    reader = ColumnReader([column])
    if is_categorical(column):
        return reader.ids(column, features).values.numpy()
    return reader.dense(column, features).numpy()


@pytest.mark.parametrize("oov", [0, 1])
@pytest.mark.parametrize(
    ("kind", "data", "other"),
    [
        (layers.StringLookup, ["a", "b", "a"], "x"),
        (layers.IntegerLookup, [7, 9, 7], 8),
    ],
)
def test_lookup_knows_the_same_words(kind, data, other, oov):
    layer = adapted(kind(num_oov_indices=oov), data)
    column = feature_column("f", layer)
    assert column.num_buckets == 2 + oov
    # Keras counts the ids of other words first.
    expected = layer(tf.constant(data)).numpy() - oov
    assert read(column, f=tf.constant(data))[:, 0].tolist() == expected.tolist()
    assert read(column, f=tf.constant([other])) == [[2 if oov else -1]]


@pytest.mark.parametrize(
    ("dtype", "values"), [("string", WORDS), ("int64", NUMBERS)]
)
def test_hashing_gives_the_same_ids(dtype, values):
    layer = layers.Hashing(5)
    ids = read(feature_column("f", layer, dtype), f=tf.constant(values))
    assert ids[:, 0].tolist() == layer(tf.constant(values)).numpy().tolist()


@pytest.mark.parametrize("learned", [False, True])
def test_discretization_gives_the_same_ids(learned):
    if learned:
        layer = adapted(layers.Discretization(num_bins=3), FLOATS)
    else:
        layer = layers.Discretization([0.0, 1.0, 2.0])
    ids = read(feature_column("f", layer), f=FLOATS)
    assert ids[:, 0].tolist() == layer(FLOATS).numpy().tolist()


def test_normalization_of_several_numbers():
    data = np.random.default_rng(0).normal(3, [1, 2, 0], [50, 3])
    layer = adapted(layers.Normalization(), data.astype("float32"))
    column = feature_column("f", layer)
    assert column.shape == (3,)
    values = data[:4].astype("float32")
    np.testing.assert_allclose(read(column, f=values), layer(values), rtol=1e-5)


@pytest.mark.parametrize("feature", [FLOATS, FLOATS.astype("int32")])
def test_rescaling(feature):
    layer = layers.Rescaling(0.5, 2.0)
    values = read(feature_column("f", layer), f=feature)
    np.testing.assert_allclose(values[:, 0], layer(feature), rtol=1e-6)


def test_feature_space_with_a_cross():
    space = keras.utils.FeatureSpace(
        {
            "word": "string_categorical",
            "hashed": keras.utils.FeatureSpace.string_hashed(4),
            "number": "integer_categorical",
            "size": "float_normalized",
        },
        crosses=[("word", "hashed")],
        crossing_dim=6,
    )
    data = {
        "word": WORDS,
        "hashed": WORDS[::-1],
        "number": NUMBERS,
        "size": FLOATS[:5],
    }
    space.adapt(tf.data.Dataset.from_tensor_slices(data))
    columns = feature_columns_of(space)
    assert set(columns) == {*data, "word_X_hashed"}
    assert columns["number"].num_buckets == 5
    assert is_categorical(columns["hashed"])
    tensors = {name: tf.constant(value) for name, value in data.items()}
    crosser = space.crossers["word_X_hashed"]
    expected = crosser([tensors["word"], tensors["hashed"]]).numpy()
    got = read(columns["word_X_hashed"], **tensors)
    assert got[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize(
    "layer",
    [
        layers.StringLookup(),
        layers.Discretization(num_bins=3),
        layers.Normalization(),
    ],
)
def test_layer_that_is_not_adapted(layer):
    with pytest.raises(ValueError, match="'f' is not adapted"):
        feature_column("f", layer)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (layers.Hashing(3, salt=1), "salt="),
        (layers.Hashing(3, mask_value="?"), "mask_value='\\?'"),
        (
            layers.StringLookup(vocabulary=["a"], mask_token="?"),
            "mask_token='\\?'",
        ),
    ],
)
def test_option_without_counterpart(layer, message):
    with pytest.raises(ValueError, match=message):
        feature_column("f", layer)


def test_other_layer():
    with pytest.raises(TypeError, match="must be one of StringLookup"):
        feature_column("f", layers.Dense(1))

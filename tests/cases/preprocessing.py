"""Keras' preprocessing layers in input functions.

They are created and adapted before training, as in Keras' guides, or created
in the input function with known values. Each worker gets a copy of them.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.cases import STEPS, case, seeded
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import multi_worker_strategy

WORDS = np.array(["red", "green", "blue", "red", "grey", "blue"])
NUMBERS = np.array([[1.5], [2.5], [-3.0], [0.5], [7.0], [2.0]], "float32")
IDS = np.array([[3], [9], [27], [3], [81], [9]])
Y = np.array([[0], [1], [1], [0], [1], [0]], "float32")


def mapped(x, function):
    """Batches of (what `function` makes of x, y), without end."""
    dataset = tf.data.Dataset.from_tensors((x, Y)).repeat()
    return dataset.map(lambda x, y: (function(x), y))


def trains_as_fit(job, model_fn, input_fn):
    """As `Job.trains_as_fit`; evaluates as Keras does, too."""
    estimator = job.trains_as_fit(model_fn, input_fn)
    if job.is_chief:
        model = seeded(model_fn)
        model.fit(input_fn(), steps_per_epoch=STEPS, verbose=0)
        wanted = model.evaluate(input_fn(), steps=2, verbose=0)
        found = estimator.evaluate(input_fn, steps=2)["loss"]
        np.testing.assert_allclose(found, wanted, 1e-4)


def wide(width):
    """Makes models of so many inputs."""

    def model_fn():
        model = keras.Sequential([keras.Input([width]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    return model_fn


def embedding():
    model = keras.Sequential(
        [
            keras.Input([4], dtype="int64"),
            keras.layers.Embedding(8, 2),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    return model


# Name: (width of what it returns, examples, function that makes the layer).
LAYERS = {
    "StringLookup": (
        5,
        WORDS,
        lambda: keras.layers.StringLookup(
            vocabulary=["red", "green", "blue", "black"], output_mode="one_hot"
        ),
    ),
    "StringLookup adapted": (
        5,
        WORDS,
        lambda: adapted(
            keras.layers.StringLookup(output_mode="one_hot"), WORDS
        ),
    ),
    "IntegerLookup": (
        3,
        IDS,
        lambda: keras.layers.IntegerLookup(
            vocabulary=[3, 9], output_mode="one_hot"
        ),
    ),
    "TextVectorization adapted": (
        5,
        WORDS,
        lambda: adapted(
            keras.layers.TextVectorization(output_mode="multi_hot"), WORDS
        ),
    ),
    "TextVectorization tf_idf": (
        5,
        WORDS,
        lambda: adapted(
            keras.layers.TextVectorization(output_mode="tf_idf"), WORDS
        ),
    ),
    "Normalization adapted": (
        1,
        NUMBERS,
        lambda: adapted(keras.layers.Normalization(), NUMBERS),
    ),
    "Normalization": (
        1,
        NUMBERS,
        lambda: built(keras.layers.Normalization(mean=[1.0], variance=[4.0])),
    ),
    "Discretization adapted": (
        3,
        NUMBERS,
        lambda: adapted(
            keras.layers.Discretization(num_bins=3, output_mode="one_hot"),
            NUMBERS,
        ),
    ),
    "Discretization": (
        3,
        NUMBERS,
        lambda: keras.layers.Discretization([0.0, 2.0], output_mode="one_hot"),
    ),
    "CategoryEncoding": (
        90,
        IDS,
        lambda: keras.layers.CategoryEncoding(90, output_mode="one_hot"),
    ),
    "Hashing": (
        4,
        WORDS[:, None],
        lambda: keras.layers.Hashing(4, output_mode="one_hot"),
    ),
    "HashedCrossing": (
        4,
        (WORDS, IDS[:, 0]),
        lambda: keras.layers.HashedCrossing(4, output_mode="one_hot"),
    ),
    "Rescaling": (1, NUMBERS, lambda: keras.layers.Rescaling(0.5, 1.0)),
}


def joined(job):
    """An all-reduce job is joined before TensorFlow computes anything."""
    if job.strategy == "all-reduce":
        multi_worker_strategy(Cluster.from_env())


def built(layer):
    """Or Keras makes its constants in the graph of the first dataset."""
    layer(NUMBERS)
    return layer


def adapted(layer, examples):
    layer.adapt(examples)
    return layer


TRACED = {"ps": "not on a worker .* Call `adapt`.* outside of the input func"}


def _add(name):
    width, x, make = LAYERS[name]

    @case(f"{name} made before")
    def before(job):
        joined(job)
        layer = make()
        trains_as_fit(job, wide(width), lambda: mapped(x, layer))

    # From the array, which Keras computes with in NumPy.
    traced = name.endswith(("adapted", "tf_idf")) and "Discr" not in name

    @case(f"{name} in the input function", refused=TRACED if traced else None)
    def inside(job):
        def input_fn():
            return mapped(x, make())

        trains_as_fit(job, wide(width), input_fn)


for each in LAYERS:
    _add(each)


@case()
def text_vectorization_to_embedding(job):
    joined(job)
    layer = keras.layers.TextVectorization(output_sequence_length=4)
    layer.adapt(["red and green", "blue or grey"])
    trains_as_fit(job, embedding, lambda: mapped(WORDS, layer))


@case()
def feature_space(job):
    joined(job)

    def spaced():
        return {"word": WORDS, "number": NUMBERS[:, 0]}

    space = keras.utils.FeatureSpace(
        {"word": "string_categorical", "number": "float_discretized"},
        crosses=[("word", "number")],
        crossing_dim=8,
    )
    space.adapt(tf.data.Dataset.from_tensors(spaced()))
    width = space(spaced()).shape[-1]
    trains_as_fit(job, wide(width), lambda: mapped(spaced(), space))


@case()
def static_hash_table(job):
    joined(job)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["red", "blue"], [1.0, 2.0]), 0.5
    )
    trains_as_fit(job, wide(1), lambda: mapped(WORDS[:, None], table.lookup))


@case()
def variable_made_before(job):
    joined(job)
    factor = tf.Variable(0.25)
    trains_as_fit(job, wide(1), lambda: mapped(NUMBERS, lambda x: x * factor))


@case()
def random_layer_made_before(job):
    """Each worker draws its own numbers: what is trained is not compared."""
    joined(job)
    noise = keras.layers.GaussianNoise(0.1)
    job.estimator(wide(1)).train(
        lambda: mapped(NUMBERS, lambda x: noise(x, training=True)), max_steps=4
    )


@case(refused=TRACED)
def adapt_to_a_dataset_in_the_input_function(job):
    def input_fn():
        layer = keras.layers.TextVectorization(output_mode="multi_hot")
        layer.adapt(tf.data.Dataset.from_tensors(WORDS))
        return mapped(WORDS, layer)

    trains_as_fit(job, wide(5), input_fn)


@case()
def layers_of_a_cached_function(job):
    """What docs/howto/fit.md recommends, as it works in every cluster."""

    @functools.cache
    def layers():
        words = keras.layers.TextVectorization(output_mode="multi_hot")
        words.adapt(tf.data.Dataset.from_tensors(WORDS))
        return words, keras.layers.GaussianNoise(0.0)

    def input_fn():
        words, noise = layers()
        return mapped(WORDS, lambda x: noise(words(x), training=True))

    trains_as_fit(job, wide(5), input_fn)
    job.estimator(wide(5)).evaluate(input_fn, steps=1)


@case(refused=TRACED)
def python_loop_over_a_dataset_in_the_input_function(job):
    def input_fn():
        total = 0.0
        for x in tf.data.Dataset.from_tensors(NUMBERS):
            total = total + tf.reduce_sum(x)
        return mapped(NUMBERS, lambda x: x / float(total))

    trains_as_fit(job, wide(1), input_fn)

"""Layers of feature columns in models from TF 2.15's guides."""

import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import EachStep, case, seeded
from tfdist.canned import DenseFeatures, LinearModel, shared_embeddings
from tfdist.checkpoint.checkpoints import named_variables

fc = tf.feature_column
WORDS = ["red", "green", "blue"]
SHAPES = {"size": [], "pair": [2], "tags": [2], "weights": [2]}
SHAPES |= {"item": [], "seen": [3], "user": []}
DTYPES = {"tags": "string", **dict.fromkeys(["item", "seen", "user"], "int64")}

SIZE = fc.numeric_column("size")
PAIR = fc.numeric_column("pair", shape=(2,))
TAGS = fc.categorical_column_with_vocabulary_list("tags", WORDS)
ITEM = fc.categorical_column_with_identity("item", 6)
SEEN = fc.categorical_column_with_identity("seen", 6)
USER = fc.categorical_column_with_identity("user", 12)
SIZES = fc.bucketized_column(SIZE, [-1.0, 0.0, 1.0])
CROSS = fc.crossed_column([SIZES, TAGS, "item"], 20)


def examples(*names, n=12):
    """Features, some of them missing, and numbers to learn."""
    rng = np.random.default_rng(3)
    features = {
        "size": rng.normal(size=n).astype("float32"),
        "pair": rng.normal(size=[n, 2]).astype("float32"),
        "tags": rng.choice([*WORDS, "", "other"], [n, 2]),
        "weights": rng.uniform(1, 2, [n, 2]).astype("float32"),
        "item": rng.integers(0, 6, n),
        "seen": rng.integers(-1, 6, [n, 3]),
        # Each once: for a row that occurs twice, Keras' own optimizers square
        # both gradients apart, ours their sum, as TF 1 did.
        "user": rng.permutation(n),
    }
    y = rng.normal(size=[n, 1]).astype("float32")
    return {name: features[name] for name in names}, y


def deep(columns, **arguments):
    """A network over the columns."""

    def net(features):
        hidden = DenseFeatures(columns, **arguments)(features)
        return keras.layers.Dense(1)(keras.layers.Dense(3, "tanh")(hidden))

    return net


def wide(columns, **arguments):
    """A linear model of the columns."""
    return lambda features: LinearModel(columns, **arguments)(features)


def model_of(names, *nets, optimizer="sgd"):
    """A functional model: the sum of what `nets` make of its features."""
    inputs = {
        name: keras.Input(SHAPES[name], dtype=DTYPES.get(name), name=name)
        for name in names
    }
    model = keras.Model(inputs, sum(net(inputs) for net in nets))
    model.compile(optimizer, "mse")
    return model


def _add(name, names, *nets, **arguments):
    @case(name)
    def run(job):
        def model_fn():
            return model_of(names, *nets, **arguments)

        job.trains_as_fit(model_fn, examples(*names))


_EMBEDDED = fc.embedding_column(TAGS, 3)
_MANY = [PAIR, _EMBEDDED, fc.indicator_column(CROSS), SIZES]
_FEW = ("size", "tags")
_HASHED = fc.categorical_column_with_hash_bucket("tags", 9)

_add("numbers", ("size", "pair"), deep([SIZE, PAIR]))
_add(
    "normalized numbers",
    ("size",),
    deep(fc.numeric_column("size", normalizer_fn=lambda x: (x - 1.0) / 3.0)),
)
_add("buckets", ("size",), deep(SIZES))
_add("words counted", ("tags",), deep(fc.indicator_column(TAGS)))
_add("words embedded", ("tags",), deep(_EMBEDDED))
_add(
    "hashed words embedded",
    ("tags",),
    deep(fc.embedding_column(_HASHED, 2, combiner="sqrtn")),
)
_add(
    "weighted words embedded",
    ("tags", "weights"),
    deep(
        fc.embedding_column(
            fc.weighted_categorical_column(_HASHED, "weights"), 2
        )
    ),
)
_add("a cross of columns", ("size", "tags", "item"), wide(CROSS))
_add("all at once", ("pair", "size", "tags", "item"), deep(_MANY))
_add("linear", ("pair", *_FEW), wide([PAIR, TAGS, SIZES]))
_add(
    "linear with an embedding, mean of ids",
    _FEW,
    wide([TAGS, _EMBEDDED, SIZE], sparse_combiner="mean"),
)
_add("wide and deep", _FEW, wide([TAGS, SIZES]), deep([_EMBEDDED, SIZE]))
_add(
    "Adagrad",
    ("user", "size"),
    deep([fc.embedding_column(USER, 3), SIZE]),
    optimizer="adagrad",
)
_add("Ftrl", ("user", "size"), wide([USER, SIZE]), optimizer="ftrl")
_add(
    "an embedding column that is not trained",
    _FEW,
    deep([fc.embedding_column(TAGS, 3, trainable=False), SIZE]),
)
_add(
    "a layer that is not trained",
    _FEW,
    deep([_EMBEDDED, SIZE], trainable=False),
    wide([TAGS]),
)


def _shared(**arguments):
    return shared_embeddings([ITEM, SEEN], 2, **arguments)


@case()
def table_of_two_shards(job):
    def model_fn():
        partitioner = tfdist.fixed_size_partitioner(2)
        net = deep([_EMBEDDED, SIZE], partitioner=partitioner)
        return model_of(_FEW, net)

    estimator = job.estimator(model_fn)
    features, y = examples(*_FEW)
    estimator.train(
        lambda: tf.data.Dataset.from_tensors((features, y)).repeat(),
        hooks=[EachStep()],
        max_steps=4,
    )
    if job.is_chief:
        model = seeded(model_fn)
        batches = tf.data.Dataset.from_tensors((features, y))
        model.fit(batches, epochs=4, verbose=0)
        name = "dense_features/tags_embedding/embeddings"
        np.testing.assert_allclose(
            estimator.get_variable_value(name),
            named_variables(model)[name].numpy(),
            rtol=1e-4,
        )


@case()
def shared_embedding(job):
    def model_fn():
        return model_of(("item", "seen"), deep(_shared()))

    job.trains_as_fit(model_fn, examples("item", "seen"))


@case()
def shared_embedding_as_TensorFlow_makes_it_in_a_graph(job):
    def model_fn():
        with tf.Graph().as_default():
            columns = fc.shared_embeddings([ITEM, SEEN], 2, combiner="sum")
        return model_of(("item", "seen"), deep(columns))

    job.trains_as_fit(model_fn, examples("item", "seen"))


@case()
def shared_embedding_that_is_not_trained(job):
    def model_fn():
        net = deep(_shared(trainable=False))
        return model_of(("item", "seen"), net)

    job.trains_as_fit(model_fn, examples("item", "seen"))


@case()
def words_of_a_file(job):
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "words.txt")
        with open(path, "w") as file:
            file.write("\n".join(WORDS))
        tags = fc.categorical_column_with_vocabulary_file(
            "tags", path, num_oov_buckets=1
        )

        def model_fn():
            return model_of(("tags",), wide([tags]))

        job.trains_as_fit(model_fn, examples("tags"))


class Subclassed(keras.Model):
    """A model that is told its columns, as in TensorFlow's guide."""

    def __init__(self):
        super().__init__()
        self.features = DenseFeatures([_EMBEDDED, SIZE])
        self.sums = LinearModel([TAGS, SIZES])
        self.dense = keras.layers.Dense(1)

    def call(self, features):
        return self.dense(self.features(features)) + self.sums(features)


def _built(model):
    """The model, compiled, after its first batch."""
    features, _ = examples(*_FEW, n=1)
    model({name: tf.constant(value) for name, value in features.items()})
    model.compile("sgd", "mse")
    return model


@case()
def subclassed_model(job):
    job.trains_as_fit(lambda: _built(Subclassed()), examples(*_FEW))


@case()
def Sequential(job):
    def model_fn():
        layers = [DenseFeatures([_EMBEDDED, SIZE]), keras.layers.Dense(1)]
        return _built(keras.Sequential(layers))

    job.trains_as_fit(model_fn, examples(*_FEW))


def _canned(make, **tolerance):
    def run(job):
        estimator = make(config=tfdist.RunConfig(job.model_dir + "-unused"))
        data = examples("item", "seen", "tags")
        job.trains_as_fit(estimator.model_fn, data, **tolerance)

    return run


@case("a canned network with a shared embedding")
def _(job):
    columns = [*_shared(), fc.indicator_column(TAGS)]
    _canned(
        lambda config: tfdist.DNNRegressor(
            [3], columns, config=config, optimizer="SGD"
        )
    )(job)


@case("a canned linear model with an embedding")
def _(job):
    columns = [TAGS, fc.embedding_column(ITEM, 2)]
    _canned(
        lambda config: tfdist.LinearRegressor(
            columns, config=config, optimizer="SGD"
        )
    )(job)


@case("a canned network of mixed_bfloat16")
def _(job):
    """Its logits are float32, whatever the layers compute in."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        _canned(
            lambda config: tfdist.DNNLinearCombinedRegressor(
                linear_feature_columns=[TAGS],
                linear_optimizer="SGD",
                dnn_feature_columns=[fc.embedding_column(ITEM, 2)],
                dnn_hidden_units=[3],
                dnn_optimizer="SGD",
                config=config,
            ),
            rtol=1e-2,  # bfloat16 has 8 bits.
            atol=1e-3,
        )(job)
    finally:
        keras.config.set_dtype_policy(policy)


def _wide_and_deep():
    return model_of(
        ("item", "seen", *_FEW), wide([TAGS, SIZE]), deep([*_shared(), SIZES])
    )


_ALL = examples("item", "seen", *_FEW)


def _batches():
    return tf.data.Dataset.from_tensors(_ALL).repeat()


@case()
def goes_on_from_a_checkpoint(job):
    job.estimator(_wide_and_deep).train(
        _batches, hooks=[EachStep()], max_steps=2
    )
    job.trains_as_fit(_wide_and_deep, _ALL)


@case()
def predicts_and_exports_what_the_model_says(job):
    estimator = job.estimator(_wide_and_deep)
    estimator.train(_batches, max_steps=2)
    if not job.is_chief:
        return
    model = seeded(_wide_and_deep)
    for variable in model.weights:
        variable.assign(estimator.get_variable_value(variable.path))
    features = {name: tf.constant(value) for name, value in _ALL[0].items()}
    wanted = model(features)
    path = estimator.export_saved_model(job.model_dir + "-exports")
    loaded = tf.saved_model.load(path)
    served = loaded.signatures["serve"](**features)
    np.testing.assert_allclose(*served.values(), wanted, rtol=1e-5)
    found = estimator.predict(lambda: _batches().take(1))
    np.testing.assert_allclose(list(found), wanted, rtol=1e-5)


_EMBEDDED_WITHIN = fc.embedding_column(TAGS, 3, max_norm=1.0)


def _refuse(name, pattern, model_fn):
    @case(name, refused=pattern)
    def run(job):
        job.trains_as_fit(model_fn, examples(*_FEW))


_refuse(
    "a categorical column",
    "'tags': wrap it in an embedding_column or indicator_column",
    lambda: model_of(_FEW, deep([SIZE, TAGS])),
)
_refuse(
    "an embedding with max_norm",
    "max_norm=1.0, which tfdist's tables do not support",
    lambda: model_of(_FEW, deep(_EMBEDDED_WITHIN)),
)
_refuse(
    "a feature that is no input",
    "Feature 'item' is missing.*'size', 'tags'",
    lambda: model_of(_FEW, wide(ITEM)),
)
_refuse(
    "features that are no dictionary",
    "must be a dictionary from names to tensors",
    lambda: model_of(_FEW, lambda features: wide(SIZE)(features["size"])),
)

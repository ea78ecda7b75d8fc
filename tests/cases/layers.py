"""Keras' layers, each in a small model, learn the same as with `fit`."""

import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tests.cases import BATCH, case, compiled, examples
from tfdist._tf.waiting import wait_for

_WORDS = np.array([[b"a b"], [b"c"], [b"b c a"]] * 4)
_SMALL = [[b"a"], [b"b"], [b"c"], [b"d"]] * 3
_IDS = np.arange(12).reshape(12, 1) % 5


def _numbers(*shape):
    """Examples of another shape, and a target for each."""
    x = np.random.default_rng(1).normal(size=[12, *shape]).astype("float32")
    return x, examples()[1]


def _add(name, make, data=None, shape=None, dtype=None):
    """A case of the layers that `make` makes, before a head of one number."""

    @case(name)
    def run(job):
        x, y = examples() if data is None else data()

        def model_fn():
            model = keras.Sequential(
                [
                    keras.Input(shape or x.shape[1:], dtype=dtype),
                    *make(),
                    layers.Flatten(),
                    layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.SGD(0.05), "mse")
            return model

        job.trains_as_fit(model_fn, (x, y), rtol=1e-3, atol=2e-5)


def _one(layer, **arguments):
    return lambda: [layer(**arguments)]


# Recurrent.
for cell in (layers.LSTM, layers.GRU, layers.SimpleRNN):
    _add(cell.__name__, _one(cell, units=3), lambda: _numbers(5, 2))
_add(
    "Bidirectional",
    lambda: [layers.Bidirectional(layers.LSTM(2, return_sequences=True))],
    lambda: _numbers(4, 2),
)
_add(
    "stacked RNN cells",
    lambda: [layers.RNN([layers.GRUCell(2), layers.LSTMCell(2)])],
    lambda: _numbers(4, 2),
)


@case("a stateful RNN", refused="`stateful=True`")
def stateful(job):
    def model_fn():
        inputs = keras.Input([5, 2], batch_size=12)
        states = layers.LSTM(3, stateful=True)(inputs)
        model = keras.Model(inputs, layers.Dense(1)(states))
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(model_fn, _numbers(5, 2))


_add(
    "ConvLSTM1D",
    _one(layers.ConvLSTM1D, filters=2, kernel_size=2),
    lambda: _numbers(3, 4, 1),
)
_add(
    "TimeDistributed",
    lambda: [layers.TimeDistributed(layers.Dense(3, "relu"))],
    lambda: _numbers(4, 2),
)

# Convolutions and pooling.
_add(
    "Conv1D and pooling",
    lambda: [layers.Conv1D(3, 2, activation="relu"), layers.MaxPooling1D(2)],
    lambda: _numbers(6, 2),
)
_add(
    "Conv2D, BatchNormalization, GlobalAveragePooling2D",
    lambda: [
        layers.Conv2D(3, 2, strides=2),
        layers.BatchNormalization(synchronized=True),
        layers.Activation("relu"),
        layers.GlobalAveragePooling2D(),
    ],
    lambda: _numbers(6, 6, 1),
)
_add(
    "SeparableConv2D",
    _one(layers.SeparableConv2D, filters=2, kernel_size=2),
    lambda: _numbers(4, 4, 2),
)
_add(
    "Conv2DTranspose",
    _one(layers.Conv2DTranspose, filters=2, kernel_size=2),
    lambda: _numbers(3, 3, 2),
)
_add(
    "DepthwiseConv1D",
    _one(layers.DepthwiseConv1D, kernel_size=2),
    lambda: _numbers(5, 2),
)

# Normalization.
_add("LayerNormalization", _one(layers.LayerNormalization))
_add(
    "BatchNormalization(synchronized=True)",
    lambda: [layers.Dense(3), layers.BatchNormalization(synchronized=True)],
)


class Block(layers.Layer):
    """Layers in one of one's own, which Keras lists nowhere."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(synchronized=True)
        self.dense = layers.Dense(3)

    def build(self, input_shape):
        self.norm.build(input_shape)
        self.dense.build(input_shape)

    def call(self, inputs, training=None):
        return self.dense(self.norm(inputs, training=training))


_add("BatchNormalization in a layer of one's own", lambda: [Block()])


@case("BatchNormalization and a loss of the model's own")
def synchronized_and_own_loss(job):
    class Own(keras.Sequential):
        def compute_loss(self, x, y, y_pred, *weight, **options):
            return keras.ops.mean(keras.ops.square(y - y_pred))

    def model_fn():
        norm = layers.BatchNormalization(synchronized=True)
        model = Own([keras.Input([4]), norm, layers.Dense(1)])
        model.compile("sgd")
        return model

    job.trains_as_fit(model_fn)


@case("BatchNormalization after a layer with an activity regularizer")
def synchronized_and_added_losses(job):
    def model_fn():
        before = layers.Dense(3, activity_regularizer="l2")
        norm = layers.BatchNormalization(synchronized=True)
        return compiled(before, norm, layers.Dense(1))

    job.trains_as_fit(model_fn)


_add("RMSNormalization", _one(layers.RMSNormalization))
_add("UnitNormalization", _one(layers.UnitNormalization))
_add(
    "GroupNormalization",
    _one(layers.GroupNormalization, groups=2),
    lambda: _numbers(3, 4),
)


@case("SpectralNormalization", refused="assigns variable")
def spectral_normalization(job):
    job.trains_as_fit(
        lambda: compiled(
            layers.SpectralNormalization(layers.Dense(4)), layers.Dense(1)
        )
    )


class Settling(layers.Layer):
    """Counts its calls and examples in training, and remembers that it did."""

    def build(self, shape):
        def weight(name, **arguments):
            return self.add_weight(
                shape=(), initializer="zeros", name=name, **arguments
            )

        self.scale = weight("scale")
        self.calls = weight("calls", dtype="int64", trainable=False)
        self.begun = weight("begun", dtype="bool", trainable=False)
        self.seen = self.add_weight(
            (), "zeros", "int32", aggregation="sum", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
            self.seen.assign_add(keras.ops.shape(x)[0])
            x = keras.ops.where(self.begun, 0.5 * x, x)
            self.begun.assign(True)
        return x * (1 + self.scale)


@case("a counter and a flag")
def counter_and_flag(job):
    job.trains_as_fit(lambda: compiled(Settling(), layers.Dense(1)))


class Centered(layers.Layer):
    """Subtracts an average that it has just assigned."""

    def build(self, shape):
        self.average = self.add_weight((shape[-1],), "zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.average.assign(0.5 * (self.average + keras.ops.mean(x, 0)))
        return x - self.average


@case("an average that is subtracted")
def average_that_is_subtracted(job):
    half = tuple(np.concatenate([each[:6]] * 2) for each in examples())
    job.trains_as_fit(
        lambda: compiled(
            layers.Dense(3, "tanh"), Centered(), layers.Dense(1, "sigmoid")
        ),
        half,
    )


class CountingInside(layers.Layer):
    """Counts in the body of a loop, which is a graph of its own."""

    def build(self, shape):
        self.count = self.add_weight((), "zeros", trainable=False)

    def call(self, x):
        def body(i, y):
            self.count.assign_add(1)
            return i + 1, 0.9 * y

        return keras.ops.while_loop(lambda i, _: i < 3, body, (0, x))[1]


@case("a count in a loop", refused="in a branch or a loop")
def count_in_a_loop(job):
    job.trains_as_fit(lambda: compiled(CountingInside(), layers.Dense(1)))


@case("a count in a loop of a subclass", refused="in a branch or a loop")
def count_in_a_loop_of_a_subclass(job):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inside, self.last = CountingInside(), layers.Dense(1)

        def call(self, x):
            return self.last(self.inside(x))

    def model_fn():
        model = Model()
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(model_fn)


class DroppingInside(layers.Layer):
    """Draws in a branch alone."""

    def __init__(self):
        super().__init__()
        self.drop = layers.Dropout(0.5)

    def call(self, x, training=False):
        dropped = lambda: self.drop(x, training=training)  # noqa: E731
        return keras.ops.cond(keras.ops.sum(x) > 9e9, dropped, lambda: x)


@case("Dropout in a branch")
def dropout_in_a_branch(job):
    job.trains_as_fit(lambda: compiled(DroppingInside(), layers.Dense(1)))


# Adapted and quantized.


class Scaled(layers.Layer):
    """Keras 2 trained such a variable; Keras 3 does not know of it."""

    def __init__(self):
        super().__init__()
        self.scale = tf.Variable([1.0, 2.0, 3.0, 4.0])

    def call(self, x):
        return x * self.scale


class Counting(layers.Layer):
    """Counts where no checkpoint looks."""

    def __init__(self):
        super().__init__()
        self.count = tf.Variable(0, trainable=False)

    def call(self, x):
        self.count.assign_add(1)
        return x


class Noisy(layers.Layer):
    """Draws from a generator whose state is a variable of TensorFlow's."""

    def __init__(self):
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x):
        return x + self.generator.uniform(tf.shape(x))


for name, layer, which in (
    ("a tf.Variable", Scaled, "`scale` of layer 'scaled', which is not"),
    ("a tf.Variable that counts", Counting, "`count` of layer 'counting'"),
    ("a tf.random.Generator", Noisy, "uses a variable, .*keras.random"),
):

    @case(name, refused=which)
    def run(job, layer=layer):
        job.trains_as_fit(lambda: compiled(layer(), layers.Dense(1)))


def saved(job):
    """A layer of tanh and BatchNormalization as a SavedModel, for all tasks."""
    folder = os.path.join(job.model_dir, "saved")
    if job.is_chief:
        keras.utils.set_random_seed(1)
        made = [layers.Dense(3, "tanh"), layers.BatchNormalization()]
        keras.Sequential([keras.Input([4]), *made]).export(folder)
    end = os.path.join(folder, "fingerprint.pb")  # Written last.
    assert wait_for(lambda: os.path.exists(end), 60)
    return folder


class Loaded(layers.Layer):
    """Has what answers as an attribute."""

    def __init__(self, folder):
        super().__init__()
        self.model = tf.saved_model.load(folder)

    def call(self, x):
        return self.model.serve(x)


@case("a frozen TFSMLayer")
def frozen_saved_model(job):
    folder = saved(job)
    job.trains_as_fit(
        lambda: compiled(
            layers.TFSMLayer(folder, call_endpoint="serve", trainable=False),
            layers.Dense(1),
        )
    )


@case("a SavedModel in a layer")
def loaded_model(job):
    folder = saved(job)
    job.trains_as_fit(lambda: compiled(Loaded(folder), layers.Dense(1)))


@case("a TFSMLayer", refused="A `tf.function` of the model uses")
def saved_model(job):
    folder = saved(job)
    job.trains_as_fit(
        lambda: compiled(
            layers.TFSMLayer(folder, call_endpoint="serve"), layers.Dense(1)
        )
    )


@case("a tf.lookup.StaticHashTable")
def hash_table(job):
    class Lookup(layers.Layer):
        def __init__(self):
            super().__init__()
            keys, values = tf.constant(["a", "b"]), tf.constant([0.5, 2.0])
            pairs = tf.lookup.KeyValueTensorInitializer(keys, values)
            self.table = tf.lookup.StaticHashTable(pairs, 1.0)

        def call(self, words):
            return self.table.lookup(words)

        def compute_output_spec(self, words):
            return keras.KerasTensor(words.shape, "float32")

    def model_fn():
        words = keras.Input([2], dtype="string")
        model = keras.Model(words, layers.Dense(1)(Lookup()(words)))
        model.compile("sgd", "mse")
        return model

    words = np.array([["a", "b"], ["b", "none"]] * (BATCH // 2))
    job.trains_as_fit(model_fn, (words, examples()[1]))


@case()
def an_initializer_of_numpy(job):
    def initial(shape, dtype=None):
        return np.random.normal(size=shape).astype("float32")

    def model_fn():
        return compiled(
            *(layers.Dense(n, kernel_initializer=initial) for n in (5, 1))
        )

    job.trains_as_fit(model_fn)


@case("LoRA")
def lora(job):
    def model_fn():
        model = compiled(*(layers.Dense(n) for n in (5, 4, 1)))
        for layer in model.layers[:2]:
            layer.enable_lora(2)
        # TensorFlow broadcasts no int8 between processes.
        if job.strategy != "all-reduce":
            model.layers[1].quantize("int8")
        model.compile("adam", "mse")
        return model

    job.trains_as_fit(model_fn)


@case("float8", refused="is its next value")
def float8(job):
    def model_fn():
        model = compiled(layers.Dense(4), layers.Dense(1))
        model.quantize("float8")
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(model_fn)


# Activations, constraints, regularizers, and what has no weights.
_add("PReLU", _one(layers.PReLU))
_add("ReLU, LeakyReLU, ELU", lambda: [layers.LeakyReLU(), layers.ELU()])
_add("Lambda", lambda: [layers.Lambda(lambda x: keras.ops.square(x))])
_add(
    "ActivityRegularization",
    lambda: [layers.Dense(3), layers.ActivityRegularization(l2=0.1)],
)
_add(
    "kernel_constraint",
    lambda: [layers.Dense(3, kernel_constraint=keras.constraints.UnitNorm())],
)
_add(
    "kernel_regularizer",
    lambda: [layers.Dense(3, kernel_regularizer=keras.regularizers.L1L2())],
)
_add("EinsumDense", lambda: [layers.EinsumDense("ab,bc->ac", 3, bias_axes="c")])
_add(
    "Reshape, Permute, RepeatVector, ZeroPadding1D",
    lambda: [
        layers.RepeatVector(2),
        layers.Permute([2, 1]),
        layers.ZeroPadding1D(1),
        layers.Reshape([3, 4]),
    ],
)


# Attention, and models of several branches.
@case("MultiHeadAttention")
def multi_head_attention(job):
    _attention(job, lambda: layers.MultiHeadAttention(2, 3))


@case("GroupQueryAttention")
def group_query_attention(job):
    _attention(job, lambda: layers.GroupQueryAttention(2, 2, 1))


def _attention(job, make):
    x, y = _numbers(3, 4)

    def model_fn():
        inputs = keras.Input([3, 4])
        hidden = layers.Add()([inputs, make()(inputs, inputs)])
        hidden = layers.LayerNormalization()(hidden)
        outputs = layers.Dense(1)(layers.GlobalAveragePooling1D()(hidden))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(model_fn, (x, y), atol=2e-5)


@case("Attention and AdditiveAttention")
def attention(job):
    def model_fn():
        inputs = keras.Input([3, 4])
        parts = [
            layers.Attention(use_scale=True)([inputs, inputs]),
            layers.AdditiveAttention()([inputs, inputs]),
        ]
        hidden = layers.Flatten()(layers.Concatenate()(parts))
        model = keras.Model(inputs, layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(model_fn, _numbers(3, 4), atol=2e-5)


@case("merging layers")
def merging(job):
    def model_fn():
        inputs = keras.Input([4])
        a, b = layers.Dense(3)(inputs), layers.Dense(3)(inputs)
        merged = [
            layers.Multiply()([a, b]),
            layers.Subtract()([a, b]),
            layers.Maximum()([a, b]),
            layers.Average()([a, b]),
            layers.Dot(1)([a, b]),
        ]
        outputs = layers.Dense(1)(layers.Concatenate()(merged))
        model = keras.Model(inputs, outputs)
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(model_fn)


# Preprocessing, adapted in the model function or given what it knows.
def _normalization():
    layer = layers.Normalization()
    layer.adapt(examples()[0])
    return [layer]


_add("Normalization, adapted in model_fn", _normalization)
_add("Rescaling", _one(layers.Rescaling, scale=0.5, offset=1.0))


def _adapted_discretization():
    layer = layers.Discretization(num_bins=3, output_mode="one_hot")
    layer.adapt(examples()[0][:, :1])
    return [layer]


def _one_feature():
    x, y = examples()
    return x[:, :1], y


_add(
    "Discretization, adapted in model_fn", _adapted_discretization, _one_feature
)
_add(
    "CategoryEncoding",
    _one(layers.CategoryEncoding, num_tokens=5, output_mode="one_hot"),
    lambda: (_IDS, examples()[1]),
    dtype="int64",
)
_add(
    "IntegerLookup",
    lambda: [
        layers.IntegerLookup(vocabulary=[1, 2, 3]),
        layers.Embedding(4, 2),
    ],
    lambda: (_IDS, examples()[1]),
    dtype="int64",
)
_add(
    "Hashing of integers",
    lambda: [layers.Hashing(3), layers.Embedding(3, 2)],
    lambda: (_IDS, examples()[1]),
    dtype="int64",
)


def _adapted_lookup():
    layer = layers.StringLookup()
    layer.adapt(np.array(_SMALL))
    return [layer, layers.Embedding(layer.vocabulary_size(), 2)]


def _adapted_text():
    layer = layers.TextVectorization(output_sequence_length=4)
    layer.adapt(np.array([b"a b", b"b c"]))
    return [layer, layers.Embedding(layer.vocabulary_size(), 2)]


def _strings():
    return np.array(_SMALL), examples()[1]


_add(
    "StringLookup, adapted in model_fn",
    _adapted_lookup,
    _strings,
    dtype="string",
)
_add(
    "StringLookup, one_hot",
    _one(layers.StringLookup, vocabulary=["a", "b"], output_mode="one_hot"),
    _strings,
    dtype="string",
)
_add(
    "Hashing of strings",
    lambda: [layers.Hashing(3), layers.Embedding(3, 2)],
    _strings,
    dtype="string",
)
_add(
    "TextVectorization, adapted in model_fn",
    _adapted_text,
    lambda: (_WORDS, examples()[1]),
    dtype="string",
)


@case("HashedCrossing")
def hashed_crossing(job):
    def model_fn():
        inputs = [keras.Input([1], dtype="string", name=n) for n in "ab"]
        crossed = layers.HashedCrossing(7, output_mode="one_hot")(inputs)
        model = keras.Model(inputs, layers.Dense(1)(crossed))
        model.compile("sgd", "mse")
        return model

    words = np.array(_SMALL)
    job.trains_as_fit(model_fn, ((words, words[::-1].copy()), examples()[1]))


class Unseeded(layers.Layer):
    """Draws by the generator that Keras holds itself."""

    def call(self, x):
        return x + 0.0 * keras.random.normal(keras.ops.shape(x))


@case("Dropout and noise")
def random_layers(job):
    """Of rate 0: their numbers are those of a step, and not of `fit`."""
    drop = [layers.Dropout, layers.GaussianDropout, layers.AlphaDropout]
    job.trains_as_fit(
        lambda: compiled(
            layers.Dense(3),
            *(layer(0.0) for layer in drop),
            layers.GaussianNoise(0.0),
            Unseeded(),
            layers.Dense(1),
        )
    )

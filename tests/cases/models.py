"""Models as in Keras' guides: subclasses, built by their first batch.

Models of the first part are trained, evaluated, used to predict and exported.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist
from tests.cases import (
    STEPS,
    EachStep,
    assert_weights_are_those_of,
    case,
    examples,
    seeded,
)

_IDS = np.array([3, 0, 7, 3, 1, 9, 0, 4, 4, 2, 8, 6], "int64")
_WORDS = np.array([b"a", b"b", b"c", b"a", b"", b"d"] * 2)


def users():
    """Features by name, and a rating."""
    x, y = examples()
    return {"user": _IDS, "item": _IDS[::-1].copy(), "x": x}, y


def compiled(model, optimizer="sgd", loss="mse", **arguments):
    model.compile(optimizer, loss, **arguments)
    return model


def has_its_life(job, model_fn, data=None, **config):
    """Trains, evaluates, predicts and exports a model as Keras does."""
    data = examples() if data is None else data
    estimator = job.trains_as_fit(model_fn, data, **config)
    if not job.is_chief:
        return

    def input_fn():
        return tf.data.Dataset.from_tensors(data)

    model = seeded(model_fn)
    model.fit(input_fn().repeat(), steps_per_epoch=STEPS, verbose=0)
    metrics = estimator.evaluate(input_fn)
    wanted = model.evaluate(input_fn(), verbose=0, return_dict=True)
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-3, atol=1e-5)
    (outputs,) = estimator.predict(input_fn, yield_single_examples=False)
    wanted = model.predict(input_fn(), verbose=0)
    keras.tree.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
        outputs,
        wanted,
    )
    # As in another process: nothing has told this Estimator of a batch.
    estimator = job.estimator(model_fn, **config)
    path = estimator.export_saved_model(f"{job.model_dir}/export")
    served = tf.saved_model.load(path).signatures["serve"]
    inputs = served.structured_input_signature[1]
    x = next(iter(input_fn()))[0]
    names = sorted(inputs)
    flat = x if isinstance(x, dict) else tf.nest.flatten(x)
    given = flat if isinstance(x, dict) else dict(zip(names, flat, strict=True))
    assert {inputs[name].shape[0] for name in names} == {None}
    found = served(**given)
    flat = wanted.items() if isinstance(wanted, dict) else None
    for name, value in flat or [("output_0", wanted)]:
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-5)


class Mlp(keras.Model):
    """The first subclass of Keras' guide."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(5, "relu")
        self.top = layers.Dense(1)

    def call(self, inputs, training=False):
        return self.top(self.hidden(inputs))


@case()
def subclass(job):
    has_its_life(job, lambda: compiled(Mlp(), metrics=["mae"]))


@case("subclass, call without training")
def without_training(job):
    class Plain(Mlp):
        def call(self, inputs):
            return self.top(self.hidden(inputs))

    has_its_life(job, lambda: compiled(Plain(), metrics=["mae"]))


@case("Sequential without an input shape")
def sequential(job):
    def model_fn():
        model = keras.Sequential()
        model.add(layers.Dense(5, "relu"))
        model.add(layers.BatchNormalization(synchronized=True))
        model.add(layers.Dense(1))
        return compiled(model)

    has_its_life(job, model_fn)


class Wide(keras.Model):
    """Takes features by name; answers by name."""

    def __init__(self):
        super().__init__()
        self.users = tfdist.PartitionedEmbedding(10, 3, num_shards=2)
        self.items = layers.Embedding(10, 3)
        self.top = layers.Dense(1, "sigmoid")

    def call(self, inputs):
        parts = [self.users(inputs["user"]), self.items(inputs["item"])]
        return self.top(keras.ops.concatenate([*parts, inputs["x"]], axis=1))


@case("subclass of a dict, with a partitioned table")
def of_a_dict(job):
    has_its_life(
        job, lambda: compiled(Wide(), "adagrad", "binary_crossentropy"), users()
    )


@case("two partitioned tables of one name")
def of_one_name(job):
    class Alike(Wide):
        def __init__(self):
            super().__init__()
            make = tfdist.PartitionedEmbedding
            self.users = make(10, 3, num_shards=2, name="table")
            self.items = make(10, 3, num_shards=3, name="table")

    has_its_life(job, lambda: compiled(Alike(), "adagrad"), users())


@case("subclass of a tuple")
def of_a_tuple(job):
    class Two(Mlp):
        def call(self, inputs):
            left, right = inputs
            return self.top(self.hidden(left) * self.hidden(right))

    x, y = examples()
    has_its_life(job, lambda: compiled(Two()), ((x, -x), y))


@case("subclass that answers by name")
def named_outputs(job):
    class Named(Mlp):
        def call(self, inputs):
            hidden = self.hidden(inputs)
            return {"score": self.top(hidden), "hidden": hidden}

    x, y = examples()
    has_its_life(
        job,
        lambda: compiled(Named(), loss={"score": "mse", "hidden": None}),
        (x, {"score": y}),
    )


@case("subclass of strings")
def of_strings(job):
    class Words(keras.Model):
        def __init__(self):
            super().__init__()
            self.lookup = layers.StringLookup(vocabulary=["a", "b", "c"])
            self.table = tfdist.PartitionedEmbedding(4, 3, num_shards=2)
            self.top = layers.Dense(1)

        def call(self, inputs):
            return self.top(self.table(self.lookup(inputs)))

    has_its_life(job, lambda: compiled(Words()), (_WORDS, examples()[1]))


class TwoTower(keras.Model):
    """As those of TFRS: a tower each, and the loss looks at both."""

    def __init__(self, table):
        super().__init__()
        lookup = layers.StringLookup(vocabulary=["a", "b", "c"])
        self.user_tower = keras.Sequential([lookup, table(4, 3)])
        self.item_tower = keras.Sequential(
            [keras.Input([], dtype="int64"), table(10, 4), layers.Dense(3)]
        )
        self.rating = keras.Sequential([layers.Dense(5, "relu")])
        self.rating.add(layers.Dense(1))

    def call(self, features):
        return {
            "user": self.user_tower(features["user"]),
            "item": self.item_tower(features["item"]),
        }

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        both = keras.ops.concatenate([y_pred["user"], y_pred["item"]], axis=1)
        error = keras.ops.square(self.rating(both) - x["rating"])
        return keras.ops.mean(error)


def _ratings():
    rating = examples()[1]
    return ({"user": _WORDS, "item": _IDS, "rating": rating},)


@case("two towers, the loss in the model")
def two_towers(job):
    has_its_life(
        job, lambda: compiled(TwoTower(layers.Embedding), loss=None), _ratings()
    )


@case("two towers of partitioned tables")
def partitioned_towers(job):
    def table(rows, dim):
        return tfdist.PartitionedEmbedding(rows, dim, num_shards=2)

    has_its_life(job, lambda: compiled(TwoTower(table), loss=None), _ratings())


def _tower(name, table, seed):
    """Its layers are built, with their paths, before it has a name."""
    ids = keras.Input([], dtype="int64")
    rows = table(ids)
    initial = keras.initializers.GlorotUniform(seed)
    top = layers.Dense(3, kernel_initializer=initial, name="top")
    return keras.Model(ids, top(rows), name=name)


def _named_alike(table, optimizer):
    user, item = (keras.Input([], dtype="int64", name=n) for n in _SIDES)
    towers = [_tower(f"{side}s", table(i), i) for i, side in enumerate(_SIDES)]
    score = layers.Dot(1)([towers[0](user), towers[1](item)])
    return compiled(keras.Model({"user": user, "item": item}, score), optimizer)


_SIDES = "user", "item"
# No id comes twice: `fit` would square its gradients one by one.
_PAIRS = {"user": np.arange(12), "item": np.arange(12)[::-1].copy()}


@case("towers whose layers have the same names")
def named_alike(job):
    def model_fn():
        return _named_alike(
            lambda i: layers.Embedding(12, 4, name="ids"), "adam"
        )

    has_its_life(job, model_fn, (_PAIRS, examples()[1]))


@case("towers whose partitioned tables have the same names")
def tables_named_alike(job):
    def table(i):
        initial = keras.initializers.RandomUniform(seed=i)
        return tfdist.PartitionedEmbedding(
            12, 4, num_shards=2, embeddings_initializer=initial, name="ids"
        )

    has_its_life(
        job, lambda: _named_alike(table, "adagrad"), (_PAIRS, examples()[1])
    )
    if job.is_chief:
        path = tf.train.latest_checkpoint(job.model_dir)
        for side in _SIDES:
            name = f"{side}s/ids/embeddings"
            table = tfdist.checkpoint.load_variable(path, name)
            assert table.shape == (12, 4)


class Ragged(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = tfdist.PartitionedEmbedding(10, 3, 2, combiner="mean")
        self.top = layers.Dense(1)

    def call(self, inputs):
        return self.top(self.table(inputs["ids"]))


def _input_fn_of(features):
    """Batches of features that are no arrays, and the targets."""

    def input_fn():
        data = tf.data.Dataset.from_tensors((features(), examples()[1]))
        return data.repeat()

    return input_fn


def trains_on(job, model_fn, input_fn):
    """As `trains_as_fit`, on batches that are no arrays; and exports."""
    estimator = job.estimator(model_fn)
    estimator.train(input_fn, hooks=[EachStep()], max_steps=STEPS)
    if job.is_chief:
        model = seeded(model_fn)
        model.fit(input_fn(), steps_per_epoch=STEPS, verbose=0)
        assert_weights_are_those_of(estimator, model)
        path = estimator.export_saved_model(f"{job.model_dir}/export")
        loaded = tf.saved_model.load(path)
        assert "serve" in loaded.signatures
        x = next(iter(input_fn()))[0]
        np.testing.assert_allclose(
            loaded.serve(**x)["output_0"], model(x), rtol=1e-3, atol=1e-5
        )


@case("subclass of ragged ids")
def of_ragged(job):
    splits = np.array([0, 1, 1, 3, *range(4, 13)])
    ids = {"ids": lambda: tf.RaggedTensor.from_row_splits(_IDS, splits)}
    trains_on(
        job,
        lambda: compiled(Ragged()),
        _input_fn_of(lambda: {"ids": ids["ids"]()}),
    )


@case("subclass of sparse ids")
def of_sparse(job):
    where = np.array([[i, i % 3] for i in range(12)])
    trains_on(
        job,
        lambda: compiled(Ragged()),
        _input_fn_of(lambda: {"ids": tf.SparseTensor(where, _IDS, [12, 3])}),
    )


# --- What else a subclass may hold -------------------------------------------


@case()
def nested_subclasses(job):
    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = Mlp(name="inner")
            self.other = Mlp()

        def call(self, inputs, training=False):
            return self.inner(inputs) + self.other(inputs)

    job.trains_as_fit(lambda: compiled(Outer()))


@case()
def lists_and_dicts_of_layers(job):
    class Many(keras.Model):
        def __init__(self):
            super().__init__()
            self.blocks = [layers.Dense(4, "tanh") for _ in range(3)]
            self.heads = {"a": layers.Dense(1), "b": layers.Dense(1)}

        def call(self, inputs):
            for block in self.blocks:
                inputs = block(inputs)
            return self.heads["a"](inputs) + self.heads["b"](inputs)

    job.trains_as_fit(lambda: compiled(Many()))


@case()
def shared_layer(job):
    class Shared(Mlp):
        def call(self, inputs):
            again = self.hidden(keras.ops.flip(inputs, axis=1))
            return self.top(self.hidden(inputs) + again)

    job.trains_as_fit(lambda: compiled(Shared()))


@case()
def build_overridden(job):
    class Built(keras.Model):
        def build(self, input_shape):
            self.w = self.add_weight(shape=(input_shape[-1], 1), name="w")
            self.hidden = layers.Dense(4)
            self.hidden.build(input_shape)
            super().build(input_shape)

        def call(self, inputs):
            return keras.ops.matmul(self.hidden(inputs), self.w)

    job.trains_as_fit(lambda: compiled(Built()))


@case("built by hand with model.build(shape)")
def built_by_hand(job):
    def model_fn():
        model = Mlp()
        model.build((None, 4))
        return compiled(model)

    has_its_life(job, model_fn)


@case("built by calling it on a keras.Input")
def built_by_a_call(job):
    def model_fn():
        model = Mlp()
        model(keras.Input([4]))
        return compiled(model)

    has_its_life(job, model_fn)


@case()
def dropout_and_batch_normalization(job):
    class Noisy(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(synchronized=True)
            self.drop = layers.Dropout(0.0)
            self.top = layers.Dense(1)

        def call(self, inputs, training=False):
            inputs = self.norm(inputs, training=training)
            return self.top(self.drop(inputs, training=training))

    job.trains_as_fit(lambda: compiled(Noisy()))


@case("training=None, passed on by Keras")
def training_by_context(job):
    class Context(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(synchronized=True)
            self.top = layers.Dense(1)

        def call(self, inputs, training=None):
            return self.top(self.norm(inputs))

    job.trains_as_fit(lambda: compiled(Context()))


@case("a layer that only training has")
def training_only(job):
    class Auxiliary(Mlp):
        def __init__(self):
            super().__init__()
            self.extra = layers.Dense(1)

        def call(self, inputs, training=False):
            hidden = self.hidden(inputs)
            outputs = self.top(hidden)
            return outputs + self.extra(hidden) if training else outputs

    has_its_life(job, lambda: compiled(Auxiliary()))


@case("a layer that only inference has")
def inference_only(job):
    class Ranked(Mlp):
        def __init__(self):
            super().__init__()
            self.scale = layers.Rescaling(2.0)
            self.extra = layers.Dense(1, trainable=False)

        def call(self, inputs, training=False):
            outputs = self.top(self.hidden(inputs))
            return outputs if training else self.scale(self.extra(outputs))

    has_its_life(job, lambda: compiled(Ranked()))


@case("add_loss in call")
def add_loss(job):
    class Penal(Mlp):
        def call(self, inputs):
            hidden = self.hidden(inputs)
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(hidden)))
            return self.top(hidden)

    job.trains_as_fit(lambda: compiled(Penal()))


@case()
def activity_and_weight_regularizers(job):
    class Regular(Mlp):
        def __init__(self):
            super().__init__()
            self.hidden = layers.Dense(
                5, kernel_regularizer="l2", bias_regularizer="l1"
            )

    job.trains_as_fit(lambda: compiled(Regular()))


class Watched(Mlp):
    """Has a metric of its own, updated in `call`'s stead by the loss."""

    def __init__(self):
        super().__init__()
        self.error = keras.metrics.Mean(name="error")

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        error = keras.ops.mean(keras.ops.abs(y - y_pred))
        self.error.update_state(error)
        return error


@case("a metric as an attribute")
def metric_attribute(job):
    has_its_life(job, lambda: compiled(Watched(), loss=None))


@case()
def metrics_of_every_kind(job):
    has_its_life(
        job,
        lambda: compiled(
            keras.Sequential([layers.Dense(1, "sigmoid")]),
            loss="binary_crossentropy",
            metrics=["accuracy", "auc"],
            weighted_metrics=[keras.metrics.Precision(name="precision")],
        ),
    )


@case("several outputs and losses")
def several_outputs(job):
    class Both(Mlp):
        def call(self, inputs):
            hidden = self.hidden(inputs)
            return self.top(hidden), hidden

    x, y = examples()
    job.trains_as_fit(
        lambda: compiled(
            Both(),
            loss=["mse", "mae"],
            loss_weights=[1.0, 0.5],
            metrics=[["mae"], ["mse"]],
        ),
        (x, (y, np.repeat(y, 5, 1))),
    )


@case()
def sample_weights(job):
    x, y = examples()
    weights = np.linspace(0.0, 2.0, 12).astype("float32")
    job.trains_as_fit(
        lambda: compiled(Mlp(), weighted_metrics=["mae"]), (x, y, weights)
    )


@case("a layer that builds others in build")
def lazy_layer_in_a_functional_model(job):
    class Lazy(layers.Layer):
        def build(self, input_shape):
            self.inner = layers.Dense(input_shape[-1], "relu")
            self.inner.build(input_shape)

        def call(self, inputs):
            return self.inner(inputs)

    def model_fn():
        inputs = keras.Input([4])
        outputs = layers.Dense(1)(Lazy()(inputs))
        return compiled(keras.Model(inputs, outputs))

    job.trains_as_fit(model_fn)


@case("a functional model in a subclass")
def functional_inside(job):
    class Around(keras.Model):
        def __init__(self):
            super().__init__()
            inputs = keras.Input([4])
            self.body = keras.Model(inputs, layers.Dense(3)(inputs))
            self.top = layers.Dense(1)

        def call(self, inputs):
            return self.top(self.body(inputs))

    has_its_life(job, lambda: compiled(Around()))


@case("a subclass in a functional model")
def subclass_inside(job):
    def model_fn():
        inputs = keras.Input([4])
        return compiled(keras.Model(inputs, Mlp()(inputs)))

    has_its_life(job, model_fn)


@case("a functional model with a head for its loss alone")
def functional_subclass(job):
    class Headed(keras.Model):
        def __init__(self, inputs, outputs):
            super().__init__(inputs, outputs)
            self.head = layers.Dense(1)

        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return keras.ops.mean(keras.ops.square(self.head(y_pred) - y))

    def model_fn():
        inputs = keras.Input([4])
        return compiled(Headed(inputs, layers.Dense(3)(inputs)), loss=None)

    has_its_life(job, model_fn)


@case("several arguments of call")
def several_arguments(job):
    """Keras gives `call` the first alone: the others are its defaults."""

    class Optional(Mlp):
        def call(self, inputs, scale=2.0, mask=None, training=False):
            return scale * self.top(self.hidden(inputs))

    has_its_life(job, lambda: compiled(Optional()))


@case("a mask from an embedding")
def masks(job):
    class Masked(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(10, 4, mask_zero=True)
            self.rnn = layers.GRU(3)
            self.top = layers.Dense(1)

        def call(self, inputs):
            return self.top(self.rnn(self.table(inputs)))

    ids = _IDS.reshape(4, 3)
    job.trains_as_fit(
        lambda: compiled(Masked()), (ids, examples()[1][:4]), atol=1e-4
    )


@case("a Sequential of ids")
def sequential_of_ids(job):
    has_its_life(
        job,
        lambda: compiled(
            keras.Sequential([layers.Embedding(10, 3), layers.Dense(1)])
        ),
        (_IDS, examples()[1]),
    )


@case("a Sequential that begins with a partitioned table")
def sequential_of_a_table(job):
    job.trains_as_fit(
        lambda: compiled(
            keras.Sequential(
                [tfdist.PartitionedEmbedding(10, 3), layers.Dense(1)]
            )
        ),
        (_IDS, examples()[1]),
    )


@case("call that fails", refused="no such feature")
def call_that_fails(job):
    class Failing(Mlp):
        def call(self, inputs):
            raise ValueError("There is no such feature.")

    job.trains_as_fit(lambda: compiled(Failing()))


@case("neither call nor train_step", refused="call")
def no_call(job):
    class Nothing(keras.Model):
        def __init__(self):
            super().__init__()
            self.top = layers.Dense(1)

    job.trains_as_fit(lambda: compiled(Nothing()))


# --- float64 ------------------------------------------------------------------


def _float64(job, make, data=None, optimizer="adam"):
    def model_fn():
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float64")
        try:
            return compiled(make(), optimizer)
        finally:
            keras.config.set_dtype_policy(before)

    x, y = examples()
    data = data or (x.astype("float64"), y.astype("float64"))
    estimator = job.trains_as_fit(model_fn, data, rtol=1e-6, atol=1e-7)
    if job.is_chief:
        names = estimator.get_variable_names()
        slots = [n for n in names if "/" in n and not n.startswith(optimizer)]
        kinds = {estimator.get_variable_value(n).dtype.name for n in slots}
        assert kinds == {"float64"}, kinds


@case("float64")
def float64(job):
    _float64(job, lambda: Mlp())


@case("float64, of float32 batches")
def float64_of_float32(job):
    _float64(job, lambda: Mlp(), examples())


@case("float64, Nadam")
def float64_nadam(job):
    _float64(job, lambda: Mlp(), optimizer="nadam")


@case("float64, Sequential, adagrad")
def float64_sequential(job):
    _float64(
        job,
        lambda: keras.Sequential(
            [layers.BatchNormalization(synchronized=True), layers.Dense(1)]
        ),
        optimizer="adagrad",
    )


@case("float64 tables and slots")
def float64_tables(job):
    class Tables(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = tfdist.PartitionedEmbedding(10, 3, num_shards=2)
            self.other = layers.Embedding(10, 3)
            self.top = layers.Dense(1)

        def call(self, inputs):
            return self.top(self.table(inputs) * self.other(inputs))

    _float64(
        job,
        Tables,
        (_IDS, examples()[1].astype("float64")),
        optimizer="adagrad",
    )


@case("a float64 layer in a float32 model")
def mixed_precision_of_layers(job):
    class Mixed(Mlp):
        def __init__(self):
            super().__init__()
            self.hidden = layers.Dense(5, dtype="float64")

    job.trains_as_fit(lambda: compiled(Mixed(), "adagrad"))

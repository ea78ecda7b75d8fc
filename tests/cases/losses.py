"""All losses of Keras, by name and as objects, of one or more outputs."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import losses

import tfdist
from tests.cases import BATCH, case, compiled, examples

X, Y = examples()
CLASSES = np.arange(BATCH)[:, None] % 3
ONE_HOT = np.eye(3, dtype="float32")[CLASSES[:, 0]]
WEIGHTS = np.linspace(0, 2, BATCH).astype("float32")


def _add(
    name,
    loss,
    activation=None,
    y=Y,
    width=1,
    weights=None,
    refused=None,
    of_batch=False,
):
    """A case; a loss `of_batch` is, between replicas, of the share of each."""
    data = (X, y) if weights is None else (X, y, weights)

    @case(name, refused)
    def run(job):
        made = loss() if callable(loss) else loss

        def model_fn(loss=made):
            return compiled(keras.layers.Dense(width, activation), loss=loss)

        apart = of_batch and job.strategy in ("mirrored", "all-reduce")
        theirs = functools.partial(model_fn, of_halves(made)) if apart else None
        job.trains_as_fit(model_fn, data, theirs=theirs)


def of_halves(loss):
    """The mean of a loss of either half of a batch."""
    loss, half = keras.losses.get(loss), BATCH // 2

    def mean(y, y_pred):
        first = loss(y[:half], y_pred[:half])
        return (first + loss(y[half:], y_pred[half:])) / 2

    return mean


# Between replicas, which learn means.
_SUM = dict.fromkeys(("mirrored", "all-reduce"), "has reduction=.*the default")
_OF_LOGITS = [
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "dice",
    "hinge",
    "squared_hinge",
    "tversky",
]
_OF_NUMBERS = [
    "cosine_similarity",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mae",
    "mape",
    "mse",
    "msle",
    "poisson",
]
_OF_CLASSES = [
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_generalized_cross_entropy",
    "categorical_hinge",
]
for each in _OF_LOGITS:
    _add(each, each, "sigmoid", of_batch=each in ("dice", "tversky"))
for each in _OF_NUMBERS:
    _add(each, each, "softplus")
for each in _OF_CLASSES[:2] + _OF_CLASSES[3:]:
    _add(each, each, "softmax", ONE_HOT, 3)
_add(
    "sparse_categorical_crossentropy",
    "sparse_categorical_crossentropy",
    "softmax",
    CLASSES,
    3,
)

# As objects, with their arguments.
_add(
    "CategoricalGeneralizedCrossEntropy",
    losses.CategoricalGeneralizedCrossEntropy,
    "softmax",
    CLASSES[:, 0],
    3,
)
_add("Circle", losses.Circle, "softmax", CLASSES[:, 0], 3, of_batch=True)
_add("Huber of delta", lambda: losses.Huber(delta=0.3))
_add(
    "Tversky of alpha",
    lambda: losses.Tversky(0.3, 0.7),
    "sigmoid",
    of_batch=True,
)
_add(
    "sum over the batch",
    lambda: losses.MeanSquaredError(reduction="sum"),
    refused=_SUM,
)
_add(
    "mean with sample weight",
    lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    weights=WEIGHTS,
    refused=_SUM,
)
_add(
    "binary cross-entropy of logits",
    lambda: losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1),
)
_add(
    "focal of logits",
    lambda: losses.BinaryFocalCrossentropy(
        from_logits=True, apply_class_balancing=True
    ),
)
_add(
    "cross-entropy of logits",
    lambda: losses.CategoricalCrossentropy(from_logits=True),
    None,
    ONE_HOT,
    3,
)
_add(
    "sparse cross-entropy of logits",
    lambda: losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=2
    ),
    None,
    CLASSES,
    3,
)
_add(
    "sparse cross-entropy of classes that only one half has",
    lambda: losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=2
    ),
    None,
    np.sort(CLASSES, 0),
    3,
    of_batch=True,
)
for each in ("mse", "binary_crossentropy"):
    _add(f"{each} weighted", each, "sigmoid", weights=WEIGHTS)


@case()
def ctc(job):
    """Of sequences: four steps of the features, labels of one class."""

    def model_fn():
        model = keras.Sequential(
            [
                keras.Input([4]),
                keras.layers.Reshape([4, 1]),
                keras.layers.Dense(3),
            ]
        )
        model.compile("sgd", losses.CTC())
        return model

    job.trains_as_fit(model_fn, (X, np.ones([BATCH, 2], "int32")), rtol=1e-3)


@case("a function")
def function(job):
    def squared(y, y_pred):
        return keras.ops.mean(keras.ops.square(y - y_pred), axis=-1)

    job.trains_as_fit(lambda: compiled(keras.layers.Dense(1), loss=squared))


@case("a class")
def own_class(job):
    class Cubed(keras.losses.Loss):
        def call(self, y, y_pred):
            return keras.ops.abs(y - y_pred) ** 3

    job.trains_as_fit(lambda: compiled(keras.layers.Dense(1), loss=Cubed()))


class OfVariable(losses.Loss):
    """Nothing saves its variable, which nothing changes."""

    def __init__(self):
        super().__init__()
        self.scale = keras.Variable(0.5, trainable=False)

    def call(self, y, y_pred):
        return self.scale * losses.mean_squared_error(y, y_pred)


@case("a variable of the loss")
def of_variable(job):
    job.trains_as_fit(
        lambda: compiled(keras.layers.Dense(1), loss=OfVariable())
    )


class Small(keras.layers.Layer):
    """What it is called on is to be small."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@case("add_loss alone")
def add_loss_alone(job):
    layer = keras.layers.Dense
    job.trains_as_fit(lambda: compiled(layer(2), Small(), layer(1), loss=None))


@case("add_loss beside a loss")
def add_loss(job):
    job.trains_as_fit(
        lambda: compiled(keras.layers.Dense(2), Small(), keras.layers.Dense(1))
    )


# --- Several outputs ---------------------------------------------------------


def two_outputs(as_dict=True, **arguments):
    """A number and a probability."""
    x = keras.Input([4])
    outputs = {
        "number": keras.layers.Dense(1, name="number")(x),
        "flag": keras.layers.Dense(1, "sigmoid", name="flag")(x),
    }
    listed = [outputs["number"], outputs["flag"]]
    model = keras.Model(x, outputs if as_dict else listed)
    model.compile("sgd", **arguments)
    return model


BOTH = {"number": X[:, :1], "flag": Y}
LISTED = (X[:, :1], Y)
OF_EACH = {"number": "mse", "flag": "binary_crossentropy"}


def _of_two(name, data, **arguments):
    @case(name)
    def run(job):
        job.trains_as_fit(lambda: two_outputs(**arguments), data)


_of_two("a loss for each output", (X, BOTH), loss=OF_EACH)
_of_two("one loss for every output", (X, BOTH), loss="mse")
_of_two("a list of losses", (X, LISTED), as_dict=False, loss=["mse", "hinge"])
_of_two(
    "losses by name of listed outputs", (X, LISTED), as_dict=False, loss=OF_EACH
)
_of_two(
    "loss_weights by name",
    (X, BOTH),
    loss=OF_EACH,
    loss_weights={"number": 0.2, "flag": 3.0},
)
_of_two(
    "loss_weights in a list",
    (X, LISTED),
    as_dict=False,
    loss=["mse", "mae"],
    loss_weights=[0.5, 2.0],
)
_of_two(
    "sample weights of every output",
    (X, BOTH, WEIGHTS),
    loss=OF_EACH,
    weighted_metrics={"number": ["mae"], "flag": ["accuracy"]},
)
_of_two(
    "sample weights by output",
    (X, BOTH, {"number": WEIGHTS, "flag": WEIGHTS[::-1].copy()}),
    loss=OF_EACH,
)
_of_two(
    "an output without a loss",
    (X, BOTH),
    loss={"number": "mse", "flag": None},
)


@case(refused=r"must be a scalar|has reduction=None, but between replicas")
def a_loss_of_each_example(job):
    loss = keras.losses.MeanSquaredError(reduction=None)
    job.trains_as_fit(lambda: compiled(keras.layers.Dense(1), loss=loss))


class OfOneElement(keras.Sequential):
    """Its loss has the shape [1], as that of KerasHub's `RQVAEBackbone`."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):
        return keras.ops.mean((y - y_pred) ** 2, keepdims=True)[0]


@case()
def a_loss_of_one_element(job):
    def model_fn():
        model = OfOneElement([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd")
        return model

    job.trains_as_fit(model_fn)


class Sampled(keras.Sequential):
    """Its loss draws; a metric adds up what, and its square."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        drawn = tf.random.uniform([], seed=self.seed)
        self.drawn.update_state(drawn)
        self.squared.update_state(drawn**2)
        return keras.ops.mean(y_pred * drawn)


def _draws(job, seed):
    def model_fn():
        model = Sampled([keras.Input([4]), keras.layers.Dense(1)])
        model.seed = seed
        model.drawn = keras.metrics.Mean(name="drawn")
        model.squared = keras.metrics.Mean(name="squared")
        model.compile("sgd")
        return model

    logs = []

    class Logged(tfdist.SessionRunHook):
        def steps_until_next(self, step):
            return 20 - step % 20

        def after_run(self, run_context, run_values):
            logs.append(run_values.results)

    def input_fn():
        return tf.data.Dataset.from_tensors(examples()).repeat()

    tf.random.set_seed(3)
    try:
        job.estimator(model_fn, steps_per_dispatch=10).train(
            input_fn, hooks=[Logged()], max_steps=40
        )
    finally:
        tf.random.set_seed(None)
    if job.is_chief:
        # The variance of a uniform number, had each step drawn its own.
        # On parameter servers the first run is of one step.
        spread = [each["squared"] - each["drawn"] ** 2 for each in logs[1:]]
        assert all(0.03 < each < 0.15 for each in spread), spread


@case()
def draws_of_tensorflow_with_a_global_seed(job):
    _draws(job, None)


SAME = "all workers would draw the same numbers"


@case(refused=dict.fromkeys(("mirrored", "all-reduce", "ps"), SAME))
def draws_of_tensorflow_with_a_seed(job):
    _draws(job, 5)

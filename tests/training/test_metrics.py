"""Every form of custom metric in Keras' guides, against what `fit` says."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from pace import slow_but
from small_models import batches, local_loop

from tfdist._tf.private_keras import reset_object_names
from tfdist.training import optimizers
from tfdist.training.step import ModelStep

BATCHES = 7


def dataset():
    """The last batch is smaller."""
    return batches(BATCHES * 16 - 5, 16)


# --- Metrics, as the guides write them ---------------------------------------


class BinaryTruePositives(keras.metrics.Metric):
    """From the docstring of `keras.metrics.Metric`."""

    def __init__(self, name="binary_true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_variable(
            shape=(), initializer="zeros", name="true_positives"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = ops.cast(y_true, "bool")
        y_pred = ops.cast(ops.greater(y_pred, 0.5), "bool")
        values = ops.logical_and(
            ops.equal(y_true, True), ops.equal(y_pred, True)
        )
        values = ops.cast(values, self.dtype)
        if sample_weight is not None:
            sample_weight = ops.cast(sample_weight, self.dtype)
            sample_weight = ops.broadcast_to(
                ops.expand_dims(sample_weight, -1), ops.shape(values)
            )
            values = ops.multiply(values, sample_weight)
        self.true_positives.assign(self.true_positives + ops.sum(values))

    def result(self):
        return self.true_positives


class CategoricalTruePositives(keras.metrics.Metric):
    """From the guide to training: `add_weight`, `reset_state` overridden."""

    def __init__(self, name="categorical_true_positives", **kwargs):
        super().__init__(name=name, **kwargs)
        self.true_positives = self.add_variable(
            shape=(), name="ctp", initializer="zeros"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_pred = ops.cast(ops.reshape(y_pred, (-1, 1)) > 0.5, "int32")
        values = ops.cast(y_true, "int32") == y_pred
        self.true_positives.assign_add(ops.sum(ops.cast(values, "float32")))

    def result(self):
        return self.true_positives.value

    def reset_state(self):
        self.true_positives.assign(0.0)


class Vector(keras.metrics.Metric):
    """A variable per class, whose value is the result."""

    def __init__(self, name="vector", **kwargs):
        super().__init__(name=name, **kwargs)
        self.counts = self.add_weight(
            shape=(3,), initializer="zeros", name="counts", dtype="int32"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        each = ops.cast(ops.ravel(y_pred) * 2.999, "int32")
        self.counts.assign_add(ops.sum(ops.one_hot(each, 3, dtype="int32"), 0))

    def result(self):
        return self.counts


class Dictionary(keras.metrics.Metric):
    def __init__(self, name="dictionary", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")
        self.num = self.add_variable((), "zeros", name="num")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))
        self.num.assign_add(ops.cast(ops.size(y_pred), "float32"))

    def result(self):
        return {"mean_error": self.total / self.num, "examples": self.num}


class Nested(keras.metrics.Metric):
    """Made of others."""

    def __init__(self, name="nested", **kwargs):
        super().__init__(name=name, **kwargs)
        self.precision = keras.metrics.Precision()
        self.recall = keras.metrics.Recall()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.precision.update_state(y_true, y_pred, sample_weight)
        self.recall.update_state(y_true, y_pred, sample_weight)

    def result(self):
        p, r = self.precision.result(), self.recall.result()
        return 2 * p * r / (p + r + 1e-6)

    def reset_state(self):
        self.precision.reset_state()
        self.recall.reset_state()


def distance(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


class Wrapped(keras.metrics.MeanMetricWrapper):
    def __init__(self, name="wrapped", **kwargs):
        super().__init__(fn=distance, name=name, **kwargs)


class OwnMean(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(ops.square(y_true - y_pred), sample_weight)


class Smoothed(keras.metrics.Metric):
    """Counts from one, as `reset_state` says."""

    def __init__(self, name="smoothed", **kwargs):
        super().__init__(name=name, **kwargs)
        self.num = self.add_variable((), "ones", name="num")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.num.assign_add(ops.sum(y_true))

    def result(self):
        return self.num

    def reset_state(self):
        self.num.assign(1.0)


class Maximum(keras.metrics.Metric):
    def __init__(self, name="maximum", **kwargs):
        super().__init__(name=name, **kwargs)
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(ops.maximum(self.most, ops.max(y_pred)))

    def result(self):
        return self.most


class Minimum(keras.metrics.Metric):
    def __init__(self, name="minimum", **kwargs):
        super().__init__(name=name, **kwargs)
        self.least = self.add_variable((), "zeros", name="least")
        self.reset_state()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.least.assign(ops.minimum(self.least, ops.min(y_pred)))

    def result(self):
        return self.least

    def reset_state(self):
        self.least.assign(float("inf"))


class Last(Maximum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(ops.mean(y_pred))


class MeanAggregated(Maximum):
    def __init__(self, name="mean_aggregated"):
        keras.metrics.Metric.__init__(self, name=name)
        self.most = self.add_variable(
            (), "zeros", name="most", aggregation="mean"
        )


class Matrix(keras.metrics.Metric):
    """Adds without `assign_add`."""

    def __init__(self, name="matrix"):
        super().__init__(name=name)
        self.counts = self.add_variable((2, 2), "zeros", name="counts")
        self.left = self.add_variable((), "zeros", name="left")

    def update_state(self, y_true, y_pred, sample_weight=None):
        pairs = tf.concat([y_true > 0.5, y_pred > 0.5], axis=1)
        ones = tf.ones(tf.shape(pairs)[0])
        self.counts.assign(
            tf.tensor_scatter_nd_add(
                self.counts.value, tf.cast(pairs, tf.int32), ones
            )
        )
        self.left.assign(self.left - ops.sum(y_true))

    def result(self):
        return {"hits": self.counts[1, 1], "left": self.left}


class Sometimes(Maximum):
    """A sum; but what adds only under a condition is not seen to be one."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        more = self.most + ops.sum(y_pred)
        self.most.assign(ops.where(ops.max(y_true) > 0.5, more, self.most))


class Alternating(Maximum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(ops.sum(y_pred) - self.most)


class Squared(Maximum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign_add(self.most * ops.sum(y_pred))


SUMS = {
    "matrix": lambda: {"metrics": [Matrix()]},
    "add_variable": lambda: {"metrics": [BinaryTruePositives()]},
    "reset_state": lambda: {"metrics": [CategoricalTruePositives()]},
    "vector": lambda: {"metrics": [Vector()]},
    "dictionary": lambda: {"metrics": [Dictionary()]},
    "nested": lambda: {"metrics": [Nested()]},
    "function": lambda: {"metrics": [distance]},
    "wrapper": lambda: {"metrics": [Wrapped()]},
    "wrapper_of_a_function": lambda: {
        "metrics": [keras.metrics.MeanMetricWrapper(distance, name="distance")]
    },
    "subclass_of_mean": lambda: {"metrics": [OwnMean(name="squares")]},
    "names": lambda: {"metrics": ["mae", "AUC", "accuracy"]},
    "weighted": lambda: {
        "weighted_metrics": [BinaryTruePositives(), "mse", distance]
    },
}
NO_SUMS = {
    "maximum": lambda: {"metrics": [Maximum()]},
    "minimum": lambda: {"metrics": [Minimum()]},
    "last": lambda: {"metrics": [Last(name="last")]},
    "sometimes": lambda: {"metrics": [Sometimes(name="sometimes")]},
    "alternating": lambda: {"metrics": [Alternating(name="alternating")]},
    "squared": lambda: {"metrics": [Squared(name="squared")]},
    "starts_at_one": lambda: {"metrics": [Smoothed()]},
}


# --- Models that update metrics themselves -----------------------------------


class InCompute(keras.Sequential):
    """The example in the docstring of `keras.Model.compute_metrics`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.custom_metric = BinaryTruePositives(name="custom_metric")

    def compute_metrics(self, x, y, y_pred, sample_weight):
        metric_results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.custom_metric.update_state(y, y_pred, sample_weight)
        metric_results["custom_metric"] = self.custom_metric.result()
        return metric_results


class Extras(InCompute):
    """What is computed of metrics; one that `metrics` does not list."""

    def compute_metrics(self, x, y, y_pred, sample_weight):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        results["perplexity"] = ops.exp(results["loss"])
        results["double"] = 2 * self.custom_metric.result()
        results["constant"] = 3.5
        results.pop("custom_metric")
        return results


class Unlisted(Extras):
    @property
    def metrics(self):
        return [m for m in super().metrics if m is not self.custom_metric]


class Batches(Maximum):
    """Counts also the batch of zeros with which metrics are built."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign_add(1.0)


class UnlistedCount(Unlisted):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.custom_metric = Batches(name="batches")


class UnlistedMaximum(Unlisted):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.custom_metric = Maximum(name="most_of_all")


class InCall(keras.layers.Layer):
    """A layer that measures its activity."""

    def __init__(self):
        super().__init__()
        self.activity = keras.metrics.Mean(name="activity")
        self.most = Maximum(name="most")

    def call(self, x):
        self.activity.update_state(x)
        self.most.update_state(None, x)
        return x


class InLoss(keras.Sequential):
    """As in the docstring of `keras.Model.compute_loss`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.errors = keras.metrics.Mean(name="errors")

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = ops.mean(ops.square(y_pred - y)) + sum(self.losses)
        self.errors.update_state(loss)
        return loss

    def reset_metrics(self):
        for metric in self.metrics:
            metric.reset_state()

    @property
    def metrics(self):
        return [*super().metrics[:1], self.errors]


def sequential(kind=keras.Sequential, hidden=(), **compiled):
    reset_object_names()
    keras.utils.set_random_seed(1)
    layers = [keras.Input([4]), *hidden, keras.layers.Dense(1, "sigmoid")]
    model = kind(layers)
    compiled.setdefault("loss", "binary_crossentropy")
    model.compile(keras.optimizers.SGD(0.1), **compiled)
    return model


def two_outputs():
    reset_object_names()
    keras.utils.set_random_seed(1)
    x = keras.Input([4])
    outputs = {
        name: keras.layers.Dense(1, "sigmoid", name=name)(x) for name in "ab"
    }
    model = keras.Model(x, outputs)
    model.compile(
        keras.optimizers.SGD(0.1),
        {"a": "mse", "b": "binary_crossentropy"},
        metrics={"a": [BinaryTruePositives(), "mae"], "b": [Dictionary()]},
        weighted_metrics={"b": [distance]},
    )
    return model


MODELS = {
    "docstring_of_compute_metrics": lambda: sequential(
        InCompute, metrics=["mae"]
    ),
    "extras": lambda: sequential(Extras, metrics=["mae"]),
    "unlisted": lambda: sequential(Unlisted, metrics=["mae"]),
    "in_call": lambda: sequential(hidden=[InCall()]),
    "unlisted_maximum": lambda: sequential(UnlistedMaximum),
    "unlisted_count": lambda: sequential(UnlistedCount),
    "in_loss": lambda: sequential(InLoss, metrics=["mae"]),
    "two_outputs": two_outputs,
    **{
        name: lambda make=make: sequential(**make())
        for name, make in {**SUMS, **NO_SUMS}.items()
    },
    "aggregation": lambda: sequential(metrics=[MeanAggregated()]),
}


def data_of(name):
    data = dataset()
    if name == "two_outputs":
        return data.map(lambda x, y: (x, {"a": y, "b": 1 - y}))
    return data


def flat(logs):
    """As `metrics.flat_floats` names them."""
    found = {}
    for name, value in logs.items():
        if np.ndim(value):
            found |= {f"{name}/{i}": float(v) for i, v in enumerate(value)}
        else:
            found[name] = float(value)
    return found


# One of each kind.
FAST = ["extras", "in_loss", "two_outputs", "weighted", "aggregation"]


@pytest.mark.parametrize("name", slow_but(FAST, MODELS))
def test_evaluates_and_logs_as_keras_does(name):
    """Each evaluation, and each run, begins anew; neither disturbs others."""
    theirs = MODELS[name]()
    expected = flat(theirs.evaluate(data_of(name), verbose=0, return_dict=True))
    loop, _ = local_loop(MODELS[name](), data_of(name).repeat(), 3)
    for _ in range(2):
        got = loop.evaluate(data_of(name))
        if "unlisted" in name:  # `evaluate` never resets it, or returns it.
            got = {k: v for k, v in got.items() if k in expected}
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    history = (
        MODELS[name]()
        .fit(data_of(name), epochs=2, verbose=0, shuffle=False)
        .history
    )
    for epoch in range(2):
        expected = flat({k: v[epoch] for k, v in history.items()})
        if "unlisted" in name and epoch:
            break
        got = loop.run(BATCHES)
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


# --- Where tasks add up ------------------------------------------------------


def remote(model, spec=None):
    optimizers.build(model.optimizer, model.trainable_variables)
    return ModelStep(
        model,
        spec or dataset().element_spec,
        global_step=tf.Variable(0, dtype=tf.int64),
        remote=True,
    )


@pytest.mark.parametrize("name", [*SUMS, "extras", "in_loss", "two_outputs"])
def test_sums_are_accepted(name):
    remote(MODELS[name](), data_of(name).element_spec)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maximum", "Metric 'maximum' .* variable 'maximum/most' other than"),
        ("minimum", "Metric 'minimum' .* does not start it at zero"),
        ("last", "Metric 'last' .* Keep sums and counts"),
        ("alternating", "Metric 'alternating' .* other than by"),
        ("sometimes", r"Metric 'sometimes' .* \(`assign_add`\) from which"),
        ("squared", "Metric 'squared' .* other than by"),
        ("unlisted_maximum", "Metric 'most_of_all/most' of model"),
        ("starts_at_one", "Metric 'smoothed' .* does not start it at zero"),
        ("in_call", "Metric 'most' of model"),
        ("aggregation", "has aggregation='mean'"),
    ],
)
def test_what_is_no_sum_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        remote(MODELS[name]())


class Batchwise(InCompute):
    def __init__(self, *args, extra, **kwargs):
        super().__init__(*args, **kwargs)
        self.extra = extra

    def compute_metrics(self, x, y, y_pred, sample_weight):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        results["mine"] = self.extra(self, x, y_pred)
        return results


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda m, x, y: ops.max(y), "the batch|variable"),
        (lambda m, x, y: ops.shape(x)[0], "the batch"),
        (
            lambda m, x, y: ops.sum(m.layers[0].kernel),
            "variable '.*dense/kernel'",
        ),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_results_of_one_batch_are_refused(extra, message, trains):
    model = sequential(lambda layers: Batchwise(layers, extra=extra))
    step = tf.Variable(0, dtype=tf.int64) if trains else None
    with pytest.raises(
        ValueError,
        match=r"`compute_metrics` of Batchwise returns 'mine', which depends "
        rf"on ({message}).*keras.metrics.Mean",
    ):
        ModelStep(model, dataset().element_spec, global_step=step)

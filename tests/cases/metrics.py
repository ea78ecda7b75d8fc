"""All metrics of Keras: results are those of Keras' `evaluate`."""

import keras
import numpy as np
import tensorflow as tf
from keras import metrics

from tests.cases import BATCH, case, compiled, examples, seeded

X, Y = examples()
CLASSES = np.arange(BATCH)[:, None] % 3
ONE_HOT = np.eye(3, dtype="float32")[CLASSES[:, 0]]
WEIGHTS = np.linspace(0, 2, BATCH).astype("float32")


def as_keras_evaluates(job, model_fn, data):
    """Evaluates two batches after a step as Keras does."""

    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices(data)
        return dataset.batch(BATCH // 2)

    estimator = job.estimator(model_fn)
    estimator.train(lambda: input_fn().repeat(), max_steps=1)
    if not job.is_chief:
        return
    found = estimator.evaluate(input_fn)
    model = seeded(model_fn)
    for variable in model.weights:
        variable.assign(estimator.get_variable_value(variable.path))
    wanted = model.evaluate(input_fn(), return_dict=True, verbose=0)
    for name, value in wanted.items():
        numbers = np.ravel(value)
        for i, number in enumerate(numbers):  # Of several, each has a name.
            one = name if len(numbers) == 1 else f"{name}/{i}"
            np.testing.assert_allclose(found[one], number, 1e-4, 1e-6, one)


def _add(name, *makes, activation="sigmoid", y=Y, width=1, weights=None):
    """A case of metrics that are made in the model function."""

    @case(name)
    def run(job):
        def model_fn():
            made = [make() if callable(make) else make for make in makes]
            key = "metrics" if weights is None else "weighted_metrics"
            return compiled(
                keras.layers.Dense(width, activation), **{key: made}
            )

        data = (X, y) if weights is None else (X, y, weights)
        as_keras_evaluates(job, model_fn, data)


_add("names", "accuracy", "mae", "mse", "cosine_similarity")
_add("BinaryAccuracy", lambda: metrics.BinaryAccuracy(threshold=0.4))
_add("Accuracy", metrics.Accuracy)
_add("AUC", metrics.AUC, lambda: metrics.AUC(curve="PR", name="pr"))
_add(
    "AUC of labels",
    lambda: metrics.AUC(multi_label=True, num_labels=3),
    y=ONE_HOT,
    width=3,
)
_add(
    "Precision and Recall",
    metrics.Precision,
    metrics.Recall,
    lambda: metrics.Precision(thresholds=[0.2, 0.7], name="at"),
)
_add(
    "confusion",
    metrics.TruePositives,
    metrics.TrueNegatives,
    metrics.FalsePositives,
    metrics.FalseNegatives,
)
_add(
    "one at another",
    lambda: metrics.PrecisionAtRecall(0.5),
    lambda: metrics.RecallAtPrecision(0.5),
    lambda: metrics.SensitivityAtSpecificity(0.5),
    lambda: metrics.SpecificityAtSensitivity(0.5),
)
_add(
    "of classes",
    metrics.CategoricalAccuracy,
    metrics.CategoricalCrossentropy,
    lambda: metrics.TopKCategoricalAccuracy(2),
    metrics.CategoricalHinge,
    activation="softmax",
    y=ONE_HOT,
    width=3,
)
_add(
    "errors",
    metrics.MeanSquaredError,
    metrics.RootMeanSquaredError,
    metrics.MeanAbsoluteError,
    metrics.MeanAbsolutePercentageError,
    metrics.MeanSquaredLogarithmicError,
    metrics.LogCoshError,
    metrics.CosineSimilarity,
)
_add("R2Score", metrics.R2Score)
_add("R2Score of outputs", metrics.R2Score, y=ONE_HOT, width=3)
_add(
    "probabilities",
    metrics.BinaryCrossentropy,
    metrics.KLDivergence,
    metrics.Poisson,
)
_add("hinges", metrics.Hinge, metrics.SquaredHinge, activation="tanh")
_add(
    "F1Score and FBetaScore",
    lambda: metrics.F1Score(average="macro"),
    lambda: metrics.FBetaScore(beta=2.0, threshold=0.5, name="fbeta"),
    y=ONE_HOT,
    width=3,
)
_add("F1Score of one class", lambda: metrics.F1Score(threshold=0.5))
_add("F1Score of classes", metrics.F1Score, y=ONE_HOT, width=3)
_add("IoU", lambda: metrics.BinaryIoU(threshold=0.5))
_add(
    "OneHotIoU",
    lambda: metrics.OneHotIoU(3, [0, 2]),
    lambda: metrics.OneHotMeanIoU(3),
    y=ONE_HOT,
    width=3,
)
_add("a function", lambda: lambda y, y_pred: keras.ops.mean(y - y_pred))
_add("weighted names", "mae", "accuracy", weights=WEIGHTS)
_add(
    "weighted",
    metrics.AUC,
    metrics.Precision,
    metrics.RootMeanSquaredError,
    weights=WEIGHTS,
)


@case()
def by_output(job):
    """`metrics` and `weighted_metrics` as dicts, of two outputs."""

    def model_fn():
        x = keras.Input([4])
        model = keras.Model(
            x,
            {
                "number": keras.layers.Dense(1, name="number")(x),
                "flag": keras.layers.Dense(1, "sigmoid", name="flag")(x),
            },
        )
        model.compile(
            "sgd",
            {"number": "mse", "flag": "binary_crossentropy"},
            metrics={"number": ["mae"], "flag": [metrics.AUC()]},
            weighted_metrics={"flag": ["accuracy"]},
        )
        return model

    y = {"number": X[:, :1], "flag": Y}
    as_keras_evaluates(job, model_fn, (X, y, WEIGHTS))


@case()
def own_metric(job):
    """A class of sums."""

    class Share(keras.metrics.Metric):
        def __init__(self, name="share", **kwargs):
            super().__init__(name=name, **kwargs)
            self.positive = self.add_variable([], "zeros", name="positive")
            self.count = self.add_variable([], "zeros", name="count")

        def update_state(self, y, y_pred, sample_weight=None):
            flags = keras.ops.cast(y_pred > 0.5, "float32")
            self.positive.assign_add(keras.ops.sum(flags))
            self.count.assign_add(keras.ops.sum(keras.ops.ones_like(flags)))

        def result(self):
            return self.positive / self.count

    def model_fn():
        return compiled(
            keras.layers.Dense(1, "sigmoid"), metrics=[Share(), "mae"]
        )

    as_keras_evaluates(job, model_fn, (X, Y))

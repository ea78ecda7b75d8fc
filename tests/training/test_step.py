import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import (
    batches,
    examples,
    local_loop,
    logistic,
    unbuilt,
    uncompiled,
)

from tfdist.training import optimizers
from tfdist.training.step import ModelStep

METRICS = {
    "auc": lambda: keras.metrics.AUC(),
    "auc_pr": lambda: keras.metrics.AUC(curve="PR", num_thresholds=50),
    "accuracy": lambda: "accuracy",
    "precision": lambda: keras.metrics.Precision(),
    "recall": lambda: keras.metrics.Recall(thresholds=[0.3, 0.6]),
    "mse": lambda: keras.metrics.MeanSquaredError(),
    "rmse": lambda: keras.metrics.RootMeanSquaredError(),
    "crossentropy": lambda: keras.metrics.BinaryCrossentropy(),
    "r2": lambda: keras.metrics.R2Score(),
}


def evaluated(step, dataset):
    states = step.zero_states()
    for batch in dataset:
        states = step.evaluate(batch, states)
    return step.pack(states).numpy()


@pytest.fixture(scope="module")
def with_metrics():
    return logistic(metrics=[make() for make in METRICS.values()])


# --- Metrics -----------------------------------------------------------------


def test_metrics_equal_those_of_keras(with_metrics):
    dataset = batches(100, 16)  # The last batch has four examples.
    expected = with_metrics.evaluate(dataset, verbose=0, return_dict=True)
    step = ModelStep(with_metrics, dataset.element_spec)
    got = step.result(evaluated(step, dataset))
    flat = {name: np.asarray(value) for name, value in expected.items()}
    assert len(flat) == len(METRICS) + 1
    for name, value in flat.items():
        # A metric of several values gets a number behind its name.
        names = [f"{name}/{i}" for i in range(value.size)]
        for part, number in zip(
            names if value.ndim else [name], value.ravel(), strict=True
        ):
            assert got[part] == pytest.approx(number, rel=1e-5), part


@pytest.mark.parametrize("cuts", [[1], [3, 4], [1, 2, 3, 4, 5, 6]])
def test_states_of_parts_add_up(with_metrics, cuts):
    dataset = batches(112, 16)
    step = ModelStep(with_metrics, dataset.element_spec)
    edges = [0, *cuts, 7]
    parts = [
        evaluated(step, dataset.skip(a).take(b - a))
        for a, b in itertools.pairwise(edges)
    ]
    whole = step.result(evaluated(step, dataset))
    assert step.result(sum(parts)) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("wrap", [list, tuple, lambda x: x[0]])
def test_every_example_counts_if_the_only_output_is_in_a_list(wrap):
    x = keras.Input([4])
    model = keras.Model(x, wrap([keras.layers.Dense(1, "sigmoid")(x)]))
    model.compile("sgd", "binary_crossentropy", metrics=["mae"])
    expected = model.evaluate(batches(), verbose=0, return_dict=True)
    step = ModelStep(model, batches().element_spec)
    result = step.result(evaluated(step, batches()))
    assert result == pytest.approx(expected, rel=1e-5)


def test_no_example_gives_no_result(with_metrics):
    step = ModelStep(with_metrics, batches().element_spec)
    assert step.result(step.pack(step.zero_states()).numpy()) == {}


def test_evaluation_changes_nothing():
    model = logistic(hidden=[keras.layers.BatchNormalization()])
    before = [v.numpy() for v in model.weights]
    dataset = batches()
    evaluated(ModelStep(model, dataset.element_spec), dataset)
    for old, variable in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())


# --- Random layers -----------------------------------------------------------


def test_each_step_has_its_own_dropout_mask():
    model = logistic(
        optimizer=keras.optimizers.SGD(0.0),
        hidden=[keras.layers.Dropout(0.5, seed=3)],
    )
    dataset = batches(8, 8)
    loop, _ = local_loop(model, dataset)
    (batch,) = dataset
    train = tf.function(loop._step.train, autograph=False)

    def loss(number):
        states = loop._step.zero_states()
        number = tf.constant(number, tf.int64)
        return float(train(batch, number, states)[0])

    losses = [loss(number) for number in range(6)]
    assert losses == [loss(number) for number in range(6)]
    assert len(set(losses)) == 6


def test_dropout_is_off_in_evaluation():
    model = logistic(hidden=[keras.layers.Dropout(0.5)])
    dataset = batches()
    step = ModelStep(model, dataset.element_spec)
    first, second = evaluated(step, dataset), evaluated(step, dataset)
    np.testing.assert_array_equal(first, second)


# --- One training step against Keras -----------------------------------------


def after_keras(make_model, dataset):
    model = make_model()
    logs = [model.train_on_batch(*b, return_dict=True) for b in dataset]
    return model, logs


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.BatchNormalization(momentum=0.8),
        lambda: keras.layers.Dense(3, "relu", kernel_regularizer="l2"),
        lambda: keras.layers.Dense(3, activity_regularizer="l1"),
        lambda: keras.layers.LayerNormalization(),
    ],
    ids=["batch_norm", "regularizer", "activity_regularizer", "layer_norm"],
)
def test_weights_and_moving_averages_equal_those_of_keras(layer):
    dataset = batches(80, 8)
    theirs, _ = after_keras(lambda: logistic(hidden=[layer()]), dataset)
    ours = logistic(hidden=[layer()])
    loop, _ = local_loop(ours, dataset)
    loop.run(10)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_loss_holds_the_regularization():
    dataset = batches(8, 8)
    layer = {"kernel_regularizer": keras.regularizers.L2(10.0)}

    def make():
        return logistic(hidden=[keras.layers.Dense(3, **layer)])

    _, logs = after_keras(make, dataset)
    loop, _ = local_loop(make(), dataset)
    assert loop.run(1)["loss"] == pytest.approx(logs[0]["loss"], rel=1e-5)


def test_sample_weights():
    x, y = examples(32)
    weight = np.linspace(0, 3, 32).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(8)

    def make():
        model = logistic()
        model.compile(
            "sgd",
            "binary_crossentropy",
            metrics=["mse"],
            weighted_metrics=[keras.metrics.AUC(name="auc")],
        )
        return model

    theirs, _ = after_keras(make, dataset)
    ours = make()
    expected = ours.evaluate(dataset, verbose=0, return_dict=True)
    step = ModelStep(ours, dataset.element_spec)
    got = step.result(evaluated(step, dataset))
    assert got == pytest.approx(expected, rel=1e-5)
    loop, _ = local_loop(ours, dataset)
    loop.run(4)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


# --- What is refused ---------------------------------------------------------


class RunningMaximum(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="maximum")
        self.maximum = self.add_variable((), "zeros", name="max")
        self.maximum._aggregation = "mean"

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.maximum.assign(keras.ops.max(y_pred))

    def result(self):
        return self.maximum


class SeedsOfEachCall(keras.Model):
    def call(self, x):
        seed = keras.random.SeedGenerator(1)
        return x + keras.random.normal([], seed=seed)


def seeds_of_each_call():
    model = SeedsOfEachCall()
    model.compile("sgd", "mse")
    model(tf.zeros([1, 4]))
    return model


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (seeds_of_each_call, ValueError, "new variables each time.*seed"),
        (lambda: 5, TypeError, "must return a `keras.Model`. Received: 5"),
        (uncompiled, ValueError, "must be compiled"),
        (unbuilt, ValueError, "has no variables and"),
        (
            lambda: logistic(metrics=[RunningMaximum()]),
            ValueError,
            "maximum.*aggregation='mean'",
        ),
        (
            lambda: logistic(
                keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.SGD(gradient_accumulation_steps=4)
                )
            ),
            ValueError,
            "LossScaleOptimizer",
        ),
    ],
)
def test_refused(make, error, message):
    with pytest.raises(error, match=message):
        ModelStep(make(), batches().element_spec, remote=True)


def test_evaluates_a_regularized_model():
    kernel = keras.layers.Dense(3, kernel_regularizer="l2")
    model = logistic(hidden=[kernel])
    step = ModelStep(model, batches().element_spec)
    x, y = examples(16)
    packed = step.evaluate_alone((tf.constant(x), tf.constant(y)))
    wanted = model.evaluate(x, y, batch_size=16, verbose=0)
    assert step.result(packed.numpy())["loss"] == pytest.approx(wanted)


def test_accumulates_gradients_as_keras_does():
    def made():
        adam = keras.optimizers.Adam(0.1, gradient_accumulation_steps=3)
        return logistic(adam)

    ours, keras_own = made(), made()
    loop, _ = local_loop(ours, batches().repeat())
    loop.run(8)
    keras_own.fit(batches().repeat(), steps_per_epoch=8, verbose=0)
    for v, wanted in zip(ours.variables, keras_own.variables, strict=True):
        np.testing.assert_allclose(v.numpy(), wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**127])
def test_scales_the_loss_as_keras_does(scale):
    """Gradients are finite at the first scale, and are not at the second."""

    def made():
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.1), initial_scale=scale
        )
        optimizer.dynamic_growth_steps = 3
        return logistic(optimizer)

    ours, keras_own = made(), made()
    loop, global_step = local_loop(ours, batches().repeat())
    loop.run(8)
    keras_own.fit(batches().repeat(), steps_per_epoch=8, verbose=0)
    assert int(global_step.numpy()) == 8
    for mine, theirs in (
        (ours.variables, keras_own.variables),
        (ours.optimizer.variables, keras_own.optimizer.variables),
    ):
        for v, wanted in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(
                v.numpy(), wanted.numpy(), atol=1e-5, err_msg=v.path
            )


def test_loss_that_depends_on_no_variable():
    model = logistic()
    model.compile("sgd", loss=lambda y, p: keras.ops.mean(y))
    optimizers.build(model.optimizer, model.trainable_variables)
    loop, _ = local_loop(model, batches())
    with pytest.raises(ValueError, match="depends on no trainable variable"):
        loop.run(1)


def test_warns_as_keras_does_of_what_the_loss_does_not_depend_on():
    inputs = keras.Input([3])
    used = keras.layers.Dense(1, name="used")(inputs)
    unused = keras.layers.Dense(1, name="unused")(inputs)
    model = keras.Model(inputs, [used, unused])
    model.compile("sgd", ["mse", None])
    x, y = tf.ones([4, 3]), tf.ones([4, 1])
    data = tf.data.Dataset.from_tensors((x, (y, y))).repeat()
    loop, _ = local_loop(model, data)
    message = r"Gradients do not exist for .*'unused/kernel', 'unused/bias'\]"
    with pytest.warns(UserWarning, match=message):
        loop.run(1)
    with pytest.warns(UserWarning, match=message):
        model.fit(data, steps_per_epoch=1, verbose=0)


# --- What counts the steps ---------------------------------------------------


class Counted(keras.optimizers.SGD):
    """Sets every variable to the last digits of the update's number."""

    def update_step(self, gradient, variable, learning_rate):
        digits = tf.cast(self.iterations % 1000, variable.dtype)
        self.assign(variable, tf.zeros_like(gradient) + digits)


class Parity(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return keras.ops.cast(step % 2, "float32")


def test_an_iteration_beyond_what_a_float_holds():
    start = 2**24 + 2
    model = logistic(Counted(Parity()))
    loop, global_step = local_loop(model, batches().repeat())
    model.optimizer.iterations.assign(start)
    global_step.assign(start)
    for step in (start, start + 1):
        loop.run(1)
        assert model.layers[-1].bias.numpy()[0] == step % 1000
    rates = []
    for step in range(start, start + 3):
        counters = loop._step._counters
        _, (rate,), _ = counters.of_step(tf.constant(step, tf.int64))
        rates.append(float(rate))
    assert rates == [0.0, 1.0, 0.0]


def test_steps_that_are_under_way_while_a_function_is_traced():
    """The optimizer's and the job's step move on between two reads."""
    model = logistic()
    loop, global_step = local_loop(model, batches().repeat())
    model.optimizer.iterations.assign(50)
    loop.run(2)
    # Another worker's step has counted here, and not yet there.
    global_step.assign_add(1)
    counters = loop._step._counters
    assert int(counters.iteration(tf.constant(2, tf.int64))) == 52

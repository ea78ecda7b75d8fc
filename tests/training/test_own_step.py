"""A `train_step` as a function of values; `tests.cases` has the strategies."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from small_models import batches

from tfdist._tf.private_keras import reset_object_names
from tfdist.training import optimizers
from tfdist.training.keras_step import KerasStep
from tfdist.training.loop import LocalLoop
from tfdist.training.own_step import with_others
from tfdist.training.replicas import Replicas
from tfdist.training.replicated_loop import ReplicatedLoop
from tfdist.training.step import ModelStep


class Own(keras.Model):
    """Its logs: the result of a metric, a scalar, and a compiled metric's."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = ops.mean(ops.square(y - y_pred))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.seen.update_state(loss)
        results = self.compute_metrics(x, y, y_pred)
        return {"seen": self.seen.result(), "bare": loss, "mae": results["mae"]}


def own():
    reset_object_names()
    keras.utils.set_random_seed(1)
    x = keras.Input([4])
    hidden = keras.layers.BatchNormalization()(
        keras.layers.Dense(3, use_bias=False)(x)
    )
    model = Own(x, keras.layers.Dense(1)(hidden))
    model.seen = keras.metrics.Mean(name="seen")
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    return model


def loop(kind, model):
    global_step = tf.Variable(0, dtype=tf.int64)
    data = batches().repeat()
    optimizers.build(model.optimizer, model.trainable_variables)
    step = kind(model, data.element_spec, global_step=global_step)
    return LocalLoop(step, global_step, data, 2)


def test_weights_and_logs_are_those_of_keras():
    ours, theirs = own(), own()
    found, wanted = loop(ModelStep, ours), loop(KerasStep, theirs)
    for steps in (3, 4):
        logs, expected = found.run(steps), wanted.run(steps)
        # Keras' own gives the last value of what is no metric.
        del expected["bare"]
        assert logs.pop("bare") == pytest.approx(logs["seen"])
        assert logs == pytest.approx(expected, rel=1e-4)
    for variable, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(variable, other, rtol=1e-3, atol=1e-5)


def assigning(model, data):
    logs = Own.train_step(model, data)
    model.trainable_variables[0].assign_add(1.0)
    return logs


def nothing(model, data):
    return {"loss": ops.mean(data[0])}


def array(model, data):
    return {**Own.train_step(model, data), "sums": ops.sum(data[0], axis=0)}


@pytest.mark.parametrize(
    ("train_step", "message"),
    [
        (assigning, "assigns 'dense/kernel', which its optimizer updates"),
        (
            nothing,
            r"applies gradients 0 times \(by \[\]\).*Override `compute_l",
        ),
        (array, "'sums', .*shape=.4,"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_refused(train_step, message):
    model = own()
    model.train_step = lambda data: train_step(model, data)
    with pytest.raises(ValueError, match=message):
        loop(ModelStep, model)


def test_weights_are_not_read_after_their_update():
    model = own()

    def train_step(data):
        Own.train_step(model, data)
        return {"norm": ops.sum(model.trainable_variables[0])}

    model.train_step = train_step
    with pytest.raises(ValueError, match="reads 'dense/kernel' after it has"):
        loop(ModelStep, model).run(1)


class Drawing(Own):
    """Draws by Keras' own generator, which it does not hold."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x, y + keras.random.normal(ops.shape(y))))


def drawing():
    model = own()
    model.__class__ = Drawing
    return model


def test_random_numbers_without_a_seed():
    made = loop(ModelStep, drawing())
    first, second = made.run(1)["bare"], made.run(1)["bare"]
    assert first != second
    # A run that goes on draws as the one before would have.
    names = made._step.variables({})
    assert any(name.endswith("seed_generator_state") for name in names)


@pytest.mark.parametrize("kind", [Own, keras.Model])
def test_what_xla_cannot_compile_between_replicas_is_said(kind, caplog):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        global_step = tf.Variable(
            0,
            dtype=tf.int64,
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        x = keras.Input([4])
        layer = keras.layers.BatchNormalization(synchronized=True)
        model = kind(x, keras.layers.Dense(1)(layer(x)))
        model.seen = keras.metrics.Mean(name="seen")
        model.compile("sgd", "mse", metrics=["mae"], jit_compile=True)
        optimizers.build(model.optimizer, model.trainable_variables)
    data, replicas = batches().repeat(), Replicas(strategy, global_step)
    with caplog.at_level(logging.WARNING, "tfdist"):
        step = ModelStep(
            model, data.element_spec, global_step=global_step, replicas=replicas
        )
    assert "replicas wait for each other within it" in caplog.text
    made = ReplicatedLoop(
        step, global_step, data, strategy=strategy, replicas=replicas
    )
    assert made.run(3)["mae"] > 0


def test_no_variable_is_lost_among_others_of_its_name():
    used = [tf.Variable(0.0, name=name) for name in ("x", "x_1", "x", "x")]
    held = with_others({}, used)
    assert [id(v) for v in held.values()] == [id(v) for v in used]
    assert list(held)[:2] == ["train_step/x", "train_step/x_1"]

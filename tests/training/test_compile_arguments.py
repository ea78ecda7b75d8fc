"""Every argument of `compile` does what it does under `fit`, or says so."""

import inspect
import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from pace import slow_but
from small_models import local_loop, logistic

import tfdist
from tfdist.cluster.spec import Cluster
from tfdist.training.loop import EndOfInput

RNG = np.random.default_rng(0)


def compiled(policy="float32", **arguments):
    """A model of two outputs, compiled with `arguments`."""
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_dtype_policy(policy)
    x = keras.Input([4], name="x")
    hidden = keras.layers.Dense(5, "tanh")(x)
    outputs = {
        name: keras.layers.Dense(1, activation, dtype="float32", name=name)(
            hidden
        )
        for name, activation in (("click", "sigmoid"), ("price", None))
    }
    model = keras.Model(x, outputs)
    model.compile(
        **{
            "optimizer": keras.optimizers.Adam(0.02),
            "loss": {"click": "binary_crossentropy", "price": "mse"},
            **arguments,
        }
    )
    keras.mixed_precision.set_dtype_policy("float32")
    return model


def data(size=52, batch_size=8):
    x = RNG.normal(size=[size, 4]).astype("float32")
    y = {
        "click": (x[:, :1] > 0).astype("float32"),
        "price": x.sum(1, keepdims=True),
    }
    weight = {name: RNG.uniform(0.5, 2, size).astype("float32") for name in y}
    return tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(batch_size)


ARGUMENTS = {
    "optimizer": {"optimizer": "rmsprop"},
    "loss": {"loss": {"click": "hinge", "price": "mae"}},
    "loss_weights": {"loss_weights": {"click": 3.0, "price": 0.1}},
    "metrics": {"metrics": {"click": ["accuracy", "auc"], "price": ["mae"]}},
    "weighted_metrics": {"weighted_metrics": {"click": ["auc"], "price": []}},
    "steps_per_execution": {"steps_per_execution": 3},
    "jit_compile": {"jit_compile": True},
    "auto_scale_loss": {"policy": "mixed_float16", "auto_scale_loss": False},
    "auto_scale_loss by default": {"policy": "mixed_float16"},
}


@pytest.mark.parametrize(
    "name", slow_but(["loss_weights", "weighted_metrics"], ARGUMENTS)
)
def test_learns_and_logs_what_fit_does(name):
    batches = data().cache()
    ours, theirs = (compiled(**ARGUMENTS[name]) for _ in range(2))
    loop, _ = local_loop(ours, batches)
    with pytest.raises(EndOfInput) as raised:
        loop.run(9)
    history = theirs.fit(batches, verbose=0).history
    rtol = 2e-3 if "policy" in ARGUMENTS[name] else 1e-5
    for mine, other in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(
            mine, other, rtol=rtol, atol=rtol / 10, err_msg=mine.path
        )
    for metric, [value] in history.items():
        if "loss" not in metric or metric == "loss":
            found = raised.value.logs[metric]
            assert found == pytest.approx(value, rel=rtol), metric


def test_no_argument_is_left_out():
    names = {*inspect.signature(keras.Model.compile).parameters} - {"self"}
    assert names == {n.split()[0] for n in ARGUMENTS} | {"run_eagerly"}


def test_a_model_that_runs_eagerly_is_refused(tmp_path):
    def model_fn():
        model = logistic()
        model.compile("sgd", "mse", run_eagerly=True)
        return model

    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    with pytest.raises(ValueError, match="run_eagerly=True, but"):
        tfdist.Estimator(model_fn, config).train(data, max_steps=2)
    assert not list(tmp_path.glob("model.ckpt*"))


def of_strings():
    class Hash(keras.layers.Layer):
        def call(self, x):
            buckets = tf.strings.to_hash_bucket_fast(x[:, 0], 3)
            return tf.one_hot(buckets, 3)

        def compute_output_spec(self, x):
            return keras.KerasTensor([x.shape[0], 3])

    x = keras.Input([1], dtype="string")
    return x, Hash()(x), tf.constant([["a"], ["b"]])


def of_a_table():
    x = keras.Input([1], dtype="int64")
    hidden = tfdist.PartitionedEmbedding(3, 2)(x)
    return x, hidden, tf.constant([[1], [2]])


def of_numbers():
    x = keras.Input([2])
    return x, keras.layers.Dense(2)(x), tf.ones([2, 2])


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (of_strings, "XLA does not support strings"),
        (of_a_table, "a different number of rows in each step"),
        (of_numbers, None),
    ],
)
def test_what_xla_cannot_compile_is_said_once(made, reason, caplog):
    x, hidden, features = made()
    hidden = keras.layers.Flatten()(hidden)
    model = keras.Model(x, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse", jit_compile=True)
    batches = tf.data.Dataset.from_tensors((features, tf.ones([2, 1])))
    with caplog.at_level(logging.WARNING, "tfdist"):
        loop, _ = local_loop(model, batches.repeat())
        loop.run(3)
    said = [r.getMessage() for r in caplog.records if "jit" in r.getMessage()]
    assert len(said) == bool(reason)
    assert not reason or re.search(reason, said[0])

"""Models and data that train very quickly, shared by several test files."""

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.private_keras import reset_object_names
from tfdist.training import optimizers
from tfdist.training.loop import LocalLoop
from tfdist.training.step import ModelStep


def logistic(optimizer=None, metrics=(), hidden=()):
    """A compiled binary classifier of 4 features; `hidden`: hidden layers."""
    reset_object_names()
    keras.utils.set_random_seed(1)
    output = keras.layers.Dense(1, "sigmoid")
    model = keras.Sequential([keras.Input([4]), *hidden, output])
    model.compile(
        optimizer or keras.optimizers.SGD(0.1),
        loss="binary_crossentropy",
        metrics=list(metrics),
    )
    return model


def blind(x):
    """An activation that hides NaN, as `relu` does on some CPUs only."""
    return keras.ops.where(x > 0, x, 0.0)


def uncompiled():
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])


def unbuilt():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def examples(size, seed=0):
    """`size` examples whose label depends on the features, with noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=[size, 4]).astype("float32")
    y = x.sum(axis=1, keepdims=True) + rng.normal(size=[size, 1]) > 0
    return x, y.astype("float32")


def batches(size=64, batch_size=8, seed=0):
    """The examples in order, once."""
    dataset = tf.data.Dataset.from_tensor_slices(examples(size, seed))
    return dataset.batch(batch_size)


def local_loop(model, dataset, steps_per_dispatch=None):
    """A loop over `dataset`, and its global step."""
    global_step = tf.Variable(0, dtype=tf.int64)
    optimizers.build(model.optimizer, model.trainable_variables)
    step = ModelStep(model, dataset.element_spec, global_step=global_step)
    return LocalLoop(
        step, global_step, dataset, steps_per_dispatch
    ), global_step

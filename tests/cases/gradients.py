"""Custom gradients, and gradients that flow through loops."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist
from tests.cases import BATCH, case, compiled, examples

_IDS = np.random.default_rng(3).integers(0, 10, [BATCH, 6])


def trains_as_fit(job, make, **tolerance):
    """With plain SGD, by the mean squared error."""

    def model_fn():
        model = make()
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(model_fn, **tolerance)


class Recomputed(layers.Layer):
    """Two layers whose activations are computed again for the gradient."""

    def __init__(self, by, **kwargs):
        super().__init__(**kwargs)
        self.by = by
        self.first, self.last = layers.Dense(5, "tanh"), layers.Dense(4)

    def build(self, shape):
        self.first.build(shape)
        self.last.build((*shape[:-1], 5))

    def call(self, x):
        return self.by(lambda x: self.last(self.first(x)))(x)


for name, by in (
    ("keras.remat", keras.remat),
    ("recompute_grad", tf.recompute_grad),
):

    @case(name)
    def run(job, by=by):
        job.trains_as_fit(lambda: compiled(Recomputed(by), layers.Dense(1)))


@case("RematScope of activations")
def activations(job):
    def model_fn():
        with keras.RematScope(mode="activations"):
            return compiled(layers.Dense(5, "tanh"), layers.Dense(1))

    job.trains_as_fit(model_fn)


class OwnStep(keras.Model):
    """A training step of its own."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Recomputed(keras.remat), layers.Dense(1)

    def call(self, x):
        return self.head(self.inner(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@case("keras.remat in a train_step")
def remat_in_a_train_step(job):
    # On variables of its own process, as in `fit`, TensorFlow may read for the
    # gradient what has been updated already.
    trains_as_fit(job, OwnStep, atol=3e-3)


class Tower(layers.Layer):
    """A table and a layer over its rows; what `inside` names is recomputed."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.table = tfdist.PartitionedEmbedding(10, 3, num_shards=2)
        self.dense = layers.Dense(2, "tanh")

    def build(self, shape):
        self.table.build(shape)
        self.dense.build((None, 18))

    def call(self, ids):
        if self.inside == "table":
            rows = keras.remat(self.table)(ids)
        else:
            rows = self.table(ids)
        rows = ops.reshape(rows, [-1, 18])
        if self.inside == "layer":
            return keras.remat(self.dense)(rows)
        return self.dense(rows)


def tower(inside):
    ids = keras.Input([6], dtype="int64")
    model = keras.Model(ids, layers.Dense(1)(Tower(inside)(ids)))
    model.compile("sgd", "mse")
    return model


@case("keras.remat after a table")
def after_a_table(job):
    job.trains_as_fit(lambda: tower("layer"), (_IDS, examples()[1]))


@case("keras.remat of a table", refused="keras.remat")
def of_a_table(job):
    job.trains_as_fit(lambda: tower("table"), (_IDS, examples()[1]))


@ops.custom_gradient
def half_gradient(x):
    def grad(*args, upstream=None):
        return 0.5 * (args[0] if upstream is None else upstream)

    return x, grad


class Scaled(layers.Layer):
    """A weight whose gradient is not what TensorFlow would compute."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        @tf.custom_gradient
        def scaled(x):
            scale = tf.convert_to_tensor(self.scale)

            def grad(upstream, variables=None):
                of_scale = 0.5 * tf.reduce_sum(upstream * x, 0)
                return upstream * scale, [of_scale for _ in variables]

            return x * scale, grad

        return half_gradient(scaled(x))


@case("custom gradients")
def custom_gradients(job):
    job.trains_as_fit(lambda: compiled(Scaled(), layers.Dense(1)))


class Looped(layers.Layer):
    """Weights that a loop, a condition and a map read."""

    def build(self, shape):
        self.scales = [
            self.add_weight(shape=shape[1:], initializer="ones")
            for _ in range(3)
        ]

    def call(self, x):
        first, second, third = self.scales
        x = ops.while_loop(
            lambda i, x: i < 3,
            lambda i, x: (i + 1, ops.tanh(x * first)),
            (0, x),
        )[1]
        x = ops.cond(ops.sum(x) > 1e9, lambda: x, lambda: 2 * x * second)
        steps = ops.transpose(ops.map(lambda row: row * third, x))
        start = ops.zeros_like(steps[0])
        sums = ops.scan(lambda sum, t: (sum + t, sum), start, steps)[1]
        return ops.transpose(sums)


@case("loops, conditions and maps")
def loops(job):
    job.trains_as_fit(lambda: compiled(Looped(), layers.Dense(1)))


class Decorated(layers.Layer):
    """A `tf.function` of its own, which keeps what it was traced with."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(5, "tanh")

    def build(self, shape):
        self.dense.build(shape)

    @tf.function
    def inner(self, x):
        return self.dense(x)

    def call(self, x):
        return self.inner(x)


class DecoratedModel(keras.Model):
    """Another, around all of it."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    @tf.function
    def call(self, x):
        return self.dense(x)


@case("a tf.function of a layer", refused="tf.function")
def function_of_a_layer(job):
    job.trains_as_fit(lambda: compiled(Decorated(), layers.Dense(1)))


@case("a tf.function of a model", refused="tf.function")
def function_of_a_model(job):
    trains_as_fit(job, DecoratedModel)


@case("a tf.function of tensors")
def function_of_tensors(job):
    @tf.function
    def loss(y, y_pred):
        return tf.reduce_mean((y - y_pred) ** 2, -1)

    job.trains_as_fit(lambda: compiled(layers.Dense(1), loss=loss))


class GradientInLoss(keras.Model):
    """Its loss depends on the gradient by its inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(5, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y_pred = self(x)
        norm = ops.mean(tape.gradient(y_pred, x) ** 2)
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * norm


@case("a gradient in the loss")
def gradient_in_the_loss(job):
    trains_as_fit(job, GradientInLoss)


class GradientByWeights(GradientInLoss):
    """By its weights: they shall be where the loss is flat."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            loss = keras.Model.compute_loss(self, x, y, self(x))
        found = tape.gradient(loss, self.trainable_variables)
        return loss + 0.1 * sum(ops.sum(g**2) for g in found)


_NO_HANDLE = "handle is not available outside the replica context"


@case(
    "a gradient by weights in the loss",
    refused=dict.fromkeys(("mirrored", "all-reduce"), _NO_HANDLE),
)
def gradient_by_weights(job):
    trains_as_fit(job, GradientByWeights, rtol=1e-3)

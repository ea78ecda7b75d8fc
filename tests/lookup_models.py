"""Random small models that look up tables wherever a loss is computed.

Each is built twice from the same random seed: with
`tfdist.PartitionedEmbedding`s, and with Keras' `Embedding`s, for `fit`.
"""

import keras
import numpy as np
import tensorflow as tf

from tfdist import PartitionedEmbedding
from tfdist._tf.private_keras import reset_object_names

ROWS, BATCH, STEPS, FEATURES = 11, 6, 20, 3
PLACES = ("call", "add_loss", "compute_loss", "compute_metrics")
KINDS = ("x", "y", "repeated", "drawn", "positions")


class Densely:
    """Gradients of a repeated id are summed up before the optimizer's rule."""

    def apply(self, grads, trainable_variables=None):
        grads = [g if g is None else tf.convert_to_tensor(g) for g in grads]
        super().apply(grads, trainable_variables)


class DenselySGD(Densely, keras.optimizers.SGD):
    pass


class DenselyAdagrad(Densely, keras.optimizers.Adagrad):
    pass


RULES = {
    "sgd": (keras.optimizers.SGD, DenselySGD),
    "adagrad": (keras.optimizers.Adagrad, DenselyAdagrad),
}


class Regularizer(keras.layers.Layer):
    """A layer that adds a loss of rows which it looks up itself."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def call(self, hidden, ids):
        rows = self.table(ids)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(rows - 1.0)))
        return hidden


class Retrieval(keras.Model):
    """`plan`: `(place, table, kind of ids)` of each lookup."""

    def __init__(self, tables, plan, softmax):
        super().__init__()
        self.tables, self.plan, self.softmax = tables, plan, softmax
        self.project = keras.layers.Dense(tables[0].output_dim)
        self.regularizers = [
            Regularizer(tables[t])
            for where, t, _ in plan
            if where == "add_loss"
        ]
        self.seen = keras.metrics.Mean(name="seen")

    def ids(self, kind, x, y=None, like=None):
        ids = x["ids"] if y is None or kind == "x" else y["ids"]
        if kind == "repeated":
            return keras.ops.concatenate([ids, ids[:, :1]], axis=1)
        if kind == "drawn":
            seed = tf.stack([tf.reduce_sum(ids), 7])
            return tf.random.stateless_uniform(
                [4], seed, 0, ROWS, dtype=tf.int64
            )
        if kind == "positions":
            return keras.ops.arange(keras.ops.shape(like)[0]) % ROWS
        return ids

    def call(self, x):
        hidden = self.project(x["features"])
        layers = iter(self.regularizers)
        for where, table, kind in self.plan:
            if where == "call":
                rows = self.tables[table](self.ids(kind, x, like=hidden))
                each = (
                    range(1, len(rows.shape)) if len(rows.shape) == 3 else None
                )
                shift = keras.ops.mean(rows, axis=each, keepdims=True)
                hidden += keras.ops.reshape(shift, [-1, 1])
            elif where == "add_loss":
                ids = self.ids(kind, x, like=hidden)
                hidden = next(layers)(hidden, ids)
        return hidden

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        loss = super().compute_loss(x, y["target"], y_pred, sample_weight)
        for where, table, kind in self.plan:
            if where == "compute_loss":
                rows = self.tables[table](self.ids(kind, x, y, y_pred))
                scores = keras.ops.sum(keras.ops.tanh(rows), axis=-1)
                if len(scores.shape) == 2:  # Ids of each example.
                    scores = keras.ops.mean(scores, axis=-1)
                    scores *= keras.ops.mean(y_pred, axis=-1)
                    loss += keras.ops.mean(scores)
                else:
                    loss += keras.ops.mean(scores) * keras.ops.mean(y_pred)
                loss += 0.1 * keras.ops.mean(keras.ops.square(scores - 0.5))
        if self.softmax is not None:
            items = self.tables[self.softmax](y["ids"][:, 0])
            items = items[:, : y_pred.shape[-1]]
            width = items.shape[-1]
            logits = y_pred[:, :width] @ keras.ops.transpose(items)
            labels = keras.ops.arange(keras.ops.shape(y_pred)[0])
            loss += keras.ops.mean(
                keras.losses.sparse_categorical_crossentropy(
                    labels, logits, from_logits=True
                )
            )
        return loss

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        for where, table, kind in self.plan:
            if where == "compute_metrics":
                ids = self.ids(kind, x, y, y_pred)
                self.seen.update_state(self.tables[table](ids))
        return super().compute_metrics(x, y["target"], y_pred, sample_weight)


def drawn(number):
    """What the model of a number is like.

    The losses of negative ones are means over examples, as they must be for
    replicas to learn what one device does.
    """
    kinds = KINDS if number >= 0 else ("x", "y", "repeated")
    number = abs(number)
    rng = np.random.default_rng(number)
    tables = int(rng.integers(1, 4))
    plan = [
        (
            str(rng.choice(PLACES)),
            int(rng.integers(tables)),
            str(rng.choice(kinds)),
        )
        for _ in range(rng.integers(1, 6))
    ]
    softmax = int(rng.integers(tables)) if rng.random() < 0.5 else None
    # A gradient for every table: Keras warns where there is none.
    plan += [("compute_loss", t, "y") for t in range(tables)]
    return {
        "widths": [int(rng.choice([2, 3])) for _ in range(tables)],
        "shards": [int(rng.integers(1, 4)) for _ in range(tables)],
        "plan": [plan[i] for i in rng.permutation(len(plan))],
        "softmax": softmax if kinds is KINDS else None,
        "rule": str(rng.choice(list(RULES))),
        "drop_remainder": bool(rng.random() < 0.5),
    }


def made(number, ours):
    """The compiled model of a number, with known weights."""
    reset_object_names()
    like = drawn(number)
    rng = np.random.default_rng(abs(number) + 1)
    tables = []
    for i, (width, shards) in enumerate(
        zip(like["widths"], like["shards"], strict=True)
    ):
        if ours:
            table = PartitionedEmbedding(ROWS, width, shards, name=f"table_{i}")
        else:
            table = keras.layers.Embedding(ROWS, width, name=f"table_{i}")
        table.build((None,))
        table.set_weights([rng.normal(size=[ROWS, width])])
        tables.append(table)
    model = Retrieval(tables, like["plan"], like["softmax"])
    model.project.build((None, FEATURES))
    model.project.kernel.assign(
        rng.normal(size=model.project.kernel.shape) * 0.3
    )
    for layer in model.regularizers:
        layer.built = True
    model.built = True
    model.compile(RULES[like["rule"]][0 if ours else 1](0.1), "mse")
    return model


def dataset(number):
    """As many batches as there are steps, all different."""
    rng = np.random.default_rng(abs(number) + 2)
    like, size = drawn(number), STEPS * BATCH
    data = (
        {
            "features": rng.normal(size=[size, FEATURES]).astype("float32"),
            "ids": rng.integers(0, ROWS, [size, 2]),
        },
        {
            "target": rng.normal(size=[size, like["widths"][0]]).astype(
                "float32"
            ),
            "ids": rng.integers(0, ROWS, [size, 3]),
        },
    )
    batches = tf.data.Dataset.from_tensor_slices(data)
    return batches.batch(BATCH, drop_remainder=like["drop_remainder"])


def weights(model):
    """Every table in one piece, and the dense layer."""
    tables = [t.get_weights()[0] for t in model.tables]
    return [*tables, model.project.kernel.numpy(), model.project.bias.numpy()]


def fitted(number):
    """The model after Keras' own `fit`."""
    model = made(number, ours=False)
    model.run_eagerly = True
    model.fit(dataset(number), verbose=0, shuffle=False)
    return model

"""Random programs train as with Keras' `fit`.

They combine options: tables of all kinds with layers, losses, optimizers and
runs that resume from a checkpoint.
"""

import contextlib
import random
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import EachStep, case, seeded
from tests.cases.optimizers import OPTIMIZERS, ROWS, assert_state_is_that_of

L, K = keras.layers, keras.optimizers
FEW = 6


class Program:
    """What a seed draws."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        one = self.draw.choice
        self.tables = [self.table() for _ in range(one([0, 1, 2, 3]))]
        self.layers = [self.layer() for _ in range(one([0, 1, 2]))]
        self.losses = [
            one(["binary_crossentropy", "mse", "huber", "poisson"])
            for _ in range(one([1, 1, 2]))
        ]
        self.loss_weights = [self.draw.uniform(0.2, 2) for _ in self.losses]
        self.is_weighted, self.is_nested = one([0, 1]), one([0, 1])
        self.optimizer = OPTIMIZERS[one(self.optimizers())]
        self.each_alone, self.in_two_runs = one([0, 1]), one([0, 1])
        self.steps, self.batches = one([4, 5, 6]), self.examples(seed)

    def optimizers(self):
        """Names of those that differ in nothing that is known from Keras'."""
        # One of tables counts no updates in `fit` where all are frozen.
        trained = any(
            table["is_trained"] and table["kind"] == "partitioned"
            for table in self.tables
        )
        # The norm of a table's shard is another than that of the table.
        return [
            name
            for name in OPTIMIZERS
            if (trained or "Multi" not in name)
            and "clipnorm" not in name.split()
        ]

    def table(self):
        """A table, of which each batch has every row as often."""
        one = self.draw.choice
        combiner = one([None, "mean", "sum", "sqrtn"])
        return {
            "kind": one(["partitioned", "partitioned", "plain"]),
            "dim": one([1, 2]),
            "length": one([1, 2]),
            "shares": one([0, 0, 0, 1]),
            "is_trained": one([0, 1, 1, 1, 1]),
            "options": {
                "combiner": combiner,
                "num_shards": one([1, 2, 3]),
                "partition_strategy": one(["balanced", "div"]),
                "embeddings_regularizer": one([None, None, "l2"]),
                "embeddings_constraint": one([None, None, "non_neg"]),
            },
        }

    def layer(self):
        one = self.draw.choice
        norm = one([None, "LayerNormalization", "BatchNormalization"])
        options = {"synchronized": True} if norm and norm[0] == "B" else {}
        dense = {
            "units": one([2, 3]),
            "activation": one(["tanh", "gelu", "linear"]),
            "use_bias": one([False, True]),
            "kernel_regularizer": one([None, "l2"]),
            "activity_regularizer": one([None, None, "l2"]),
            "kernel_constraint": one([None, None, "max_norm"]),
        }
        return dense, norm, options, one([0, 1, 1, 1])

    def examples(self, seed):
        """Five batches: features, labels and perhaps weights."""
        drawn = np.random.default_rng(seed)
        x = {"x": drawn.normal(size=[5, ROWS, 4]).astype("float32")}
        for i, table in enumerate(self.tables):
            shape = 5, table["length"], ROWS
            ids = drawn.permuted(
                np.broadcast_to(np.arange(ROWS), shape), axis=-1
            )
            x[f"ids{i}"] = ids.swapaxes(1, 2)
        y = (x["x"].sum(-1, keepdims=True) > 0).astype("float32")
        weights = drawn.uniform(0, 2, [5, ROWS]).astype("float32")
        every = [y, weights] if self.is_weighted else [y]
        if len(self.losses) > 1:
            every = [{"out0": each, "out1": each[:, ::-1]} for each in every]
        return (x, *every)

    def once(self):
        return tf.data.Dataset.from_tensor_slices(self.batches)

    def input_fn(self, skip):
        return self.once().repeat().skip(skip)

    def rows(self, i, inputs):
        """Of table `i`, flat."""
        table = self.tables[i]
        own = inputs[f"ids{i}"]
        if table["kind"] == "plain":
            layer = L.Embedding(ROWS, table["dim"], name=f"table{i}")
        else:
            layer = tfdist.PartitionedEmbedding(
                ROWS, table["dim"], name=f"table{i}", **table["options"]
            )
        rows = L.Flatten()(layer(own))
        if table["shares"]:
            rows = L.Multiply()([rows, L.Flatten()(layer(own))])
        layer.trainable = bool(table["is_trained"])
        return rows

    def model(self):
        lengths = {"x": 4}
        lengths |= {f"ids{i}": t["length"] for i, t in enumerate(self.tables)}
        inputs = {
            name: keras.Input(
                [length], dtype="float32" if name == "x" else "int64", name=name
            )
            for name, length in lengths.items()
        }
        rows = [self.rows(i, inputs) for i in range(len(self.tables))]
        hidden = L.Concatenate()([inputs["x"], *rows]) if rows else inputs["x"]
        for i, (options, norm, own, is_trained) in enumerate(self.layers):
            dense = L.Dense(name=f"hidden{i}", **options)
            hidden = dense(hidden)
            dense.trainable = bool(is_trained)
            if norm:
                hidden = getattr(L, norm)(name=f"norm{i}", **own)(hidden)
        outputs = {
            f"out{i}": L.Dense(1, "sigmoid", name=f"out{i}")(hidden)
            for i in range(len(self.losses))
        }
        made = outputs if len(outputs) > 1 else outputs["out0"]
        model = keras.Model(inputs, made)
        if self.is_nested:
            again = {
                name: keras.Input(x.shape[1:], dtype=x.dtype, name=name)
                for name, x in inputs.items()
            }
            model = keras.Model(again, model(again))
        losses = dict(zip(outputs, self.losses, strict=True))
        weights = dict(zip(outputs, self.loss_weights, strict=True))
        if len(outputs) == 1:
            losses, weights = losses["out0"], None
        model.compile(self.optimizer(), losses, loss_weights=weights)
        return model


@contextlib.contextmanager
def dense_gradients():
    """Keras' sparse rules count some duplicates otherwise than their sum."""
    apply = K.Optimizer.apply

    def dense(self, gradients, *args, **kwargs):
        found = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return apply(self, found, *args, **kwargs)

    with mock.patch.object(K.Optimizer, "apply", dense):
        yield


def check(seed, job):
    """Compares weights, slots and counters."""
    program = Program(seed)
    if job.strategy == "ps":  # Each worker begins with the first batch.
        program.each_alone = True
        program.batches = keras.tree.map_structure(
            lambda each: each[:1], program.batches
        )
    model, first = seeded(program.model), 0
    half = [program.steps // 2] if program.in_two_runs else []
    for stop in [*half, program.steps]:
        estimator = job.estimator(program.model)
        estimator.train(
            lambda: program.input_fn(first),  # noqa: B023
            hooks=[EachStep()] if program.each_alone else [],
            max_steps=stop,
        )
        if job.is_chief:
            with dense_gradients():
                model.fit(
                    program.input_fn(first),
                    steps_per_epoch=stop - first,
                    verbose=0,
                )
        first = stop
    if job.is_chief:
        assert_state_is_that_of(estimator, model, rtol=2e-4, atol=5e-5)
        wanted = model.evaluate(program.once(), verbose=0, return_dict=True)
        found = estimator.evaluate(program.once)
        for name, value in wanted.items():
            np.testing.assert_allclose(
                found[name], value, rtol=1e-3, err_msg=name
            )


def _add(seed):
    @case(f"program {seed}")
    def run(job):
        check(seed, job)


for _seed in range(FEW):
    _add(_seed)

"""Trains wide and deep in one `tf.function`, written by hand for speed.

    python -m benchmarks.contenders.wide_and_deep_by_hand JSON

What an expert would write for one process, and so a limit for any library: ten
steps in a function, each row read once, gradients of equal ids summed, and
TensorFlow's own sparse updates of rows and slots.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys

import keras
import tensorflow as tf

from benchmarks import clicks, counters

_UNROLLED = 10
_SLOT = 0.1  # The initial accumulator of Adagrad and Ftrl.

# A variable and its slots: one for Adagrad, two for Ftrl.
Trained = list[tf.Variable]


class WideAndDeep:
    """The model, and the steps that train it.

    Args:
        rows: Buckets of a feature.
    """

    def __init__(self, rows: int) -> None:
        width, columns = clicks.DIM, len(clicks.FEATURES)
        self._deep: list[Trained] = []
        self._wide: list[Trained] = []
        for _ in range(columns):
            spread = tf.random.truncated_normal([rows, width], 0, width**-0.5)
            self._deep.append(_trained(spread, _SLOT))
            self._wide.append(_trained(tf.zeros([rows, 1]), _SLOT, 0.0))
        self._dense: list[Trained] = []
        sizes = [width * columns, *clicks.HIDDEN, 1]
        for inputs, units in itertools.pairwise(sizes):
            limit = (6 / (inputs + units)) ** 0.5
            kernel = tf.random.uniform([inputs, units], -limit, limit)
            self._dense.append(_trained(kernel, _SLOT))
            self._dense.append(_trained(tf.zeros([units]), _SLOT))

    def step(self, ids: dict[str, tf.Tensor], clicked: tf.Tensor) -> tf.Tensor:
        """Trains with a batch; returns its loss."""
        unique = [tf.unique(ids[name]) for name in clicks.FEATURES]
        tables = [*self._deep, *self._wide]
        lookups = [*unique, *unique]
        rows = [
            tf.gather(tf.gather(table, found.y), found.idx)
            for (table, *_), found in zip(tables, lookups, strict=True)
        ]
        weights = [variable.read_value() for variable, *_ in self._dense]
        with tf.GradientTape() as tape:
            tape.watch([*rows, *weights])
            logits = self._logits(rows, weights)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(clicked, logits)
            loss = tf.reduce_mean(losses)
        found = tape.gradient(loss, [*rows, *weights])
        num = len(rows)
        for dense, gradient in zip(self._dense, found[num:], strict=True):
            _dense_adagrad(dense, gradient)
        for table, gradient, lookup in zip(
            tables, found[:num], lookups, strict=True
        ):
            summed = tf.math.unsorted_segment_sum(
                gradient, lookup.idx, tf.size(lookup.y)
            )
            _update_rows(table, summed, lookup.y)
        return loss

    def predict(self, ids: dict[str, tf.Tensor]) -> tf.Tensor:
        """Returns the logits of a batch."""
        rows = [
            tf.gather(table, ids[name])
            for tables in (self._deep, self._wide)
            for (table, *_), name in zip(tables, clicks.FEATURES, strict=True)
        ]
        return self._logits(rows, [variable for variable, *_ in self._dense])

    def _logits(self, rows: list, weights: list) -> tf.Tensor:
        columns = len(clicks.FEATURES)
        values = tf.concat(rows[:columns], 1)
        for i in range(0, len(weights), 2):
            values = tf.nn.bias_add(values @ weights[i], weights[i + 1])
            if i + 2 < len(weights):
                values = tf.nn.relu(values)
        return tf.add_n([values, *rows[columns:]])


def _trained(values: tf.Tensor, *slots: float) -> Trained:
    filled = [tf.fill(values.shape, slot) for slot in slots]
    return [tf.Variable(each) for each in (values, *filled)]


def _dense_adagrad(trained: Trained, gradient: tf.Tensor) -> None:
    variable, accumulator = trained
    tf.raw_ops.ResourceApplyAdagradV2(
        var=variable.handle,
        accum=accumulator.handle,
        lr=clicks.DEEP_RATE,
        epsilon=0.0,
        grad=gradient,
    )


def _update_rows(table: Trained, grad: tf.Tensor, indices: tf.Tensor) -> None:
    var, accum, *linear = (variable.handle for variable in table)
    if linear:
        tf.raw_ops.ResourceSparseApplyFtrlV2(
            var=var,
            accum=accum,
            linear=linear[0],
            grad=grad,
            indices=indices,
            lr=clicks.WIDE_RATE,
            l1=0.0,
            l2=0.0,
            l2_shrinkage=0.0,
            lr_power=-0.5,
        )
    else:
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=var,
            accum=accum,
            lr=clicks.DEEP_RATE,
            epsilon=0.0,
            grad=grad,
            indices=indices,
        )


def main() -> None:
    """Measures the steps and writes the results."""
    case = json.loads(sys.argv[1])
    tf.random.set_seed(case["seed"])
    model = WideAndDeep(case["rows"])
    batches = iter(clicks.train(case["data"]))

    @tf.function
    def train() -> tf.Tensor:
        return tf.add_n([model.step(*next(batches)) for _ in range(_UNROLLED)])

    for _ in range(0, case["warm"], _UNROLLED):
        train()
    before, steps = counters.usage(), 0
    while steps < case["steps"]:
        train()
        steps += _UNROLLED
    result = counters.difference(before, counters.usage(), steps)
    auc = keras.metrics.AUC(from_logits=True)
    for ids, clicked in clicks.evaluation(case["data"]):
        auc.update_state(clicked, model.predict(ids))
    result["auc"] = float(auc.result())
    pathlib.Path(case["output"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

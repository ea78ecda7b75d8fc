"""Exercises of lesson 12, migrating a TF1 job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from exercises import Exercise

v1 = tf.compat.v1


def is_as_adam_of_tf1(optimizer: keras.Optimizer) -> bool:
    """Exercise 1, compared with TF1's for tiny gradients, no two alike."""
    gradients = 1e-7, -3e-7, 2e-7
    with tf.Graph().as_default(), v1.Session() as session:
        w = v1.get_variable("w", initializer=1.0)
        slope = v1.placeholder(tf.float32, [])
        train = v1.train.AdamOptimizer(0.01).minimize(slope * w)
        session.run(v1.global_variables_initializer())
        for gradient in gradients:
            session.run(train, {slope: gradient})
        expected = session.run(w)
    copy = optimizer.from_config(optimizer.get_config())
    w = keras.Variable(1.0)
    for gradient in gradients:
        copy.apply([tf.constant(gradient)], [w])
    return bool(np.isclose(w.numpy(), expected, rtol=0, atol=1e-5))


def makes_shards(function: Callable[..., Any]) -> bool:
    """Exercise 2, compared with the layer's own slices."""
    table = np.arange(22.0).reshape(11, 2)
    for num_shards in 1, 2, 3, 4:
        layer = tfdist.PartitionedEmbedding(
            11, 2, num_shards=num_shards, partition_strategy="div"
        )
        wanted = [table[start : start + rows] for start, rows in layer.slices]
        found = list(function(table, num_shards))
        if len(found) != len(wanted):
            return False
        if not all(map(np.array_equal, found, wanted)):
            return False
    return True


def computes_the_same(function: Callable[[], keras.Model]) -> bool:
    """Exercise 3, compared with NumPy."""
    model = function()
    weights = [np.sin(np.arange(n)) for n in (8, 4, 12, 3)]
    shapes = (2, 4), (4,), (4, 3), (3,)
    k1, b1, k2, b2 = map(np.reshape, weights, shapes)
    x, y = np.array([[1.0, -2.0], [0.5, 3.0]]), np.array([2, 0])
    features = {"x": tf.constant(x, tf.float32)}
    model(features)  # Which builds it, if it is not.
    model.set_weights([k1, b1, k2, b2])
    logits = np.tanh(x @ k1 + b1) @ k2 + b2
    loss = np.log(np.exp(logits).sum(1)) - logits[[0, 1], y]
    outputs = model(features)
    found = float(model.compute_loss(y=tf.constant(y), y_pred=outputs))
    rate = float(model.optimizer.learning_rate)
    return np.allclose(outputs, logits, rtol=1e-4) and np.allclose(
        [found, rate], [loss.mean(), 0.1], rtol=1e-4
    )


def of_three_workers(found: dict[str, Any]) -> bool:
    """Exercise 4: exactly so many steps, and the quality of one process."""
    workers = [task for task in found["codes"] if task.startswith("worker")]
    if len(workers) != 3:
        raise ValueError(f"three workers are asked for; here: {len(workers)}")
    record = found["record"]
    return record["global_step"] == 300 and abs(record["auc"] - 0.88) < 0.05


EXERCISES = {
    1: Exercise(
        (
            "The two libraries have different defaults. Which of them matters "
            "when a gradient is tiny?",
            "Adam divides by the root of a mean of squares plus epsilon. Write "
            "TF1's epsilon out; the table above has it.",
        ),
        is_right=is_as_adam_of_tf1,
    ),
    2: Exercise(
        (
            "11 rows in 3 shards: 4, 4 and 3. Which rows are in the second?",
            "`divmod(rows, num_shards)` says the smaller size and how many "
            "shards have one row more; those come first. Neighbouring rows "
            "stay together.",
        ),
        is_right=makes_shards,
    ),
    3: Exercise(
        (
            "Does the loss know that the model returns logits?",
            "The input is named `x` and has two numbers; the model takes a "
            "dictionary. `SparseCategoricalCrossentropy` has an argument for "
            "logits. Write the learning rate out.",
        ),
        is_right=computes_the_same,
    ),
    4: Exercise(
        (
            "Take the cell of this notebook that starts `jobs/ported.py`; the "
            "number of workers is an argument of the cluster.",
            "Before the cluster is closed read `tasks.exit_codes()`, and "
            "`course.records(tasks.output('chief:0'))`, whose only element is "
            "the record.",
        ),
        is_right=of_three_workers,
    ),
    5: Exercise(
        (
            "By how much do the runs of the old job differ among themselves?",
            "First say what would prove that both compute the same; then what "
            "several seeds of both can show, and what you would tell the "
            "product owner. Write at least 25 words.",
        ),
    ),
}

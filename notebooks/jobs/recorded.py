"""A program with a canned estimator, and what TF 2.15.1 made of it.

`module` is `tf.estimator` or `tfdist`; nothing else differs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

fc = tf.feature_column

# Of `evaluate`, after 24 steps with `tf.estimator`.
METRICS = {
    "accuracy": 0.703125,
    "accuracy_baseline": 0.546875,
    "auc": 0.8965517,
    "auc_precision_recall": 0.924069,
    "average_loss": 0.464804,
    "label/mean": 0.546875,
    "loss": 0.464804,
    "precision": 0.66,
    "prediction/mean": 0.6587359,
    "recall": 0.9428571,
    "global_step": 24,
}


def input_fn(
    size: int, seed: int, epochs: int = 1
) -> Callable[[], tf.data.Dataset]:
    """Numbers, words, ids and bags of words; a label that depends on them."""
    rng = np.random.default_rng(seed)
    tags = rng.choice(["red", "green", "blue", ""], [size, 3])
    x = {
        "age": rng.uniform(10, 60, size).astype("float32"),
        "job": rng.choice(["clerk", "baker", "potter", ""], size),
        "city": rng.choice([f"c{i}" for i in range(40)], size),
        "pair": rng.normal(size=[size, 2]).astype("float32"),
        "floor": rng.integers(0, 12, size),
        "user": rng.integers(0, 1000, size),
        "code": rng.choice([3, 7, -1, 9], size),
        "tags": tags,
        "tag_weights": rng.uniform(0.5, 2, [size, 3]).astype("float32")
        * (tags != ""),
        "w": rng.uniform(0.5, 2, size).astype("float32"),
    }
    score = (x["age"] - 35) / 10 + (x["job"] == "clerk") * 1.5
    score += x["pair"][:, 0] + x["floor"] % 3 - 1 + (tags == "red").sum(1)
    y = (score - 0.7 + rng.normal(size=size) > 0).astype("int64")
    data = tf.data.Dataset.from_tensor_slices((x, y))
    return lambda: data.batch(32).repeat(epochs)


def columns(vocabulary: str) -> list[Any]:
    """All kinds of columns; `vocabulary` is a file of words."""
    raw = fc.numeric_column("age")
    age = fc.numeric_column("age", normalizer_fn=lambda v: (v - 35.0) / 15.0)
    pair = fc.numeric_column("pair", shape=(2,))
    words = fc.categorical_column_with_vocabulary_list
    job = words("job", ["clerk", "baker"])
    city = fc.categorical_column_with_hash_bucket("city", 20)
    user = fc.categorical_column_with_hash_bucket("user", 30, dtype=tf.int64)
    code = words("code", [7, 9], dtype=tf.int64, default_value=0)
    floor = fc.categorical_column_with_identity("floor", 10, default_value=2)
    tags = fc.categorical_column_with_vocabulary_file("tags", vocabulary, 2)
    weighted = fc.weighted_categorical_column(
        fc.categorical_column_with_hash_bucket("tags", 9), "tag_weights"
    )
    ages = fc.bucketized_column(raw, [20.0, 30.0, 40.0, 50.0])
    pairs = fc.bucketized_column(pair, [-1.0, 0.0, 1.0])
    job_x_age = fc.crossed_column([ages, job], 25)
    crosses = [
        job_x_age,
        fc.crossed_column(["city", "job"], 50, hash_key=5),
        fc.crossed_column([floor, pairs, "tags"], 35),
        fc.crossed_column([job_x_age, "city"], 15),
    ]
    linear = [age, pair, job, city, user, code, floor, tags, weighted]
    return [*linear, ages, pairs, fc.indicator_column(user), *crosses]


def estimator(module: Any, vocabulary: str, config: Any) -> Any:
    """Logistic regression over all columns, trained by Ftrl."""
    return module.LinearClassifier(columns(vocabulary), config=config)

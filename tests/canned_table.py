"""A table and all kinds of columns, for TF 2.15.1 and for tfdist.

    <python with tensorflow==2.15.1> tests/canned_table.py > \
tests/canned_golden.json

records what the canned estimators of TF 2.15.1 made of them.
"""

import json
import os
import sys
import tempfile

import numpy as np
import tensorflow as tf

fc = tf.feature_column


def table(size, seed):
    """Features and a number that depends on them."""
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
    return x, score - 0.7 + rng.normal(size=size)


def columns(words_path):
    """Columns of the linear part and of the network."""
    raw = fc.numeric_column("age")
    age = fc.numeric_column("age", normalizer_fn=lambda v: (v - 35.0) / 15.0)
    pair = fc.numeric_column("pair", shape=(2,))
    words = fc.categorical_column_with_vocabulary_list
    job = words("job", ["clerk", "baker"])
    job_or_other = words("job", ["baker"], num_oov_buckets=2)
    city = fc.categorical_column_with_hash_bucket("city", 20)
    user = fc.categorical_column_with_hash_bucket("user", 30, dtype=tf.int64)
    code = words("code", [7, 9], dtype=tf.int64, default_value=0)
    floor = fc.categorical_column_with_identity("floor", 10, default_value=2)
    tags = fc.categorical_column_with_vocabulary_file("tags", words_path, 2)
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
    linear += [ages, pairs, fc.indicator_column(user), *crosses]
    dnn = [
        age,
        pairs,
        fc.indicator_column(job),
        fc.indicator_column(floor),
        fc.indicator_column(weighted),
        fc.embedding_column(city, 2),
        fc.embedding_column(job_or_other, 3, combiner="sqrtn"),
        fc.embedding_column(weighted, 2),
        fc.embedding_column(crosses[2], 2, combiner="sum"),
    ]
    return linear, dnn


def input_fn(labels, size=256, seed=0, sparse=False, epochs=1):
    """Batches of 32; `sparse`: the tags, without those that are missing."""
    x, score = table(size, seed)
    y = {
        "binary": (score > 0).astype("int64"),
        "strings": np.where(score > 0, "yes", "no"),
        "classes": np.digitize(score, [-1, 1]).astype("int64"),
        "numbers": score.astype("float32"),
    }[labels]

    def thinned(x, y):
        if sparse:
            for name in ("tags", "tag_weights"):
                x[name] = tf.sparse.from_dense(x[name])
        return x, y

    def dataset():
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
        return batches.map(thinned).repeat(epochs)

    return dataset


def estimators(module, linear, dnn, options):
    """Name to labels, whether tags are sparse, and a canned estimator."""
    both = {
        "linear_feature_columns": linear,
        "dnn_feature_columns": dnn,
        "dnn_hidden_units": [4, 3],
    }
    return {
        "linear": (
            "binary",
            False,
            module.LinearClassifier(linear, **options("linear")),
        ),
        "linear sparse weighted": (
            "strings",
            True,
            module.LinearClassifier(
                linear,
                weight_column="w",
                label_vocabulary=["no", "yes"],
                optimizer=None,
                loss_reduction="sum",
                sparse_combiner="mean",
                **options("linear sparse weighted"),
            ),
        ),
        "linear classes": (
            "classes",
            False,
            module.LinearClassifier(
                linear,
                n_classes=3,
                optimizer="Adagrad",
                **options("linear classes"),
            ),
        ),
        "linear numbers": (
            "numbers",
            True,
            module.LinearRegressor(
                linear,
                weight_column=fc.numeric_column("w"),
                optimizer="SGD",
                **options("linear numbers"),
            ),
        ),
        "dnn": (
            "binary",
            True,
            module.DNNClassifier(
                [4, 3],
                dnn,
                batch_norm=True,
                activation_fn=tf.nn.elu,
                **options("dnn"),
            ),
        ),
        "dnn numbers": (
            "numbers",
            False,
            module.DNNRegressor(
                [3], dnn, optimizer="SGD", **options("dnn numbers")
            ),
        ),
        "combined": (
            "classes",
            False,
            module.DNNLinearCombinedClassifier(
                n_classes=3, **both, **options("combined")
            ),
        ),
        "combined numbers": (
            "numbers",
            True,
            module.DNNLinearCombinedRegressor(
                dnn_optimizer="Ftrl", **both, **options("combined numbers")
            ),
        ),
    }


def write_words(directory):
    """The vocabulary file."""
    path = os.path.join(directory, "words.txt")
    with open(path, "w") as file:
        file.write("red\nblue\nnever\n")
    return path


def _plain(value):
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray | list):
        return [_plain(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}")
    return int(value) if isinstance(value, np.integer) else value


def _start(model_dir):
    """Weights before the first step, of what is not zero then."""
    path = os.path.join(model_dir, "model.ckpt-0")
    return {
        name: tf.train.load_variable(path, name)
        for name, _ in tf.train.list_variables(path)
        if name.startswith("dnn/")
    }


def _record(directory):
    def options(name):
        path = os.path.join(directory, name)
        run = tf.estimator.RunConfig(path, tf_random_seed=1)
        return {"config": run}

    linear, dnn = columns(write_words(directory))
    golden = {}
    for name, (labels, sparse, estimator) in estimators(
        tf.estimator, linear, dnn, options
    ).items():
        estimator.train(input_fn(labels, sparse=sparse, epochs=3))
        test = input_fn(labels, 64, seed=9, sparse=sparse)
        golden[name] = {
            "start": _start(estimator.model_dir),
            "metrics": estimator.evaluate(test),
            "predictions": list(estimator.predict(test))[:4],
        }
    return golden


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        json.dump(_plain(_record(made)), sys.stdout)

"""Compares a wide-and-deep model in tfdist and in TF 2.15.1's Estimator.

    python -m benchmarks.canned --data=DIRECTORY --peer=PYTHON

PYTHON is an interpreter with `tensorflow==2.15.1` (`python3.11 -m venv peer;
peer/bin/pip install tensorflow==2.15.1`); DIRECTORY holds `train.csv` and
`eval.csv` of the UCI census income data, with a header line. Both models have
the same columns, sizes, optimizers, batches and steps. Prints, for each seed,
the AUC of TF 2.15.1 in one process, of tfdist in one process, and of tfdist on
a cluster of two parameter servers and two workers; then the mean of each, and
the largest difference from TF 2.15.1.

Each training runs this file in a new process, with either interpreter.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

NUMBERS = {
    "age": (38.6, 13.6),
    "education_num": (10.1, 2.6),
    "capital_gain": (1077.0, 7385.0),
    "capital_loss": (87.0, 403.0),
    "hours_per_week": (40.4, 12.3),
}
WORDS = {
    "workclass": 20,
    "education": 40,
    "marital_status": 20,
    "occupation": 40,
    "relationship": 20,
    "race": 20,
    "sex": 10,
    "native_country": 100,
}
LABEL = "income"
BATCH, STEPS = 128, 3000


def read(path: str) -> tuple[dict[str, Any], Any]:
    """Returns a dict of feature columns, and the labels."""
    import numpy as np

    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    header = [name.strip().lower().replace("-", "_") for name in rows[0]]
    columns = dict(zip(header, zip(*rows[1:], strict=True), strict=True))
    features = {name: np.array(columns[name], "float32") for name in NUMBERS}
    features |= {name: np.array(columns[name]) for name in WORDS}
    labels = np.array([">50K" in value for value in columns[LABEL]], "int64")
    return features, labels


def feature_columns() -> tuple[list, list]:
    """Returns the feature columns of the wide and of the deep part."""
    import tensorflow as tf

    fc = tf.feature_column

    def normalized(name: str) -> Any:
        mean, stddev = NUMBERS[name]
        return fc.numeric_column(
            name, normalizer_fn=lambda v: (v - mean) / stddev
        )

    ages = fc.bucketized_column(
        fc.numeric_column("age"), [18, 25, 30, 35, 40, 45, 50, 55, 60, 65]
    )
    words = [
        fc.categorical_column_with_hash_bucket(name, size)
        for name, size in WORDS.items()
    ]
    crosses = [
        fc.crossed_column(["education", "occupation"], 1000),
        fc.crossed_column(["native_country", "occupation"], 1000),
        fc.crossed_column([ages, "education", "occupation"], 10000),
    ]
    numbers = [normalized(name) for name in NUMBERS]
    deep = numbers + [fc.embedding_column(word, 8) for word in words]
    return [ages, *words, *crosses], deep


def train(library: str, data: str, model_dir: str, seed: int) -> None:
    """Trains and evaluates; writes the metrics to `<model_dir>/result`."""
    import tensorflow as tf

    if library == "tfdist":
        import keras

        import tfdist
        from tfdist.canned import estimators

        optimizers, config = keras.optimizers, tfdist.RunConfig
        module, run = estimators, tfdist
    else:
        optimizers = tf.keras.optimizers.legacy
        module = run = tf.estimator
        config = run.RunConfig
    linear, deep = feature_columns()
    estimator = module.DNNLinearCombinedClassifier(
        linear_feature_columns=linear,
        linear_optimizer=optimizers.Ftrl(0.1),
        dnn_feature_columns=deep,
        dnn_optimizer=optimizers.Adagrad(0.05),
        dnn_hidden_units=[64, 32],
        config=config(model_dir, tf_random_seed=seed),
    )

    def train_input_fn() -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(
            read(os.path.join(data, "train.csv"))
        )
        return dataset.shuffle(30_000, seed).repeat().batch(BATCH)

    def eval_input_fn() -> tf.data.Dataset:
        features, labels = read(os.path.join(data, "eval.csv"))
        dataset = tf.data.Dataset.from_tensor_slices((features, labels))
        return dataset.batch(512)

    metrics, _ = run.train_and_evaluate(
        estimator,
        run.TrainSpec(train_input_fn, max_steps=STEPS),
        run.EvalSpec(eval_input_fn, steps=None),
    )
    if metrics is not None:
        plain = {name: float(value) for name, value in metrics.items()}
        with open(os.path.join(model_dir, "result"), "w") as file:
            json.dump(plain, file)


def auc(command: Sequence[str], library: str, data: str, seed: int) -> float:
    """Trains a model in a new process and returns its AUC."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--train", library, "--data", data, "--seed", str(seed)]
        subprocess.run(
            [*command, *options, "--model_dir", directory],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            timeout=1200,
        )
        with open(os.path.join(directory, "result")) as file:
            return json.load(file)["auc"]


def main() -> None:
    """Runs all trainings or, in a process started by this program, one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--peer")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--train", help="set in child processes only")
    parser.add_argument("--model_dir")
    parser.add_argument("--seed", type=int)
    flags = parser.parse_args()
    if flags.train:
        train(flags.train, flags.data, flags.model_dir, flags.seed)
        return
    task = ["-m", "benchmarks.canned"]
    launch = ["-m", "tfdist.launch", "--ps=2", "--workers=2"]
    runs = {
        "TF 2.15.1": ([flags.peer, os.path.abspath(__file__)], "estimator"),
        "tfdist": ([sys.executable, *task], "tfdist"),
        "tfdist, cluster": ([sys.executable, *launch, *task], "tfdist"),
    }
    results = {name: [] for name in runs}
    for seed in range(1, flags.seeds + 1):
        for name, (command, library) in runs.items():
            results[name].append(auc(command, library, flags.data, seed))
            print(f"seed {seed}, {name}: AUC {results[name][-1]:.4f}")
    reference = results["TF 2.15.1"]
    for name, values in results.items():
        pairs = zip(values, reference, strict=True)
        worst = max(abs(a - b) for a, b in pairs)
        mean = sum(values) / len(values)
        print(f"{name}: mean {mean:.4f}, largest difference {worst:.4f}")


if __name__ == "__main__":
    main()

"""Your own table: CSV files, Keras' preprocessing layers, a large embedding.

The constants name the columns. Without files, it generates 5,000 products.
"""

import argparse

import keras
import numpy as np

import tfdist
from tfdist.data import FeatureStatistics, compute_once, read_csv

LABEL, NUMBERS = "bought", ["age", "price"]
WORDS = {"city": 1_000, "product": 100_000}  # Number of hash buckets.
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--train_files", help="a path or pattern")
parser.add_argument("--eval_files", help="the same")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--model_dir", default="runs/own_table")
args = parser.parse_args()


def write(path, size, seed):
    """Writes sales; the worth of a product is the same in every file."""
    worth, rng = np.random.default_rng(0), np.random.default_rng(seed)
    age, price = rng.integers(18, 80, size), rng.gamma(2, 10, size)
    city, product = rng.integers(3, size=size), rng.integers(5000, size=size)
    gain = 2 * worth.normal(size=5000)[product] + city - (age + price) / 30
    bought = np.where(gain > rng.logistic(size=size), 1, 0)
    city, product = np.char.mod("c%d", city), np.char.mod("p%d", product)
    table = np.stack([age, price, city, product, bought], axis=1)
    header = "age,price,city,product,bought"
    np.savetxt(path, table, "%s", ",", header=header, comments="")
    return path


def look():
    """Returns the files, and the mean and variance of their numbers."""
    train = args.train_files or write(f"{args.model_dir}/train.csv", 100_000, 1)
    test = args.eval_files or write(f"{args.model_dir}/eval.csv", 10_000, 2)
    seen = FeatureStatistics()
    for batch in read_csv(train, 4096, select_columns=NUMBERS, num_epochs=1):
        seen.add(batch)
    scales = {name: [seen[name].mean, seen[name].variance] for name in NUMBERS}
    return {"train": train, "test": test, **scales}


def known():  # The chief computes this, and the other tasks read the result.
    return compute_once(f"{args.model_dir}/known.json", look)


def csv(which, **options):
    return read_csv(known()[which], 128, label_name=LABEL, **options)


def model_fn():
    columns, parts = {}, []
    for name in NUMBERS:
        columns[name] = keras.Input([1], name=name)
        scaled = keras.layers.Normalization(None, *known()[name])(columns[name])
        parts.append(keras.ops.nan_to_num(scaled))  # Missing: the mean.
    for name, num_ids in WORDS.items():
        columns[name] = keras.Input([1], name=name, dtype="string")
        table = tfdist.PartitionedEmbedding(num_ids, 8, 2, combiner="sum")
        parts.append(table(keras.layers.Hashing(num_ids)(columns[name])))
    hidden = keras.layers.Dense(32, "relu")(keras.layers.concatenate(parts))
    model = keras.Model(columns, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile("adam", "binary_crossentropy", metrics=["auc"])
    return model


export = tfdist.FinalExporter("serving")
metrics, exports = tfdist.train_and_evaluate(
    tfdist.Estimator(model_fn, tfdist.RunConfig(args.model_dir)),
    tfdist.TrainSpec(lambda context: csv("train", context=context), args.steps),
    tfdist.EvalSpec(lambda: csv("test", num_epochs=1), None, exporters=export),
)
if metrics:  # Only in the task that evaluates.
    print(f"AUC {metrics['auc']:.3f}; exported to {exports[0]}")

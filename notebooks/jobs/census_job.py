"""A classifier of the census data: the same program alone and on a cluster.

Usage: census_job.py MODEL_DIR TRAIN_FILES EVAL_FILES, as every task.
"""

import logging
import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfdist

BATCH, STEPS = 128, 1200
# Mean and standard deviation, for the network.
NUMBERS = {
    "age": (38.6, 13.7),
    "education_num": (10.1, 2.6),
    "hours_per_week": (40.4, 12.3),
    "capital_gain": (1092.0, 7483.0),
    "capital_loss": (87.0, 402.0),
}
WORDS = {"workclass": 20, "marital_status": 20, "relationship": 20}
PAIRED = {"education": 60, "occupation": 60, "native_country": 100}
COLUMNS = (*NUMBERS, *WORDS, *PAIRED)


def input_fn(
    pattern: str,
    context: tf.distribute.InputContext | None = None,
    batch_size: int = BATCH,
    **options: Any,
) -> tf.data.Dataset:
    """Shuffled batches without end; other examples for each worker."""
    rows = tfdist.data.read_csv(
        pattern,
        batch_size,
        label_name="income",
        select_columns=[*COLUMNS, "income"],
        context=context,
        **options,
    )
    return rows.map(with_label)


def eval_input_fn(pattern: str) -> tf.data.Dataset:
    """Every row once, in order."""
    return input_fn(pattern, batch_size=1000, shuffle=False, num_epochs=1)


def with_label(features: dict, income: tf.Tensor) -> tuple[dict, tf.Tensor]:
    """Numbers as float32; the label is 1 for over 50K."""
    numbers = {name: tf.cast(features[name], tf.float32) for name in NUMBERS}
    return features | numbers, tf.cast(income == ">50K", tf.int64)


def wide_columns() -> list:
    """For the linear part: values, and pairs of values, one weight each."""
    fc = tf.feature_column
    words = {
        name: fc.categorical_column_with_hash_bucket(name, buckets)
        for name, buckets in (WORDS | PAIRED).items()
    }
    ages = fc.bucketized_column(
        fc.numeric_column("age"), [25, 30, 35, 40, 45, 50, 55, 60, 65]
    )
    pair = fc.crossed_column(["education", "occupation"], 5000)
    return [ages, *words.values(), pair]


def deep_columns() -> list:
    """For the network: normalized numbers, and embeddings of the words."""
    fc = tf.feature_column

    def number(name: str) -> Any:
        mean, deviation = NUMBERS[name]
        return fc.numeric_column(
            name, normalizer_fn=lambda value: (value - mean) / deviation
        )

    words = [
        fc.embedding_column(
            fc.categorical_column_with_hash_bucket(name, buckets), 4
        )
        for name, buckets in (WORDS | PAIRED).items()
    ]
    return [number(name) for name in NUMBERS] + words


def estimator(kind: str, config: tfdist.RunConfig) -> tfdist.Estimator:
    """A "wide", a "deep", or a "wide and deep" classifier."""
    tf.get_logger().setLevel("ERROR")  # Feature columns are old on purpose.
    wide = {
        "linear_feature_columns": wide_columns(),
        "linear_optimizer": keras.optimizers.Ftrl(0.2),
    }
    deep = {
        "dnn_feature_columns": deep_columns(),
        "dnn_hidden_units": [32, 16],
        "dnn_optimizer": keras.optimizers.Adagrad(0.1),
    }
    if kind == "wide":
        return tfdist.LinearClassifier(
            wide["linear_feature_columns"],
            optimizer=wide["linear_optimizer"],
            config=config,
        )
    if kind == "deep":
        return tfdist.DNNClassifier(
            deep["dnn_hidden_units"],
            deep["dnn_feature_columns"],
            optimizer=deep["dnn_optimizer"],
            config=config,
        )
    return tfdist.DNNLinearCombinedClassifier(**wide, **deep, config=config)


def main(model_dir: str, train_files: str, eval_files: str) -> None:
    """Trains the two parts together, evaluates, and exports at the end."""
    logging.basicConfig(format="%(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    config = tfdist.RunConfig(
        model_dir,
        tf_random_seed=1,
        save_checkpoints_steps=STEPS // 4,
        save_summary_steps=50,
        log_step_count_steps=50,
    )
    classifier = estimator("wide and deep", config)
    tfdist.train_and_evaluate(
        classifier,
        tfdist.TrainSpec(
            lambda context: input_fn(train_files, context), max_steps=STEPS
        ),
        tfdist.EvalSpec(
            lambda: eval_input_fn(eval_files),
            steps=None,
            throttle_secs=0,
            exporters=[tfdist.FinalExporter("serving")],
        ),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

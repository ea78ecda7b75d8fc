"""The job of tf1_estimator.py, ported to tfdist: every task runs this program.

Usage: ported.py MODEL_DIR
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tfdist

USERS, ITEMS, CROSSES, BATCH = 400, 200, 1000, 64


def input_fn(seed: int, batches: int = 300) -> tf.data.Dataset:
    """Who was shown what, and whether they clicked."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, USERS, batches * BATCH)
    item = rng.integers(0, ITEMS, batches * BATCH)
    size = rng.normal(size=[batches * BATCH, 1]).astype("float32")
    score = (
        3 * np.sin(item) + size[:, 0] * np.cos(item) + (user % 7 == item % 7)
    )
    clicked = (score + rng.logistic(size=len(score)) > 0).astype("float32")
    features = {"user": user, "item": item, "size": size}
    dataset = tf.data.Dataset.from_tensor_slices((features, clicked[:, None]))
    return dataset.batch(BATCH)


def logits_of(features: dict[str, keras.KerasTensor]) -> keras.KerasTensor:
    """The deep part and the wide part."""
    table = tfdist.PartitionedEmbedding(ITEMS, 8, num_shards=2, name="deep")
    rows = table(features["item"])
    net = keras.layers.Concatenate()([rows, features["size"]])
    net = keras.layers.Dense(16, "relu", name="hidden")(net)
    deep = keras.layers.Dense(1, name="logits")(net)
    weights = tfdist.PartitionedEmbedding(
        CROSSES, 1, embeddings_initializer="zeros", name="wide"
    )
    cross = (31 * features["user"] + features["item"]) % CROSSES
    return deep + weights(cross)


def optimizer(rate: float = 0.3) -> keras.Optimizer:
    """Another one for each part."""
    deep = keras.optimizers.Adagrad(rate)
    wide = keras.optimizers.Ftrl(0.1)
    return tfdist.MultiOptimizer([("wide", wide), ("", deep)])


def model_fn(rate: float = 0.3) -> keras.Model:
    """No modes: what `EstimatorSpec` held is what `compile` takes."""
    features = {
        "user": keras.Input([], dtype="int64", name="user"),
        "item": keras.Input([], dtype="int64", name="item"),
        "size": keras.Input([1], name="size"),
    }
    probability = keras.ops.sigmoid(logits_of(features))
    model = keras.Model(features, probability)
    model.compile(optimizer(rate), "binary_crossentropy", metrics=["auc"])
    return model


def main(directory: str) -> None:
    """Does this task's part of the job."""
    config = tfdist.RunConfig(
        directory, save_checkpoints_steps=100, log_step_count_steps=None
    )
    metrics, _ = tfdist.train_and_evaluate(
        tfdist.Estimator(model_fn, config),
        tfdist.TrainSpec(lambda: input_fn(1).repeat(), max_steps=300),
        tfdist.EvalSpec(
            lambda: input_fn(2, 50),
            steps=None,
            throttle_secs=0,
            exporters=tfdist.LatestExporter("serving"),
        ),
    )
    if metrics:
        print(json.dumps(metrics), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

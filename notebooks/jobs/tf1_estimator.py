"""A job as it was for TF 1.15 and 2.15: wide and deep, with Estimator.

TF 2.16 removed `tf.estimator`, so that `main` is only to be read. What makes
the graph still runs.
"""

import sys

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1

USERS, ITEMS, CROSSES, BATCH = 400, 200, 1000, 64
FEATURES = {
    "user": tf.io.FixedLenFeature([], tf.int64),
    "item": tf.io.FixedLenFeature([], tf.int64),
    "size": tf.io.FixedLenFeature([1], tf.float32),
}


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


def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    """What `tf.layers.dense` did."""
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [x.shape[1], units])
        bias = v1.get_variable("bias", [units], initializer=tf.zeros)
    return tf.matmul(x, kernel) + bias


def logits_of(features: dict[str, tf.Tensor]) -> tf.Tensor:
    """The deep part and the wide part."""
    split = v1.fixed_size_partitioner(2)
    with v1.variable_scope("deep"):
        table = v1.get_variable("table", [ITEMS, 8], partitioner=split)
        rows = v1.nn.embedding_lookup(table, features["item"], "div")
        net = tf.concat([rows, features["size"]], axis=1)
        net = tf.nn.relu(dense(net, 16, "hidden"))
        deep = dense(net, 1, "logits")
    with v1.variable_scope("wide", initializer=tf.zeros):
        weights = v1.get_variable("weights", [CROSSES, 1])
        cross = (31 * features["user"] + features["item"]) % CROSSES
        wide = v1.nn.embedding_lookup(weights, cross)
    return deep + wide


def train_op_of(loss: tf.Tensor) -> tf.Operation:
    """Another optimizer for each part."""
    deep = v1.train.AdagradOptimizer(0.3)
    wide = v1.train.FtrlOptimizer(0.1)
    return tf.group(
        deep.minimize(loss, var_list=v1.trainable_variables("deep")),
        wide.minimize(loss, var_list=v1.trainable_variables("wide")),
        v1.assign_add(v1.train.get_or_create_global_step(), 1),
    )


def model_fn(features, labels, mode):
    """As `tf.estimator.Estimator` called it, once for each mode."""
    logits = logits_of(features)
    probability = tf.sigmoid(logits)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=probability)
    loss = v1.losses.sigmoid_cross_entropy(labels, logits)
    metrics = {"auc": v1.metrics.auc(labels, probability)}
    return tf.estimator.EstimatorSpec(
        mode,
        loss=loss,
        train_op=train_op_of(loss),
        eval_metric_ops=metrics,
    )


def main(directory: str) -> None:
    """Does this task's part of the job."""
    config = tf.estimator.RunConfig(directory, save_checkpoints_steps=100)
    receiver_fn = tf.estimator.export.build_parsing_serving_input_receiver_fn
    tf.estimator.train_and_evaluate(
        tf.estimator.Estimator(model_fn, config=config),
        tf.estimator.TrainSpec(lambda: input_fn(1).repeat(), max_steps=300),
        tf.estimator.EvalSpec(
            lambda: input_fn(2, 50),
            steps=None,
            throttle_secs=0,
            exporters=tf.estimator.LatestExporter(
                "serving", receiver_fn(FEATURES)
            ),
        ),
    )


if __name__ == "__main__":
    main(sys.argv[1])

"""The program that test_replicas.py runs once per number of replicas.

    python -m tests.replica_checks --replicas=NUM --report=FILE

Prints nothing; leaves weights and metrics for each optimizer in FILE.
"""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist._tf.private_keras import reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.cluster.strategies import local_strategy
from tfdist.placement.scope import placed_scope
from tfdist.training import optimizers
from tfdist.training.loop import LocalLoop
from tfdist.training.replicas import Replicas
from tfdist.training.replicated_loop import ReplicatedLoop
from tfdist.training.step import ModelStep

STEPS = 50
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def model_fn(optimizer):
    """A table, regularization, two outputs, weighted metrics."""
    reset_object_names()
    keras.utils.set_random_seed(1)
    ids = keras.Input([3], dtype="int64", name="ids")
    x = keras.Input([4], name="x")
    rows = tfdist.PartitionedEmbedding(
        20, 5, num_shards=3, embeddings_regularizer="l2"
    )(ids)
    both = keras.layers.Concatenate()([keras.layers.Flatten()(rows), x])
    hidden = keras.layers.Dense(8, "relu", kernel_regularizer="l2")(both)
    click = keras.layers.Dense(1, "sigmoid", name="click")(hidden)
    price = keras.layers.Dense(1, name="price")(hidden)
    model = keras.Model({"ids": ids, "x": x}, {"click": click, "price": price})
    model.compile(
        OPTIMIZERS[optimizer](),
        {"click": "binary_crossentropy", "price": "mse"},
        weighted_metrics={"click": ["auc"], "price": ["mae"]},
    )
    return model


def dataset():
    """Batches of 14, and now and then one of 2: fewer than four replicas."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[100, 4]).astype("float32")
    ids = rng.integers(0, 20, [100, 3])
    y = {
        "click": (x[:, :1] > 0).astype("float32"),
        "price": x[:, 1:2] * 2 + 1,
    }
    weight = rng.uniform(0.5, 2.0, [100]).astype("float32")
    data = ({"ids": ids, "x": x}, y, {"click": weight, "price": weight})
    return tf.data.Dataset.from_tensor_slices(data).batch(14).repeat()


def trained(optimizer, strategy):
    with placed_scope(strategy):
        global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        model = model_fn(optimizer)
        optimizers.build(model.optimizer, model.trainable_variables)
    if strategy.num_replicas_in_sync == 1:
        step = ModelStep(model, dataset().element_spec, global_step=global_step)
        loop = LocalLoop(step, global_step, dataset(), 5)
    else:
        replicas = Replicas(strategy, global_step)
        step = ModelStep(
            model,
            dataset().element_spec,
            global_step=global_step,
            replicas=replicas,
        )
        loop = ReplicatedLoop(
            step,
            global_step,
            dataset(),
            strategy=strategy,
            replicas=replicas,
            steps_per_dispatch=5,
        )
    metrics = loop.run(STEPS)
    named = checkpoints.named_variables(model, global_step)
    values = {
        name: [v.numpy().tolist() for v in getattr(whole, "variables", [whole])]
        for name, whole in named.items()
    }
    evaluated = loop.evaluate(dataset().take(8))
    return {"metrics": metrics, "evaluated": evaluated, "values": values}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--report", required=True)
    args = parser.parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * args.replicas,
    )
    name = "one_device" if args.replicas == 1 else "mirrored"
    strategy = local_strategy(name)
    assert strategy.num_replicas_in_sync == args.replicas
    report = {name: trained(name, strategy) for name in OPTIMIZERS}
    with open(args.report, "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()

"""The program of every task in test_strategies.py, run once per strategy.

    python -m tests.strategy_checks --strategy=NAME --directory=DIRECTORY \\
        --report=FILE

Trains small models of every kind, and leaves what the tests look at: a report,
and the checkpoints in DIRECTORY/NAME.
"""

import argparse
import functools
import json
import os
import shutil

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist._tf.private_keras import reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.cluster import servers

STEPS, BATCH = 20, 12


def examples(size=120):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[size, 4]).astype("float32")
    ids = rng.integers(0, 30, [size, 3])
    y = (x.sum(1) + np.sin(ids).sum(1) > 0).astype("float32")[:, None]
    weight = rng.uniform(0.5, 2.0, [size]).astype("float32")
    return x, ids, y, weight


def rich():
    """Dict inputs, a table, a regularized layer, several metrics."""
    x = keras.Input([4], name="x")
    ids = keras.Input([3], dtype="int64", name="ids")
    rows = tfdist.PartitionedEmbedding(30, 4, num_shards=2)(ids)
    both = keras.ops.concatenate([keras.layers.Flatten()(rows), x], axis=-1)
    hidden = keras.layers.Dense(8, "relu", kernel_regularizer="l2")(both)
    output = keras.layers.Dense(1, "sigmoid", name="click")(hidden)
    model = keras.Model({"x": x, "ids": ids}, {"click": output})
    model.compile(
        keras.optimizers.Adam(0.01),
        {"click": "binary_crossentropy"},
        weighted_metrics={"click": ["auc", "accuracy"]},
    )
    return model


def dense(layer=None, jit_compile=False):
    x = keras.Input([4], name="x")
    hidden = keras.layers.Dense(8, "relu")(x)
    if layer:
        hidden = layer()(hidden)
    output = keras.layers.Dense(1, "sigmoid")(hidden)
    model = keras.Model(x, output)
    model.compile(
        keras.optimizers.Adam(0.01),
        "binary_crossentropy",
        metrics=["auc"],
        jit_compile=jit_compile,
    )
    return model


def masks():
    """The square of the mean tells whether two examples have one mask."""
    x = keras.Input([64], name="x")
    dropped = keras.layers.Dropout(0.5)(x)
    output = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.RandomNormal(seed=1)
    )(dropped)
    model = keras.Model(x, output)
    model.compile(
        keras.optimizers.SGD(0.0),
        "mse",
        metrics=[mean, mean_of_squares],
    )
    return model


def mean(y_true, y_pred):
    return y_pred[:, 0]


def mean_of_squares(y_true, y_pred):
    return y_pred[:, 0] ** 2


def rich_data():
    x, ids, y, weight = examples()
    data = ({"x": x, "ids": ids}, {"click": y}, {"click": weight})
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


def dense_data():
    x, _, y, _ = examples()
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def masks_data():
    data = (tf.ones([2, 64]), tf.zeros([2, 1]))
    return tf.data.Dataset.from_tensors(data)


FEATURES = {
    "rich": (rich, rich_data),
    "batch_norm": (
        functools.partial(dense, keras.layers.BatchNormalization),
        dense_data,
    ),
    "jit_compile": (functools.partial(dense, jit_compile=True), dense_data),
    "dropout": (masks, masks_data),
}


class Metrics(tfdist.SessionRunHook):
    """Remembers what the last steps have returned."""

    def begin(self):
        self.last = {}

    def steps_until_next(self, step):
        return None

    def after_run(self, run_context, run_values):
        self.last = dict(run_values.results or {})


def estimator(args, feature, **config):
    def model_fn():
        reset_object_names()
        keras.utils.set_random_seed(7)
        return FEATURES[feature][0]()

    config = tfdist.RunConfig(
        f"{args.directory}/{args.strategy}/{feature}",
        tf_random_seed=1,
        save_checkpoints_steps=STEPS,
        strategy=args.strategy,
        log_step_count_steps=5,
        steps_per_dispatch=5,
        **config,
    )
    return tfdist.Estimator(model_fn, config)


def trained(args, feature, steps=STEPS):
    data = FEATURES[feature][1]
    hook = Metrics()
    made = estimator(args, feature)
    made.train(lambda: data().repeat(), hooks=[hook], max_steps=steps)
    return made, hook.last


def refusal_of_a_model_made_elsewhere(args):
    model = dense()
    config = tfdist.RunConfig(f"{args.directory}/x", strategy=args.strategy)
    try:
        tfdist.Estimator(lambda: model, config).train(dense_data, max_steps=1)
    except ValueError as error:
        return str(error)


def check(args, report):
    """Trains every model; the leader also does what only it can."""
    for feature in FEATURES:
        try:
            made, report[feature] = trained(args, feature)
        except ValueError as error:
            report[feature] = f"ValueError: {error}"
            continue
        if feature == "rich" and made.config.is_chief:
            report["evaluated"] = made.evaluate(rich_data)
            predicted = made.predict(rich_data, yield_single_examples=False)
            report["predicted"] = np.concatenate(
                [batch["click"] for batch in predicted]
            ).tolist()
            report["exported"] = made.export_saved_model(
                f"{args.directory}/{args.strategy}/export"
            )
    if args.strategy == "mirrored":
        report["made_elsewhere"] = refusal_of_a_model_made_elsewhere(args)
    resumed, _ = trained(args, "rich", STEPS + 7)
    report["resumed"] = checkpoints.step_of(resumed.latest_checkpoint())


def restored(args, other):
    """What goes on from a checkpoint of another strategy."""
    feature = f"from_{other}"
    target = f"{args.directory}/{args.strategy}/{feature}"
    FEATURES[feature] = FEATURES["rich"]
    is_chief = tfdist.Cluster.from_env().is_chief
    if is_chief:
        os.makedirs(target, exist_ok=True)
        source = f"{args.directory}/{other}/rich"
        for name in os.listdir(source):
            if name.startswith(f"model.ckpt-{STEPS}."):
                shutil.copy(f"{source}/{name}", target)
        with open(f"{target}/checkpoint", "w") as file:
            file.write(f'model_checkpoint_path: "model.ckpt-{STEPS}"\n')
    made, _ = trained(args, feature, STEPS + 5)
    if is_chief:
        path = f"{target}/model.ckpt-{STEPS}"
        return {
            "step": checkpoints.step_of(made.latest_checkpoint()),
            "evaluated": made.evaluate(rich_data, checkpoint_path=path),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--restore_from", nargs="*", default=[])
    parser.add_argument("--restores_only", action="store_true")
    args = parser.parse_args()
    if args.strategy == "mirrored":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
    cluster = tfdist.Cluster.from_env()
    if args.strategy == "ps" and cluster.role != "chief":
        servers.serve(cluster)
        return
    report = {}
    if not args.restores_only:
        check(args, report)
    report["restored"] = {o: restored(args, o) for o in args.restore_from}
    if cluster.is_chief:
        with open(args.report, "w") as file:
            json.dump(report, file)
        if args.strategy == "ps":
            servers.release(cluster)


if __name__ == "__main__":
    main()

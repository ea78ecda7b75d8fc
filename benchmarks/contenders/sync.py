"""Trains a dense model synchronously, with tfdist or Keras' own `fit`.

    python -m benchmarks.contenders.sync JSON

Runs one process of an all-reduce job, or a single process. The key `who` is
"tfdist" (one process per replica), "mirrored" (Keras 3's `fit` under
`MirroredStrategy`, with logical CPUs as replicas), or "tf_keras" (the `fit` of
`tf_keras` under `MultiWorkerMirroredStrategy`).
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import tensorflow as tf

from benchmarks import counters

BATCH, WIDTH = 256, 256  # Batch size per replica; width of each layer.


def model_of(keras: Any) -> Any:
    """Builds and compiles a model with three hidden layers."""
    layers = [keras.layers.Dense(WIDTH, "relu") for _ in range(3)]
    model = keras.Sequential(
        [keras.Input([WIDTH]), *layers, keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def batches(size: int) -> tf.data.Dataset:
    """Repeats a single batch, so that reading costs nothing."""
    x = tf.random.stateless_normal([size, WIDTH], [1, 2])
    y = tf.reduce_mean(x, axis=1, keepdims=True)  # A sum would diverge.
    return tf.data.Dataset.from_tensors((x, y)).repeat()


def by_tfdist(case: dict[str, Any]) -> dict[str, Any] | None:
    """Trains with tfdist; each process reads the batches of its replica."""
    import keras

    import tfdist
    from benchmarks.contenders.wide_and_deep_tfdist import Window

    config = tfdist.RunConfig(
        case["directory"] + "/model", save_checkpoints_steps=1_000_000_000
    )
    last = case["warm"] + case["steps"]
    window = Window(case["warm"], last)
    tfdist.train_and_evaluate(
        tfdist.Estimator(lambda: model_of(keras), config),
        tfdist.TrainSpec(
            lambda context: batches(BATCH), max_steps=last, hooks=[window]
        ),
        tfdist.EvalSpec(lambda: batches(BATCH).take(1)),
    )
    return window.used if config.cluster.role in ("local", "chief") else None


def by_fit(
    keras: Any,
    strategy: tf.distribute.Strategy,
    case: dict[str, Any],
    batch: int,
) -> dict[str, Any]:
    """Runs two epochs of Keras' own `fit` and measures the second."""
    usages = []

    class Window(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            usages.append(counters.usage())

    with strategy.scope():
        model = model_of(keras)
    model.fit(
        batches(batch),
        epochs=2,
        steps_per_epoch=case["steps"],
        callbacks=[Window()],
        verbose=0,
    )
    return counters.difference(*usages, case["steps"])


def by_mirrored(case: dict[str, Any]) -> dict[str, Any]:
    """Trains on logical CPUs; the batch is global, for all replicas."""
    import keras

    replicas = case["replicas"]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * replicas,
    )
    strategy = tf.distribute.MirroredStrategy(
        [f"/cpu:{i}" for i in range(replicas)]
    )
    return by_fit(keras, strategy, case, BATCH * replicas)


def by_tf_keras(case: dict[str, Any]) -> dict[str, Any] | None:
    """Trains with `tf_keras`; all processes read the same global batches."""
    import tf_keras

    if case["replicas"] == 1:
        strategy = tf.distribute.get_strategy()
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    used = by_fit(tf_keras, strategy, case, BATCH * case["replicas"])
    resolver = strategy.cluster_resolver
    leads = resolver is None or resolver.task_type == "chief"
    return used if leads else None


def main() -> None:
    """Trains; the chief writes the results."""
    case = json.loads(sys.argv[1])
    used = {
        "tfdist": by_tfdist,
        "mirrored": by_mirrored,
        "tf_keras": by_tf_keras,
    }[case["who"]](case)
    if used:
        pathlib.Path(case["output"]).write_text(json.dumps(used))


if __name__ == "__main__":
    main()

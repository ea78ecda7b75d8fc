"""In-graph replication in one process: by hand, and by `MirroredStrategy`.

    python -m benchmarks.towers [--towers=2]

TF1's towers: one client, a copy of the step on each device, the variables on
the first, the mean of the gradients applied once. `MirroredStrategy` has a copy
of the variables on each device and applies the mean to each. Both train the
same model on the same batches, the latter by `fit`; prints ms per step of each,
and the largest difference between their weights. Devices are logical CPUs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

_STEPS, _BATCH, _FEATURES = 100, 256, 32


def model_fn() -> keras.Model:
    """The same weights each time."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input([_FEATURES]), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def batches() -> tf.data.Dataset:
    """The same batches each time."""
    x = np.random.default_rng(0).normal(size=[10 * _BATCH, _FEATURES])
    data = x.astype("float32"), np.sin(x[:, :1]).astype("float32")
    return tf.data.Dataset.from_tensor_slices(data).batch(_BATCH, True).repeat()


def by_towers(devices: Sequence[str]) -> tuple[float, list[np.ndarray]]:
    """Milliseconds per step, and the weights afterwards."""
    with tf.device(devices[0]):
        model = model_fn()
    variables = model.trainable_variables

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        parts = tf.split(x, len(devices)), tf.split(y, len(devices))
        towers = []
        for device, part_x, part_y in zip(devices, *parts, strict=True):
            with tf.device(device), tf.GradientTape() as tape:
                loss = model.compute_loss(part_x, part_y, model(part_x))
            towers.append(tape.gradient(loss, [v.value for v in variables]))
        with tf.device(devices[0]):
            means = [
                sum(each) / len(each) for each in zip(*towers, strict=True)
            ]
            model.optimizer.apply(means, variables)

    examples = iter(batches())
    for _ in range(_STEPS):
        step(*next(examples))
    start = time.monotonic()
    for _ in range(_STEPS):
        step(*next(examples))
    return (time.monotonic() - start) / _STEPS * 1000, model.get_weights()


def mirrored(devices: Sequence[str]) -> tuple[float, list[np.ndarray]]:
    """Milliseconds per step, and the weights afterwards."""
    with tf.distribute.MirroredStrategy(devices).scope():
        model = model_fn()
    examples = batches()
    model.fit(examples, steps_per_epoch=_STEPS, verbose=0)
    start = time.monotonic()
    model.fit(examples, steps_per_epoch=_STEPS, verbose=0)
    return (time.monotonic() - start) / _STEPS * 1000, model.get_weights()


def main() -> None:
    """Prints a row for each, and how far their weights are apart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--towers", type=int, default=2)
    devices = [f"/cpu:{i}" for i in range(parser.parse_args().towers)]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * len(devices),
    )
    results = {f.__name__: f(devices) for f in (by_towers, mirrored)}
    for name, (millis, _) in results.items():
        print(f"{name:<10} {millis:6.2f} ms per step")
    weights = [each for _, each in results.values()]
    apart = max(np.abs(a - b).max() for a, b in zip(*weights, strict=True))
    print(f"weights    {apart:.1e} apart")


if __name__ == "__main__":
    main()

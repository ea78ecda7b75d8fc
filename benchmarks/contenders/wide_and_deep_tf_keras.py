"""Trains wide and deep with `tf_keras`' `fit` on parameter servers.

    python -m benchmarks.contenders.wide_and_deep_tf_keras JSON

Uses `DatasetCreator` and `steps_per_execution`, as in TensorFlow's guide, and
the legacy optimizer, whose updates run on the variable's parameter server.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import tensorflow as tf
import tf_keras

from benchmarks import clicks, counters


class Window(tf_keras.callbacks.Callback):
    """Measures the second epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.usages: list[counters.Usage] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Reads the counters; no steps are in flight."""
        self.usages.append(counters.usage())


def main() -> None:
    """Runs a server or, as the chief, the measurement."""
    case = json.loads(sys.argv[1])
    tf.config.threading.set_inter_op_parallelism_threads(4)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        tf.distribute.Server(
            resolver.cluster_spec(),
            job_name=resolver.task_type,
            task_index=resolver.task_id,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4),
        ).join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)

    def table(rows: int, width: int, values: Any, name: str) -> Any:
        return tf_keras.layers.Embedding(
            rows, width, embeddings_initializer=values, name=name
        )

    with strategy.scope():
        model = clicks.keras_model(
            tf_keras,
            case["rows"],
            table,
            tf_keras.optimizers.legacy.Adagrad(clicks.DEEP_RATE),
        )
    # `keras_model` does not set the number of steps per dispatch.
    with strategy.scope():
        model.compile(
            model.optimizer,
            "binary_crossentropy",
            steps_per_execution=case["steps_per_execution"],
        )
    window = Window()
    steps = case["steps"]
    model.fit(
        tf_keras.utils.experimental.DatasetCreator(
            lambda context: clicks.train(case["data"])
        ),
        epochs=2,
        steps_per_epoch=steps,
        callbacks=[window],
        verbose=0,
    )
    result = counters.difference(*window.usages, steps)
    pathlib.Path(case["output"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""Trains with each placement; says where variables are, and how long a step is.

Usage: placements.py MODEL_DIR, as every task of a cluster with ps. Each server
sends 10 MB a second, where the system can limit links.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import links
import tensorflow as tf
from meters import Meter

import tfdist
from tfdist.cluster import servers

STEPS = 12


def model_fn() -> keras.Model:
    """Four layers, of which the third is the largest."""
    layers = [keras.layers.Dense(n, "relu") for n in (256, 256, 512, 1)]
    model = keras.Sequential([keras.Input([256]), *layers])
    model.compile(keras.optimizers.Adam(), "mse")
    return model


def input_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """The same batch of zeros, for ever."""
    batch = tf.zeros([8, 256]), tf.zeros([8, 1])
    return tf.data.Dataset.from_tensors(batch).repeat()


class Where(Meter):
    """Prints each variable's server and bytes, and in the end a step's time."""

    def __init__(self, placement: str) -> None:
        super().__init__(2, placement=placement)
        self._placement = placement

    def found(self, session: tfdist.MonitoredTrainingSession) -> dict:
        """The seconds of a step."""
        return {"step_secs": self.per_step()[0]}

    def after_create_session(
        self, session: tfdist.MonitoredTrainingSession, coord: None
    ) -> None:
        """Prints a line of JSON for each variable."""
        for variable in session.model.variables:
            value = variable.value
            device = tf.DeviceSpec.from_string(value.device)
            row = {
                "placement": self._placement,
                "ps": device.task,
                "name": variable.path,
                "bytes": value.dtype.size * value.shape.num_elements(),
            }
            print(json.dumps(row), flush=True)


def main(directory: str) -> None:
    """Serves; on the chief, trains with each placement."""
    cluster = tfdist.Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    print(json.dumps({"limited": links.limit(10.0)}), flush=True)
    for placement in ("round_robin", "greedy", "planned"):
        config = tfdist.RunConfig(
            os.path.join(directory, placement),
            placement=placement,
            save_checkpoints_secs=0,
            steps_per_dispatch=1,
            audit_input=False,
        )
        estimator = tfdist.Estimator(model_fn, config)
        estimator.train(input_fn, max_steps=STEPS, hooks=[Where(placement)])
    servers.release(cluster)


if __name__ == "__main__":
    main(sys.argv[1])

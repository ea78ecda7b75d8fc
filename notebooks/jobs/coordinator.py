"""TF2's own coordinator: what it does when a task dies.

Usage: coordinator.py, as every task of a cluster with ps. The chief gives its
workers fifty functions, each of which waits 100 ms and adds one to a variable.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import tensorflow as tf
from paced import pause

FUNCTIONS = 50


def main() -> None:
    """Serves, or hands out the functions."""
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = tf.train.ClusterSpec(config["cluster"]), config["task"]
    if task["type"] != "chief":
        server = tf.distribute.Server(cluster, task["type"], task["index"])
        server.join()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = tf.Variable(0)

    @tf.function
    def add() -> None:
        counter.assign_add(1 + pause(100_000))

    coordinator.schedule(add)
    coordinator.join()
    for _ in range(FUNCTIONS):
        coordinator.schedule(add)
    print("begins", flush=True)
    try:
        coordinator.join()
        enough = int(counter) >= FUNCTIONS
        print(f"done, each function at least once: {enough}", flush=True)
    except tf.errors.OpError as error:
        print(f"raised {type(error).__name__}", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's threads would still wait for what died.

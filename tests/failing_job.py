"""The tasks of test_workers.py: many of their steps fail.

    python -m tests.failing_job FAILURES FOUND

The chief has a worker carry out dispatches of a training step, until so many
have failed; then FOUND says how the dispatches ended.
"""

import collections
import functools
import json
import sys
import threading

import tensorflow as tf

from tests import recovery_job
from tfdist._tf import private, private_workers
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.placement.scope import placed_scope
from tfdist.training import optimizers
from tfdist.training.step import ModelStep
from tfdist.training.workers import Workers

STEPS = 4  # In a dispatch.
PATIENCE_SECS = 60.0


def input_fn():
    """Batches, of which an early one has ids beyond the table."""
    bad = tf.random.uniform([], 1, 3 * STEPS, tf.int64)

    def batch(i):
        features, y = recovery_job.examples(8, tf.stack([i, 0]))
        beyond = tf.where(i == bad, recovery_job.ROWS, 0)
        return {**features, "ids": features["ids"] + beyond}, y

    # More than are ever read, but an end that a step could come to.
    return tf.data.Dataset.range(100).map(batch)


def run_until_failed(strategy, failures):
    """Returns how often the dispatches ended how."""
    with placed_scope(strategy, num_ps=1):
        global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        model = recovery_job.model_fn()
        optimizers.build(model.optimizer, model.trainable_variables)
    spec = input_fn().element_spec
    step = ModelStep(model, spec, global_step=global_step, remote=True)

    @functools.partial(tf.function, autograph=False)
    def dispatch(iterator):
        states = step.zero_states()
        for i in range(STEPS):
            number = tf.constant(i, tf.int64)
            states = step.train(iterator.get_next(), number, states)
        return step.pack(states)

    workers = Workers(strategy, 1)
    dataset = workers.coordinator.create_per_worker_dataset(input_fn)
    iterator = iter(dataset)
    concrete = private.trace(workers.coordinator, dispatch, iterator)
    ended = collections.Counter()
    over = threading.Event()

    def attempt(iterator):
        try:
            concrete(iterator).numpy()
            ended["done"] += 1
        except tf.errors.OpError as error:
            ended[type(error).__name__] += 1
            private_workers.renew_resources(workers.coordinator, error)
        over.set()

    while ended.total() - ended["done"] < failures:
        over.clear()
        workers.schedule(attempt, iterator)
        assert over.wait(PATIENCE_SECS), f"A dispatch hangs, after {ended}."
    workers.close()
    return ended


def main():
    cluster = Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    failures, path = sys.argv[1:]
    strategy = parameter_server_strategy(cluster, start_timeout_secs=60)
    ended = run_until_failed(strategy, int(failures))
    servers.release(cluster)
    with open(path, "w") as file:
        json.dump(ended, file)


if __name__ == "__main__":
    main()

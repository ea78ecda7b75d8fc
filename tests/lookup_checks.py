"""The program of every task of a cluster in test_lookups.py.

    python tests/lookup_checks.py DIRECTORY NUMBER ...

Trains random models of `lookup_models.py`, one after the other; the chief
leaves the weights of each, and what it evaluates, in DIRECTORY.
"""

import json
import sys
from pathlib import Path

import lookup_models
import numpy as np
import tensorflow as tf

from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import (
    multi_worker_strategy,
    parameter_server_strategy,
)
from tfdist.placement.scope import placed_scope
from tfdist.training import optimizers
from tfdist.training.coordinated_loop import CoordinatedLoop
from tfdist.training.replicas import Replicas
from tfdist.training.replicated_loop import ReplicatedLoop
from tfdist.training.step import ModelStep


def trained(strategy, cluster, number):
    """The model of a number, trained, and its loop."""
    with placed_scope(strategy, num_ps=cluster.num_ps):
        global_step = tf.Variable(
            0,
            dtype=tf.int64,
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        model = lookup_models.made(number, ours=True)
        optimizers.build(model.optimizer, model.trainable_variables)

    def input_fn(context=None):
        return lookup_models.dataset(number).repeat()

    batches = input_fn()
    kwargs = {"strategy": strategy, "steps_per_dispatch": 1}
    if cluster.num_ps:
        where = {"remote": True}
    else:
        where = {"replicas": Replicas(strategy, global_step)}
    step = ModelStep(
        model, batches.element_spec, global_step=global_step, **where
    )
    if cluster.num_ps:
        loop = CoordinatedLoop(
            step, global_step, input_fn, num_workers=1, **kwargs
        )
    else:
        loop = ReplicatedLoop(step, global_step, batches, **where, **kwargs)
    loop.run(lookup_models.STEPS)
    return model, loop


def main():
    directory, *numbers = sys.argv[1:]
    cluster = Cluster.from_env()
    if cluster.num_ps and cluster.role != "chief":
        servers.serve(cluster)
        return
    if cluster.num_ps:
        strategy = parameter_server_strategy(cluster, start_timeout_secs=120)
    else:
        strategy = multi_worker_strategy(cluster, start_timeout_secs=120)
    for number in map(int, numbers):
        model, loop = trained(strategy, cluster, number)
        if cluster.role == "chief":
            file = Path(directory) / str(number)
            np.savez(f"{file}.npz", *lookup_models.weights(model))
        if cluster.num_ps:
            metrics = loop.evaluate(lookup_models.dataset(number))
            Path(f"{file}.json").write_text(json.dumps(metrics))
    if cluster.num_ps:
        servers.release(cluster)


if __name__ == "__main__":
    main()

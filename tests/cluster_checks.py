"""The program of every task in test_strategy.py; the chief reports."""

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from small_models import examples, logistic

from tfdist.checkpoint import checkpoints
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.placement.scope import placed_scope
from tfdist.training import optimizers
from tfdist.training.coordinated_loop import CoordinatedLoop
from tfdist.training.loop import EndOfInput
from tfdist.training.step import ModelStep


def model_fn(rate=0.1):
    return logistic(
        keras.optimizers.Adam(rate),
        metrics=["accuracy", keras.metrics.AUC(name="auc")],
        hidden=[keras.layers.Dense(3, name="hidden")],
    )


class Job:
    """A model and its loop on the cluster."""

    def __init__(self, strategy, input_fn, rate=0.1, placement=None):
        with placed_scope(strategy, num_ps=2, placement=placement):
            self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.model = model_fn(rate)
            optimizers.build(
                self.model.optimizer, self.model.trainable_variables
            )
        dataset = input_fn(tf.distribute.InputContext())
        step = ModelStep(
            self.model,
            dataset.element_spec,
            global_step=self.global_step,
            remote=True,
        )
        self.loop = CoordinatedLoop(
            step,
            self.global_step,
            input_fn,
            strategy=strategy,
            num_workers=2,
            steps_per_dispatch=4,
        )

    def counters(self):
        return [
            int(self.global_step.numpy()),
            int(self.model.optimizer.iterations.numpy()),
        ]

    def devices(self):
        named = checkpoints.named_variables(self.model, self.global_step)
        return {name: variable.device for name, variable in named.items()}


def one_batch(context=None):
    return tf.data.Dataset.from_tensors(examples(16)).repeat()


def finite(context):
    return one_batch().take(23)


def unknown(context):
    """Data whose number of batches nobody knows before they are read."""
    return finite(context).filter(lambda x, y: True)


def own_label(context):
    """Every label is the index of the worker that reads it."""
    label = tf.cast(context.input_pipeline_id, tf.float32)
    batch = (tf.zeros([8, 4]), tf.fill([8, 1], label))
    return tf.data.Dataset.from_tensors(batch).repeat()


def check(strategy):
    job = Job(strategy, one_batch)
    report = {
        "devices": job.devices(),
        "metric_devices": [v.value.device for v in job.model.metrics_variables],
        "order": [v.path for v in job.model.trainable_variables],
        "counters": [],
    }
    for steps in (37, 1, 100):
        job.loop.run(steps)
        report["counters"].append(job.counters())

    still = Job(strategy, one_batch, rate=0.0)
    report["logs"] = still.loop.run(30)
    with tf.device("/job:chief/task:0"):
        local = model_fn()
        x, y = examples(16)
        report["expected_logs"] = local.evaluate(
            x, y, verbose=0, return_dict=True
        )

    shares = Job(strategy, own_label, rate=0.0)
    predicted = float(np.ravel(shares.model(tf.zeros([1, 4])))[0])
    report["share_of_worker_1"] = (
        1 - shares.loop.run(200)["accuracy"]
        if predicted <= 0.5
        else shares.loop.run(200)["accuracy"]
    )

    for name in ("finite", "unknown"):
        ending = Job(strategy, globals()[name])
        try:
            ending.loop.run(1000)
        except EndOfInput:
            report[f"steps_of_{name}_input"] = ending.counters()
        sizes = [sorted(state.warm) for state in ending.loop._states]
        report[f"sizes_of_{name}_input"] = sizes

    placed = Job(strategy, one_batch, placement=lambda spec: 1)
    report["all_on_one"] = sorted(set(placed.devices().values()))
    return report


def main():
    cluster = Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    strategy = parameter_server_strategy(cluster, start_timeout_secs=60)
    report = check(strategy)
    servers.release(cluster)
    with open(sys.argv[1], "w") as file:
        json.dump(report, file)


if __name__ == "__main__":
    main()

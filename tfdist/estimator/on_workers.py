"""A checkpoint on the parameter servers, computed with by the workers.

How the chief of a cluster evaluates and predicts outside of training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.health import HealthMonitor
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.estimator.building import create_variables
from tfdist.estimator.specs import ModelFn, RunConfig
from tfdist.training.step import ModelStep
from tfdist.training.workers import Workers


@contextlib.contextmanager
def step_on_workers(
    model_fn: ModelFn,
    config: RunConfig,
    fill: Callable[[keras.Model], None],
    dataset: tf.data.Dataset,
    metrics: bool,
) -> Iterator[tuple[ModelStep, Callable[[Callable], Iterator[Any]]]]:
    """A step, and what yields a function's value for each batch.

    `fill` assigns the model's weights.
    """
    wait_secs = config.session_creation_timeout_secs
    cluster = ClusterSize(config.cluster, config.model_dir).now
    strategy = parameter_server_strategy(cluster, start_timeout_secs=wait_secs)
    spec = dataset.element_spec
    global_step, model = create_variables(
        model_fn, config, strategy, spec, metrics
    )
    fill(model)
    step = ModelStep(
        model, spec, global_step=global_step, remote=True, metrics=metrics
    )
    with contextlib.ExitStack() as started:
        health = HealthMonitor(cluster)
        started.callback(health.stop)
        workers = Workers(strategy, cluster.num_workers)
        started.callback(workers.close)

        def on_each_batch(function: Callable) -> Iterator[Any]:
            traced = tf.function(function, autograph=False)
            return workers.map(traced, dataset, health.check)

        yield step, on_each_batch

"""Evaluation and prediction on a cluster's workers, outside of training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.cluster import servers
from tfdist.cluster.health import HealthMonitor
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.estimator.building import ModelFn, create_variables, fill
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.warm_start import WarmStartHook
from tfdist.training.step import ModelStep
from tfdist.training.workers import Workers


class RemoteForward:
    """Connects to the cluster, which invalidates existing datasets.

    The servers hold the weights of checkpoint `path`, or of the warm start.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        config: RunConfig,
        path: str | None,
        warm_start: WarmStartHook | None,
    ) -> None:
        self._model_fn, self._config = model_fn, config
        self._weights = path, warm_start
        self._cluster = ClusterSize(config.cluster, config.model_dir).now
        self._strategy = parameter_server_strategy(
            self._cluster,
            start_timeout_secs=config.session_creation_timeout_secs,
        )

    @contextlib.contextmanager
    def step(
        self, dataset: tf.data.Dataset, metrics: bool
    ) -> Iterator[tuple[ModelStep, Callable[[Callable], Iterator[Any]]]]:
        """Yields a step, and a function that maps a function over batches."""
        with contextlib.ExitStack() as started:
            started.callback(servers.release_again, self._cluster)
            spec = dataset.element_spec
            counter, model = create_variables(
                self._model_fn, self._config, self._strategy, spec, metrics
            )
            fill(model, *self._weights)
            step = ModelStep(
                model, spec, global_step=counter, remote=True, metrics=metrics
            )
            health = HealthMonitor(self._cluster)
            started.callback(health.stop)
            workers = Workers(self._strategy, self._cluster.num_workers)
            started.callback(workers.close)

            def on_each_batch(function: Callable) -> Iterator[Any]:
                traced = tf.function(function, autograph=False)
                return workers.map(traced, dataset, health.check)

            yield step, on_each_batch

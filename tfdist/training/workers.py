"""The workers of a `ParameterServerStrategy`, as a pool.

TensorFlow's `ClusterCoordinator` has a queue and, for each worker, a thread
that takes the next closure and runs it on that worker.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf import private, private_workers
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import fail_fast
from tfdist.training.loop import Watch, unwatched

_WATCH_SECS = 0.1


class Workers:
    """A cluster's workers, each of which takes a call when it is free."""

    def __init__(
        self, strategy: tf.distribute.ParameterServerStrategy, num_workers: int
    ) -> None:
        tf.get_logger().addFilter(_is_not_repeated)
        coordinators = tf.distribute.coordinator
        self.coordinator = coordinators.ClusterCoordinator(strategy)
        private.raise_immediately(self.coordinator)
        self.num_workers = num_workers
        self._threads: set[threading.Thread] = set()

    def schedule(
        self, call: Callable[..., Any], *args: Any
    ) -> concurrent.futures.Future:
        """Calls `call` in a worker's thread; in another if the worker dies."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run(*args: Any) -> None:
            self._threads.add(threading.current_thread())
            future.set_result(call(*args))

        private.schedule(self.coordinator, run, *args)
        return future

    def wait(
        self, futures: Sequence[concurrent.futures.Future], watch: Watch
    ) -> None:
        """Waits until one of the calls has ended, for at most 0.1 s.

        Raises:
            Exception: The exception that a call or `watch` raised.
            UnavailableError: Every thread has ended: the coordinator loses
                threads to some errors.
        """
        if not any(future.done() for future in futures):
            concurrent.futures.wait(
                futures, _WATCH_SECS, concurrent.futures.FIRST_COMPLETED
            )
        watch()
        threads = tuple(self._threads)
        if threads and not any(thread.is_alive() for thread in threads):
            raise tf.errors.UnavailableError(
                None, None, "All threads of the coordinator have ended."
            )
        self.coordinator.done()

    def map(
        self,
        function: tf.types.experimental.PolymorphicFunction,
        batches: tf.data.Dataset,
        watch: Watch = unwatched,
    ) -> Iterator[Any]:
        """Calls a function without side effects on workers, for each batch.

        This process reads the batches in order; two per worker are in flight.
        No step may be running. Yields the results as NumPy arrays.
        """
        concrete = private.trace(
            self.coordinator, function, batches.element_spec
        )
        futures: collections.deque = collections.deque()

        def call(batch: Any) -> Any:
            return tf.nest.map_structure(lambda t: t.numpy(), concrete(batch))

        def oldest() -> Any:
            while not futures[0].done():
                self.wait([futures[0]], watch)
            return futures.popleft().result()

        for batch in batches:
            if len(futures) == 2 * self.num_workers:
                yield oldest()
            futures.append(self.schedule(functools.partial(call, batch)))
        while futures:
            yield oldest()

    def resize(self, cluster: Cluster) -> None:
        """Changes the pool to the workers of `cluster`; tells others to end.

        Call this inside `private_workers.locked_workers`, when all workers are
        up and no call is running.
        """
        before, after = self.num_workers, cluster.num_workers
        servers.dismiss_tasks(f"worker:{i}" for i in range(after, before))
        workers = cluster.tasks["worker"]
        with fail_fast():
            private_workers.connect_workers(self.coordinator, workers)
        self.num_workers = after
        private_workers.renew_tables(self.coordinator)
        if new := [f"worker:{i}" for i in range(before, after)]:
            servers.admit_tasks(cluster, new)

    def close(self) -> None:
        """Ends the threads."""
        private.stop_coordinator(self.coordinator)


def _is_not_repeated(record: logging.LogRecord) -> bool:
    """Whether a record of TensorFlow's log is not reported elsewhere.

    For each dispatch the coordinator logs a lost task's error with its
    traceback, which `tfdist.cluster.health` and `tfdist.session` report, too.
    """
    return record.module != "cluster_coordinator"

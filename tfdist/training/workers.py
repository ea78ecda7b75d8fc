"""The workers of a `ParameterServerStrategy`, as a pool.

TensorFlow's `ClusterCoordinator` has a queue and, for each worker, a thread
that takes what is next and runs it there.
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
    """The workers of a cluster, each of which takes a call when it is free."""

    def __init__(
        self, strategy: tf.distribute.ParameterServerStrategy, num_workers: int
    ) -> None:
        tf.get_logger().addFilter(_is_news)
        coordinators = tf.distribute.coordinator
        self.coordinator = coordinators.ClusterCoordinator(strategy)
        private.raise_at_once(self.coordinator)
        self.num_workers = num_workers
        self._threads: set[threading.Thread] = set()

    def schedule(
        self, call: Callable[..., Any], *args: Any
    ) -> concurrent.futures.Future:
        """Calls `call` on a worker's thread; again elsewhere if that dies."""
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run(*args: Any) -> None:
            self._threads.add(threading.current_thread())
            future.set_result(call(*args))

        private.schedule(self.coordinator, run, *args)
        return future

    def wait(
        self, futures: Sequence[concurrent.futures.Future], watch: Watch
    ) -> None:
        """Waits until one of the calls has ended, for 0.1 s at most.

        Raises:
            Exception: what a call has raised, or `watch`.
            UnavailableError: every thread has ended: the coordinator loses
                some to errors.
        """
        if not any(future.done() for future in futures):
            concurrent.futures.wait(
                futures, _WATCH_SECS, concurrent.futures.FIRST_COMPLETED
            )
        watch()
        threads = tuple(self._threads)
        if threads and not any(thread.is_alive() for thread in threads):
            raise tf.errors.UnavailableError(
                None, None, "Every thread of the coordinator has ended."
            )
        self.coordinator.done()

    def map(
        self,
        function: tf.types.experimental.PolymorphicFunction,
        batches: tf.data.Dataset,
        watch: Watch = unwatched,
    ) -> Iterator[Any]:
        """Calls a function that changes nothing with every batch, on workers.

        The batches are read here, in order; two per worker are on their way.
        No step may be under way. Yields what it returns, as NumPy arrays.
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
        """Has the workers of `cluster` in the pool; tells others to end.

        To be called inside `private_workers.unchanging`, when all are up and
        no call is under way.
        """
        before, after = self.num_workers, cluster.num_workers
        servers.let_go(f"worker:{i}" for i in range(after, before))
        workers = cluster.tasks["worker"]
        with fail_fast():
            private_workers.connect_workers(self.coordinator, workers)
        self.num_workers = after
        private_workers.renew_tables(self.coordinator)
        if new := [f"worker:{i}" for i in range(before, after)]:
            servers.take_in(cluster, new)

    def close(self) -> None:
        """Ends the threads."""
        private.stop_coordinator(self.coordinator)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of TensorFlow's log says what is not said elsewhere.

    The coordinator logs a lost task's error, with its traceback, for each
    dispatch. `tfdist.cluster.health` and `tfdist.session` report it, too.
    """
    return record.module != "cluster_coordinator"

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
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._tf import private

_WATCH_SECS = 0.5
_END_SECS = 10.0


class Workers:
    """The workers of a cluster, each of which takes a call when it is free.

    Args:
        strategy: The strategy.
        num_workers: Number of workers.

    Attributes:
        coordinator: TensorFlow's.
        num_workers: Number of workers.
    """

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        num_workers: int,
    ) -> None:
        tf.get_logger().addFilter(_is_news)
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        private.raise_at_once(self.coordinator)
        self.num_workers = num_workers
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._exhausted: set[int] = set()
        self._under_way = 0
        self._idle = 0

    def trace(
        self, function: tf.types.experimental.PolymorphicFunction, *args: Any
    ) -> tf.types.experimental.ConcreteFunction:
        """A function as it will be called, traced on this thread."""
        return private.trace(self.coordinator, function, *args)

    def schedule(self, call: Callable[..., None], *args: Any) -> None:
        """Calls `call` on a worker's thread; again elsewhere if that dies."""
        with self._changed:
            self._under_way += 1
        run = functools.partial(self._run, call)
        private.schedule(self.coordinator, run, *args)

    def _run(self, call: Callable[..., None], *args: Any) -> None:
        """Runs on a thread of the coordinator."""
        self._threads.add(threading.current_thread())
        call(*args)
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def renew_input(self) -> None:
        """Makes new iterators for the calling thread's worker."""
        private.renew_resources(self.coordinator)

    def wait(
        self, condition: Callable[[], object], watch: Callable[[], None]
    ) -> None:
        """Waits for a condition, for half a second at most.

        Raises:
            Exception: what a call has raised, or `watch`.
            UnavailableError: every thread has ended: the coordinator loses
                some to errors.
        """
        with self._changed:
            self._changed.wait_for(condition, timeout=_WATCH_SECS)
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
        watch: Callable[[], None] = lambda: None,
    ) -> Iterator[Any]:
        """Calls a function that changes nothing with every batch, on workers.

        The batches are read here, in order; two per worker are on their way.
        One whose worker dies goes to another. To be called when no step is
        under way.

        Args:
            function: Of one batch.
            batches: The batches.
            watch: Called at least every second while the workers are busy;
                ends the wait by raising.

        Yields:
            What `function` returns for each batch, in order, as NumPy arrays.
        """
        concrete = self.trace(function, batches.element_spec)
        futures: collections.deque = collections.deque()

        def call(future: concurrent.futures.Future, batch: Any) -> None:
            outputs = concrete(batch)
            arrays = tf.nest.map_structure(lambda t: t.numpy(), outputs)
            future.set_result(arrays)

        def oldest() -> Any:
            future = futures.popleft()
            while not future.done():
                self.wait(future.done, watch)
            return future.result()

        for batch in batches:
            if len(futures) == 2 * self.num_workers:
                yield oldest()
            futures.append(concurrent.futures.Future())
            self.schedule(functools.partial(call, futures[-1], batch))
        while futures:
            yield oldest()

    def mark_exhausted(self) -> None:
        """The data of the calling thread's worker has ended."""
        self._exhausted.add(threading.get_ident())

    def is_exhausted(self) -> bool:
        """Whether the data of the calling thread's worker has ended."""
        return threading.get_ident() in self._exhausted

    def all_exhausted(self) -> bool:
        """Whether the data of every worker has ended."""
        return len(self._exhausted) >= self.num_workers

    def leave_to_others(self) -> None:
        """Keeps the calling thread from taking calls others could do."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(
                lambda: self._under_way <= self._idle or self.all_exhausted(),
                timeout=_WATCH_SECS,
            )
            self._idle -= 1

    def close(self) -> None:
        """Ends the threads."""
        private.stop_coordinator(self.coordinator)

    def has_ended(self) -> bool:
        """See `Loop.has_ended`."""
        return private.coordinator_has_ended(self.coordinator, _END_SECS)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of TensorFlow's log says what is not said elsewhere.

    The coordinator logs a lost task's error with the whole traceback, once for
    each dispatch. A lost task is reported by `tfdist.cluster.health` and
    `tfdist.session`, any other error is raised.
    """
    return record.module != "cluster_coordinator"

"""Changes of a running coordinator's workers, by TensorFlow's private names.

TensorFlow's own classes have a fixed set of workers.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import ps_values  # Tables of a strategy.

# A worker's thread, and the closure that wakes it up.
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context  # The connection to the servers.

from tfdist._tf import private
from tfdist._tf.private import ClusterCoordinator


@contextlib.contextmanager
def locked_workers(
    coordinator: ClusterCoordinator, secs: float = 0.0
) -> Iterator[bool]:
    """Yields whether all workers are connected; if so, keeps that unchanged.

    If one has died, a thread waits for it in C++ code, and holds the lock: this
    waits for that thread, for at most `secs`.
    """
    lock = coordinator._cluster.failure_handler._cluster_update_lock
    free = lock.acquire(timeout=secs)
    try:
        yield free
    finally:
        if free:
            lock.release()


def connect_workers(
    coordinator: ClusterCoordinator, workers: Mapping[int, str]
) -> None:
    """Connects to exactly these workers, by index, and gives each a thread.

    Call this inside `locked_workers`, when all of them are up and nothing is
    running. Variables and functions are kept.
    """
    cluster = coordinator._cluster
    for gone in cluster.workers[len(workers) :]:
        gone.stop()
        # Only a closure in the queue wakes its thread, which then ends.
        cancellation = cluster.resource_cancellation_mgr
        last = cluster_coordinator.Closure(lambda: None, cancellation)
        cluster.closure_queue.put(last, tag=gone.worker_index)
    del cluster.workers[len(workers) :]
    server_def = copy.deepcopy(context.get_server_def())
    for job in server_def.cluster.job:
        if job.name == "worker":
            job.tasks.clear()
            job.tasks.update(workers)
    context.context().update_server_def(server_def)
    cluster.failure_handler._server_def = server_def
    for index in range(len(cluster.workers), len(workers)):
        device = f"/job:worker/replica:0/task:{index}"
        worker = cluster_coordinator.Worker(index, device, cluster)
        cluster.workers.append(worker)


def renew_resources(coordinator: ClusterCoordinator, error: Exception) -> None:
    """Recreates a worker's iterators; to be called in a scheduled callable.

    TensorFlow does so for a worker that was lost, but not for one that has lost
    its connection to a parameter server, nor for a call that was cancelled.
    """
    cancelled = isinstance(error, tf.errors.CancelledError)
    if cancelled or not cluster_coordinator._is_worker_failure(error):
        worker = coordinator._cluster.workers[private.current_worker()]
        worker._on_worker_recovery()


def renew_tables(coordinator: ClusterCoordinator) -> None:
    """Gives each worker its own copy of a model's lookup tables.

    TensorFlow creates copies only for the workers that exist when a table is
    created, and through the coordinator that is current then.
    """
    number = len(coordinator._cluster.workers)
    kind = ps_values.DistributedTable
    for table in [o for o in gc.get_objects() if type(o) is kind]:
        copies = table._distributed_table  # None: created for an export.
        is_old = table._coordinator is not coordinator
        if copies and (is_old or len(copies._values) != number):
            table._coordinator, table._distributed_table = coordinator, None
            table._maybe_build_distributed_table()


def of_first_workers(iterator: Any, number: int) -> Any:
    """A per-worker iterator for only the first `number` workers."""
    return type(iterator)(iterator._values[:number])


def of_all_workers(coordinator: ClusterCoordinator, iterator: Any) -> Any:
    """A per-worker iterator, with new iterators for workers that have none."""
    values = list(iterator._values)
    for worker in coordinator._cluster.workers[len(values) :]:
        value = worker.create_resource(values[0]._closure._function)
        value._type_spec = values[0]._type_spec
        values.append(value)
    return type(iterator)(tuple(values))

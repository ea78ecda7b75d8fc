"""Other workers for a coordinator that runs: private names of TensorFlow.

Its own classes know one set of workers, from their start to their end.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import ps_values  # Tables of a strategy.

# A worker's thread, and what it is given to wake up.
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context  # The connection to the servers.

from tfdist._tf import private
from tfdist._tf.private import ClusterCoordinator


@contextlib.contextmanager
def unchanging(coordinator: ClusterCoordinator) -> Iterator[bool]:
    """Whether all workers are connected; if so, none is connected anew here.

    If one has died, a thread waits in C, with a lock, until it is back.
    """
    lock = coordinator._cluster.failure_handler._cluster_update_lock
    free = lock.acquire(blocking=False)
    try:
        yield free
    finally:
        if free:
            lock.release()


def connect_workers(
    coordinator: ClusterCoordinator, workers: Mapping[int, str]
) -> None:
    """Connects to exactly these workers, by index, and gives each a thread.

    To be called inside `unchanging`, when all of them are up and nothing is
    under way. Variables and functions stay.
    """
    cluster = coordinator._cluster
    for gone in cluster.workers[len(workers) :]:
        gone.stop()
        # Only what it takes from its queue wakes its thread, which then ends.
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
    """Makes a worker's iterators again; to be called in what `schedule` calls.

    TensorFlow does so for a worker that was lost, but not for one that has lost
    its connection to a parameter server, nor for a call that was cancelled.
    """
    cancelled = isinstance(error, tf.errors.CancelledError)
    if cancelled or not cluster_coordinator._is_worker_failure(error):
        worker = coordinator._cluster.workers[private.current_worker()]
        worker._on_worker_recovery()


def renew_tables(coordinator: ClusterCoordinator) -> None:
    """Gives each worker its own copy of a model's lookup tables.

    TensorFlow makes them for the workers that there are when a table is made,
    and by another coordinator for those of another connection.
    """
    number = len(coordinator._cluster.workers)
    kind = ps_values.DistributedTable
    for table in [o for o in gc.get_objects() if type(o) is kind]:
        copies = table._distributed_table  # None: it was made for an export.
        is_old = table._coordinator is not coordinator
        if copies and (is_old or len(copies._values) != number):
            table._coordinator, table._distributed_table = coordinator, None
            table._maybe_build_distributed_table()


def of_first_workers(iterator: Any, number: int) -> Any:
    """A per-worker iterator without those of the other workers."""
    return type(iterator)(iterator._values[:number])


def of_all_workers(coordinator: ClusterCoordinator, iterator: Any) -> Any:
    """A per-worker iterator with new ones for workers that have none."""
    values = list(iterator._values)
    for worker in coordinator._cluster.workers[len(values) :]:
        value = worker.create_resource(values[0]._closure._function)
        value._type_spec = values[0]._type_spec
        values.append(value)
    return type(iterator)(tuple(values))

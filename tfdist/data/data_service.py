"""Exactly one pass over the data, whatever the speed of the workers.

    def input_fn(context):
        rows = tfdist.read_csv("data/*.csv", 256, num_epochs=1)
        return tfdist.one_pass(rows, context)

    python -m tfdist.launch --ps=2 --workers=3 --data_workers=2 -m trainer.task

If each worker has a share of its own, fast workers finish early. Here nobody
has a share: a tf.data service reads the data and hands each batch to the worker
that asks next. Its tasks are in `TF_CONFIG` beside those that train, as
"dispatcher" (one) and "data_worker"; `train_and_evaluate` runs them, and they
end with the job.

Each batch is handed out once. The dispatcher assigns to the data workers one
element at a time of the dataset's source: a file for `read_csv` and the other
readers, an example for `Dataset.from_tensor_slices`. So without a failure each
example is trained on once per epoch. What is lost when a process dies:

A worker: the batch it trained on and those on their way to it, two per data
  worker; with a `map` after `one_pass`, which TensorFlow runs ahead, one more.
  One that is let go (`tfdist resize`): those on their way. New ones cost none.
The chief or a ps, or any process of an all-reduce job: the batches since the
  last checkpoint, and for each worker as many as if it had died.
A data worker: what it has taken and not handed out; of files all that it reads
  at once or has shuffled the names of; with `shuffle=False` the one it reads
  and at most the next. After 30 s the pass ends without it.
The dispatcher: nothing. Its journal in `<model_dir>/data_service` tells the
  next process what was handed out.
All: the sum of these. But if the data workers then have other addresses, as
  after each start of `tfdist.launch`, the pass starts again, with a warning:
  what the checkpoint has seen is repeated. Nothing else is ever repeated.

A job that ends deletes the journal, so the next one in its directory makes its
own pass. If you change the data of a job that has not ended, delete it too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tf import storage
from tfdist.cluster.probing import TaskState, wait_for_all
from tfdist.cluster.servers import starting, wait_until_gone
from tfdist.cluster.spec import Cluster, current_cluster
from tfdist.cluster.termination import Sigterm
from tfdist.cluster.tf_config import DATA_JOBS
from tfdist.data.worker_context import read_by_all

_log = logging.getLogger(__name__)

_POLL_SECS = 0.5
# How long a task that is told to end serves on for one that trains.
_TERM_SECS = 20.0
_START_SECS = 120.0
_HEARTBEAT_MS = 2000
_WORKER_TIMEOUT_MS = 30_000
# Batches on their way to a process that trains, for each data worker.
_ON_THEIR_WAY = 2


def one_pass(
    dataset: tf.data.Dataset,
    context: tf.distribute.InputContext,
    *,
    name: str = "train",
    cluster: Cluster | None = None,
    start_timeout_secs: float = _START_SECS,
) -> tf.data.Dataset:
    """The batches of a dataset, each of them to one of all workers.

    To be called in the input function of training, with batches of all the
    data, not of a shard; the last batch of each data worker may be smaller. The
    order is random. For several epochs repeat the argument or the result: an
    epoch starts when the last batch of the one before was handed out. As for
    all finite data, a parameter-server job dispatches its steps one by one.

    As `tf.data.experimental.service.distribute` with dynamic sharding, for a
    job that survives failures (see the top of this module).

    >>> dataset = tf.data.Dataset.range(5).batch(2)
    >>> batches = one_pass(dataset, tf.distribute.InputContext())
    >>> [batch.tolist() for batch in batches.as_numpy_iterator()]
    [[0, 1], [2, 3], [4]]

    Args:
        dataset: Batches. Starts with a source that can be split: files, or
            `from_tensor_slices`, `range`, `list_files`. The data workers run
            it, so it cannot call Python functions.
        context: The argument of the input function.
        name: Of the pass; each pass of a job needs its own.
        cluster: Where the dispatcher is. Default: the cluster of the
            `RunConfig` in an Estimator's `input_fn`, else of the environment.
        start_timeout_secs: Seconds to wait for the service.

    Returns:
        The batches that this caller gets; in a single process without a
        service, and in an evaluator, the dataset itself.

    Raises:
        TypeError: `context` is not an `InputContext`.
        ValueError: several workers, and no service.
        TimeoutError: a task of the service did not start in time.
    """
    if not isinstance(context, tf.distribute.InputContext):
        raise TypeError(
            "Argument `context` must be the tf.distribute.InputContext that "
            "the input function gets as its argument. Received: "
            f"context={context!r}."
        )
    read_by_all(context)
    cluster = current_cluster() if cluster is None else cluster
    alone = not cluster.is_distributed and cluster.dispatcher is None
    if alone or cluster.role == "evaluator":
        return dataset
    if cluster.dispatcher is None:
        raise ValueError(
            "One pass by several workers needs a tf.data service, and this "
            f"cluster has none: {cluster.shape}. Start it with `python -m "
            "tfdist.launch --data_workers=1 ...`, or give TF_CONFIG's cluster "
            'the jobs "dispatcher" and "data_worker".'
        )
    _wait_until_up(cluster, start_timeout_secs, *DATA_JOBS)
    service = tf.data.experimental.service
    # Decompression and injected prefetching would buffer more batches, one per
    # CPU, which are lost with their worker.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    distribute = service.distribute(
        processing_mode=service.ShardingPolicy.DYNAMIC,
        service=f"grpc://{cluster.dispatcher}",
        job_name=name,
        max_outstanding_requests=_ON_THEIR_WAY * len(cluster.data_workers),
        compression=None,
    )
    return dataset.apply(distribute).with_options(options)


def serve(cluster: Cluster, work_dir: str, is_over: Callable[[], bool]) -> None:
    """Runs a dispatcher or data worker until training is over.

    After SIGTERM it serves for up to 20 more seconds while the leading process
    is alive, since the whole job may have been told to end; then it exits with
    code 143. The dispatcher's journal is in `work_dir`.
    """
    sigterm = Sigterm()
    try:
        with starting(cluster):
            server = _server(cluster, work_dir)
        _log.info("Task %s serves on %s.", cluster.task, cluster.address)
        # The chief, or worker 0 where there is none.
        leader = next(iter(cluster.tasks.values()), {}).get(0, "")
        while not is_over():
            time.sleep(_POLL_SECS)
            if sigterm.received:
                wait_until_gone(leader, _TERM_SECS)
                sigterm.leave()
        # Clients still disconnect from the service.
        wait_until_gone(leader, math.inf, unless=lambda: sigterm.received)
        server.stop()
        if cluster.role == "dispatcher":
            tf.io.gfile.rmtree(work_dir)
        _log.info("Task %s ends: training is over.", cluster.task)
    finally:
        sigterm.restore()


def _server(cluster: Cluster, work_dir: str) -> Any:
    service = tf.data.experimental.service
    assert cluster.address is not None  # It is in the cluster.
    port = int(cluster.address.rpartition(":")[2])
    if cluster.role == "dispatcher":
        _prepare_journal(work_dir, cluster.data_workers)
        dispatcher = service.DispatcherConfig(
            port=port,
            protocol="grpc",
            work_dir=work_dir,
            fault_tolerant_mode=True,
            # Also how often it looks for dead workers.
            job_gc_check_interval_ms=_HEARTBEAT_MS,
            # Never forgets what was handed out.
            job_gc_timeout_ms=-1,
            worker_timeout_ms=_WORKER_TIMEOUT_MS,
        )
        return service.DispatchServer(dispatcher)
    _wait_until_up(cluster, _START_SECS, "dispatcher")
    worker = service.WorkerConfig(
        dispatcher_address=cluster.dispatcher,
        worker_address=cluster.address,
        port=port,
        protocol="grpc",
        heartbeat_interval_ms=_HEARTBEAT_MS,
    )
    return service.WorkerServer(worker)


def _prepare_journal(work_dir: str, data_workers: tuple[str, ...]) -> None:
    """Removes the journal of other data workers: all would wait for them."""
    path = os.path.join(work_dir, "data_workers.json")
    before, now = storage.read_text(path), json.dumps(data_workers)
    if before not in (None, now):
        text = "The data workers were %s and are %s: the pass starts again."
        _log.warning(text, before, now)
        tf.io.gfile.rmtree(work_dir)
    tf.io.gfile.makedirs(work_dir)
    storage.write_text(path, now)


@tf.autograph.experimental.do_not_convert
def _wait_until_up(cluster: Cluster, timeout_secs: float, *jobs: str) -> None:
    """Waits for the service; TensorFlow itself would wait without end."""
    tasks = cluster.addresses(*jobs)
    wait_for_all(tasks, lambda: [*map(_state, tasks.values())], timeout_secs)


def _state(address: str) -> TaskState:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        place = host.strip("[]"), int(port)
        socket.create_connection(place, timeout=1.0).close()
        return TaskState.LIVE
    return TaskState.DEAD

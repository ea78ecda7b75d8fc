"""Exactly one pass over the data, regardless of the speed of the workers.

    def input_fn(context):
        rows = tfdist.read_csv("data/*.csv", 256, num_epochs=1)
        return tfdist.one_pass(rows, context)

    python -m tfdist.launch --ps=2 --workers=3 --data_workers=2 -m trainer.task

If each worker has a fixed share of the data, fast workers finish early. With
`one_pass`, a tf.data service reads the data and hands each batch to the next
worker that requests one. Its tasks, "dispatcher" (one) and "data_worker", are
in `TF_CONFIG` along with the training tasks; `train_and_evaluate` runs them,
and they end with the job.

Each batch is handed out once. The dispatcher assigns the elements of the
dataset's source to the data workers one by one: files for `read_csv` and the
other readers, examples for `Dataset.from_tensor_slices`. Without failures, each
example is thus used once per epoch. If a process dies, these batches are lost:

A worker: the batch it trained on and those in transit to it, two per data
  worker, and one more with a `map` after `one_pass`, which TensorFlow runs
  ahead. A worker removed by `tfdist resize`: those in transit. A new one: none.
The chief or a ps, or any process of an all-reduce job: the batches since the
  last checkpoint, and for each worker as many as if it had died.
A data worker: elements assigned to it but not handed out. For files, these are
  all that it reads in parallel or has shuffled the names of; with
  `shuffle=False` the current file and at most the next. The pass ends without
  this worker after 30 s.
The dispatcher: none. Its journal in `<model_dir>/data_service` tells the next
  process what was handed out.
All: the sum of these. But if the data workers then have other addresses, as
  after each start of `tfdist.launch`, the pass restarts, with a warning, and
  repeats examples seen before the checkpoint. Nothing else is ever repeated.

A job that ends deletes the journal, so that the next job in its directory makes
a new pass. If you change the data of an unfinished job, delete the journal too.
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
# How long a task continues to serve training tasks after SIGTERM.
_TERM_SECS = 20.0
_START_SECS = 120.0
_HEARTBEAT_MS = 2000
_WORKER_TIMEOUT_MS = 30_000
# Batches in transit to a training process, per data worker.
_ON_THEIR_WAY = 2


def one_pass(
    dataset: tf.data.Dataset,
    context: tf.distribute.InputContext,
    *,
    name: str = "train",
    cluster: Cluster | None = None,
    start_timeout_secs: float = _START_SECS,
) -> tf.data.Dataset:
    """Distributes the batches of a dataset, each to exactly one worker.

    Call it in the training input function, with batches of all the data, not of
    a shard; the last batch of each data worker may be smaller. The order is
    random. For several epochs repeat the argument or the result: an epoch
    starts once the last batch of the previous one was handed out. A
    parameter-server job dispatches steps one by one: to dispatch more
    (`RunConfig.steps_per_dispatch`), each worker keeps as many batches in
    memory, which are lost with the worker.

    Like `tf.data.experimental.service.distribute` with dynamic sharding, but
    for a job that survives failures (see the top of this module).

    >>> dataset = tf.data.Dataset.range(5).batch(2)
    >>> batches = one_pass(dataset, tf.distribute.InputContext())
    >>> [batch.tolist() for batch in batches.as_numpy_iterator()]
    [[0, 1], [2, 3], [4]]

    Args:
        dataset: A dataset of batches, from a source that can be split: files,
            `from_tensor_slices`, `range` or `list_files`. The data workers run
            the dataset, so it cannot call Python functions.
        context: The argument of the input function.
        name: Name of the pass; each pass of a job needs a different one.
        cluster: The cluster with the dispatcher. Default: that of the
            `RunConfig` in an Estimator's `input_fn`, else of the environment.
        start_timeout_secs: Seconds to wait for the service.

    Returns:
        A dataset of the batches that this caller gets; the dataset itself in a
        single process without a service, and in an evaluator.

    Raises:
        TypeError: `context` is not an `InputContext`.
        ValueError: There are several workers but no service.
        TimeoutError: A task of the service did not start in time.
    """
    if not isinstance(context, tf.distribute.InputContext):
        raise TypeError(
            "Argument `context` must be the tf.distribute.InputContext that "
            "the input function gets as its argument. Received: "
            f"context={context!r}."
        )
    read_by_all(context, each_once=True)
    cluster = current_cluster() if cluster is None else cluster
    alone = not cluster.is_distributed and cluster.dispatcher is None
    if alone or cluster.role == "evaluator":
        return dataset
    if cluster.dispatcher is None:
        raise ValueError(
            "One pass by several workers needs a tf.data service, but this "
            f"cluster has none: {cluster.shape}. Start it with `python -m "
            "tfdist.launch --data_workers=1 ...`, or give TF_CONFIG's cluster "
            'the jobs "dispatcher" and "data_worker".'
        )
    _wait_until_up(cluster, start_timeout_secs, *DATA_JOBS)
    service = tf.data.experimental.service
    # Decompression and injected prefetching would buffer more batches (one per
    # CPU), which would be lost with their worker.
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
        # The chief, or worker 0 if there is no chief.
        leader = next(iter(cluster.tasks.values()), {}).get(0, "")
        while not is_over():
            time.sleep(_POLL_SECS)
            if sigterm.received:
                wait_until_gone(leader, _TERM_SECS)
                sigterm.leave()
        # Lets clients disconnect from the service.
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
            # Also the interval of checks for dead workers.
            job_gc_check_interval_ms=_HEARTBEAT_MS,
            # Never forgets which elements were handed out.
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
    """Removes a journal of other data workers, which would be waited for."""
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
    """Waits for the service; TensorFlow itself would wait forever."""
    tasks = cluster.addresses(*jobs)
    wait_for_all(tasks, lambda: [*map(_state, tasks.values())], timeout_secs)


def _state(address: str) -> TaskState:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        place = host.strip("[]"), int(port)
        socket.create_connection(place, timeout=1.0).close()
        return TaskState.LIVE
    return TaskState.DEAD

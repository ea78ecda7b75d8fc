"""TensorFlow servers: run one, ask whether one is up, tell it to go home.

TF1's `tf.train.Server.join()` never returned: parameter servers had to be
killed from outside. Here the chief's last act is to leave a file in the
*memory* of every server (TensorFlow's `ram://` file system, one per process,
written by an ordinary `WriteFile` op placed on that task's device). The server
sees it and ends with exit code 0. No transport of our own, no file left over.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections.abc import Iterable

import grpc
import tensorflow as tf

from tfdist.cluster import Cluster

_log = logging.getLogger(__name__)

_DONE = "ram://tfdist/chief_is_done"
_POLL_SECS = 0.2
_GOODBYE_SECS = 60.0


def inter_op_threads() -> int:
    """Size of the thread pool that runs ops: the CPUs, but at least four.

    A server whose pool has a single thread (a one-CPU container) hangs on the
    first step that pulls from and pushes to it: the pull waits inside the
    thread that the push needs.
    """
    return max(4, len(os.sched_getaffinity(0)))


def serve(cluster: Cluster) -> None:
    """Runs this task's server until the chief says that the job is done.

    Args:
        cluster: A `Cluster` in which this process is a worker or a ps.

    Raises:
        RuntimeError: The server could not start; most often another process
            holds its port.
    """
    task = f"{cluster.task_type}:{cluster.task_index}"
    try:
        server = tf.distribute.Server(
            tf.train.ClusterSpec(cluster.training_spec()),
            job_name=cluster.task_type,
            task_index=cluster.task_index,
            protocol="grpc",
            config=tf.compat.v1.ConfigProto(
                inter_op_parallelism_threads=inter_op_threads()
            ),
        )
    except tf.errors.OpError as error:
        raise RuntimeError(
            f"The server of task {task} could not start on {cluster.address}. "
            "Is another process using that port? TensorFlow says: "
            f"{error.message}"
        ) from error
    _log.info("Task %s serves on %s.", task, server.target)
    while not tf.io.gfile.exists(_DONE):
        time.sleep(_POLL_SECS)
    # The chief's process still frees what it holds here; let it leave first.
    deadline = time.monotonic() + _GOODBYE_SECS
    chief = _address(cluster, ("chief", 0))
    while probe(chief) is TaskState.LIVE and time.monotonic() < deadline:
        time.sleep(_POLL_SECS)
    _log.info("Task %s ends: the chief is done.", task)


def release(tasks: Iterable[tuple[str, int]]) -> None:
    """Tells the servers of `tasks` that the job is done (see `serve`).

    Args:
        tasks: `(job, index)` of each server; the process must be the chief and
            connected to them. A server that is gone is reported and skipped.
    """
    for job, index in tasks:
        try:
            with tf.device(f"/job:{job}/task:{index}/device:CPU:0"):
                tf.io.write_file(_DONE, "")
        except tf.errors.OpError as error:
            _log.warning(
                "Task %s:%d could not be told that the job is done: %s",
                job,
                index,
                error.message.splitlines()[0],
            )


class TaskState(enum.Enum):
    """What a probe found at a task's address."""

    LIVE = "up"
    FROZEN = "connected, but does not answer"
    DEAD = "not up"


def probe(address: str, timeout_secs: float = 3.0) -> TaskState:
    """Asks the TensorFlow server at `address` for its status.

    Calls `GetStatus` of TensorFlow's own worker service on a channel of its
    own, so that no earlier failure to connect is remembered.

    Args:
        address: `host:port`.
        timeout_secs: Seconds after which a server that accepted the
            connection but did not answer counts as frozen.

    Returns:
        The state of the task.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        get_status = channel.unary_unary("/tensorflow.WorkerService/GetStatus")
        try:
            get_status(b"", timeout=timeout_secs)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return TaskState.FROZEN
            return TaskState.DEAD
    return TaskState.LIVE


def wait_until_up(cluster: Cluster, timeout_secs: float) -> None:
    """Waits until every worker and ps of `cluster` answers.

    `ParameterServerStrategy` itself would block inside C for many minutes,
    deaf to signals, when a task is missing.

    Args:
        cluster: The cluster; this process is its chief.
        timeout_secs: Seconds to wait.

    Raises:
        TimeoutError: Some task was not up in time; the message names each.
    """
    deadline = time.monotonic() + timeout_secs
    next_message = time.monotonic() + 5.0
    missing = server_tasks(cluster)
    while True:
        states = {t: probe(_address(cluster, t)) for t in missing}
        missing = [t for t, s in states.items() if s is not TaskState.LIVE]
        if not missing:
            return
        now = time.monotonic()
        listed = ", ".join(
            f"{job}:{index} at {_address(cluster, (job, index))} "
            f"({states[job, index].value})"
            for job, index in missing
        )
        if now >= deadline:
            raise TimeoutError(
                f"{len(missing)} task(s) of the cluster did not come up within "
                f"{timeout_secs:g} s: {listed}. Start them with the same "
                "cluster in TF_CONFIG and check that the addresses are right "
                "and reachable from the chief. "
                "RunConfig(start_timeout_secs=...) sets the limit."
            )
        if now >= next_message:
            _log.info("Waiting for %s; %.0f s left.", listed, deadline - now)
            next_message = now + 10.0
        time.sleep(_POLL_SECS)


def server_tasks(cluster: Cluster) -> list[tuple[str, int]]:
    """`(job, index)` of every task that runs a server for the chief."""
    return [
        (job, index)
        for job in ("ps", "worker")
        for index in cluster.training_spec().get(job, {})
    ]


def _address(cluster: Cluster, task: tuple[str, int]) -> str:
    job, index = task
    return cluster.training_spec()[job][index]

"""TensorFlow servers: starting them, keeping track of chiefs, ending them.

TF1's `tf.train.Server.join()` never returned: parameter servers had to be
killed from outside. Here the chief finally writes a file into the *memory* of
every server (TensorFlow's `ram://` file system, which each process has, by an
ordinary `WriteFile` op placed on that task's device). The server sees the file
and exits with code 0. This needs no extra transport and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.errors import summarize_error
from tfdist._tf.tracing import traced
from tfdist._tf.waiting import wait_for
from tfdist.cluster.memory import publish_free_bytes
from tfdist.cluster.probing import SERVER_JOBS, TaskState, ask, probe
from tfdist.cluster.spec import Cluster
from tfdist.cluster.termination import Sigterm

_log = logging.getLogger(__name__)

_CHIEF = "ram://tfdist/chief"
_LET_GO = "ram://tfdist/dismiss_tasks"
_RECORD, _CONNECTED = "ram://tfdist/said", "."
_POLL_SECS = 0.2
_ROUND_SECS = 10.0
# TensorFlow never frees the functions that were running when a step failed
# (4 MB for a small model), nor, on workers, a thread for each of their input
# ops. A server therefore restarts itself after this many chiefs and recoveries.
_MOST_CONNECTIONS = 20
_GOODBYE_SECS = 60.0
_LET_GO_SECS = 5.0  # Time for the chief to disconnect.
_TERM_SECS = 20.0  # Time for the chief to write its last checkpoint.
_held: set[str] = set()  # Addresses at which this process has been the chief.
_released: list[Cluster] = []  # The jobs that this process has released.
_serves: list[Cluster] = []  # The jobs that this process was asked to serve.
# By default, gRPC may take two minutes to reconnect to a restarted server.
_RECONNECT = {
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.min_reconnect_backoff_ms": 3000,
    "grpc.max_reconnect_backoff_ms": 500,
}


def reconnect_quickly() -> None:
    """Makes TensorFlow try to reconnect to a lost task twice a second.

    Options in the user's `TF_GRPC_DEFAULT_OPTIONS` take precedence.
    """
    name = "TF_GRPC_DEFAULT_OPTIONS"
    given = os.environ.get(name, "")
    ours = [f"{o}={value}" for o, value in _RECONNECT.items() if o not in given]
    os.environ[name] = ",".join(filter(None, [given, *ours]))


def inter_op_threads() -> int:
    """The size of the thread pool that runs ops: one per CPU, at least four.

    A server with a single thread (in a one-CPU container) hangs on the first
    step that both pulls and pushes: the pull blocks the thread the push needs.
    """
    return max(4, len(os.sched_getaffinity(0)))


@contextlib.contextmanager
def starting(cluster: Cluster) -> Iterator[None]:
    """Adds the task and its address to errors from starting its server."""
    try:
        yield
    except (tf.errors.OpError, RuntimeError) as error:
        raise RuntimeError(
            f"The server of task {cluster.task} could not start on "
            f"{cluster.address}. Is another process using that port? {error}"
        ) from error


def serve(
    cluster: Cluster, restart: Callable[[str], None] | None = None
) -> None:
    """Runs this task's server until the chief reports that the job is done.

    The chief does so by `release`, which `train_and_evaluate` calls. The server
    then keeps running while the chief's process is up, for at most a minute. If
    the chief connects again, such as for another job of the same program, the
    server runs until that job is done. A second call serves the second job on
    the same server. A task that the chief lets go (`tfdist.cluster.size`) ends.

    After SIGTERM the server runs for at most 20 more seconds while the chief is
    up, because the chief may have to write its last checkpoint.

    Args:
        cluster: A `Cluster` in which this process is a worker or a ps.
        restart: Called with a reason when chiefs have connected 20 times. It
            must replace this process; the chief recovers as from its death.

    Raises:
        RuntimeError: The server could not start, such as if its port is in use.
        SystemExit: With code 143, after SIGTERM, unless the job ends first.
    """
    sigterm = Sigterm()
    try:
        target = _server(cluster).target
        _serves.append(cluster)
        _log.info("Task %s serves on %s.", cluster.task, target)
        _serve_until_done(cluster, restart, sigterm)
    finally:
        sigterm.restore()


@functools.cache
def _server(cluster: Cluster) -> tf.distribute.Server:
    """This task's server, started only once because it cannot be stopped."""
    reconnect_quickly()
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=inter_op_threads()
    )
    # Threads that spin between two messages of a step compete with the
    # computation: steps were 8 to 18 % slower when five tasks shared two cores.
    config.experimental.disable_thread_spinning = True
    with starting(cluster):
        return tf.distribute.Server(
            tf.train.ClusterSpec(cluster.training_spec()),
            job_name=cluster.task_type,
            task_index=cluster.task_index,
            protocol="grpc",
            config=config,
        )


def _serve_until_done(
    cluster: Cluster, restart: Callable[[str], None] | None, sigterm: Sigterm
) -> None:
    chief, next_round = cluster.tasks["chief"][0], 0.0
    chief_state: TaskState | None = None
    while True:
        record = _record()
        if _is_done(record) and _chief_has_left(record, chief, sigterm):
            break
        if sigterm.received:
            wait_until_gone(chief, _TERM_SECS)
            if _is_done(_record()):
                break
            sigterm.leave()
        if time.monotonic() >= next_round:
            next_round = time.monotonic() + _ROUND_SECS
            publish_free_bytes()
            _trim_memory()  # Left by functions of earlier chiefs and sessions.
            before, chief_state = chief_state, probe(chief)
            if chief_state is not before:
                _log.info("The chief at %s is %s.", chief, chief_state.value)
        if restart and record.count(_CONNECTED) >= _MOST_CONNECTIONS:
            restart(f"{_MOST_CONNECTIONS} connections of a chief")
        if tf.io.gfile.exists(_LET_GO):
            time.sleep(_LET_GO_SECS)
            _log.info(
                "Task %s ends: the job continues without it.", cluster.task
            )
            return
        time.sleep(_POLL_SECS)
    _log.info("Task %s ends: the chief is done.", cluster.task)


def _chief_has_left(record: str, chief: str, sigterm: Sigterm) -> bool:
    """Waits up to a minute for the chief to exit; whether it sent no more.

    The chief's process still has to free its resources on this server.
    """
    wait_until_gone(
        chief, _GOODBYE_SECS, lambda: sigterm.received or _record() != record
    )
    return _record() == record


def _trim_memory() -> None:
    """Returns freed memory to the operating system; takes milliseconds.

    glibc keeps freed memory in an arena per TensorFlow thread: 260 MB, a fourth
    of the total, in a worker that traced a step in each of twelve recoveries.
    """
    ctypes.CDLL(None).malloc_trim(0)


def _record() -> str:
    """The log of chiefs: "." for each connection, "n;" when job n is done.

    In "..1;.2;", the chief connected twice in the first job.
    """
    return storage.read_text(_RECORD) or ""


def _is_done(record: str) -> bool:
    """Whether the job served by this call is done and no other is running."""
    jobs = map(int, re.findall(r"\d+", record))
    goes_on = record.endswith(_CONNECTED)
    return not goes_on and max(jobs, default=0) >= len(_serves)


def wait_until_gone(
    address: str,
    timeout_secs: float,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Waits up to `timeout_secs` until nothing answers at `address`."""
    wait_for(
        lambda: unless() or probe(address) is not TaskState.LIVE, timeout_secs
    )


def release(cluster: Cluster) -> None:
    """Tells every worker and ps that the job is done (see `serve`).

    Logs a warning for, and skips, tasks that are gone or do not answer.
    """
    _released.append(cluster)
    release_again(cluster)


def release_again(cluster: Cluster) -> None:
    """Repeats `release` after a reconnection; no-op unless already released."""
    if not _released:
        return
    tasks = cluster.addresses(*SERVER_JOBS)
    connected = _connected()  # Other tasks do not train at present.
    tasks = {t: a for t, a in tasks.items() if t in connected} or tasks
    answers = ask(list(tasks.values()))
    for task, answer in zip(tasks, answers, strict=True):
        problem = answer.state.value
        if answer.state is TaskState.LIVE:
            try:
                _write(task, _RECORD, f"{len(_released)};")
                continue
            except tf.errors.OpError as error:
                problem = summarize_error(error)
        _log.warning(
            "Task %s could not be told that the job is done: %s.", task, problem
        )


def _write(task: str, name: str, text: str) -> None:
    """Appends to a file in a task's memory (`ram://` appends on writes)."""
    with tf.device(_device(task)):
        tf.io.write_file(name, text)


def dismiss_tasks(tasks: Iterable[str]) -> None:
    """Tells tasks to end because the job continues without them."""
    for task in tasks:
        with contextlib.suppress(tf.errors.OpError):  # It is already gone.
            _write(task, _LET_GO, "")


def admit_tasks(cluster: Cluster, tasks: Iterable[str]) -> None:
    """Records the connection at new workers, then `wait_until_connected`."""
    for task in tasks:
        _write(task, _RECORD, _CONNECTED)
    wait_until_connected(cluster, _ROUND_SECS)


def num_connected(job: str) -> int:
    """The number of tasks of a job that this process is connected to."""
    return sum(task.startswith(f"{job}:") for task in _connected())


def num_ps(strategy: tf.distribute.Strategy) -> int:
    """The number of parameter servers that hold a strategy's variables."""
    # A process stays connected if a job without a cluster follows.
    on_ps = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    return num_connected("ps") if on_ps else 0


def _connected() -> set[str]:
    """The tasks, such as "ps:0", that this process is connected to."""
    devices = tf.config.list_logical_devices("CPU")
    parsed = [tf.DeviceSpec.from_string(device.name) for device in devices]
    return {f"{device.job}:{device.task}" for device in parsed}


def connected_elsewhere(cluster: Cluster) -> bool:
    """Whether this process is connected to a different set of servers."""
    tasks = {t for t in _connected() if t.partition(":")[0] in SERVER_JOBS}
    return bool(tasks) and tasks != {*cluster.addresses(*SERVER_JOBS)}


def _device(task: str) -> str:
    job, _, index = task.partition(":")
    return f"/job:{job}/task:{index}/device:CPU:0"


def hold(cluster: Cluster) -> None:
    """Registers this chief at ps 0, and its connection at every server.

    Raises RuntimeError if another chief that is up holds the job: TensorFlow
    lets any number of chiefs connect to one cluster, where they would overwrite
    each other's training. Two that start within milliseconds are not detected.
    """
    address = cluster.tasks["chief"][0]
    own = {"address": address, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        with tf.device(_device("ps:0")):
            names = tf.io.read_file(_CHIEF).numpy().splitlines()
        holder = json.loads(names[-1])
    except tf.errors.NotFoundError:
        holder = {}
    if any(holder.get(key) != value for key, value in own.items()):
        # A holder at our own address was a predecessor: we serve there now.
        elsewhere = holder.get("address", address)
        if elsewhere != address and probe(elsewhere) is not TaskState.DEAD:
            raise RuntimeError(
                "Another chief holds this job: process {pid} on host {host}, "
                "serving on {address}, since {since}. A cluster has one chief: "
                "end that process, or start a cluster of its own for this "
                "job.".format(**holder)
            )
        own["since"] = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        _write("ps:0", _CHIEF, json.dumps(own) + "\n")
    _held.add(address)
    for task in cluster.addresses(*SERVER_JOBS):
        _write(task, _RECORD, _CONNECTED)


def wait_until_connected(cluster: Cluster, timeout_secs: float) -> None:
    """Waits until every worker reaches every parameter server, or raises.

    Until a worker has reconnected (see `retried`), its reads would fail.
    """

    @traced
    def exists() -> list[tf.Tensor]:
        found = []
        for task in cluster.addresses("ps"):
            with tf.device(_device(task)):
                found.append(tf.io.matching_files(_RECORD))
        return found

    deadline = time.monotonic() + timeout_secs
    for task in cluster.addresses("worker"):
        with tf.device(_device(task)):
            retried(exists, deadline - time.monotonic())


def retried(call: Callable[[], Any], secs: float) -> Any:
    """Returns `call()`, retried for `secs` while a task is unavailable.

    gRPC waits up to half a second between attempts to reconnect to a restarted
    server (`reconnect_quickly`).
    """
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        with contextlib.suppress(tf.errors.UnavailableError):
            return call()
        time.sleep(_POLL_SECS)
    return call()


def refuse_second_chief(cluster: Cluster) -> None:
    """Raises RuntimeError if another chief serves on this chief's address."""
    address = cluster.tasks["chief"][0]
    if address in _held:
        return
    state = probe(address)
    if state is not TaskState.DEAD:
        raise RuntimeError(
            f"Another chief holds this job: one is {state.value} at "
            f"{address}, the chief's address in this cluster. End that "
            "process first; a chief that died frees its address at once."
        )

"""TensorFlow servers: run one, ask whether one is up, tell it to go home.

TF1's `tf.train.Server.join()` never returned: parameter servers had to be
killed from outside. Here the chief's last act is to leave a file in the
*memory* of every server (TensorFlow's `ram://` file system, one per process,
written by an ordinary `WriteFile` op placed on that task's device). The server
sees it and ends with exit code 0. No transport of our own, no file left over.
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
from tfdist.cluster.memory import tell_free_bytes
from tfdist.cluster.probing import SERVER_JOBS, TaskState, ask, probe
from tfdist.cluster.spec import Cluster
from tfdist.cluster.termination import Sigterm

_log = logging.getLogger(__name__)

_CHIEF = "ram://tfdist/chief"
_LET_GO = "ram://tfdist/let_go"
_SAID, _CONNECTED = "ram://tfdist/said", "."
_POLL_SECS = 0.2
_ROUND_SECS = 10.0
# TensorFlow keeps the functions that were running when a step failed (4 MB of a
# small model), and on workers a thread for each of their input ops. So after so
# many chiefs and recoveries a server restarts itself.
_MOST_CONNECTIONS = 20
_GOODBYE_SECS = 60.0
_LET_GO_SECS = 5.0  # In which the chief disconnects.
_TERM_SECS = 20.0  # In which the chief writes its last checkpoint.
_held: set[str] = set()  # Addresses at which this process has been the chief.
_released: list[Cluster] = []  # The jobs that this process has released.
_serves: list[Cluster] = []  # Those that it was told to serve.
# gRPC's own settings leave a server that came back alone for up to two minutes.
_RECONNECT = {
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.min_reconnect_backoff_ms": 3000,
    "grpc.max_reconnect_backoff_ms": 500,
}


def reconnect_quickly() -> None:
    """Has TensorFlow look for a lost task twice a second, from now on.

    The user's `TF_GRPC_DEFAULT_OPTIONS` win.
    """
    name = "TF_GRPC_DEFAULT_OPTIONS"
    given = os.environ.get(name, "")
    ours = [f"{o}={value}" for o, value in _RECONNECT.items() if o not in given]
    os.environ[name] = ",".join(filter(None, [given, *ours]))


def inter_op_threads() -> int:
    """Size of the thread pool that runs ops: the CPUs, but at least four.

    A server with a single thread (a one-CPU container) hangs on the first step
    that pulls and pushes: the pull waits inside the thread that the push needs.
    """
    return max(4, len(os.sched_getaffinity(0)))


@contextlib.contextmanager
def starting(cluster: Cluster) -> Iterator[None]:
    """Names the task and its address if its server cannot start."""
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
    """Runs this task's server until the chief says that the job is done.

    The chief says so by `release`, which `train_and_evaluate` calls. While its
    process is there the server goes on, for a minute at most; if the chief has
    connected again, as for another job of the same program, until that is done
    or the chief is gone. A second call serves the second job on the same
    server. A task that the chief does without (`tfdist.cluster.size`) returns.

    After SIGTERM it serves on while the chief is there, which may have to write
    its last checkpoint, for at most 20 seconds.

    Args:
        cluster: A `Cluster` in which this process is a worker or a ps.
        restart: Replaces this process, for the reason it is given, when a chief
            connects for the twentieth time, which recovers as from its death.

    Raises:
        RuntimeError: The server could not start: is its port in use?
        SystemExit: with code 143, after SIGTERM, unless the job ends first.
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
    """This task's server, which is started once: it cannot be stopped."""
    reconnect_quickly()
    config = tf.compat.v1.ConfigProto(
        inter_op_parallelism_threads=inter_op_threads()
    )
    # Threads that spin between two messages of a step take the CPU from the
    # computation: steps were 8 to 18 % slower where five tasks share two cores.
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
    chief, chief_state = cluster.tasks["chief"][0], TaskState.DEAD
    next_round = 0.0
    while True:
        said = _said()
        if _is_done(said) and _stays(said, chief, sigterm):
            break
        if sigterm.received:
            wait_until_gone(chief, _TERM_SECS)
            if _is_done(_said()):
                break
            sigterm.leave()
        if time.monotonic() >= next_round:
            next_round = time.monotonic() + _ROUND_SECS
            tell_free_bytes()
            _trim_memory()  # Of the functions of chiefs and sessions past.
            before, chief_state = chief_state, probe(chief)
            if chief_state is not before:
                _log.info("The chief at %s is %s.", chief, chief_state.value)
        if restart and said.count(_CONNECTED) >= _MOST_CONNECTIONS:
            restart(f"{_MOST_CONNECTIONS} connections of a chief")
        if tf.io.gfile.exists(_LET_GO):
            time.sleep(_LET_GO_SECS)
            _log.info("Task %s ends: the job goes on without it.", cluster.task)
            return
        time.sleep(_POLL_SECS)
    _log.info("Task %s ends: the chief is done.", cluster.task)


def _stays(said: str, chief: str, sigterm: Sigterm) -> bool:
    """Whether all that chiefs have said stays all, for a minute at most.

    The chief's process still frees what it holds here; let it leave first.
    """
    wait_until_gone(
        chief, _GOODBYE_SECS, lambda: sigterm.received or _said() != said
    )
    return _said() == said


def _trim_memory() -> None:
    """Gives the system back what this process has freed, in milliseconds.

    glibc keeps it in an arena for each of TensorFlow's threads: a fourth of all
    memory, 260 MB, in a worker that traced a step in each of twelve recoveries.
    """
    ctypes.CDLL(None).malloc_trim(0)


def _said() -> str:
    """What chiefs have said here: that one connects, that its n-th job is done.

    Such as "..1;.2;": in the first job it has connected again.
    """
    return storage.read_text(_SAID) or ""


def _is_done(said: str) -> bool:
    """Whether the job is that this call serves, and no other goes on."""
    jobs = map(int, re.findall(r"\d+", said))
    goes_on = said.endswith(_CONNECTED)
    return not goes_on and max(jobs, default=0) >= len(_serves)


def wait_until_gone(
    address: str,
    timeout_secs: float,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Waits until nothing answers there, so long at most."""
    wait_for(
        lambda: unless() or probe(address) is not TaskState.LIVE, timeout_secs
    )


def release(cluster: Cluster) -> None:
    """Tells every worker and ps that the job is done (see `serve`).

    One that is gone or does not answer is reported and skipped.
    """
    _released.append(cluster)
    release_again(cluster)


def release_again(cluster: Cluster) -> None:
    """As `release`, if this process has done that, and connected since."""
    if not _released:
        return
    tasks = cluster.addresses(*SERVER_JOBS)
    connected = _connected()  # Others do not train now.
    tasks = {t: a for t, a in tasks.items() if t in connected} or tasks
    answers = ask(list(tasks.values()))
    for task, answer in zip(tasks, answers, strict=True):
        problem = answer.state.value
        if answer.state is TaskState.LIVE:
            try:
                _write(task, _SAID, f"{len(_released)};")
                continue
            except tf.errors.OpError as error:
                problem = summarize_error(error)
        _log.warning(
            "Task %s could not be told that the job is done: %s.", task, problem
        )


def _write(task: str, name: str, text: str) -> None:
    """Writes a file in a task's memory, or appends to it, as `ram://` does."""
    with tf.device(_device(task)):
        tf.io.write_file(name, text)


def let_go(tasks: Iterable[str]) -> None:
    """Tells tasks to end: the job goes on without them."""
    for task in tasks:
        with contextlib.suppress(tf.errors.OpError):  # It has gone already.
            _write(task, _LET_GO, "")


def take_in(cluster: Cluster, tasks: Iterable[str]) -> None:
    """Counts the connection to new workers, and waits until they reach all."""
    for task in tasks:
        _write(task, _SAID, _CONNECTED)
    wait_until_connected(cluster, _ROUND_SECS)


def num_connected(job: str) -> int:
    """To how many tasks of a job this process is connected."""
    return sum(task.startswith(f"{job}:") for task in _connected())


def num_ps(strategy: tf.distribute.Strategy) -> int:
    """How many parameter servers hold the variables of a strategy."""
    # A process stays connected when a job of its own follows.
    on_ps = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    return num_connected("ps") if on_ps else 0


def _connected() -> set[str]:
    """The tasks, such as "ps:0", that this process is connected to."""
    devices = tf.config.list_logical_devices("CPU")
    parsed = [tf.DeviceSpec.from_string(device.name) for device in devices]
    return {f"{device.job}:{device.task}" for device in parsed}


def is_other(cluster: Cluster) -> bool:
    """Whether this process is connected to other servers than these."""
    tasks = {t for t in _connected() if t.partition(":")[0] in SERVER_JOBS}
    return bool(tasks) and tasks != {*cluster.addresses(*SERVER_JOBS)}


def _device(task: str) -> str:
    job, _, index = task.partition(":")
    return f"/job:{job}/task:{index}/device:CPU:0"


def hold(cluster: Cluster) -> None:
    """Leaves this chief's name with the first server, and counts at each.

    Raises RuntimeError if another chief that is up holds the job: TensorFlow
    lets any number attach to one cluster, which would overwrite each other's
    training. Two that start within the same milliseconds are not told apart.
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
        # On our own address that was a predecessor: we serve there now.
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
        _write(task, _SAID, _CONNECTED)


def wait_until_connected(cluster: Cluster, timeout_secs: float) -> None:
    """Waits until every worker reaches every parameter server, or raises.

    A worker's own connection may wait (see `retried`), and reads on it fail.
    """

    @traced
    def exists() -> list[tf.Tensor]:
        found = []
        for task in cluster.addresses("ps"):
            with tf.device(_device(task)):
                found.append(tf.io.matching_files(_SAID))
        return found

    deadline = time.monotonic() + timeout_secs
    for task in cluster.addresses("worker"):
        with tf.device(_device(task)):
            retried(exists, deadline - time.monotonic())


def retried(call: Callable[[], Any], secs: float) -> Any:
    """What `call` returns, repeated for so long while a task is unavailable.

    A connection to a server that was restarted waits up to half a second
    between its attempts (`reconnect_quickly`).
    """
    deadline = time.monotonic() + secs
    while time.monotonic() < deadline:
        with contextlib.suppress(tf.errors.UnavailableError):
            return call()
        time.sleep(_POLL_SECS)
    return call()


def refuse_second_chief(cluster: Cluster) -> None:
    """Raises RuntimeError if another chief serves on the address of ours."""
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

"""Creates the `tf.distribute.Strategy` of a `Cluster`.

If a task is missing, the start fails with a clear error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist._tf import private
from tfdist._tf.tracing import check_tensorflow
from tfdist.cluster import meeting, probing, servers, termination
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.spec import Cluster

_KEEP_ALIVE_SECS = 60  # How long servers keep the state of a silent chief.
_CONNECT_SECS = 15.0
_LEAVE_SECS = 10.0  # How long all-reduce processes wait to leave together.
# A process can join the others of a job only once.
_joined: dict[Cluster, tf.distribute.MultiWorkerMirroredStrategy] = {}


def parameter_server_strategy(
    cluster: Cluster,
    *,
    start_timeout_secs: float = 600.0,
    give_up: Callable[[], None] = lambda: None,
    again: tf.distribute.ParameterServerStrategy | None = None,
) -> tf.distribute.ParameterServerStrategy:
    """Connects the chief to its workers and parameter servers.

    The cluster spec includes the chief's address, without which servers could
    not call the chief back after a reconnection. `again` is a strategy to
    reconnect; for the other arguments see `probing.wait_until_up`. Raises the
    errors of that function, `check_is_chief` and `servers.hold`.
    """
    check_is_chief(cluster)
    _widen_thread_pool()
    servers.reconnect_quickly()
    private.expire_remote_state_after(_KEEP_ALIVE_SECS)
    probing.wait_until_up(cluster, start_timeout_secs, give_up)
    made = tf.distribute.ParameterServerStrategy
    strategy = again or made.__new__(made)
    with contextlib.nullcontext() if again else private.local_state_kept():
        _connect(strategy, _resolver(cluster))
    servers.hold(cluster)
    servers.wait_until_connected(cluster, _CONNECT_SECS)
    return strategy


def check_is_chief(cluster: Cluster) -> None:
    """Raises ValueError unless this is the chief of a cluster with ps."""
    if cluster.role != "chief" or not cluster.num_ps:
        raise ValueError(
            "Only the chief of a cluster with parameter servers can connect "
            f"to it. Received: cluster={cluster}. Call `train_and_evaluate` in "
            "every task, or `tfdist.cluster.serve` in workers and ps."
        )


STRATEGIES = ("one_device", "mirrored", "multi_worker_mirrored", "ps", "tpu")
"""The names that `RunConfig(strategy=...)` accepts besides "auto"."""


SYNCHRONOUS = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
)
"""Strategies whose replicas run each step synchronously."""


def resolved(name: str, cluster: Cluster) -> str:
    """Resolves "auto" to the strategy name for the cluster or the GPUs."""
    if name != "auto":
        return name
    if cluster.num_ps:
        return "ps"
    if cluster.is_distributed:
        return "multi_worker_mirrored"
    several = len(tf.config.list_physical_devices("GPU")) > 1
    return "mirrored" if several else "one_device"


def check(strategy: str | tf.distribute.Strategy, cluster: Cluster) -> None:
    """Raises for an unknown or unsuitable strategy, or in TF1's graph mode."""
    check_tensorflow()
    if not isinstance(strategy, str | tf.distribute.Strategy):
        raise TypeError(
            "Argument `strategy` must be a string or a tf.distribute.Strategy. "
            f"Received: strategy={strategy!r}."
        )
    connects = (
        tf.distribute.ParameterServerStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    if isinstance(strategy, connects):
        raise ValueError(
            f"tfdist itself creates a {type(strategy).__name__}, and recreates "
            "it after a failure. Use strategy='auto'."
        )
    if isinstance(strategy, str) and strategy not in ("auto", *STRATEGIES):
        raise ValueError(
            "Argument `strategy` must be 'auto' or one of "
            f"{', '.join(map(repr, STRATEGIES))}. Received: "
            f"strategy={strategy!r}."
        )
    fits = {
        "auto": True,
        "ps": cluster.num_ps > 0,
        "multi_worker_mirrored": cluster.is_distributed and not cluster.num_ps,
    }
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    alone = cluster.role == "local"
    if cluster.trains and not fits.get(name, alone):
        raise ValueError(
            f"Strategy {name!r} does not fit this process, which is {cluster}. "
            "'ps' needs a cluster with parameter servers, "
            "'multi_worker_mirrored' one with only a chief and workers, and "
            "the others no cluster."
        )


def local_strategy(name: str) -> tf.distribute.Strategy:
    """Returns a strategy whose replicas are all driven by this process.

    Creates each strategy once, because TensorFlow would mix up the messages of
    two. "mirrored" uses every GPU or, if there is none, every logical CPU;
    "tpu" uses the slice that `TPU_NAME` names or this machine has.

    Raises:
        RuntimeError: Called in another strategy's scope, or there is no TPU.
    """
    if tf.distribute.has_strategy():
        raise RuntimeError(
            "This is called inside `strategy.scope()`. tfdist enters the scope "
            "itself: leave it, and give the strategy to "
            f"`RunConfig(strategy=...)`, which is now {name!r}."
        )
    return _local_strategy(name)


@functools.cache
def _local_strategy(name: str) -> tf.distribute.Strategy:
    if name == "mirrored":
        kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
        devices = tf.config.list_logical_devices(kind)
        return tf.distribute.MirroredStrategy([d.name for d in devices])
    if name == "tpu":
        return _tpu_strategy()
    return tf.distribute.get_strategy()


def _tpu_strategy() -> tf.distribute.TPUStrategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local")
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise RuntimeError(
            "There is no TPU that this process can use. TensorFlow's build for "
            "TPUs and a TPU VM are needed; TensorFlow says: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error


def multi_worker_strategy(
    cluster: Cluster,
    start_timeout_secs: float = 600.0,
    give_up: Callable[[], None] = lambda: None,
    size: ClusterSize | None = None,
) -> tf.distribute.MultiWorkerMirroredStrategy:
    """Connects this process, once, to the others of an all-reduce job.

    Arguments are those of `meeting.meet`; `group_of` returns the tasks that
    take part.

    Raises:
        UnavailableError: A task that was to take part is gone.
        TimeoutError: A task was not up in time. If one disappears after that,
            TensorFlow blocks in C, which Python cannot interrupt; SIGALRM then
            ends this process, with a traceback, after the same time.
    """
    if cluster in _joined:
        return _joined[cluster]
    if tf.config.functions_run_eagerly():
        raise RuntimeError(
            "An all-reduce job works only in tf.functions: do not call "
            "`tf.config.run_functions_eagerly(True)`."
        )
    servers.reconnect_quickly()
    group = meeting.meet(cluster, start_timeout_secs, give_up, size)
    sizes = {job: len(tasks) for job, tasks in group.tasks.items()}
    leader = f"/job:{next(iter(sizes))}/replica:0/task:0"
    private.leave_together(sizes, leader, _LEAVE_SECS)
    join = tf.distribute.MultiWorkerMirroredStrategy
    try:
        with _time_limit(start_timeout_secs), termination.keeping_sigterm():
            _joined[cluster] = join(_resolver(group))
    except RuntimeError as error:
        raise ValueError(
            "An all-reduce job must be joined before TensorFlow computes "
            "anything, but it already has. Create layers, optimizers, tables, "
            "tensors and datasets in the model function or the input function "
            "(or in one with `@functools.cache` that it calls); canned "
            "estimators take a function that returns an optimizer."
        ) from error
    return _joined[cluster]


def group_of(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> Cluster:
    """The cluster of the processes that take part in an all-reduce job."""
    resolver = strategy.cluster_resolver
    jobs = resolver.cluster_spec().as_dict()
    return Cluster.from_jobs(jobs, resolver.task_type, resolver.task_id)


@contextlib.contextmanager
def _time_limit(secs: float) -> Iterator[None]:
    """Ends this process by SIGALRM, with a traceback, after `secs` seconds.

    For calls that block in C and hold the GIL, so that no Python thread or
    signal handler can run. The signal is therefore handled by faulthandler, in
    C, and then by the system's default, which ends the process.
    (`faulthandler.dump_traceback_later` has only one timer per process, which
    the user may need.) There is no limit outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    stderr = sys.__stderr__ or sys.stderr
    faulthandler.register(signal.SIGALRM, file=stderr, chain=True)
    # Timers do not accept "inf".
    users_timer = signal.setitimer(signal.ITIMER_REAL, min(secs, 1e9))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *users_timer)
        faulthandler.unregister(signal.SIGALRM)
        signal.signal(signal.SIGALRM, before)


def _connect(
    strategy: tf.distribute.ParameterServerStrategy,
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> None:
    connect = functools.partial(type(strategy).__init__, strategy, resolver)
    with fail_fast():
        servers.retried(connect, _CONNECT_SECS)


def _resolver(
    cluster: Cluster,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.training_spec()),
        task_type=cluster.task_type,
        task_id=cluster.task_index,
        rpc_layer="grpc",
    )


@contextlib.contextmanager
def fail_fast() -> Iterator[None]:
    """Turns the death of a task since its probe into an error, not a hang.

    TensorFlow reads the variable at each call. The user's value is restored, or
    else the recommended `use_caller`: with the default, recovery would spin.
    """
    name = "GRPC_FAIL_FAST"
    before = os.environ.get(name, "use_caller")
    os.environ[name] = "true"
    try:
        yield
    finally:
        os.environ[name] = before


def _widen_thread_pool() -> None:
    """Gives the chief's own server the threads that every server needs."""
    if tf.config.threading.get_inter_op_parallelism_threads() == 0:
        # Fails once TensorFlow has started, which is harmless: the pool then
        # has a thread per CPU, and the chief holds no variables.
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_inter_op_parallelism_threads(
                servers.inter_op_threads()
            )


def check_tpu(element_spec: Any, tables: Sequence[Any]) -> None:
    """Raises ValueError if XLA cannot compile a step with these tables."""
    specs = tf.nest.flatten(element_spec)
    problems = [
        f"Its table {table.path!r} looks up each row once, so the number of "
        "rows differs from step to step. Use keras.layers.Embedding."
        for table in tables
    ]
    if any(spec.dtype == tf.string for spec in specs):
        problems.append(
            "Its batches have strings. Convert them to numbers in the input "
            "function."
        )
    problems += [
        f"The shape of a part of its batches is not fixed: {spec}. "
        "Use batch(..., drop_remainder=True) and dense tensors."
        for spec in specs
        if not isinstance(spec, tf.TensorSpec)
        or not spec.shape.is_fully_defined()
    ][:1]
    if problems:
        raise ValueError(
            "The model cannot be trained on a TPU:\n  " + "\n  ".join(problems)
        )

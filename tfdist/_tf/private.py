"""The private TensorFlow and Keras names that tfdist cannot do without.

Each has a comment with its reason, and a canary in `tests/_tf/test_private.py`
that fails loudly when a new version changes it; `setup.py` pins both packages.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from tensorflow.python import pywrap_tfe  # Whether tapes record: `accessed`.

# The number of replicas that Keras sees, for `single_replica_view`.
from tensorflow.python.distribute import distribute_lib

# Describes the processes of an all-reduce job, for `leave_together`.
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    coordination_config_pb2,
)

# A coordinator's threads and queue, for `schedule` and the functions after it.
from tensorflow.python.distribute.coordinator import (
    cluster_coordinator,
    coordinator_context,
)

# The connection to the servers; how a `tf.GradientTape` learns of variables.
from tensorflow.python.eager import context, tape
from tensorflow.python.framework import config  # Op determinism, for `now`.

# The spec of an element that is None; public since TensorFlow 2.19 or later.
from tensorflow.python.framework.none_tensor import (
    NoneTensorSpec as NoneTensorSpec,
)

# A variable without memory: to describe a model, or to hold a value later.
from tensorflow.python.ops.resource_variable_ops import (
    UninitializedVariable as UninitializedVariable,
)

ClusterCoordinator: TypeAlias = tf.distribute.coordinator.ClusterCoordinator

# A coordinator raises these for a dispatch whose input was lost with its
# worker. Neither is a `tf.errors.OpError`; both have an `original_exception`.
COORDINATOR_ERRORS = (
    cluster_coordinator.ClosureInputError,
    cluster_coordinator.ClosureAbortedError,
)

SharedTable = collections.namedtuple(
    "SharedTable",
    "creator name dimension initializer trainable ckpt_to_load_from",
)
"""The attributes shared in one `tf.feature_column.shared_embeddings`."""


def shared_table(column: Any) -> SharedTable:
    """The table of a shared embedding column, which only TF's layers read."""
    creator = column.shared_embedding_column_creator
    own = [getattr(creator, f"_{name}") for name in SharedTable._fields[1:]]
    return SharedTable(creator, *own)


def column_config(column: Any) -> dict[str, Any]:
    """Converts a `tf.feature_column` to JSON; TF has no public way to do so."""
    if hasattr(column, "shared_embedding_column_creator"):
        raise NotImplementedError(
            f"A layer with the shared embedding {column.name!r} has no config: "
            "save its weights, or a SavedModel."
        )
    return tf.__internal__.feature_column.serialize_feature_column(column)


def column_from_config(config: dict[str, Any]) -> Any:
    """Returns the column whose `column_config` is given."""
    return tf.__internal__.feature_column.deserialize_feature_column(
        config, keras.saving.get_custom_objects()
    )


def unique_id(variable: tf.Variable) -> str:
    """The key by which Keras' TensorFlow optimizers identify a variable."""
    return variable._unique_id


def expire_remote_state_after(secs: int) -> None:
    """Sets how long after its death servers free a chief's resources.

    TensorFlow uses 600 seconds, for a runtime that is not yet initialized and
    as the default of two arguments that nobody passes.
    """
    context._KEEP_ALIVE_SECS = secs
    context.Context.set_server_def.__defaults__ = (secs,)
    context.Context.update_server_def.__defaults__ = (secs,)


def trace(
    coordinator: ClusterCoordinator,
    function: tf.types.experimental.PolymorphicFunction,
    *args: Any,
) -> tf.types.experimental.ConcreteFunction:
    """Traces a function with arguments from `coordinator.schedule`."""
    on_one = cluster_coordinator._select_worker_slice(0, args)
    specs = tf.nest.map_structure(
        cluster_coordinator._maybe_as_type_spec, on_one
    )
    with coordinator.strategy.scope():
        return function.get_concrete_function(*specs)


@contextlib.contextmanager
def local_state_kept() -> Iterator[None]:
    """Keeps this process's lookup tables and variables while it connects.

    The first connection replaces its devices and loses their state, such as
    that of preprocessing layers created before training. Later connections keep
    the state, which functions that were traced with it need.
    """
    here, kind = _here(), type(tf.Variable(0))
    objects = gc.get_objects()
    tables = [o for o in objects if type(o) is tf.lookup.StaticHashTable]
    variables = [o for o in objects if type(o) is kind]
    values = [(v, v.numpy()) for v in variables if v.handle.device == here]
    yield
    if _here() == here:
        return
    for table in tables:
        table._resource_handle = table._create_resource()
        table._initialize()
    for variable, value in values:
        made = tf.Variable(value, dtype=variable.dtype, shape=variable.shape)
        variable._handle = made.handle


def _here() -> str:
    """The device on which eager ops place tensors."""
    return tf.constant(0).device


def now() -> tf.Tensor:
    """The time in seconds, a float64; 0 if op determinism is enabled."""
    if config.is_op_determinism_enabled():
        return tf.zeros([], tf.float64)
    return tf.timestamp()


def copy_tables(function: tf.types.experimental.ConcreteFunction) -> None:
    """Makes workers that call a function use their own lookup tables."""
    for handle in function.graph.external_captures:
        table: Any = getattr(handle, "_parent_trackable", lambda: None)()
        if type(table) is tf.lookup.StaticHashTable:
            function.replace_capture_with_deferred_capture(
                handle,
                functools.partial(_table, *table.export()),
                tf.TensorSpec([], tf.resource),
            )


def _table(keys: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """The handle of a new lookup table."""
    handle = tf.raw_ops.AnonymousHashTable(
        key_dtype=keys.dtype, value_dtype=values.dtype
    )
    tf.raw_ops.InitializeTableV2(table_handle=handle, keys=keys, values=values)
    return handle


def raise_immediately(coordinator: ClusterCoordinator) -> None:
    """Makes the coordinator raise errors without waiting for other calls.

    A call that reads from a server that was killed and restarted never ends.
    """
    coordinator._cluster.closure_queue._cancel_all_closures = lambda: None


def schedule(
    coordinator: ClusterCoordinator, call: Callable[..., None], *args: Any
) -> None:
    """Schedules a Python callable on a worker's thread in this process.

    The public method only takes TensorFlow functions. Both are called again for
    another worker if the first one dies; a callable can notice that.
    """
    coordinator._cluster.schedule(call, args=args, kwargs=None)


def current_worker() -> int:
    """The index of the worker for which a scheduled callable runs."""
    return coordinator_context.get_current_dispatch_context().worker_index


def stop_coordinator(coordinator: ClusterCoordinator) -> None:
    """Tells the coordinator's threads to end, as its destructor would.

    The destructor may not run: an exception's traceback may hold a reference.
    """
    cluster = coordinator._cluster
    handler = cluster.failure_handler
    # `stop` waits for a lock that the handler's thread holds while it waits,
    # maybe forever, for a task that is gone.
    handler.stop = lambda: None
    handler._should_preemption_thread_run = False
    handler._cluster_due_for_update_or_finish.set()
    cluster.stop()
    for worker in cluster.workers:
        # Otherwise the error is reported again when the executor is deleted.
        worker.executor.clear_error()


def set_cluster_value(key: str, value: str) -> None:
    """Writes a value, once, for all processes of an all-reduce job to read."""
    context.context().set_config_key_value(f"tfdist/{key}", value)


def get_cluster_value(key: str, timeout_secs: float) -> str | None:
    """Reads a value that any process has set, or returns None after a timeout.

    Raises `OpError` if the process that stores values, or another, is gone.
    """
    try:
        return context.context().get_config_key_value(
            f"tfdist/{key}", max(1, int(timeout_secs * 1000))
        )
    except tf.errors.DeadlineExceededError:
        return None


def leave_together(jobs: Mapping[str, int], leader: str, secs: float) -> None:
    """Makes processes of an all-reduce job wait for each other at their end.

    Otherwise the first may be gone before the others have disconnected, which
    then look for it for half a minute. Call this before the strategy is
    created, with the size of each job and the first task's device.
    """
    context.context().configure_coordination_service(
        "standalone",
        service_leader=leader,
        shutdown_barrier_timeout_in_ms=int(secs * 1000),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=num)
            for job, num in jobs.items()
        ],
    )


def late_captures(
    graph: tf.__internal__.FuncGraph,
) -> tuple[list[tf.Tensor], list[Callable[[], list[tf.Tensor]]]]:
    """Placeholders of the tables each worker creates, and their creators."""
    return graph.deferred_internal_captures, graph.deferred_external_captures


def variable_handles(graph: tf.__internal__.FuncGraph) -> list[tf.Tensor]:
    """The handles of the variables outside of a graph that it uses.

    Handles of other resources, such as lookup tables, have no handle data.
    """
    resources = [t for t in graph.external_captures if t.dtype == tf.resource]
    return [t for t in resources if t._handle_data and t._handle_data.is_set]


def accessed(value: tf.Tensor) -> tf.Tensor:
    """Marks a value that stands for a trainable variable as being read.

    All tapes watch it, so `tf.custom_gradient`, which stops them, finds it.
    """
    value.handle, value.trainable = value, True
    is_stopped = pywrap_tfe.TFE_Py_TapeSetIsStopped()
    if is_stopped:
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
    tape.variable_accessed(value)
    if is_stopped:
        pywrap_tfe.TFE_Py_TapeSetStopOnThread()
    return value


@contextlib.contextmanager
def single_replica_view() -> Iterator[None]:
    """A context in which Keras considers a replica the only one.

    Keras divides its own losses by the number of replicas, but not losses that
    a model computes itself. The replica context does not change.
    """
    alone = distribute_lib._get_default_strategy()
    context = tf.distribute.get_replica_context()
    mode = distribute_lib._ThreadMode(alone, None, context)
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()

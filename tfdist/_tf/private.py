"""The private TensorFlow and Keras names that tfdist cannot do without.

Each has its reason beside it and a canary in `tests/_tf/test_private.py`, which
fails loudly when a new version changes it; `setup.py` pins both packages.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import functools
import gc
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

# What a thread knows of its replica, for `seen_alone`.
from tensorflow.python.distribute import distribute_lib

# Describes the processes of an all-reduce job, for `leave_together`.
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    coordination_config_pb2,
)

# A coordinator's threads and queue, for `schedule` and what follows it.
from tensorflow.python.distribute.coordinator import (
    cluster_coordinator,
    coordinator_context,
)

# What a checkpoint saves as slices of one tensor and restores in any number of
# pieces; public TensorFlow makes one only through a `variable_partitioner`,
# which Keras 3 cannot use.
from tensorflow.python.distribute.sharded_variable import (
    ShardedVariable as ShardedVariable,
)

# The connection to the servers, for `expire_remote_state_after`.
# What a `tf.GradientTape` knows of variables, for `variable_accessed`.
from tensorflow.python.eager import context, tape

# A variable without memory: to describe a model with, or to hold a value in.
from tensorflow.python.ops.resource_variable_ops import (
    UninitializedVariable as UninitializedVariable,
)

# What a checkpoint writes and reads for one variable: here, several slices.
from tensorflow.python.training.saving import saveable_object

from tfdist._tf import storage

ClusterCoordinator: TypeAlias = tf.distribute.coordinator.ClusterCoordinator

# What a coordinator raises for a dispatch whose input was lost with its worker;
# neither is a `tf.errors.OpError`. Both hold the `original_exception`.
COORDINATOR_ERRORS = (
    cluster_coordinator.ClosureInputError,
    cluster_coordinator.ClosureAbortedError,
)

Saveable = tf.Variable | ShardedVariable
"""What a checkpoint holds under one name."""

SharedTable = collections.namedtuple(
    "SharedTable",
    "creator name dimension initializer trainable ckpt_to_load_from",
)
"""What the columns of one `tf.feature_column.shared_embeddings` share."""


def shared_table(column: Any) -> SharedTable:
    """The table of a shared embedding column, which only TF's layers read."""
    creator = column.shared_embedding_column_creator
    own = [getattr(creator, f"_{name}") for name in SharedTable._fields[1:]]
    return SharedTable(creator, *own)


def column_config(column: Any) -> dict[str, Any]:
    """A `tf.feature_column` as JSON; TF has no public way to save one."""
    if hasattr(column, "shared_embedding_column_creator"):
        raise NotImplementedError(
            f"A layer with the shared embedding {column.name!r} has no config: "
            "save its weights, or a SavedModel."
        )
    return tf.__internal__.feature_column.serialize_feature_column(column)


def column_from_config(config: dict[str, Any]) -> Any:
    """The column of `column_config`."""
    return tf.__internal__.feature_column.deserialize_feature_column(
        config, keras.saving.get_custom_objects()
    )


def unique_id(variable: tf.Variable) -> str:
    """The key under which a TensorFlow optimizer of Keras knows a variable."""
    return variable._unique_id


def expire_remote_state_after(secs: int) -> None:
    """Sets after how long the servers free what a dead chief held there.

    TensorFlow has 600 seconds, as the default of two arguments that nobody
    passes and for a runtime that is not yet initialized.
    """
    context._KEEP_ALIVE_SECS = secs
    context.Context.set_server_def.__defaults__ = (secs,)
    context.Context.update_server_def.__defaults__ = (secs,)


class PartitionedVariable(ShardedVariable):
    """Shards of one table, saved and read in the order of its rows.

    Each server writes what it holds, each run of rows as a slice of the table.
    A run is its first row and its size.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        runs: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        super().__init__(variables)
        self.runs = list(zip(self._variables, runs, strict=True))

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def saveables(name: str) -> list[_Slices]:
            return [_Slices(*shard, self.shape, name) for shard in self.runs]

        return {"VARIABLE_VALUE": saveables}

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        pieces: dict[int, tf.Tensor] = {}
        for variable, runs in self.runs:
            split = tf.split(variable.read_value(), [size for _, size in runs])
            pieces |= zip((row for row, _ in runs), split, strict=True)
        return tf.concat([pieces[row] for row in sorted(pieces)], 0, name)

    def __getitem__(self, spec: Any) -> tf.Tensor:
        return tf.convert_to_tensor(self)[spec]

    def numpy(self) -> np.ndarray:
        """The table."""
        return tf.convert_to_tensor(self).numpy()


# Rows between which a float32 table is cut without a copy, whatever its width.
_ALIGNED = 16


class _Slices(saveable_object.SaveableObject):
    """One shard in a checkpoint: its runs, as slices of the table."""

    def __init__(
        self,
        variable: tf.Variable,
        runs: Sequence[tuple[int, int]],
        shape: tf.TensorShape,
        name: str,
    ) -> None:
        runs = _aligned(runs)
        sizes = [size for _, size in runs]
        pieces: list[tf.Tensor] = []

        def piece(i: int) -> tf.Tensor:
            """Of one save after the other; they are asked for in order."""
            if i == 0:
                pieces[:] = _pieces(variable, sizes)
            return pieces[i] if i < len(sizes) - 1 else pieces.pop()

        specs, rest = [], shape.as_list()[1:]
        for i, (row, size) in enumerate(runs):
            where = tf.Variable.SaveSliceInfo(
                name, shape.as_list(), [row] + [0] * len(rest), [size, *rest]
            )
            spec = where.spec, name, variable.dtype, variable.device
            own = functools.partial(piece, i)
            specs.append(saveable_object.SaveSpec(own, *spec))
        super().__init__(variable, specs, name)

    def restore(
        self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any
    ) -> Any:
        with tf.device(self.op.device):
            return self.op.assign(tf.concat(restored_tensors, axis=0))


def _aligned(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of a shard of which the longest begin and end where none is copied.

    TensorFlow copies no part of a tensor that begins, and ends, at multiples of
    64 bytes. So the last rows are a run of their own.
    """
    *others, (row, size) = runs
    odd = sum(size for _, size in runs) % _ALIGNED
    if not others or not 0 < odd < size:
        return [*runs]
    return [*others, (row, size - odd), (row + size - odd, odd)]


def _pieces(variable: tf.Variable, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Runs of rows of a shard."""
    with tf.device(variable.device):
        value = variable.read_value_no_copy()
        # From a GPU, which no file is written on.
        with tf.device("/device:CPU:0"):
            value = tf.identity(value)
            return _cutter(value.shape, value.dtype, tuple(sizes))(value)


@functools.cache
def _cutter(
    shape: tf.TensorShape, dtype: tf.DType, sizes: tuple[int, ...]
) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    """Cuts a tensor into runs of rows; traced once for all that are cut so."""
    ends, rest = [*itertools.accumulate(sizes)], shape[1:]
    cuts = [0, *(end for end in ends if end % _ALIGNED == 0)]
    width = rest.num_elements()
    middle = cuts[-1] * width

    def cut(value: tf.Tensor) -> list[tf.Tensor]:
        flat = tf.reshape(value, [-1])
        parts = [flat[middle:]]
        if middle:
            groups = tf.reshape(flat[:middle], [-1, _ALIGNED * width])
            parts[:0] = tf.split(groups, np.diff(cuts) // _ALIGNED)
        pieces: list[tf.Tensor] = []
        runs = itertools.groupby(
            zip(ends, sizes, strict=True),
            lambda run: bisect.bisect_left(cuts, run[0]) - 1,
        )
        for which, own in runs:
            rows = tf.reshape(parts[which], [-1, *rest])
            split = [size for _, size in own]
            pieces += tf.split(rows, split) if len(split) > 1 else [rows]
        return pieces

    with tf.init_scope(), tf.device(None):
        traced = tf.function(cut, autograph=False)
        return traced.get_concrete_function(tf.TensorSpec(shape, dtype))


class HeldPosition(UninitializedVariable):
    """What a checkpoint saves in place of an iterator: where it was."""

    def __init__(self, iterator: Any) -> None:
        super().__init__(False, dtype=tf.variant, shape=tf.TensorShape(None))
        self._iterator = iterator

    def hold(self) -> None:
        """Takes the position of now, or raises what saving it would."""
        (state,) = self._iterator._serialize_to_tensors().values()
        self.assign(state, read_value=False)

    def release(self) -> None:
        """Gives its memory back: it may hold a buffer of examples."""
        self.assign(tf.raw_ops.OptionalNone(), read_value=False)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def state(name: str) -> saveable_object.SaveableObject:
            spec = self.read_value, "", f"{name}_STATE", self.dtype, self.device
            own = [saveable_object.SaveSpec(*spec)]
            return saveable_object.SaveableObject(self, own, name)

        return {"ITERATOR": state}


class CheckpointTracedOnce(tf.train.Checkpoint):
    """A checkpoint that is written by one function, traced once.

    Where variables are on several devices, TensorFlow traces a function for
    each checkpoint, and calls every task of the cluster for each function: it
    costs time, and hangs while a task is frozen. `_write` is what a
    `tf.train.CheckpointManager` calls.
    """

    _traced: Callable[[str], tf.Tensor] | None = None

    def trace(self) -> None:
        """Traces the function, before the first checkpoint."""
        assert self.save_counter is not None  # A part of it, made when asked.
        here, write = tf.constant(0).device, super()._write

        @tf.function(autograph=False)
        def written(prefix: tf.Tensor) -> tf.Tensor:
            # In a graph "CPU:0" is no full name, and would get a file alone.
            with tf.device(here):
                return write(prefix)

        with warnings.catch_warnings():
            # Of an iterator: that its options may be unknown in a graph.
            warnings.simplefilter("ignore", UserWarning)
            concrete = written.get_concrete_function(
                tf.TensorSpec([], tf.string)
            )
        # Not the function itself: it would become a part of the checkpoint.
        self._traced = lambda prefix: concrete(tf.constant(prefix))

    def _write(self, file_prefix: str, options: Any) -> str:
        if self._traced is None:
            self.trace()
            assert self._traced is not None
        storage.make_directory(os.path.dirname(file_prefix))
        path = self._traced(file_prefix).numpy().decode()
        for callback in options.experimental_write_callbacks:
            callback(path)
        return path


def trace(
    coordinator: ClusterCoordinator,
    function: tf.types.experimental.PolymorphicFunction,
    *args: Any,
) -> tf.types.experimental.ConcreteFunction:
    """Traces a function as `coordinator.schedule` would, but does not run it.

    Per-worker values among `args` are as they are on one worker.
    """
    on_one = cluster_coordinator._select_worker_slice(0, args)
    specs = tf.nest.map_structure(
        cluster_coordinator._maybe_as_type_spec, on_one
    )
    with coordinator.strategy.scope():
        return function.get_concrete_function(*specs)


@contextlib.contextmanager
def local_state_kept() -> Iterator[None]:
    """Keeps this process's lookup tables and variables while it connects.

    Its devices are others then, and what was on those of before is lost:
    preprocessing layers that were made before training.
    """
    here, kind = tf.constant(0).device, type(tf.Variable(0))
    objects = gc.get_objects()
    tables = [o for o in objects if type(o) is tf.lookup.StaticHashTable]
    variables = [o for o in objects if type(o) is kind]
    values = [(v, v.numpy()) for v in variables if v.handle.device == here]
    yield
    for table in tables:
        table._resource_handle = table._create_resource()
        table._initialize()
    for variable, value in values:
        made = tf.Variable(value, dtype=variable.dtype, shape=variable.shape)
        variable._handle = made.handle


def copy_tables(function: tf.types.experimental.ConcreteFunction) -> None:
    """Gives each worker that calls a function its own lookup tables.

    Else it would ask this process, for every lookup in its input.
    """
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


def raise_at_once(coordinator: ClusterCoordinator) -> None:
    """Has the coordinator raise an error without waiting for other calls.

    One that reads from a server that was killed and started again never ends.
    """
    coordinator._cluster.closure_queue._cancel_all_closures = lambda: None


def schedule(
    coordinator: ClusterCoordinator, call: Callable[..., None], *args: Any
) -> None:
    """Has a worker's thread, in this process, call a Python callable.

    The public method takes TensorFlow functions alone. Either is called again
    for another worker when its own died; a callable can see that.
    """
    coordinator._cluster.schedule(call, args=args, kwargs=None)


def current_worker() -> int:
    """Index of the worker for which what `schedule` calls runs."""
    return coordinator_context.get_current_dispatch_context().worker_index


def stop_coordinator(coordinator: ClusterCoordinator) -> None:
    """Tells the coordinator's threads to end, as its destructor would.

    An exception's traceback may still hold it.
    """
    cluster = coordinator._cluster
    handler = cluster.failure_handler
    # Its `stop` waits for a lock that its thread holds while it waits for a
    # task that is gone, maybe for ever.
    handler.stop = lambda: None
    handler._should_preemption_thread_run = False
    handler._cluster_due_for_update_or_finish.set()
    cluster.stop()
    for worker in cluster.workers:
        # Else it is reported, once more, when the executor is deleted.
        worker.executor.clear_error()


def coordinator_has_ended(coordinator: ClusterCoordinator, secs: float) -> bool:
    """Whether a stopped coordinator has left C, where it may meet no other."""
    lock = coordinator._cluster.failure_handler._cluster_update_lock
    ended = lock.acquire(timeout=secs)
    if ended:
        lock.release()
    return ended


def tell_cluster(key: str, value: str) -> None:
    """Writes down a value, once, for all processes of an all-reduce job.

    TensorFlow's coordination service keeps it in the first one's memory; public
    TensorFlow shows that in `tf.experimental.dtensor` alone.
    """
    context.context().set_config_key_value(f"tfdist/{key}", value)


def ask_cluster(key: str, timeout_secs: float) -> str | None:
    """Reads what `tell_cluster` wrote in any process; None: not in time.

    Raises OpError if the process that keeps it is gone, or another one.
    """
    try:
        return context.context().get_config_key_value(
            f"tfdist/{key}", max(1, int(timeout_secs * 1000))
        )
    except tf.errors.DeadlineExceededError:
        return None


def leave_together(jobs: Mapping[str, int], leader: str, secs: float) -> None:
    """Has the processes of an all-reduce job wait for each other at their end.

    Else the first one, which all others talk to, may be gone before they have
    said goodbye, and they look for it for half a minute. To be called before
    the strategy is made, with the size of each job and the first task's device.
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
    """Placeholders of the tables each worker makes, and what makes them."""
    return graph.deferred_internal_captures, graph.deferred_external_captures


def variable_accessed(value: tf.Tensor) -> None:
    """Has all tapes watch what has a variable's `handle` and `trainable`."""
    tape.variable_accessed(value)


@contextlib.contextmanager
def seen_alone() -> Iterator[None]:
    """A replica that Keras takes for the only one.

    It divides its own losses by the number of replicas, but none that a model
    computes itself. What is asked of the replica's context is as before.
    """
    alone = distribute_lib._get_default_strategy()
    context = tf.distribute.get_replica_context()
    mode = distribute_lib._ThreadMode(alone, None, context)
    distribute_lib._push_per_thread_mode(mode)
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()

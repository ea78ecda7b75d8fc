"""The private TensorFlow and Keras names that tfdist cannot do without.

Each has its reason beside it and a canary in `tests/_tf/test_private.py`, which
fails loudly when a new version changes it; `setup.py` pins both packages.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src.utils import naming

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
from tensorflow.python.eager import context

# The handle of a variable without memory, with which a model is described
# before anything is allocated; `tf.saved_model.load` uses it as well.
from tensorflow.python.ops.resource_variable_ops import (
    UninitializedVariable as UninitializedVariable,
)

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

SEED_STATE_NAME = "seed_generator_state"
"""Name of the variable in which a `keras.random.SeedGenerator` counts.

Keras marks it in no other way. A step gives each generator a seed that
belongs to that step instead of this shared counter.
"""


def reset_object_names() -> None:
    """Restarts Keras' numbering of unnamed layers (`dense`, `dense_1`, ...).

    Checkpoints name variables by their path, so a model function that is called
    twice in one process must make the same paths. The public
    `keras.utils.clear_session()` also drops the user's dtype policy.
    """
    naming.reset_uids()


def slot_lists(optimizer: keras.optimizers.Optimizer) -> dict[str, list]:
    """The optimizer's lists with one slot per trainable variable, by name.

    Their names are any (`_momentums`, `_accumulators`, ...); what they share is
    the index of the variable.
    """
    own = {id(variable) for variable in optimizer.variables}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and len(value) == len(optimizer._trainable_variables)
        and value is not optimizer._trainable_variables
        and value is not optimizer._variables
        and any(id(item) in own for item in value)
    }


def variable_index(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> int:
    """Where in each of `slot_lists` the slot of `variable` is."""
    return optimizer._get_variable_index(variable)


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list:
    """The slots of `use_ema=True`, which the base class keeps."""
    return optimizer._model_variables_moving_average


def uses_weight_decay(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Whether `exclude_from_weight_decay` spares `variable`."""
    return optimizer._use_weight_decay(variable)


def unique_id(variable: tf.Variable) -> str:
    """The key under which a TensorFlow optimizer of Keras knows a variable."""
    return variable._unique_id


def nadam_product(optimizer: keras.optimizers.Nadam) -> keras.Variable:
    """The product of Nadam's momentum schedule so far."""
    return optimizer._u_product


def expire_remote_state_after(secs: int) -> None:
    """Sets after how long the servers free what a dead chief held there.

    TensorFlow has 600 seconds, as the default of two arguments that nobody
    passes and for a runtime that is not yet initialized.
    """
    context._KEEP_ALIVE_SECS = secs
    for method in (
        context.Context.set_server_def,
        context.Context.update_server_def,
    ):
        method.__defaults__ = (secs,)


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

    def _write(
        self, file_prefix: str, options: tf.train.CheckpointOptions
    ) -> str:
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


def renew_resources(coordinator: ClusterCoordinator) -> None:
    """Makes again what a worker was given: its iterators.

    TensorFlow does so for a worker that was lost, but not for one that has lost
    its connection to a parameter server. To be called in what `schedule` calls.
    """
    coordinator._cluster.workers[current_worker()]._on_worker_recovery()


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
    the strategy is made, which would configure the service without this.

    Args:
        jobs: Job to its number of tasks.
        leader: The device name of the first task.
        secs: How long they wait.
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


def accumulators(optimizer: keras.optimizers.Optimizer) -> list:
    """The sums that `gradient_accumulation_steps` keeps, one per variable."""
    return optimizer._accumulated_gradients


def counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """What `optimizer.iterations` is computed from, where it is no variable.

    With `gradient_accumulation_steps` it counts steps, not updates.
    """
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """The mask that a Keras layer has given to its output, for a loss."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Gives a tensor a mask, where Keras looks for it."""
    tensor._keras_mask = mask

"""A `Cluster` becomes a `tf.distribute.Strategy`.

What this adds to `tf.distribute.ParameterServerStrategy` is what it lacks in
practice: a start that ends in a clear error when a task is missing, a choice
of the server that holds each variable, and slots beside their variable.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist import servers
from tfdist.cluster import Cluster
from tfdist.placement import RoundRobinStrategy, check_task
from tfdist.variables import VariableSpec, creation_spec

Placement = Callable[[VariableSpec], int]

_CHIEF = "/job:chief/task:0/device:CPU:0"


def parameter_server_strategy(
    cluster: Cluster, *, start_timeout_secs: float = 300.0
) -> tf.distribute.ParameterServerStrategy:
    """Connects the chief to its workers and parameter servers.

    Args:
        cluster: A cluster with workers and ps in which this process is the
            chief. The chief's own address is in the cluster spec: without it
            the servers could not call back after a reconnection.
        start_timeout_secs: Seconds to wait for every task to be up.

    Returns:
        The strategy.

    Raises:
        ValueError: This process is not the chief of a cluster with ps.
        TimeoutError: A task was not up in time.
    """
    if cluster.role != "chief" or not cluster.num_ps:
        raise ValueError(
            "Only the chief of a cluster with parameter servers can connect "
            f"to it. Received: cluster={cluster}."
        )
    _widen_thread_pool()
    servers.wait_until_up(cluster, start_timeout_secs)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.training_spec()),
        task_type="chief",
        task_id=cluster.task_index,
        rpc_layer="grpc",
    )
    with _fail_fast():
        return tf.distribute.ParameterServerStrategy(resolver)


@contextlib.contextmanager
def _fail_fast() -> Iterator[None]:
    """Makes a task that died since the probe an error instead of a hang.

    TensorFlow reads the variable at each call. `use_caller`, its recommended
    setting, holds afterwards: with `true`, recovery would spin.
    """
    os.environ["GRPC_FAIL_FAST"] = "true"
    try:
        yield
    finally:
        os.environ["GRPC_FAIL_FAST"] = "use_caller"


def _widen_thread_pool() -> None:
    """Gives the chief's own server the threads that every server needs."""
    if tf.config.threading.get_inter_op_parallelism_threads() == 0:
        # Too late once TensorFlow has started, which is harmless: then the
        # pool has a thread per CPU, and the chief holds no variables.
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_inter_op_parallelism_threads(
                servers.inter_op_threads()
            )


@contextlib.contextmanager
def placed_scope(
    strategy: tf.distribute.Strategy,
    *,
    num_ps: int = 0,
    placement: Placement | None = None,
    specs: Iterable[VariableSpec] | None = None,
) -> Iterator[None]:
    """`strategy.scope()` in which `placement` chooses each variable's server.

    Uses `tf.variable_creator_scope`, which a strategy honours when it was
    entered before the strategy's own scope. Slots follow their variable.
    Variables of metrics (those with `synchronization=ON_READ`) stay on the
    chief: every dispatch returns its own metric states (design decision D3),
    and nobody updates them remotely.

    Args:
        strategy: Any strategy; without parameter servers its scope is entered
            unchanged.
        num_ps: Number of parameter servers, 0 for none.
        placement: From a variable's description to the index of the parameter
            server that shall hold it. Default: round robin.
        specs: What `describe` says of the model's variables, in order of
            creation, so that `placement` knows their full names and slots.
            Variables created after the last one (counters) are described by
            what the creator is told. Default: none.

    Yields:
        Nothing.

    Raises:
        ValueError: inside the scope, when `placement` returns a task that does
            not exist, or when a variable is not the one that `specs` expects.
    """
    if not num_ps:
        with strategy.scope():
            yield
        return
    placement = placement or RoundRobinStrategy(num_ps)
    expected = iter(specs or ())

    def place(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is not None:
            return next_creator(**kwargs)
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            with tf.device(_CHIEF):
                return next_creator(**kwargs)
        spec = _agreed(next(expected, None), creation_spec(**kwargs))
        task = check_task(placement(spec), num_ps, spec, placement)
        with tf.device(f"/job:ps/task:{task}/device:CPU:0"):
            return next_creator(**kwargs)

    with tf.variable_creator_scope(place), strategy.scope():
        yield


def _agreed(
    expected: VariableSpec | None, created: VariableSpec
) -> VariableSpec:
    """The fuller description, once it is sure that it means `created`."""
    if expected is None:
        return created
    if (expected.shape, expected.dtype) != (created.shape, created.dtype):
        raise ValueError(
            "Argument `model_fn` must make the same variables each time it is "
            f"called. The plan has {expected.name!r} of shape "
            f"{expected.shape} and {expected.dtype} next, but "
            f"{created.name!r} of shape {created.shape} and {created.dtype} "
            "was created."
        )
    return expected

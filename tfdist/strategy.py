"""A `Cluster` becomes a `tf.distribute.Strategy`.

What this adds to `tf.distribute.ParameterServerStrategy` is what it lacks in
practice: a start that ends in a clear error when a task is missing, a choice
of the server that holds each variable, and slots beside their variable.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist import servers
from tfdist._private import expire_remote_state_after
from tfdist.cluster import Cluster
from tfdist.placement import (
    GreedyLoadBalancingStrategy,
    RoundRobinStrategy,
    byte_size_load_fn,
    check_task,
)
from tfdist.planner import plan
from tfdist.variables import VariableSpec, creation_spec

Placement = Callable[[VariableSpec], int]

_CHIEF = "/job:chief/task:0/device:CPU:0"
# How long the servers keep what a chief holds there after its last sign of
# life. A chief that was frozen for longer makes everything anew.
_KEEP_ALIVE_SECS = 60
_CONNECT_SECS = 15.0
_RETRY_SECS = 0.5


def parameter_server_strategy(
    cluster: Cluster,
    *,
    start_timeout_secs: float = 600.0,
    give_up: Callable[[], None] = lambda: None,
) -> tf.distribute.ParameterServerStrategy:
    """Connects the chief to its workers and parameter servers.

    Args:
        cluster: A cluster with workers and ps in which this process is the
            chief. The chief's own address is in the cluster spec: without it
            the servers could not call back after a reconnection.
        start_timeout_secs: Seconds to wait for every task to be up.
        give_up: Called again and again meanwhile; ends the wait by raising.

    Returns:
        The strategy.

    Raises:
        ValueError: This process is not the chief of a cluster with ps.
        TimeoutError: A task was not up in time.
        RuntimeError: Another chief holds the job.
    """
    if cluster.role != "chief" or not cluster.num_ps:
        raise ValueError(
            "Only the chief of a cluster with parameter servers can connect "
            f"to it. Received: cluster={cluster}."
        )
    _widen_thread_pool()
    servers.reconnect_quickly()
    expire_remote_state_after(_KEEP_ALIVE_SECS)
    servers.wait_until_up(cluster, start_timeout_secs, give_up)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster.training_spec()),
        task_type="chief",
        task_id=cluster.task_index,
        rpc_layer="grpc",
    )
    strategy = _connect(resolver)
    servers.hold(cluster)
    return strategy


def _connect(
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> tf.distribute.ParameterServerStrategy:
    """Connects, and tries again for a while.

    The connection of this process to a server that was started anew waits up
    to two seconds between its attempts (`servers.reconnect_quickly`).
    """
    deadline = time.monotonic() + _CONNECT_SECS
    while True:
        try:
            with _fail_fast():
                return tf.distribute.ParameterServerStrategy(resolver)
        except tf.errors.UnavailableError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_SECS)


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
            Others (counters) are described by what the creator is told.
            Default: none.

    Yields:
        Nothing.

    Raises:
        ValueError: inside the scope, when `placement` returns a task that does
            not exist; at its end, when not every one of `specs` was created.
    """
    if not num_ps:
        with strategy.scope():
            yield
        return
    placement = placement or RoundRobinStrategy(num_ps)
    expected = collections.deque(specs or ())

    def place(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is not None:
            return next_creator(**kwargs)
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            with tf.device(_CHIEF):
                return next_creator(**kwargs)
        spec = creation_spec(**kwargs)
        if expected and _is_same(expected[0], spec):
            spec = expected.popleft()
        task = check_task(placement(spec), num_ps, spec, placement)
        with tf.device(f"/job:ps/task:{task}/device:CPU:0"):
            return next_creator(**kwargs)

    with tf.variable_creator_scope(place), strategy.scope():
        yield
    if expected:
        raise ValueError(
            "The model function must make the same variables each time it is "
            f"called. The placement was made for {expected[0].name!r} of shape "
            f"{expected[0].shape}, which was not created in its turn."
        )


def _is_same(expected: VariableSpec, created: VariableSpec) -> bool:
    """Whether a creator, told the last part of a name, makes `expected`."""
    name = expected.name.rsplit("/", 1)[-1]
    return (name, expected.shape, expected.dtype) == (
        created.name,
        created.shape,
        created.dtype,
    )


def placement_by_name(
    name: str, specs: Sequence[VariableSpec], num_ps: int
) -> Placement:
    """The placement strategy that `RunConfig(placement=...)` names.

    Args:
        name: "round_robin", TF1's default; "greedy", its
            `GreedyLoadBalancingStrategy` by bytes, slots included; "planned",
            `tfdist.planner.plan`, which sees all variables at once.
        specs: The variables to place.
        num_ps: Number of parameter servers.

    Raises:
        ValueError: another name.
    """
    if name == "round_robin":
        return RoundRobinStrategy(num_ps)
    if name == "greedy":
        return GreedyLoadBalancingStrategy(num_ps, byte_size_load_fn)
    if name == "planned":
        return plan(specs, num_ps).as_strategy()
    raise ValueError(
        "Argument `placement` must be a callable, 'round_robin', 'greedy' or "
        f"'planned'. Received: placement={name!r}."
    )

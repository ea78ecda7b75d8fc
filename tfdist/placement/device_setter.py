"""TF1's `replica_device_setter`, also for TF2.

In TF1 a device function placed every op of a program: variables on parameter
servers, everything else on the worker. Eager TF2 has no device functions, so
there the setter is a scope that intercepts the creation of variables.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.arguments import check_callable, check_positive
from tfdist.placement import strategies
from tfdist.placement.variables import VariableSpec, creation_spec


def replica_device_setter(
    ps_tasks: int = 0,
    ps_device: str = "/job:ps",
    worker_device: str = "/job:worker",
    merge_devices: bool = True,
    cluster: Mapping | tf.train.ClusterSpec | tf.train.ClusterDef | None = None,
    ps_ops: Sequence[str] | None = None,
    ps_strategy: strategies.PlacementStrategy | None = None,
) -> "ReplicaDeviceSetter | None":
    """`tf.compat.v1.train.replica_device_setter`, for TF2 as well.

    The result is both a device function, for `tf.compat.v1.device` in a graph,
    and a scope, for `with` in TF2. Use `device_scope` if it may be `None`.

    Differences from TF1: a strategy that returns a nonexistent task raises an
    error, and task numbers may have gaps: if `cluster["ps"]` is
    `{3: ..., 5: ...}`, the strategy's tasks 0 and 1 stand for tasks 3 and 5,
    where TF1 used tasks 0 and 1.

    Args:
        ps_tasks: Number of parameter servers. Default: 0, no setter.
        ps_device: Device of the parameter servers; its task is overwritten.
            `""` places everything on the worker. Default: `"/job:ps"`.
        worker_device: Device of all other ops; `""` leaves it unspecified.
            Default: `"/job:worker"`.
        merge_devices: Whether to fill in fields that an inner `tf.device`
            leaves unspecified. `False` skips ops that have an inner device,
            and is deprecated as in TF1. Default: True.
        cluster: Dict, `ClusterSpec` or `ClusterDef` that overrides `ps_tasks`.
        ps_ops: Types of the ops to place on parameter servers. Default: those
            of TF1, variables and lookup tables.
        ps_strategy: Callable that maps an op (in TF2, the `VariableSpec` of a
            variable) to one of `ps_tasks` tasks. Default: round robin.

    Returns:
        A `ReplicaDeviceSetter`, or `None` if there are no parameter servers.

    Raises:
        TypeError: If `cluster` is none of the above, or `ps_strategy` is not
            callable.
        ValueError: If `ps_tasks` is negative or, on use of the setter, the
            strategy returns a task that does not exist.

    >>> setter = replica_device_setter(ps_tasks=2)
    >>> with tf.Graph().as_default(), tf.compat.v1.device(setter):
    ...     v = [tf.compat.v1.Variable(0.0) for _ in range(3)]
    ...     [x.device for x in v] + [tf.constant(1.0).device]
    ['/job:ps/task:0', '/job:ps/task:1', '/job:ps/task:0', '/job:worker']
    """
    tasks = _tasks(ps_tasks, ps_device, cluster)
    if not tasks:
        return None
    if ps_strategy is None:
        ps_strategy = strategies.RoundRobinStrategy(len(tasks))
    check_callable("ps_strategy", ps_strategy)
    strategy = ps_strategy

    def task_of(op: Any) -> int:
        variable = op.describe() if isinstance(op, _Creation) else op
        given = strategy(variable)
        task = strategies.check_task(given, len(tasks), variable, strategy)
        return tasks[task]

    device_function = tf.compat.v1.train.replica_device_setter(
        len(tasks),
        ps_device,
        worker_device,
        merge_devices,
        ps_ops=ps_ops,
        ps_strategy=task_of,
    )
    return ReplicaDeviceSetter(device_function, worker_device)


def device_scope(
    device: "ReplicaDeviceSetter | str | None",
) -> contextlib.AbstractContextManager:
    """TF1's `tf.device(replica_device_setter(...))`; `None` has no effect.

    >>> with device_scope(replica_device_setter(cluster={"worker": ["a:1"]})):
    ...     v = tf.Variable(1.0)  # No parameter servers: stays here.
    """
    if isinstance(device, ReplicaDeviceSetter):
        return device
    # `tf.device(None)` would drop the constraints of outer scopes as well.
    return contextlib.nullcontext() if device is None else tf.device(device)


@dataclasses.dataclass(eq=False)
class ReplicaDeviceSetter:
    """A device function and a scope, created by `replica_device_setter`.

    Called with an op, the setter returns the op's device by TF1's rules: fields
    of inner `tf.device` blocks take precedence; `ps_device` with the strategy's
    task, or `worker_device`, fills in the others.

    As a scope, the setter applies that device function to all ops of a TF1
    graph or `tf.function`; eager ops run on `worker_device`. In TF2, variables
    created in the scope, or by functions called there, follow the same rules.

    The strategy is called once per variable, and the initial value is computed
    on the variable's device. `ps_ops` places variables if it has `VarHandleOp`.
    Eager TF2 exposes only the merged device of all `tf.device` blocks. Hence,
    unlike in a function or graph, a block that only repeats `worker_device` has
    no effect; `/job:ps` alone takes the worker's task number (name the task, as
    in `/job:ps/task:1`); and a block inside `tf.device(None)`, which by itself
    undoes the scope, counts as a block outside the scope. Not thread-safe.
    """

    device_function: Callable[[Any], str]
    worker_device: str

    def __post_init__(self) -> None:
        self._scopes: list[contextlib.ExitStack] = []
        # While `_inner_device` probes a function: the devices of its probe op.
        self._asked: list[str] | None = None

    def __call__(self, op: Any) -> str:
        """Returns the device of a `tf.Operation` or `NodeDef`."""
        if self._asked is None:
            return self.device_function(op)
        self._asked.append(op.device or "")
        return self._asked[-1]

    def __enter__(self) -> "ReplicaDeviceSetter":
        stack = contextlib.ExitStack()
        eagerly = tf.executing_eagerly()
        if not eagerly:
            stack.enter_context(tf.compat.v1.device(self))
        elif self.worker_device:
            stack.enter_context(tf.device(self.worker_device))
        # In a TF1 graph, the device function sees the variable's op itself.
        if tf.compat.v1.executing_eagerly_outside_functions():
            # `tf.device("")` adds the fields that TF fills in by default.
            with tf.device("") if eagerly else contextlib.nullcontext():
                entered = _eager_device()

            def creator(next_creator: Callable, **kwargs: Any) -> tf.Variable:
                inner = self._inner_device(entered, eagerly)
                if inner is None:  # `tf.device(None)` undoes the scope.
                    return next_creator(**kwargs)
                device = self.device_function(
                    _Creation(inner, _VARIABLE, lambda: creation_spec(**kwargs))
                )
                # `None` keeps the enclosing worker device from being merged in.
                with tf.device(None), tf.device(device):
                    return next_creator(**kwargs)

            stack.enter_context(tf.variable_creator_scope(creator))
        self._scopes.append(stack)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._scopes.pop().__exit__(*exc_info)

    def _inner_device(self, entered: str, eagerly: bool) -> str | None:
        """Returns the device of inner blocks; None if they undo the scope."""
        if eagerly:
            # `tf.device` inside a `tf.function` changes the eager device too.
            current = _eager_device()
            if self.worker_device and not current:
                return None
            return _difference(entered, current or entered)
        asked: list[str] = []
        self._asked = asked
        try:
            tf.no_op()  # TensorFlow passes it to the device function.
        finally:
            self._asked = None
        return asked[-1] if asked else None


# The op of a variable, which also stands for variables created eagerly.
_VARIABLE = tf.compat.v1.NodeDef(op="VarHandleOp")


class _Creation(NamedTuple):
    """A variable about to be created, in the form that TF1 expects of an op."""

    device: str
    node_def: tf.compat.v1.NodeDef
    describe: Callable[[], VariableSpec]


def _tasks(
    ps_tasks: int,
    ps_device: str,
    cluster: Mapping | tf.train.ClusterSpec | tf.train.ClusterDef | None,
) -> list[int]:
    """Returns the task numbers of the parameter servers, in order."""
    if cluster is None:
        if ps_tasks != 0:
            check_positive("ps_tasks", ps_tasks)
        return list(range(ps_tasks))
    try:
        spec = tf.train.ClusterSpec(cluster)
    except TypeError as e:
        raise TypeError(
            "Argument `cluster` must be a dict of job names to addresses, a "
            f"`ClusterSpec` or a `ClusterDef`. Received: cluster={cluster!r}."
        ) from e
    job = tf.DeviceSpec.from_string(ps_device).job
    return sorted(spec.task_indices(job)) if job in spec.jobs else []


def _eager_device() -> str:
    return tf.__internal__.eager_context.get_device_name() or ""


def _difference(outer: str, inner: str) -> str:
    """Returns the fields of `inner` that blocks inside `outer` have changed."""
    old, new = map(tf.DeviceSpec.from_string, (outer, inner))
    changed = {
        name
        for name in ("job", "replica", "task", "device_type", "device_index")
        if getattr(new, name) != getattr(old, name)
    }
    # A task number is relative to its job, a device index to its type.
    if "job" in changed:
        changed.add("task")
    if changed & {"device_type", "device_index"}:
        changed |= {"device_type", "device_index"}
    fields = {name: getattr(new, name) for name in changed}
    return tf.DeviceSpec(**fields).to_string()

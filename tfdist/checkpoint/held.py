"""Holds the values of one moment while they are written."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Mapping
from concurrent import futures

import tensorflow as tf

from tfdist._tf.private import UninitializedVariable
from tfdist._tf.private_checkpoints import PartitionedVariable, Saveable
from tfdist._tf.tracing import traced
from tfdist.cluster.memory import free_bytes_on

_log = logging.getLogger(__name__)

_NO_MEMORY = (
    "Steps wait while a checkpoint is written: host %r has %.3g GB of memory "
    "left. To save while steps continue, it would need 2 x %.3g GB."
)


class HeldValues:
    """Adds a second variable to each, on the same machine, in host memory.

    Holding a value takes no time: the two variables share memory until a step
    writes the first one, which copies it (for a table, all rows, not only the
    updated ones). So a server may need its variables' memory twice, from the
    next step until `release`; see `fit`.

    TensorFlow's own `CheckpointOptions(enable_async=True)` copies all variables
    to the machine that saves, where they may not fit; it reports an error only
    at the next save, and does not hold the input's position.

    Args:
        variables: Maps names to variables; see `can_hold`.

    Attributes:
        variables: Maps names to the variables that a checkpoint saves instead.
        bytes: Maps devices to the largest number of bytes held there.
        hold: Holds the current values; no step may be running.
        release: Frees the memory.
    """

    def __init__(self, variables: Mapping[str, Saveable]) -> None:
        self._pairs: list[tuple[tf.Variable, tf.Variable]] = []
        self._factor = 2
        self.bytes: collections.Counter[str] = collections.Counter()
        self.variables = {n: self._second(v) for n, v in variables.items()}
        self.hold = traced(self._share)
        self.release = traced(self._empty)

    def trace(self) -> None:
        """Traces the functions, while every task is alive."""
        for function in (self.hold, self.release):
            function.get_concrete_function()

    def fit(self) -> bool:
        """Whether every machine has the memory (twice that at the first call).

        Later calls ask for less, since processes may keep memory that `release`
        freed. If False, no step may write the variables before `release`.
        """
        need: collections.Counter[str] = collections.Counter()
        with futures.ThreadPoolExecutor() as pool:
            found = [*pool.map(free_bytes_on, self.bytes)]
        for size, (host, free) in zip(self.bytes.values(), found, strict=True):
            need[host] += size
            if need[host] * self._factor >= free:
                _log.warning(_NO_MEMORY, host, free / 1e9, need[host] / 1e9)
                return False
        self._factor = 1
        return True

    def _second(self, variable: Saveable) -> Saveable:
        if isinstance(variable, PartitionedVariable):
            runs = [own for _, own in variable.runs]
            shards = [shard for shard, _ in variable.runs]
            return PartitionedVariable([*map(self._create_copy, shards)], runs)
        return self._create_copy(variable)

    def _create_copy(self, variable: tf.Variable) -> tf.Variable:
        task, _, _ = variable.device.partition("/device:")
        with tf.device(f"{task}/device:CPU:0"):
            held = UninitializedVariable(
                shape=variable.shape, dtype=variable.dtype, trainable=False
            )
        self._pairs.append((variable, held))
        size = variable.shape.num_elements() * variable.dtype.size
        self.bytes[held.device] += size
        return held

    def _share(self) -> None:
        for variable, held in self._pairs:
            with tf.device(variable.device):
                value = variable.read_value_no_copy()
            tf.raw_ops.AssignVariableOp(resource=held.handle, value=value)

    def _empty(self) -> None:
        @functools.cache
        def nothing(device: str, dtype: tf.DType) -> tf.Tensor:
            with tf.device(device):
                # Its shape is unknown: a known one must be the variable's.
                return tf.compat.v1.placeholder_with_default(
                    tf.zeros([0], dtype), shape=None
                )

        for _, held in self._pairs:
            tf.raw_ops.AssignVariableOp(
                resource=held.handle, value=nothing(held.device, held.dtype)
            )


def can_hold(variables: Mapping[str, Saveable]) -> bool:
    """Whether each variable is in one place, without copies per replica.

    >>> can_hold({"weight": tf.Variable(1.0)})
    True
    """
    return all(
        isinstance(v, tf.Variable | PartitionedVariable)
        and not isinstance(v, tf.distribute.DistributedValues)
        and v.shape.is_fully_defined()
        and v.dtype != tf.string
        for v in variables.values()
    )

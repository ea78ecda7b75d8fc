"""Checks, on each device before a checkpoint, that all weights are finite."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist._tf.tracing import traced

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class NonFiniteVariablesError(tf.compat.v1.train.NanLossDuringTrainingError):
    """Variables hold NaN or infinite values; the message names them.

    >>> weight = {"weight": tf.Variable(float("nan"))}
    >>> tfdist.checkpoint.Checkpoints(
    ...     directory, weight, check_numerics=True
    ... ).save(1)
    Traceback (most recent call last):
    ...
    tfdist.training.finite.NonFiniteVariablesError: ...
    """

    def __str__(self) -> str:
        return str(self.args[0])


class FiniteCheck:
    """Finds the variables that hold NaN or infinite values.

    Each device checks its own variables and sends one message, with a boolean
    for each. A variable with shards or copies on replicas counts as one.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._parts = collections.defaultdict(list)
        for name, whole in variables.items():
            for shard in getattr(whole, "variables", [whole]):
                copies = [shard]
                if isinstance(shard, tf.distribute.DistributedValues):
                    strategy = shard.distribute_strategy
                    copies = strategy.experimental_local_results(shard)
                for v in copies:
                    if v.dtype in _FLOATS:
                        self._parts[v.device].append((name, v))
        self._looks = traced(self._are_finite)

    def trace(self) -> None:
        """Traces the check while every task is alive."""
        self._looks.get_concrete_function()

    def not_finite(self) -> list[str]:
        """The names of variables with values that are not finite."""
        names = [name for parts in self._parts.values() for name, _ in parts]
        finite = [each for own in self._looks() for each in own.numpy()]
        pairs = zip(names, finite, strict=True)
        return list(dict.fromkeys(name for name, good in pairs if not good))

    def _are_finite(self) -> list[tf.Tensor]:
        """For each device, whether each of its variables is finite."""
        finite = []
        for device, parts in self._parts.items():
            found: list[tf.Tensor] = []
            with tf.device(device):
                for _, variable in parts:
                    # One by one: a read may copy if rows are being updated.
                    with tf.control_dependencies(found[-1:]):
                        values = tf.math.is_finite(variable.read_value())
                    found.append(tf.reduce_all(values))
                finite.append(tf.stack(found))
        return finite

"""Are all weights finite? Asked where they lie, before they are saved."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

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

    Every device adds up what it holds, in one pass over its memory: a sum that
    is finite has finite terms alone. Variables of other sums are looked at
    element by element, for large terms may overflow. Over the network comes
    one message per device, a truth value for each variable.

    Args:
        variables: Name to variable; one in shards, or with a copy for each
            replica, counts as one.
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
        self._sums = tf.function(self._are_sums_finite, autograph=False)

    def trace(self) -> None:
        """Traces the function that adds up, while every task is alive."""
        self._sums.get_concrete_function()

    def not_finite(self) -> list[str]:
        """Names of the variables that are not finite throughout."""
        found: dict[str, bool | None] = {}
        for finite, parts in zip(
            self._sums(), self._parts.values(), strict=True
        ):
            for i in (~finite.numpy()).nonzero()[0]:
                name, variable = parts[i]
                with tf.device(variable.device):
                    exact = tf.math.is_finite(variable.read_value())
                    found[name] = not tf.reduce_all(exact) or found.get(name)
        return [name for name, is_bad in found.items() if is_bad]

    def _are_sums_finite(self) -> list[tf.Tensor]:
        """For each device, whether each of its variables has a finite sum."""
        finite = []
        for device, parts in self._parts.items():
            sums: list[tf.Tensor] = []
            with tf.device(device):
                for _, variable in parts:
                    # One by one: reading may copy, where rows are updated.
                    with tf.control_dependencies(sums[-1:]):
                        total = tf.reduce_sum(variable.read_value())
                    sums.append(tf.math.is_finite(total))
                finite.append(tf.stack(sums))
        return finite

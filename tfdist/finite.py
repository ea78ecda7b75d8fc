"""Are all weights finite? Asked where they lie, before they are saved."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

_FLOATS = (tf.float16, tf.bfloat16, tf.float32, tf.float64)


class NonFiniteVariablesError(tf.compat.v1.train.NanLossDuringTrainingError):
    """Variables hold NaN or infinite values; the message names them."""

    def __str__(self) -> str:
        return str(self.args[0])


class FiniteCheck:
    """Finds the variables that hold NaN or infinite values.

    Every device adds up what it holds, in one pass over its memory: a sum that
    is finite has finite terms alone. Only the variables of other sums are
    looked at element by element, for large finite terms may overflow. Over the
    network comes a truth value for each variable, in a message per device.

    Args:
        variables: Name to variable; one in shards, or with a copy for each
            replica, counts as one.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._parts = collections.defaultdict(list)
        for name, whole in variables.items():
            for shard in getattr(whole, "variables", [whole]):
                for part in _local(shard):
                    if part.dtype in _FLOATS:
                        self._parts[part.device].append((name, part))
        self._traced: Any = None

    def trace(self) -> None:
        """Traces the function that adds up, before the first question.

        TensorFlow calls every task for a new function, and would hang with one
        that is frozen.
        """
        function = tf.function(self._are_sums_finite, autograph=False)
        self._traced = function.get_concrete_function()

    def not_finite(self) -> list[str]:
        """Names of the variables that are not finite throughout."""
        if self._traced is None:
            self.trace()
        finite = zip(self._traced(), self._parts.values(), strict=True)
        suspects = [
            part
            for sums, parts in finite
            for is_finite, part in zip(sums.numpy(), parts, strict=True)
            if not is_finite
        ]
        return list(dict.fromkeys(n for n, v in suspects if not _is_finite(v)))

    def _are_sums_finite(self) -> list[tf.Tensor]:
        """For each device, whether each of its variables has a finite sum."""
        finite = []
        for device, parts in self._parts.items():
            sums: list[tf.Tensor] = []
            with tf.device(device):
                for _, part in parts:
                    # One by one: reading may copy, where rows are updated.
                    with tf.control_dependencies(sums[-1:]):
                        total = tf.reduce_sum(part.read_value())
                    sums.append(tf.math.is_finite(total))
                finite.append(tf.stack(sums))
        return finite


def _local(variable: tf.Variable) -> list[tf.Variable]:
    """The copies that this process has of a variable; of most it is one."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        return [variable]
    strategy = variable.distribute_strategy
    return list(strategy.experimental_local_results(variable))


def _is_finite(variable: tf.Variable) -> bool:
    with tf.device(variable.device):
        return bool(tf.reduce_all(tf.math.is_finite(variable.read_value())))

"""Mutual exclusion on the devices that hold variables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

Result = TypeVar("Result")


def locked(
    name: str, run: Callable[[], Result], needed: Sequence[tf.Tensor] = ()
) -> Result:
    """Calls `run` under the device's mutex of this name, in a `tf.function`.

    The mutex is acquired when the `needed` tensors have arrived, and released
    when all side effects have succeeded or failed. Calls must not be nested.
    """

    def run_locked() -> Result:
        # Mutexes are on CPUs, even if the variables are not.
        mutex = tf.raw_ops.MutexV2(container="", shared_name=name)
        with tf.control_dependencies(needed):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        with tf.control_dependencies([lock]):
            result = run()
        made = graph.get_operations()[before:]
        with tf.control_dependencies([o for o in made if o.op_def.is_stateful]):
            # The lock is held as long as its tensor, which is until here.
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        return result

    # In the caller's function, all servers' stateful ops would run in sequence.
    if tf.inside_function():
        return tf.function(run_locked, autograph=False)()
    return run_locked()

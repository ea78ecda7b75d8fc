"""What runs where variables are while nobody else is at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import tensorflow as tf

Result = TypeVar("Result")


def alone(
    name: str, run: Callable[[], Result], needed: Sequence[tf.Tensor] = ()
) -> Result:
    """Calls `run` in the mutex of this name on the device, in a `tf.function`.

    It is taken once what is `needed` is there, not while a message is under
    way, and free when all effects are done or have failed. Not to be nested.
    """

    def locked() -> Result:
        # Mutexes are on CPUs, whatever holds the variables.
        mutex = tf.raw_ops.MutexV2(container="", shared_name=name)
        with tf.control_dependencies(needed):
            lock = tf.raw_ops.MutexLock(mutex=mutex)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        with tf.control_dependencies([lock]):
            result = run()
        made = graph.get_operations()[before:]
        with tf.control_dependencies([o for o in made if o.op_def.is_stateful]):
            # Until here the lock is held, as long as its tensor.
            tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
        return result

    # In the caller's function servers would wait: stateful ops run one by one.
    if tf.inside_function():
        return tf.function(locked, autograph=False)()
    return locked()

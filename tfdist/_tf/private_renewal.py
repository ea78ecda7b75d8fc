"""Functions that outlive a lost server: private names of TensorFlow.

To trace a model's steps takes longer than all else in a recovery. A function
that was traced knows each variable by its handle, which is captured; it runs as
before when the variable, and it, have another.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# What holds captured handles.
from tensorflow.python.eager.polymorphic_function import concrete_function

from tfdist._tf.private import Saveable, UninitializedVariable


def connect_again(
    strategy: tf.distribute.ParameterServerStrategy, job: str
) -> tf.distribute.ParameterServerStrategy:
    """Connects to the servers of a strategy, for another coordinator."""
    strategy._connect_to_cluster(job)
    strategy._cluster_coordinator = None
    return strategy


def is_known(saved: Iterable[Saveable], others: list[tf.Variable]) -> bool:
    """Whether all variables on servers are these, or hold values for a while.

    `saved` are what a checkpoint holds.
    """
    pieces = [p for v in saved for p in getattr(v, "variables", [v])]
    known = {id(v.handle) for v in (*pieces, *others)}
    for _ in range(2):
        if all(
            id(v.handle) in known or type(v) is UninitializedVariable
            for v in _on_servers()
        ):
            return True
        gc.collect()  # There may be some of an earlier model.
    return False


def renew() -> None:
    """Gives all variables on servers memory there, which holds no value yet."""
    before = [(v, v.handle) for v in _on_servers()]
    renewed = {}
    for variable, old in before:
        with tf.device(variable.device):
            made = UninitializedVariable(
                shape=variable.shape, dtype=variable.dtype
            )
        renewed[id(old)] = variable._handle = made.handle
    for function in gc.get_objects():
        if issubclass(type(function), concrete_function.ConcreteFunction):
            captures = function._captured_inputs
            if any(id(capture) in renewed for capture in captures):
                function.set_external_captures(
                    [renewed.get(id(c), c) for c in captures]
                )
    # Graphs know the old handles still: where the server lives, so does what
    # they hold.
    for variable, old in before:
        with contextlib.suppress(tf.errors.OpError), tf.device(old.device):
            nothing = tf.zeros([0], variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=old, value=nothing)


def _on_servers() -> list[Any]:
    kinds = type(tf.Variable(0)), UninitializedVariable
    found = [o for o in gc.get_objects() if type(o) in kinds]
    return [v for v in found if "/job:ps/" in v.handle.device]

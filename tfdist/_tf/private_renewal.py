"""Functions that outlive a lost server, by TensorFlow's private names.

Tracing takes longer than all else in a recovery. A function captures the handle
of each variable, and runs as before once both have the same new handle.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

# Functions of this class hold captured handles.
from tensorflow.python.eager.polymorphic_function import concrete_function

from tfdist._tf.private import UninitializedVariable
from tfdist._tf.private_checkpoints import Saveable


def is_known(saved: Iterable[Saveable], others: list[tf.Variable]) -> bool:
    """Whether servers only have these variables, and uninitialized ones."""
    pieces = [p for v in saved for p in getattr(v, "variables", [v])]
    known = {id(v.handle) for v in (*pieces, *others)}
    for _ in range(2):
        if all(
            id(v.handle) in known or type(v) is UninitializedVariable
            for v in _on_servers()
        ):
            return True
        gc.collect()  # Some may be of an earlier model.
    return False


def renew() -> None:
    """Gives all variables on servers new memory there, without a value yet."""
    before = [(v, v.handle) for v in _on_servers()]
    renewed = {}
    for variable, old in before:
        like = {"shape": variable.shape, "dtype": variable.dtype}
        with tf.device(old.device):
            renewed[id(old)] = UninitializedVariable(**like).handle
        variable._handle = renewed[id(old)]
    for function in gc.get_objects():
        if issubclass(type(function), concrete_function.ConcreteFunction):
            captures = function._captured_inputs
            after = [renewed.get(id(capture), capture) for capture in captures]
            function.set_external_captures(after)
    # Graphs still have the old handles, and live servers the old values.
    for variable, old in before:
        with contextlib.suppress(tf.errors.OpError), tf.device(old.device):
            nothing = tf.zeros([0], variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=old, value=nothing)


def _on_servers() -> list[Any]:
    kinds = type(tf.Variable(0)), UninitializedVariable
    found = [o for o in gc.get_objects() if type(o) in kinds]
    return [v for v in found if "/job:ps/" in v.handle.device]

"""Placement strategies, which choose the parameter server of a variable.

A placement strategy is a callable that maps a `VariableSpec` (in TF1, the op
that creates the variable) to a task index. The three strategies here have the
names, tie rules and results of TF1's. They are stateful: create a new one for
each model.
"""

import hashlib
import itertools
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_callable, check_positive, check_type
from tfdist.placement.variables import VariableSpec, full_name, variable_spec

PlacementStrategy = Callable[[Any], int]
LoadFn = Callable[[Any], float]

_ID_BYTES = 8  # Each looked-up row travels with its id, in both directions.


class RoundRobinStrategy:
    """Assigns variables to tasks in turn, whatever their size.

    The default of TF1 and of TensorFlow's `ParameterServerStrategy`.

    Args:
        num_tasks: Number of parameter servers, at least 1 (else ValueError).

    >>> strategy = RoundRobinStrategy(2)
    >>> [strategy(name) for name in ("a", "b", "c")]
    [0, 1, 0]
    """

    def __init__(self, num_tasks: int) -> None:
        check_positive("num_tasks", num_tasks)
        self._tasks = itertools.cycle(range(num_tasks))

    def __call__(self, variable: Any) -> int:
        """Returns the next task."""
        return next(self._tasks)


class GreedyLoadBalancingStrategy:
    """Assigns each variable to the task with the least load so far.

    The first of several least loaded tasks wins. Reproduces
    `tf.contrib.training.GreedyLoadBalancingStrategy`, but checks the result of
    the load function, and returns a Python `int`. The largest load on m tasks
    is at most 2 - 1/m times the optimum; `tfdist.placement.plan` does better.

    Args:
        num_tasks: Number of parameter servers, at least 1.
        load_fn: Callable that returns the load of a variable, a finite,
            nonnegative number: `byte_size_load_fn`, `traffic_load_fn` or yours.

    Raises:
        ValueError: If `num_tasks` is not a positive integer; when called, if
            the load is NaN, infinite or negative.
        TypeError: If `load_fn` is not callable or its result not a number.

    >>> strategy = GreedyLoadBalancingStrategy(2, byte_size_load_fn)
    >>> shapes = [2, 2], [2, 1], [2, 2], [1, 3]
    >>> [strategy(VariableSpec("v", shape)) for shape in shapes]
    [0, 1, 1, 0]
    >>> strategy.loads
    (28.0, 24.0)
    """

    def __init__(self, num_tasks: int, load_fn: LoadFn) -> None:
        check_positive("num_tasks", num_tasks)
        check_callable("load_fn", load_fn)
        self._load_fn = load_fn
        self._loads = np.zeros(num_tasks)

    @property
    def loads(self) -> tuple[float, ...]:
        """The load assigned to each task so far."""
        return tuple(self._loads.tolist())

    def __call__(self, variable: Any) -> int:
        """Returns the least loaded task and adds the variable's load to it."""
        task = int(np.argmin(self._loads))
        self._loads[task] += load_of(variable, self._load_fn)
        return task


class RandomStrategy:
    """Chooses a task by a hash of the variable's name.

    Reproduces `tf.contrib.training.RandomStrategy`: the task does not depend on
    other variables, so adding a layer does not move existing variables.

    Args:
        num_ps_tasks: Number of parameter servers, at least 1.
        seed: Integer that varies the hash. Default: 0.

    Raises:
        ValueError: If `num_ps_tasks` is not a positive integer.
        TypeError: If `seed` is not an `int`.

    >>> RandomStrategy(4)(VariableSpec("dense/kernel", (2, 2)))
    2
    """

    def __init__(self, num_ps_tasks: int, seed: int = 0) -> None:
        check_positive("num_ps_tasks", num_ps_tasks)
        self._num_tasks = num_ps_tasks
        check_type("seed", seed, int)
        self._seed = seed

    def __call__(self, variable: Any) -> int:
        """Returns the task for the variable's name."""
        key = f"{full_name(variable)}_{self._seed}".encode()
        digest = hashlib.md5(key, usedforsecurity=False).hexdigest()
        return int(digest, 16) % self._num_tasks


def byte_size_load_fn(variable: Any) -> int:
    """Returns the size in bytes of a variable and its slot variables.

    `tf.contrib.training.byte_size_load_fn` returned 1 for every resource
    variable, so that greedy balancing became round robin, and 8 for every
    string. For reference variables without slots, the two functions agree.

    Args:
        variable: A `VariableSpec`, a variable or the TF1 op that creates one.

    Raises:
        ValueError: If the shape is not fully known, or the dtype is string.
        TypeError: If `variable` has no shape, like a TF1 lookup table.

    >>> byte_size_load_fn(VariableSpec("v", (10, 4), "float32"))
    160
    >>> byte_size_load_fn(VariableSpec("v", (10, 4), "float32", num_slots=2))
    480
    """
    spec = variable_spec(variable)
    return (1 + spec.num_slots) * _value_bytes(spec) + spec.extra_bytes


def traffic_load_fn(variable: Any) -> int:
    """Returns the bytes that one step of one worker transfers for a variable.

    A step pulls the variable, or the `rows_per_step` rows that it looks up,
    and pushes a gradient of the same size if the variable is trainable. The id
    of each looked-up row adds 8 bytes in either direction. Slots never leave
    the server. Arguments and errors are those of `byte_size_load_fn`.

    >>> traffic_load_fn(VariableSpec("dense", (100, 10)))
    8000
    >>> traffic_load_fn(VariableSpec("table", (1000, 10), rows_per_step=5))
    480
    """
    spec = variable_spec(variable)
    pulled = _value_bytes(spec)
    if spec.rows_per_step is not None:
        rows = min(spec.rows_per_step, spec.num_rows)
        row_bytes = pulled // max(1, spec.num_rows)
        pulled = rows * (row_bytes + _ID_BYTES)
    return pulled * (2 if spec.trainable else 1)


def load_of(variable: Any, load_fn: LoadFn) -> float:
    """Returns `load_fn(variable)`; raises an error if it is no valid load."""
    load = load_fn(variable)
    is_number = isinstance(load, numbers.Real) and not isinstance(load, bool)
    if not is_number or not 0 <= load < math.inf:
        raise (ValueError if is_number else TypeError)(
            "Argument `load_fn` must return a finite number that is not "
            f"negative. Received: {load!r} from {_name(load_fn)} for variable "
            f"{_name(variable)}."
        )
    return float(load)


def check_task(
    task: Any, num_tasks: int, variable: Any, strategy: PlacementStrategy
) -> int:
    """Returns `task` as an `int`; raises an error if there is no such task."""
    is_int = isinstance(task, numbers.Integral) and not isinstance(task, bool)
    if not is_int or not 0 <= task < num_tasks:
        raise (ValueError if is_int else TypeError)(
            f"Placement strategy {_name(strategy)} must return an integer from "
            f"0 to {num_tasks - 1}, the index of one of {num_tasks} parameter "
            f"servers. Received: {task!r} for variable {_name(variable)}."
        )
    return int(task)


def _value_bytes(spec: VariableSpec) -> int:
    if spec.num_elements is None or spec.dtype == "string":
        raise ValueError(
            "The size in bytes of a variable is known only if its shape is "
            "fully known and its dtype is not string. Received: "
            f"shape={spec.shape}, dtype={spec.dtype} for variable "
            f"{spec.name!r}. Use a load function that does not need the size."
        )
    return spec.num_elements * tf.as_dtype(spec.dtype).size


def _name(thing: Any) -> str:
    name = getattr(thing, "name", None) or getattr(thing, "__name__", None)
    return repr(name) if isinstance(name, str) else repr(thing)

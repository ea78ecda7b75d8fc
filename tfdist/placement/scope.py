"""The scope that creates each variable of a model on its parameter server."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.placement import strategies
from tfdist.placement.planner import plan
from tfdist.placement.variables import VariableSpec, creation_spec, kind_of

_CHIEF = "/job:chief/task:0/device:CPU:0"


@contextlib.contextmanager
def placed_scope(
    strategy: tf.distribute.Strategy,
    *,
    num_ps: int = 0,
    placement: strategies.PlacementStrategy | None = None,
    specs: Iterable[VariableSpec] | None = None,
) -> Iterator[None]:
    """Enters `strategy.scope()`, where `placement` chooses variables' servers.

    Slot variables follow their variable. Metric variables (those with
    `synchronization=ON_READ`) stay on the chief: every dispatch returns its own
    metric states, so no worker updates them remotely.

    Args:
        strategy: Any `tf.distribute` strategy.
        num_ps: Number of parameter servers. Default: 0, no placement.
        placement: Placement strategy. Default: round robin.
        specs: The result of `describe` for the model, in order of creation, so
            that `placement` knows the variables' full names and slots. Other
            variables (counters) are described by the arguments of the creator.

    Raises:
        ValueError: Within the scope, if `placement` returns a task that does
            not exist; on exit, if a variable in `specs` was not created.
    """
    if not num_ps:
        with strategy.scope(), tf.variable_creator_scope(_unsynchronized):
            yield
        return
    placement = placement or strategies.RoundRobinStrategy(num_ps)
    expected = collections.deque(specs or ())

    def place(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        if kwargs.get("colocate_with") is not None:
            return next_creator(**kwargs)
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            with tf.device(_CHIEF):
                return next_creator(**kwargs)
        spec = creation_spec(**kwargs)
        # A creator receives only the last part of a Keras variable's path.
        if expected and kind_of(expected[0]) == kind_of(spec):
            spec = expected.popleft()
        task = strategies.check_task(placement(spec), num_ps, spec, placement)
        with tf.device(f"/job:ps/task:{task}/device:CPU:0"):
            return next_creator(**kwargs)

    # A strategy applies creator scopes that are entered before its own scope.
    with tf.variable_creator_scope(place), strategy.scope():
        yield
    if expected:
        raise ValueError(
            "The model function must create the same variables each time it is "
            f"called. The placement expected {expected[0].name!r} of shape "
            f"{expected[0].shape}, which was not created, or not in this order."
        )


def _unsynchronized(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    """Creates unsynchronized metric variables: they already hold totals."""
    if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
        kwargs["synchronization"] = tf.VariableSynchronization.AUTO
        kwargs["aggregation"] = tf.VariableAggregation.NONE
    return next_creator(**kwargs)


def placement_by_name(
    name: str, specs: Sequence[VariableSpec], num_ps: int
) -> strategies.PlacementStrategy:
    """Returns the placement strategy that `RunConfig(placement=...)` names.

    "round_robin" is TF1's default; "greedy" its `GreedyLoadBalancingStrategy`
    by bytes, slots included; "planned" places all variables at once.
    """
    if name == "round_robin":
        return strategies.RoundRobinStrategy(num_ps)
    if name == "greedy":
        load_fn = strategies.byte_size_load_fn
        return strategies.GreedyLoadBalancingStrategy(num_ps, load_fn)
    if name == "planned":
        return plan(specs, num_ps).as_strategy()
    raise ValueError(
        "Argument `placement` must be a callable, 'round_robin', 'greedy' or "
        f"'planned'. Received: placement={name!r}."
    )

"""How a session connects to its cluster and builds, once and after failures."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from typing import Any, cast

import keras
import tensorflow as tf

from tfdist._tf.private import Saveable
from tfdist.cluster import probing
from tfdist.cluster.health import HealthMonitor
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import (
    multi_worker_strategy,
    parameter_server_strategy,
)
from tfdist.data.input_fns import takes_argument
from tfdist.placement.scope import placed_scope
from tfdist.session.recovery import restart_process
from tfdist.training.loop import FunctionLoop, Loop


@dataclasses.dataclass(frozen=True)
class Trainable:
    """What `build_fn` makes, and can make again.

    Attributes:
        step: Runs one step, increments `global_step` and returns scalars by
            name (`{"loss": ...}`), or a `tfdist.training.loop.Loop` that runs
            many.
        global_step: Scalar int64 variable that counts applied steps.
        variables: Name to variable: what a checkpoint holds (see
            `tfdist.checkpoint.named_variables`). `global_step` is added.
        iterator: What `step` reads from, saved with each checkpoint. Default:
            that of the loop.
        model: The Keras model, for callbacks.

    >>> tfdist.Trainable(
    ...     step=lambda: {"loss": 0.0},
    ...     global_step=tf.Variable(0, dtype=tf.int64),
    ...     variables={"weight": tf.Variable(1.0)},
    ... ).model is None
    True
    """

    step: Callable[[], Mapping[str, Any]] | Loop
    global_step: tf.Variable
    variables: Mapping[str, Saveable]
    iterator: tf.data.Iterator | None = None
    model: keras.Model | None = None

    def loop(self) -> Loop:
        """The loop that runs `step`."""
        if hasattr(self.step, "run"):
            return cast(Loop, self.step)
        return FunctionLoop(self.step, self.global_step)


class Builder:
    """Connects to the cluster and calls `build_fn`, as often as needed.

    Args:
        build_fn: Makes a `Trainable`.
        cluster: With parameter servers, or for all-reduce; None for neither.
        strategy: Where there is no cluster.
        max_wait_secs: Seconds to wait for tasks that are missing.
        give_up: Called while it waits; ends the wait by raising.
        record_phase: Told the name of each phase that is done.

    Attributes:
        health: Watches the servers while there are any.
    """

    def __init__(
        self,
        build_fn: Callable[..., Trainable],
        cluster: Cluster | None,
        strategy: tf.distribute.Strategy | None,
        *,
        max_wait_secs: float,
        give_up: Callable[[], None],
        record_phase: Callable[[str], None],
    ) -> None:
        self._build_fn = build_fn
        self._takes_strategy = takes_argument(
            build_fn, "build_fn", "the strategy"
        )
        self._cluster = cluster
        self._strategy = strategy
        self._max_wait_secs = max_wait_secs
        self._give_up = give_up
        self._record_phase = record_phase
        self._shapes: dict[str, tuple] | None = None
        self._ending: Loop | None = None
        self.health: HealthMonitor | None = None

    def build(self) -> Trainable:
        """Connects, builds, and compares with what was built before.

        Raises:
            TypeError: `build_fn` returns no `Trainable`.
            ValueError: it makes other variables than before.
        """
        # The functions of before, which a traceback may have held until now,
        # must not be sent to the servers again.
        gc.collect()
        num_ps = self._cluster.num_ps if self._cluster else 0
        strategy = self._connect()
        if self._takes_strategy:
            trainable = self._build_fn(strategy)
        else:
            with placed_scope(strategy, num_ps=num_ps):
                trainable = self._build_fn()
        if not isinstance(trainable, Trainable):
            raise TypeError(
                "Argument `build_fn` must return a tfdist.Trainable. Received: "
                f"{trainable!r}."
            )
        self._check_same_variables(trainable)
        self._record_phase("built")
        return trainable

    def _connect(self) -> tf.distribute.Strategy:
        cluster = self._cluster
        if cluster is None:
            return self._strategy or tf.distribute.get_strategy()
        if not cluster.num_ps:
            return multi_worker_strategy(
                cluster, self._max_wait_secs, self._give_up
            )
        probing.wait_until_up(cluster, self._max_wait_secs, self._give_up)
        if self._ending and not self._ending.has_ended():
            restart_process("The loop of before has not ended")
        self._ending = None
        self._record_phase("waited for tasks")
        strategy = parameter_server_strategy(
            cluster,
            start_timeout_secs=self._max_wait_secs,
            give_up=self._give_up,
        )
        self.health = HealthMonitor(
            cluster, on_stuck=lambda error: restart_process(str(error))
        )
        self._record_phase("connected")
        return strategy

    def _check_same_variables(self, trainable: Trainable) -> None:
        before = self._shapes
        after = self._shapes = {
            name: (tuple(v.shape), v.dtype)
            for name, v in trainable.variables.items()
        }
        if before is not None and before != after:
            differences = [
                f"  {name}: {before.get(name, 'missing')}, then "
                f"{after.get(name, 'missing')}"
                for name in sorted({*before, *after})
                if before.get(name) != after.get(name)
            ]
            raise ValueError(
                "`build_fn` must make the same variables each time it is "
                "called. They differ:\n" + "\n".join(differences)
            )

    def disconnect(self, loop: Loop | None) -> None:
        """Ends the threads that work for `loop`; `build` may follow."""
        if self.health:
            self.health.stop()
            self.health = None
        if loop:
            loop.close()
            self._ending = loop

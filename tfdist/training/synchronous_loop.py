"""Runs synchronous steps on the workers of a `ParameterServerStrategy`."""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.private_keras import is_synchronized
from tfdist.data.input_fns import InputFn
from tfdist.data.input_wait import TimedIterator
from tfdist.training import loop
from tfdist.training.aggregation import Accumulators, Contribution
from tfdist.training.compiled_model import check_sums
from tfdist.training.coordinated_loop import CoordinatedLoop
from tfdist.training.loop import EndOfInput, Watch, unwatched
from tfdist.training.step import ModelStep

_log = logging.getLogger(__name__)

# How long a worker that has done its part yields the queue to the others.
_PARKED_SECS = 0.05


class SynchronousLoop(CoordinatedLoop):
    """Runs synchronous steps on the workers of a `ParameterServerStrategy`.

    As in TF1's `SyncReplicasOptimizer`, every worker computes the gradients of
    its own batch from the same parameters, and their mean over all examples is
    applied as one update. A step does not wait for the slowest
    `backup_workers`: gradients that arrive after their step are dropped and
    counted (Chen et al. 2016, "Revisiting Distributed Synchronous SGD"). A
    gradient that arrives together with the last one needed is used, too.

    A worker whose data has ended no longer takes part; the job ends with the
    last one. A worker that dies counts as slow: if more workers die than there
    are backup workers, a step waits until they are back.

    The other arguments are those of `CoordinatedLoop`. `dropped` is the number
    of gradients that came too late.

    Raises:
        ValueError: The mean of the workers' gradients is not the gradient of
            their combined batches for this loss or optimizer.
    """

    resizable = False  # There are accumulators for each worker.

    def __init__(
        self,
        step: ModelStep,
        global_step: tf.Variable,
        input_fn: InputFn,
        *,
        backup_workers: int,
        **others: Any,
    ) -> None:
        others["steps_per_dispatch"] = 1
        super().__init__(step, global_step, input_fn, **others)
        self.own_variables = None  # Accumulators cannot be renewed.
        check_sums(step.model)
        if is_synchronized(step.model):
            raise ValueError(
                "Synchronous steps on parameter servers (`backup_workers`) do "
                "not support layers with `synchronized=True`: each worker "
                "normalizes its own batch. Leave it out, or use an all-reduce "
                "job, whose processes share these statistics."
            )
        step.staleness = None  # All gradients are fresh.
        self._backup_workers, self.dropped = backup_workers, 0
        num_workers = self._workers.num_workers
        self._accumulators = Accumulators(step.update, num_workers)
        sizes = tf.TensorSpec([num_workers], tf.float32)
        number = tf.TensorSpec([], tf.int64)
        function = tf.function(input_signature=[sizes, number], autograph=False)
        self._update = function(self._accumulators.apply)
        # Notifies the workers' threads of changes to the following.
        self._changed = threading.Condition()
        self._is_open = False  # Whether the parameters are ready for a step.
        self._begun: set[int] = set()  # Workers that have begun their part.
        self._found: dict[int, np.ndarray] = {}  # Their packed metric states.

    def run(
        self, num_steps: int, watch: Watch = unwatched, ahead: int = 0
    ) -> dict[str, float]:
        """See `Loop.run`; `ahead` has no effect."""
        total: Any = 0.0
        for _ in range(num_steps):
            if not self._gather(watch):
                raise EndOfInput(loop.metrics_from_states(total, self._step))
            sizes = np.zeros(self._workers.num_workers, np.float32)
            for worker, packed in self._found.items():
                total, sizes[worker] = total + packed, packed[1]
            self._update(sizes, self._applied)
            self._applied += 1
        return loop.metrics_from_states(total, self._step)

    def wait_for_steps(self, watch: Watch = unwatched) -> None:
        """See `Loop.wait_for_steps`; no update is pending between runs."""
        if self._uncertain and not self._pending:
            self._recount()

    def close(self) -> None:
        """See `Loop.close`."""
        if self.dropped:
            _log.info("%d late gradients were dropped.", self.dropped)
        super().close()

    def _gather(self, watch: Watch) -> bool:
        """Waits for enough gradients of a step; False if the data has ended."""
        self._found = {}
        while True:
            if self._uncertain and not self._pending:
                self._is_open = False
                self._recount()
            if not self._uncertain:
                self._open()
            self._collect(watch)
            able = [
                worker
                for worker, state in enumerate(self._states)
                if worker in self._found or not state.is_exhausted
            ]
            enough = max(1, len(able) - self._backup_workers)
            if not able or len(self._found) >= enough:
                break
        with self._changed:
            self._is_open = False
        return bool(self._found)

    def _open(self) -> None:
        """Lets workers begin that have no gradients for this step yet."""
        if self._iterator is None:
            self._iterator = self._read_data()
        with self._changed:
            if not self._is_open:
                self._begun, self._is_open = set(self._found), True
                self._changed.notify_all()
        while len(self._pending) < self._workers.num_workers:
            self._schedule(self._applied, 1)

    def _steps(
        self,
        num_steps: int,
        iterator: TimedIterator,
        first_step: tf.Tensor,
        generation: tf.Tensor,
        *contribution: Any,
    ) -> tf.Tensor:
        fence = self._generations.fence(generation)
        own = Contribution(self._accumulators, *contribution)
        return loop.run_steps(
            self._step, num_steps, iterator, first_step, fence, own
        )

    def _arguments(self, begun: Any, first_step: int) -> list[Any]:
        with tf.device(None):
            worker = tf.constant(begun.worker, tf.int64)
        own = self._accumulators.of_workers[begun.worker]
        return [*super()._arguments(begun, first_step), worker, own]

    def _takes_part(self, begun: Any, worker: int) -> bool:
        def may() -> bool:
            done = worker in self._begun or self._states[worker].is_exhausted
            return self._is_open and not done

        with self._changed:
            if not self._changed.wait_for(may, _PARKED_SECS):
                return False
            self._begun.add(worker)
            begun.first_step = self._applied
            return True

    def _collect(self, watch: Watch, target: float = math.inf) -> None:
        self._workers.wait([d.future for d in self._pending], watch)
        self._input_watch.look()
        for ended in [d for d in self._pending if d.future.done()]:
            self._pending.remove(ended)
            self._uncertain |= ended.is_lost
            if not ended.done or ended.worker is None:
                continue
            packed = self._input_secs.without(ended.packed)
            if ended.first_step == self._applied:
                self._found[ended.worker] = packed
            else:
                self.dropped += 1

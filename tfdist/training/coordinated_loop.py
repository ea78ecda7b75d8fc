"""Steps on the workers of a `ParameterServerStrategy`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf import private
from tfdist.data.input_wait import InputSeconds, InputWatch, awaited
from tfdist.data.worker_context import WorkerContext
from tfdist.training.fence import Generations
from tfdist.training.loop import (
    Dispatches,
    EndOfInput,
    dispatch_size,
    metrics_from_states,
    run_steps,
)
from tfdist.training.step import ModelStep
from tfdist.training.workers import Workers

_log = logging.getLogger(__name__)

InputFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class CoordinatedLoop:
    """Steps on the workers of a `ParameterServerStrategy`.

    Workers take dispatches from one queue as they become free, so none waits
    for another: a slow one holds the others up only where somebody wants no
    step under way (`Loop.run`, `ahead`).

    A dispatch runs once. If its worker dies, some of its steps may have been
    applied: `global_step`, which counts where updates land, tells how many are
    missing, and other dispatches make up for those. Their metrics are lost.
    In the step in which it dies, a worker may have reached some servers and
    not others; it counts if it reached the one that holds `global_step`.
    A worker whose connection to a server breaks is taken for one that died
    and came back: both begin with another pass over the data (see
    `WorkerContext`), as does the whole job when it is restored.

    Training goes on until the data of every worker has ended. The dispatch in
    which a worker's data ends would lose its other steps, so data of finite or
    unknown length runs one step per dispatch.

    Args:
        step: The step; the variables live on the parameter servers.
        global_step: Scalar int64 variable on a parameter server.
        input_fn: From an `InputContext` to the dataset of one worker; called
            while the dataset is traced, `input_pipeline_id` is a scalar
            tensor.
        num_workers: Number of workers.
        steps_per_dispatch: Steps in one dispatch, as for a `LocalLoop`.
        strategy: The strategy.
        example: What `input_fn` has returned, if it was called already.

    Attributes:
        fixed_shares: Whether each worker reads a part of the data that nobody
            else ever reads; known once steps have run.
    """

    iterator = None  # Each worker has its own, which dies with it.

    own_batches = False

    def __init__(
        self,
        step: ModelStep,
        global_step: tf.Variable,
        input_fn: InputFn,
        *,
        strategy: tf.distribute.ParameterServerStrategy,
        num_workers: int,
        steps_per_dispatch: int | None = None,
        example: tf.data.Dataset | None = None,
    ) -> None:
        self._workers = Workers(strategy, num_workers)
        self._step = step
        self._evaluate = tf.function(step.evaluate_alone, autograph=False)
        self._global_step = global_step
        devices = [d.name for d in tf.config.list_logical_devices("CPU")]
        self._generations = Generations(
            [name for name in devices if name.startswith("/job:ps/")]
        )
        if example is None:
            example = input_fn(tf.distribute.InputContext())
        size = dispatch_size(step.model, steps_per_dispatch)
        if example.cardinality() != tf.data.INFINITE_CARDINALITY:
            asked = steps_per_dispatch or step.model.steps_per_execution > 1
            if asked and size > 1:
                _log.warning(
                    "One step is dispatched at a time, not %d as asked for: "
                    "where the data of a worker end, a dispatch would lose its "
                    "other steps. `dataset.repeat()` has no end.",
                    size,
                )
            size = 1
        self._dispatches = Dispatches(
            functools.partial(run_steps, step), size, self._generations.fence
        )
        self._input_fn = input_fn
        self._iterator: Iterator | None = None
        self.fixed_shares = False
        self._concrete: dict[int, tf.types.experimental.ConcreteFunction] = {}
        self._max_ahead = 2 * num_workers * self._dispatches.full
        self._pending: list[_Dispatch] = []
        # Whether only `global_step` knows how many steps are applied: at the
        # start, when it may yet be restored, and after a dispatch was lost.
        self._uncertain = True
        self._earlier: Any = 0.0
        self._input_secs = InputSeconds()
        self._input_watch = InputWatch(self._waits)
        self.step = self._next_step = 0

    def run(
        self,
        num_steps: int,
        watch: Callable[[], None] = lambda: None,
        ahead: int = 0,
    ) -> dict[str, float]:
        """See `Loop.run`."""
        if self._uncertain and not self._pending:
            self._recount()
        total, self._earlier = self._earlier, 0.0
        target = self.step + num_steps
        limit = target + min(ahead, self._max_ahead)
        while self.step < target:
            exhausted = self._workers.all_exhausted()
            if exhausted and not self._pending:
                raise EndOfInput(metrics_from_states(total, self._step))
            if not (exhausted or self._uncertain):
                self._schedule_up_to(limit, most=num_steps)
            total += self._collect(watch, target)
        return metrics_from_states(total, self._step)

    def wait_for_steps(self, watch: Callable[[], None] = lambda: None) -> None:
        """See `Loop.wait_for_steps`; the next run returns their metrics too."""
        while self._pending or self._uncertain:
            self._earlier += self._collect(watch)

    def evaluate(
        self,
        batches: tf.data.Dataset,
        watch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Loss and metrics of the current parameters, by all workers.

        Exact: every batch counts once, whatever dies. To be called when no
        step is under way; empty if there is no batch. For the arguments see
        `Workers.map`.
        """
        packed = self._workers.map(self._evaluate, batches, watch)
        return metrics_from_states(sum(packed), self._step)

    def staleness(self) -> np.ndarray:
        """See `Loop.staleness`."""
        assert self._step.staleness is not None  # It is `remote`.
        return self._step.staleness.histogram()

    def input_secs(self) -> np.ndarray:
        """See `Loop.input_secs`; of all workers together."""
        return self._input_secs.take()

    def close(self) -> None:
        """See `Loop.close`."""
        self._workers.close()

    def has_ended(self) -> bool:
        """See `Loop.has_ended`."""
        return self._workers.has_ended()

    def _schedule_up_to(self, limit: int, most: int) -> None:
        """Makes sure that the steps before `limit` are done or under way.

        No dispatch is of more than `most` steps: who runs them one by one is
        to see each.

        The first go one by one: a function of one step is traced in a tenth
        of the time. While they run, that of a full dispatch is traced; from
        then on nothing is, since TensorFlow calls every task for each function
        and would hang with one that froze.
        """
        under_way = sum(dispatch.size for dispatch in self._pending)
        missing = limit - self.step - under_way
        if missing <= 0:
            return
        if not self._concrete:
            self._iterator = self._read_data()
            self._trace(1)
            sizes = [1] * min(missing, self._max_ahead)
        else:
            sizes = self._dispatches.sizes(missing, self._next_step)
            if most < self._dispatches.full:
                sizes = [1] * missing
            if not self._concrete.keys() >= set(sizes):
                self._trace(self._dispatches.full)
        for size in sizes:
            self._schedule(self._next_step, size)
            self._next_step += size

    def _read_data(self) -> Iterator:
        """Has every worker begin to read its part of the data (D11).

        A worker that is lost begins again, as the function below is called
        for it: by then, another generation tells that from the first time.
        """
        first = self.step - self._generations.current

        def dataset() -> tf.data.Dataset:
            generation = tf.cast(self._generations.read(), tf.int64)
            # `tf.distribute` itself would say pipeline 0 of 1 to every worker.
            coordinators = tf.distribute.coordinator
            index = coordinators.experimental_get_current_worker_index()
            context = WorkerContext(
                self._workers.num_workers, index, first + generation
            )
            batches = self._input_fn(context)
            self.fixed_shares = context.fixed_share
            return batches

        coordinator = self._workers.coordinator
        return iter(coordinator.create_per_worker_dataset(dataset))

    def _trace(self, size: int) -> None:
        self._concrete[size] = self._workers.trace(
            self._dispatches.functions[size],
            self._iterator,
            tf.TensorSpec([], tf.int64),
            tf.TensorSpec([], tf.float32),
        )

    def _schedule(self, first_step: int, size: int) -> None:
        step = tf.constant(first_step, tf.int64)
        generation = tf.constant(float(self._generations.current))

        def run(iterator: Iterator) -> tf.Tensor:
            return self._concrete[size](iterator, step, generation)

        dispatch = _Dispatch(first_step, size, run, self._workers)
        self._pending.append(dispatch)
        self._workers.schedule(dispatch, self._iterator)

    def _collect(
        self, watch: Callable[[], None], target: float = math.inf
    ) -> Any:
        """Waits for a dispatch to end; returns the states of its steps."""
        if not self._pending:
            self._recount()
            return 0.0
        self._workers.wait(lambda: self._next_ended(target), watch)
        self._input_watch.look()
        ended = self._next_ended(target)
        if ended is None:
            return 0.0
        self._pending.remove(ended)
        if ended.outcome is _Outcome.DONE:
            self.step += ended.size
            assert ended.packed is not None
            return self._input_secs.without(ended.packed)
        if ended.outcome is _Outcome.LOST:
            self._uncertain = True
        elif not self._workers.all_exhausted():
            self._schedule(ended.first_step, ended.size)
        return 0.0

    def _waits(self) -> dict[str, int]:
        """See `InputWatch`. A worker that is in a dispatch for long is asked.

        One that is frozen would not answer; by then it has lost its dispatch.
        """
        found, now = {}, time.monotonic()
        for each in self._pending:
            if not each.outcome and now - each.began > InputWatch.SECS / 3:
                with tf.device(f"/job:worker/task:{each.worker}"):
                    found[f"the input of worker:{each.worker}"] = awaited()
        return found

    def _next_ended(self, target: float) -> _Dispatch | None:
        """A dispatch that has ended; none that goes beyond `target`.

        Unless only such are left.
        """
        within = [d for d in self._pending if self.step + d.size <= target]
        return next((d for d in within or self._pending if d.outcome), None)

    def _recount(self) -> None:
        """Finds out what was applied, once nothing is under way any more.

        A worker that is only believed dead may still have a part of a
        dispatch: what it sends from now on is refused.
        """
        self._generations.advance()
        self.step = self._next_step = int(self._global_step.numpy())
        self._uncertain = False


class _Outcome(enum.Enum):
    """How a dispatch ended."""

    DONE = "its steps are applied"
    SKIPPED = "its worker's data has ended; none of its steps is applied"
    LOST = "its worker is gone; some of its steps may be applied"


@dataclasses.dataclass(eq=False)
class _Dispatch:
    """Some steps on whichever worker is free, at most once.

    Attributes:
        first_step: Number of the first of its steps.
        size: How many.
        run: Runs them, given an iterator.
        workers: The workers.
        outcome: How it ended; None until then.
        worker: Index of the worker that runs it; None until one does.
        began: When it did.
        packed: What `run` returned, if it is done.
    """

    first_step: int
    size: int
    run: Callable[[Iterator], tf.Tensor]
    workers: Workers
    outcome: _Outcome | None = None
    worker: int | None = None
    began: float = math.inf
    packed: np.ndarray | None = None

    def __call__(self, iterator: Iterator) -> None:
        """Runs on a thread of the coordinator, for that thread's worker.

        The coordinator calls again, for another worker, what has failed.
        """
        if self.began < math.inf:
            self.outcome = _Outcome.LOST
            return
        if self.workers.is_exhausted():
            self.workers.leave_to_others()
            self.outcome = _Outcome.SKIPPED
            return
        self.worker = private.current_worker()
        self.began = time.monotonic()
        try:
            self.packed = self.run(iterator).numpy()
        except tf.errors.OutOfRangeError:
            self.workers.mark_exhausted()
            self.outcome = _Outcome.SKIPPED
        except tf.errors.OpError:
            # An iterator that was cancelled says ever after that it is at its
            # end. TensorFlow may take the error for a passing one.
            self.workers.renew_input()
            raise
        else:
            self.outcome = _Outcome.DONE

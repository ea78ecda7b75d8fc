"""Runs steps on the workers of a `ParameterServerStrategy`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf import private, private_workers
from tfdist.cluster.spec import Cluster
from tfdist.data.input_fns import InputFn, counted, trace_for_workers
from tfdist.data.input_wait import InputWatch, TimedIterator, awaited
from tfdist.training import loop
from tfdist.training.fence import Generations
from tfdist.training.loop import EndOfInput, Loop, Watch, unwatched
from tfdist.training.staleness import StalenessBound
from tfdist.training.step import ModelStep
from tfdist.training.workers import Workers

_log = logging.getLogger(__name__)

_END_SECS = 10.0
# How long a worker whose data has ended leaves the queue to the others.
_PAUSE_SECS = 0.01


class CoordinatedLoop(Loop):
    """Runs steps on the workers of a `ParameterServerStrategy`.

    Workers take dispatches from one queue as they become free, so a slow worker
    delays others only where no step may be left running (`Loop.run`, `ahead`).

    A dispatch runs at most once. If its worker dies, some of its steps may have
    been applied: `global_step`, counted where updates are applied, tells how
    many are missing, and other dispatches run these. Metrics of the applied
    steps are lost. The step in which a worker dies counts if it reached the
    server that holds `global_step`; it may not have reached others. A worker
    whose connection to a server breaks is treated like one that died and came
    back: both begin another pass over the data (see `WorkerContext`).

    Training continues until the data of every worker has ended. A dispatch in
    which data ends would lose its other steps, so a worker runs steps one by
    one unless batches for all of a dispatch are certain to remain.

    Args:
        step: A `ModelStep` with `remote=True`.
        global_step: Counts steps; a variable on a parameter server.
        input_fn: Maps an `InputContext` to the dataset of one worker. In its
            trace, `input_pipeline_id` is a scalar tensor.
        steps_per_dispatch: See `dispatch_size`.
        example: The dataset that `input_fn` returned, if it was called already.
        max_staleness: The largest staleness of an update, for which workers
            wait for slower ones. Default: they never wait.
        read_ahead: How many steps early a dispatch reads parameters.
    """

    resizable = True

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
        max_staleness: int | None = None,
        read_ahead: int = 0,
    ) -> None:
        super().__init__(global_step)
        self._workers = Workers(strategy, num_workers)
        self._step, self._strategy = step, strategy
        self._evaluate = tf.function(step.evaluate_alone, autograph=False)
        devices = [d.name for d in tf.config.list_logical_devices("CPU")]
        self._generations = Generations(
            [name for name in devices if name.startswith("/job:ps/")]
        )
        with tf.device(global_step.device):  # See `_first_pass`.
            self._first = tf.Variable(tf.zeros([], tf.int64), trainable=False)
        self._dataset: Any = None
        self.own_variables = [self._first, *self._generations.variables]
        if step.staleness:
            self.own_variables.append(step.staleness.counts)
        example = example or input_fn(tf.distribute.InputContext())
        self._largest, self._asked = loop.dispatch_size(
            step.model, steps_per_dispatch, num_workers
        )
        bound = max_staleness
        self._bound = None if bound is None else StalenessBound(bound)
        self._is_endless = example.cardinality() == tf.data.INFINITE_CARDINALITY
        self._is_counted = not self._is_endless and self._largest > 1
        if self._is_counted:
            known = example.cardinality() != tf.data.UNKNOWN_CARDINALITY
            most = 0 if known else self._largest
            input_fn = counted(input_fn, most, self._asked)
        self._read_ahead, self._input_fn = read_ahead, input_fn
        self._size_dispatches(num_workers)
        self._iterator: Iterator | None = None
        self._is_dealt = False  # Whether data depends on `num_workers`.
        self._traced: dict[int, tf.types.experimental.ConcreteFunction] = {}
        self._input_watch = InputWatch(self._waits)
        self._applied = self._next_step = 0
        self._begin()

    def _size_dispatches(self, num_workers: int) -> None:
        """Sets the number of steps in a dispatch, and of steps in flight."""
        self._full = self._largest
        if self._bound and not self._asked:
            self._full = self._bound.limited(self._full, num_workers)
        if self._read_ahead and self._full == 1:
            _log.warning(
                "Nothing is read ahead, although `read_ahead` is %d, because "
                "only one step is dispatched at a time.",
                self._read_ahead,
            )
        self._max_ahead = 2 * num_workers * self._full

    def _begin(self) -> None:
        self._pending: list[_Dispatch] = []
        self._states = [
            _WorkerState() for _ in range(self._workers.num_workers)
        ]
        # Whether only `global_step` knows how many steps are applied: at the
        # start, as it may still be restored, and after a dispatch was lost.
        self._uncertain = True
        self._earlier: Any = 0.0
        if self._bound:
            self._bound.clear()

    @property
    def step(self) -> int:
        """See `Loop.step`."""
        return self._applied

    def run(
        self, num_steps: int, watch: Watch = unwatched, ahead: int = 0
    ) -> dict[str, float]:
        """See `Loop.run`."""
        if self._uncertain and not self._pending:
            self._recount()
        total, self._earlier = self._earlier, 0.0
        target = self._applied + num_steps
        limit = target + min(ahead, self._max_ahead)
        while self._applied < target:
            if not (self._uncertain or self._all_exhausted()):
                self._schedule_up_to(limit, most=num_steps)
            if not (self._uncertain or self._pending):
                raise EndOfInput(loop.metrics_from_states(total, self._step))
            total += self._collect(watch, target)
        return loop.metrics_from_states(total, self._step)

    def wait_for_steps(self, watch: Watch = unwatched) -> None:
        """See `Loop.wait_for_steps`; the next run returns their metrics too."""
        while self._pending or self._uncertain:
            self._earlier += self._collect(watch)

    def resize(self, cluster: Cluster) -> bool:
        """See `Loop.resize`; False while TensorFlow waits for a dead worker.

        Data that depends on the number of workers is distributed again, in
        another pass. With other data, such as `one_pass`, workers keep theirs.
        """
        number, coordinator = cluster.num_workers, self._workers.coordinator
        with private_workers.locked_workers(coordinator) as free:
            if not free:
                return False
            # Before workers leave whose iterators are freed here.
            if self._is_dealt:
                self._iterator = None
            elif self._iterator is not None:
                kept = private_workers.of_first_workers(self._iterator, number)
                self._iterator = kept
            before = self._workers.num_workers
            self._workers.resize(cluster)
        del self._states[number:]
        self._states += [_WorkerState() for _ in range(before, number)]
        self._dataset = None
        self._size_dispatches(number)
        if self._iterator is not None:
            self._iterator = private_workers.of_all_workers(
                coordinator, self._iterator
            )
        elif self._traced:
            for state in self._states:
                state.is_exhausted, state.remaining = False, 0
            self._iterator = self._read_data()
            if not self._is_endless:
                _log.warning(
                    "The data is distributed again, to %d workers, so the "
                    "current passes repeat some examples. To avoid this, use "
                    "`tfdist.one_pass`.",
                    number,
                )
        return True

    def begin_again(self) -> None:
        """See `Loop.begin_again`; traced functions are kept."""
        for variable in self.own_variables or ():
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        self._generations.current += 1  # Older threads are now late.
        self._iterator = None
        self._begin()
        self._workers = Workers(self._strategy, self._workers.num_workers)
        private_workers.renew_tables(self._workers.coordinator)

    def evaluate(
        self, batches: tf.data.Dataset, watch: Watch = unwatched
    ) -> dict[str, float]:
        """See `Loop.evaluate`; runs on all workers, exact despite failures."""
        packed = sum(self._workers.map(self._evaluate, batches, watch))
        if not isinstance(packed, np.ndarray):  # No batch.
            return {}
        return self._step.result(packed, evaluated=True)

    def staleness(self) -> np.ndarray | None:
        """See `Loop.staleness`."""
        counter = self._step.staleness
        return counter.histogram() if counter else None

    def compiles(self) -> bool:
        """See `Loop.compiles`."""
        return any(state.compiles for state in self._states)

    def close(self) -> None:
        """See `Loop.close`."""
        self._workers.close()

    def has_ended(self) -> bool:
        """See `Loop.has_ended`."""
        # No coordinator can start while a thread of this one is in C++ code.
        coordinator = self._workers.coordinator
        with private_workers.locked_workers(coordinator, _END_SECS) as ended:
            return ended

    def _all_exhausted(self) -> bool:
        return all(state.is_exhausted for state in self._states)

    def _schedule_up_to(self, limit: int, most: int) -> None:
        """Makes sure that the steps before `limit` are done or scheduled.

        No dispatch has more than `most` steps, so that callers who run steps
        one by one see each. The first steps run one by one: a function of one
        step traces in a tenth of the time; a full one is traced meanwhile.
        """
        under_way = sum(each.size for each in self._pending)
        missing = max(0, limit - self._applied - under_way)
        full = self._full if most >= self._full else 1
        if self._iterator is None:
            self._iterator = self._read_data()
            missing, full = min(missing, self._max_ahead), 1
        for size in loop.dispatch_sizes(missing, full, self._next_step):
            self._schedule(self._next_step, size)
            self._next_step += size

    def _read_data(self) -> Iterator:
        """Lets every worker begin to read its part of the data.

        For a worker that was lost, `_first_pass` is called again; by then the
        generation has changed, so the worker begins another pass.
        """
        self._first.assign(self._applied - self._generations.current)
        if self._dataset is None:
            self._dataset, asked = trace_for_workers(
                self._input_fn, self._workers.num_workers, self._first_pass
            )
            self.fixed_shares = asked.fixed_share
            self._is_dealt = asked.is_dealt
            if asked.each_once and not self._asked:  # See `counted`.
                self._largest = 1
                self._size_dispatches(self._workers.num_workers)
        coordinator = self._workers.coordinator
        return iter(coordinator.create_per_worker_dataset(self._dataset))

    def _first_pass(self) -> tf.Tensor:
        generation = tf.cast(self._generations.read(), tf.int64)
        return self._first.read_value() + generation

    def _steps(
        self,
        num_steps: int,
        iterator: TimedIterator,
        first_step: tf.Tensor,
        generation: tf.Tensor,
    ) -> tf.Tensor:
        fence = self._generations.fence(generation)
        return loop.run_steps_ahead(
            self._step, num_steps, iterator, first_step, fence, self._read_ahead
        )

    def _schedule(self, first_step: int, size: int) -> None:
        """Adds a dispatch to the queue.

        Each size is traced once, and early: TensorFlow contacts every task for
        each function, and would hang if one was frozen.
        """
        generation = self._generations.current
        begun = _Dispatch(first_step, size, generation, worker=0)
        if size not in self._traced:
            function = loop.dispatch(self._steps, size, self._is_counted)
            self._traced[size] = private.trace(
                self._workers.coordinator,
                tf.function(function, autograph=False),
                self._iterator,
                *self._arguments(begun, first_step),
            )
        begun.worker = None
        call = functools.partial(self._run_on_worker, begun)
        begun.future = self._workers.schedule(call, self._iterator)
        self._pending.append(begun)

    def _arguments(self, begun: _Dispatch, first_step: int) -> list[Any]:
        """The arguments of `_steps` after the iterator."""
        with tf.device(None):  # Not sent to the worker separately.
            generation = tf.constant(float(begun.generation))
            return [tf.constant(first_step, tf.int64), generation]

    def _takes_part(self, begun: _Dispatch, worker: int) -> bool:
        """Whether a worker should run a dispatch; called in its thread."""
        if self._states[worker].is_exhausted:
            time.sleep(_PAUSE_SECS)
            return False
        return self._bound is None or self._bound.begin(begun, begun.size)

    def _run_on_worker(self, begun: _Dispatch, iterator: Iterator) -> None:
        """Runs a dispatch in a worker's thread; called again if that fails."""
        if begun.worker is not None:
            begun.is_lost = True
            return
        worker = private.current_worker()
        # Referenced here, because `_begin` replaces them after a failure.
        state, coordinator = self._states[worker], self._workers.coordinator
        late = begun.generation != self._generations.current
        if late or not self._takes_part(begun, worker):
            return
        begun.since, begun.worker = time.monotonic(), worker
        is_full = not self._is_counted or state.remaining >= begun.size
        # Single steps take a tenth of the time to compile.
        size = begun.size if is_full and state.warm else 1
        end = begun.first_step + begun.size
        state.compiles = size not in state.warm
        try:
            for step in range(begun.first_step, end, size):
                args = self._arguments(begun, step)
                packed = self._traced[size](iterator, *args).numpy()
                if self._is_counted:
                    packed, state.remaining = packed[:-1], packed[-1]
                begun.done += size
                begun.packed += packed
                state.warm.add(size)
        except tf.errors.OutOfRangeError:
            state.is_exhausted = True
            begun.is_lost = size > 1  # Another pass was shorter than expected.
        except tf.errors.OpError as error:
            state.warm, state.remaining = set(), 0
            self.on_failure()
            # A cancelled iterator reports its end from then on. TensorFlow may
            # consider the error transient.
            private_workers.renew_resources(coordinator, error)
            raise
        finally:
            if self._bound:
                self._bound.end(begun)
        state.compiles = False

    def _collect(self, watch: Watch, target: float = math.inf) -> Any:
        """The states of a dispatch that has ended, or 0.0 if none has yet.

        Waits for a dispatch that goes beyond `target` only if no other is left.
        """
        if not self._pending:
            self._recount()
            return 0.0
        within = [d for d in self._pending if self._applied + d.size <= target]
        waited_for = within or self._pending
        self._workers.wait([d.future for d in waited_for], watch)
        self._input_watch.look()
        ended = next((d for d in waited_for if d.future.done()), None)
        if ended is None:
            return 0.0
        self._pending.remove(ended)
        if ended.is_lost:
            self._uncertain = True
            return 0.0
        self._applied += ended.done
        if not self._all_exhausted():
            size = 1 if ended.done else ended.size
            end = ended.first_step + ended.size
            for step in range(ended.first_step + ended.done, end, size):
                self._schedule(step, size)
        return self._input_secs.without(ended.packed) if ended.done else 0.0

    def _recount(self) -> None:
        """Finds out which steps were applied, once none is running any more.

        Updates that a worker wrongly believed dead still sends are rejected.
        """
        self._generations.advance()
        self._applied = self._next_step = int(self._global_step.numpy())
        self._uncertain = False

    def _waits(self) -> dict[str, int]:
        """See `InputWatch`; asks workers that have run a dispatch for long.

        A frozen worker would not answer; by then it has lost its dispatch.
        """
        found, long_ago = {}, time.monotonic() - InputWatch.SECS / 3
        for each in self._pending:
            if each.since < long_ago and not each.future.done():
                with tf.device(f"/job:worker/task:{each.worker}"):
                    found[f"the input of worker:{each.worker}"] = awaited()
        return found


@dataclasses.dataclass
class _WorkerState:
    """What the chief knows of a worker."""

    is_exhausted: bool = False  # Whether its data has ended.
    remaining: float = 0  # Batches that are certain to follow, if counted.
    # The sizes of the dispatches that it has run, and whether it is running one
    # of another size.
    warm: set[int] = dataclasses.field(default_factory=set)
    compiles: bool = False


@dataclasses.dataclass(eq=False)
class _Dispatch:
    """Some steps that any free worker runs, at most once."""

    first_step: int  # The number of its first step.
    size: int  # The number of its steps.
    generation: int  # The one in which it was scheduled.
    future: concurrent.futures.Future = dataclasses.field(init=False)
    worker: int | None = None  # The worker that runs it; None until one does.
    since: float = math.inf  # When that worker began.
    # The number and results of the steps that its worker has run. Not all, if
    # the worker's data has ended, or the dispatch `is_lost`.
    done: int = 0
    packed: Any = 0.0
    is_lost: bool = False  # Its worker is gone; some steps may be applied.

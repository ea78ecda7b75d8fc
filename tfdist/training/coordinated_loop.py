"""Steps on the workers of a `ParameterServerStrategy`."""

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
from tfdist.data.input_fns import InputFn, of_a_worker
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
    """Steps on the workers of a `ParameterServerStrategy`.

    Workers take dispatches from one queue as they become free, so a slow one
    holds others up only where no step may be under way (`Loop.run`, `ahead`).

    A dispatch runs once. If its worker dies, some of its steps may have been
    applied: `global_step`, which counts where updates land, tells how many are
    missing, and other dispatches make up for those. Their metrics are lost.
    The step in which a worker dies counts if it reached the server that holds
    `global_step`; others it may not have reached. A worker whose connection to
    a server breaks is taken for one that died and came back: both begin with
    another pass over the data (see `WorkerContext`).

    Training goes on until the data of every worker has ended. A dispatch in
    which they end would lose its other steps, so data of finite or unknown
    length runs one step per dispatch.

    Args:
        step: A `remote` one.
        global_step: On a parameter server.
        input_fn: From an `InputContext` to the dataset of one worker; called
            while that is traced, `input_pipeline_id` is a scalar tensor.
        steps_per_dispatch: See `dispatch_size`.
        example: What `input_fn` has returned, if it was called already.
        max_staleness: No update is staler: workers wait for slower ones.
            Default: they never wait.
        read_ahead: How many steps early parameters are read, in a dispatch.
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
        with tf.device(global_step.device):  # With the generation, a pass.
            self._first = tf.Variable(tf.zeros([], tf.int64), trainable=False)
        self._dataset: Any = None
        self.own_variables = [self._first, *self._generations.variables]
        if step.staleness:
            self.own_variables.append(step.staleness.counts)
        example = example or input_fn(tf.distribute.InputContext())
        self._largest, self._asked = loop.dispatch_size(
            step.model, steps_per_dispatch
        )
        self._bound: StalenessBound | None = None
        if max_staleness is not None:
            self._bound = StalenessBound(max_staleness)
        self._is_endless = example.cardinality() == tf.data.INFINITE_CARDINALITY
        if not self._is_endless:
            if self._asked and self._largest > 1:
                _log.warning(
                    "One step is dispatched at a time, not %d as asked for: "
                    "where the data of a worker end, a dispatch would lose its "
                    "other steps. `dataset.repeat()` has no end.",
                    self._largest,
                )
            self._largest = 1
        self._read_ahead = read_ahead
        self._size_dispatches(num_workers)
        self._input_fn = input_fn
        self._iterator: Iterator | None = None
        self._is_dealt = False  # Whether by the number of workers.
        self._traced: dict[int, tf.types.experimental.ConcreteFunction] = {}
        self._input_watch = InputWatch(self._waits)
        self._applied = self._next_step = 0
        self._begin()

    def _size_dispatches(self, num_workers: int) -> None:
        """How many steps one has, and how many are under way."""
        self._full = self._largest
        if self._bound and not self._asked:
            self._full = self._bound.limited(self._full, num_workers)
        if self._read_ahead and self._full == 1:
            _log.warning(
                "Nothing is read ahead, as `read_ahead=%d` asks for: one step "
                "is dispatched at a time.",
                self._read_ahead,
            )
        self._max_ahead = 2 * num_workers * self._full

    def _begin(self) -> None:
        self._pending: list[_Dispatch] = []
        self._exhausted: set[int] = set()  # Workers whose data has ended.
        # Of each worker, the sizes of the dispatches that it has run.
        self._warm: dict[int, set[int]] = {}
        # Workers that have begun one of a size that they have not run yet.
        self._compiling: set[int] = set()
        # Whether only `global_step` knows how many steps are applied: at the
        # start, when it may yet be restored, and after a dispatch was lost.
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

        Data that depend on the number of workers are dealt anew, from another
        pass. Of others, such as `one_pass`, each worker keeps what it has.
        """
        number, coordinator = cluster.num_workers, self._workers.coordinator
        with private_workers.unchanging(coordinator) as free:
            if not free:
                return False
            # Before the workers go whose iterators are freed.
            if self._is_dealt:
                self._iterator = None
            elif self._iterator is not None:
                kept = private_workers.of_first_workers(self._iterator, number)
                self._iterator = kept
            before = self._workers.num_workers
            self._workers.resize(cluster)
        for worker in range(number, before):  # They have left.
            self._exhausted.discard(worker)
            self._compiling.discard(worker)
            self._warm.pop(worker, None)
        self._dataset = None
        self._size_dispatches(number)
        if self._iterator is not None:
            self._iterator = private_workers.of_all_workers(
                coordinator, self._iterator
            )
        elif self._traced:
            self._exhausted.clear()
            self._iterator = self._read_data()
            if not self._is_endless:
                _log.warning(
                    "The data are dealt anew to %d workers: of the passes that "
                    "were begun, examples are read again. "
                    "`tfdist.one_pass` repeats none.",
                    number,
                )
        return True

    def begin_again(self) -> None:
        """See `Loop.begin_again`; all functions are those of before."""
        for variable in self.own_variables or ():
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        self._generations.current += 1  # Threads of before are late now.
        self._iterator = None
        self._begin()
        self._workers = Workers(self._strategy, self._workers.num_workers)
        private_workers.renew_tables(self._workers.coordinator)

    def evaluate(
        self, batches: tf.data.Dataset, watch: Watch = unwatched
    ) -> dict[str, float]:
        """See `Loop.evaluate`; by all workers, exact whatever dies."""
        packed = sum(self._workers.map(self._evaluate, batches, watch))
        if not isinstance(packed, np.ndarray):  # Of no batch.
            return {}
        return self._step.result(packed, evaluated=True)

    def staleness(self) -> np.ndarray | None:
        """See `Loop.staleness`."""
        counter = self._step.staleness
        return counter.histogram() if counter else None

    def compiles(self) -> bool:
        """See `Loop.compiles`."""
        return bool(self._compiling)

    def close(self) -> None:
        """See `Loop.close`."""
        self._workers.close()

    def has_ended(self) -> bool:
        """See `Loop.has_ended`."""
        coordinator = self._workers.coordinator
        return private.coordinator_has_ended(coordinator, _END_SECS)

    def _all_exhausted(self) -> bool:
        return len(self._exhausted) >= self._workers.num_workers

    def _schedule_up_to(self, limit: int, most: int) -> None:
        """Makes sure that the steps before `limit` are done or under way.

        No dispatch is of more than `most` steps: who runs them one by one is
        to see each. The first go one by one: a function of one step is traced
        in a tenth of the time, and while they run that of a full dispatch is.
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
        """Has every worker begin to read its part of the data (D11).

        A worker that is lost begins again, as the function below is called
        for it: by then, another generation tells that from the first time.
        """
        self._first.assign(self._applied - self._generations.current)
        if self._dataset is None:
            self._dataset, asked = of_a_worker(
                self._input_fn, self._workers.num_workers, self._first_pass
            )
            self.fixed_shares = asked.fixed_share
            self._is_dealt = asked.is_dealt
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
        """Puts steps into the queue.

        Each size is traced once, and early: TensorFlow calls every task for
        each function, and would hang with one that froze.
        """
        generation = self._generations.current
        begun = _Dispatch(first_step, size, generation, worker=0)
        if size not in self._traced:
            self._traced[size] = private.trace(
                self._workers.coordinator,
                tf.function(loop.dispatch(self._steps, size), autograph=False),
                self._iterator,
                *self._arguments(begun),
            )
        begun.worker = None
        call = functools.partial(self._run_on_worker, begun)
        begun.future = self._workers.schedule(call, self._iterator)
        self._pending.append(begun)

    def _arguments(self, begun: _Dispatch) -> list[Any]:
        """What `_steps` takes behind the iterator."""
        with tf.device(None):  # Not sent to the worker by itself.
            generation = tf.constant(float(begun.generation))
            return [tf.constant(begun.first_step, tf.int64), generation]

    def _takes_part(self, begun: _Dispatch, worker: int) -> bool:
        """Whether a worker, in its thread, is to run a dispatch."""
        if worker in self._exhausted:
            time.sleep(_PAUSE_SECS)
            return False
        return self._bound is None or self._bound.begin(begun, begun.size)

    def _run_on_worker(self, begun: _Dispatch, iterator: Iterator) -> None:
        """Runs on a coordinator's thread; again on another's if that fails."""
        if begun.worker is not None:
            begun.is_lost = True
            return
        worker = private.current_worker()
        # Those of before a failure, if the dispatch is.
        exhausted, coordinator = self._exhausted, self._workers.coordinator
        known, compiling = self._warm, self._compiling
        late = begun.generation != self._generations.current
        if late or not self._takes_part(begun, worker):
            return
        begun.since, begun.worker = time.monotonic(), worker
        pieces, warm = [begun], known.setdefault(worker, set())
        if not warm:
            # It begins to train when it has compiled a tenth of the other.
            one = functools.partial(dataclasses.replace, begun, size=1)
            steps = range(begun.first_step, begun.first_step + begun.size)
            pieces = [one(first_step=step) for step in steps]
        size = pieces[0].size
        if size not in warm:
            compiling.add(worker)
        try:
            packed = [
                self._traced[size](iterator, *self._arguments(p)).numpy()
                for p in pieces
            ]
            begun.packed = np.sum(packed, axis=0)
            warm.add(size)
        except tf.errors.OutOfRangeError:
            exhausted.add(worker)
        except tf.errors.OpError as error:
            known.pop(worker, None)
            self.on_failure()
            # An iterator that was cancelled says ever after that it is at its
            # end. TensorFlow may take the error for a passing one.
            private_workers.renew_resources(coordinator, error)
            raise
        finally:
            if self._bound:
                self._bound.end(begun)
        compiling.discard(worker)

    def _collect(self, watch: Watch, target: float = math.inf) -> Any:
        """The states of a dispatch that has ended; 0.0: none has yet.

        None is waited for that goes beyond `target`, if others are left.
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
        if ended.packed is not None:
            self._applied += ended.size
            return self._input_secs.without(ended.packed)
        if ended.is_lost:
            self._uncertain = True
        elif not self._all_exhausted():
            self._schedule(ended.first_step, ended.size)
        return 0.0

    def _recount(self) -> None:
        """Finds out what was applied, once nothing is under way any more.

        What a worker that is only believed dead still sends is refused.
        """
        self._generations.advance()
        self._applied = self._next_step = int(self._global_step.numpy())
        self._uncertain = False

    def _waits(self) -> dict[str, int]:
        """See `InputWatch`. A worker that is in a dispatch for long is asked.

        One that is frozen would not answer; by then it has lost its dispatch.
        """
        found, long_ago = {}, time.monotonic() - InputWatch.SECS / 3
        for each in self._pending:
            if each.since < long_ago and not each.future.done():
                with tf.device(f"/job:worker/task:{each.worker}"):
                    found[f"the input of worker:{each.worker}"] = awaited()
        return found


@dataclasses.dataclass(eq=False)
class _Dispatch:
    """Some steps on whichever worker is free, at most once."""

    first_step: int  # Number of the first of its steps.
    size: int  # How many.
    generation: int  # The one in which it was scheduled.
    future: concurrent.futures.Future = dataclasses.field(init=False)
    worker: int | None = None  # That runs it; None until one does.
    since: float = math.inf  # When it began there.
    # What it returned. None at its end: none of its steps is applied, as the
    # data of its worker has ended, or it `is_lost`.
    packed: np.ndarray | None = None
    is_lost: bool = False  # Its worker is gone; some steps may be applied.

"""How steps run: in this process, or on the workers of a coordinator.

Both loops trace the same dispatch: `steps_per_dispatch` steps of a `ModelStep`,
unrolled in one `tf.function` (design decision D4). `run(num_steps)` runs
exactly that many and returns the loss and metrics of exactly those steps; the
remainder that does not fill a dispatch goes in dispatches of a single step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist import _private
from tfdist.fence import Fence, Generations
from tfdist.step import ModelStep

_log = logging.getLogger(__name__)

InputFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]

_WATCH_SECS = 0.5


class EndOfInput(Exception):  # noqa: N818: it ends training, as StopIteration
    """The input is exhausted. `logs` are those of the steps that ran."""

    def __init__(self, logs: dict[str, float]) -> None:
        super().__init__("The training input is exhausted.")
        self.logs = logs


class Loop(Protocol):
    """The interface of every loop.

    Attributes:
        iterator: What the steps read from, where its position can be saved
            with a checkpoint; else None.
    """

    iterator: tf.data.Iterator | None

    def run(
        self, num_steps: int, watch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Runs exactly `num_steps` steps; returns their loss and metrics.

        Args:
            num_steps: How many.
            watch: Called at least every second while others work; ends the
                wait for them by raising.

        Raises:
            EndOfInput: the input ended before.
        """

    def staleness(self) -> np.ndarray | None:
        """Updates so far by their staleness; None where there is none."""

    def close(self) -> None:
        """Ends what the loop has started. It cannot run any more."""


def automatic_steps_per_dispatch(num_variables: int) -> int:
    """Steps per dispatch where the user did not choose.

    A dispatch costs about half a millisecond whatever is in it, and tracing
    grows with its steps times the model's variables. Ten is the knee for
    models of some dozens of variables; large models have long steps anyway.

    >>> [automatic_steps_per_dispatch(n) for n in (1, 30, 100, 1000)]
    [10, 10, 5, 1]
    """
    return int(np.clip(500 // max(num_variables, 1), 1, 10))


def _dispatch_size(
    step: ModelStep, dataset: tf.data.Dataset, wanted: int | None
) -> int:
    """One step where the data may end, so that it ends exactly."""
    if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
        return 1
    if wanted is not None:
        return wanted
    return automatic_steps_per_dispatch(len(step.model.trainable_variables))


class _Dispatches:
    """The traced functions of a loop: one full dispatch and a single step."""

    def __init__(
        self,
        step: ModelStep,
        full: int,
        fence: Callable[[tf.Tensor], Fence] | None = None,
    ) -> None:
        if full < 1:
            raise ValueError(
                "Argument `steps_per_dispatch` must be positive. Received: "
                f"steps_per_dispatch={full}."
            )
        self.step = step
        self.full = full
        self._fence = fence
        # As in Keras' own training function, autograph converts nothing.
        self._functions = {
            n: tf.function(self._unrolled(n), autograph=False)
            for n in {1, full}
        }

    def _unrolled(self, num_steps: int) -> Callable[..., tf.Tensor]:
        def dispatch(
            iterator: Iterator, first_step: tf.Tensor, *generation: tf.Tensor
        ) -> tf.Tensor:
            fence = self._fence(*generation) if self._fence else None
            states = self.step.zero_states()
            for i in range(num_steps):
                states = self.step.train(
                    iterator.get_next(), first_step + i, states, fence
                )
            return self.step.pack(states)

        return dispatch

    def __getitem__(
        self, num_steps: int
    ) -> tf.types.experimental.GenericFunction:
        return self._functions[num_steps]

    def sizes(self, num_steps: int) -> list[int]:
        """Sizes of the dispatches that make up `num_steps` steps."""
        whole, rest = divmod(num_steps, self.full)
        return [self.full] * whole + [1] * rest


class LocalLoop:
    """Steps in this process.

    Args:
        step: The step.
        global_step: Scalar int64 variable, incremented once per step.
        dataset: The batches, in order. One whose length is finite or unknown
            runs one step per dispatch, so that its end is exact.
        steps_per_dispatch: Steps in one `tf.function` call. Default: by
            `automatic_steps_per_dispatch`.
    """

    def __init__(
        self,
        step: ModelStep,
        global_step: tf.Variable,
        dataset: tf.data.Dataset,
        steps_per_dispatch: int | None = None,
    ) -> None:
        self._dispatches = _Dispatches(
            step, _dispatch_size(step, dataset, steps_per_dispatch)
        )
        self._step = step
        self._global_step = global_step
        self.iterator = iter(dataset)

    def run(
        self, num_steps: int, watch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """See `Loop.run`."""
        total = 0.0
        first_step = self._global_step.numpy()
        for size in self._dispatches.sizes(num_steps):
            try:
                packed = self._dispatches[size](
                    self.iterator, tf.constant(first_step, tf.int64)
                )
            except tf.errors.OutOfRangeError:
                raise EndOfInput(
                    self._step.result(_filled(total, self._step))
                ) from None
            first_step += size
            total = total + packed.numpy()
        return self._step.result(_filled(total, self._step))

    def staleness(self) -> None:
        """One process reads nothing stale."""

    def close(self) -> None:
        """Nothing to end."""


class CoordinatedLoop:
    """Steps on the workers of a `ParameterServerStrategy`.

    Workers take dispatches from one queue as they become free, so none waits
    for another; `run` returns when all its steps are applied.

    A dispatch runs once. If its worker dies, some of its steps may have been
    applied: `global_step`, which counts where updates land, tells how many are
    missing, and other dispatches make up for those. Their metrics are lost.
    In the step in which it dies, a worker may have reached some servers and
    not others; it counts if it reached the one that holds `global_step`.

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
        steps_per_dispatch: Steps in one dispatch. Default: by
            `automatic_steps_per_dispatch`.
        strategy: The strategy.
    """

    iterator = None  # Each worker has its own, which dies with it.

    def __init__(
        self,
        step: ModelStep,
        global_step: tf.Variable,
        input_fn: InputFn,
        *,
        strategy: tf.distribute.ParameterServerStrategy,
        num_workers: int,
        steps_per_dispatch: int | None = None,
    ) -> None:
        tf.get_logger().addFilter(_is_news)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        self._step = step
        self._global_step = global_step
        self._generations = Generations(_ps_devices())
        example = input_fn(tf.distribute.InputContext())
        self._dispatches = _Dispatches(
            step,
            _dispatch_size(step, example, steps_per_dispatch),
            self._generations.fence,
        )
        dataset = self._coordinator.create_per_worker_dataset(
            lambda: input_fn(worker_context(num_workers))
        )
        self._iterator = iter(dataset)
        self._exhausted: set[int] = set()
        self._concrete: dict[int, tf.types.experimental.ConcreteFunction] = {}
        self._num_workers = num_workers

    def run(
        self, num_steps: int, watch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """See `Loop.run`."""
        first_step = int(self._global_step.numpy())
        last_step = first_step + num_steps
        total: Any = 0.0
        while first_step < last_step:
            dispatches = self._schedule(first_step, last_step - first_step)
            while not _private.wait_for_dispatches(
                self._coordinator, _WATCH_SECS
            ):
                watch()
            total += sum(d.packed for d in dispatches if d.packed is not None)
            if all(d.packed is not None for d in dispatches):
                break
            watch()
            # What was lost may still be on its way.
            self._generations.advance()
            first_step = int(self._global_step.numpy())
            if len(self._exhausted) >= self._num_workers:
                raise EndOfInput(self._step.result(_filled(total, self._step)))
        return self._step.result(_filled(total, self._step))

    def staleness(self) -> np.ndarray:
        """See `Loop.staleness`."""
        return self._step.staleness.histogram()

    def close(self) -> None:
        """Ends the coordinator's threads."""
        _private.stop_coordinator(self._coordinator)

    def _schedule(self, first_step: int, num_steps: int) -> list[_Dispatch]:
        """Hands out dispatches for `num_steps` steps."""
        sizes = self._dispatches.sizes(num_steps)
        round_ = _Round(len(sizes), self._num_workers, self._exhausted)
        generation = tf.constant(float(self._generations.current))
        dispatches = []
        for size in sizes:
            args = (tf.constant(first_step, tf.int64), generation)
            function = self._traced(size, *args)
            dispatch = _Dispatch(round_, function, args)
            _private.schedule(self._coordinator, dispatch, self._iterator)
            dispatches.append(dispatch)
            first_step += size
        return dispatches

    def _traced(
        self, size: int, *args: tf.Tensor
    ) -> tf.types.experimental.ConcreteFunction:
        """A dispatch of `size` steps, traced once on this thread."""
        if size not in self._concrete:
            self._concrete[size] = _private.trace(
                self._coordinator,
                self._dispatches[size],
                self._iterator,
                *args,
            )
        return self._concrete[size]


class _Round:
    """The dispatches of one `run`, seen by the threads that carry them out.

    The coordinator has one thread for each worker.

    Args:
        size: How many dispatches.
        num_workers: How many workers.
        exhausted: The threads whose worker's data has ended.
    """

    def __init__(
        self, size: int, num_workers: int, exhausted: set[int]
    ) -> None:
        self._unfinished = size
        self._num_workers = num_workers
        self._kept = 0
        self._exhausted = exhausted
        self._changed = threading.Condition()

    def finished(self) -> None:
        """A dispatch is finished."""
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def mark_exhausted(self) -> None:
        """The data of the calling thread's worker has ended."""
        self._exhausted.add(threading.get_ident())

    def is_exhausted(self) -> bool:
        """Whether the data of the calling thread's worker has ended."""
        return threading.get_ident() in self._exhausted

    def keep_for_others(self) -> None:
        """Keeps the calling thread from taking dispatches others could do."""
        with self._changed:
            self._kept += 1
            self._changed.wait_for(
                lambda: (
                    self._unfinished <= self._kept
                    or len(self._exhausted) >= self._num_workers
                ),
                timeout=_WATCH_SECS,
            )


class _Dispatch:
    """Some steps on whichever worker is free, at most once.

    Attributes:
        packed: Metric states of the steps; None while they have not run, and
            for ever if their worker died or its data ended.
    """

    def __init__(
        self,
        round_: _Round,
        function: tf.types.experimental.ConcreteFunction,
        args: tuple[tf.Tensor, ...],
    ) -> None:
        self.packed: np.ndarray | None = None
        self._round = round_
        self._function = function
        self._args = args
        self._started = False

    def __call__(self, iterator: Iterator) -> None:
        """Runs on a thread of the coordinator, for that thread's worker.

        The coordinator calls again, for another worker, what has failed.
        """
        if self._round.is_exhausted():
            self._round.keep_for_others()
            return
        if self._started:
            return
        self._started = True
        try:
            self.packed = self._function(iterator, *self._args).numpy()
        except tf.errors.OutOfRangeError:
            self._round.mark_exhausted()
        self._round.finished()


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of TensorFlow's log says what is not said elsewhere.

    The coordinator logs a lost task's error with the whole traceback, once for
    each dispatch. A loss is reported by `tfdist.health` and `tfdist.session`,
    any other error is raised.
    """
    return record.module != "cluster_coordinator"


def worker_context(num_workers: int) -> tf.distribute.InputContext:
    """Which part of the data a worker reads (design decision D11).

    Must be called while a per-worker dataset is traced; `tf.distribute` itself
    would say that every worker is pipeline 0 of 1.
    """
    index = tf.distribute.coordinator.experimental_get_current_worker_index()
    return tf.distribute.InputContext(
        num_input_pipelines=num_workers,
        input_pipeline_id=index,
        num_replicas_in_sync=1,
    )


def _filled(total: Any, step: ModelStep) -> np.ndarray:
    """`total`, or the states of no example when nothing ran."""
    if isinstance(total, np.ndarray):
        return total
    return step.pack(step.zero_states()).numpy()


def _ps_devices() -> list[str]:
    """The device of each parameter server that this process is connected to."""
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    return [name for name in devices if name.startswith("/job:ps/")]

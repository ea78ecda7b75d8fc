"""How steps run: in this process, or on the workers of a coordinator.

Both loops trace the same dispatch: `steps_per_dispatch` steps of a `ModelStep`,
unrolled in one `tf.function` (design decision D4). `run(num_steps)` runs
exactly that many and returns the loss and metrics of exactly those steps; the
remainder that does not fill a dispatch goes in dispatches of a single step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfdist.step import ModelStep

InputFn = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class EndOfInput(Exception):  # noqa: N818: it ends training, as StopIteration
    """The input is exhausted. `logs` are those of the steps that ran."""

    def __init__(self, logs: dict[str, float]) -> None:
        super().__init__("The training input is exhausted.")
        self.logs = logs


class Loop(Protocol):
    """The interface of every loop."""

    def run(self, num_steps: int) -> dict[str, float]:
        """Runs exactly `num_steps` steps; returns their loss and metrics.

        Raises:
            EndOfInput: the input ended before.
        """


def automatic_steps_per_dispatch(num_variables: int) -> int:
    """Steps per dispatch where the user did not choose.

    A dispatch costs about half a millisecond whatever is in it, and tracing
    grows with its steps times the model's variables. Ten is the knee for
    models of some dozens of variables; large models have long steps anyway.

    >>> [automatic_steps_per_dispatch(n) for n in (1, 30, 100, 1000)]
    [10, 10, 5, 1]
    """
    return int(np.clip(500 // max(num_variables, 1), 1, 10))


class _Dispatches:
    """The traced functions of a loop: one full dispatch and a single step."""

    def __init__(self, step: ModelStep, full: int) -> None:
        if full < 1:
            raise ValueError(
                "Argument `steps_per_dispatch` must be positive. Received: "
                f"steps_per_dispatch={full}."
            )
        self.step = step
        self.full = full
        # As in Keras' own training function, autograph converts nothing.
        self._functions = {
            n: tf.function(self._unrolled(n), autograph=False)
            for n in {1, full}
        }

    def _unrolled(self, num_steps: int) -> Callable[..., tf.Tensor]:
        def dispatch(iterator: Iterator, first_step: tf.Tensor) -> tf.Tensor:
            states = self.step.zero_states()
            for i in range(num_steps):
                states = self.step.train(
                    iterator.get_next(), first_step + i, states
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
        if dataset.cardinality() != tf.data.INFINITE_CARDINALITY:
            steps_per_dispatch = 1
        elif steps_per_dispatch is None:
            steps_per_dispatch = automatic_steps_per_dispatch(
                len(step.model.trainable_variables)
            )
        self._dispatches = _Dispatches(step, steps_per_dispatch)
        self._step = step
        self._global_step = global_step
        self._iterator = iter(dataset)

    def run(self, num_steps: int) -> dict[str, float]:
        """See `Loop.run`."""
        total = 0.0
        first_step = self._global_step.numpy()
        for size in self._dispatches.sizes(num_steps):
            try:
                packed = self._dispatches[size](
                    self._iterator, tf.constant(first_step, tf.int64)
                )
            except tf.errors.OutOfRangeError:
                raise EndOfInput(
                    self._step.result(_filled(total, self._step))
                ) from None
            first_step += size
            total = total + packed.numpy()
        return self._step.result(_filled(total, self._step))


class CoordinatedLoop:
    """Steps on the workers of a `ParameterServerStrategy`.

    Workers take dispatches from one queue as they become free, so none waits
    for another; `run` returns when all its steps are applied.

    Args:
        step: The step; the variables live on the parameter servers.
        global_step: Scalar int64 variable on a parameter server.
        input_fn: From an `InputContext` to the dataset of one worker; called
            while the dataset is traced, `input_pipeline_id` is a scalar
            tensor. It should repeat: the end of one worker's data ends
            training, and the dispatches then under way on other workers are
            cancelled (their steps may or may not be applied; `global_step`
            counts those that were).
        num_workers: Number of workers.
        steps_per_dispatch: Steps in one dispatch. Default: by
            `automatic_steps_per_dispatch`.
        strategy: The strategy.
    """

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
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        self._step = step
        self._global_step = global_step
        self._dispatches = _Dispatches(
            step,
            steps_per_dispatch
            or automatic_steps_per_dispatch(
                len(step.model.trainable_variables)
            ),
        )
        dataset = self._coordinator.create_per_worker_dataset(
            lambda: input_fn(worker_context(num_workers))
        )
        self._iterator = iter(dataset)

    def run(self, num_steps: int) -> dict[str, float]:
        """See `Loop.run`."""
        first_step = self._global_step.numpy()
        pending: list[Any] = []
        for size in self._dispatches.sizes(num_steps):
            pending.append(
                self._coordinator.schedule(
                    self._dispatches[size],
                    args=(self._iterator, tf.constant(first_step, tf.int64)),
                )
            )
            first_step += size
        try:
            self._coordinator.join()
        except tf.errors.OutOfRangeError:
            raise EndOfInput({}) from None
        total = sum(value.fetch() for value in pending)
        return self._step.result(_filled(total, self._step))


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

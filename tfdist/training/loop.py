"""How steps run: in this process; on workers, see `coordinated_loop.py`.

Both loops trace the same dispatch: `steps_per_dispatch` steps of a `ModelStep`,
unrolled in one `tf.function` (design decision D4). `run(num_steps)` runs
exactly that many and returns the loss and metrics of exactly those steps; the
remainder that does not fill a dispatch goes in dispatches of a single step.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.input_wait import (
    InputSeconds,
    InputWatch,
    TimedIterator,
    awaited,
)
from tfdist.training.fence import Fence
from tfdist.training.keras_step import KerasStep
from tfdist.training.metric_states import States
from tfdist.training.step import ModelStep

Step: TypeAlias = ModelStep | KerasStep


class EndOfInput(Exception):
    """The input is exhausted; no error, as `StopIteration` is none.

    Attributes:
        logs: Loss and metrics of the steps that ran.
    """

    def __init__(self, logs: dict[str, float]) -> None:
        super().__init__("The training input is exhausted.")
        self.logs = logs


class Loop(Protocol):
    """The interface of every loop.

    Attributes:
        iterator: What the steps read from, where its position can be saved
            with a checkpoint; else None.
        fixed_shares: Whether each worker reads a part of the data that nobody
            else ever reads.
        own_batches: Whether the data are this process's alone, and others have
            others.
    """

    fixed_shares: bool
    own_batches: bool
    iterator: tf.data.Iterator | None

    @property
    def step(self) -> int:
        """Steps applied in the job, as far as `run` has counted them."""

    def run(
        self,
        num_steps: int,
        watch: Callable[[], None] = lambda: None,
        ahead: int = 0,
    ) -> dict[str, float]:
        """Runs `num_steps` steps; returns their loss and metrics.

        Args:
            num_steps: How many.
            watch: Called at least every second while others work; ends the
                wait for them by raising.
            ahead: How many steps beyond these may be under way on return, so
                that nobody waits for the slowest; the next run counts them.
                With 0 it is exactly `num_steps`, and none is under way.

        Raises:
            EndOfInput: the input ended before.
        """

    def wait_for_steps(self, watch: Callable[[], None] = lambda: None) -> None:
        """Waits for the steps under way; `step` then counts them too."""

    def evaluate(
        self,
        batches: tf.data.Dataset,
        watch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Loss and metrics of the current parameters; no step is under way.

        Every batch counts once; empty if there is none.
        """

    def staleness(self) -> np.ndarray | None:
        """Updates so far by their staleness; None where there is none."""

    def input_secs(self) -> np.ndarray:
        """`[waited for data, all]`: seconds of steps since the last call."""

    def close(self) -> None:
        """Ends what the loop has started. It cannot run any more."""

    def has_ended(self) -> bool:
        """Whether, once closed, it allows for another loop in this process.

        To be asked when every task is up; waits for ten seconds at most.
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


def dispatch_size(model: keras.Model, wanted: int | None) -> int:
    """Steps per dispatch: as wanted, as `compile` was told, or automatic."""
    if wanted is None and model.steps_per_execution > 1:
        return model.steps_per_execution
    automatic = automatic_steps_per_dispatch(len(model.trainable_variables))
    return automatic if wanted is None else wanted


class Dispatches:
    """The functions of a loop: one full dispatch and a single step.

    Attributes:
        full: Number of steps in a full dispatch.
        functions: Number of steps to the function that runs them.

    Args:
        steps: From a number of steps, an iterator, the number of the first
            step and a fence to the packed metric states of the steps, which
            it runs; see `run_steps`. The functions take an iterator or the
            batches of the steps, and add to the vector what
            `TimedIterator.seconds` tells.
        full: Number of steps in a full dispatch.
        fence: From a generation to what each update must pass; None: nothing.
        batches: Where the functions take batches: the `tf.TypeSpec` structures
            of those of one step.
    """

    def __init__(
        self,
        steps: Callable[..., tf.Tensor],
        full: int,
        fence: Callable[[tf.Tensor], Fence] | None = None,
        batches: tuple[Any, ...] = (),
    ) -> None:
        if full < 1:
            raise ValueError(
                "Argument `steps_per_dispatch` must be positive. Received: "
                f"steps_per_dispatch={full}."
            )
        self.full = full
        self._steps = steps
        self._fence = fence
        # As in Keras' own training function, autograph converts nothing.
        self.functions = {
            n: tf.function(
                self._unrolled(n),
                input_signature=(n * batches, tf.TensorSpec([], tf.int64))
                if batches
                else None,
                autograph=False,
            )
            for n in {1, full}
        }

    def _unrolled(self, num_steps: int) -> Callable[..., tf.Tensor]:
        def dispatch(
            source: Iterable, first_step: tf.Tensor, *generation: tf.Tensor
        ) -> tf.Tensor:
            fence = self._fence(*generation) if self._fence else None
            timed = TimedIterator(iter(source), first_step)
            packed = self._steps(num_steps, timed, first_step, fence)
            return tf.concat([packed, timed.seconds(num_steps, packed)], 0)

        return dispatch

    def sizes(self, num_steps: int, first_step: int = 0) -> list[int]:
        """Sizes of the dispatches that make up `num_steps` steps.

        Full ones begin at multiples of their size, as what happens every so
        many steps does.
        """
        lead = min(-first_step % self.full, num_steps)
        whole, rest = divmod(num_steps - lead, self.full)
        return [1] * lead + [self.full] * whole + [1] * rest


def run_steps(
    step: Step,
    num_steps: int,
    iterator: tf.data.Iterator | TimedIterator,
    first_step: tf.Tensor,
    fence: Fence | None = None,
) -> tf.Tensor:
    """Runs steps, unrolled; returns their packed metric states."""
    states = step.zero_states()
    for i in range(num_steps):
        states = step.train(iterator.get_next(), first_step + i, states, fence)
    return step.pack(states)


class InProcessLoop:
    """What all loops share whose steps run in this process, one by one.

    Args:
        global_step: Scalar int64 variable, incremented once per step.

    Attributes:
        own_batches: Whether the data are this process's alone, and others have
            others.
    """

    own_batches = False
    fixed_shares = False

    def __init__(self, global_step: tf.Variable) -> None:
        self._global_step = global_step
        self._input_secs = InputSeconds()

    @property
    def step(self) -> int:
        """See `Loop`."""
        return int(self._global_step.numpy())

    def wait_for_steps(self, watch: Callable[[], None] = lambda: None) -> None:
        """No step is ever under way."""

    def staleness(self) -> None:
        """One process reads nothing stale."""

    def input_secs(self) -> np.ndarray:
        """See `Loop.input_secs`."""
        return self._input_secs.take()

    def close(self) -> None:
        """Nothing to end."""

    def has_ended(self) -> bool:
        """Nothing is left."""
        return True


class LocalLoop(InProcessLoop):
    """Steps in this process.

    Args:
        step: The step.
        global_step: Scalar int64 variable, incremented once per step.
        dataset: The batches, in order.
        steps_per_dispatch: Steps in one `tf.function` call. Default: see
            `dispatch_size`.
    """

    _task = "this process"
    _batches_per_step = 1

    def __init__(
        self,
        step: Step,
        global_step: tf.Variable,
        dataset: tf.data.Dataset,
        steps_per_dispatch: int | None = None,
    ) -> None:
        super().__init__(global_step)
        self._may_end = dataset.cardinality() != tf.data.INFINITE_CARDINALITY
        read = self._batches_per_step * (dataset.element_spec,)
        self._dispatches = Dispatches(
            self._steps,
            dispatch_size(step.model, steps_per_dispatch),
            batches=read if self._may_end else (),
        )
        self._read_at = 0.0
        self._watch = InputWatch(self._waits)
        self._step = step
        self._evaluation: tuple[ModelStep, Callable[..., States]] | None = None
        self.iterator = iter(dataset)

    def _steps(
        self,
        num_steps: int,
        iterator: TimedIterator,
        first_step: tf.Tensor,
        fence: None = None,
    ) -> tf.Tensor:
        return run_steps(self._step, num_steps, iterator, first_step)

    def run(
        self,
        num_steps: int,
        watch: Callable[[], None] = lambda: None,
        ahead: int = 0,
    ) -> dict[str, float]:
        """See `Loop.run`."""
        total: float | np.ndarray = 0.0
        first_step = self.step
        end = first_step + num_steps
        with self._watch, contextlib.suppress(tf.errors.OutOfRangeError):
            for source, size in self._sources(num_steps):
                packed = self._dispatches.functions[size](
                    source, tf.constant(first_step, tf.int64)
                )
                first_step += size
                states = self._input_secs.without(packed.numpy())
                total = self._step.joined(total, states)
                if self._ended_before(first_step):
                    end += 1
                    break
        if first_step < end:
            raise EndOfInput(metrics_from_states(total, self._step))
        return metrics_from_states(total, self._step)

    def evaluate(
        self,
        batches: tf.data.Dataset,
        watch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """See `Loop.evaluate`.

        Raises:
            ValueError: the model has a `train_step` of its own.
        """
        if not isinstance(self._step, ModelStep):
            raise ValueError(
                f"Model {self._step.model.name!r} has a `train_step` of its "
                "own, whose metrics are those of training: evaluate its "
                "checkpoints, with `Estimator.evaluate`."
            )
        if self._evaluation is None:
            # A step of its own: metrics that are no sums go on in training's.
            step = ModelStep(self._step.model, batches.element_spec)
            self._evaluation = step, tf.function(
                step.evaluate, autograph=False, reduce_retracing=True
            )
        step, evaluate = self._evaluation
        states: States = []
        for batch in batches:
            states = evaluate(batch, states or step.zero_states())
        packed = step.pack(states).numpy() if states else 0.0
        return metrics_from_states(packed, step)

    def _sources(self, num_steps: int) -> Iterator[tuple[Iterable, int]]:
        """What each dispatch reads from, and its number of steps.

        Where the data may end, the batches are read before: a function in
        which they end would lose its other steps. Those that do not fill a
        dispatch are dispatches of a single step.
        """
        each = self._batches_per_step
        for size in self._dispatches.sizes(num_steps):
            if not self._may_end:
                yield self.iterator, size
                continue
            self._read_at = time.monotonic()
            batches = tuple(itertools.islice(self.iterator, size * each))
            self._input_secs.sums += time.monotonic() - self._read_at
            self._read_at = 0.0
            if len(batches) < size * each:
                for i in range(0, len(batches) - each + 1, each):
                    yield batches[i : i + each], 1
                return
            yield batches, size

    def _waits(self) -> dict[str, float]:
        """See `InputWatch`."""
        return {f"the input of {self._task}": self._read_at or awaited()}

    def _ended_before(self, step: int) -> bool:
        """Whether the data ended before so many steps, and raised nothing."""
        return False


class FunctionLoop(InProcessLoop):
    """A user's step function as a loop."""

    iterator = None

    def __init__(
        self,
        function: Callable[[], Mapping[str, Any]],
        global_step: tf.Variable,
    ) -> None:
        super().__init__(global_step)
        self._function = function

    def run(
        self,
        num_steps: int,
        watch: Callable[[], None] = lambda: None,
        ahead: int = 0,
    ) -> dict[str, float]:
        """Runs the function; returns what its last call did."""
        logs: Mapping[str, Any] = {}
        for _ in range(num_steps):
            logs = self._function() or {}
        return {name: float(value) for name, value in logs.items()}

    def evaluate(
        self,
        batches: tf.data.Dataset,
        watch: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """A step function has no model to evaluate.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "`evaluate` needs a session that trains a Keras model through a "
            "tfdist.training.loop.Loop; this one runs a plain step function."
        )


def metrics_from_states(total: Any, step: Step) -> dict[str, float]:
    """Loss and metrics of a sum of packed states; 0.0 is of no example."""
    if not isinstance(total, np.ndarray):
        total = step.pack(step.zero_states()).numpy()
    return step.result(total)

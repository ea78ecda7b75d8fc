"""Runs steps in this process; for workers, see `coordinated_loop.py`.

All loops over a `ModelStep` trace the same dispatch: `steps_per_dispatch`
steps, unrolled in one `tf.function`. `run(num_steps)` runs exactly that many;
steps that do not fill a dispatch are dispatched one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_positive, check_type
from tfdist._tf.tracing import traced
from tfdist.cluster.spec import Cluster
from tfdist.data import input_wait
from tfdist.data.input_wait import TimedIterator
from tfdist.training.compiled_model import refuse_evaluation
from tfdist.training.fence import Fence
from tfdist.training.keras_step import KerasStep
from tfdist.training.metrics import States
from tfdist.training.step import ModelStep

Step: TypeAlias = ModelStep | KerasStep
Watch: TypeAlias = Callable[[], None]


def unwatched() -> None:
    """A watch that never ends the wait."""


class EndOfInput(Exception):
    """The input is exhausted; `logs` are those of the steps that ran."""

    def __init__(self, logs: dict[str, float]) -> None:
        super().__init__("The training input is exhausted.")
        self.logs = logs


class Loop:
    """Runs a session's steps; each adds 1 to `global_step`, a scalar int64."""

    # The iterator that the steps read from, if its position can be saved.
    iterator: tf.data.Iterator | None = None
    # Whether each worker reads a part of the data that no other ever reads.
    fixed_shares = False
    own_batches = False  # Whether other processes read other data.
    resizable = False  # Whether `resize` can be called.
    # Variables that are 0 when the loop begins. None: it cannot `begin_again`.
    own_variables: list[tf.Variable] | None = None

    def __init__(self, global_step: tf.Variable) -> None:
        self._global_step = global_step
        self._input_secs = input_wait.InputSeconds()
        # Called, from any thread, when a call to a task has failed.
        self.on_failure: Watch = unwatched

    @property
    def step(self) -> int:
        """The steps applied in the job, as far as `run` has counted them."""
        return int(self._global_step.numpy())

    def run(
        self, num_steps: int, watch: Watch = unwatched, ahead: int = 0
    ) -> dict[str, float]:
        """Runs `num_steps` steps; returns their loss and metrics.

        `watch` is called at least once a second while workers run steps; it
        ends the wait by raising an exception. Up to `ahead` steps (default: 0)
        may still be running on return, so that no worker waits for the slowest;
        the next run counts them.

        Raises:
            EndOfInput: The input ended early.
        """
        raise NotImplementedError

    def wait_for_steps(self, watch: Watch = unwatched) -> None:
        """Waits for the steps that are running; `step` then includes them."""

    def evaluate(
        self, batches: tf.data.Dataset, watch: Watch = unwatched
    ) -> dict[str, float]:
        """Returns loss and metrics of the current parameters, between steps.

        Each batch counts once; the result is empty if there is none. Raises
        `ValueError` if the loop has no model that can be evaluated.
        """
        raise ValueError(
            "`evaluate` needs a session that trains a Keras model in a tfdist."
            "training.loop.Loop, but this one runs a plain step function."
        )

    def resize(self, cluster: Cluster) -> bool:
        """Continues with workers of `cluster`, all up; False if it cannot."""
        raise NotImplementedError

    def begin_again(self) -> None:
        """Restarts a closed loop, with the same variables in new memory."""
        raise NotImplementedError

    def check_resize(self, num_processes: int) -> None:
        """Raises `ValueError` if this would change the global batch."""

    def staleness(self) -> np.ndarray | None:
        """The number of updates by staleness; None if it is not counted."""
        return None

    def input_secs(self) -> np.ndarray:
        """`[waiting for data, total]` seconds of steps since the last call."""
        return self._input_secs.take()

    def compiles(self) -> bool:
        """Whether a task is running a function for the first time.

        If a server is lost meanwhile, the task may look for it forever.
        """
        return False

    def close(self) -> None:
        """Stops everything the loop has started; it cannot run any more."""

    def has_ended(self) -> bool:
        """Whether another loop can begin, all tasks up; waits at most 10 s."""
        return True


def automatic_steps_per_dispatch(
    num_variables: int, num_workers: int = 1
) -> int:
    """The default number of steps per dispatch.

    A dispatch costs the chief three milliseconds of CPU, whatever its size, so
    that more than eight workers get larger ones. Tracing time grows with the
    number of steps times that of variables.

    >>> [automatic_steps_per_dispatch(n) for n in (1, 30, 100, 1000)]
    [10, 10, 5, 1]
    >>> [automatic_steps_per_dispatch(n, 32) for n in (1, 30, 100, 1000)]
    [20, 20, 20, 2]
    """
    times = max(1, num_workers // 8)
    most = min(500 * times // max(num_variables, 1), 10 * times)
    # They divide the usual numbers of steps between checkpoints or log lines.
    return max(size for size in (1, 2, 5, 10, 20, 50) if size <= max(most, 1))


def dispatch_size(
    model: keras.Model, wanted: int | None, num_workers: int = 1
) -> tuple[int, bool]:
    """Steps per dispatch, and whether the user set them (also in `compile`)."""
    compiled = model.steps_per_execution
    check_type("steps_per_execution", compiled, int | np.integer)
    if wanted is None and compiled > 1:
        wanted = compiled
    if wanted is None:
        size = automatic_steps_per_dispatch(
            len(model.trainable_variables), num_workers
        )
        return size, False
    check_positive("steps_per_dispatch", wanted)
    return wanted, True


def dispatch_sizes(num_steps: int, full: int, first_step: int = 0) -> list[int]:
    """Sizes of the dispatches that make up `num_steps` steps.

    Full dispatches begin at multiples of their size, like events that happen
    every so many steps.

    >>> dispatch_sizes(9, full=4, first_step=3)
    [1, 4, 4]
    """
    lead = min(-first_step % full, num_steps)
    whole, rest = divmod(num_steps - lead, full)
    return [1] * lead + [full] * whole + [1] * rest


def dispatch(
    steps: Callable[..., tf.Tensor], num_steps: int, is_counted: bool = False
) -> Callable[..., tf.Tensor]:
    """Returns the function to trace for a dispatch of `num_steps` steps.

    Its arguments are an iterator (or the batches), the first step's number, and
    the other arguments of `steps` (see `run_steps`). It appends the result of
    `TimedIterator.seconds` to the packed metric states; if batches are counted
    (see `input_fns.counted`), also how many are certain to remain.
    """

    def run(source: Iterable, first_step: tf.Tensor, *args: Any) -> tf.Tensor:
        timed = TimedIterator(iter(source), first_step, is_counted)
        packed = steps(num_steps, timed, first_step, *args)
        parts = [packed, timed.seconds(num_steps, packed)]
        if is_counted:
            parts.append(tf.cast([timed.remaining], packed.dtype))
        return tf.concat(parts, 0)

    return run


def run_steps(
    step: Step,
    num_steps: int,
    iterator: tf.data.Iterator | TimedIterator,
    first_step: tf.Tensor,
    *args: Any,
) -> tf.Tensor:
    """Runs steps, passes `args` to `step.train`; returns packed states."""
    states = step.zero_states()
    for i in range(num_steps):
        states = step.train(iterator.get_next(), first_step + i, states, *args)
    return step.pack(states)


def run_steps_ahead(
    step: ModelStep,
    num_steps: int,
    iterator: TimedIterator,
    first_step: tf.Tensor,
    fence: Fence | None,
    read_ahead: int = 0,
) -> tf.Tensor:
    """Like `run_steps`, on parameter servers, with fewer messages.

    The ids that a step looks up are sent with the gradients of the step before,
    or, as parameters are read earlier, of `read_ahead` steps before that.
    """
    states = step.zero_states()
    following = (
        step.begin(iterator.get_next(), first_step + i)
        for i in range(num_steps)
    )
    begun = [*itertools.islice(following, 1 + read_ahead)]
    while begun:
        first, *others = map(step.read, begun)
        states, another = step.end(first, states, fence, following=following)
        begun = [*others, *([] if another is None else [another])]
    return step.pack(states)


class LocalLoop(Loop):
    """Runs a model's steps in this process, on batches of `dataset` in order.

    Each `tf.function` call runs `steps_per_dispatch` steps: see
    `dispatch_size`. By default, steps run one by one until they have taken as
    long as tracing a full dispatch will: short jobs begin and end sooner.
    """

    iterator: tf.data.Iterator
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
        if step.single_steps:
            steps_per_dispatch = 1
        self._full, asked = dispatch_size(step.model, steps_per_dispatch)
        self._secs_alone = 0.0 if asked else math.inf
        read = self._batches_per_step * (dataset.element_spec,)
        number = tf.TensorSpec([], tf.int64)
        self._functions = {
            n: traced(
                dispatch(self._steps, n),
                input_signature=(n * read, number) if self._may_end else None,
            )
            for n in {1, self._full}
        }
        self._read_at = 0.0
        self._watch = input_wait.InputWatch(self._waits)
        self._step = step
        self._evaluation: tuple[ModelStep, Callable[..., States]] | None = None
        self.iterator = iter(dataset)

    def _steps(
        self, num_steps: int, iterator: TimedIterator, first_step: tf.Tensor
    ) -> tf.Tensor:
        return run_steps(self._step, num_steps, iterator, first_step)

    def run(
        self, num_steps: int, watch: Watch = unwatched, ahead: int = 0
    ) -> dict[str, float]:
        """See `Loop.run`."""
        total: float | np.ndarray = 0.0
        first_step, ended = self.step, False
        end = first_step + num_steps
        with self._watch, contextlib.suppress(tf.errors.OutOfRangeError):
            for source, size in self._sources(num_steps):
                start = time.monotonic()
                number = tf.constant(first_step, tf.int64)
                packed = self._functions[size](source, number).numpy()
                secs = time.monotonic() - start
                if self._secs_alone == math.inf:
                    # Tracing ten steps takes 2.3 to 3.7 times as long as the
                    # first step, which includes what happens only once.
                    self._secs_alone = secs * self._full / 3
                self._secs_alone -= secs
                first_step += size
                states = self._input_secs.without(packed)
                total = self._step.joined(total, states)
                if ended := self._ended_before(first_step):
                    break
        logs = metrics_from_states(total, self._step)
        if ended or first_step < end:
            raise EndOfInput(logs)
        return logs

    def evaluate(
        self, batches: tf.data.Dataset, watch: Watch = unwatched
    ) -> dict[str, float]:
        """See `Loop.evaluate`."""
        if not isinstance(self._step, ModelStep):
            refuse_evaluation(self._step.model)
        if self._evaluation is None:
            # A separate step: the training step keeps metrics that are no sums.
            step = ModelStep(self._step.model, batches.element_spec)
            evaluate = traced(step.evaluate, reduce_retracing=True)
            self._evaluation = step, evaluate
        step, evaluate = self._evaluation
        states = step.zero_states()
        for batch in batches:
            states = evaluate(batch, states)
        return metrics_from_states(step.pack(states).numpy(), step)

    def _sources(self, num_steps: int) -> Iterator[tuple[Iterable, int]]:
        """Yields the source that each dispatch reads, and its number of steps.

        If data may end, it is read first: a dispatch would lose other steps.
        """
        each = self._batches_per_step
        full = 1 if self._secs_alone > 0 else self._full
        for size in dispatch_sizes(num_steps, full):
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
        since = self._read_at or input_wait.awaited()
        return {f"the input of {self._task}": since}

    def _ended_before(self, step: int) -> bool:
        """Whether the data ended before `step` without raising an error."""
        return False


class FunctionLoop(Loop):
    """A user's step function as a loop."""

    def __init__(
        self, function: Callable[[], Mapping], global_step: tf.Variable
    ) -> None:
        super().__init__(global_step)
        self._function = function

    def run(
        self, num_steps: int, watch: Watch = unwatched, ahead: int = 0
    ) -> dict[str, float]:
        """Runs the function `num_steps` times; returns the last call's logs."""
        logs: Mapping[str, Any] = {}
        for _ in range(num_steps):
            logs = self._function() or {}
        if not isinstance(logs, Mapping):
            raise TypeError(
                "A step function must return a dictionary of logs. Received: "
                f"{logs!r}."
            )
        return {name: _number(name, value) for name, value in logs.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"Log {name!r} of the step function must be a number. Received: "
            f"{value!r}."
        ) from error


class Logs(dict[str, float]):
    """Loss and metrics of some steps, to combine with those of others."""

    def __init__(self, total: np.ndarray, step: Step) -> None:
        super().__init__(step.result(total))
        self._total, self._step = total, step

    def after(self, earlier: Logs | None) -> Logs:
        """Returns the logs of earlier steps and these, as if of one run."""
        if earlier is None:
            return self
        total = self._step.joined(earlier._total, self._total)
        return Logs(total, self._step)

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the model's metrics have these steps' states."""
        return self._step.shown(self._total)

    def resume_metrics(self) -> bool:
        """Continues metrics that are not sums; returns whether any exist."""
        return self._step.resume_metrics(self._total)


def metrics_from_states(total: Any, step: Step) -> Logs:
    """Returns loss and metrics of packed states (0.0: none); resets all."""
    if not isinstance(total, np.ndarray):
        total = step.pack(step.zero_states()).numpy()
    logs = Logs(total, step)
    step.reset()
    return logs

"""How steps run: in this process; on workers, see `coordinated_loop.py`.

All loops over a `ModelStep` trace the same dispatch: `steps_per_dispatch`
steps, unrolled in one `tf.function` (design decision D4). `run(num_steps)` runs
exactly that many; those that do not fill a dispatch run in dispatches of one.
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

from tfdist._tf.arguments import check_positive
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
    """What a session runs; a step adds 1 to `global_step`, a scalar int64."""

    # What the steps read from, if its position can be saved.
    iterator: tf.data.Iterator | None = None
    # Whether each worker reads a part of the data that nobody else ever reads.
    fixed_shares = False
    own_batches = False  # Whether other processes read other data.
    resizable = False  # Whether `resize` can be called.
    # They are 0 when it begins. None: it cannot `begin_again`.
    own_variables: list[tf.Variable] | None = None

    def __init__(self, global_step: tf.Variable) -> None:
        self._global_step = global_step
        self._input_secs = input_wait.InputSeconds()
        # Called, from any thread, when a call to a task has failed.
        self.on_failure: Watch = unwatched

    @property
    def step(self) -> int:
        """Steps applied in the job, as far as `run` has counted them."""
        return int(self._global_step.numpy())

    def run(
        self, num_steps: int, watch: Watch = unwatched, ahead: int = 0
    ) -> dict[str, float]:
        """Runs `num_steps` steps; returns their loss and metrics.

        `watch` is called at least every second while others work; it ends the
        wait for them by raising. So many steps `ahead` (default: none) may be
        under way on return, so that nobody waits for the slowest; the next run
        counts them.

        Raises:
            EndOfInput: the input ended before.
        """
        raise NotImplementedError

    def wait_for_steps(self, watch: Watch = unwatched) -> None:
        """Waits for the steps under way; `step` then counts them too."""

    def evaluate(
        self, batches: tf.data.Dataset, watch: Watch = unwatched
    ) -> dict[str, float]:
        """Loss and metrics of the current parameters; no step is under way.

        Every batch counts once; empty if there is none. A `ValueError` if the
        loop has no model that can be evaluated.
        """
        raise ValueError(
            "`evaluate` needs a session that trains a Keras model through a "
            "tfdist.training.loop.Loop; this one runs a plain step function."
        )

    def resize(self, cluster: Cluster) -> bool:
        """Goes on with the workers of `cluster`, all up; False: not now."""
        raise NotImplementedError

    def begin_again(self) -> None:
        """Goes on, once closed, with the same variables in new memory."""
        raise NotImplementedError

    def check_resize(self, num_processes: int) -> None:
        """Raises `ValueError` if so many would change the global batch."""

    def staleness(self) -> np.ndarray | None:
        """Updates so far by their staleness; None where there is none."""
        return None

    def input_secs(self) -> np.ndarray:
        """`[waited for data, all]`: seconds of steps since the last call."""
        return self._input_secs.take()

    def compiles(self) -> bool:
        """Whether a task has begun a function that has not yet run there.

        If a server is lost then, it may look for that server ever after.
        """
        return False

    def close(self) -> None:
        """Ends what the loop has started. It cannot run any more."""

    def has_ended(self) -> bool:
        """Whether another can begin, all tasks up; waits 10 s at most."""
        return True


def automatic_steps_per_dispatch(num_variables: int) -> int:
    """Steps per dispatch where the user did not choose.

    A dispatch costs the chief three milliseconds of CPU whatever is in it;
    tracing grows with its steps times the model's variables.

    >>> [automatic_steps_per_dispatch(n) for n in (1, 30, 100, 1000)]
    [10, 10, 5, 1]
    """
    return int(np.clip(500 // max(num_variables, 1), 1, 10))


def dispatch_size(model: keras.Model, wanted: int | None) -> tuple[int, bool]:
    """Steps per dispatch; whether the user chose them, here or in `compile`."""
    if wanted is None and model.steps_per_execution > 1:
        wanted = model.steps_per_execution
    if wanted is None:
        num_variables = len(model.trainable_variables)
        return automatic_steps_per_dispatch(num_variables), False
    check_positive("steps_per_dispatch", wanted)
    return wanted, True


def dispatch_sizes(num_steps: int, full: int, first_step: int = 0) -> list[int]:
    """Sizes of the dispatches that make up `num_steps` steps.

    Full ones begin at multiples of their size, as what happens every so many
    steps does.

    >>> dispatch_sizes(9, full=4, first_step=3)
    [1, 4, 4]
    """
    lead = min(-first_step % full, num_steps)
    whole, rest = divmod(num_steps - lead, full)
    return [1] * lead + [full] * whole + [1] * rest


def dispatch(
    steps: Callable[..., tf.Tensor], num_steps: int
) -> Callable[..., tf.Tensor]:
    """What is traced to run `num_steps` steps.

    It takes an iterator (or the batches), the first step's number, and what
    else `steps` takes (see `run_steps`). The packed metric states end with what
    `TimedIterator.seconds` tells.
    """

    def run(source: Iterable, first_step: tf.Tensor, *args: Any) -> tf.Tensor:
        timed = TimedIterator(iter(source), first_step)
        packed = steps(num_steps, timed, first_step, *args)
        return tf.concat([packed, timed.seconds(num_steps, packed)], 0)

    return run


def run_steps(
    step: Step,
    num_steps: int,
    iterator: tf.data.Iterator | TimedIterator,
    first_step: tf.Tensor,
    *args: Any,
) -> tf.Tensor:
    """Packed metric states of steps; `args` are those of `step.train`."""
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
    """As `run_steps`, on parameter servers, with fewer messages.

    What a step looks up travels with the gradients of the step before, or, as
    it is read so early, of `read_ahead` steps before that.
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
    """Steps of a model in this process, on the batches of `dataset` in order.

    `steps_per_dispatch` of them in one `tf.function` call: see `dispatch_size`.
    Where the user did not choose, they run one by one until that has taken as
    long as tracing more of them will: short jobs begin, and end, sooner.
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
                    # A first step takes as long as tracing one.
                    self._secs_alone = secs * self._full
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
            # A step of its own: metrics that are no sums go on in training's.
            step = ModelStep(self._step.model, batches.element_spec)
            evaluate = traced(step.evaluate, reduce_retracing=True)
            self._evaluation = step, evaluate
        step, evaluate = self._evaluation
        states = step.zero_states()
        for batch in batches:
            states = evaluate(batch, states)
        return metrics_from_states(step.pack(states).numpy(), step)

    def _sources(self, num_steps: int) -> Iterator[tuple[Iterable, int]]:
        """What each dispatch reads from, and its number of steps.

        Data that may end are read before: a dispatch would lose other steps.
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
        """Whether the data ended before so many steps, and raised nothing."""
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
        """Runs the function; returns what its last call did."""
        logs: Mapping[str, Any] = {}
        for _ in range(num_steps):
            logs = self._function() or {}
        if not isinstance(logs, Mapping):
            raise TypeError(
                "A step function must return its logs by name. Received: "
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
    """Loss and metrics of some steps, from which follow those of more."""

    def __init__(self, total: np.ndarray, step: Step) -> None:
        super().__init__(step.result(total))
        self._total, self._step = total, step

    def after(self, earlier: Logs | None) -> Logs:
        """Those of earlier steps and these together, as of one run."""
        if earlier is None:
            return self
        total = self._step.joined(earlier._total, self._total)
        return Logs(total, self._step)

    def shown(self) -> contextlib.AbstractContextManager[None]:
        """In it the model's metrics are those of these steps."""
        return self._step.shown(self._total)

    def go_on(self) -> bool:
        """Has metrics that do not add up go on; whether there are any."""
        return self._step.go_on(self._total)


def metrics_from_states(total: Any, step: Step) -> Logs:
    """Loss and metrics of summed packed states (0.0: none); all begin anew."""
    if not isinstance(total, np.ndarray):
        total = step.pack(step.zero_states()).numpy()
    logs = Logs(total, step)
    step.reset()
    return logs

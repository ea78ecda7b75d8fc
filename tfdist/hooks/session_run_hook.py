"""The hook interface: hooks are called around steps, at their own cadence.

One run may include many steps: the session runs as many as the hooks allow
before their next call (`steps_until_next`), so that cadences stay exact.

A hook written for TF1 that does not touch the graph runs unchanged:
`SessionRunArgs`, `SessionRunContext` and `SessionRunValues` are TensorFlow's
own. A fetched tensor becomes a name, which is looked up first in the logs of
the steps just run (`loss` and the metrics), then in `session.variables`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_at_least
from tfdist._tf.private_checkpoints import Saveable
from tfdist.checkpoint.checkpoints import Checkpoints

_log = logging.getLogger(__name__)

SessionRunArgs: TypeAlias = tf.compat.v1.train.SessionRunArgs
SessionRunContext: TypeAlias = tf.compat.v1.train.SessionRunContext
SessionRunValues: TypeAlias = tf.compat.v1.train.SessionRunValues
RunContext: TypeAlias = SessionRunContext
RunValues: TypeAlias = SessionRunValues
Hook: TypeAlias = tf.compat.v1.train.SessionRunHook
Logs: TypeAlias = Mapping[str, float]

_OF_A_GRAPH = (
    tf.compat.v1.train.CheckpointSaverHook,
    tf.compat.v1.train.FinalOpsHook,
    tf.compat.v1.train.GlobalStepWaiterHook,
    tf.compat.v1.train.LoggingTensorHook,
    tf.compat.v1.train.ProfilerHook,
    tf.compat.v1.train.StepCounterHook,
    tf.compat.v1.train.StopAtStepHook,
    tf.compat.v1.train.SummarySaverHook,
)


class Session(Protocol):
    """The parts of `MonitoredTrainingSession` that hooks may use."""

    hooks: Sequence[Hook]
    step: int
    is_chief: bool
    unsaved: bool
    restored_from: str | None
    secs_in_steps: float
    input_secs: Any
    global_step: tf.Variable
    variables: Mapping[str, Saveable]
    model: keras.Model | None
    staleness: np.ndarray | None
    should_stop: Callable[[], bool]
    request_stop: Callable[[], None]
    wait_for_steps: Callable[[], None]
    average_weights: Callable[[], None]
    tasks_alive: Callable[[], str]
    num_workers: int
    missing_workers: Callable[[float], list[str]]
    checkpoints: Callable[..., Checkpoints]
    agreed: Callable[[Callable[[], Any]], Any]
    checkpoint_dir: str | None
    evaluate: Callable[[tf.data.Dataset], dict[str, float]]


class SessionRunHook(tf.compat.v1.train.SessionRunHook):
    """Base class of all hooks; every method does nothing.

    As in TF1, the order of calls is: `begin()` once;
    `after_create_session(session, coord)` when the model is initialized or
    restored, and again after a recovery, with new variables;
    `before_run(run_context)` and `after_run(run_context, run_values)` around
    each run; `end(session)` unless training fails.

    If `before_run` returns None, `run_values.results` are the logs of the steps
    just run; if it returns `SessionRunArgs(fetches)`, they are `fetches` with
    each leaf replaced by its value. A `feed_dict` raises a `ValueError`.

    Attributes:
        wants_none_under_way: Whether no other step may be running on a worker
            after the steps that `steps_until_next` allowed. By default some
            are, so that workers need not wait for the slowest.
        single_steps: Whether each run must be a single step.
        sets_variables: Whether `end` may set saved variables: it is then called
            before the `end` of checkpoint savers.

    >>> class Losses(tfdist.SessionRunHook):
    ...     def after_run(self, run_context, run_values):
    ...         print(run_values.results["loss"])
    >>> hooks = [Losses(), tfdist.StopAtStepHook(last_step=2)]
    >>> with tfdist.MonitoredTrainingSession(build_fn, hooks=hooks) as session:
    ...     while not session.should_stop():
    ...         logs = session.run()
    1.0
    0.5
    """

    wants_none_under_way = single_steps = sets_variables = False

    def steps_until_next(self, step: int) -> int | None:
        """Returns the steps that may run before the next call; None: any.

        Default, as in TF1: 1 if `before_run` or `after_run` is overridden.
        `session.step` may be larger at that call if an earlier hook has saved a
        checkpoint, which waits for running steps to finish.
        """
        return 1 if wants_every_step(self) else None

    def on_preemption(self, session: Session) -> None:
        """Called on SIGTERM, with seconds left until the process ends."""


def wants_every_step(hook: Hook) -> bool:
    """Whether a hook acts at steps without overriding `steps_until_next`."""

    def has(name: str, base: type) -> bool:
        own = getattr(type(hook), name, None) or getattr(base, name)
        return name in vars(hook) or own is not getattr(base, name)

    acts = has("before_run", Hook) or has("after_run", Hook)
    return acts and not has("steps_until_next", SessionRunHook)


def warn_of_single_steps(who: str, advice: str) -> None:
    """Warns that `who` causes every step to be dispatched separately."""
    _log.warning(
        "%s is called after every step, which slows training down: each step "
        "is dispatched separately, and its metrics take milliseconds. %s",
        who,
        advice,
    )


class SecondOrStepTimer(tf.compat.v1.train.SecondOrStepTimer):
    """TensorFlow's own timer, extended by `steps_until_next`.

    It can be rewound after a restore, and measures time by a monotonic clock.

    >>> timer = SecondOrStepTimer(every_steps=3)
    >>> _ = timer.update_last_triggered_step(1)
    >>> timer.steps_until_next(2), timer.should_trigger_for_step(4)
    (2, True)

    Args:
        every_secs: Seconds between triggers.
        every_steps: Steps between triggers. Exactly one must be given, and
            positive (TF1 accepted 0 and always triggered).
    """

    def __init__(
        self, every_secs: float | None = None, every_steps: int | None = None
    ) -> None:
        check_exactly_one(every_secs=every_secs, every_steps=every_steps)
        super().__init__(every_secs=every_secs, every_steps=every_steps)
        self._secs, self._steps = every_secs, every_steps
        self._since = 0.0  # When it last triggered.

    def should_trigger_for_step(self, step: int) -> bool:
        """Whether the timer triggers at `step`, as in TF1."""
        last = self.last_triggered_step()
        if self._secs is None or last is None or last == step:
            return super().should_trigger_for_step(step)
        return time.monotonic() >= self._since + self._secs

    def update_last_triggered_step(
        self, step: int
    ) -> tuple[float | None, int | None]:
        """Records a trigger; returns seconds and steps since the last one."""
        secs, steps = super().update_last_triggered_step(step)
        before, self._since = self._since, time.monotonic()
        return (None if secs is None else self._since - before), steps

    def steps_until_next(self, step: int) -> int | None:
        """Returns the steps until the next trigger; None if it is timed."""
        last = self.last_triggered_step()
        if last is None:
            return 1  # The first call always triggers.
        if self._steps is None:
            return None
        return max(1, last + self._steps - step)

    def start(self, step: int) -> None:
        """Starts an interval, at the last multiple of `every_steps`.

        Triggers thus stay at multiples when a job resumes between two of them.
        """
        self.update_last_triggered_step(step - step % (self._steps or 1))

    def go_back_to(self, step: int) -> None:
        """Undoes the triggers after `step`, whose steps will run again.

        The next triggers are then those of a run without the interruption.
        """
        last = self.last_triggered_step()
        if last is not None and last > step:
            steps = self._steps or last - step
            undone = math.ceil((last - step) / steps)
            self.update_last_triggered_step(last - undone * steps)


def check_exactly_one(**arguments: float | None) -> None:
    """Raises `ValueError` unless exactly one argument is given and positive."""
    given = [value for value in arguments.values() if value is not None]
    numbers = [value for value in given if isinstance(value, Real)]
    if len(given) != 1 or any(number <= 0 for number in numbers):
        received = ", ".join(f"{k}={v}" for k, v in arguments.items())
        raise ValueError(
            f"Exactly one of `{'` and `'.join(arguments)}` must be given, "
            f"and it must be positive. Received: {received}."
        )
    for name, value in arguments.items():
        check_at_least(name, value, 0 if name.endswith("secs") else 1)


def check_hooks(hooks: Iterable[Any]) -> None:
    """Raises `TypeError` for TensorFlow's own hooks that need a graph."""
    for hook in hooks:
        if type(hook) in _OF_A_GRAPH:
            name = type(hook).__name__
            raise TypeError(
                f"TensorFlow's own {name} needs a graph, which tfdist does not "
                f"build. Use tfdist's {name}; tfdist/MIGRATION.md lists "
                "the differences, and hooks that have no equivalent."
            )


def begin_all(hooks: Sequence[Hook]) -> None:
    """Checks the hooks, also with `check_hooks`; then calls their `begin`."""
    check_hooks(hooks)
    for hook in hooks:
        if isinstance(hook, type) or not hasattr(hook, "begin"):
            raise TypeError(
                "Hooks must be tfdist.SessionRunHook objects. Received: "
                f"{hook!r}. Put a Keras callback into a KerasCallbackHook."
            )
    for hook in hooks:
        hook.begin()


class TimedHook(SessionRunHook):
    """Base class of hooks that act every N seconds or steps.

    Args:
        at_first_step: Whether the first step triggers, as in TF1. If not, the
            session's creation starts the first interval: the hook then acts at
            multiples of N, together with others, without shortening runs.
        **cadence: Seconds, then steps, between two calls of `on_trigger`, under
            the names of the hook's own arguments.
    """

    def __init__(self, at_first_step: bool = True, **cadence: Any) -> None:
        check_exactly_one(**cadence)
        self._timer = SecondOrStepTimer(*cadence.values())
        self._at_first_step = at_first_step
        self._secs: float | None = None  # Between the last two triggers.
        self._logs: Logs = {}  # The latest non-empty logs.

    def begin(self) -> None:
        """Forgets an earlier session."""
        self._timer.reset()

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Starts the first interval, or rewinds the timer after a recovery."""
        self._timer.go_back_to(session.step)
        begun = self._timer.last_triggered_step() is not None
        if not (self._at_first_step or begun):
            self._timer.start(session.step)

    def steps_until_next(self, step: int) -> int | None:
        """Steps until the timer triggers."""
        return self._timer.steps_until_next(step)

    def after_run(self, run_context: RunContext, run_values: RunValues) -> None:
        """Calls `on_trigger` when the timer triggers."""
        self._logs = run_values.results or self._logs
        step = run_context.session.step
        if self._timer.should_trigger_for_step(step):
            self._secs, _ = self._timer.update_last_triggered_step(step)
            self.on_trigger(run_context, run_values.results)

    def on_trigger(self, context: RunContext, logs: Logs) -> None:
        """Performs the hook's action; `logs` are of the steps just run."""
        raise NotImplementedError


class HookRunner:
    """Calls hooks around a run as in TF1; `before_run` when constructed."""

    def __init__(self, hooks: Iterable[Hook], session: Any) -> None:
        self.context = SessionRunContext(SessionRunArgs(None), session)
        self._asked = [(hook, hook.before_run(self.context)) for hook in hooks]
        for hook, args in self._asked:
            if args and args.feed_dict:
                raise ValueError(
                    f"{type(hook).__name__} feeds {[*args.feed_dict]}, but "
                    "there is no graph to feed. Instead, assign the values to "
                    "variables that the step reads."
                )

    def end(self, logs: Mapping[str, float]) -> None:
        """Calls `after_run` with each hook's fetches, or `logs` if none."""
        variables = self.context.session.variables
        for hook, _ in self._asked:
            if hasattr(hook, "note_logs"):  # Before another hook may fail.
                hook.note_logs(self.context.session, logs)
        for hook, args in self._asked:
            results = resolve(args.fetches, logs, variables) if args else logs
            hook.after_run(self.context, SessionRunValues(results, None, None))


def resolve(
    fetches: Any, logs: Mapping[str, float], variables: Mapping[str, Any]
) -> Any:
    """Returns `fetches` with each leaf replaced by its value.

    >>> resolve({"a": "loss", "b": ["step"]}, {"loss": 0.5},
    ...         {"step": tf.Variable(3)})
    {'a': 0.5, 'b': [np.int32(3)]}

    A name is looked up in `logs`, then in `variables`, and must be in one of
    them; a sharded variable is gathered.
    """

    def value(fetch: Any) -> Any:
        if fetch is None:
            return None
        if isinstance(fetch, str):
            if fetch in logs:
                return logs[fetch]
            if fetch not in variables:
                raise ValueError(
                    f"No log or variable is called {fetch!r}. "
                    f"Logs: {sorted(logs)}. Variables: {sorted(variables)}."
                )
            fetch = variables[fetch]
        elif isinstance(fetch, tf.Tensor):
            raise TypeError(
                f"A fetch must be a name or a variable. Received: {fetch!r}, "
                f"whose value never changes. Logs: {sorted(logs)}."
            )
        if getattr(fetch, "name", "") == "global_step:0":
            # Of `tf.compat.v1.train.get_global_step`, which nothing counts.
            fetch = variables.get("global_step", fetch)
        return tf.convert_to_tensor(fetch).numpy()

    return tf.nest.map_structure(value, fetches)


def steps_allowed(
    hooks: Iterable[Hook], step: int, most: int
) -> tuple[int, int]:
    """Returns the steps to run, and how many more may be running then."""
    until = 1 << 60  # The steps until no other step may be running.
    for hook in hooks:
        ask = getattr(hook, "steps_until_next", lambda step: None)
        wish = 1 if wants_every_step(hook) else ask(step)
        if wish is None:
            continue
        if wish < 1:
            raise ValueError(
                f"{type(hook).__name__}.steps_until_next must return None or "
                f"at least 1. Received: {wish} at step {step}."
            )
        most = min(most, 1 if getattr(hook, "single_steps", False) else wish)
        if getattr(hook, "wants_none_under_way", False):
            until = min(until, wish)
    return most, max(0, until - most)

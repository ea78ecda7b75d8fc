"""`MonitoredTrainingSession`: initialized or restored, with hooks, recovering.

    with tfdist.MonitoredTrainingSession(
        build_fn, checkpoint_dir=directory, hooks=[StopAtStepHook(last_step=100)]
    ) as session:
        while not session.should_stop():
            session.run()

What each failure costs (design decision D7). "Lost" are steps since the last
checkpoint, which are run again; on parameter servers which examples they see
is not repeated exactly. `global_step` counts applied updates and never passes
the step at which the hooks stop.

| what happens | what the session does | lost |
|---|---|---|
| a worker dies | the others go on at once; it is taken back when it is up | its dispatch at most |
| a worker freezes | after 15 s it is treated as dead; taken back when it wakes up | as above |
| a ps dies and comes back | everything is built anew and restored, in this process | steps since the checkpoint |
| a ps stays away | waits `max_wait_secs`, says so, then `TimeoutError` names it | |
| a ps freezes | after 15 s this process starts itself anew (same pid), waits, restores | steps since the checkpoint |
| the chief dies | started again, it restores; the servers free what it held after 60 s | steps since the checkpoint |
| the chief freezes | when it wakes up it goes on; after 60 s it builds anew and restores | steps since the checkpoint |
| a task is missing at the start | `TimeoutError` names it after `max_wait_secs` | |
| a second chief starts | `RuntimeError` in the second names who holds the job | |
| SIGTERM to the chief | checkpoint after the steps under way, exit code 143 | nothing |
| an error in user code | raised, once | steps since the checkpoint |
| the latest checkpoint is damaged | the one before is restored, with a warning | steps since that one |

What is recovered from: `tf.errors.AbortedError` and `UnavailableError`, as in
TF1, raised by a step or a hook, and any TensorFlow error while a parameter
server is found to be gone. Ten failures without a step in between are raised.

In one process a restored session goes on with the weights, the random seeds
and the batch of one that was never interrupted, if the loop's iterator can be
saved; a warning says where it cannot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import inspect
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import servers
from tfdist._private import COORDINATOR_ERRORS
from tfdist.checkpoint import Checkpoints, Saveable
from tfdist.cluster import Cluster
from tfdist.health import HealthMonitor, Loss, ServerLostError
from tfdist.hooks import NanTensorHook
from tfdist.loop import EndOfInput, Loop
from tfdist.saving_hooks import CheckpointSaverHook
from tfdist.strategy import parameter_server_strategy, placed_scope
from tfdist.summary_hooks import StepCounterHook, SummarySaverHook

_log = logging.getLogger(__name__)

Hook = tf.compat.v1.train.SessionRunHook

_CHUNK_SECS = 2.0
_MAX_FAILURES = 10
_MAX_REBUILDS = 3
USE_DEFAULT: Any = object()
"""An argument that was not given, where None means something."""


@dataclasses.dataclass(frozen=True)
class Trainable:
    """What `build_fn` makes, and can make again.

    Attributes:
        step: Runs one step, increments `global_step` and returns scalars by
            name (`{"loss": ...}`), or a `tfdist.loop.Loop` that runs many.
        global_step: Scalar int64 variable that counts applied steps.
        variables: Name to variable: what a checkpoint holds (see
            `tfdist.checkpoint.named_variables`). `global_step` is added.
        iterator: What `step` reads from, saved with each checkpoint. Default:
            that of the loop.
        model: The Keras model, for callbacks.
    """

    step: Callable[[], Mapping[str, Any]] | Loop
    global_step: tf.Variable
    variables: Mapping[str, Saveable]
    iterator: tf.data.Iterator | None = None
    model: keras.Model | None = None


class Remedy(enum.Enum):
    """What becomes of a session after an error."""

    RAISE = "the error is raised"
    REBUILD = "everything is made anew in this process"
    RESTART = "this process starts itself anew"


def remedy(error: BaseException, lost: Mapping[str, Loss]) -> Remedy:
    """Decides what an error means.

    >>> remedy(tf.errors.UnavailableError(None, None, "gone"), {}).name
    'REBUILD'
    >>> remedy(tf.errors.NotFoundError(None, None, "what"), {}).name
    'RAISE'

    Args:
        error: The error.
        lost: Parameter servers that are lost.
    """
    error = getattr(error, "original_exception", error)
    if not isinstance(error, tf.errors.OpError | ServerLostError):
        return Remedy.RAISE
    if Loss.FROZEN in lost.values():
        # Calls to it may hang for ever, in threads that nobody can end.
        return Remedy.RESTART
    recoverable = tf.errors.AbortedError | tf.errors.UnavailableError
    if lost or isinstance(error, recoverable):
        return Remedy.REBUILD
    if "context_id" in str(error):
        # The servers gave this chief up, for it was frozen or cut off.
        return Remedy.REBUILD
    return Remedy.RAISE


class MonitoredTrainingSession:
    """Runs steps with hooks; initializes, restores and recovers by itself.

    As `tf.compat.v1.train.MonitoredTrainingSession`; see the top of this module
    for what it does about failures. Beside `build_fn`, differences are:

    * `run()` takes no fetches. A `Trainable` whose `step` is a function runs
      it once, as in TF1; one with a loop runs as many steps as the hooks allow
      (at most about two seconds' worth).
    * What was restored is not saved again at once.
    * A session that is at its last step already runs no step.
    * Of the hooks, `NanTensorHook`s come first, so that no checkpoint holds
      what they found; else the order is TF1's.
    * An `EndOfInput` of the loop ends the session after the hooks have seen
      the last steps.
    * A loss of a server in `end` starts this process anew; TF1 lost the last
      checkpoint.
    * No `graph.pbtxt` and no `.meta` files are written.
    * Only the chief has a session; workers and ps call `servers.serve`.

    Args:
        build_fn: Returns a `Trainable`. Called without an argument inside the
            strategy's scope; if it has a parameter without a default, with the
            strategy, whose scope it then enters itself. Called again after a
            failure; it must make the same variables each time.
        is_chief: A session that is not the chief's runs only `hooks`, writes
            nothing, and waits for the chief's first checkpoint.
        checkpoint_dir: Of the checkpoints; None for none.
        hooks: Called after the session's own.
        chief_only_hooks: Called before them, on the chief.
        save_checkpoint_secs: Seconds between checkpoints. Default: 600, unless
            `save_checkpoint_steps` is given. None or 0 for both: none.
        save_checkpoint_steps: Steps between checkpoints.
        save_summaries_secs: Seconds between summaries.
        save_summaries_steps: Steps between summaries. Default: 100, unless
            `save_summaries_secs` is given.
        stop_grace_period_secs: Seconds that threads registered with the
            coordinator, which `after_create_session` is given, have to end.
        log_step_count_steps: Steps between measurements of steps per second;
            None for none.
        max_wait_secs: Seconds to wait for tasks that are missing, at the start
            and after a failure, and for the first checkpoint where this is not
            the chief.
        summary_dir: Of the summaries. Default: `checkpoint_dir`.
        max_to_keep: Most recent checkpoints kept; 0 or None keeps all.
        keep_checkpoint_every_n_hours: Also keeps one per so many hours.
        cluster: With parameter servers, of which this process is the chief.
            Default: `tf.distribute.get_strategy()` in this process.

    Attributes:
        step: Steps applied in the job so far.
        checkpoint_dir: As given.
        restored_from: Path of the checkpoint that was restored last, or None.
        secs_in_steps: Seconds spent in steps, without hooks.

    Raises:
        ValueError: both cadences of one kind; a checkpoint of other variables;
            a `build_fn` that makes other variables the second time.
        TimeoutError: a task, or the first checkpoint, was not there in time.
        RuntimeError: another chief holds the job.
    """

    def __init__(
        self,
        build_fn: Callable[..., Trainable],
        *,
        is_chief: bool = True,
        checkpoint_dir: str | None = None,
        hooks: Iterable[Hook] | None = None,
        chief_only_hooks: Iterable[Hook] | None = None,
        save_checkpoint_secs: float | None = USE_DEFAULT,
        save_checkpoint_steps: int | None = USE_DEFAULT,
        save_summaries_secs: float | None = USE_DEFAULT,
        save_summaries_steps: int | None = USE_DEFAULT,
        stop_grace_period_secs: float = 120,
        log_step_count_steps: int | None = 100,
        max_wait_secs: float = 7200,
        summary_dir: str | None = None,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        self.step = 0
        self.checkpoint_dir = checkpoint_dir
        self.restored_from: str | None = None
        self.secs_in_steps = 0.0
        self._build_fn = build_fn
        self._is_chief = is_chief
        self._cluster = cluster if cluster and cluster.num_ps else None
        self._max_wait_secs = max_wait_secs
        self._grace_secs = stop_grace_period_secs
        self._stop = False
        self._closed = False
        self._steps_per_sec = 0.0
        self._trainable: Trainable | None = None
        self._loop: Loop | None = None
        self._health: HealthMonitor | None = None
        self._made: dict[str, tuple] | None = None
        self._failures = _Failures()
        self._coord = tf.train.Coordinator(
            clean_stop_exception_types=(
                tf.errors.OutOfRangeError,
                StopIteration,
            )
        )
        own: list[Hook] = []
        if is_chief:
            own = [*(chief_only_hooks or ())]
            own += _default_hooks(
                checkpoint_dir,
                summary_dir or checkpoint_dir,
                _cadence(
                    save_checkpoint_secs, save_checkpoint_steps, 600, None
                ),
                _cadence(save_summaries_secs, save_summaries_steps, None, 100),
                log_step_count_steps,
                max_to_keep,
                keep_checkpoint_every_n_hours,
            )
        self.hooks: list[Hook] = sorted(
            [*own, *(hooks or ())],
            key=lambda hook: not isinstance(hook, NanTensorHook),
        )
        for hook in self.hooks:
            hook.begin()
        if self._cluster:
            servers.refuse_second_chief(self._cluster)
        self._sigterm = _Sigterm(enabled=is_chief)
        try:
            self._recovering(lambda: None)
        except BaseException:
            self._release()
            raise

    # --- For the user --------------------------------------------------------

    def __enter__(self) -> MonitoredTrainingSession:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        clean = exc_type is None or issubclass(
            exc_type, tf.errors.OutOfRangeError | StopIteration
        )
        if clean:
            self.close()
        elif not self._closed:
            self._release()
        return clean and exc_type is not None

    def should_stop(self) -> bool:
        """Whether a hook, a thread or the end of the input asked to stop."""
        return self._stop or self._closed or self._coord.should_stop()

    def request_stop(self) -> None:
        """Ends training after the hooks have seen the current steps."""
        self._stop = True

    def run(self) -> dict[str, float]:
        """Runs a step, or as many as the hooks allow; returns loss and metrics.

        Raises:
            RuntimeError: called although `should_stop()` is true.
        """
        if self.should_stop():
            raise RuntimeError(
                "`run` was called after the session was told to stop. Ask "
                "`should_stop()` before each `run()`."
            )
        return self._recovering(self._run)

    def close(self) -> None:
        """Ends cleanly: the last checkpoint is written.

        Raises:
            RuntimeError: the session is closed already.
        """
        if self._closed:
            raise RuntimeError("The session is closed already.")
        try:
            for hook in self.hooks:
                hook.end(self)
            self._coord.request_stop()
            self._coord.join(stop_grace_period_secs=self._grace_secs)
        except tf.errors.OpError as error:
            if self._cluster and self._health.look():
                self._restart_process(str(error))
            raise
        finally:
            self._release()

    # --- For hooks -----------------------------------------------------------

    @property
    def global_step(self) -> tf.Variable:
        """The step counter."""
        return self._trainable.global_step

    @property
    def variables(self) -> dict[str, Saveable]:
        """What a checkpoint holds, by name."""
        return {
            **self._trainable.variables,
            "global_step": self._trainable.global_step,
        }

    @property
    def model(self) -> keras.Model | None:
        """The Keras model, if `build_fn` names it."""
        return self._trainable.model

    @property
    def staleness(self) -> np.ndarray | None:
        """Updates by their staleness; None where there is none."""
        return self._loop.staleness()

    def tasks_alive(self) -> str:
        """As "2/2 ps, 3/3 workers"; empty without a cluster."""
        return self._health.alive() if self._health else ""

    def checkpoints(
        self,
        directory: str,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
    ) -> Checkpoints:
        """The checkpoints of this session's state in `directory`."""
        iterator = self._trainable.iterator or self._loop.iterator
        return Checkpoints(
            directory,
            self.variables,
            max_to_keep,
            keep_checkpoint_every_n_hours,
            iterator=iterator,
        )

    # --- One run -------------------------------------------------------------

    def _run(self) -> dict[str, float]:
        """One round of hooks and steps."""
        contexts = []
        for hook in self.hooks:
            context = tf.compat.v1.train.SessionRunContext(
                tf.compat.v1.train.SessionRunArgs(None), self
            )
            contexts.append((hook, context, hook.before_run(context)))
        logs = self._run_steps()
        for hook, context, args in contexts:
            results = self._fetch(args.fetches, logs) if args else logs
            hook.after_run(
                context,
                tf.compat.v1.train.SessionRunValues(results, None, None),
            )
        if any(context.stop_requested for _, context, _ in contexts):
            self.request_stop()
        self._failures.reset()
        self._end_if_terminated()
        return logs

    def _run_steps(self) -> dict[str, float]:
        start, first_step = time.monotonic(), self.step
        try:
            logs = self._loop.run(self._num_steps(), self._watch)
        except EndOfInput as end:
            self.request_stop()
            logs = end.logs
        self.step = int(self.global_step.numpy())
        secs = time.monotonic() - start
        self.secs_in_steps += secs
        if self._stop:
            _log.info("The training input ended at step %d.", self.step)
        self._steps_per_sec = (self.step - first_step) / max(secs, 1e-9)
        return logs

    def _num_steps(self) -> int:
        """As many as every hook allows, and about two seconds' worth."""
        if isinstance(self._loop, _FunctionLoop):
            return 1
        wishes = [max(100, int(self._steps_per_sec * _CHUNK_SECS))]
        for hook in self.hooks:
            ask = getattr(hook, "steps_until_next", lambda step: None)
            wishes.append(ask(self.step))
        return min(wish for wish in wishes if wish is not None)

    def _watch(self) -> None:
        """What is looked at while others work."""
        if self._health:
            self._health.check()
        self._sigterm.give_up_waiting()

    def _fetch(self, fetches: Any, logs: Mapping[str, float]) -> Any:
        """Values of what a hook's `before_run` asked for."""

        def value(fetch: Any) -> Any:
            if isinstance(fetch, str):
                if fetch in logs:
                    return logs[fetch]
                if fetch not in self.variables:
                    raise ValueError(
                        f"A hook fetches {fetch!r}, which is neither among "
                        f"the logs {sorted(logs)} nor a variable."
                    )
                fetch = self.variables[fetch]
            return tf.convert_to_tensor(fetch).numpy()

        return tf.nest.map_structure(value, fetches)

    def _end_if_terminated(self) -> None:
        """After SIGTERM: saves, and leaves with a code that is retried."""
        if not self._sigterm.received:
            return
        for hook in self.hooks:
            save = getattr(hook, "on_preemption", lambda session: None)
            save(self)
        _log.warning(
            "Told to end (SIGTERM): stopped at step %d, exit code %d asks "
            "to be started again.",
            self.step,
            servers.TERMINATED,
        )
        raise SystemExit(servers.TERMINATED)

    # --- Recovery ------------------------------------------------------------

    def _recovering(self, action: Callable[[], Any]) -> Any:
        """Runs `action`; after a failure makes everything anew and runs again."""
        while True:
            try:
                if self._trainable is None:
                    self._create()
                return action()
            except (
                tf.errors.OpError,
                ServerLostError,
                *COORDINATOR_ERRORS,
            ) as error:
                self._prepare_to_create(error)

    def _prepare_to_create(self, error: Exception) -> None:
        """Drops what is lost; raises where there is no remedy."""
        lost = dict(getattr(error, "lost", {}))
        if self._health:
            lost |= self._health.look()
        what = remedy(error, lost)
        reason = str(ServerLostError(lost)) if lost else _first_line(error)
        if what is Remedy.RAISE or self._failures.count >= _MAX_FAILURES:
            raise error
        if self._sigterm.received:
            _log.warning("Told to end (SIGTERM), and %s.", reason)
            raise SystemExit(servers.TERMINATED) from error
        self._failures.add()
        if self._cluster and self._failures.count > _MAX_REBUILDS:
            what = Remedy.RESTART
        _log.warning(
            "Step %d: %s; the session goes on from its last checkpoint.",
            self.step,
            reason,
        )
        if what is Remedy.RESTART and self._cluster:
            self._restart_process(reason)
        self._drop()

    def _create(self) -> None:
        """Connects, builds, initializes or restores, and tells the hooks."""
        timer = _Timer()
        # Whatever held the functions of before, an error's traceback say, is
        # gone by now: they must not be sent to the servers again.
        gc.collect()
        strategy = tf.distribute.get_strategy()
        if self._cluster:
            servers.wait_until_up(
                self._cluster, self._max_wait_secs, self._sigterm.give_up
            )
            timer.lap("waited for tasks")
            strategy = parameter_server_strategy(
                self._cluster, start_timeout_secs=self._max_wait_secs
            )
            self._health = HealthMonitor(
                self._cluster,
                on_stuck=lambda error: self._restart_process(str(error)),
            )
            timer.lap("connected")
        trainable = self._build(strategy)
        self._check_same_variables(trainable)
        loop = trainable.step
        if not hasattr(loop, "run"):
            loop = _FunctionLoop(loop)
        self._loop, self._trainable = loop, trainable
        timer.lap("built")
        if self.checkpoint_dir:
            self._restore()
            timer.lap("restored")
        self.step = int(self.global_step.numpy())
        for hook in self.hooks:
            hook.after_create_session(self, self._coord)
        if self._failures.secs_since_first() is not None:
            _log.warning(
                "Recovered at step %d, %.1f s after the failure: %s.",
                self.step,
                self._failures.secs_since_first(),
                timer,
            )

    def _build(self, strategy: tf.distribute.Strategy) -> Trainable:
        parameters = inspect.signature(self._build_fn).parameters.values()
        if any(p.default is p.empty for p in parameters):
            trainable = self._build_fn(strategy)
        else:
            num_ps = self._cluster.num_ps if self._cluster else 0
            with placed_scope(strategy, num_ps=num_ps):
                trainable = self._build_fn()
        if not isinstance(trainable, Trainable):
            raise TypeError(
                "Argument `build_fn` must return a tfdist.Trainable. Received: "
                f"{trainable!r}."
            )
        return trainable

    def _check_same_variables(self, trainable: Trainable) -> None:
        made = {
            name: (tuple(v.shape), v.dtype)
            for name, v in trainable.variables.items()
        }
        if self._made is not None and made != self._made:
            raise ValueError(
                "`build_fn` must make the same variables each time it is "
                "called. They differ:\n" + _differences(self._made, made)
            )
        self._made = made

    def _restore(self) -> None:
        checkpoints = self.checkpoints(self.checkpoint_dir)
        if not self._is_chief:
            deadline = time.monotonic() + self._max_wait_secs
            while not checkpoints.refresh():
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"The chief wrote no checkpoint to "
                        f"{self.checkpoint_dir!r} within "
                        f"{self._max_wait_secs:g} s."
                    )
                time.sleep(min(1.0, self._max_wait_secs / 10))
        self.restored_from = checkpoints.restore()

    def _drop(self) -> None:
        """Lets go of everything that may hold what was lost."""
        if self._health:
            self._health.stop()
        if self._loop:
            self._loop.close()
        self._trainable = self._loop = self._health = None

    def _release(self) -> None:
        self._closed = True
        self._sigterm.restore()
        if self._health:
            self._health.stop()
        if self._loop:
            self._loop.close()

    def _restart_process(self, reason: str) -> None:
        """Replaces this process by a fresh one: same command, pid and port."""
        if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
            raise RuntimeError(
                f"{reason}. An interactive process cannot start itself anew: "
                "restart it, and training goes on from the last checkpoint."
            )
        _log.warning("%s: this process starts itself anew.", reason)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ["GRPC_FAIL_FAST"] = "use_caller"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class _FunctionLoop:
    """A user's step function as a loop."""

    iterator = None

    def __init__(self, step: Callable[[], Mapping[str, Any]]) -> None:
        self._step = step

    def run(
        self, num_steps: int, watch: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Runs the function; returns what its last call did."""
        logs: Mapping[str, Any] = {}
        for _ in range(num_steps):
            logs = self._step() or {}
        return {name: float(value) for name, value in logs.items()}

    def staleness(self) -> None:
        """Not known."""

    def close(self) -> None:
        """Nothing to end."""


class _Sigterm:
    """Whether this process was told to end.

    Args:
        enabled: Whether to listen; only the main thread can.
    """

    # How long the steps under way may take after the signal.
    _PATIENCE_SECS = 20.0

    def __init__(self, enabled: bool) -> None:
        self.received = False
        self._at = 0.0
        main = threading.current_thread() is threading.main_thread()
        self._enabled = enabled and main
        if self._enabled:
            self._before = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, *_: object) -> None:
        self.received, self._at = True, time.monotonic()

    def give_up(self) -> None:
        """Leaves at once, if told so: there is nothing to save."""
        if self.received:
            raise SystemExit(servers.TERMINATED)

    def give_up_waiting(self) -> None:
        """Leaves when the steps under way take too long to wait for."""
        if time.monotonic() - self._at > self._PATIENCE_SECS:
            self.give_up()

    def restore(self) -> None:
        """Puts the handler of before back."""
        if self._enabled:
            signal.signal(signal.SIGTERM, self._before)
            self._enabled = False


class _Failures:
    """How many failures there were since the last successful run."""

    def __init__(self) -> None:
        self.count = 0
        self._first = 0.0

    def add(self) -> None:
        """Counts one."""
        self._first = self._first if self.count else time.monotonic()
        self.count += 1

    def reset(self) -> None:
        """A run succeeded."""
        self.count = 0

    def secs_since_first(self) -> float | None:
        """Seconds since the first of them; None when there was none."""
        return time.monotonic() - self._first if self.count else None


class _Timer:
    """Where the time of a recovery went."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._laps: list[str] = []

    def lap(self, name: str) -> None:
        """Ends a part."""
        now = time.monotonic()
        self._laps.append(f"{name} in {now - self._last:.1f} s")
        self._last = now

    def __str__(self) -> str:
        return ", ".join(self._laps)


def _cadence(
    secs: Any, steps: Any, default_secs: float | None, default_steps: int | None
) -> dict[str, Any]:
    """Seconds and steps between two of something; giving one drops the other."""
    if secs is USE_DEFAULT and steps is USE_DEFAULT:
        secs, steps = default_secs, default_steps
    return {
        "save_secs": None if secs is USE_DEFAULT else secs or None,
        "save_steps": None if steps is USE_DEFAULT else steps or None,
    }


def _default_hooks(
    checkpoint_dir: str | None,
    summary_dir: str | None,
    checkpoints: Mapping[str, Any],
    summaries: Mapping[str, Any],
    log_step_count_steps: int | None,
    max_to_keep: int | None,
    keep_checkpoint_every_n_hours: float | None,
) -> list[Hook]:
    """The chief's own hooks, in TF1's order."""
    hooks: list[Hook] = []
    if summary_dir and log_step_count_steps:
        hooks.append(
            StepCounterHook(
                every_n_steps=log_step_count_steps, output_dir=summary_dir
            )
        )
    if summary_dir and any(summaries.values()):
        hooks.append(SummarySaverHook(**summaries, output_dir=summary_dir))
    if checkpoint_dir and any(checkpoints.values()):
        hooks.append(
            CheckpointSaverHook(
                checkpoint_dir,
                **checkpoints,
                max_to_keep=max_to_keep,
                keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
            )
        )
    return hooks


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return "\n".join(
        f"  {name}: {before.get(name, 'missing')}, then "
        f"{after.get(name, 'missing')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

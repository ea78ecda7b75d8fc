"""`MonitoredTrainingSession`: initialized or restored, with hooks, recovering.

    with tfdist.MonitoredTrainingSession(
        build_fn, checkpoint_dir=directory, hooks=[StopAtStepHook(last_step=99)]
    ) as session:
        while not session.should_stop():
            session.run()

What each failure costs (design decision D7):

A worker dies: the others go on at once. It costs its dispatch, whose steps are
  made up for. It is taken back when it is up again, and begins with another
  pass over its data; meanwhile tfdist's readers let the others read all. Where
  an input function has shards of its own, a warning tells what nobody reads.
A worker loses its connection to a ps: as if it had died, but at once.
A worker freezes: after 15 s it is treated as dead, and taken back when it wakes
  up. What it then still sends is refused.
A parameter server (ps) dies and comes back: everything is built anew in this
  process and restored. It costs the steps since the last checkpoint. Where
  that fails, this process starts itself anew (same pid, same command).
A ps stays away: the session waits `max_wait_secs`, says so every ten seconds,
  then raises a `TimeoutError` that names it.
A ps freezes: after 15 s this process starts itself anew, waits as above and
  restores.
The chief dies: when it is started again it restores. The servers free what the
  dead one held after 60 s.
The chief freezes: when it wakes up it goes on; if the servers have given it up
  meanwhile (after 60 s at the earliest), it builds anew and restores.
A task is missing at the start: `TimeoutError`, as for a ps that stays away.
A second chief starts: `RuntimeError` there, which names who holds the job.
SIGTERM to the chief: a checkpoint as soon as the steps under way are done (20 s
  at most), exit code 143, which schedulers take as a reason to start it again.
  Workers and ps that are told so too serve on until then. It costs nothing.
An error in user code: raised, once. The last checkpoint stays.
The newest checkpoint is damaged: the one before is restored, with a warning.

In an all-reduce job (a cluster without ps) every process trains, and none can
go on without the others:

A process dies, freezes or is cut off: the others know in ten seconds or so
  (TensorFlow's heartbeat), start themselves anew and wait for it,
  `max_wait_secs` at most; each says who is missing, and the limit ends it with
  exit code 1. Then all go on from the last checkpoint. It costs the steps since
  that one, and the start; nothing in exactness: the weights, random numbers and
  batches are those of a job that nobody disturbed.
SIGTERM: as above on the process that leads (the chief, else worker 0). Another
  one goes on for 20 s at most, since the whole job may be told so.
An error in user code: raised where it happened; the others wait for that
  process to be started again.
Processes with different programs (variables, batches, number of devices): a
  `ValueError` in each, before the first step, that names the difference.

Steps that were lost are run again; on parameter servers with other examples.
`global_step` counts applied updates and never passes the step at which a hook
stops training. While a ps is waited for, so are workers that are missing.

What is recovered from: `tf.errors.AbortedError` and `UnavailableError`, as in
TF1, raised by a step or a hook, and any TensorFlow error while a parameter
server is found to be gone. Ten failures without a step in between are raised,
and so is what a hook raises for the third time at one step, with every server
alive: that is the user's own error. (TF1 went on for ever.)

In one process a restored session goes on with the weights, the random seeds
and the batch of one that was never interrupted, if the loop's iterator can be
saved; a warning says where it cannot.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.errors import summarize_error
from tfdist._tf.private import Saveable
from tfdist.checkpoint import checkpoints
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.cluster import probing, servers
from tfdist.cluster.health import HealthMonitor, ServerLostError
from tfdist.cluster.peers import Peers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import (
    check_is_chief,
    multi_worker_strategy,
    parameter_server_strategy,
)
from tfdist.data.input_fns import takes_argument
from tfdist.hooks import default_hooks
from tfdist.hooks.basic import HookRunner, NanTensorHook
from tfdist.hooks.default_hooks import USE_DEFAULT, Hook
from tfdist.hooks.session_run_hook import wants_every_step
from tfdist.placement.scope import placed_scope
from tfdist.session import recovery
from tfdist.session.recovery import RecoveryAction
from tfdist.training.loop import EndOfInput, FunctionLoop, Loop

_log = logging.getLogger(__name__)

_CHUNK_SECS = 2.0
_MANY = 1 << 60


@dataclasses.dataclass(frozen=True)
class Trainable:
    """What `build_fn` makes, and can make again.

    Attributes:
        step: Runs one step, increments `global_step` and returns scalars by
            name (`{"loss": ...}`), or a `tfdist.training.loop.Loop` that runs
            many.
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


class MonitoredTrainingSession:
    """Runs steps with hooks; initializes, restores and recovers by itself.

    As `tf.compat.v1.train.MonitoredTrainingSession`; see the top of this module
    for what it does about failures. Beside `build_fn`, differences are:

    * `run()` takes no fetches. A `Trainable` whose `step` is a function runs
      it once, as in TF1; one with a loop runs as many steps as the hooks allow
      (at most about two seconds' worth).
    * What was restored is not saved again at once.
    * A session that is at its last step already runs no step.
    * A hook is called after every step unless its `steps_until_next` says
      otherwise; a warning names the one for whose sake steps run one by one.
    * Of the hooks, `NanTensorHook`s come first, so that no checkpoint holds
      what they found; else the order is TF1's.
    * An `EndOfInput` of the loop ends the session after the hooks have seen
      the last steps.
    * A loss of a server in `end` starts this process anew; TF1 lost the last
      checkpoint.
    * No `graph.pbtxt` and no `.meta` files are written.
    * On parameter servers only the chief has a session; workers and ps call
      `servers.serve`. For all-reduce each process has one, runs its `hooks` at
      the same steps, and stops when the leader's hooks say so: a hook that
      writes files must ask `session.is_chief`.

    Args:
        build_fn: Returns a `Trainable`. Called without an argument inside the
            strategy's scope; if it has one argument without a default, with the
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
        check_numerics: Whether, before a checkpoint is written, each server
            looks whether its variables are finite; if not, training ends with
            a `NanLossDuringTrainingError` that names them.
        cluster: With parameter servers, of which this process is the chief;
            or without any, for all-reduce: then each task has a session, and
            `is_chief` is what the cluster says.
        strategy: Where there is no cluster. Default:
            `tf.distribute.get_strategy()`.

    Attributes:
        is_chief: Whether this process saves and leads.
        step: Steps applied in the job so far.
        checkpoint_dir: As given.
        restored_from: Path of the checkpoint that was restored last, or None.
        input_restored: Whether the input then went on where it was saved.
        input_ended: Whether it came to its end.
        secs_in_steps: Seconds spent in steps, without hooks.
        input_secs: `[waited for data, all]`: seconds of steps, of all workers
            together; zeros around a step function.

    Raises:
        ValueError: both cadences of one kind; a checkpoint of other variables;
            a `build_fn` that makes other variables the second time, or has
            arguments that nobody gives; a worker, ps or evaluator of a cluster
            with ps.
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
        check_numerics: bool = True,
        cluster: Cluster | None = None,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        several = cluster is not None and cluster.is_distributed
        self._cluster = cluster if several and cluster.num_ps else None
        self._all_reduce = cluster if several and not cluster.num_ps else None
        if self._cluster:
            check_is_chief(self._cluster)
        if self._all_reduce:
            is_chief = cluster.is_chief
        if checkpoint_dir:
            storage.check_no_pattern(checkpoint_dir)
        self.step = 0
        self.checkpoint_dir = checkpoint_dir
        self.restored_from: str | None = None
        self.input_restored = self.input_ended = False
        self.secs_in_steps = 0.0
        self.input_secs = np.zeros(2)
        self._build_fn = build_fn
        self._takes_strategy = takes_argument(
            build_fn, "build_fn", "the strategy"
        )
        self.is_chief = is_chief
        self._strategy = strategy
        self._peers: Peers | None = None
        self._check_numerics = check_numerics
        self._max_wait_secs = max_wait_secs
        self._grace_secs = stop_grace_period_secs
        self._stop = False
        self._closed = False
        self._steps_per_sec = 0.0
        self._trainable: Trainable | None = None
        self._loop: Loop | None = None
        self._ending: Loop | None = None
        self._health: HealthMonitor | None = None
        self._made: dict[str, tuple] | None = None
        self._failures = recovery.Failures()
        self._coord = tf.train.Coordinator(
            clean_stop_exception_types=(
                tf.errors.OutOfRangeError,
                StopIteration,
            )
        )
        own: list[Hook] = []
        if is_chief:
            own = [*(chief_only_hooks or ())]
            own += default_hooks.default_hooks(
                checkpoint_dir,
                summary_dir or checkpoint_dir,
                default_hooks.cadence(
                    save_checkpoint_secs, save_checkpoint_steps, 600, None
                ),
                default_hooks.cadence(
                    save_summaries_secs, save_summaries_steps, None, 100
                ),
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
        self._sigterm = recovery.Sigterm(
            enabled=is_chief or self._all_reduce is not None
        )
        try:
            self._recovering(lambda: None)
        except BaseException:
            self._release()
            raise
        by_steps = isinstance(self._loop, FunctionLoop)
        if not (self._follows or by_steps or self._stop):
            self._say_who_wants_every_step()

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
            self.input_ended |= exc_type is not None
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
            self.wait_for_steps()
            for hook in self.hooks:
                hook.end(self)
            self._coord.request_stop()
            self._coord.join(stop_grace_period_secs=self._grace_secs)
            if self._peers:
                self._part()
        except tf.errors.OpError as error:
            if self._cluster and self._health.look():
                recovery.restart_process(str(error))
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

    def wait_for_steps(self) -> None:
        """Waits for the steps that are under way; `step` then counts them."""
        self._loop.wait_for_steps(self._watch)
        self.step = self._loop.step

    def evaluate(self, batches: tf.data.Dataset) -> dict[str, float]:
        """Loss and metrics of the current parameters, by a cluster's workers.

        Exact, whatever worker dies. No step may be under way
        (`wait_for_steps`), as is so when a checkpoint is saved. Empty if there
        is no batch.
        """
        return self._loop.evaluate(batches, self._watch)

    def tasks_alive(self) -> str:
        """As "2/2 ps, 3/3 workers"; empty without a cluster."""
        return self._health.alive() if self._health else ""

    def missing_workers(self, secs: float) -> list[str]:
        """Workers gone for so long whose share of the data nobody reads."""
        if not (self._health and self._loop.fixed_shares):
            return []
        return self._health.missing("worker", secs)

    def checkpoints(
        self,
        directory: str,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
    ) -> Checkpoints:
        """The checkpoints of this session's state in `directory`."""
        return Checkpoints(
            directory,
            self.variables,
            max_to_keep,
            keep_checkpoint_every_n_hours,
            iterator_fn=self._iterator,
            before_save=self._save_positions,
            check_numerics=self._check_numerics,
        )

    def _iterator(self) -> tf.data.Iterator | None:
        """What the steps read from, unless a later job shall start anew."""
        if self.input_ended:
            return None
        return self._trainable.iterator or self._loop.iterator

    # --- One run -------------------------------------------------------------

    def _run(self) -> dict[str, float]:
        """One round of hooks and steps."""
        told = None
        if self._follows:
            told = self._follow()
            if told is None:
                self.request_stop()
                return {}
        with recovery.in_hooks():
            around = HookRunner(self.hooks, self)
        first_step = self._loop.step
        logs = self._run_steps(first_step, told)
        if self.step > first_step or not self.input_ended:
            with recovery.in_hooks():
                around.end(logs)
        self._failures.report(self.step)
        if self._follows:
            return logs  # What comes now is for the leader to say.
        if around.stop_requested or self.input_ended:
            self.request_stop()
        if self._sigterm.received:
            self.wait_for_steps()
            for hook in self.hooks:
                if hasattr(hook, "on_preemption"):
                    hook.on_preemption(self)
            self._sigterm.leave()
        return logs

    def _run_steps(self, first_step: int, told: int | None) -> dict[str, float]:
        start = time.monotonic()
        try:
            num_steps, ahead = told, 0
            if told is None:
                num_steps, ahead = self._num_steps(first_step)
                if self._peers:
                    self._peers.tell(run=num_steps)
            logs = self._loop.run(num_steps, self._watch, ahead)
        except EndOfInput as end:
            self.input_ended = True
            logs = end.logs
        self.step = self._loop.step
        secs = time.monotonic() - start
        self.secs_in_steps += secs
        self.input_secs = self.input_secs + self._loop.input_secs()
        if self.input_ended:
            _log.info("The training input ended at step %d.", self.step)
        self._steps_per_sec = (self.step - first_step) / max(secs, 1e-9)
        return logs

    def _num_steps(self, step: int) -> tuple[int, int]:
        """Steps to run, and how many more may be under way then.

        As many as every hook allows, and about two seconds' worth.
        """
        if isinstance(self._loop, FunctionLoop):
            return 1, 0
        soon = max(100, int(self._steps_per_sec * _CHUNK_SECS))
        if self._cluster and not self._steps_per_sec:
            soon = 1  # The first step tells that all is well.
        until = _MANY
        for hook in self.hooks:
            ask = getattr(hook, "steps_until_next", lambda step: None)
            wish = 1 if wants_every_step(hook) else ask(step)
            if wish is None:
                continue
            if wish < 1:
                raise ValueError(
                    f"{type(hook).__name__}.steps_until_next must return None "
                    f"or at least 1. Received: {wish} at step {step}."
                )
            soon = min(soon, wish)
            if getattr(hook, "wants_none_under_way", False):
                until = min(until, wish)
        return soon, max(0, until - soon)

    def _say_who_wants_every_step(self) -> None:
        """Names the hooks for whose sake no two steps run in one go."""
        for kind in {type(h) for h in self.hooks if wants_every_step(h)}:
            _log.warning(
                "%s is called after every step: no two run in one go, and the "
                "metrics of each cost milliseconds. Give it a method "
                "`steps_until_next(step)` that returns how many may run before "
                "the next call (None: any number), if it allows more.",
                kind.__name__,
            )

    def _watch(self) -> None:
        """What is looked at while others work."""
        if self._health:
            self._health.check()
        self._sigterm.leave_when_late()

    # --- With others, in all-reduce ------------------------------------------

    @property
    def _follows(self) -> bool:
        """Whether another process says what comes next."""
        return self._all_reduce is not None and not self.is_chief

    def _follow(self) -> int | None:
        """How many steps the leader runs now; None: no more."""
        while True:
            command = self._peers.next(self._watch)
            if "run" in command:
                return command["run"]
            if "save" not in command:
                return None
            position = self.checkpoints(self._own_directory)
            position.save_position(command["save"])
            self._peers.announce(f"saved/{command['save']}")

    def _save_positions(self, step: int) -> None:
        """Has the others save where they are in data of their own."""
        if self._peers and self._loop.own_batches:
            self._peers.tell(save=step)
            self._peers.wait_for_others(f"saved/{step}", self._watch)

    @property
    def _own_directory(self) -> str:
        """Where a process that is not the leader keeps its input's position."""
        name = self._peers.name.replace(":", "-")
        return os.path.join(self.checkpoint_dir, "inputs", name)

    def _part(self) -> None:
        """Ends together: the leader's process keeps what all others read."""
        try:
            if self._follows:
                self._peers.announce("end")
            else:
                self._peers.tell(end=True)
                self._peers.wait_for_others("end", self._watch)
        except tf.errors.OpError as error:
            # All is done; whoever is started again will find that out.
            _log.warning(
                "Another process went before the end: %s",
                summarize_error(error),
            )

    def _restore_as_told(self) -> None:
        """Restores what the leader has restored."""
        path = self._peers.next(self._watch)["restored"]
        if path is None:
            return
        checkpoints = self.checkpoints(self.checkpoint_dir)
        if self._loop.own_batches:
            own = os.path.join(self._own_directory, os.path.basename(path))
            checkpoints.restore_from(path, position=own)
        else:
            checkpoints.restore_from(path, position=path)
        self.restored_from = path
        self.input_restored = checkpoints.position_restored

    # --- Recovery ------------------------------------------------------------

    def _recovering(self, action: Callable[[], Any]) -> Any:
        """Runs `action`; after a failure makes everything anew first."""
        while True:
            try:
                if self._trainable is None:
                    self._create()
                return action()
            except recovery.FAILURES as error:
                self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Lets go of everything that may hold what was lost.

        Raises:
            Exception: `error`, if there is no remedy.
        """
        lost = dict(getattr(error, "lost", {}))
        if self._health:
            lost |= self._health.look()
        remedy = recovery.remedy(
            error, lost, self._failures.count, in_sync=bool(self._all_reduce)
        )
        users = not lost and self._failures.is_the_users(error, self.step)
        if remedy is RecoveryAction.RAISE or users:
            raise error
        self._sigterm.leave()
        self._failures.add()
        reason = str(ServerLostError(lost)) if lost else summarize_error(error)
        _log.warning(
            "Failed at step %d: %s. Training goes on from the last checkpoint.",
            self.step,
            reason,
        )
        if remedy is RecoveryAction.RESTART and (
            self._cluster or self._all_reduce
        ):
            self._failures.keep()
            recovery.restart_process(reason)
        self._end()
        self._ending = self._loop or self._ending
        self._trainable = self._loop = self._health = None

    def _create(self) -> None:
        """Connects, builds, initializes or restores, and tells the hooks."""
        # The functions of before, which a traceback may have held until now,
        # must not be sent to the servers again.
        gc.collect()
        strategy = self._strategy or tf.distribute.get_strategy()
        if self._cluster:
            strategy = self._connect(self._cluster)
        elif self._all_reduce:
            strategy = multi_worker_strategy(
                self._all_reduce, self._max_wait_secs, self._sigterm.leave
            )
            self._peers = Peers(self._all_reduce)
        self._steps_per_sec = 0.0
        trainable = self._build(strategy)
        self._check_same_variables(trainable)
        is_loop = hasattr(trainable.step, "run")
        loop = (
            trainable.step
            if is_loop
            else FunctionLoop(trainable.step, trainable.global_step)
        )
        self._loop, self._trainable = loop, trainable
        self._failures.record_phase("built")
        if self.checkpoint_dir and not self._follows:
            self._restore()
            self._failures.record_phase("restored")
        if self._peers and not self._follows:
            self._peers.tell(restored=self.restored_from)
        elif self._peers:
            self._restore_as_told()
        self.wait_for_steps()
        with recovery.in_hooks():
            for hook in self.hooks:
                hook.after_create_session(self, self._coord)

    def _connect(self, cluster: Cluster) -> tf.distribute.Strategy:
        """Waits for the tasks, connects to them and watches them."""
        probing.wait_until_up(cluster, self._max_wait_secs, self._sigterm.leave)
        if self._ending and not self._ending.has_ended():
            recovery.restart_process("The loop of before has not ended")
        self._ending = None
        self._failures.record_phase("waited for tasks")
        strategy = parameter_server_strategy(
            cluster,
            start_timeout_secs=self._max_wait_secs,
            give_up=self._sigterm.leave,
        )
        self._health = HealthMonitor(
            cluster, on_stuck=lambda e: recovery.restart_process(str(e))
        )
        self._failures.record_phase("connected")
        return strategy

    def _build(self, strategy: tf.distribute.Strategy) -> Trainable:
        if self._takes_strategy:
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
        if not self.is_chief:
            self._wait_for_checkpoint()
        checkpoints = self.checkpoints(self.checkpoint_dir)
        self.restored_from = checkpoints.restore()
        self.input_restored = checkpoints.position_restored

    def _wait_for_checkpoint(self) -> None:
        deadline = time.monotonic() + self._max_wait_secs
        while not checkpoints.latest(self.checkpoint_dir):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"The chief wrote no checkpoint to {self.checkpoint_dir!r} "
                    f"within {self._max_wait_secs:g} s."
                )
            time.sleep(min(1.0, self._max_wait_secs / 10))

    def _release(self) -> None:
        """What is left to do at the end, clean or not."""
        self._closed = True
        self._sigterm.restore()
        self._end()

    def _end(self) -> None:
        """Ends the threads that work for this session."""
        if self._health:
            self._health.stop()
        if self._loop:
            self._loop.close()


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return "\n".join(
        f"  {name}: {before.get(name, 'missing')}, then "
        f"{after.get(name, 'missing')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    )

"""`MonitoredTrainingSession`: runs steps with hooks, restores and recovers."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.arguments import check_type
from tfdist._tf.errors import summarize_error
from tfdist._tf.tf1_arguments import tf1_arguments
from tfdist.cluster import servers
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import check_is_chief
from tfdist.cluster.termination import TERMINATED
from tfdist.hooks import saving_hooks, session_run_hook
from tfdist.hooks.basic import NanTensorHook
from tfdist.hooks.saving_hooks import USE_DEFAULT, CheckpointSaverHook
from tfdist.hooks.session_run_hook import Hook, HookRunner, wants_every_step
from tfdist.hooks.summary_hooks import StepCounterHook, SummarySaverHook
from tfdist.session import recovery
from tfdist.session.recoverable import RecoverableSession
from tfdist.session.trainable import Trainable
from tfdist.training.loop import EndOfInput, FunctionLoop

_log = logging.getLogger(__name__)

_CHUNK_SECS = 2.0
# How long a change of the number of workers waits for a dead worker.
_RESIZE_SECS = 10.0


class MonitoredTrainingSession(RecoverableSession):
    """Runs steps with hooks; initializes, restores and recovers automatically.

    Like `tf.compat.v1.train.MonitoredTrainingSession`; `tfdist.session`
    describes its handling of failures.

    >>> from tfdist.hooks import StopAtStepHook
    >>> def build_fn():
    ...     step = tf.Variable(0, dtype=tf.int64)
    ...     run = lambda: {"loss": 1 / int(step.assign_add(1))}
    ...     return Trainable(run, step, variables={})
    >>> with MonitoredTrainingSession(
    ...     build_fn, hooks=[StopAtStepHook(last_step=2)]
    ... ) as session:
    ...     while not session.should_stop():
    ...         print(session.run())
    {'loss': 1.0}
    {'loss': 0.5}

    Differences, besides `build_fn`:

    * `run()` takes no fetches. A `Trainable` whose `step` is a function runs
      it once, as in TF1; one with a loop runs as many steps as the hooks allow
      (for about two seconds at most).
    * A restored state is not saved again immediately, and a session that has
      already reached its last step runs no step.
    * `NanTensorHook`s run first, so that no NaN they find is saved.
    * When a loop's input ends, the session ends after the hooks' last calls.
    * If another task is lost in `end`, this process restarts itself.
    * A `CheckpointSaverHook` for `checkpoint_dir` replaces the session's own.
    * No `graph.pbtxt` or `.meta` files are written.
    * On parameter servers only the chief has a session; workers and ps call
      `tfdist.cluster.serve`, until the chief calls `release`. A `step` function
      runs on the chief: workers train only in an `Estimator`'s loop. In
      all-reduce every process has a session, runs its `hooks` at the same
      steps, and stops with the leader; hooks that write check `is_chief`.

    Args:
        build_fn: Returns a `Trainable`. It is called in the strategy's scope
            or, if it has an argument without a default, with the strategy, and
            enters the scope itself. It is called again after a failure, and
            must create the same variables each time.
        is_chief: A session that is not the chief's runs only `hooks`, writes
            nothing, and waits for the chief's first checkpoint.
        checkpoint_dir: Directory of the checkpoints; None saves none.
        hooks: Called after the session's own hooks.
        chief_only_hooks: Called before them, on the chief; must set nothing.
        save_checkpoint_secs: Seconds between checkpoints. Default: 60, or more
            if saving would take over 1 % of the time (see
            `tfdist.hooks.saving_hooks.AutomaticSecs`), unless
            `save_checkpoint_steps` is given. None or 0 for both: none.
        save_checkpoint_steps: Steps between checkpoints.
        save_summaries_secs: Seconds between summaries.
        save_summaries_steps: Steps between summaries. Default: 100, unless
            `save_summaries_secs` is given.
        stop_grace_period_secs: Seconds for threads registered with the
            coordinator (see `after_create_session`) to stop.
        log_step_count_steps: Steps between measurements of steps per second;
            None for none.
        max_wait_secs: Seconds to wait for missing tasks, at the start and after
            a failure, and on non-chiefs for the chief's first checkpoint.
        summary_dir: Directory of the summaries. Default: `checkpoint_dir`.
        max_to_keep: Number of recent checkpoints kept; 0 or None keeps all.
        keep_checkpoint_every_n_hours: Also keeps one checkpoint every n hours.
        check_numerics: Whether to raise a `NanLossDuringTrainingError` that
            names the variables, instead of saving values that are not finite.
        cluster: A cluster with parameter servers, with this process as chief;
            or without any, for all-reduce, which then determines `is_chief`.
        strategy: Without a cluster. Default: `tf.distribute.get_strategy()`.

    Attributes:
        is_chief: Whether this process saves and leads.
        step: Steps applied in the job so far.
        unsaved: Whether saved variables have been set since the last save.
        restored_from: Path of the last restored checkpoint, or None.
        input_restored: Whether the input resumed at the position saved in it.
        input_ended: Whether the input has ended.
        secs_in_steps: Seconds spent in steps, without hooks.
        input_secs: `[waited for data, total]`: seconds of steps, summed over
            all workers; zeros for a step function.

    Raises:
        ValueError: both cadences of one kind; a checkpoint of other variables;
            a `build_fn` that creates other variables the second time, or has
            unexpected required arguments; called on a worker, ps or evaluator
            of a cluster with ps.
        TimeoutError: a task or the first checkpoint did not appear in time.
        RuntimeError: another chief is running the job.
    """

    @tf1_arguments
    def __init__(
        self,
        build_fn: Callable[..., Trainable],
        *,
        is_chief: bool = True,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        hooks: Iterable[Hook] | None = None,
        chief_only_hooks: Iterable[Hook] | None = None,
        save_checkpoint_secs: float | None = USE_DEFAULT,
        save_checkpoint_steps: int | None = USE_DEFAULT,
        save_summaries_secs: float | None = USE_DEFAULT,
        save_summaries_steps: int | None = USE_DEFAULT,
        stop_grace_period_secs: float = 120,
        log_step_count_steps: int | None = 100,
        max_wait_secs: float = 7200,
        summary_dir: str | os.PathLike[str] | None = None,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        check_numerics: bool = True,
        cluster: Cluster | None = None,
        strategy: tf.distribute.Strategy | None = None,
    ) -> None:
        check_type("cluster", cluster, Cluster | None)
        if isinstance(strategy, str):
            raise TypeError(
                "Argument `strategy` must be a tf.distribute.Strategy. "
                f"Received: strategy={strategy!r}."
            )
        if cluster and not cluster.is_distributed:
            cluster = None
        if cluster and cluster.num_ps:
            check_is_chief(cluster)
        elif cluster:
            is_chief = cluster.is_chief
        if checkpoint_dir is not None:
            checkpoint_dir = storage.check_no_pattern(checkpoint_dir)
        all_hooks: list[Hook] = []
        hooks, saver = [*(hooks or ())], None
        if is_chief:  # In TF1's order.
            all_hooks += chief_only_hooks or ()
            saver = saving_hooks.saver_of(checkpoint_dir, [*all_hooks, *hooks])
            summary_dir = os.fspath(summary_dir or checkpoint_dir or "")
            summaries = saving_hooks.cadence(
                save_summaries_secs, save_summaries_steps, save_steps=100
            )
            secs, steps = save_checkpoint_secs, save_checkpoint_steps
            default = saving_hooks.DEFAULT_SAVE_SECS
            saves = saving_hooks.cadence(secs, steps, save_secs=default)
            if summary_dir and log_step_count_steps:
                every = log_step_count_steps
                all_hooks.append(StepCounterHook(every, output_dir=summary_dir))
            if summary_dir and any(summaries.values()):
                summaries["output_dir"] = summary_dir
                all_hooks.append(SummarySaverHook(**summaries))
            if saver:
                saver.replaces(secs, steps)
                saver.keeps(max_to_keep, keep_checkpoint_every_n_hours)
            elif checkpoint_dir and any(saves.values()):
                saves["max_to_keep"] = max_to_keep
                hours = keep_checkpoint_every_n_hours
                saves["keep_checkpoint_every_n_hours"] = hours
                saver = CheckpointSaverHook(checkpoint_dir, **saves)
                all_hooks.append(saver)
        all_hooks += hooks
        all_hooks.sort(key=lambda hook: not isinstance(hook, NanTensorHook))
        session_run_hook.begin_all(all_hooks)
        if cluster and cluster.num_ps:
            servers.refuse_second_chief(cluster)
        super().__init__(
            build_fn,
            all_hooks,
            is_chief=is_chief,
            checkpoint_dir=checkpoint_dir,
            stop_grace_period_secs=stop_grace_period_secs,
            max_wait_secs=max_wait_secs,
            check_numerics=check_numerics,
            cluster=cluster,
            strategy=strategy,
        )
        self.secs_in_steps = 0.0
        self.input_secs = np.zeros(2)
        self._stop = self._closed = False
        self._steps_per_sec, self._saver = 0.0, saver
        self._refused = ""  # The refused change, while it is still requested.
        try:
            self._recovering(lambda: None)
        except BaseException as error:
            self._tell_failure(error)
            self._release()
            raise
        runs_many = not isinstance(self._loop, FunctionLoop)
        if cluster and cluster.num_ps and not runs_many:
            _log.warning("The step runs on the chief: workers do not train.")
        if runs_many and not self._follows and not self._stop:
            for kind in {type(h) for h in self.hooks if wants_every_step(h)}:
                session_run_hook.warn_of_single_steps(
                    kind.__name__,
                    "To avoid this, add a method `steps_until_next(step)` that "
                    "returns the steps until the next call (None: any number).",
                )

    def __enter__(self) -> MonitoredTrainingSession:
        return self

    def __exit__(self, exc_type: type | None, exc: Any, traceback: Any) -> bool:
        clean = exc_type is None or issubclass(exc_type, recovery.END_OF_INPUT)
        if clean:
            self.input_ended |= exc_type is not None
            self.close()
        elif not self._closed:
            self._tell_failure(exc)
            self._release()
        return clean and exc_type is not None

    def should_stop(self) -> bool:
        """Whether a hook, a thread or the end of the input ended training."""
        return self._stop or self._closed or self._coord.should_stop()

    def request_stop(self) -> None:
        """Ends training after the hooks have seen the current steps."""
        self._stop = True

    def run(self) -> dict[str, float]:
        """Runs one step, or as many as allowed; returns loss and metrics."""
        if self.should_stop():
            raise RuntimeError(
                "`run` was called after the session had stopped. Check "
                "`should_stop()` before each `run()`."
            )
        return self._recovering(self._run)

    def close(self) -> None:
        """Ends the session normally and writes the last checkpoint."""
        if self._closed:
            raise RuntimeError("The session is already closed.")
        try:
            self._end()
        except Exception as error:
            self._tell_failure(error)
            raise
        finally:
            self._release()

    def _end(self) -> None:
        hooks = sorted(
            self.hooks, key=lambda h: not getattr(h, "sets_variables", False)
        )
        try:
            self.wait_for_steps()
            if self.secs_in_steps:
                self.average_weights()
            with recovery.in_hooks(can_end=False):
                for hook in hooks:
                    hook.end(self)
            self._end_threads()
            if self._lockstep:
                self._lockstep.end()
        except recovery.FAILURES as error:
            self._drop(error, at_end=True)

    def _run(self) -> dict[str, float]:
        if self._stop and not self._follows:  # A hook's request at the start.
            return {}
        told = None  # The number of steps announced by the leader.
        if self._lockstep and self._follows:
            told = self._lockstep.next("run")
            if told is None:
                self.request_stop()
                return {}
        with recovery.in_hooks():
            runner = HookRunner(self.hooks, self)
        first_step = self._loop.step
        logs = self._run_steps(first_step, told)
        if not (self.input_ended or self._in_sync):
            self._resize()  # Before the hooks, as it may finish more steps.
        if self.step > first_step or not self.input_ended:
            with recovery.in_hooks():
                runner.end(logs)
        self._failures.report(self.step)
        if self._follows:
            return logs  # The leader decides what follows.
        if runner.context.stop_requested or self.input_ended:
            self.request_stop()
        if self._sigterm.received:
            self._save_all()
            self._sigterm.leave()
        if not self.should_stop():
            self._regroup()
        return logs

    def _save_all(self) -> None:
        """Has the hooks save, before this process ends or restarts itself."""
        self.wait_for_steps()
        with recovery.in_hooks(can_end=False):
            for hook in self.hooks:
                if hasattr(hook, "on_preemption"):
                    hook.on_preemption(self)

    def _resize(self) -> None:
        """Adds and removes workers as `tfdist.cluster.size` requests.

        This is impossible while TensorFlow waits for a dead worker, or in a
        loop that is not `resizable`: this process then restarts itself, or
        waits if the dead worker is to remain.
        """
        size, health = self._size, self._health
        if not size or (number := size.due()) is None:
            return
        assert health
        change = f"workers: {size.size} -> {number}"
        cluster = size.cluster.with_first(worker=number, ps=size.ps)
        health.look()
        missing = set(health.missing("worker", 0))
        if self._loop.resizable and not missing:
            self.wait_for_steps()
            try:
                resized = self._loop.resize(cluster)
            except tf.errors.OpError as error:  # A worker has just died.
                recovery.restart_process(f"{change}: {summarize_error(error)}")
            if resized:
                _log.info("%s", change)
                size.size, self._cluster = number, cluster
                health.follow(cluster)
            return
        late = not self._loop.resizable or size.is_late(_RESIZE_SECS)
        if late and not missing.intersection(cluster.addresses("worker")):
            self._restart(change, cluster)

    def _regroup(self) -> None:
        """Restarts with a different all-reduce group, or different ps."""
        size, cluster = self._size, self._cluster
        leaving = self._lockstep.leaving() if self._lockstep else None
        if leaving and cluster and self._saver:
            self._restart(f"{leaving} received SIGTERM", cluster)
        if not size or not (change := size.change):
            self._refused = ""
            return
        try:
            self._check_restart(size)
        except ValueError as error:
            if change != self._refused:  # Log each refused change once.
                self._refused = change
                _log.error("Refused: %s. %s", change, error)
                size.refuse()
        else:
            if size.is_ready():
                self._restart(change, size.asked)

    def _check_restart(self, size: ClusterSize) -> None:
        if not self._saver:
            raise ValueError("The job saves no checkpoint to resume from.")
        if self._in_sync:
            self._loop.check_resize(len(size.asked.addresses()))
        elif size.wanted_ps < self._trainable.min_ps:
            name = f"ps:{self._trainable.min_ps - 1}"
            raise ValueError(f"Your `placement` has variables on {name}.")

    def _restart(self, change: str, cluster: Cluster) -> None:
        """Saves, ends the tasks that are not in `cluster`, and restarts."""
        self._save_all()
        self._have_saved()
        if self._lockstep:
            self._lockstep.regroup(cluster.addresses("worker").values())
        elif self._cluster and self._health:
            self._health.look()
            gone = {*self._cluster.addresses()} - {*cluster.addresses()}
            gone -= {*self._health.missing("worker", 0)}  # No call may hang.
            servers.dismiss_tasks(gone - {*self._health.missing("ps", 0)})
        recovery.restart_process(change)

    def _run_steps(self, first_step: int, told: int | None) -> dict[str, float]:
        start = time.monotonic()
        try:
            num_steps, ahead = self._num_steps(first_step, told)
            if self._lockstep:
                self._lockstep.tell(run=num_steps)
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
            if self._lockstep and not self._loop.own_batches:
                self._lockstep.check_ended(self.step)
        self._steps_per_sec = (self.step - first_step) / max(secs, 1e-9)
        return logs

    def _num_steps(self, step: int, told: int | None) -> tuple[int, int]:
        """Returns the steps to run, and how many more may be running then."""
        if told is not None or isinstance(self._loop, FunctionLoop):
            return 1 if told is None else told, 0
        most = max(100, int(self._steps_per_sec * _CHUNK_SECS))
        if self._health and (self._failures.count or not self._steps_per_sec):
            most = 1  # The first step shows whether everything works.
        return session_run_hook.steps_allowed(self.hooks, step, most)

    def _tell_failure(self, error: BaseException | None) -> None:
        """Ends the followers, too, which would wait for the leader.

        They wait for one that SIGTERM ends, as it will be started again.
        """
        returns = isinstance(error, SystemExit) and error.code == TERMINATED
        if self._lockstep and error and not returns:
            self._lockstep.fail(error)

    def _release(self) -> None:
        """Releases resources at the end, normal or not."""
        self._closed = True
        self._sigterm.restore()
        if self._size:
            self._size.stop()
        self._have_saved()
        self._disconnect()
        self._end_threads()

"""The state a session builds, and rebuilds and restores after a failure."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf import private_renewal
from tfdist._tf.errors import summarize_error
from tfdist._tf.private_checkpoints import Saveable
from tfdist._tf.private_keras import own_object_names
from tfdist._tf.waiting import wait_for
from tfdist.checkpoint import checkpoints
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.checkpoint.names import values_of
from tfdist.cluster import probing, servers, strategies
from tfdist.cluster.health import HealthMonitor, ServerFailure, ServerLostError
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.spec import Cluster
from tfdist.cluster.termination import Sigterm
from tfdist.data.input_fns import takes_argument, untuned
from tfdist.hooks.session_run_hook import Hook
from tfdist.placement.scope import placed_scope
from tfdist.session import recovery
from tfdist.session.lockstep import Lockstep
from tfdist.session.recovery import RecoveryAction, restart_process
from tfdist.session.trainable import Trainable
from tfdist.training import optimizers
from tfdist.training.loop import FunctionLoop, Loop

_log = logging.getLogger(__name__)

_TERM_SECS = 20.0  # How long running steps may take after SIGTERM.
_WRITE_SECS = 60.0  # For a checkpoint being written, at a failure or the end.


class RecoverableSession:
    """A model, its loop and its cluster, rebuilt after each failure.

    Like TF1's `_RecoverableSession`; the base class of
    `MonitoredTrainingSession`, which documents the arguments and attributes.
    """

    def __init__(
        self,
        build_fn: Callable[..., Trainable],
        hooks: Sequence[Hook],
        *,
        is_chief: bool,
        checkpoint_dir: str | None,
        stop_grace_period_secs: float,
        max_wait_secs: float,
        check_numerics: bool,
        cluster: Cluster | None,
        strategy: tf.distribute.Strategy | None,
    ) -> None:
        self.step = 0
        self.hooks = hooks
        self.is_chief = is_chief
        self.checkpoint_dir = checkpoint_dir
        self.restored_from: str | None = None
        self.input_restored = self.input_ended = self.unsaved = False
        self._averaged = False
        self._build_fn = build_fn
        self._takes_strategy = takes_argument(
            build_fn, "build_fn", "the strategy"
        )
        self._grace_secs = stop_grace_period_secs
        self._max_wait_secs = max_wait_secs
        self._check_numerics = check_numerics
        self._cluster = cluster
        self._size: ClusterSize | None = None
        self._in_sync = cluster is not None and not cluster.num_ps
        if cluster:
            self._size = ClusterSize(cluster, checkpoint_dir)
            if not self._in_sync:
                self._cluster = self._size.now
            if is_chief:
                self._size.watch()
        self._strategy = strategy
        # Whether this process follows an all-reduce leader.
        self._follows = self._in_sync and not is_chief
        self._lockstep: Lockstep | None = None
        self._health: HealthMonitor | None = None
        self._trainable: Trainable
        self._loop: Loop
        # Whether trainable and loop exist; whether they survive a reconnection.
        self._built = self._keeps = False
        self._connected: tf.distribute.ParameterServerStrategy | None = None
        self._shapes: dict[str, tuple] | None = None
        self._ending: Loop | None = None
        self._coord = tf.train.Coordinator(recovery.END_OF_INPUT)
        self._failures = recovery.Failures()
        self._saving: list[Checkpoints] = []
        self._sigterm = Sigterm(enabled=is_chief or self._in_sync)

    # --- For hooks -----------------------------------------------------------

    @property
    def global_step(self) -> tf.Variable:
        """The step counter."""
        return self._trainable.global_step

    @property
    def variables(self) -> dict[str, Saveable]:
        """The variables that a checkpoint holds, by name."""
        variables = values_of(self._trainable.variables)
        return {**variables, "global_step": self.global_step}

    @property
    def model(self) -> keras.Model | None:
        """The Keras model, if `build_fn` provides one."""
        return self._trainable.model

    @property
    def staleness(self) -> np.ndarray | None:
        """The number of updates by staleness; None if not measured."""
        return self._loop.staleness()

    def wait_for_steps(self) -> None:
        """Waits for running steps to finish, and includes them in `step`."""
        self._loop.wait_for_steps(self._watch)
        self.step = self._loop.step

    def average_weights(self) -> None:
        """Assigns the averages of `use_ema` to the weights, at the end."""
        optimizer = getattr(self.model, "optimizer", None)
        if self.model is not None and optimizer and not self._averaged:
            weights = self.model.trainable_variables
            self._averaged = optimizers.finish(optimizer, weights)
            self.unsaved |= self._averaged

    def evaluate(self, batches: tf.data.Dataset) -> dict[str, float]:
        """Returns loss and metrics of the current weights, using the workers.

        The result is exact even if workers die, and empty if there is no batch.
        No step may be running, which holds while a checkpoint is saved. Raises
        `ValueError` if the session runs a plain step function.
        """
        return self._loop.evaluate(untuned(batches), self._watch)

    def agreed(self, value: Callable[[], Any]) -> Any:
        """Returns the chief's `value()`: numbers, strings, lists and so on.

        In all-reduce, every process must call this after the same steps.
        """
        if self._lockstep and self._follows:
            return self._lockstep.next("agreed")
        agreed = value()
        if self._lockstep:
            self._lockstep.tell(agreed=agreed)
        return agreed

    def tasks_alive(self) -> str:
        """Returns a text like "2/2 ps, 3/3 workers"; empty if no cluster."""
        return self._health.alive() if self._health else ""

    @property
    def num_workers(self) -> int:
        """The cluster's current number of workers, including lost ones."""
        return self._cluster.num_workers if self._cluster else 0

    def missing_workers(self, secs: float) -> list[str]:
        """Returns workers lost for `secs`, if their data shares are unread."""
        if not (self._health and self._loop.fixed_shares):
            return []
        return self._health.missing("worker", secs)

    def checkpoints(
        self,
        directory: str,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
    ) -> Checkpoints:
        """Returns the checkpoints of this session's state in `directory`."""
        made = Checkpoints(
            directory,
            self.variables,
            max_to_keep,
            keep_checkpoint_every_n_hours,
            iterator_fn=self._iterator,
            before_save=self._save_positions,
            check_numerics=self._check_numerics,
        )
        self._saving.append(made)
        return made

    def _iterator(self) -> tf.data.Iterator | None:
        """The input iterator to save; None once the input has ended."""
        if self.input_ended:
            return None
        return self._trainable.iterator or self._loop.iterator

    def _save_positions(self, step: int) -> None:
        """Has other processes save their positions in their own data."""
        if self._lockstep and self._loop.own_batches:
            self._lockstep.save_positions(step)

    def _watch(self) -> None:
        """Checks for failures and SIGTERM while others work."""
        if self._health:
            self._health.check()
        self._sigterm.leave_when_late(_TERM_SECS)

    # --- Recovery ------------------------------------------------------------

    def _recovering(self, action: Callable[[], Any]) -> Any:
        """Runs `action`, and rebuilds and repeats after a failure."""
        while True:
            try:
                if not self._built:
                    self._create()
                return action()
            except recovery.FAILURES as error:
                self._drop(error)

    def _drop(self, error: Exception, at_end: bool = False) -> None:
        """Drops what may refer to lost state, or raises; restarts `at_end`."""
        if self._lockstep:
            self._lockstep.check_failed()
        lost = dict(getattr(error, "lost", {}))
        if self._health:
            lost |= self._health.look()
        action = recovery.choose_action(
            error, lost, self._failures.in_a_row, in_sync=self._in_sync
        )
        if at_end and not (lost or self._in_sync):
            action = RecoveryAction.RAISE
        elif self._keeps and self._failures.count and action.name == "RAISE":
            action = RecoveryAction.REBUILD  # Keeps nothing this time.
        step = getattr(error, "saved_step", self.step)
        users = not lost and self._failures.is_user_error(error, step)
        summary = summarize_error(error)
        if action is RecoveryAction.RAISE or users:
            if summary not in str(error).partition("\n")[0]:  # Some are long.
                error.add_note(summary)
            raise error
        self._sigterm.leave()
        self._failures.add()
        reason = str(ServerLostError(lost)) if lost else summary
        _log.warning(
            "Failed at step %d: %s. Training resumes from the last checkpoint.",
            self.step,
            reason,
        )
        if at_end or (action.name == "REBUILD" and not self._have_saved()):
            action = RecoveryAction.RESTART
        if action is RecoveryAction.RESTART and (self._cluster or at_end):
            self._failures.keep()
            restart_process(reason)
        with contextlib.suppress(*recovery.FAILURES):  # Likely the same cause.
            self._end_threads()
        self._coord = tf.train.Coordinator(recovery.END_OF_INPUT)
        self._disconnect()
        self._keeps = self._can_keep(lost)
        self._built = False
        if not self._keeps:
            vars(self).pop("_trainable", None)
            vars(self).pop("_loop", None)

    def _can_keep(self, lost: Mapping[str, ServerFailure]) -> bool:
        """Whether to keep model and functions: all lost state was saved."""
        # The kept state itself may be the cause of the failure.
        suspect = self._failures.count > 1 or (self._keeps and not lost)
        if suspect or not (self._built and self._size and self.checkpoint_dir):
            return False
        saved, own = self.variables.values(), self._loop.own_variables
        known = own is not None and private_renewal.is_known(saved, own)
        return known and not self._loop.compiles()

    def _have_saved(self) -> bool:
        """Waits for checkpoints being written; returns whether they ended."""
        saving, self._saving = self._saving, []
        ended = all(each.wait(_WRITE_SECS) for each in saving)
        if not ended:
            _log.warning("A checkpoint took too long and is abandoned.")
        return ended

    def _end_threads(self) -> None:
        """Stops the hooks' threads; raises an error from any of them."""
        self._coord.request_stop()
        secs = self._grace_secs
        self._coord.join(stop_grace_period_secs=secs, ignore_live_threads=True)

    def _disconnect(self) -> None:
        """Stops the health monitor and closes the loop."""
        if self._health:
            self._health.stop()
            self._health = None
        if self._built:
            self._loop.close()
            self._ending = self._loop

    def _create(self) -> None:
        """Connects, builds, initializes or restores, and calls the hooks."""
        self._build(self._connect())
        if self._health:
            self._loop.on_failure = self._health.hurry
        self._averaged = False
        cluster, directory = self._cluster, self.checkpoint_dir
        if cluster and self._in_sync:
            if self._size and self._size.may_change:
                self._loop.check_resize(len(cluster.addresses()))
            self._lockstep = Lockstep(
                cluster, directory, self._sigterm, self._watch, self.checkpoints
            )
        self._restore()
        self.wait_for_steps()
        with recovery.in_hooks(can_end=False):
            for hook in self.hooks:
                hook.after_create_session(self, self._coord)

    def _connect(self) -> tf.distribute.Strategy:
        cluster, secs = self._cluster, self._max_wait_secs
        if (self._shapes or (cluster and cluster.num_ps)) and not self._keeps:
            # A traceback may have kept the old model and its functions alive,
            # which would be sent to the servers again.
            gc.collect()
        give_up = self._give_up_waiting
        if cluster is None:
            return self._strategy or tf.distribute.get_strategy()
        if not cluster.num_ps:
            assert self._size
            joined = strategies.multi_worker_strategy(
                cluster, secs, give_up, self._size
            )
            self._cluster = strategies.group_of(joined)
            self._size.follow(self._cluster)
            return joined
        if self._size and self._size.may_change:
            probing.wait_until_up(cluster.with_first(worker=1), secs, give_up)
            self._size.size = self._size.there()
            self._cluster = cluster = self._size.now
            if servers.connected_elsewhere(cluster):
                restart_process(f"The cluster is now {cluster.shape}")
        probing.wait_until_up(cluster, secs, give_up)
        if self._ending and not self._ending.has_ended():
            restart_process("The previous loop has not ended")
        self._ending = None
        again = self._connected if self._keeps else None
        self._connected = strategies.parameter_server_strategy(
            cluster, start_timeout_secs=secs, give_up=give_up, again=again
        )
        self._health = HealthMonitor(
            cluster, on_stuck=lambda error: restart_process(str(error))
        )
        return self._connected

    def _give_up_waiting(self) -> None:
        """Ends the wait for tasks that will not come."""
        self._sigterm.leave()
        if self._size and self._size.shrinks:
            restart_process("The job was asked to use fewer tasks")

    def _build(self, strategy: tf.distribute.Strategy) -> None:
        """Calls `build_fn` and checks that the variables are the same."""
        if self._keeps:
            private_renewal.renew()
            self._loop.begin_again()
            self._built = True
            return
        with own_object_names():  # Keras numbers layers as in the first call.
            if self._takes_strategy:
                trainable = self._build_fn(strategy)
            else:
                with placed_scope(strategy, num_ps=servers.num_ps(strategy)):
                    trainable = self._build_fn()
        if not isinstance(trainable, Trainable):
            raise TypeError(
                "Argument `build_fn` must return a tfdist.Trainable. Received: "
                f"{trainable!r}."
            )
        variables = trainable.variables.items()
        after = {name: (v.shape, v.dtype) for name, v in variables}
        before = self._shapes = self._shapes or after
        differences = [
            f"  {name}: {before.get(name, 'missing')}, then "
            f"{after.get(name, 'missing')}"
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name)
        ]
        if differences:
            raise ValueError(
                "`build_fn` must create the same variables each time it is "
                "called. Differences:\n" + "\n".join(differences)
            )
        self._trainable = trainable
        if hasattr(trainable.step, "run"):
            self._loop = cast(Loop, trainable.step)
        else:
            self._loop = FunctionLoop(trainable.step, trainable.global_step)
        self._built = True

    def _rates(self) -> dict[str, str]:
        """Returns the learning rates that are variables."""
        return {
            name: f"{float(tf.convert_to_tensor(variable)):g}"
            for name, variable in self.variables.items()
            if name.endswith("/learning_rate") and variable.shape.rank == 0
        }

    def _restore(self) -> None:
        """Restores the newest checkpoint or, on a follower, the leader's."""
        directory, saved = self.checkpoint_dir, None
        rates = {} if self._keeps else self._rates()
        position_of: Callable[[str], str] = str  # Next to the checkpoint.
        if self._lockstep and self._loop.own_batches:
            position_of = self._lockstep.own_position
        if self._lockstep and self._follows:
            path = self._lockstep.next("restored")
            if path is not None:
                assert directory is not None  # It is the same on the leader.
                saved = self.checkpoints(directory)
                saved.restore_from(path, position_of(path))
                self.restored_from = path
        elif directory:
            if not self.is_chief and not wait_for(
                lambda: checkpoints.latest(directory),
                self._max_wait_secs,
                min(1.0, self._max_wait_secs / 10),
            ):
                raise TimeoutError(
                    f"The chief wrote no checkpoint to {directory!r} within "
                    f"{self._max_wait_secs:g} s. Check that it is running."
                )
            saved = self.checkpoints(directory)
            self.restored_from = saved.restore(position_of)
        if saved:
            self.input_restored = saved.position_restored
            model, whole = self.model, saved.optimizer_restored
            if self._keeps and not (self.restored_from and whole):
                raise tf.errors.AbortedError(None, None, "Variables not saved")
            if model is not None and not whole:
                optimizers.begin(model.optimizer, model.trainable_variables)
            if rates and rates != (now := self._rates()):
                _log.warning(
                    "Using the learning rates of the checkpoint, %s, not %s "
                    "as compiled. To change one, assign it in a callback.",
                    now,
                    rates,
                )
        if self._lockstep:
            self._lockstep.tell(restored=self.restored_from)

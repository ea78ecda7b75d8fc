"""What a session has built: made again after a failure, and restored."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.errors import summarize_error
from tfdist._tf.private import Saveable
from tfdist.checkpoint import checkpoints
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.cluster.health import HealthMonitor, ServerLostError
from tfdist.cluster.spec import Cluster
from tfdist.cluster.termination import Sigterm
from tfdist.hooks.default_hooks import Hook
from tfdist.session import recovery
from tfdist.session.building import Builder, Trainable
from tfdist.session.lockstep import Lockstep
from tfdist.session.recovery import RecoveryAction
from tfdist.training.loop import Loop

_log = logging.getLogger(__name__)

# How long the steps under way may take after SIGTERM.
_TERM_SECS = 20.0


class RecoverableSession:
    """A model, its loop and its cluster, built again after each failure.

    As TF1's `_RecoverableSession`; base of `MonitoredTrainingSession`, which
    describes the arguments and attributes.
    """

    def __init__(
        self,
        build_fn: Callable[..., Trainable],
        hooks: Sequence[Hook],
        *,
        is_chief: bool,
        checkpoint_dir: str | None,
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
        self.input_restored = self.input_ended = False
        self._cluster = cluster
        self._in_sync = cluster is not None and not cluster.num_ps
        self._lockstep: Lockstep | None = None
        self._max_wait_secs = max_wait_secs
        self._check_numerics = check_numerics
        self._built: tuple[Trainable, Loop] | None = None
        self._coord = tf.train.Coordinator(
            clean_stop_exception_types=(
                tf.errors.OutOfRangeError,
                StopIteration,
            )
        )
        self._failures = recovery.Failures()
        self._builder = Builder(
            build_fn,
            cluster,
            strategy,
            max_wait_secs=max_wait_secs,
            give_up=lambda: self._sigterm.leave(),
            record_phase=self._failures.record_phase,
        )
        self._sigterm = Sigterm(enabled=is_chief or self._in_sync)

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

        Without a cluster by this process. Exact, whatever worker dies. No step
        may be under way (`wait_for_steps`), as is so when a checkpoint is
        saved. Empty if there is no batch.

        Raises:
            ValueError: the session runs a plain step function.
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
        """What the steps read from, unless a later job shall begin with it."""
        if self.input_ended:
            return None
        return self._trainable.iterator or self._loop.iterator

    def _save_positions(self, step: int) -> None:
        """Has other processes save where they are in data of their own."""
        if self._lockstep and self._loop.own_batches:
            self._lockstep.save_positions(step)

    @property
    def _trainable(self) -> Trainable:
        assert self._built is not None
        return self._built[0]

    @property
    def _loop(self) -> Loop:
        assert self._built is not None
        return self._built[1]

    @property
    def _health(self) -> HealthMonitor | None:
        return self._builder.health

    @property
    def _follows(self) -> bool:
        """Whether another process says what comes next."""
        return self._in_sync and not self.is_chief

    def _watch(self) -> None:
        """What is looked at while others work."""
        if self._health:
            self._health.check()
        self._sigterm.leave_when_late(_TERM_SECS)

    # --- Recovery ------------------------------------------------------------

    def _recovering(self, action: Callable[[], Any]) -> Any:
        """Runs `action`; after a failure builds everything again first."""
        while True:
            try:
                if self._built is None:
                    self._create()
                return action()
            except recovery.FAILURES as error:
                self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Lets go of everything that may hold what was lost.

        Raises:
            Exception: `error`, if it is not recovered from.
        """
        lost = dict(getattr(error, "lost", {}))
        if self._health:
            lost |= self._health.look()
        action = recovery.choose_action(
            error, lost, self._failures.count, in_sync=self._in_sync
        )
        users = not lost and self._failures.is_the_users(error, self.step)
        if action is RecoveryAction.RAISE or users:
            raise error
        self._sigterm.leave()
        self._failures.add()
        reason = str(ServerLostError(lost)) if lost else summarize_error(error)
        _log.warning(
            "Failed at step %d: %s. Training goes on from the last checkpoint.",
            self.step,
            reason,
        )
        if action is RecoveryAction.RESTART and self._cluster:
            self._failures.keep()
            recovery.restart_process(reason)
        self._builder.disconnect(self._built and self._loop)
        self._built = None

    def _create(self) -> None:
        """Connects, builds, initializes or restores, and tells the hooks."""
        trainable = self._builder.build()
        self._built = trainable, trainable.loop()
        if self._cluster and self._in_sync:
            self._lockstep = Lockstep(
                self._cluster,
                self.checkpoint_dir,
                self._watch,
                self.checkpoints,
            )
        self._restore()
        self.wait_for_steps()
        with recovery.in_hooks():
            for hook in self.hooks:
                hook.after_create_session(self, self._coord)

    def _restore(self) -> None:
        """Restores the newest checkpoint, or as a follower the leader's."""
        if self._lockstep and self._follows:
            path = self._lockstep.next_restored()
            if path is not None:
                assert self.checkpoint_dir is not None
                saved = self.checkpoints(self.checkpoint_dir)
                own = self._lockstep.own_position(path)
                saved.restore_from(
                    path, own if self._loop.own_batches else path
                )
                self._note_restored(path, saved)
            return
        if self.checkpoint_dir:
            if not self.is_chief:
                self._wait_for_checkpoint(self.checkpoint_dir)
            saved = self.checkpoints(self.checkpoint_dir)
            self._note_restored(saved.restore(), saved)
        if self._lockstep:
            self._lockstep.announce(restored=self.restored_from)

    def _note_restored(self, path: str | None, saved: Checkpoints) -> None:
        self.restored_from = path
        self.input_restored = saved.position_restored
        self._failures.record_phase("restored")

    def _wait_for_checkpoint(self, directory: str) -> None:
        deadline = time.monotonic() + self._max_wait_secs
        while not checkpoints.latest(directory):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"The chief wrote no checkpoint to {directory!r} "
                    f"within {self._max_wait_secs:g} s."
                )
            time.sleep(min(1.0, self._max_wait_secs / 10))

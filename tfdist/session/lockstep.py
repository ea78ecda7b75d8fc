"""All-reduce: every process runs the steps that the leader announces."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdist._tf.errors import summarize_error
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.cluster.peers import Peers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.termination import Sigterm
from tfdist.session.recovery import restart_process

_log = logging.getLogger(__name__)
_ENDED_SECS = 30.0  # Processes end in the same step, a moment apart.


@dataclasses.dataclass(eq=False)
class Lockstep:
    """Keeps the sessions of an all-reduce job at the same step.

    The leader (the chief, else worker 0) announces which checkpoint it has
    restored, how many steps come next, when it saves, when the group changes
    and when the job ends. If each process reads its own data, each saves its
    input position next to the leader's checkpoint, in
    `<checkpoint_dir>/inputs/<task>`, valid only for a group of the same size;
    `positions` creates the `Checkpoints` there. `watch` is called during waits.
    After SIGTERM a follower leaves once the leader has saved; others restart.
    """

    cluster: Cluster
    checkpoint_dir: str | None
    sigterm: Sigterm
    watch: Callable[[], None]
    positions: Callable[[str], Checkpoints]

    def __post_init__(self) -> None:
        self._peers = Peers(self.cluster)
        self._agreed: list[Any] = []
        self._left = False

    def tell(self, **command: Any) -> None:
        """Announces the next command, on the leader; see `next`."""
        if self._peers.leads:
            self._peers.tell(**command)

    def save_positions(self, step: int) -> None:
        """Saves the input positions of all processes, on the leader."""
        self._peers.tell(save=step)
        self._saved.save_position(step)
        self._peers.wait_for_others(f"saved/{step}", self.watch)

    def leaving(self) -> str | None:
        """Returns, on the leader, a process that has asked to leave."""
        return self._peers.leaving()

    def fail(self, error: BaseException) -> None:
        """Ends the followers, on the leader; a follower says why it ends."""
        if self._peers.leads:
            self._peers.fail(error)
        else:
            self._peers.tell_error(error)

    def check_ended(self, step: int) -> None:
        """Raises RuntimeError if the input of others goes on after `step`."""
        self._peers.announce("ended")
        try:
            self._peers.wait_for_others("ended", self.watch, _ENDED_SECS)
        except tf.errors.DeadlineExceededError:
            error = RuntimeError(
                f"The training input of {self._peers.name} ended at step "
                f"{step}, but that of another process goes on. An input "
                "function must return the same batches in every process, or "
                "take an InputContext and return those of its process."
            )
            self._peers.fail(error)
            raise error from None

    def check_failed(self) -> None:
        """Raises RuntimeError if the job fails; logs why a follower ended."""
        with contextlib.suppress(tf.errors.OpError):  # Nobody can tell.
            self._peers.check_failed()
            for reason in self._peers.errors() if self._peers.leads else ():
                _log.warning("%s. The others wait for it.", reason)

    def regroup(self, workers: Iterable[str]) -> None:
        """Ends this group, on the leader; the given workers restart."""
        self._peers.tell(regroup=[*workers])
        self._peers.wait_for_others("regroup", self.watch)

    def next(self, what: str) -> Any:
        """Returns the leader's next announcement, on a follower.

        None at the end of the job, or if it continues without this process.

        Args:
            what: "restored", a path; "run", a number of steps; or "agreed".

        Raises:
            RuntimeError: the leader has failed, or has different hooks.
        """
        if what == "agreed" and self._agreed:
            return self._agreed.pop(0)
        while True:
            if self.sigterm.received:
                self._peers.ask_to_leave()
                self.watch()
            command = self._peers.next(self.watch)
            if "save" in command:
                step = command["save"]
                self._saved.save_position(step)
                self._peers.announce(f"saved/{step}")
            elif "regroup" in command:
                self._peers.announce("regroup")
                if self.cluster.address in command["regroup"]:
                    self.sigterm.leave()
                    restart_process("The group of processes changes")
                _log.info("The job continues without this process.")
                self._left = True
                return None
            elif what in command:
                return command[what]
            elif "agreed" in command:  # Sent by the leader's hooks as it ended.
                self._agreed.append(command["agreed"])
            elif what == "agreed":
                raise RuntimeError(
                    "A hook of this process waits for a result of the job's "
                    "leader, which has different hooks. In all-reduce every "
                    "process must have the same hooks, in the same order."
                )
            elif "end" in command:
                return None

    def own_position(self, path: str) -> str:
        """Returns the path of this process's position for a checkpoint."""
        return os.path.join(self._directory(), os.path.basename(path))

    @functools.cached_property
    def _saved(self) -> Checkpoints:
        """The checkpoints of this process's input positions."""
        return self.positions(self._directory())

    def _directory(self) -> str:
        assert self.checkpoint_dir is not None  # The leader saves.
        task = self._peers.name.replace(":", "-")
        task += f"-of-{len(self.cluster.addresses())}"
        return os.path.join(self.checkpoint_dir, "inputs", task)

    def end(self) -> None:
        """Waits for all to end, since the leader serves the announcements."""
        if self._left:
            return
        try:
            if self._peers.leads:
                self._peers.tell(end=True)
                self._peers.wait_for_others("end", self.watch)
            else:
                self._peers.announce("end")
        except tf.errors.OpError as error:
            # The work is done; a restarted process will find that out.
            summary = summarize_error(error)
            _log.warning("Another process was lost at the end: %s", summary)

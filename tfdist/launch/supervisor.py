"""The parent of a cluster's tasks: one process, one thread, one event loop.

`Supervisor` starts tasks, notices when they end and runs planned actions. Its
subclasses decide how to react to the end of a task: `Launcher` (the command
line) and `Injector` (`tfdist.launch.testing`).
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from tfdist._tf.waiting import wait_for
from tfdist.cluster.spec import Cluster
from tfdist.launch.forkserver import ForkServer
from tfdist.launch.network import reserve_ports
from tfdist.launch.processes import Task, reap_orphans, task_environment

PROOF_SECS = 10.0
"""Time limit for a signal to take effect."""


def wants_restart(job: str, exit_code: int) -> bool:
    """Whether to restart a task that ended with `exit_code`.

    Failed tasks are, but a chief only if Vertex AI and Kubeflow would retry it:

    >>> wants_restart("worker", 1), wants_restart("chief", 1)
    (True, False)
    >>> wants_restart("chief", -9), wants_restart("chief", 143)
    (True, True)
    """
    if job == "chief":
        return not 0 <= exit_code < 128
    return exit_code != 0


def task_ids(
    ps: int, workers: int, evaluator: bool, data_workers: int
) -> list[tuple[str, int]]:
    """Returns job and index of each task of a cluster with a chief."""
    counts = {
        "chief": 1,
        "worker": workers,
        "ps": ps,
        "evaluator": int(evaluator),
        "dispatcher": int(data_workers > 0),
        "data_worker": data_workers,
    }
    return [(job, i) for job, count in counts.items() for i in range(count)]


class Supervisor:
    """Runs the tasks of a cluster, in the main thread, until stopped.

    An exception in a callback of the event loop ends `run`.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}  # By name.
        self.loop = asyncio.new_event_loop()
        self.fork_server: ForkServer | None = None  # None: tasks are spawned.
        self._ports: list[socket.socket] = []
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Called first, in the event loop."""
        raise NotImplementedError

    def on_end(self, task: Task, exit_code: int) -> None:
        """Called when a task's process has ended."""
        raise NotImplementedError

    def run(self) -> None:
        """Calls `begin`, runs until `loop.stop()`, and leaves no task behind.

        Reraises the first exception of `begin`, `on_end` or another callback.
        """
        self.loop.set_exception_handler(self._fail)
        self.loop.add_signal_handler(signal.SIGCHLD, self._reap_all)
        self.loop.call_soon(self.begin)
        try:
            self.loop.run_forever()
        finally:
            self.kill_all()
            self.loop.close()
        if self._error is not None:
            raise self._error

    def _fail(self, loop: asyncio.AbstractEventLoop, context: Any) -> None:
        self._error = self._error or context.get("exception")
        loop.stop()

    def start_fork_server(self, command: Sequence[str]) -> bool:
        """Starts a fork server for tasks that run `command`, if possible."""
        heaviest = task_environment("ps" if "ps:0" in self.tasks else "chief")
        self.fork_server = ForkServer(command, heaviest)
        return self.fork_server.start()

    def place_tasks(self) -> Cluster:
        """Gives every task a new port and its `TF_CONFIG`."""
        jobs: dict[str, list[str]] = {}
        for task in self.tasks.values():
            jobs.setdefault(task.job, []).append(self.reserve_port(task))
        cluster = Cluster.from_jobs(jobs, "chief", 0)
        for task in self.tasks.values():
            task.tf_config = cluster.tf_config(task.job, task.index)
        return cluster

    def reserve_port(self, task: Task) -> str:
        """Reserves a port for a task; returns the task's address."""
        (holder,) = reserve_ports(1)
        self._ports.append(holder)
        task.port = holder.getsockname()[1]
        return f"127.0.0.1:{task.port}"

    def start(self, task: Task) -> None:
        """Starts a task."""
        self.cancel(task, "restart")
        task.start(self.fork_server.fork if self.fork_server else None)

    def restart_later(self, task: Task, secs: float) -> None:
        """Restarts a task after a pause."""

        def restart() -> None:
            task.restarts += 1
            self.start(task)

        self.plan(task, "restart", secs, restart)

    def plan(
        self,
        task: Task,
        what: str,
        secs: float,
        action: Callable[..., object],
        *args: Any,
    ) -> None:
        """Plans an action, replacing the one planned under the same name."""

        def due() -> None:
            del task.planned[what]
            action(*args)

        self.cancel(task, what)
        task.planned[what] = self.loop.call_later(secs, due)

    def cancel(self, task: Task, *names: str) -> None:
        """Cancels the actions planned under these names."""
        for what in names:
            if what in task.planned:
                task.planned.pop(what).cancel()

    def reap(self, task: Task) -> bool:
        """Whether a task's process has just ended."""
        exit_code = task.poll()
        if exit_code is not None:
            self.on_end(task, exit_code)
        return exit_code is not None

    def _reap_all(self) -> None:
        for task in self.tasks.values():
            self.reap(task)
        if self.fork_server:
            self.fork_server.reap()
        reap_orphans({task.pid for task in self.tasks.values()})

    def _all_are_dead(self) -> bool:
        for task in self.tasks.values():
            task.poll()
        return all(task.pid is None for task in self.tasks.values())

    def kill_all(self) -> None:
        """Kills every task and waits until all are gone."""
        if self.fork_server:
            self.fork_server.close()
        for task in self.tasks.values():
            self.cancel(task, *list(task.planned))
            task.stop(signal.SIGKILL)
        wait_until(self._all_are_dead, "every task to die")
        for holder in self._ports:
            holder.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for the effect of a signal; raises RuntimeError if it has none."""
    if not wait_for(condition, PROOF_SECS, poll_secs=0.002):
        raise RuntimeError(f"Waited {PROOF_SECS:g} s in vain for {what}.")

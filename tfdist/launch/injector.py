"""The process between `LocalCluster` and the tasks, whose parent it is.

It runs in the cluster's network, so that its caller need not; it has one
thread, so that it can fork; and it kills all processes that the tasks started,
even if its caller was killed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from tfdist.cluster.spec import Cluster
from tfdist.launch import network, processes
from tfdist.launch.faults import NotRunningError
from tfdist.launch.processes import Task, describe_exit, is_frozen
from tfdist.launch.supervisor import Supervisor, wait_until, wants_restart

T = TypeVar("T")


@dataclass(frozen=True)
class Status:
    """The status of a task; see `Task`."""

    port: int
    pid: int | None
    pids: tuple[int, ...]
    exit_codes: tuple[int, ...]
    is_over: bool

    def __str__(self) -> str:
        if not self.pids:
            return "never started"
        if self.pid is not None:
            return f"pid {self.pid}" + (", frozen" * is_frozen(self.pid))
        ended = describe_exit(self.exit_codes[-1])
        return ended if self.is_over else f"{ended}, to be started again"


class Injector(Supervisor):
    """Supervises the tasks and injects the faults that its caller requests.

    `caller` sends (method, arguments) and receives the result. The methods
    under "Requests" are documented in `LocalCluster`; a fault returns a process
    id and the proof of its effect.
    """

    def __init__(self, caller: Connection) -> None:
        super().__init__()
        self._caller, self.caller_has_gone = caller, False
        # Delays of single tasks; the second, set by a fault, apply only once.
        self._restart_secs: dict[str, float | None] = {}
        self._down_secs: dict[str, float | None] = {}
        self._private = False
        self._mend: asyncio.TimerHandle | None = None
        self._job_is_over = False

    def begin(self) -> None:
        """Starts listening to the caller."""
        self.loop.add_reader(self._caller.fileno(), self._answer)

    def _answer(self) -> None:
        try:
            method, args = self._caller.recv()
            try:
                answer = getattr(self, method)(*args)
            except Exception as error:  # The caller raises it.
                answer = error
            self._caller.send(answer)
        except (EOFError, ConnectionError):
            self.caller_has_gone = True
            self.loop.stop()

    def on_end(self, task: Task, exit_code: int) -> None:
        """Plans the restart of a task that ended, if it is to restart."""
        self.cancel(task, "resume", "kill")
        pause = self._down_secs.pop(task.name, None)
        if wants_restart(task.job, exit_code):
            if pause is None and not self._job_is_over:
                pause = self._restart_secs.get(task.name, self._default)
        elif task.name == "chief:0":
            self._job_is_over = True
            for other in self.tasks.values():
                self.cancel(other, "restart")
        if pause is not None:
            self.restart_later(task, pause)

    # --- Requests ------------------------------------------------------------

    def set_up(
        self,
        tasks: Sequence[tuple[str, int]],
        command: Sequence[str],
        absent: Sequence[str],
        restart_secs: float | None,
        private: bool,
        log_dir: Path,
    ) -> str:
        """Starts the cluster; returns why its network is not private, or ""."""
        self._command, self._log_dir = command, log_dir
        self._default = restart_secs
        refusal = ""
        if private:
            try:
                network.enter_private_network()
                self._private = True
            except OSError as error:
                refusal = str(error)
        for job, index in tasks:
            self._add(Task(job, index, command))
        self._cluster = self.place_tasks()
        self.start_fork_server(command)
        late = list(map(self._task, absent))
        for task in self.tasks.values():
            if task not in late:
                self.start(task)
        return refusal

    def add_task(
        self, job: str, address_of: str | None, command: Sequence[str] | None
    ) -> str:
        """Starts a task that is not in the spec; returns its name."""
        index = sum(task.job == job for task in self.tasks.values())
        task = Task(job, index, command or self._command)
        address = self.reserve_port(task)
        if address_of is not None:
            task.port = self._task(address_of).port
            address = f"127.0.0.1:{task.port}"
        jobs = json.loads(self._cluster.tf_config())["cluster"]
        alone = job in ("chief", "evaluator")
        jobs[job] = [*([] if alone else jobs.get(job, [])), address]
        cluster = Cluster.from_jobs(jobs, "chief", 0)
        task.tf_config = cluster.tf_config(job, len(jobs[job]) - 1)
        self._add(task)
        self.start(task)
        return task.name

    def _add(self, task: Task) -> None:
        path = self._log_dir / log_name(task.name)
        task.stdout = path.open("wb", buffering=0)
        self.tasks[task.name] = task

    def status(self) -> dict[str, Status]:
        """The status of every task."""
        return {name: _status(task) for name, task in self.tasks.items()}

    def start_task(self, name: str) -> int:
        """Starts a task that is down; returns its process id."""
        task = self._task(name)
        if task.pid is not None:
            raise RuntimeError(f"{name} runs already, pid {task.pid}.")
        self.start(task)
        return task.pids[-1]

    def kill(self, name: str, for_secs: float | None = None) -> tuple[int, str]:
        """Sends SIGKILL; returns once the process is reaped."""
        task, pid = self._running(name)
        self._down_secs[name] = for_secs
        task.signal(signal.SIGKILL)
        wait_until(lambda: self.reap(task), f"{name} (pid {pid}) to die")
        ended = describe_exit(task.exit_codes[-1])
        if ended != "SIGKILL":  # It ended before the signal arrived.
            raise NotRunningError(f"{name} has just ended by itself: {ended}.")
        return pid, ended

    def freeze(self, name: str, for_secs: float | None) -> tuple[int, str]:
        """Sends SIGSTOP; returns once every thread is stopped."""
        task, pid = self._running(name)
        if is_frozen(pid):
            raise NotRunningError(f"{name} (pid {pid}) is frozen already.")
        task.signal(signal.SIGSTOP)
        what = f"{name} (pid {pid}) to stop"
        wait_until(lambda: is_frozen(pid) or self.reap(task), what)
        self._running(name)  # It may have ended at the same moment.
        if for_secs is not None:
            self.plan(task, "resume", for_secs, task.signal, signal.SIGCONT)
        return pid, "every thread stopped"

    def resume(self, name: str) -> tuple[int, str]:
        """Sends SIGCONT; returns once the task is running."""
        task, pid = self._running(name)
        self.cancel(task, "resume")
        task.signal(signal.SIGCONT)
        wait_until(lambda: not is_frozen(pid), f"{name} (pid {pid}) to go on")
        return pid, "no thread stopped"

    def terminate(
        self, name: str, grace_secs: float, for_secs: float | None
    ) -> tuple[int, int]:
        """Sends SIGTERM; returns the process id and the number of past ends."""
        task, pid = self._running(name)
        self._down_secs[name] = for_secs
        self.plan(task, "kill", grace_secs, task.signal, signal.SIGKILL)
        task.signal(signal.SIGTERM)
        return pid, len(task.exit_codes)

    def set_restart_secs(self, name: str, restart_secs: float | None) -> None:
        """Overrides the cluster's `restart_secs` for a task."""
        task = self._task(name)
        self._restart_secs[name] = restart_secs
        if restart_secs is None:
            self.cancel(task, "restart")

    def cut_network(self, for_secs: float) -> tuple[None, str]:
        """Takes the loopback interface down for `for_secs` seconds."""
        if not self._private:
            raise RuntimeError(
                "The cluster is in the host's network, where cutting it would "
                "cut off everything else on this machine. It needs a system "
                'that grants a private one (network="private", the default).'
            )
        if self._mend is not None:
            self._mend.cancel()
        network.set_loopback(up=False)
        wait_until(lambda: not _loopback_works(), "the network to go down")
        self._mend = self.loop.call_later(
            for_secs, lambda: network.set_loopback(up=True)
        )
        return None, "a datagram is lost"

    def close(self) -> dict[str, Status]:
        """Kills and reaps all descendants; returns the last status."""
        self.loop.stop()
        self.kill_all()
        return self.status()

    # --- Inside --------------------------------------------------------------

    def kill_all(self) -> None:
        """Kills the tasks and any processes that left their sessions."""
        super().kill_all()
        processes.kill_children()

    def _task(self, name: str) -> Task:
        return find_task(self.tasks, name)

    def _running(self, name: str) -> tuple[Task, int]:
        """Returns a task, which must be running, and its process id."""
        task = self._task(name)
        self.reap(task)
        if task.pid is None:
            raise NotRunningError(f"{name} is not running: {_status(task)}.")
        return task, task.pid


def find_task(tasks: Mapping[str, T], name: str) -> T:
    """The entry of a task; if missing, raises a ValueError that lists all."""
    if name not in tasks:
        raise ValueError(
            'Argument `task` must be a "job:index" of this cluster, one of '
            f"{', '.join(tasks)}. Received: task={name!r}"
        )
    return tasks[name]


def log_name(task: str) -> str:
    """The name of the file with a task's output."""
    return f"{task.replace(':', '-')}.log"


def _status(task: Task) -> Status:
    codes, over = tuple(task.exit_codes), bool(task.pids) and task.is_over
    return Status(task.port, task.pid, tuple(task.pids), codes, over)


def _loopback_works() -> bool:
    """Whether a datagram from a socket to itself arrives."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mirror:
        mirror.bind(("127.0.0.1", 0))
        mirror.settimeout(0.1)
        mirror.sendto(b"?", mirror.getsockname())
        try:
            return mirror.recv(1) == b"?"
        except TimeoutError:
            return False


def serve(fd: str, *temporary: str) -> None:
    """Runs the injector; removes `temporary` if the caller was killed."""
    processes.adopt_orphans()
    with Connection(int(fd)) as caller:
        injector = Injector(caller)
        injector.run()
    for directory in temporary if injector.caller_has_gone else ():
        shutil.rmtree(directory, ignore_errors=True)

"""The process between `LocalCluster` and the tasks: their parent.

It lives in the cluster's network, so that its caller need not, and it has one
thread, so that it can fork.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tfdist.cluster.spec import Cluster
from tfdist.launch import network, processes
from tfdist.launch.logs import log_name
from tfdist.launch.processes import Task, how_it_ended, is_frozen
from tfdist.launch.supervisor import (
    Supervisor,
    Verdict,
    restart_decision,
    wait_until,
)

_CLOSE_SECS = 30.0


class NotRunningError(RuntimeError):
    """A fault was to be injected into a task that is dead or frozen already."""


def unknown_task(task: object, known: Iterable[str]) -> ValueError:
    """The error of a request for a task that is not there."""
    return ValueError(
        f'Argument `task` must be a "job:index" of this cluster, one of '
        f"{', '.join(known)}. Received: task={task!r}"
    )


@dataclass(frozen=True)
class Status:
    """What is known of a task; see `Task`."""

    port: int
    pids: tuple[int, ...]
    exit_codes: tuple[int, ...]
    is_over: bool

    @property
    def pid(self) -> int | None:
        """The process id; None while it is down."""
        running = len(self.pids) > len(self.exit_codes)
        return self.pids[-1] if running else None

    def in_words(self) -> str:
        """The state, for an error."""
        if not self.pids:
            return "never started"
        if self.pid is not None:
            return f"pid {self.pid}" + (", frozen" * is_frozen(self.pid))
        ended = how_it_ended(self.exit_codes[-1])
        return ended if self.is_over else f"{ended}, to be started again"


def _status(task: Task) -> Status:
    return Status(
        port=task.port,
        pids=tuple(task.pids),
        exit_codes=tuple(task.exit_codes),
        is_over=bool(task.pids) and task.is_over,
    )


class Injector(Supervisor):
    """Supervises the tasks, and does to them what its caller asks for.

    The public methods below are the requests; a fault returns a process id and
    the proof of its effect.

    Args:
        caller: Sends (number, method, arguments), gets (number, answer).
    """

    def __init__(self, caller: connection.Connection) -> None:
        super().__init__()
        self._caller = caller
        # Of the tasks that have their own.
        self._restart_secs: dict[str, float | None] = {}
        # For the next end alone, where a fault said so.
        self._down_secs: dict[str, float | None] = {}
        self._private = False
        self._mend: list[asyncio.TimerHandle] = []
        self._job_is_over = False

    def begin(self) -> None:
        """Listens to the caller."""
        self.loop.add_reader(self._caller.fileno(), self._answer)

    def _answer(self) -> None:
        try:
            number, method, args = self._caller.recv()
        except (EOFError, ConnectionError):  # The caller has gone.
            self.loop.stop()
            return
        try:
            answer = getattr(self, method)(*args)
        except Exception as error:  # For the caller to raise.
            answer = error
        self._caller.send((number, answer))

    def on_signal(self, signum: signal.Signals) -> None:
        """Kills all tasks, and ends."""
        self.loop.stop()

    def on_end(self, task: Task, exit_code: int) -> None:
        """Plans what follows the end of a task."""
        self.cancel(task, "resume", "kill")
        decision = restart_decision(task.job, exit_code, 0, 1)
        pause = self._down_secs.pop(task.name, None)
        if decision is Verdict.END_JOB and task.name == "chief:0":
            self._job_is_over = True
            for other in self.tasks.values():
                self.cancel(other, "restart")
        if pause is None and decision is Verdict.RESTART:
            pause = None if self._job_is_over else self._restart_secs[task.name]
        if pause is not None:
            self.restart_later(task, pause)

    def start(self, task: Task) -> None:
        """Starts a task; a first chief begins the job."""
        if task.name == "chief:0":
            self._job_is_over = False
        super().start(task)

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
        """Starts the cluster; returns why it has no private network."""
        self._command, self._log_dir = command, log_dir
        self._default_restart_secs = restart_secs
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
        for name in absent:
            self._task(name)
        for name, task in self.tasks.items():
            if name not in absent:
                self.start(task)
        return refusal

    def add_task(
        self, job: str, address_of: str | None, command: Sequence[str] | None
    ) -> str:
        """Starts a task beside the spec; returns its name."""
        index = sum(task.job == job for task in self.tasks.values())
        task = Task(job, index, command or self._command)
        address = self.reserve_port(task)
        if address_of is not None:
            task.port = self._task(address_of).port
            address = f"127.0.0.1:{task.port}"
        self._add(task)
        jobs = json.loads(self._cluster.tf_config())["cluster"]
        alone = job in ("chief", "evaluator")
        jobs[job] = [*([] if alone else jobs.get(job, [])), address]
        cluster = Cluster.from_jobs(jobs, "chief", 0)
        task.tf_config = cluster.tf_config(job, len(jobs[job]) - 1)
        self.start(task)
        return task.name

    def _add(self, task: Task) -> None:
        path = self._log_dir / log_name(task.name)
        path.write_bytes(b"")
        task.stdout = path.open("ab")
        self.tasks[task.name] = task
        self._restart_secs[task.name] = self._default_restart_secs

    def status(self) -> dict[str, Status]:
        """What is known of every task."""
        return {name: _status(task) for name, task in self.tasks.items()}

    def start_task(self, name: str) -> int:
        """Starts a task that is down; returns its process id."""
        task = self._task(name)
        if task.pid is not None:
            raise RuntimeError(f"{name} runs already, pid {task.pid}.")
        self.start(task)
        return task.pids[-1]

    def kill(self, name: str, for_secs: float | None = None) -> tuple[int, str]:
        """SIGKILL, until the process is reaped."""
        task, pid = self._running(name)
        self._down_secs[name] = for_secs
        task.signal(signal.SIGKILL)
        wait_until(lambda: self.reap(task), f"{name} (pid {pid}) to die")
        ended = how_it_ended(task.exit_codes[-1])
        if ended != "SIGKILL":  # It was quicker.
            raise NotRunningError(f"{name} has just ended by itself: {ended}.")
        return pid, ended

    def freeze(self, name: str, for_secs: float | None) -> tuple[int, str]:
        """SIGSTOP, until every thread stands still."""
        task, pid = self._running(name)
        if is_frozen(pid):
            raise NotRunningError(f"{name} (pid {pid}) is frozen already.")
        task.signal(signal.SIGSTOP)
        wait_until(
            lambda: is_frozen(pid) or self.reap(task),
            f"{name} (pid {pid}) to stop",
        )
        self._running(name)  # It may have ended at the same moment.
        if for_secs is not None:
            self.plan(task, "resume", for_secs, task.signal, signal.SIGCONT)
        return pid, "every thread stopped"

    def resume(self, name: str) -> tuple[int, str]:
        """SIGCONT, until it goes on."""
        task, pid = self._running(name)
        self.cancel(task, "resume")
        task.signal(signal.SIGCONT)
        wait_until(lambda: not is_frozen(pid), f"{name} (pid {pid}) to go on")
        return pid, "no thread stopped"

    def terminate(
        self, name: str, grace_secs: float, for_secs: float | None
    ) -> tuple[int, int]:
        """SIGTERM; returns the process id and how many ended before it."""
        task, pid = self._running(name)
        self._down_secs[name] = for_secs
        self.plan(task, "kill", grace_secs, task.signal, signal.SIGKILL)
        task.signal(signal.SIGTERM)
        return pid, len(task.exit_codes)

    def restart(self, name: str) -> tuple[int | None, str]:
        """`kill` if it runs, and `start`."""
        task, before = self._task(name), None
        if task.pid is not None:
            before, _ = self.kill(name)
        self.start(task)
        return before, f"pid {before} became pid {task.pid}"

    def set_restart_secs(self, name: str, restart_secs: float | None) -> None:
        """See `LocalCluster`."""
        self._restart_secs[self._task(name).name] = restart_secs
        if restart_secs is None:
            self.cancel(self.tasks[name], "restart")

    def cut_network(self, for_secs: float | None) -> tuple[None, str]:
        """Takes loopback down."""
        if not self._private:
            raise RuntimeError(
                "The cluster is in the host's network, where cutting it would "
                "cut off everything else on this machine. It needs a system "
                'that grants a private one (network="private", the default).'
            )
        network.set_loopback(up=False)
        wait_until(lambda: not _loopback_works(), "the network to go down")
        if for_secs is not None:
            self._mend.append(self.loop.call_later(for_secs, self.mend_network))
        return None, "a datagram is lost"

    def mend_network(self) -> tuple[None, str]:
        """Brings loopback up."""
        while self._mend:
            self._mend.pop().cancel()
        if self._private:
            network.set_loopback(up=True)
        wait_until(_loopback_works, "the network to come up")
        return None, "a datagram arrives"

    def close(self) -> dict[str, Status]:
        """Kills and reaps all descendants; returns the last status."""
        self.loop.stop()
        self.kill_all()
        return self.status()

    # --- Inside --------------------------------------------------------------

    def kill_all(self) -> None:
        """Kills also what the tasks have left running elsewhere."""
        super().kill_all()
        processes.kill_children()

    def _task(self, name: str) -> Task:
        if name not in self.tasks:
            raise unknown_task(name, self.tasks)
        return self.tasks[name]

    def _running(self, name: str) -> tuple[Task, int]:
        """A task, which must run, and its process id."""
        task = self._task(name)
        self.reap(task)
        if task.pid is None:
            raise NotRunningError(
                f"{name} is not running: {_status(task).in_words()}."
            )
        return task, task.pid


def _loopback_works() -> bool:
    """Whether a datagram to this very socket arrives."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mirror:
        mirror.bind(("127.0.0.1", 0))
        mirror.settimeout(0.1)
        mirror.sendto(b"?", mirror.getsockname())
        try:
            return mirror.recv(1) == b"?"
        except TimeoutError:
            return False


class InjectorProcess:
    """Starts a process with an `Injector`, and has requests answered by it.

    It ends, and with it all tasks, when the process that made it has ended.

    Args:
        cwd: Its working directory, and that of the tasks.
        log: File of what it says.

    Attributes:
        process: The process.
    """

    def __init__(self, cwd: str | os.PathLike[str] | None, log: Path) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._requests = 0
        # Without a preexec_fn, so safe whatever threads the caller has; in a
        # session of its own, so that Ctrl-C is the caller's to act on.
        path = [os.path.abspath(entry) for entry in sys.path]
        self._connection, theirs = multiprocessing.Pipe()
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            "from tfdist.launch.injector import serve; serve(int(sys.argv[1]))"
        )
        with theirs, log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def ask(self, method: str, *args: Any) -> Any:
        """Calls a method of the `Injector`; raises what it raised."""
        with self._lock:
            self._requests += 1
            try:
                self._connection.send((self._requests, method, args))
                # An interrupted caller may have left an older answer unread.
                number = None
                while number != self._requests:
                    number, answer = self._connection.recv()
            except (EOFError, OSError) as error:
                raise RuntimeError(
                    "The cluster is closed, or its supervising process has "
                    f"died. It said: {self._said()}"
                ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """Waits for the end of the process, after a request to `close`.

        Raises:
            RuntimeError: It failed.
        """
        self._connection.close()
        try:
            code = self.process.wait(_CLOSE_SECS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # The kernel then kills its children.
            code = self.process.wait()
        if code:
            raise RuntimeError(
                f"The supervising process ended with {how_it_ended(code)}. "
                f"It said: {self._said()}"
            )

    def _said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


def serve(fd: int) -> None:
    """What that process runs."""
    processes.adopt_orphans()
    with connection.Connection(fd) as caller:
        Injector(caller).run()

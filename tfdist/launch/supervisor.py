"""The process between `tfdist.launch.testing` and the tasks: their parent.

It lives in the cluster's network, so that its caller need not, and it has one
thread, so that it can fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path

from tfdist.cluster.spec import Cluster
from tfdist.launch import processes
from tfdist.launch.command import Verdict, restart_decision
from tfdist.launch.processes import STOP_SIGNALS, SignalPipe, Task, how_it_ended

PROOF_SECS = 10.0
"""For a signal to have its effect."""


class NotRunningError(RuntimeError):
    """A fault was to be injected into a task that is dead or frozen already."""


def log_name(task: str) -> str:
    """The file of a task's output."""
    return f"{task.replace(':', '-')}.log"


def unknown_task(task: object, known: Sequence[str]) -> ValueError:
    """The error of whoever asks for a task that is not there."""
    return ValueError(
        f'Argument `task` must be a "job:index" of this cluster, one of '
        f"{', '.join(known)}. Received: task={task!r}"
    )


@dataclass(frozen=True)
class Status:
    """What the supervisor knows of a task.

    Attributes:
        port: where it listens.
        pids: of all its processes, the oldest first.
        exit_codes: of those that have ended.
        is_over: whether it has run, is down, and waits for no restart.
    """

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
            return f"pid {self.pid}" + (", frozen" * _is_frozen(self.pid))
        ended = how_it_ended(self.exit_codes[-1])
        return ended if self.is_over else f"{ended}, to be started again"


@dataclass
class _Member:
    """A task, and what is to happen to it (`time.monotonic`, or None).

    Attributes:
        task: the task.
        restart_secs: the pause before it is started again; None: it is not.
        down_secs: the same for its next end alone, where an injector said so.
        resume_at: when it is to go on.
        kill_at: when its grace period ends.
        pids: of all its processes.
        exit_codes: of those that have ended.
    """

    task: Task
    restart_secs: float | None
    down_secs: float | None = None
    resume_at: float | None = None
    kill_at: float | None = None
    pids: list[int] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.task.start()
        self.pids.append(self.task.pid)

    def signal(self, signum: signal.Signals) -> None:
        os.killpg(self.task.pid, signum)

    def status(self) -> Status:
        return Status(
            port=self.task.port,
            pids=tuple(self.pids),
            exit_codes=tuple(self.exit_codes),
            is_over=bool(self.pids) and self.task.is_over,
        )


class Supervisor:
    """The parent of the tasks: one process, one thread, one loop.

    Its public methods are what `LocalCluster` asks for; the injectors among
    them return a process id and the proof of their effect.
    """

    def __init__(self, caller: connection.Connection) -> None:
        self._connection = caller
        self._members: dict[str, _Member] = {}
        self._jobs: dict[str, list[str]] = {}
        self._holders: list[socket.socket] = []
        self._private = False
        self._mend_at: float | None = None
        self._job_is_over = False
        self._closed = False

    def serve(self) -> None:
        """Acts on requests and on ends of tasks, until `close`."""
        with SignalPipe() as signals:
            try:
                while not self._closed:
                    ready = connection.wait(
                        [self._connection, signals], self._secs_to_wait()
                    )
                    came = signals.read() if signals in ready else ()
                    if set(STOP_SIGNALS).intersection(came):
                        break
                    self._act()
                    if self._connection in ready:
                        self._answer()
            except (EOFError, ConnectionError):
                pass  # The caller has gone.
            finally:
                self.close()

    def _answer(self) -> None:
        number, method, args = self._connection.recv()
        try:
            answer = getattr(self, method)(*args)
        except Exception as error:  # For the caller to raise.
            answer = error
        self._connection.send((number, answer))

    # --- Requests ------------------------------------------------------------

    def set_up(
        self,
        command: list[str],
        counts: dict[str, int],
        absent: tuple[str, ...],
        restart_secs: float | None,
        private: bool,
        log_dir: Path,
    ) -> str:
        """Starts the cluster; returns why it has no private network."""
        self._command, self._restart_secs = command, restart_secs
        self._log_dir = log_dir
        refusal = ""
        if private:
            try:
                processes.enter_private_network()
                self._private = True
            except OSError as error:
                refusal = str(error)
        for job, count in counts.items():
            for index in range(count):
                member = self._add(job, index, command)
                self._jobs.setdefault(job, []).append(_address(member))
        cluster = Cluster.from_jobs(self._jobs, "chief", 0)
        for name in absent:
            if name not in self._members:
                raise unknown_task(name, list(self._members))
        for name, member in self._members.items():
            task = member.task
            task.tf_config = cluster.tf_config(task.job, task.index)
            if name not in absent:
                member.start()
        return refusal

    def add_task(
        self, job: str, address_of: str | None, command: list[str] | None
    ) -> str:
        """Starts a task beside the spec; returns its name."""
        same = None if address_of is None else self._member(address_of)
        index = sum(m.task.job == job for m in self._members.values())
        member = self._add(job, index, command or self._command)
        if same is not None:
            member.task.port = same.task.port
        alone = job in ("chief", "evaluator")
        others = [] if alone else self._jobs.get(job, [])
        jobs = {**self._jobs, job: [*others, _address(member)]}
        cluster = Cluster.from_jobs(jobs, "chief", 0)
        member.task.tf_config = cluster.tf_config(job, len(others))
        member.start()
        return member.task.name

    def _add(self, job: str, index: int, command: list[str]) -> _Member:
        task = Task(job, index, command)
        (holder,) = processes.reserve_ports(1)
        self._holders.append(holder)
        task.port = holder.getsockname()[1]
        path = self._log_dir / log_name(task.name)
        path.write_bytes(b"")
        task.stdout = path.open("ab")
        member = _Member(task, self._restart_secs)
        self._members[task.name] = member
        return member

    def status(self) -> dict[str, Status]:
        """What is known of every task."""
        return {name: m.status() for name, m in self._members.items()}

    def start(self, name: str) -> int:
        """Starts a task that is down; returns its process id."""
        member = self._member(name)
        if member.task.pid is not None:
            raise RuntimeError(f"{name} runs already, pid {member.task.pid}.")
        self._start(member)
        return member.task.pid

    def kill(self, name: str, for_secs: float | None = None) -> tuple[int, str]:
        """SIGKILL, until the process is reaped."""
        member = self._running(name)
        pid, member.down_secs = member.task.pid, for_secs
        member.signal(signal.SIGKILL)
        _wait_until(lambda: self._reap(member), f"{name} (pid {pid}) to die")
        ended = how_it_ended(member.exit_codes[-1])
        if ended != "SIGKILL":  # It was quicker.
            raise NotRunningError(f"{name} has just ended by itself: {ended}.")
        return pid, ended

    def freeze(self, name: str, for_secs: float | None) -> tuple[int, str]:
        """SIGSTOP, until every thread stands still."""
        member = self._running(name)
        pid = member.task.pid
        if _is_frozen(pid):
            raise NotRunningError(f"{name} (pid {pid}) is frozen already.")
        member.signal(signal.SIGSTOP)
        _wait_until(
            lambda: _is_frozen(pid) or self._reap(member),
            f"{name} (pid {pid}) to stop",
        )
        self._running(name)  # It may have ended at the same moment.
        if for_secs is not None:
            member.resume_at = time.monotonic() + for_secs
        return pid, "every thread stopped"

    def resume(self, name: str) -> tuple[int, str]:
        """SIGCONT, until it goes on."""
        member = self._running(name)
        pid = member.task.pid
        member.resume_at = None
        member.signal(signal.SIGCONT)
        _wait_until(lambda: not _is_frozen(pid), f"{name} (pid {pid}) to go on")
        return pid, "no thread stopped"

    def terminate(
        self, name: str, grace_secs: float, for_secs: float | None
    ) -> tuple[int, int]:
        """SIGTERM; returns the process id and how many ended before it."""
        member = self._running(name)
        member.down_secs = for_secs
        member.kill_at = time.monotonic() + grace_secs
        member.signal(signal.SIGTERM)
        return member.task.pid, len(member.exit_codes)

    def restart(self, name: str) -> tuple[int | None, str]:
        """`kill` if it runs, and `start`."""
        member = self._member(name)
        before = None
        if member.task.pid is not None:
            before, _ = self.kill(name)
        self._start(member)
        return before, f"pid {before} became pid {member.task.pid}"

    def set_restart_secs(self, name: str, restart_secs: float | None) -> None:
        """See `LocalCluster`."""
        member = self._member(name)
        member.restart_secs = restart_secs
        if restart_secs is None:
            member.task.restart_at = None

    def cut_network(self, for_secs: float | None) -> tuple[None, str]:
        """Takes loopback down."""
        if not self._private:
            raise RuntimeError(
                "The cluster is in the host's network, where cutting it would "
                "cut off everything else on this machine. It needs a system "
                'that grants a private one (network="private", the default).'
            )
        processes.set_loopback(up=False)
        _wait_until(lambda: not _loopback_works(), "the network to go down")
        if for_secs is not None:
            self._mend_at = time.monotonic() + for_secs
        return None, "a datagram is lost"

    def mend_network(self) -> tuple[None, str]:
        """Brings loopback up."""
        self._mend_at = None
        if self._private:
            processes.set_loopback(up=True)
        _wait_until(_loopback_works, "the network to come up")
        return None, "a datagram arrives"

    def close(self) -> dict[str, Status]:
        """Kills and reaps all descendants; returns the last status."""
        self._closed = True
        for member in self._members.values():
            if member.task.pid is not None:
                member.signal(signal.SIGKILL)
        for name, member in self._members.items():
            if member.task.pid is not None:
                _wait_until(lambda m=member: self._reap(m), f"{name} to die")
            member.task.restart_at = None
        _kill_children()
        return self.status()

    # --- Inside --------------------------------------------------------------

    def _member(self, name: str) -> _Member:
        if name not in self._members:
            raise unknown_task(name, list(self._members))
        return self._members[name]

    def _running(self, name: str) -> _Member:
        member = self._member(name)
        self._reap(member)
        if member.task.pid is None:
            raise NotRunningError(
                f"{name} is not running: {member.status().in_words()}."
            )
        return member

    def _start(self, member: _Member) -> None:
        if member.task.name == "chief:0":
            self._job_is_over = False
        member.task.restarts += bool(member.pids)
        member.start()

    def _reap(self, member: _Member) -> bool:
        """Whether the task's process has just ended; plans what follows."""
        task = member.task
        exit_code = task.poll()
        if exit_code is None:
            return False
        member.exit_codes.append(exit_code)
        failed = restart_decision(task.job, exit_code, 0, 1) is Verdict.RESTART
        pause = member.down_secs
        if pause is None and failed and not self._job_is_over:
            pause = member.restart_secs
        if task.name == "chief:0" and not failed:
            self._job_is_over = True
            for other in self._members.values():
                other.task.restart_at = None
        if pause is not None and not self._closed:
            task.restart_at = time.monotonic() + pause
        member.down_secs = member.resume_at = member.kill_at = None
        return True

    def _secs_to_wait(self) -> float | None:
        """Seconds until something is due; None when only events matter."""
        due = [self._mend_at]
        for member in self._members.values():
            due += [member.task.restart_at, member.resume_at, member.kill_at]
        due = [when for when in due if when is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _act(self) -> None:
        """Reaps what has ended, does what is due."""
        for member in self._members.values():
            self._reap(member)
            if _is_due(member.resume_at):
                member.resume_at = None
                member.signal(signal.SIGCONT)
            if _is_due(member.kill_at):
                member.kill_at = None
                member.signal(signal.SIGKILL)
            if _is_due(member.task.restart_at):
                self._start(member)
        if _is_due(self._mend_at):
            self.mend_network()


def supervise(fd: int) -> None:
    """What the supervising process runs."""
    processes.adopt_orphans()
    with connection.Connection(fd) as caller:
        Supervisor(caller).serve()


def _address(member: _Member) -> str:
    return f"127.0.0.1:{member.task.port}"


def _is_due(when: float | None) -> bool:
    return when is not None and when <= time.monotonic()


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits for the effect of an injection."""
    deadline = time.monotonic() + PROOF_SECS
    while not condition():
        if time.monotonic() >= deadline:
            raise RuntimeError(f"Waited {PROOF_SECS:g} s in vain for {what}.")
        time.sleep(0.002)


def _is_frozen(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        return {_stat(thread)[0] for thread in threads} == {"T"}
    except (FileNotFoundError, ProcessLookupError):  # One has just ended.
        return False


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


def _kill_children() -> None:
    """Kills the children of this process until there are none.

    Their own children become ours when they die.
    """
    while True:
        for pid, parent, _ in all_processes():
            if parent == os.getpid():
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def all_processes() -> Iterator[tuple[int, int, int]]:
    """Id, parent and session of all processes that can be seen."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                _, parent, _, session = _stat(entry)[:4]
                yield int(entry.name), int(parent), int(session)


def _stat(entry: Path) -> list[str]:
    """State, parent, group, session, ... of a process or thread."""
    # The name in parentheses may hold anything, also parentheses.
    return (entry / "stat").read_text().rpartition(")")[2].split()

"""A task as a process: its environment, its output, its end.

Linux only: a task cannot outlive its launcher, nor its children the task.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import time
from asyncio import TimerHandle
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import IO

from tfdist.launch.banner import BANNER

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

# Loaded here, because a forked child must not load anything before its exec.
_libc = ctypes.CDLL(None, use_errno=True)

_MAX_LINE = 1 << 16  # Bytes; longer lines are cut.

PS_JOB_ENV = {"GRPC_FAIL_FAST": "use_caller"}
"""What TensorFlow recommends for every task of a job with servers."""

# Asks glibc for huge pages: a step touches rows all over a large table, and
# with small pages each costs a walk through page tables that fit no cache.
PS_ENV = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when process `parent` dies.

    To be called in a forked child, before its exec. The kernel looks at the
    parent's *thread*, so the parent must fork from its main thread.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the kernel was told.
        os.kill(os.getpid(), signal.SIGKILL)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Starts a process that ends with this one, from the main thread.

    Not where gRPC has run: what it does in a fork may kill that.
    """
    launcher = os.getpid()
    return subprocess.Popen(
        command,
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,  # So that its own children go with it.
        preexec_fn=lambda: die_with_parent(launcher),
    )


def adopt_orphans(adopt: bool = True) -> None:
    """Has the kernel give this process the orphans among its descendants.

    So it can find and kill also a daemon that left the session of its task.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def name_process(name: str) -> None:
    """Has `top` and `ps -o comm` show the name, of at most 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode())


def how_it_ended(exit_code: int) -> str:
    """An exit code of `subprocess` in words.

    >>> how_it_ended(3), how_it_ended(-9)
    ('exit code 3', 'SIGKILL')
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # A real-time signal.
        return f"signal {-exit_code}"


class LineCutter:
    """Cuts output into lines; of one with carriage returns, the last state.

    With `drop_banner`, what TensorFlow prints while it is loaded is left out.
    """

    def __init__(self, drop_banner: bool = False) -> None:
        self._drop_banner = drop_banner
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Takes what was read; returns the lines complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._drop_banner:
            lines = [line for line in lines if not BANNER.match(line)]
        if len(self._rest) > _MAX_LINE:
            lines, self._rest = [*lines, self._rest], b""
        return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]

    def flush(self) -> list[bytes]:
        """Returns the unterminated line at the end, if there is one."""
        return self.feed(b"\n") if self._rest else []


def task_environment(job: str) -> dict[str, str]:
    """What the processes of a job have, but for their `TF_CONFIG`."""
    environment = {
        **PS_JOB_ENV,
        "TF_CPP_MIN_LOG_LEVEL": "3",  # What matters is raised as well.
        **(PS_ENV if job == "ps" else {}),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("CLUSTER_SPEC", None)
    environment.pop("TF_CONFIG", None)
    # gRPC would reach also this machine through a proxy.
    direct = environment.get("no_grpc_proxy") or environment.get("no_proxy")
    addresses = ",".join(filter(None, [direct, "127.0.0.1"]))
    return {**environment, "no_grpc_proxy": addresses}


@dataclasses.dataclass
class Forked:
    """A child process that this one has not spawned, as a `Popen`."""

    pid: int

    def wait(self) -> int:
        """Waits for its end; returns its exit code, -n for signal n."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Task:
    """One process of a cluster, through all its restarts."""

    def __init__(self, job: str, index: int, command: Sequence[str]) -> None:
        self.job, self.index = job, index
        self.name = f"{job}:{index}"
        self.tf_config = ""  # Of its next start.
        self.port = 0  # Where it listens.
        # Where both its streams go; None: to a pipe that `output` reads from.
        self.stdout: IO[bytes] | None = None
        self.output: IO[bytes]
        self.pids: list[int] = []  # The oldest first.
        self.exit_codes: list[int] = []  # -n for signal n.
        self.restarts = 0  # By itself.
        # What is to happen to it, and the timer of that.
        self.planned: dict[str, TimerHandle] = {}
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._stopped = False
        self._started_at = self._began_at = self._ended_at = 0.0

    def start(self, fork: Callable[..., Forked | None] | None = None) -> None:
        """Starts the process, from the launcher's main thread.

        `fork` makes it of command, environment and output; where there is none,
        or it returns None, the process is spawned.
        """
        environment = task_environment(self.job) | {"TF_CONFIG": self.tf_config}
        self._lines = LineCutter(environment["TF_CPP_MIN_LOG_LEVEL"] != "0")
        with contextlib.ExitStack() as stack:
            stdout = self.stdout
            if stdout is None:
                read, write = os.pipe()
                os.set_blocking(read, False)
                self.output = os.fdopen(read, "rb", buffering=0)
                stdout = stack.enter_context(os.fdopen(write, "wb"))
            process = fork(self._command, environment, stdout) if fork else None
            self._process = process or spawn(
                self._command, environment, stdout=stdout
            )
        self._stopped = False
        self._began_at = time.monotonic()
        self._started_at = self._started_at or self._began_at
        self.pids.append(self._process.pid)

    @property
    def pid(self) -> int | None:
        """The process id while the process runs, else None."""
        return self._process.pid if self._process else None

    @property
    def is_over(self) -> bool:
        """Whether the task neither runs nor waits to be started again."""
        return self._process is None and "restart" not in self.planned

    @property
    def lasted_secs(self) -> float:
        """How long the process ran that has ended last."""
        return self._ended_at - self._began_at

    def read(self) -> list[bytes] | None:
        """The lines completed since the last call; None at the end of all."""
        try:
            data = os.read(self.output.fileno(), _MAX_LINE)
        except BlockingIOError:
            return []
        return self._lines.feed(data) if data else None

    def read_rest(self) -> list[bytes]:
        """The last lines of a process that has ended; closes `output`.

        It does not wait for the pipe's end, for a daemon that left the
        process's session may hold it open. One read has all that a pipe holds.
        """
        lines = self.read() or []
        self.output.close()
        return lines + self._lines.flush()

    def poll(self) -> int | None:
        """The exit code, once, when the process has ended; else None.

        What the process left running is killed first, while its id still
        names its group: the process is not reaped before.
        """
        if self._process is None:
            return None
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, self._process.pid, options) is None:
            return None
        self.signal(signal.SIGKILL)
        self.exit_codes.append(self._process.wait())
        self._ended_at = time.monotonic()
        self._process = None
        return self.exit_codes[-1]

    def signal(self, signum: Signals) -> None:
        """Sends a signal to the process, which must run, and its children."""
        assert self._process is not None
        os.killpg(self._process.pid, signum)

    def stop(self, signum: Signals) -> None:
        """Ends the task on the launcher's behalf, as its summary will say."""
        if self._process is not None:
            self._stopped = True
            self.signal(signum)

    def summary(self) -> str:
        """One line: name, how it ended, restarts, seconds."""
        if not self.exit_codes:
            return f"{self.name:<12} never started"
        ended = how_it_ended(self.exit_codes[-1])
        if self._stopped:
            ended = f"ended by launcher ({ended})"
        seconds = self._ended_at - self._started_at
        return (
            f"{self.name:<12} {ended:<32} restarts: {self.restarts:<3} "
            f"seconds: {seconds:.1f}"
        )


def is_frozen(pid: int) -> bool:
    """Whether every thread of a process is stopped."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        return {_stat(thread)[0] for thread in threads} == {"T"}
    except (FileNotFoundError, ProcessLookupError):  # One has just ended.
        return False


def all_processes() -> list[tuple[int, int, int]]:
    """Id, parent and session of all processes that can be seen."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            _, parent, _, session = _stat(entry)[:4]
        except (FileNotFoundError, ProcessLookupError):  # It has just ended.
            continue
        found.append((int(entry.name), int(parent), int(session)))
    return found


def reap_orphans(tasks: Container[int | None]) -> None:
    """Reaps children that have ended, up to the first that is a task's."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, options):
            if ended.si_pid in tasks:
                break
            os.waitpid(ended.si_pid, 0)


def kill_children() -> None:
    """Kills the children of this process until there are none.

    Their own children become ours when they die: see `adopt_orphans`.
    """
    while True:
        for pid, parent, _ in all_processes():
            if parent == os.getpid():
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _stat(entry: Path) -> list[str]:
    """State, parent, group, session, ... of a process or thread."""
    # The name in parentheses may hold anything, also parentheses.
    return (entry / "stat").read_text().rpartition(")")[2].split()

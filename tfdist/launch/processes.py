"""A task as a process: its environment, its output, its end.

Linux only. No task outlives its launcher, and no child outlives its task.
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
"""Variables that TensorFlow recommends for every task of a job with servers."""

# Asks glibc for huge pages: a step reads rows all over a large table, and with
# small pages each costs a walk through page tables that do not fit in a cache.
PS_ENV = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when process `parent` dies.

    Call it in a forked child, before its exec. The kernel watches the parent's
    *thread*, so the parent must fork from its main thread.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the `prctl`.
        os.kill(os.getpid(), signal.SIGKILL)


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Starts, from the main thread, a process that ends with this one.

    Do not call it after gRPC was used: its fork handlers may kill the child.
    """
    launcher = os.getpid()
    return subprocess.Popen(
        command,
        env=environment,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,  # So that its children end with it.
        preexec_fn=lambda: die_with_parent(launcher),
    )


def adopt_orphans(adopt: bool = True) -> None:
    """Makes this process the parent of orphans among its descendants.

    It can then find and kill even a daemon that left its task's session.
    """
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def name_process(name: str) -> None:
    """Sets the name, of at most 15 bytes, in `top` and `ps -o comm`."""
    _libc.prctl(_PR_SET_NAME, name.encode())


def describe_exit(exit_code: int) -> str:
    """Describes an exit code of `subprocess` in words.

    >>> describe_exit(3), describe_exit(-9)
    ('exit code 3', 'SIGKILL')
    """
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # A real-time signal.
        return f"signal {-exit_code}"


class LineCutter:
    """Splits output into lines, each as shown after its carriage returns.

    With `drop_banner`, drops the banner that TensorFlow prints when imported.
    """

    def __init__(self, drop_banner: bool = False) -> None:
        self._drop_banner = drop_banner
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Adds output; returns the lines that are now complete."""
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
    """The environment of the processes of a job, without `TF_CONFIG`."""
    environment = {
        **PS_JOB_ENV,
        "TF_CPP_MIN_LOG_LEVEL": "3",  # Important errors are raised as well.
        **(PS_ENV if job == "ps" else {}),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("CLUSTER_SPEC", None)
    environment.pop("TF_CONFIG", None)
    # gRPC would use a proxy even for this machine.
    direct = environment.get("no_grpc_proxy") or environment.get("no_proxy")
    addresses = ",".join(filter(None, [direct, "127.0.0.1"]))
    return {**environment, "no_grpc_proxy": addresses}


@dataclasses.dataclass
class Forked:
    """A child process from the fork server, with the interface of `Popen`."""

    pid: int

    def wait(self) -> int:
        """Waits for the process; returns its exit code, -n for signal n."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Task:
    """One process of a cluster, through all its restarts."""

    def __init__(self, job: str, index: int, command: Sequence[str]) -> None:
        self.job, self.index = job, index
        self.name = f"{job}:{index}"
        self.tf_config = ""  # For the next start.
        self.port = 0  # On which it listens.
        # Target of stdout and stderr; None: a pipe that `output` reads.
        self.stdout: IO[bytes] | None = None
        self.output: IO[bytes]
        self.pids: list[int] = []  # The oldest first.
        self.exit_codes: list[int] = []  # -n for signal n.
        self.restarts = 0  # Automatic ones only.
        # Timers of planned actions, by name.
        self.planned: dict[str, TimerHandle] = {}
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._stopped = False
        self._started_at = self._began_at = self._ended_at = 0.0

    def start(self, fork: Callable[..., Forked | None] | None = None) -> None:
        """Starts the process, from the launcher's main thread.

        `fork` creates it from command, environment and output; without `fork`,
        or if `fork` returns None, the process is spawned.
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
        """The process id; None if no process is running."""
        return self._process.pid if self._process else None

    @property
    def is_over(self) -> bool:
        """Whether the task neither runs nor waits for a restart."""
        return self._process is None and "restart" not in self.planned

    @property
    def lasted_secs(self) -> float:
        """How long the last process that ended ran."""
        return self._ended_at - self._began_at

    def read(self) -> list[bytes] | None:
        """Returns the lines completed since the last call; None at the end."""
        try:
            data = os.read(self.output.fileno(), _MAX_LINE)
        except BlockingIOError:
            return []
        return self._lines.feed(data) if data else None

    def read_rest(self) -> list[bytes]:
        """Returns the last lines of an ended process; closes `output`.

        Does not wait for the end of the pipe, which a daemon that left the
        process's session may hold open. One read returns all that a pipe holds.
        """
        lines = self.read() or []
        self.output.close()
        return lines + self._lines.flush()

    def poll(self) -> int | None:
        """Returns the exit code, once, if the process has ended; else None.

        Before reaping the process, kills the children that it left running,
        while its id still identifies their group.
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
        """Sends a signal to the running process and its children."""
        assert self._process is not None
        os.killpg(self._process.pid, signum)

    def stop(self, signum: Signals) -> None:
        """Ends the task on behalf of the launcher, as its summary will say."""
        if self._process is not None:
            self._stopped = True
            self.signal(signum)

    def summary(self) -> str:
        """Returns a line with name, exit code or signal, restarts, seconds."""
        if not self.exit_codes:
            return f"{self.name:<12} never started"
        ended = describe_exit(self.exit_codes[-1])
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
    except (FileNotFoundError, ProcessLookupError):  # A thread just ended.
        return False


def all_processes() -> list[tuple[int, int, int]]:
    """Returns id, parent and session of all visible processes."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            _, parent, _, session = _stat(entry)[:4]
        except (FileNotFoundError, ProcessLookupError):  # It just ended.
            continue
        found.append((int(entry.name), int(parent), int(session)))
    return found


def reap_orphans(tasks: Container[int | None]) -> None:
    """Reaps children that have ended, up to the first that is a task."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, options):
            if ended.si_pid in tasks:
                break
            os.waitpid(ended.si_pid, 0)


def kill_children() -> None:
    """Kills the children of this process until there are none.

    This process adopts the children of those it kills: see `adopt_orphans`.
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
    """Returns state, parent, group, session, ... of a process or thread."""
    # The name in parentheses may contain anything, even parentheses.
    return (entry / "stat").read_text().rpartition(")")[2].split()

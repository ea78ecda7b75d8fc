"""The operating system's side of `tfdist.launch`: networks, ports, processes.

TensorFlow's servers authenticate nobody, listen on every interface and execute
any graph they are sent. So a local cluster gets a network of its own (a Linux
network namespace with nothing but a loopback interface), ports that nobody else
is given by chance, and processes that cannot outlive their launcher. Linux
only; nothing here knows what the processes are for.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import re
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

# Loaded here, because a forked child must not load anything before its exec.
_libc = ctypes.CDLL(None, use_errno=True)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROGRESS_SECS = 2.0  # Between the shown states of a progress bar.
_MAX_LINE = 1 << 16  # Bytes; longer lines are cut.

# Asks glibc for huge pages: a step touches rows all over a large table, and
# with small pages each costs a walk through page tables that fit no cache.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

# What TensorFlow prints at its start, before it knows TF_CPP_MIN_LOG_LEVEL, and
# the "error" (303) that this machine has no GPU driver.
_BANNER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I0000 00:00:[0-9.]+ +[0-9]+ [a-z_]+\.cc:[0-9]+\] "
    rb"|E0000 .*Failed call to cuInit: UNKNOWN ERROR \(303\)"
)


def enter_private_network() -> None:
    """Moves this process, and all it starts, into a network of its own.

    Nothing outside can reach a port in there, and nothing inside can reach
    another machine. Needs either privilege or unprivileged user namespaces; in
    the latter case the process keeps its own user and group, and no others.

    Must run before the process starts a thread. There is no way back, so the
    whole recipe is tried in a child first: a system may grant the namespace and
    then refuse to bring up its loopback interface.

    Raises:
        OSError: the system refuses; this process is still where it was.
    """
    recipes = (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET)
    refusals = []
    for flags in recipes:
        refusal = _refusal_in_child(flags)
        if not refusal:
            _unshare_network(flags)
            return
        refusals.append(refusal)
    raise OSError("; ".join(dict.fromkeys(refusals)))


def _unshare_network(flags: int) -> None:
    """Enters the namespaces of `flags` and brings up loopback there."""
    uid, gid = os.geteuid(), os.getegid()
    if not hasattr(_libc, "unshare"):
        raise OSError("this system has no network namespaces")
    if _libc.unshare(flags) != 0:
        raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
    if flags & _CLONE_NEWUSER:
        # The kernel takes a group map from the unprivileged only after this.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    set_loopback(up=True)


def set_loopback(*, up: bool) -> None:
    """Brings this network's loopback interface up, or takes it down.

    For a private network: in another, every local service goes with it.

    Raises:
        OSError: the process may not.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        request = fcntl.ioctl(control, _SIOCGIFFLAGS, request)
        name, flags = struct.unpack("16sh22x", request)
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        request = struct.pack("16sh22x", name, flags)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)


def _refusal_in_child(flags: int) -> str:
    """Why `_unshare_network(flags)` fails; empty when it succeeds."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _unshare_network(flags)
            status = 0
        except OSError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(status)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        message = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return message or ("" if status == 0 else f"the trial ended with {status}")


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent dies.

    To be called in a forked child, before its exec. The kernel looks at the
    parent's *thread*, so the parent must fork from its main thread.

    Args:
        parent: the process id of the parent.
    """
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the kernel was told.
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Has the kernel give this process the orphans among its descendants.

    So it can find and kill also a daemon that left the session of its task.
    """
    if hasattr(_libc, "prctl"):
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the kernel gives to outgoing connections."""
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    except OSError:
        return 32768, 60999  # Linux' own default.
    first, last = map(int, text.split())
    return first, last


def candidate_ports(first: int, last: int) -> list[int]:
    """The ports from 10000 on that are not in the range first .. last.

    >>> ports = candidate_ports(32768, 60999)
    >>> ports[0], 32767 in ports, 32768 in ports, 61000 in ports
    (10000, True, False, True)

    All of them, where the ephemeral range leaves none.
    """
    ports = range(10000, 65536)
    return [port for port in ports if not first <= port <= last] or list(ports)


def reserve_ports(count: int) -> list[socket.socket]:
    """Binds `count` free ports, so that nobody else chooses them.

    The sockets do not listen and allow their address to be reused, as
    TensorFlow's servers do: those can listen there while the reservation lasts,
    and whoever looks for a free port cannot have it.

    Args:
        count: how many ports.

    Returns:
        Bound sockets; the port is `socket.getsockname()[1]`. The caller closes
        them.

    Raises:
        OSError: if there are not that many free ports.
    """
    candidates = candidate_ports(*ephemeral_range())
    random.shuffle(candidates)
    reserved: list[socket.socket] = []
    for port in candidates:
        if len(reserved) == count:
            break
        with contextlib.suppress(OSError):  # Taken: the next one, then.
            reserved.append(_bind(port, reuse=False))
    if len(reserved) < count:
        for holder in reserved:
            holder.close()
        raise OSError(f"found fewer than {count} free ports")
    return reserved


def port_is_taken(port: int) -> bool:
    """Whether some process listens on `port`, on any address."""
    try:
        _bind(port, reuse=True).close()
    except OSError:
        return True
    return False


def _bind(port: int, *, reuse: bool) -> socket.socket:
    """A socket bound to `port` on every address of the machine."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if dual:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    # Strict while choosing, so that even a lingering connection counts as
    # taken; lenient from then on, so that the task itself can bind.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


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
    """Cuts the output of a task into lines.

    Of a line that was overwritten with carriage returns, the last state is
    kept; while such a line goes on, a state is shown every two seconds.

    Attributes:
        drop_banner: whether to leave out the information that TensorFlow
            prints while it is loaded, deaf to TF_CPP_MIN_LOG_LEVEL.
    """

    def __init__(self) -> None:
        self.drop_banner = False
        self._rest = b""
        self._shown_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Takes what was read at time `now`; returns the lines complete."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [self._last_state(line) for line in complete]
        if self.drop_banner:
            lines = [line for line in lines if not _BANNER.match(line)]
        # The last byte may be half of "\r\n".
        overwritten = self._rest.rfind(b"\r", 0, -1)
        if overwritten >= 0:
            state = self._last_state(self._rest[:overwritten])
            self._rest = self._rest[overwritten + 1 :]
            if state and now - self._shown_at >= _PROGRESS_SECS:
                self._shown_at = now
                lines.append(state)
        if len(self._rest) > _MAX_LINE:
            lines += self.flush()
        return lines

    def flush(self) -> list[bytes]:
        """Returns the unterminated line at the end, if there is one."""
        rest, self._rest = self._last_state(self._rest), b""
        return [rest] if rest else []

    @staticmethod
    def _last_state(line: bytes) -> bytes:
        return line.rstrip(b"\r").rpartition(b"\r")[2]


class Task:
    """One process of a cluster, through all its restarts.

    Attributes:
        name: "job:index".
        tf_config: the `TF_CONFIG` of its next start.
        port: where it listens.
        stdout: where both its streams go from the next start on: a pipe
            (default) or an open file.
        output: the reading end of that pipe, to be waited for; None before
            the first start.
        restarts: how often it was started again.
        restart_at: when it is to be started again (`time.monotonic`), or None.
    """

    def __init__(self, job: str, index: int, command: Sequence[str]) -> None:
        self.job, self.index = job, index
        self.name = f"{job}:{index}"
        self.tf_config = ""
        self.port = 0
        self.stdout: int | BinaryIO = subprocess.PIPE
        self.output: BinaryIO | None = None
        self.restarts = 0
        self.restart_at: float | None = None
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = LineCutter()
        self._exit_code: int | None = None
        self._stopped = False
        self._started_at: float | None = None
        self._ended_at = 0.0

    def start(self) -> None:
        """Starts the process, from the launcher's main thread."""
        environment = {
            "GRPC_FAIL_FAST": "use_caller",  # What TensorFlow recommends.
            "TF_CPP_MIN_LOG_LEVEL": "3",  # What matters is raised as well.
            **(_HUGE_PAGES if self.job == "ps" else {}),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TF_CONFIG": self.tf_config,
        }
        environment.pop("CLUSTER_SPEC", None)
        self._lines.drop_banner = environment["TF_CPP_MIN_LOG_LEVEL"] != "0"
        launcher = os.getpid()
        self._process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self.stdout,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # So that its own children go with it.
            preexec_fn=lambda: die_with_parent(launcher),
        )
        self.output = self._process.stdout
        if self.output is not None:
            os.set_blocking(self.output.fileno(), False)
        self.restart_at = None
        self._stopped = False
        if self._started_at is None:
            self._started_at = time.monotonic()

    @property
    def pid(self) -> int | None:
        """The process id while the process runs, else None."""
        return self._process and self._process.pid

    def read(self) -> list[bytes] | None:
        """The lines completed since the last call; None at the end of all."""
        try:
            data = os.read(self.output.fileno(), _MAX_LINE)
        except BlockingIOError:
            return []
        return self._lines.feed(data, time.monotonic()) if data else None

    def read_rest(self) -> list[bytes]:
        """The last lines of a process that has ended; closes `output`.

        It does not wait for the pipe's end, for a daemon that left the
        process's session may hold it open.
        """
        lines: list[bytes] = []
        for _ in range(64):  # More than a pipe holds.
            more = self.read()
            if not more:
                break
            lines += more
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
        os.killpg(self._process.pid, signal.SIGKILL)
        self._exit_code = self._process.wait()
        self._ended_at = time.monotonic()
        self._process = None
        return self._exit_code

    def stop(self, signum: signal.Signals) -> None:
        """Ends the task on the launcher's behalf; it is not started again."""
        self.restart_at = None
        if self._process is not None:
            self._stopped = True
            os.killpg(self._process.pid, signum)

    def kill(self) -> None:
        """Kills the process and waits for it."""
        self.stop(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    @property
    def is_over(self) -> bool:
        """Whether the task neither runs nor waits to be started again."""
        return self._process is None and self.restart_at is None

    def summary(self) -> str:
        """One line: name, how it ended, restarts, seconds."""
        if self._exit_code is None or self._started_at is None:
            return f"{self.name:<12} never started"
        ended = how_it_ended(self._exit_code)
        if self._stopped:
            ended = f"ended by launcher ({ended})"
        seconds = self._ended_at - self._started_at
        return (
            f"{self.name:<12} {ended:<32} restarts: {self.restarts:<3} "
            f"seconds: {seconds:.1f}"
        )


class SignalPipe:
    """While entered, signals become bytes that a selector can wait for."""

    def __enter__(self) -> SignalPipe:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._handlers = {}
        for signum in (*STOP_SIGNALS, signal.SIGCHLD):
            ignored = signal.getsignal(signum) == signal.SIG_IGN
            if signum == signal.SIGHUP and ignored:
                continue  # nohup: the user wants to outlive the terminal.
            self._handlers[signum] = signal.signal(signum, lambda *_: None)
        self._old_fd = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """The file descriptor to wait for."""
        return self._reader.fileno()

    def read(self) -> list[signal.Signals]:
        """The signals that have arrived, oldest first."""
        return [signal.Signals(number) for number in self._reader.recv(4096)]

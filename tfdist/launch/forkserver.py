"""A fork server that imports TensorFlow once and forks every task.

Imports take most of the time that a task needs to start or restart. A process
of the launcher therefore imports once (like the `forkserver` method of
`multiprocessing`), before it computes anything that would not survive a fork.
The tasks share its memory. Each has the same command, environment, directory,
parent and output as if it were spawned, which is the fallback if it cannot be
forked. There are two differences:

* A program may set environment variables before it imports TensorFlow, Keras
  or tfdist. If it did by the time of the first such `import`, the process
  executes the command anew, so that the variables take effect.
* glibc reads its variables at process start. If there are parameter servers,
  the fork server has theirs, and therefore all tasks use huge pages.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tfdist.launch import processes
from tfdist.launch.processes import Forked

_IMPORTED = ("tensorflow", "keras", "tfdist")
READY_SECS = 120.0
"""The time limit for the imports."""

_FORK_SECS = 30.0
_MAX_ROLE = 1 << 20  # Bytes; the system allows less.


class ForkServer:
    """Forks the tasks of a job, which the calling process adopts.

    Args:
        command: The command that every task runs.
        environment: The server's environment variables.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._command, self._environment = [*command], environment
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self.channel: socket.socket

    def start(self) -> bool:
        """Starts the server, for `python -m MODULE` or `python FILE.py`.

        Returns whether it started; `channel` is readable once it is ready.
        """
        interpreter, program = [*self._command, ""][:2]
        if not os.path.basename(interpreter).startswith("python"):
            return False
        if program != "-m" and not program.endswith(".py"):
            return False
        kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
        self.channel, theirs = socket.socketpair(*kind)
        processes.adopt_orphans()
        module = [self._command[0], "-m", "tfdist.launch.forkserver"]
        with theirs, contextlib.suppress(OSError):  # Tasks are then spawned.
            self._process = processes.spawn(
                [*module, *self._command[1:]],
                self._environment,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        self._ready_by = time.monotonic() + READY_SECS
        return self._process is not None

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[bytes],
    ) -> Forked | None:
        """Forks a process that runs the command; None if it must be spawned."""
        if self._process is None or command != self._command:
            return None
        role = {"parent": os.getpid(), "environment": dict(environment)}
        try:
            if not self._is_ready:
                left = self._ready_by - time.monotonic()
                self.channel.settimeout(max(0.0, left))
                self._is_ready = bool(self.channel.recv(1))
            self.channel.settimeout(_FORK_SECS)
            text = json.dumps(role).encode()
            socket.send_fds(self.channel, [text], [stdout.fileno()])
            return Forked(int(self.channel.recv(16)))  # b"" if the server died.
        except (OSError, ValueError):
            self.close()
            return None

    def reap(self) -> bool:
        """Whether the server has died; the next `fork` then closes it."""
        return self._process is not None and self._process.poll() is not None

    def close(self) -> None:
        """Ends the server, if it was started."""
        if self._process is not None:
            self.channel.close()
            if not self.reap():  # Once reaped, its id may have been reused.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


# --- In the server -----------------------------------------------------------


def serve(program: Sequence[str]) -> None:
    """Imports, then forks on each request; returns only in a fork."""
    if program[0] != "-m" and not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    for name in _IMPORTED:
        # The program itself will report a failed import.
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for part in module.__all__ if name == "tfdist" else ():
                getattr(module, part)  # Loads the lazy subpackages.
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    channel.sendall(b"r")
    gc.collect()
    gc.freeze()  # Memory that the collector does not touch stays shared.
    while True:
        text, fds, _, _ = socket.recv_fds(channel, _MAX_ROLE, 1)
        if not text:
            sys.exit()  # The launcher is gone.
        child = os.fork()
        if not child:
            # Forks twice: once the child exits, the launcher adopts its child.
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.0005)
            with channel:
                return _become(json.loads(text), fds[0], channel)
        os.close(fds[0])
        os.waitpid(child, 0)


def _become(role: dict[str, Any], output: int, channel: socket.socket) -> None:
    """Makes this fork equal to a spawned task; sends the launcher its id."""
    processes.die_with_parent(role["parent"])
    os.setsid()
    channel.sendall(str(os.getpid()).encode())
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.environ.clear()
    os.environ.update(role["environment"])
    # The kernel still shows the server's command line and environment.
    if task := json.loads(os.environ.get("TF_CONFIG", "{}")).get("task"):
        processes.name_process(f"{task['type']}:{task['index']}")
    if "numpy" in sys.modules:  # The fork copied the server's generator.
        sys.modules["numpy"].random.seed()
    sys.orig_argv = [sys.orig_argv[0], *sys.argv[1:]]
    sys.excepthook = _without_own_frames
    _check_environment(sys.orig_argv)


def _without_own_frames(
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
) -> None:
    own = __file__, "<frozen runpy>"
    while trace and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        # Like Python itself; `runpy.run_path` sets a different `sys.argv[0]`.
        sys.argv = program
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = path = os.path.abspath(program[0])
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, main.__dict__)


def _check_environment(command: list[str]) -> None:
    """Replaces the process if the program sets variables before its imports.

    Such variables come too late for the imports of the fork server.
    """
    import_, given = builtins.__import__, dict(os.environ)

    def watched(
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> Any:
        if level == 0 and name.partition(".")[0] in _IMPORTED:
            builtins.__import__ = import_
            if dict(os.environ) != given:
                sys.stdout.flush()
                os.execvpe(command[0], command, given)
        return import_(name, globals, locals, fromlist, level)

    builtins.__import__ = watched


if __name__ == "__main__":
    arguments = sys.argv[1:]
    serve(arguments)
    _run(arguments)

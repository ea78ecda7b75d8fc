"""A warm spare: a process that has imported TensorFlow, and waits for a role.

Importing is most of the time in which a task that was killed is missing. So the
launcher keeps a process that has it behind itself; when a task dies, this one
becomes it: same command, environment, folder, parent and output. What it could
not make right is started plainly, as if there were no spare:

* A program that sets variables of the environment before it imports TensorFlow,
  Keras or tfdist expects them to count. Where it has, at its first `import` of
  one of them, the process replaces itself by a plain start.
* glibc reads its own variables before all else. The spare has those of a
  parameter server, the task that needs them; a worker that was a spare asks for
  huge pages, too.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.launch.processes import spawn

_IMPORTED = ("tensorflow", "keras", "tfdist")
# The environment of a program is some kilobytes: a spare that is well takes it
# at once.
_HAND_OVER_SECS = 1.0


class Spare:
    """A process that waits to become a task, and what follows it.

    Args:
        command: What every task runs.
        environment: What the tasks have in common, and what a ps has.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._command, self._environment = command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket

    def start(self) -> None:
        """Starts one, unless there is one or the command is of another kind."""
        if self._process is None and _is_python(self._command):
            self._channel, theirs = socket.socketpair()
            module = [self._command[0], "-m", "tfdist.launch.spare"]
            with theirs, contextlib.suppress(OSError):  # Then there is none.
                self._process = spawn(
                    [*module, *self._command[1:]],
                    self._environment,
                    stdin=theirs.fileno(),
                )

    def become(
        self, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """The process, which now runs the command; None if there is none."""
        process, self._process = self._process, None
        if process is None:
            return None
        role = {"command": self._command, "environment": environment}
        with self._channel as channel:
            channel.settimeout(_HAND_OVER_SECS)
            with contextlib.suppress(OSError):
                channel.sendall(json.dumps(role).encode())
                if process.poll() is None:
                    return process
        _end(process)
        return None

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._channel.close()
            _end(self._process)
            self._process = None


def _is_python(command: Sequence[str]) -> bool:
    """Whether it is `python -m MODULE ...` or `python FILE.py ...`."""
    return command[1] == "-m" or command[1].endswith(".py")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


# --- In the spare ------------------------------------------------------------


def wait(program: Sequence[str]) -> None:
    """Imports, waits for the role, and runs the program as it.

    Args:
        program: `-m MODULE ...` or `FILE.py ...`.
    """
    if program[0] != "-m" and not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
    for name in _IMPORTED:
        # What is wrong there the program will say by itself.
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            for part in module.__all__ if name == "tfdist" else ():
                getattr(module, part)  # Loads the wings.
    with socket.socket(fileno=os.dup(0)) as channel, channel.makefile() as file:
        text = file.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if text:  # Else the launcher has gone.
        role = json.loads(text)
        os.environ.clear()
        os.environ.update(role["environment"])
        _check_environment(role["command"])
        sys.orig_argv = role["command"]
        _run(list(program))


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        # As Python itself; `runpy.run_path` has another `sys.argv[0]`.
        sys.argv = program
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = path = os.path.abspath(program[0])
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, main.__dict__)


def _check_environment(command: list[str]) -> None:
    """Has the process replaced if the program sets variables too late for us.

    That is before it first imports what has been imported here.
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
                os.execve(command[0], command, given)
        return import_(name, globals, locals, fromlist, level)

    builtins.__import__ = watched


if __name__ == "__main__":
    wait(sys.argv[1:])

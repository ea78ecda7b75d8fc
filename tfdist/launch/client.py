"""The caller's handle on the injector's process and the tasks' output."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tfdist.launch.injector import Status, find_task, log_name
from tfdist.launch.processes import describe_exit

_CLOSE_SECS = 30.0


class Client:
    """Starts a process with an `Injector` and sends it requests.

    That process and all tasks end when the process that started it does.

    Args:
        cwd: Working directory of the injector and the tasks.
        log_dir: Directory of their output. Default: a temporary directory,
            which `close` removes.
    """

    def __init__(
        self,
        cwd: str | os.PathLike[str] | None,
        log_dir: str | os.PathLike[str] | None,
    ) -> None:
        self.last_status: dict[str, Status] | None = None  # Set by `close`.
        self.is_temporary, self._interrupted = log_dir is None, False
        if log_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="tfdist-")
            log_dir = self._temporary.name
        self.log_dir = Path(log_dir).absolute()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        # Without a preexec_fn, and thus safe if the caller has threads; in its
        # own session, so that Ctrl-C reaches only the caller.
        path = [os.path.abspath(entry) for entry in sys.path]
        self._connection, theirs = multiprocessing.Pipe()
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            "from tfdist.launch.injector import serve; serve(*sys.argv[1:])"
        )
        self._log = self.log_dir / "supervisor.log"
        left = [str(self.log_dir)] if self.is_temporary else []
        with theirs, self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), *left],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def ask(self, method: str, *args: Any) -> Any:
        """Calls a method of the `Injector`; reraises its exceptions."""
        try:
            with self._lock:
                self._connection.send((method, args))
                answer = self._connection.recv()
        except (EOFError, OSError) as error:
            how = (
                ", since a request was interrupted. Start another one."
                if self._interrupted
                else ", or its supervising process has died. It said: "
                f"{self._said()}"
            )
            raise RuntimeError(f"The cluster is closed{how}") from error
        except BaseException:  # The next request would get this one's answer.
            self._interrupted = True
            self._connection.close()
            raise
        if isinstance(answer, Exception):
            raise answer
        return answer

    def status(self) -> dict[str, Status]:
        """The status of every task, available even after `close`."""
        return self.last_status or self.ask("status")

    def status_of(self, task: str) -> Status:
        """The status of a task."""
        return find_task(self.status(), task)

    def output(self, task: str) -> str:
        """The output of a task's processes; "" after `close` if temporary."""
        path = self.log_dir / log_name(task)
        written = path.read_bytes() if path.exists() else b""
        return written.decode(errors="replace")

    def close(self) -> None:
        """Kills all tasks and waits for the injector's process to end.

        Raises RuntimeError if that process failed.
        """
        if self.last_status is None:
            with contextlib.suppress(RuntimeError):  # The exit code tells.
                self.last_status = self.ask("close")
        self._connection.close()
        try:
            code = self.process.wait(_CLOSE_SECS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # The kernel then kills its children.
            code = self.process.wait()
        if code:
            raise RuntimeError(
                f"The supervising process ended with {describe_exit(code)}. "
                f"It said: {self._said()}"
            )
        if self.is_temporary:
            self._temporary.cleanup()

    def _said(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

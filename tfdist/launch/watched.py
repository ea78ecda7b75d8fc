"""Processes of a cluster: started, watched and ended from outside."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from tfdist._tf.waiting import wait_for
from tfdist.launch.faults import Injection
from tfdist.launch.injector import (
    InjectorProcess,
    NotRunningError,
    Status,
    unknown_task,
)
from tfdist.launch.logs import Logs
from tfdist.launch.network import EXPOSED
from tfdist.launch.processes import how_it_ended
from tfdist.launch.supervisor import task_ids

_log = logging.getLogger(__name__)


class WatchedCluster:
    """What `LocalCluster` is without faults; its docstring tells the rest."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        ps: int = 0,
        workers: int = 0,
        evaluator: bool = False,
        data_workers: int = 0,
        absent: Sequence[str] = (),
        restart_secs: float | None = None,
        network: str = "private",
        log_dir: str | os.PathLike[str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        step_pattern: str = r"^step +(\d+)\b",
    ) -> None:
        if isinstance(command, str) or not command:
            raise ValueError(
                "Argument `command` must be a list of the program and its "
                f"arguments. Received: command={command!r}"
            )
        if network not in ("private", "host"):
            raise ValueError(
                'Argument `network` must be "private" or "host". '
                f"Received: network={network!r}"
            )
        self.injections: list[Injection] = []
        self._started_at = time.monotonic()
        self._last_status: dict[str, Status] | None = None
        self._logs = Logs(log_dir, step_pattern)
        self.log_dir = self._logs.folder
        self._supervisor = InjectorProcess(cwd, self.log_dir / "supervisor.log")
        self._ask = self._supervisor.ask
        try:
            refusal = self._ask(
                "set_up",
                task_ids(ps, workers, evaluator, data_workers),
                list(command),
                tuple(absent),
                restart_secs,
                network == "private",
                self.log_dir,
            )
        except BaseException:
            self.close()
            raise
        self.private = network == "private" and not refusal
        if refusal:
            _log.warning(
                "The system refuses a private network (%s). The cluster is in "
                "the host's: %s.",
                refusal,
                EXPOSED,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, BaseException):
            with contextlib.suppress(RuntimeError):  # It must not hide `error`.
                self._with_tails(error)
        self.close()

    def close(self) -> None:
        """Kills every task and what it started; waits until they are gone.

        May be called again.

        Raises:
            RuntimeError: Something could not be killed.
        """
        if self._last_status is None:
            with contextlib.suppress(RuntimeError):  # Its exit code tells.
                self._last_status = self._ask("close")
        self._supervisor.close()
        self._logs.close()

    # --- Looking -------------------------------------------------------------

    def pid(self, task: str) -> int | None:
        """The task's process id; None while it is down."""
        return self._status_of(task).pid

    def rss(self, task: str) -> int:
        """Bytes of memory that the task's process holds (resident set).

        Raises:
            NotRunningError: It is down.
        """
        pid = self.pid(task)
        if pid is None:
            raise NotRunningError(f"{task} is not running.")
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def ports(self) -> dict[str, int]:
        """The port of each task, on 127.0.0.1 of the cluster's network."""
        return {name: status.port for name, status in self._status().items()}

    def exit_codes(self) -> dict[str, list[int]]:
        """How each process of each task ended, in order; -n for signal n.

        `close` adds the -9 of what ran until then.
        """
        return {
            name: list(status.exit_codes)
            for name, status in self._status().items()
        }

    def output(self, task: str) -> str:
        """All that the task's processes have written, to either stream.

        Empty after `close()` if `log_dir` was a temporary one.
        """
        self._status_of(task)
        return self._logs.read(task)

    @property
    def step(self) -> int | None:
        """The step in the chief's latest progress line; None before any."""
        return self._logs.step()

    # --- Waiting: a TimeoutError shows the last lines of every task ----------

    def wait_until_step(self, step: int, *, timeout_secs: float = 60.0) -> int:
        """Waits until the chief's progress says `step` or more.

        Returns:
            The step it says.

        Raises:
            TimeoutError: It does not in time.
            RuntimeError: The job ends before.
        """

        def reached() -> int | None:
            now = self.step
            return now if now is not None and now >= step else None

        return self._wait_for_task(
            "chief:0", reached, f"step {step}", timeout_secs
        )

    def wait_for_line(
        self,
        task: str,
        pattern: str,
        *,
        count: int = 1,
        timeout_secs: float = 60.0,
    ) -> re.Match[str]:
        """Waits for a line of output, of all the task's processes together.

        Args:
            task: "job:index".
            pattern: Regular expression, searched in whole lines.
            count: Which occurrence to wait for; after a restart, the second.
            timeout_secs: For how long. Default: 60.

        Returns:
            The match.

        Raises:
            TimeoutError: It does not come in time.
            RuntimeError: The task ends for good without it.
        """

        def found() -> re.Match[str] | None:
            lines = self.output(task).rpartition("\n")[0]
            matches = list(re.finditer(pattern, lines, re.MULTILINE))
            return matches[count - 1] if len(matches) >= count else None

        what = f"{pattern!r}" + (f", {count} times" if count > 1 else "")
        return self._wait_for_task(task, found, what, timeout_secs)

    def wait(self, *, timeout_secs: float) -> int:
        """Waits for the end of the job; returns the chief's exit code.

        -n stands for signal n, which ends the job only where `restart_secs` is
        None. The others still run; see `exit_codes`.

        Raises:
            TimeoutError: It does not end in time.
        """

        def ended() -> int | None:
            chief = self._status_of("chief:0")
            return chief.exit_codes[-1] if chief.is_over else None

        return self._wait(ended, "The job did not end", timeout_secs)

    # --- Inside --------------------------------------------------------------

    def _status(self) -> dict[str, Status]:
        return self._last_status or self._ask("status")

    def _status_of(self, task: str) -> Status:
        status = self._status()
        if task not in status:
            raise unknown_task(task, status)
        return status[task]

    def _wait_for_task(
        self,
        task: str,
        condition: Callable[[], Any],
        what: str,
        timeout_secs: float,
    ) -> Any:
        """Waits for something that only a task that lives can bring."""

        def came() -> Any:
            # Asked for before its output is read, which is then complete.
            status = self._status_of(task)
            found = condition()
            if found is None and status.is_over:
                ended = how_it_ended(status.exit_codes[-1])
                error = RuntimeError(f"{task} ended ({ended}) without {what}.")
                raise self._with_tails(error)
            return found

        return self._wait(came, f"{task} did not come to {what}", timeout_secs)

    def _wait(
        self, condition: Callable[[], Any], problem: str, timeout_secs: float
    ) -> Any:
        found = wait_for(condition, timeout_secs, poll_secs=0.05)
        if found is None or found is False:
            error = TimeoutError(f"{problem} within {timeout_secs:g} s.")
            raise self._with_tails(error)
        return found

    def _with_tails(self, error: BaseException) -> BaseException:
        """Notes state and last lines of every task on an error, once."""
        if not hasattr(error, "__notes__"):
            for task, status in self._status().items():
                state = f"{task}: {status.in_words()}"
                error.add_note("\n    ".join([state, *self._logs.tail(task)]))
        return error

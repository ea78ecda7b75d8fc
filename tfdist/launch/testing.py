"""A local cluster of real processes, to kill, freeze and cut off.

    with testing.LocalCluster([sys.executable, "job.py"], ps=2, workers=3,
                              restart_secs=2.0) as cluster:
        cluster.wait_until_step(100)
        cluster.kill("worker:1")
        cluster.freeze("ps:0", for_secs=40)
        assert cluster.wait(timeout_secs=300) == 0

* The tasks are processes, the faults signals: SIGKILL, SIGSTOP, SIGTERM. A
  method that injects one returns when its effect is proven, or raises.
* What dies may be started again after a pause, at the same address, as
  Kubernetes and Vertex AI do.
* Faults are data: a list of `Fault`s, or `random_faults` of a seed, that `run`
  injects while the job runs.
* The cluster has a network of its own where the system allows it; the calling
  process stays where it is. One small process in between enters that network
  and is the parent of all tasks (`tfdist.launch.injector`).
* Nothing is left: when the block ends, or the caller dies, every task is
  killed, with its children, frozen or not.

Linux only. TensorFlow is not imported.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfdist._tf.waiting import wait_for
from tfdist.launch.command import make_tasks
from tfdist.launch.faults import KINDS as KINDS
from tfdist.launch.faults import Fault as Fault
from tfdist.launch.faults import Injection as Injection
from tfdist.launch.faults import random_faults as random_faults
from tfdist.launch.injector import NotRunningError as NotRunningError
from tfdist.launch.injector import Status, log_name, unknown_task
from tfdist.launch.network import port_is_taken
from tfdist.launch.processes import all_processes, how_it_ended
from tfdist.launch.supervisor import PROOF_SECS

_log = logging.getLogger(__name__)

_CLOSE_SECS = 30.0
_TAIL_LINES = 15  # Of each task's output, in an error.

_SIGNALS = {
    "kill": signal.SIGKILL,
    "restart": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "resume": signal.SIGCONT,
    "terminate": signal.SIGTERM,
}


class LocalCluster:
    """A chief, workers, parameter servers and an evaluator on this machine.

    They run from the construction to `close()`, or to the end of the `with`
    block. An exception that leaves the block gets the last lines of every task
    as a note.

    The job ends when its chief, "chief:0", exits with a code below 128. From
    then on nothing is started again by itself; what still runs does so until
    `close`.

    Args:
        command: The program and its arguments, the same for every task;
            `TF_CONFIG` tells it which task it is.
        ps: Number of parameter servers. Default: 0.
        workers: Number of workers, beside the chief. Default: 0.
        evaluator: Whether there is an evaluator. Default: False.
        data_workers: Number of workers of a tf.data service, which then has a
            dispatcher (see `tfdist.data.one_pass`). Default: 0.
        absent: Tasks that are in the cluster's spec and not started, such as
            `["worker:2"]`; `start` starts them.
        restart_secs: Seconds after which a task that failed, or was killed, is
            started again, as often as it fails (a chief only with a code of 128
            or more). Default: it is not.
        network: "private" (where the system refuses it, a warning says so and
            it becomes "host") or "host", the caller's. In a private network
            neither side reaches the other, the caller included.
        log_dir: Folder of the tasks' outputs, "worker-1.log" and so on.
            Default: a temporary one, removed by `close`.
        cwd: Working directory of the tasks. Default: the caller's.
        step_pattern: Regular expression of the chief's progress lines, with
            the step as its group 1. Default: tfdist's own lines, such as
            "step  500 of 2000 ( 25 %), ...".

    Attributes:
        private: Whether the network is a private one.
        log_dir: Where the outputs are.
        injections: An `Injection` for all that was done to the tasks, in order.

    Raises:
        ValueError: These do not make a cluster.
        OSError: The tasks cannot be started.
    """

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
        tasks = make_tasks(
            command,
            ps=ps,
            workers=workers,
            evaluator=evaluator,
            data_workers=data_workers,
        )
        self.injections: list[Injection] = []
        self._step_pattern = re.compile(step_pattern, re.MULTILINE)
        self._step: int | None = None
        self._step_offset = 0
        self._started_at = time.monotonic()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if log_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="tfdist-")
            log_dir = self._temporary.name
        self.log_dir = Path(log_dir).absolute()
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._requests = 0
        self._last_status: dict[str, Status] | None = None
        self._start_supervisor(cwd)
        try:
            refusal = self._ask(
                "set_up",
                [(task.job, task.index) for task in tasks],
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
                "the host's: TensorFlow's servers authenticate nobody, and "
                "whoever can reach this machine can reach them.",
                refusal,
            )

    def __enter__(self) -> LocalCluster:
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
            RuntimeError: if something could not be killed.
        """
        if self._supervisor.poll() is None and not self._connection.closed:
            with contextlib.suppress(RuntimeError):  # Its exit code tells.
                self._last_status = self._ask("close")
        self._connection.close()
        try:
            code = self._supervisor.wait(_CLOSE_SECS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()  # The kernel then kills its children.
            code = self._supervisor.wait()
        if code:
            raise RuntimeError(
                f"The supervising process ended with {how_it_ended(code)}. "
                f"It said: {self._read('supervisor.log')}"
            )
        if self._temporary is not None:
            self._temporary.cleanup()

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
        return self._read(log_name(task))

    @property
    def step(self) -> int | None:
        """The step in the chief's latest progress line; None before any."""
        try:
            with open(self.log_dir / log_name("chief:0"), "rb") as log:
                log.seek(self._step_offset)
                lines, newline, _ = log.read().rpartition(b"\n")
        except FileNotFoundError:  # A temporary one, and closed.
            return self._step
        self._step_offset += len(lines) + len(newline)
        for match in self._step_pattern.finditer(
            lines.decode(errors="replace")
        ):
            self._step = int(match[1])
        return self._step

    # --- Waiting -------------------------------------------------------------

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
            timeout_secs: For how long.

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

    # --- Faults --------------------------------------------------------------

    def kill(self, task: str, *, for_secs: float | None = None) -> Injection:
        """Kills a task, frozen or not, with SIGKILL; returns when it is dead.

        Args:
            task: "job:index".
            for_secs: Seconds after which it is started again. Default: what
                `restart_secs` says.

        Raises:
            NotRunningError: It was down already.
            RuntimeError: It does not die.
        """
        return self._inject("kill", task, for_secs)

    def freeze(self, task: str, *, for_secs: float | None = None) -> Injection:
        """Stops a task with SIGSTOP; returns when all its threads stand still.

        Its connections stay open, and answer nothing.

        Args:
            task: "job:index".
            for_secs: Seconds after which it goes on. Default: at `resume`.

        Raises:
            NotRunningError: It is down, or frozen already.
            RuntimeError: It does not stop.
        """
        return self._inject("freeze", task, for_secs)

    def resume(self, task: str) -> Injection:
        """Has a frozen task go on (SIGCONT); returns when it does.

        Raises:
            NotRunningError: It is down.
            RuntimeError: It does not go on.
        """
        return self._inject("resume", task)

    def terminate(
        self,
        task: str,
        *,
        grace_secs: float = 30.0,
        for_secs: float | None = None,
    ) -> Injection:
        """Tells a task to end (SIGTERM), as a scheduler does that preempts it.

        Returns when it has ended; the effect says how. One that is still there
        after the grace period is killed, as Kubernetes does.

        Args:
            task: "job:index".
            grace_secs: Seconds between SIGTERM and SIGKILL.
            for_secs: Seconds from its end after which it is started again.
                Default: what `restart_secs` and its exit code say.

        Raises:
            NotRunningError: It was down already.
            RuntimeError: It does not even die.
        """
        moment = self._moment()
        pid, ends = self._ask("terminate", task, grace_secs, for_secs)

        def ended() -> str | None:
            codes = self._status_of(task).exit_codes
            return how_it_ended(codes[ends]) if len(codes) > ends else None

        limit = grace_secs + PROOF_SECS
        effect = self._wait(ended, f"{task} (pid {pid}) did not end", limit)
        return self._record("terminate", task, pid, moment, effect)

    def restart(self, task: str) -> Injection:
        """Kills a task if it runs, and starts it at once at its address.

        Raises:
            RuntimeError: It does not die.
        """
        return self._inject("restart", task)

    def start(self, task: str) -> int:
        """Starts a task that is down or was absent; returns its process id.

        Raises:
            RuntimeError: It runs.
        """
        return self._ask("start_task", task)

    def set_restart_secs(self, task: str, restart_secs: float | None) -> None:
        """Overrides the cluster's `restart_secs` for one task from now on.

        None lets the task stay away, also if it is down now and was to come
        back. Another value counts from the next time it ends.
        """
        self._ask("set_restart_secs", task, restart_secs)

    def add_task(
        self,
        job: str,
        *,
        address_of: str | None = None,
        command: Sequence[str] | None = None,
    ) -> str:
        """Starts a process that the cluster's spec does not know.

        A second "chief" believes to be the only one, "chief:0"; a task of
        another job believes to be one more of that job. (For a task that the
        spec knows and that comes late, use `absent`.)

        Args:
            job: "chief", "worker", "ps" or "evaluator".
            address_of: The task whose address it takes as its own. Default: an
                address of its own.
            command: What it runs. Default: what the others run.

        Returns:
            Its name here, such as "chief:1".

        Raises:
            ValueError: There is no such job or task.
        """
        if job not in ("chief", "worker", "ps", "evaluator"):
            raise ValueError(
                'Argument `job` must be "chief", "worker", "ps" or '
                f'"evaluator". Received: job={job!r}'
            )
        return self._ask("add_task", job, address_of, command and list(command))

    def cut_network(self, *, for_secs: float | None = None) -> Injection:
        """Cuts every task off from every other, and from itself.

        Takes the loopback interface of the private network down: what is sent
        is lost, without an error, as with an unplugged cable. TCP connections
        survive a cut that is short enough for them. A single task cannot be
        cut off from the rest; `freeze` comes nearest.

        Args:
            for_secs: Seconds after which the network is mended. Default: at
                `mend_network`.

        Raises:
            RuntimeError: In the host's network, which is not ours to cut.
        """
        return self._inject("cut_network", None, for_secs)

    def mend_network(self) -> Injection:
        """Ends what `cut_network` began."""
        return self._inject("mend_network", None)

    def run(
        self, faults: Sequence[Fault], *, timeout_secs: float
    ) -> list[Injection]:
        """Injects faults while the job runs; returns when it has ended.

        A fault waits for its step or its moment, and then, if its task is down
        or frozen, until it is up again. Several may come at the same time. A
        "terminate" holds up the faults after it until its task has ended.

        Args:
            faults: What is to happen.
            timeout_secs: Seconds from now until the end of the job.

        Returns:
            What was injected, in order. `wait` has the exit code.

        Raises:
            TimeoutError: The job does not end in time.
            RuntimeError: It ends before every fault was injected, or a fault
                has no effect.
        """
        for fault in faults:
            if fault.task is not None:
                self._status_of(fault.task)
        start = time.monotonic()
        pending, done = list(faults), []

        def ended() -> bool:
            over = self._status_of("chief:0").is_over
            for fault in tuple(pending):
                if fault.is_due(self.step, time.monotonic() - start):
                    with contextlib.suppress(NotRunningError):
                        done.append(self._inject_fault(fault))
                        pending.remove(fault)
            return over

        self._wait(ended, "The job did not end", timeout_secs)
        if pending:
            raise RuntimeError(
                "The job ended before these faults could be injected: "
                + ", ".join(map(str, pending))
            )
        return done

    # --- Inside --------------------------------------------------------------

    def _start_supervisor(self, cwd: str | os.PathLike[str] | None) -> None:
        # Without a preexec_fn, so safe whatever threads the caller has; in a
        # session of its own, so that Ctrl-C is the caller's to act on.
        path = [os.path.abspath(entry) for entry in sys.path]
        self._connection, theirs = multiprocessing.Pipe()
        code = (
            f"import sys; sys.path[:] = {path!r}; "
            "from tfdist.launch.injector import serve_injector; "
            "serve_injector(int(sys.argv[1]))"
        )
        with theirs, open(self.log_dir / "supervisor.log", "wb") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def _ask(self, method: str, *args: Any) -> Any:
        """Calls a method of the supervisor; raises what it raised."""
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
                    f"died. It said: {self._read('supervisor.log')}"
                ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _status(self) -> dict[str, Status]:
        return self._last_status or self._ask("status")

    def _status_of(self, task: str) -> Status:
        status = self._status()
        if task not in status:
            raise unknown_task(task, status)
        return status[task]

    def _moment(self) -> tuple[int | None, float]:
        """The step and the seconds of an injection, taken before it."""
        return self.step, time.monotonic() - self._started_at

    def _inject(self, kind: str, task: str | None, *args: Any) -> Injection:
        moment = self._moment()
        if task is not None:
            args = (task, *args)
        pid, effect = self._ask(kind, *args)
        return self._record(kind, task, pid, moment, effect)

    def _inject_fault(self, fault: Fault) -> Injection:
        where = () if fault.task is None else (fault.task,)
        how = {} if fault.for_secs is None else {"for_secs": fault.for_secs}
        return getattr(self, fault.kind)(*where, **how)

    def _record(
        self,
        kind: str,
        task: str | None,
        pid: int | None,
        moment: tuple[int | None, float],
        effect: str,
    ) -> Injection:
        signum = _SIGNALS.get(kind) if pid is not None else None
        injection = Injection(kind, task, pid, signum, *moment, effect)
        self.injections.append(injection)
        return injection

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

    def _read(self, name: str) -> str:
        try:
            return (self.log_dir / name).read_bytes().decode(errors="replace")
        except FileNotFoundError:  # It is closed, and was a temporary one.
            return ""

    def _with_tails(self, error: BaseException) -> BaseException:
        """Notes state and last lines of every task on an error, once."""
        if not hasattr(error, "__notes__"):
            for task, status in self._status().items():
                lines = self.output(task).splitlines()[-_TAIL_LINES:]
                state = f"{task}: {status.in_words()}"
                error.add_note("\n    ".join([state, *lines]))
        return error


def assert_nothing_left(cluster: LocalCluster) -> None:
    """Asserts that a closed cluster left no process, port or file behind.

    Raises:
        AssertionError: It did; the message names it.
    """
    status = cluster._last_status
    assert status is not None, "The cluster is not closed."
    # Each task leads a session, and all it started belong to it. (The
    # supervisor itself saw to those that left theirs.)
    sessions = {pid for task in status.values() for pid in task.pids}
    sessions.add(cluster._supervisor.pid)
    left = [pid for pid, _, session in all_processes() if session in sessions]
    assert not left, f"Processes {left} are left."
    # A private network is gone with the last process in it.
    ports = [] if cluster.private else [t.port for t in status.values()]
    taken = [port for port in ports if port_is_taken(port)]
    assert not taken, f"Something still listens on the ports {taken}."
    if cluster._temporary is not None:
        assert not cluster.log_dir.exists(), f"{cluster.log_dir} is left."

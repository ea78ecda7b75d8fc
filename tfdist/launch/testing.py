"""A local cluster of real processes that tests can kill, freeze and cut off.

    with testing.LocalCluster([sys.executable, "job.py"], ps=2, workers=3,
                              restart_secs=2.0) as cluster:
        cluster.wait_until_step(100)
        cluster.kill("worker:1")
        cluster.freeze("ps:0", for_secs=40)
        assert cluster.wait(timeout_secs=300) == 0

When the block ends, or the caller dies, every task is killed with its children,
frozen or not, and nothing is left behind. Linux only. Imports no TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from tfdist._tf.arguments import check_one_of
from tfdist._tf.waiting import wait_for
from tfdist.launch.client import Client
from tfdist.launch.faults import KINDS as KINDS
from tfdist.launch.faults import Fault as Fault
from tfdist.launch.faults import Injection as Injection
from tfdist.launch.faults import NotRunningError as NotRunningError
from tfdist.launch.network import EXPOSED
from tfdist.launch.processes import all_processes, describe_exit
from tfdist.launch.supervisor import PROOF_SECS, task_ids

_log = logging.getLogger(__name__)

T = TypeVar("T")

_TAIL_LINES = 15
_CHIEF = "chief:0"
_END_OF_JOB = "the end of the job"


class LocalCluster:
    """A chief, workers, parameter servers and an evaluator on this machine.

    The tasks run from construction until `close()`, or the end of the `with`
    block. An exception that leaves the block gets the last output lines of
    every task as notes.

    A `task` is given as "job:index"; an unknown task raises a ValueError.
    Methods that inject a fault return an `Injection` once the fault has taken
    effect. They raise a `NotRunningError` if the task is already down or
    frozen, and a RuntimeError if the fault has no effect.

    The job ends when its chief, "chief:0", exits with a code below 128. After
    that no task is restarted automatically; other tasks run until `close`.

    Args:
        command: The program and its arguments, the same for every task;
            `TF_CONFIG` tells each process its task.
        ps: Number of parameter servers. Default: 0.
        workers: Number of workers, besides the chief. Default: 0.
        evaluator: Whether there is an evaluator. Default: False.
        data_workers: Number of workers of a tf.data service, which then has a
            dispatcher (see `tfdist.data.one_pass`). Default: 0.
        absent: Tasks of the cluster's spec that are not started until `start`,
            such as `["worker:2"]`.
        restart_secs: Seconds after which a task that failed or was killed is
            restarted, each time (a chief only after a signal or an exit code
            of 128 or more). Default: tasks are not restarted.
        network: "private", or "host" for the caller's network. If the system
            refuses a private network, a warning is logged and "host" is used.
            The caller and a private network cannot reach each other.
        log_dir: Directory of the tasks' output, "worker-1.log" and so on.
            Default: a temporary directory that `close` removes.
        cwd: Working directory of the tasks. Default: the caller's.
        step_pattern: Regular expression of the chief's progress lines, with
            the step as group 1. Default: tfdist's own lines, such as
            "step  500 of 2000 ( 25 %), ...".

    Attributes:
        private: Whether the network is private.
        log_dir: Directory of the tasks' output.
        injections: All injected faults in order, each as an `Injection`.

    Raises:
        ValueError: The arguments do not describe a valid cluster.
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
        check_one_of("network", network, ("private", "host"))
        self.injections: list[Injection] = []
        self._started_at = time.monotonic()
        self._step_pattern = re.compile(step_pattern, re.MULTILINE)
        self._step: int | None = None
        self._client = Client(cwd, log_dir)
        self._ask = self._client.ask
        self.log_dir = self._client.log_dir
        tasks = task_ids(ps, workers, evaluator, data_workers)
        private = network == "private"
        how = tuple(absent), restart_secs, private, self.log_dir
        try:
            refusal = self._ask("set_up", tasks, list(command), *how)
        except BaseException:
            self.close()
            raise
        self.private = private and not refusal
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
            with contextlib.suppress(RuntimeError):  # Must not hide `error`.
                for task, status in self._client.status().items():
                    lines = self.output(task).splitlines()[-_TAIL_LINES:]
                    error.add_note("\n    ".join([f"{task}: {status}", *lines]))
        self.close()

    def close(self) -> None:
        """Kills every task and its children; waits until they are gone.

        May be called more than once.

        Raises:
            RuntimeError: A process could not be killed.
        """
        self._client.close()

    def pid(self, task: str) -> int | None:
        """The task's process id; None while it is down."""
        return self._client.status_of(task).pid

    def ports(self) -> dict[str, int]:
        """The port of each task, on 127.0.0.1 of the cluster's network."""
        tasks = self._client.status().items()
        return {name: status.port for name, status in tasks}

    def exit_codes(self) -> dict[str, list[int]]:
        """The exit codes of each task's processes, in order; -n for signal n.

        `close` adds -9 for processes that were still running.
        """
        tasks = self._client.status().items()
        return {name: list(status.exit_codes) for name, status in tasks}

    def output(self, task: str) -> str:
        """The stdout and stderr of all of the task's processes.

        Empty after `close()` if `log_dir` was temporary.
        """
        self._client.status_of(task)
        return self._client.output(task)

    @property
    def step(self) -> int | None:
        """The step in the chief's latest progress line; None if none yet."""
        lines = self._client.output(_CHIEF).rpartition("\n")[0]
        for match in self._step_pattern.finditer(lines):
            self._step = int(match[1])
        return self._step

    def wait_until_step(self, step: int, *, timeout_secs: float = 60.0) -> int:
        """Waits until the chief reports `step` or later; returns that step.

        Raises:
            TimeoutError: The chief does not reach the step in time.
            RuntimeError: The job ends first.
        """

        def reached() -> int | None:
            now = self.step
            return now if now is not None and now >= step else None

        return self._wait(_CHIEF, reached, f"step {step}", timeout_secs)

    def wait_for_line(
        self,
        task: str,
        pattern: str,
        *,
        count: int = 1,
        timeout_secs: float = 60.0,
    ) -> re.Match[str]:
        """Waits for a line of a task's output; returns the match.

        Args:
            task: "job:index".
            pattern: Regular expression, searched for in the complete lines of
                all of the task's processes.
            count: The occurrence to wait for; 2 for the one after a restart.
            timeout_secs: Seconds to wait. Default: 60.

        Raises:
            TimeoutError: The line does not appear in time.
            RuntimeError: The task ends, and is not restarted, without it.
        """

        def found() -> re.Match[str] | None:
            lines = self.output(task).rpartition("\n")[0]
            matches = list(re.finditer(pattern, lines, re.MULTILINE))
            return matches[count - 1] if len(matches) >= count else None

        what = f"{pattern!r}" + (f", {count} times" if count > 1 else "")
        return self._wait(task, found, what, timeout_secs)

    def wait(self, *, timeout_secs: float) -> int:
        """Waits for the end of the job; returns the chief's exit code.

        -n stands for signal n, which ends the job only if `restart_secs` is
        None. Other tasks may still be running; see `exit_codes`.

        Raises:
            TimeoutError: The job does not end in time.
        """

        def ended() -> int | None:
            chief = self._client.status_of(_CHIEF)
            return chief.exit_codes[-1] if chief.is_over else None

        return self._wait(_CHIEF, ended, _END_OF_JOB, timeout_secs)

    def kill(self, task: str, *, for_secs: float | None = None) -> Injection:
        """Kills a task, frozen or not, with SIGKILL; returns when it is dead.

        The task is restarted after `for_secs`. Default: `restart_secs`.
        """
        return self._inject("kill", task, for_secs)

    def freeze(self, task: str, *, for_secs: float | None = None) -> Injection:
        """Freezes a task with SIGSTOP; returns when all threads are stopped.

        Its connections stay open but unanswered. The task resumes after
        `for_secs`. Default: when `resume` is called.
        """
        return self._inject("freeze", task, for_secs)

    def resume(self, task: str) -> Injection:
        """Resumes a frozen task with SIGCONT; returns when it is running."""
        return self._inject("resume", task)

    def terminate(
        self,
        task: str,
        *,
        grace_secs: float = 30.0,
        for_secs: float | None = None,
    ) -> Injection:
        """Sends SIGTERM to a task, as a scheduler that preempts it does.

        Returns when the task has ended; the effect says how. The task is killed
        after `grace_secs` (default: 30), and restarted `for_secs` after its
        end. Default: as `restart_secs` and its exit code determine.
        """
        return self._inject("terminate", task, grace_secs, for_secs)

    def start(self, task: str) -> int:
        """Starts a task that is down or was absent; returns its process id.

        Raises:
            RuntimeError: The task is already running.
        """
        return self._ask("start_task", task)

    def set_restart_secs(self, task: str, restart_secs: float | None) -> None:
        """Overrides the cluster's `restart_secs` for one task from now on.

        With None the task is not restarted, even if it is down and a restart is
        planned. Another value applies from the next time the task ends.
        """
        self._ask("set_restart_secs", task, restart_secs)

    def add_task(
        self,
        job: str,
        *,
        address_of: str | None = None,
        command: Sequence[str] | None = None,
    ) -> str:
        """Starts a process that is not in the cluster's spec.

        In its own `TF_CONFIG`, a second "chief" is the only one, "chief:0", and
        a worker or ps is an additional one. (For a task in the spec that starts
        late, use `absent`.)

        Args:
            job: "chief", "worker", "ps" or "evaluator".
            address_of: A task whose address to use. Default: a new address.
            command: The command to run. Default: that of the other tasks.

        Returns:
            The name of the new task, such as "chief:1".
        """
        return self._ask("add_task", job, address_of, command and list(command))

    def cut_network(self, *, for_secs: float) -> Injection:
        """Cuts off all communication between tasks for `for_secs` seconds.

        Takes down the loopback interface of the private network: packets are
        lost without an error, as with an unplugged cable. TCP connections
        survive a short cut. A single task cannot be cut off from the others;
        `freeze` comes closest.

        Raises:
            RuntimeError: The cluster is in the host's network.
        """
        return self._inject("cut_network", None, for_secs)

    def run(
        self, faults: Sequence[Fault], *, timeout_secs: float
    ) -> list[Injection]:
        """Injects faults while the job runs; returns when it has ended.

        A fault waits for its step and, if its task is down or frozen, until the
        task is up again. A "terminate" delays the faults after it until its
        task has ended.

        Returns:
            The injected faults, in order. `wait` returns the exit code.

        Raises:
            TimeoutError: The job does not end within `timeout_secs`.
            RuntimeError: The job ends before every fault was injected, or a
                fault has no effect.
        """
        for fault in faults:
            self._client.status_of(fault.task)
        pending, done = list(faults), []

        def ended() -> bool | None:
            over = self._client.status_of(_CHIEF).is_over
            for fault in tuple(pending):
                if fault.is_due(self.step):
                    inject = getattr(self, fault.kind)
                    with contextlib.suppress(NotRunningError):
                        done.append(inject(fault.task, for_secs=fault.for_secs))
                        pending.remove(fault)
            return over or None

        self._wait(_CHIEF, ended, _END_OF_JOB, timeout_secs)
        if pending:
            raise RuntimeError(
                "The job ended before these faults could be injected: "
                + ", ".join(map(str, pending))
            )
        return done

    def _inject(self, kind: str, task: str | None, *args: Any) -> Injection:
        moment = self.step, time.monotonic() - self._started_at
        target = () if task is None else (task,)
        pid, effect = self._ask(kind, *target, *args)
        if task and kind == "terminate":
            before, limit = effect, args[0] + PROOF_SECS

            def ended() -> str | None:
                codes = self._client.status_of(task).exit_codes[before:]
                return describe_exit(codes[0]) if codes else None

            effect = self._wait(task, ended, f"the end of pid {pid}", limit)
        self.injections.append(Injection(kind, task, pid, *moment, effect))
        return self.injections[-1]

    def _wait(
        self,
        task: str,
        condition: Callable[[], T | None],
        what: str,
        timeout_secs: float,
    ) -> T:
        """Waits for a condition that only a live task can meet."""

        def came() -> T | None:
            # Read first: if the task is over, its output is complete.
            status = self._client.status_of(task)
            found = condition()
            if found is None and status.is_over:
                ended = describe_exit(status.exit_codes[-1])
                raise RuntimeError(f"{task} ended ({ended}) without {what}.")
            return found

        found = wait_for(came, timeout_secs, poll_secs=0.05)
        if found is None:
            raise TimeoutError(
                f"{task} did not come to {what} within {timeout_secs:g} s."
            )
        return found


def assert_nothing_left(cluster: LocalCluster) -> None:
    """Asserts that a closed cluster left no process and no file behind.

    Raises:
        AssertionError: It did; the message names what is left.
    """
    status = cluster._client.last_status
    assert status is not None, "The cluster is not closed."
    # Each task leads a session that its children belong to. (The supervisor
    # itself killed those that left their session.)
    sessions = {pid for task in status.values() for pid in task.pids}
    sessions.add(cluster._client.process.pid)
    left = [pid for pid, _, session in all_processes() if session in sessions]
    assert not left, f"Processes {left} are left."
    if cluster._client.is_temporary:
        assert not cluster.log_dir.exists(), f"{cluster.log_dir} is left."

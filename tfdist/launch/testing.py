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
import functools
import signal
import time
from collections.abc import Sequence
from typing import Any

from tfdist.launch.faults import KINDS as KINDS
from tfdist.launch.faults import Fault as Fault
from tfdist.launch.faults import Injection as Injection
from tfdist.launch.faults import random_faults as random_faults
from tfdist.launch.injector import NotRunningError as NotRunningError
from tfdist.launch.network import port_is_taken
from tfdist.launch.processes import all_processes, how_it_ended
from tfdist.launch.supervisor import PROOF_SECS
from tfdist.launch.watched import WatchedCluster

_SIGNALS = {
    "kill": signal.SIGKILL,
    "restart": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "resume": signal.SIGCONT,
    "terminate": signal.SIGTERM,
}


class LocalCluster(WatchedCluster):
    """A chief, workers, parameter servers and an evaluator on this machine.

    They run from the construction to `close()`, or to the end of the `with`
    block. An exception that leaves the block gets the last lines of every task
    as a note.

    Where a method takes a `task`, that is "job:index"; a ValueError says that
    there is none of that name. A method that injects a fault returns an
    `Injection` when it has had its effect, and raises a `NotRunningError` if
    the task is down or frozen already, a RuntimeError if there is no effect.

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

    def kill(self, task: str, *, for_secs: float | None = None) -> Injection:
        """Kills a task, frozen or not, with SIGKILL; returns when it is dead.

        It is started again after `for_secs`. Default: what `restart_secs` says.
        """
        return self._inject("kill", task, for_secs)

    def freeze(self, task: str, *, for_secs: float | None = None) -> Injection:
        """Stops a task with SIGSTOP; returns when all its threads stand still.

        Its connections stay open, and answer nothing. It goes on after
        `for_secs`. Default: at `resume`.
        """
        return self._inject("freeze", task, for_secs)

    def resume(self, task: str) -> Injection:
        """Has a frozen task go on (SIGCONT); returns when it does."""
        return self._inject("resume", task)

    def terminate(
        self,
        task: str,
        *,
        grace_secs: float = 30.0,
        for_secs: float | None = None,
    ) -> Injection:
        """Tells a task to end (SIGTERM), as a scheduler does that preempts it.

        Returns when it has ended; the effect says how.

        Args:
            task: "job:index".
            grace_secs: Seconds after which it is killed if it is still there,
                as Kubernetes does. Default: 30.
            for_secs: Seconds from its end after which it is started again.
                Default: what `restart_secs` and its exit code say.
        """
        return self._inject("terminate", task, grace_secs, for_secs)

    def restart(self, task: str) -> Injection:
        """Kills a task if it runs, and starts it at once at its address."""
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

        The network is mended after `for_secs`. Default: at `mend_network`.

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
        or frozen, until it is up again. A "terminate" holds up the faults after
        it until its task has ended.

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
                    where = [] if fault.task is None else [fault.task]
                    how = {"for_secs": fault.for_secs}
                    if fault.for_secs is None:
                        how.clear()
                    with contextlib.suppress(NotRunningError):
                        inject = getattr(self, fault.kind)
                        done.append(inject(*where, **how))
                        pending.remove(fault)
            return over

        self._wait(ended, "The job did not end", timeout_secs)
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
            what, limit = f"{task} (pid {pid}) did not end", args[0]
            ended = functools.partial(self._how_ended, task, effect)
            effect = self._wait(ended, what, limit + PROOF_SECS)
        signum = _SIGNALS.get(kind) if pid is not None else None
        injection = Injection(kind, task, pid, signum, *moment, effect)
        self.injections.append(injection)
        return injection

    def _how_ended(self, task: str, index: int) -> str | None:
        codes = self._status_of(task).exit_codes
        return how_it_ended(codes[index]) if len(codes) > index else None


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
    sessions.add(cluster._supervisor.process.pid)
    left = [pid for pid, _, session in all_processes() if session in sessions]
    assert not left, f"Processes {left} are left."
    # A private network is gone with the last process in it.
    ports = [] if cluster.private else [t.port for t in status.values()]
    taken = [port for port in ports if port_is_taken(port)]
    assert not taken, f"Something still listens on the ports {taken}."
    if cluster._logs.is_temporary:
        assert not cluster.log_dir.exists(), f"{cluster.log_dir} is left."

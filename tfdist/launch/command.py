"""A local cluster of real processes: `python -m tfdist.launch`.

    python -m tfdist.launch --ps=2 --workers=2 --evaluator -m trainer.task ...

starts a chief, two workers, two parameter servers and an evaluator, each with
its `TF_CONFIG`, as torchrun does for its world. `--data_workers=2` adds a
tf.data service, of a dispatcher and two workers (`tfdist.one_pass`). What it
promises:

* Every line a task prints appears whole, behind the task's name.
* A task other than the chief that fails is started again, after 1, 2, 4, ...
  at most 30 seconds, `--max_restarts` times at most; so is a chief killed by a
  signal or ending with 128 or more (what Vertex AI and Kubeflow retry). A
  parameter server, dispatcher or data worker that keeps failing ends the job,
  and so does, in an all-reduce job, a worker; the others do not.
* The job ends with its chief, and with its exit code. After a chief that
  succeeded the others have `--grace_secs` to end by themselves; after one that
  failed they are told to (SIGTERM) at once. Who is still there ten seconds
  later is killed. 128 + n stands for signal n.
* Ctrl-C, SIGTERM and SIGHUP end every task; a second Ctrl-C kills. Should the
  launcher itself be killed, the kernel kills its tasks.
* TensorFlow's servers authenticate nobody and listen on every interface. The
  cluster therefore gets a network of its own, where the system allows it.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

from tfdist.cluster.spec import Cluster
from tfdist.launch import processes
from tfdist.launch.processes import STOP_SIGNALS, SignalPipe, Task, how_it_ended

# Between SIGTERM and SIGKILL: a chief writes its last checkpoint meanwhile.
_TERM_SECS = 10.0
_MAX_MOVES = 5  # To other ports, after a foreign process took one of ours.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Verdict(enum.Enum):
    """What becomes of the job when one of its tasks has ended."""

    DONE = "the task is done"
    RESTART = "the task is started again"
    GIVE_UP = "the job goes on without the task"
    END_JOB = "the job ends"


def restart_decision(
    job: str,
    exit_code: int,
    restarts: int,
    max_restarts: int,
    needed: Sequence[str] = ("chief", "ps"),
) -> Verdict:
    """Decides what the end of a task means.

    >>> restart_decision("worker", 1, restarts=0, max_restarts=3).name
    'RESTART'
    >>> restart_decision("chief", 1, restarts=0, max_restarts=3).name
    'END_JOB'

    Args:
        job: what `Cluster.task_type` may be.
        exit_code: as `subprocess` has it: -n for signal n.
        restarts: how often the task was started again already.
        max_restarts: how often it may be.
        needed: jobs of which no task can be done without.
    """
    if job == "chief" and 0 <= exit_code < 128:
        return Verdict.END_JOB
    if exit_code == 0:
        return Verdict.DONE
    if restarts < max_restarts:
        return Verdict.RESTART
    return Verdict.END_JOB if job in needed else Verdict.GIVE_UP


def backoff_secs(restarts: int) -> float:
    """Seconds to wait before restart number `restarts` (from 0)."""
    return min(2.0 ** min(restarts, 5), 30.0)


def shell_exit_code(exit_code: int) -> int:
    """The code a shell would report: 128 + n for signal n."""
    return 128 - exit_code if exit_code < 0 else exit_code


class Console:
    """Where all output goes, a whole line at a time."""

    def __init__(self, stream: BinaryIO, *, colour: bool) -> None:
        self._stream = stream
        self._colour = colour
        self._colours: dict[str, int] = {}

    def line(self, name: str, text: bytes | str) -> None:
        """Writes one line behind the name of the task it comes from."""
        prefix = f"[{name}]"
        if self._colour:
            number = self._colours.setdefault(name, len(self._colours))
            code = _COLOURS[number % len(_COLOURS)]
            prefix = f"\x1b[{code}m{prefix}\x1b[0m"
        text = text.encode() if isinstance(text, str) else text
        self._stream.write(prefix.encode() + b" " + text + b"\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """Writes one line of the launcher's own."""
        self.line("launch", text)


class Launcher:
    """Runs one cluster to its end, in one loop on the main thread."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        jobs = {
            "chief": 1,
            "worker": options.workers,
            "ps": options.ps,
            "evaluator": int(options.evaluator),
            "dispatcher": int(options.data_workers > 0),
            "data_worker": options.data_workers,
        }
        self.tasks = [
            Task(job, index, options.command)
            for job, count in jobs.items()
            for index in range(count)
        ]
        self._options = options
        self._console = console
        self._selector = selectors.DefaultSelector()
        self._exit_code: int | None = None
        # Signals still to be sent to every task, with their times. Once there
        # was one, nothing is started again.
        self._agenda: list[tuple[float, signal.Signals]] = []
        self._stopping = False
        self._moving = False
        self._moves = 0
        self._interrupted = False
        self._ports: list[socket.socket] = []

    def run(self) -> int:
        """Starts the cluster, waits for its end; returns the exit code."""
        with SignalPipe() as self._signals:
            self._selector.register(self._signals, selectors.EVENT_READ)
            try:
                self._start_cluster()
                while self._step():
                    pass
            finally:
                self._kill_all()
        for task in self.tasks:
            self._console.say(task.summary())
        return 1 if self._exit_code is None else self._exit_code

    def _start_cluster(self) -> None:
        """Starts every task, at fresh ports."""
        self._release_ports()
        self._ports = processes.reserve_ports(len(self.tasks))
        jobs: dict[str, list[str]] = {}
        for task, holder in zip(self.tasks, self._ports, strict=True):
            task.port = holder.getsockname()[1]
            jobs.setdefault(task.job, []).append(f"127.0.0.1:{task.port}")
        if self._options.private:
            self._release_ports()  # Nobody else is in this network.
        cluster = Cluster.from_jobs(jobs, "chief", 0)
        for task in self.tasks:
            task.tf_config = cluster.tf_config(task.job, task.index)
            self._start(task)
        pids = ", ".join(
            f"{task.name} pid {task.pid} port {task.port}"
            for task in self.tasks
        )
        network = "a private" if self._options.private else "the host's"
        self._console.say(f"{cluster.shape} in {network} network: {pids}")

    def _release_ports(self) -> None:
        for holder in self._ports:
            holder.close()
        self._ports = []

    def _start(self, task: Task) -> None:
        task.start()
        self._selector.register(task.output, selectors.EVENT_READ, task)

    def _step(self) -> bool:
        """Waits for something to happen and acts on it; False at the end."""
        for key, _ in self._selector.select(self._timeout()):
            if key.data is None:
                self._on_signals(self._signals.read())
            elif not self._show(key.data, key.data.read()):
                self._selector.unregister(key.fileobj)
        for task in self.tasks:
            exit_code = task.poll()
            if exit_code is not None:
                if task.output.fileno() in self._selector.get_map():
                    self._selector.unregister(task.output)
                self._show(task, task.read_rest())
                self._on_end(task, exit_code)
        self._do_what_is_due()
        if not all(task.is_over for task in self.tasks):
            return True
        if not self._moving:
            return False
        self._moving = self._stopping = False
        self._agenda.clear()
        self._start_cluster()
        return True

    def _show(self, task: Task, lines: list[bytes] | None) -> bool:
        """Prints lines of a task; False when there will be no more."""
        for line in lines or ():
            self._console.line(task.name, line)
        return lines is not None

    def _timeout(self) -> float | None:
        """Seconds until something is due; None when only events matter."""
        due = [when for when, _ in self._agenda[:1]]
        due += [t.restart_at for t in self.tasks if t.restart_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _do_what_is_due(self) -> None:
        """Starts tasks whose pause is over, sends signals whose time came."""
        now = time.monotonic()
        while self._agenda and self._agenda[0][0] <= now:
            _, signum = self._agenda.pop(0)
            for task in self.tasks:
                task.stop(signum)
        for task in self.tasks:
            if task.restart_at is not None and task.restart_at <= now:
                task.restarts += 1
                self._start(task)

    def _on_end(self, task: Task, exit_code: int) -> None:
        """Acts on the end of a task."""
        if self._stopping:
            return
        if exit_code != 0 and self._port_was_stolen(task):
            self._move(task)
            return
        others = "ps" if self._options.ps else "worker"
        verdict = restart_decision(
            task.job,
            exit_code,
            task.restarts,
            self._options.max_restarts,
            needed=("chief", others, "dispatcher", "data_worker"),
        )
        say, ended = self._console.say, how_it_ended(exit_code)
        if verdict is Verdict.RESTART:
            pause = backoff_secs(task.restarts)
            task.restart_at = time.monotonic() + pause
            say(f"{task.name}: {ended}; started again in {pause:g} s.")
        elif verdict is Verdict.GIVE_UP:
            say(f"{task.name}: {ended}; out of restarts. The job goes on.")
        elif verdict is Verdict.END_JOB and task.job == "chief":
            say(f"{task.name}: {ended}. The job ends.")
            self._exit_code = shell_exit_code(exit_code)
            self._stop(0.0 if exit_code else self._options.grace_secs)
        elif verdict is Verdict.END_JOB:
            say(f"{task.name}: {ended}; out of restarts. The job ends.")
            self._exit_code = 1
            self._stop()

    def _stop(self, grace_secs: float = 0.0) -> None:
        """Ends every task: SIGTERM after the grace period, then SIGKILL."""
        now = time.monotonic()
        self._stopping = True
        for task in self.tasks:
            task.restart_at = None
        self._agenda = [
            (now + grace_secs, signal.SIGTERM),
            (now + grace_secs + _TERM_SECS, signal.SIGKILL),
        ]

    def _on_signals(self, signals: Sequence[signal.Signals]) -> None:
        """Ends the job at the user's wish; kills it at the second Ctrl-C."""
        for signum in signals:
            if signum not in STOP_SIGNALS:
                continue
            self._console.say(f"{signum.name}: ending every task.")
            again = self._interrupted
            self._interrupted = True
            self._moving = False
            if self._exit_code is None:
                self._exit_code = 128 + signum
            self._stop()
            if again:
                self._agenda = [(0.0, signal.SIGKILL)]

    def _port_was_stolen(self, task: Task) -> bool:
        return not self._options.private and processes.port_is_taken(task.port)

    def _move(self, task: Task) -> None:
        """Ends all tasks, to start them again at other ports."""
        self._moves += 1
        self._moving = self._moves <= _MAX_MOVES
        self._console.say(
            f"{task.name}: another process has taken its port {task.port}; "
            + (
                "the whole cluster is started again at other ports."
                if self._moving
                else f"this happened {self._moves} times. The job ends."
            )
        )
        self._stop()

    def _kill_all(self) -> None:
        """Leaves nothing behind, whatever ended the loop."""
        for task in self.tasks:
            task.kill()
        self._release_ports()
        self._selector.close()


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; leaves with a usage error if it is wrong.

    Returns:
        The flags, and `command`: what to run as each task.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tfdist.launch",
        usage="%(prog)s [flags] (-m MODULE | SCRIPT) [its arguments]",
        description="Runs a program as every task of a local cluster.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    for flag, default, what in (
        ("--ps", 0, "parameter servers"),
        ("--workers", 0, "workers, beside the chief"),
        ("--data_workers", 0, "workers of a tf.data service, with dispatcher"),
        ("--max_restarts", 3, "how often a task that fails is started again"),
    ):
        text = f"{what} (default {default})"
        add(flag, type=count_flag, default=default, metavar="N", help=text)
    add("--evaluator", action="store_true", help="adds an evaluator task")
    add(
        "--network",
        choices=("private", "host"),
        default="private",
        help="private (default): unreachable from outside, and without access "
        "to gs:// or any other machine",
    )
    add(
        "--grace_secs",
        type=_seconds,
        default=15.0,
        metavar="SECONDS",
        help="for the others to end by themselves after the chief succeeded "
        "(default 15)",
    )
    add("-m", dest="module", action="store_true", help="run a module")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    _complete(options, parser)
    return options


def count_flag(text: str) -> int:
    """The type of a flag that says how many; 0 to 1000."""
    if not text.isdecimal() or int(text) > 1000:
        raise argparse.ArgumentTypeError(
            f"must be an integer from 0 to 1000. Received: {text!r}"
        )
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(
        f"must be seconds, 0 or more. Received: {text!r}"
    )


def _complete(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Checks what argparse cannot, and puts `command` together."""
    program = options.program
    if program[:1] == ["--"]:
        program = program[1:]
    if not program or not program[0]:
        parser.error("a program is required: -m MODULE or SCRIPT")
    if options.ps and not options.workers:
        parser.error(
            "--ps needs --workers: parameter servers hold the variables, "
            f"workers train them. Received: --ps={options.ps} --workers=0"
        )
    if options.module:
        program = ["-m", *program]
    elif not os.path.exists(program[0]):
        parser.error(
            f"there is no script {program[0]!r} (for a module: -m MODULE)"
        )
    options.command = [sys.executable, *program]


def enter_network(mode: str, console: Console) -> bool:
    """Enters the network of `--network`; True if it is a private one."""
    exposed = (
        "TensorFlow's servers authenticate nobody, and whoever can reach this "
        "machine can reach them"
    )
    if mode == "host":
        console.say(f"The host's network: {exposed}.")
        return False
    try:
        processes.enter_private_network()
    except OSError as error:
        console.say(
            f"The system refuses a private network ({error}); going on in the "
            f"host's: {exposed}."
        )
        return False
    console.say(
        "A private network: nothing outside can reach the tasks, and they can "
        "reach neither gs:// nor any other machine. For those: --network=host."
    )
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    May move the calling process into another network for good.
    """
    options = parse_options(argv)
    colour = (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )
    console = Console(sys.stdout.buffer, colour=colour)
    try:
        options.private = enter_network(options.network, console)
        return Launcher(options, console).run()
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`); so have the tasks. What
        # is still buffered must go somewhere when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE

"""A local cluster of real processes: `python -m tfdist.launch`.

    python -m tfdist.launch --ps=2 --workers=2 --evaluator -m trainer.task ...

starts a chief, two workers, two parameter servers and an evaluator, each with
its `TF_CONFIG`, much as torchrun does. `--data_workers=2` adds a tf.data
service with a dispatcher and two workers (`tfdist.one_pass`). The launcher
guarantees:

* Every line that a task prints appears whole, prefixed with the task's name.
* A task that fails is restarted, at most `--max_restarts` times: at once if it
  ran for a minute, else after 0, 1, 2, 4, ... (at most 30) seconds. A chief is
  restarted only after a signal or an exit code of 128 or more (which Vertex AI
  and Kubeflow retry). A parameter server, dispatcher or data worker that keeps
  failing ends the job. So does a worker of an all-reduce job, unless MIN
  workers are left. Other tasks that keep failing do not.
* TensorFlow is imported once, by a process that all tasks are forked from
  (`tfdist.launch.forkserver`), unless `--no_fork` is given.
* The job ends with its chief, and has the chief's exit code. If the chief
  succeeded, the other tasks have `--grace_secs` to end by themselves; if it
  failed, they get SIGTERM at once. Tasks that still run ten seconds later are
  killed. Exit code 128 + n stands for signal n.
* `--workers=1:4` starts one of four workers; `python -m tfdist resize 3` makes
  it three. The same works for `--ps=1:2` (`tfdist.cluster.size`). The chief
  lets surplus tasks end by themselves; after a minute they get SIGTERM.
* Ctrl-C, SIGTERM and SIGHUP end every task; a second signal kills them. A chief
  that still runs gets a minute to save its last checkpoint, and the others ten
  seconds more. If the launcher itself is killed, the kernel kills its tasks.
* TensorFlow's servers authenticate nobody and listen on every interface. The
  cluster therefore gets a private network. If the system does not allow one,
  the launcher starts nothing, unless `--network=host` is given.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from tfdist.launch import network, resize
from tfdist.launch.forkserver import READY_SECS
from tfdist.launch.options import parse_options
from tfdist.launch.processes import Task, describe_exit
from tfdist.launch.supervisor import Supervisor, task_ids, wants_restart

# Between SIGTERM, or the chief's end, and SIGKILL.
_TERM_SECS = 10.0
# For the chief, whose running steps may take 20 s before it saves.
_SAVE_SECS = 60.0
# How long a surplus task waits for the chief to let it go.
_LET_GO_SECS = 60.0
_RESIZE_SECS = 0.5
_PLURAL = {"worker": "workers", "ps": "ps"}  # Jobs that can be resized.
# What the end of a task means for the chief, which goes on.
_WITHOUT = {
    "worker": "A chief that is still waiting for it to begin waits in vain.",
    "evaluator": "The chief will wait for its result of the last step, for up "
    "to RunConfig(evaluator_timeout_secs=...).",
}
# A task that ran this long did not fail during startup.
_STABLE_SECS = 60.0


def backoff_secs(restarts: int) -> float:
    """Seconds to wait before restart number `restarts` (from 0)."""
    return min(2.0 ** min(restarts - 1, 5), 30.0) if restarts else 0.0


def shell_exit_code(exit_code: int) -> int:
    """The code a shell would report: 128 + n for signal n."""
    return 128 - exit_code if exit_code < 0 else exit_code


def show(name: str, line: bytes) -> None:
    """Writes a whole line, prefixed with the name of its task."""
    sys.stdout.buffer.write(b"[%b] %b\n" % (name.encode(), line))
    sys.stdout.buffer.flush()


def _place(task: Task) -> str:
    return f"{task.name} pid {task.pid} port {task.port}"


def say(text: str) -> None:
    """Writes one of the launcher's own lines."""
    show("launch", text.encode())


class Launcher(Supervisor):
    """Runs the cluster of `options` to its end and shows its output.

    `where` describes its network: "a private" or "the host's". `size_file` sets
    the number of workers and ps; None: all.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        where: str,
        size_file: pathlib.Path | None = None,
    ) -> None:
        super().__init__()
        self._where = where
        self._size_file = size_file
        self._size = {"worker": options.least_workers, "ps": options.least_ps}
        self._leaving: set[Task] = set()
        for job, index in task_ids(
            options.ps, options.workers, options.evaluator, options.data_workers
        ):
            task = Task(job, index, options.command)
            self.tasks[task.name] = task
        self._options = options
        self._exit_code: int | None = None
        self._stopping = self._interrupted = False
        self._late: asyncio.TimerHandle | None = None

    def run_to_end(self) -> int:
        """Runs the cluster until it ends; returns the exit code."""
        self.run()
        for task in self.tasks.values():
            say(task.summary())
        return 1 if self._exit_code is None else self._exit_code

    def begin(self) -> None:
        """Starts every task once the fork server is ready."""
        signals = [signal.SIGINT, signal.SIGTERM]
        # If ignored, as by nohup, the job is meant to outlive the terminal.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        for signum in signals:
            self.loop.add_signal_handler(signum, self._interrupt, signum)
        command = self._options.command
        if self._options.fork and self.start_fork_server(command):
            assert self.fork_server
            self.loop.add_reader(self.fork_server.channel, self._start_all)
            self._late = self.loop.call_later(READY_SECS, self._start_all)
        else:
            self._start_all()

    def _start_all(self) -> None:
        if self.fork_server and self._late:
            self.loop.remove_reader(self.fork_server.channel)
            self._late.cancel()
        if self._stopping:
            return
        cluster = self.place_tasks()
        wanted = [task for task in self.tasks.values() if self._is_wanted(task)]
        for task in wanted:
            self.start(task)
        places = ", ".join(map(_place, wanted))
        say(f"{cluster.shape} in {self._where} network: {places}")
        if self._size_file:
            self.loop.call_later(_RESIZE_SECS, self._resize)

    def _is_wanted(self, task: Task) -> bool:
        return task.index < self._size.get(task.job, task.index + 1)

    def _resize(self) -> None:
        """Starts the tasks that `size_file` requests; ends the others."""
        assert self._size_file is not None
        if self._stopping:
            return
        self.loop.call_later(_RESIZE_SECS, self._resize)
        before = self._size
        self._size = resize.size_in(self._size_file, default=before)
        for job, number in self._size.items():
            if number != before[job]:
                say(f"{_PLURAL[job]}: {before[job]} -> {number}")
        if self._size == before:
            return
        for task in self.tasks.values():
            if not self._is_wanted(task):
                self.cancel(task, "restart")
                if task.pid:
                    self._leaving.add(task)
                    term = task.stop, signal.SIGTERM
                    self.plan(task, "leave", _LET_GO_SECS, *term)
            elif task.is_over and task.job in self._size:
                self.start(task)
                say(_place(task))
            else:
                self.cancel(task, "leave")

    def start(self, task: Task) -> None:
        """Starts a task and shows its output from then on."""
        super().start(task)
        self.loop.add_reader(task.output, self._show, task)
        if task.restarts:
            say(f"{task.name} pid {task.pid}: started again.")

    def _show(self, task: Task) -> None:
        lines = task.read()
        if lines is None:
            self.loop.remove_reader(task.output)
        for line in lines or ():
            show(task.name, line)

    def on_end(self, task: Task, exit_code: int) -> None:
        """Reports the end of a task and acts on it."""
        self.loop.remove_reader(task.output)
        for line in task.read_rest():
            show(task.name, line)
        self.cancel(task, "leave")
        if not self._stopping:
            self._decide(task, exit_code)
        elif task.job == "chief":  # Its last save no longer needs the others.
            self.loop.call_later(_TERM_SECS, self._signal_all, signal.SIGKILL)
        self._end_if_over()

    def _decide(self, task: Task, exit_code: int) -> None:
        ended = f"{task.name}: {describe_exit(exit_code)}"
        failed = wants_restart(task.job, exit_code)
        left = task in self._leaving
        self._leaving.discard(task)
        if not self._is_wanted(task):
            number = self._size[task.job]
            say(f"{ended}; the job has {number} {_PLURAL[task.job]}.")
        elif left:  # It was told to end, but is wanted again.
            self.start(task)
            say(_place(task))
        elif failed and task.restarts < self._options.max_restarts:
            quick = task.lasted_secs < _STABLE_SECS
            pause = backoff_secs(task.restarts) if quick else 0.0
            say(f"{ended}; started again in {pause:g} s.")
            self.restart_later(task, pause)
        elif task.job == "chief":
            say(f"{ended}. The job ends.")
            self._exit_code = shell_exit_code(exit_code)
            self._stop(0.0 if exit_code else self._options.grace_secs)
        elif failed and self._needs(task):
            say(f"{ended}; out of restarts. The job ends.")
            self._exit_code = 1
            self._stop()
        elif failed:
            without = _WITHOUT[task.job]
            say(f"{ended}; out of restarts. The job goes on. {without}")
        elif not exit_code:  # Usually, the chief ends a moment later.
            self.loop.call_later(_TERM_SECS, self._report_early_end, task)

    def _report_early_end(self, task: Task) -> None:
        chief = self.tasks["chief:0"]
        if task.is_over and not (chief.is_over or self._stopping):
            say(
                f"{task.name}: ended with exit code 0 {_TERM_SECS:g} s ago, "
                "but the chief still runs. It is not started again. "
                f"{_WITHOUT.get(task.job, '')}"
            )

    def _needs(self, task: Task) -> bool:
        """Whether the job cannot continue without a task that keeps failing."""
        if task.job != "worker":
            return task.job in ("ps", "dispatcher", "data_worker")
        if self._options.ps:
            return False
        workers = [t for t in self.tasks.values() if t.job == "worker"]
        left = sum(not t.is_over and self._is_wanted(t) for t in workers)
        return left < self._options.least_workers

    def _interrupt(self, signum: signal.Signals) -> None:
        """Ends the job on a signal; kills every task on the second one."""
        say(f"{signum.name}: ending every task.")
        if self._exit_code is None:
            self._exit_code = 128 + signum
        self._stop()
        if self._interrupted:
            self._signal_all(signal.SIGKILL)
        self._interrupted = True
        self._end_if_over()

    def _stop(self, grace_secs: float = 0.0) -> None:
        """Ends every task: SIGTERM after the grace period, then SIGKILL.

        SIGKILL is delayed for a chief that saves and needs parameter servers.
        """
        self._stopping = True
        for task in self.tasks.values():
            self.cancel(task, "restart")
        term, kill = signal.SIGTERM, signal.SIGKILL
        over = self.tasks["chief:0"].is_over
        patience = grace_secs + (_TERM_SECS if over else _SAVE_SECS)
        self.loop.call_later(grace_secs, self._signal_all, term)
        self.loop.call_later(patience, self._signal_all, kill)

    def _signal_all(self, signum: signal.Signals) -> None:
        for task in self.tasks.values():
            task.stop(signum)

    def _end_if_over(self) -> None:
        if all(task.is_over for task in self.tasks.values()):
            self.loop.stop()


def enter_network(mode: str) -> str:
    """Enters the network of `--network`, or raises OSError; describes it."""
    if mode == "host":
        say(f"The host's network: {network.EXPOSED}.")
        return "the host's"
    network.enter_private_network()
    say(
        "A private network: nothing outside can reach the tasks, and they can "
        "reach neither gs:// nor any other machine. For those: --network=host."
    )
    return "a private"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    May permanently move the calling process into another network.
    """
    options = parse_options(argv)
    try:
        try:
            where = enter_network(options.network)
        except OSError as error:
            say(
                f"The system refuses a private network ({error}). In the "
                f"host's, {network.EXPOSED}: if nobody else can, say "
                "--network=host."
            )
            return 1
        limits = {
            "workers": (options.least_workers, options.workers),
            "ps": (options.least_ps, options.ps),
        }
        secs = options.last_call_timeout
        with resize.launchers_file(limits, secs) as path:
            return Launcher(options, where, path).run_to_end()
    except BrokenPipeError:
        # The reader of the output is gone (`| head`), and so are the tasks. The
        # interpreter still has to flush its buffer somewhere when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE

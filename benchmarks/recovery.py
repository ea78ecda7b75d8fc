"""How long training is interrupted after a task is killed, part by part.

    python -m benchmarks.recovery [--rounds=3] [--kinds=ps,worker,chief]
        [--launch=--no_fork]

Trains `trainer.task` on its synthetic click log by `tfdist launch`, on 2 ps and
2 workers, without intermediate evaluations. In each round, one task of each
kind is killed with SIGKILL, once training has reached full speed. Prints the
time, in seconds after the kill, at which each part of the recovery was
complete, for each round, and the medians:

    started     the launcher has a process in its place
    program     that has imported everything, and runs the program
    serving     its server is up
    noticed     the chief knows
    up          it has found every server up
    connected   it has connected to them
    built       the model and its loop; of a ps new memory for them
    restored    the checkpoint, and the hooks know
    step        the first new step: of the job, or of the worker that was killed
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from tfdist._tf.waiting import wait_for

KINDS = {"ps": "ps:1", "worker": "worker:1", "chief": "chief:0"}
_PARTS = {
    "ps": "started program noticed serving up connected built restored step",
    "worker": "started program serving step",
    "chief": "started program up connected built restored step",
}
_DEADLINE_SECS = 180.0
_MARK = "MARK"
_ROOT = pathlib.Path(__file__).parent.parent


class Job:
    """A job whose lines are kept with the time at which they came."""

    def __init__(
        self, directory: str, flags: list[str], task: list[str]
    ) -> None:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tfdist.launch", "--ps=2"),
                *("--workers=2", *flags, "-m", "benchmarks.recovery", "--task"),
                *(f"--model_dir={directory}", "--max_steps=10000000"),
                *("--save_checkpoints_steps=20000", *task),
            ],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def find(self, pattern: str, since: float = 0.0) -> tuple[float, re.Match]:
        """The first line that matches, and when it came; waits for it."""

        def find() -> tuple[float, re.Match] | None:
            for when, line in list(self.lines):
                if when > since and (match := re.search(pattern, line)):
                    return when, match
            return None

        found = wait_for(find, _DEADLINE_SECS, poll_secs=0.05)
        if not found:
            said = "\n".join(line for _, line in self.lines[-40:])
            raise TimeoutError(f"No line {pattern!r}:\n{said}")
        return found

    def mark(self, task: str, what: str, since: float) -> float:
        """When a task came so far, on the clock that all share."""
        pattern = rf"^\[{task}\] {_MARK} {what} ([0-9.]+)"
        return float(self.find(pattern, since)[1][1])

    def pid(self, task: str) -> int:
        """The process that is the task now."""
        pids = re.findall(rf"{task} pid (\d+)", "\n".join(self.said()))
        return int(pids[-1])

    def said(self) -> list[str]:
        """What the launcher has said."""
        return [line for _, line in self.lines if line.startswith("[launch]")]

    def close(self) -> None:
        """Ends it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def measure(
    kinds: list[str] | None = None,
    launch: list[str] | None = None,
    task: list[str] | None = None,
    calm_secs: float = 15.0,
) -> dict[str, dict[str, float]]:
    """Seconds from each kill to the end of each part of the way back."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        job = Job(directory, launch or [], task or [])
        try:
            # Until then TensorFlow compiles functions of more and more steps.
            job.find(r"^\[chief:0\] step +[0-9]{4,} ")
            for kind in kinds or KINDS:
                time.sleep(calm_secs)
                found[kind] = _kill(job, kind)
        finally:
            job.close()
    return found


def _kill(job: Job, kind: str) -> dict[str, float]:
    """Kills one, and waits until it is made up for."""
    victim = KINDS[kind]
    killed = time.monotonic()
    os.kill(job.pid(victim), signal.SIGKILL)
    times = {"started": job.find(rf"{victim} pid \d+: st", killed)[0]}
    for part in _PARTS[kind].split()[1:]:
        its = part in ("program", "serving")
        what = f"step of {victim}" if (kind, part) == ("worker", "step") else ""
        task = victim if its else KINDS["chief"]
        times[part] = job.mark(task, what or part, killed)
    return {part: when - killed for part, when in times.items()}


def run_task(flags: list[str]) -> None:
    """Runs `trainer.task`, and says when it comes how far."""
    from absl import app

    from tfdist.cluster import servers
    from tfdist.session import monitored_session, recoverable
    from tfdist.training import coordinated_loop
    from trainer import task

    def say(what: str) -> None:
        print(f"{_MARK} {what} {time.monotonic():.3f}", flush=True)

    def marked(where: Any, name: str, before: str, after: str = "") -> None:
        call = getattr(where, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before:
                say(before)
            result = call(*args, **kwargs)
            if after:
                say(after)
            return result

        setattr(where, name, wrapped)

    last: dict[int, float] = {}
    run = coordinated_loop.CoordinatedLoop._run_on_worker

    def on_worker(self: Any, begun: Any, iterator: Any) -> None:
        run(self, begun, iterator)
        now, worker = time.monotonic(), begun.worker
        if worker is not None and begun.packed is not None:
            if now - last.get(worker, 0.0) > 0.7:
                say(f"step of worker:{worker}")
            last[worker] = now

    created = None

    def run_once(self: Any) -> Any:
        nonlocal created
        logs = first(self)
        if created is not self._health:  # Another one for each connection.
            created = self._health
            say("step")
        return logs

    monitored = monitored_session.MonitoredTrainingSession
    first, monitored._run = monitored._run, run_once
    coordinated_loop.CoordinatedLoop._run_on_worker = on_worker
    session = recoverable.RecoverableSession
    marked(session, "_drop", "noticed")
    marked(recoverable.probing, "wait_until_up", "", "up")
    marked(recoverable, "parameter_server_strategy", "", "connected")
    marked(session, "_build", "", "built")
    marked(session, "_create", "", "restored")
    marked(servers.tf.distribute, "Server", "", "serving")
    say("program")
    app.run(task.main, argv=["task", *flags])


def main() -> None:
    """Prints a row for each kill, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--launch", action="append", default=[])
    parser.add_argument("--flag", action="append", default=[])
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    rounds = []
    for _ in range(args.rounds):
        rounds.append(measure(kinds, args.launch, args.flag))
        for kind in kinds:
            _show(kind, rounds[-1][kind])
    print("medians")
    for kind in kinds:
        parts = _PARTS[kind].split()
        each = {p: statistics.median(r[kind][p] for r in rounds) for p in parts}
        _show(kind, each)


def _show(kind: str, times: dict[str, float]) -> None:
    shown = "  ".join(f"{part} {secs:.1f}" for part, secs in times.items())
    print(f"{kind:8}{shown}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--task"]:
        run_task(sys.argv[2:])
    else:
        main()

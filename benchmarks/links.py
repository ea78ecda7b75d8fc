"""Measures steps per second when packets between tasks are delayed.

    python -m benchmarks.links [--delays=0,0.25,1,5] [--mbit=0] [--rounds=3]
        [--only=small,wide_and_deep] [--steps=1500] [--read_ahead=0]
        [--against=DIR]

Trains on 2 ps, 2 workers and a chief, each in its own network. A switch (see
`benchmarks.networks`) holds each packet for `--delays` milliseconds, one way,
and limits the traffic from and to each task to `--mbit` Mbit/s (0: no limit).
Each round runs every delay with every `--read_ahead` (see `RunConfig`), and
with another checkout if `--against` names one, without reading ahead.

Prints, for each case and delay, the median and the range of the steps per
second, the share of one core that the switch uses, and the average time by
which packets exceeded the delay. If a delay has several runs, all but the first
also show the median and the range of their speed relative to the first.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from benchmarks import commands, counters, networks
from benchmarks.commands import ROOT, TIMEOUT_SECS, RunError
from benchmarks.ps_harness import median_and_range
from tfdist.launch.processes import task_environment

CASES = {
    "small": "benchmarks.ps_task",
    "wide_and_deep": "benchmarks.contenders.wide_and_deep_tfdist",
}
_JOBS = {"chief": 1, "worker": 2, "ps": 2}
_PORT, _POLL_SECS = 2222, 0.2
_WARM, _ROWS, _EXAMPLES = 500, 100_000, 2_000_000


class Turn(NamedTuple):
    """The settings of a run; the delay is in ms."""

    name: str
    delay: float
    read_ahead: int
    checkout: str


class Measured(NamedTuple):
    """The results of a run; `switch` is the share of a core it used."""

    steps_per_sec: float
    switch: float
    late_us: float


def run(
    name: str, case: dict[str, Any], joined: networks.Networks, cwd: str
) -> Measured:
    """Trains a case with the tfdist of the checkout `cwd`."""
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory) / "output.json"
        told = {**case, "directory": directory, "output": str(output)}
        command = [sys.executable, "-m", CASES[name], json.dumps(told)]
        with joined:
            tasks = _start(command, joined, directory, cwd)
            joined.join()
            samples = _wait(tasks, joined.switch_pid, directory)
        if not output.exists():
            raise RunError(f"{name} wrote no result.")
        rate, began, ended = _window(case, output)
        share = _cpu_share(samples, began, ended)
        return Measured(rate, share, joined.late_us)


def _start(
    command: list[str], joined: networks.Networks, directory: str, cwd: str
) -> dict[str, subprocess.Popen[bytes]]:
    """Starts all tasks, each with its own log; returns them by name."""
    names = [(job, i) for job, count in _JOBS.items() for i in range(count)]
    cluster: dict[str, list[str]] = collections.defaultdict(list)
    for number, (job, _) in enumerate(names):
        cluster[job].append(f"{networks.address(number)}:{_PORT}")
    tasks = {}
    for job, index in names:
        task = {"type": job, "index": index}
        environment = task_environment(job)
        environment.pop("PYTHONPATH", None)
        environment["TF_CONFIG"] = json.dumps(
            {"cluster": cluster, "task": task}
        )
        with open(f"{directory}/{job}:{index}.log", "wb") as log:
            tasks[f"{job}:{index}"] = joined.start(
                command, environment, cwd, log
            )
    return tasks


def _wait(
    tasks: dict[str, subprocess.Popen[bytes]], switch: int, directory: str
) -> list[tuple[float, float]]:
    """Waits for the chief; returns samples of the switch's CPU seconds."""
    samples = []
    deadline = time.monotonic() + TIMEOUT_SECS
    while tasks["chief:0"].poll() != 0:
        for name, task in tasks.items():
            if task.poll():
                said = pathlib.Path(f"{directory}/{name}.log").read_text()
                raise RunError(f"{name} failed: {said[-3000:]}")
        if time.monotonic() > deadline:
            raise RunError(f"It took more than {TIMEOUT_SECS} s.")
        samples.append((time.monotonic(), counters.cpu_seconds(switch)))
        time.sleep(_POLL_SECS)
    return samples


def _cpu_share(
    samples: list[tuple[float, float]], began: float, ended: float
) -> float:
    """Returns the share of a core between the samples nearest to two times."""
    (first, before), (last, after) = (
        min(samples, key=lambda sample: abs(sample[0] - when))
        for when in (began, ended)
    )
    return (after - before) / max(last - first, _POLL_SECS)


def _window(
    case: dict[str, Any], output: pathlib.Path
) -> tuple[float, float, float]:
    """Returns the steps per second, and when they began and ended."""
    result = json.loads(output.read_text())
    if "secs" in result:
        began, secs = result["began"], result["secs"]
        return result["steps"] / secs, began, began + secs
    (rate,) = result["steps_per_sec"]
    ended = output.stat().st_mtime - time.time() + time.monotonic()
    return rate, ended - case["steps"] / rate, ended


def _case(turn: Turn, steps: int, data: str, seed: int) -> dict[str, Any]:
    """Returns the arguments of the tasks."""
    ahead = {"read_ahead": turn.read_ahead} if turn.read_ahead else {}
    if turn.name == "wide_and_deep":
        case = {"rows": _ROWS, "data": data, "seed": seed, "warm": _WARM}
        return {**case, "steps": steps, "options": ahead}
    return {
        **{"who": "tfdist", "model": "table", "optimizer": "adagrad"},
        "options": ahead,
        **{"rows": 10_000, "batch": 32, "unrolled": None},
        **{"steps": steps // 10 * 10, "repeats": 1},
    }


def _write_clicks(directory: str) -> None:
    """Writes data in a subprocess, as TF threads prevent new networks."""
    arguments = f"{directory!r}, {_ROWS}, {_EXAMPLES}"
    program = f"from benchmarks import clicks; clicks.write({arguments})"
    commands.run([sys.executable, "-c", program])


def main() -> None:
    """Prints a row for each case and delay."""
    args = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as directory:
        switch = networks.compile_switch(directory)
        networks.enter()
        trips = [
            networks.round_trip_ms(switch, d, args.mbit) for d in args.delays
        ]
        told = zip(args.delays, trips, strict=True)
        print(
            "round trip measured: "
            + ", ".join(f"{trip:.2f} ms at {delay:g}" for delay, trip in told),
            flush=True,
        )
        if "wide_and_deep" in args.only:
            _write_clicks(directory)
        found: dict[Turn, list[Measured]] = collections.defaultdict(list)
        for seed in range(args.rounds):
            for turn in _turns(args):
                joined = networks.Networks(switch, turn.delay, args.mbit)
                case = _case(turn, args.steps, directory, seed)
                found[turn].append(run(turn.name, case, joined, turn.checkout))
    if not joined.real_time:
        print("The switch has no real-time priority: expect extra delays.")
    for turn in _turns(args):
        _show(turn, found)


def _turns(args: argparse.Namespace) -> list[Turn]:
    """Returns the runs of a round."""
    others = [(ahead, str(ROOT)) for ahead in args.read_ahead]
    others += [(0, args.against)] if args.against else []
    return [
        Turn(name, delay, *other)
        for name in args.only
        for delay in args.delays
        for other in others
    ]


def _show(turn: Turn, found: dict[Turn, list[Measured]]) -> None:
    runs = found[turn]
    row = (
        f"{turn.name:14}{turn.delay:6g} ms, {turn.read_ahead} ahead  "
        f"{median_and_range([r.steps_per_sec for r in runs]):22} steps/s  "
        f"switch {statistics.median(r.switch for r in runs):4.0%}, "
        f"late by {statistics.median(r.late_us for r in runs):4.0f} us"
    )
    first = next(other for other in found if other[:2] == turn[:2])
    if turn != first:
        pairs = zip(found[first], runs, strict=True)
        ratios = [
            other.steps_per_sec / one.steps_per_sec for one, other in pairs
        ]
        where = "" if turn.checkout == str(ROOT) else f"  {turn.checkout}:"
        row += (
            f"{where}  {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f}) times as fast"
        )
    print(row, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delays", default="0,0.25,1,5", help="in ms, one way")
    parser.add_argument("--mbit", type=float, default=0.0, help="0: no limit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--read_ahead", default="0", help="in steps")
    parser.add_argument("--against", type=os.path.abspath, metavar="DIR")
    args = parser.parse_args()
    args.delays = [float(delay) for delay in args.delays.split(",")]
    args.read_ahead = [int(ahead) for ahead in args.read_ahead.split(",")]
    args.only = args.only.split(",")
    if args.against and not pathlib.Path(args.against, "benchmarks").is_dir():
        parser.error(f"--against={args.against} is not a checkout of tfdist.")
    if unknown := set(args.only) - set(CASES):
        parser.error(
            f"--only has unknown cases: {', '.join(sorted(unknown))}. The "
            f"cases are: {', '.join(CASES)}."
        )
    return args


if __name__ == "__main__":
    main()

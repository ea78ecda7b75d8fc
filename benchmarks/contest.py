"""Compares contenders: they run in turns, each in a cluster of its own.

A scenario is a file of `benchmarks/scenarios` with a function
`run(bench: Bench) -> Iterator[Result]`: one result, after each of its sizes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import commands
from benchmarks.commands import RunError
from benchmarks.environments import HERE, Environments, MissingError
from tfdist.launch import testing

_QUICK_TIMEOUT_SECS = 240.0

# What one run of a contender found.
Measured = dict[str, Any]


@dataclasses.dataclass
class Result:
    """The results of a scenario.

    Attributes:
        title: What is compared.
        setting: Sizes, cluster, and whatever the reader must know.
        figures: Dictionaries with "case", "contender", "measure" (with its
            unit) and "values", one for each round.
        missing: Contender to the reason why it did not run.
        curve: Measure that grows from case to case, and what is drawn over it;
            None where cases have nothing to do with each other.
    """

    title: str
    setting: str
    figures: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    curve: tuple[str, str] | None = None

    def add(
        self, case: str, contender: str, measure: str, values: Sequence[float]
    ) -> None:
        """Adds a figure, if there is a value."""
        if values:
            self.figures.append(
                {
                    "case": case,
                    "contender": contender,
                    "measure": measure,
                    "values": list(values),
                }
            )

    def add_steps(
        self, case: str, contender: str, runs: Sequence[Measured], examples: int
    ) -> None:
        """Adds the figures of windows of steps.

        Args:
            case: As in `add`.
            contender: As in `add`.
            runs: What `benchmarks.counters.difference` returned, of each run.
            examples: in a step.
        """
        rates = [run["steps"] / run["secs"] for run in runs]
        cpus = [1e3 * sum(r["cpu"].values()) / r["steps"] for r in runs]
        self.add(case, contender, "steps per second", rates)
        if examples > 1:
            many = [rate * examples for rate in rates]
            self.add(case, contender, "examples per second", many)
        self.add(case, contender, "CPU ms per step", cpus)
        for task in runs[0]["cpu"] if len(runs[0]["cpu"]) > 1 else ():
            own = [1e3 * r["cpu"].get(task, 0) / r["steps"] for r in runs]
            self.add(case, contender, f"CPU ms per step, {task}", own)
        switches = [sum(r["switches"].values()) / r["steps"] for r in runs]
        self.add(case, contender, "context switches per step", switches)
        sent = [r["bytes"] / r["steps"] / 1e3 for r in runs if r.get("wire")]
        self.add(case, contender, "kB per step on the wire", sent)


@dataclasses.dataclass
class Bench:
    """The settings and services that a scenario receives.

    Attributes:
        environments: The interpreters.
        rounds: How often each contender has its turn.
        quick: Whether sizes are tiny: to see that all runs, not how fast.
        only: Names of the contenders to run; empty for all.
    """

    environments: Environments
    rounds: int = 5
    quick: bool = False
    only: frozenset[str] = frozenset()

    def turns(
        self,
        contenders: Mapping[str, Callable[[int], Measured]],
        result: Result,
    ) -> dict[str, list[Measured]]:
        """Runs contenders in turns: A, B, A, B.

        One that fails has no further turn, and `result` says why it is missing.

        Args:
            contenders: Name to a function of the round, from 0.
            result: Where failures are noted.

        Returns:
            What each contender that is not missing measured, by round.
        """
        measured = {
            name: []
            for name in contenders
            if (not self.only or name in self.only)
            and name not in result.missing
        }
        for number in range(self.rounds):
            for name in list(measured):
                start = time.monotonic()
                try:
                    measured[name].append(contenders[name](number))
                except (MissingError, RuntimeError, TimeoutError) as error:
                    result.missing[name] = str(error)
                    del measured[name]
                secs = time.monotonic() - start
                told = "missing" if name in result.missing else "done"
                print(
                    f"  round {number + 1} of {self.rounds}, {name}: {told} "
                    f"after {secs:.0f} s",
                    flush=True,
                )
        return measured

    def run(
        self,
        module: str,
        case: Mapping[str, Any],
        *,
        environment: str = HERE,
        ps: int = 0,
        workers: int = 0,
    ) -> Measured:
        """Runs `python -m <module> <case as JSON>` in a cluster of its own.

        The case also gets "directory", which all tasks share and which is gone
        afterwards, and "output", where the chief leaves JSON.

        Args:
            module: What is run, as every task.
            case: What it is told.
            environment: Whose interpreter runs it.
            ps: Parameter servers.
            workers: Workers; without any there is one process, no cluster.

        Returns:
            What the chief wrote; "wire": whether the network was the
            cluster's alone.

        Raises:
            MissingError: there is no such environment.
            RunError: it failed, with the end of what the chief said.
        """
        python = self.environments.python(environment)
        timeout_secs = (
            _QUICK_TIMEOUT_SECS if self.quick else commands.TIMEOUT_SECS
        )
        with tempfile.TemporaryDirectory() as directory:
            output = pathlib.Path(directory) / "output.json"
            told = {**case, "directory": directory, "output": str(output)}
            command = [python, "-m", module, json.dumps(told)]
            if ps or workers:
                private = _run_cluster(command, ps, workers, timeout_secs)
            else:
                private = False
                commands.run(command, timeout_secs)
            if not output.exists():
                raise RunError(f"{module} left no result.")
            return {**json.loads(output.read_text()), "wire": private}


def _run_cluster(
    command: Sequence[str], ps: int, workers: int, timeout_secs: float
) -> bool:
    """Returns whether the cluster had a network of its own."""
    with testing.LocalCluster(
        command, ps=ps, workers=workers, cwd=commands.ROOT
    ) as cluster:
        try:
            code = cluster.wait(timeout_secs=timeout_secs)
        except TimeoutError as error:
            raise RunError(f"It took more than {timeout_secs} s.") from error
        if code:
            tail = cluster.output("chief:0")[-3000:]
            raise RunError(f"The chief ended with {code}: {tail}")
        return cluster.private


def here(*arguments: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *arguments]

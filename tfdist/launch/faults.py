"""Faults as data: what is to happen to the tasks of a cluster, and what did."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("kill", "freeze", "terminate", "cut_network")
"""The kinds of faults, each a method of `LocalCluster`."""


class NotRunningError(RuntimeError):
    """A fault was to be injected into a task that is dead or frozen already."""


@dataclass(frozen=True)
class Fault:
    """Something bad that is to happen to a task, at a step or at a moment.

    >>> Fault("freeze", "ps:0", at_step=100, for_secs=5).is_due(99, secs=7.0)
    False

    Attributes:
        kind: one of `KINDS`.
        task: "job:index"; None for "cut_network" alone.
        at_step: it happens when the chief's progress says this step, or a
            later one; so it is as precise as those lines are frequent.
        at_secs: or it happens this many seconds after the start of
            `LocalCluster.run`.
        for_secs: how long the task is frozen or down, or the network cut.
            Default: for ever, except that the cluster's `restart_secs` says
            when a dead task is started again. Needed by "cut_network".

    Raises:
        ValueError: if these contradict each other.
    """

    kind: str
    task: str | None = None
    at_step: int | None = None
    at_secs: float | None = None
    for_secs: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            problem = f"Argument `kind` must be one of {', '.join(KINDS)}."
        elif (self.task is None) != (self.kind == "cut_network"):
            problem = (
                'Argument `task` must be "job:index", and None for '
                '"cut_network" alone.'
            )
        elif (self.at_step is None) == (self.at_secs is None):
            problem = "Exactly one of `at_step` and `at_secs` must be given."
        elif self.kind == "cut_network" and self.for_secs is None:
            problem = "Argument `for_secs` must say when the network is mended."
        else:
            return
        raise ValueError(f"{problem} Received: {self}")

    def is_due(self, step: int | None, secs: float) -> bool:
        """Whether it is to happen by now.

        Args:
            step: what the chief's progress says; None before it says any.
            secs: seconds since the start of the run.
        """
        if self.at_secs is not None:
            return secs >= self.at_secs
        assert self.at_step is not None
        return step is not None and step >= self.at_step


def random_faults(
    seed: int,
    count: int,
    tasks: Sequence[str],
    *,
    kinds: Sequence[str] = ("kill", "freeze"),
    at_step: tuple[int, int] | None = None,
    at_secs: tuple[float, float] | None = None,
    for_secs: tuple[float, float] = (1.0, 5.0),
) -> list[Fault]:
    """Draws faults, the same for a seed on every machine and Python.

    Two may come at the same time, and at the same task.

    >>> for fault in random_faults(1, 3, ["ps:0", "worker:0"], at_step=(0, 90)):
    ...     print(fault.at_step, fault.kind, fault.task, fault.for_secs)
    59 kill ps:0 4.15
    69 kill worker:0 2.02
    76 kill ps:0 2.73

    Args:
        seed: of the draw.
        count: how many.
        tasks: the tasks to choose from.
        kinds: likewise, of `KINDS`.
        at_step: first and last step at which they may happen.
        at_secs: or first and last moment, in seconds from the start of the run.
        for_secs: least and greatest number of seconds that each lasts.

    Returns:
        The faults, the earliest first.

    Raises:
        ValueError: as `Fault`, or if there is nothing to choose from.
    """
    for name, choices in (("tasks", tasks), ("kinds", kinds)):
        if isinstance(choices, str) or not choices:
            raise ValueError(
                f"Argument `{name}` must be a list with at least one entry. "
                f"Received: {name}={choices!r}"
            )
    # Of all its methods, only random() is the same in every Python.
    draw = random.Random(seed).random
    faults = []
    for _ in range(count):
        kind = kinds[int(draw() * len(kinds))]
        task = tasks[int(draw() * len(tasks))]
        step = at_step and at_step[0] + int(
            draw() * (at_step[1] - at_step[0] + 1)
        )
        secs = at_secs and _between(*at_secs, draw())
        faults.append(
            Fault(
                kind,
                None if kind == "cut_network" else task,
                at_step=step,
                at_secs=secs,
                for_secs=_between(*for_secs, draw()),
            )
        )
    return sorted(faults, key=lambda f: (f.at_step or 0, f.at_secs or 0))


def _between(low: float, high: float, share: float) -> float:
    return round(low + share * (high - low), 2)


@dataclass(frozen=True)
class Injection:
    """What was done to a task, and what it came to.

    Attributes:
        kind: one of `KINDS`, or "resume".
        task: "job:index"; None for the network.
        pid: the process it was done to; None for the network.
        step: what the chief's progress said then; None before it said any.
        secs: seconds from the start of the cluster.
        effect: the proof, in words: "SIGKILL", "every thread stopped", ...
    """

    kind: str
    task: str | None
    pid: int | None
    step: int | None
    secs: float
    effect: str

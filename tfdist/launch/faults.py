"""Faults as data: what is to happen to the tasks of a cluster, and what did."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("kill", "freeze", "terminate")
"""The kinds of faults, each a method of `LocalCluster`."""


class NotRunningError(RuntimeError):
    """A fault was to be injected into a task that is dead or frozen already."""


@dataclass(frozen=True)
class Fault:
    """Something bad that is to happen to a task at a step.

    >>> Fault("freeze", "ps:0", at_step=100, for_secs=5).is_due(99)
    False

    Attributes:
        kind: one of `KINDS`.
        task: "job:index".
        at_step: it happens when the chief's progress says this step, or a
            later one; so it is as precise as those lines are frequent.
        for_secs: how long the task is frozen or down. Default: for ever, except
            that the cluster's `restart_secs` says when a dead task is started
            again.

    Raises:
        ValueError: if there is no such kind.
    """

    kind: str
    task: str
    at_step: int
    for_secs: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"Argument `kind` must be one of {', '.join(KINDS)}. "
                f"Received: kind={self.kind!r}"
            )

    def is_due(self, step: int | None) -> bool:
        """Whether it is to happen when the chief's progress says `step`."""
        return step is not None and step >= self.at_step


@dataclass(frozen=True)
class Injection:
    """What was done to a task, and what it came to.

    Attributes:
        kind: one of `KINDS`, "resume" or "cut_network".
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

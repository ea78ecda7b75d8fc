"""Faults as data: those to inject into a cluster, and those injected."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist._tf.arguments import check_one_of

KINDS = ("kill", "freeze", "terminate")
"""The kinds of faults, each a method of `LocalCluster`."""


class NotRunningError(RuntimeError):
    """Raised for a fault in a task that is already dead or frozen."""


@dataclass(frozen=True)
class Fault:
    """A fault to inject into a task at a step.

    >>> Fault("freeze", "ps:0", at_step=100, for_secs=5).is_due(99)
    False

    Attributes:
        kind: One of `KINDS`.
        task: "job:index".
        at_step: Inject the fault when the chief reports this step or a later
            one. The more often it reports, the more precise this is.
        for_secs: How long the task is frozen or down. Default: forever, except
            that a dead task is restarted after the cluster's `restart_secs`.

    Raises:
        ValueError: There is no such kind.
    """

    kind: str
    task: str
    at_step: int
    for_secs: float | None = None

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, KINDS)

    def is_due(self, step: int | None) -> bool:
        """Whether to inject the fault when the chief reports `step`."""
        return step is not None and step >= self.at_step


@dataclass(frozen=True)
class Injection:
    """A fault that was injected, and its effect.

    Attributes:
        kind: One of `KINDS`, "resume" or "cut_network".
        task: "job:index"; None for the network.
        pid: Id of the affected process; None for the network.
        step: The last step that the chief had reported; None before any.
        secs: Seconds since the start of the cluster.
        effect: The observed effect: "SIGKILL", "every thread stopped", ...
    """

    kind: str
    task: str | None
    pid: int | None
    step: int | None
    secs: float
    effect: str

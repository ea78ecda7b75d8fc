"""Chooses a strategy, with reasons, from plain numbers.

The estimates reproduce the usual rules: parameter servers for many weak or
unreliable machines, all-reduce for fast devices with fast links, partitioning
for a model too large for a device, more machines for an input-bound job.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping

from tfdist.advice.estimate import PARTS, Estimate, estimates
from tfdist.advice.machines import Machines
from tfdist.advice.workload import Workload

# A simpler strategy is preferred if it attains this share of the best rate.
_WORTH = 0.9
# A loss of a smaller share of the time is not given as a reason.
_NOTABLE = 0.05
_WIDTH = 79
_TOO_LARGE = "The model is too large for a device. Partition it"
_IMPOSSIBLE = (
    f"{_TOO_LARGE} over more machines: tables over parameter servers (CPU or "
    "GPU machines), layers over devices. Or use machines with more memory."
)
_ONE_MACHINE = (
    "Weak links between machines, or unequal machines: a second adds little."
)
_LIMITS = {
    "compute": "Compute-bound: more or faster devices help.",
    "input": "Input-bound: more machines that each prepare a share, input "
    "workers (tf.data service) or a faster input pipeline help.",
    "wait": "Bound by the slowest machine: fewer or more similar ones help.",
    "wire": "Wire-bound: a faster network or a larger batch per replica helps.",
}


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The recommended strategy, the reasons, and the alternatives.

    Attributes:
        strategy: For `RunConfig(strategy=...)`, or `"model_parallel"`; None if
            no strategy is feasible.
        reasons: Sentences: why this strategy was chosen, what limits its speed,
            how it affects training.
        estimates: Estimates of all strategies, from `tfdist.advice.estimates`.
        workload, machines: The arguments of `choose_strategy`.

    >>> step = Workload(batch_size=64, dense_bytes=1e6, compute_secs=0.1)
    >>> choose_strategy(step, Machines()).reasons[0]
    'One device: there is nothing to distribute over.'
    """

    strategy: str | None
    reasons: tuple[str, ...]
    estimates: tuple[Estimate, ...]
    workload: Workload
    machines: Machines

    @property
    def estimate(self) -> Estimate | None:
        """The estimate of the recommended strategy."""
        return {e.strategy: e for e in self.estimates}.get(self.strategy or "")

    def table(self) -> str:
        """Returns estimates and reasons as text at most 79 columns wide."""
        step, machines = self.workload, self.machines
        names = "".join(f"{name:>8}" for name in (*PARTS, "step"))
        lines = [
            f"{machines.count} x {machines.devices} {machines.kind} of "
            f"{in_units(machines.device_memory, _BYTES)}, "
            f"{machines.bandwidth * 8 / 1e9:.3g} Gbit/s and "
            f"{in_units(machines.latency, SECS)} between machines",
            f"{step.batch_size:,} examples a replica, dense "
            f"{in_units(step.dense_bytes, _BYTES)}, tables "
            f"{in_units(step.table_bytes, _BYTES)}, "
            f"{in_units(step.rows_bytes, _BYTES)} of rows a step",
            "",
            f"{'':23}{'n':>5}{names}{'examples/s':>11}",
            *(_row(e, e is self.estimate) for e in self.estimates),
            "",
            f"Advice: {self.strategy or 'none is possible'}",
            *(f"- {reason}" for reason in self.reasons),
        ]
        return "\n".join(
            textwrap.fill(line, _WIDTH, subsequent_indent="  ")
            for line in lines
        )


def choose_strategy(workload: Workload, machines: Machines) -> Recommendation:
    """Recommends a strategy.

    Chooses the strategy with the most examples per second, including the cost
    of failures, or a simpler one that attains at least 90 % of that. Chooses
    model parallelism only if no other strategy is feasible.

    >>> resnet = Workload(batch_size=64, dense_bytes=102e6, flops=1.5e12)
    >>> choose_strategy(resnet, Machines(kind="gpu", devices=8)).strategy
    'mirrored'
    >>> spot = Machines(count=100, secs_between_failures=86400)
    >>> choose_strategy(resnet, spot).strategy
    'ps'
    """
    made = estimates(workload, machines)
    possible = [e for e in made if e.feasible]
    if not possible:
        return Recommendation(None, (_IMPOSSIBLE,), made, workload, machines)
    ways = [e for e in possible if e.strategy != "model_parallel"] or possible
    best = max(e.examples_per_sec for e in ways)
    chosen = next(e for e in ways if e.examples_per_sec >= _WORTH * best)
    reasons = _why(chosen, {e.strategy: e for e in made})
    reasons.append(_LIMITS[chosen.bound])
    if chosen.strategy == "ps":
        reasons.append(
            f"Asynchronous: about {chosen.replicas - 1:,} other updates land "
            "between a worker's read and its write. Such stale gradients can "
            "delay convergence."
        )
    elif chosen.replicas > 1:
        reasons.append(
            f"Synchronous: the global batch is {chosen.replicas:,} x "
            f"{chosen.batch_size:,} = {chosen.replicas * chosen.batch_size:,} "
            "examples. Tune the learning rate for it."
        )
    name, why = chosen.strategy, tuple(reasons)
    return Recommendation(name, why, made, workload, machines)


def _why(chosen: Estimate, others: Mapping[str, Estimate]) -> list[str]:
    """Returns the reasons why a strategy is better than the others."""
    copied = others["multi_worker_mirrored"]
    if chosen.strategy == "ps" and copied.feasible:
        step = copied.secs_per_step
        losses = {
            "Unreliable machines: all-reduce would lose {:.0%} more of its "
            "time, since every failure takes all workers back to the last "
            "checkpoint.": chosen.goodput - copied.goodput,
            "Many weak machines, of unequal pace: all-reduce would wait {:.0%} "
            "of a step for the slowest.": copied.wait_secs / step,
            "Weak links: all-reduce would spend {:.0%} of a step more on the "
            "wire.": (copied.wire_secs - chosen.wire_secs) / step,
        }
        return [
            text.format(loss)
            for text, loss in losses.items()
            if loss > _NOTABLE
        ] or ["All-reduce would lose more to failures, waiting and the wire."]
    if chosen.strategy in ("ps", "model_parallel"):
        servers = f"{chosen.num_ps} parameter server{'s' * (chosen.num_ps > 1)}"
        how = {
            "ps": f" over {servers}: a worker holds and transfers only what a "
            "step uses.",
            "model_parallel": ": layers on different devices work as a "
            "pipeline (model parallelism).",
        }
        return [_TOO_LARGE + how[chosen.strategy]]
    if chosen.replicas > 1:
        share = chosen.wire_secs / chosen.secs_per_step
        why = [
            f"{'Strong' if share < 1 / 2 else 'Sufficient'} links: all-reduce "
            f"takes {share:.0%} of a step of {chosen.replicas:,} devices, each "
            "with a copy of the model."
        ]
        return why + [_ONE_MACHINE] * (chosen.machines < copied.machines)
    several = [e for e in others.values() if e.feasible and e.replicas > 1]
    if not several:
        return ["One device: there is nothing to distribute over."]
    best = max(several, key=lambda e: e.examples_per_sec)
    share = best.wire_secs / best.secs_per_step
    why_not = (
        "input for one device is all that a machine prepares."
        if best.bound == "input"
        else "the step is too short, or the links are too weak. "
        f"{best.strategy} would spend {share:.0%} of a step on the wire. A "
        "larger batch a replica would change that."
    )
    return [f"Not worth distributing: {why_not}"]


def _row(estimate: Estimate, advised: bool) -> str:
    name = f"{'>' if advised else ' '} {estimate.strategy}"
    if estimate.num_ps:
        name += f" ({estimate.num_ps:,} server{'s' * (estimate.num_ps > 1)})"
    if not estimate.feasible:
        return f"{name:26}{estimate.why_not}"
    parts = [getattr(estimate, f"{part}_secs") for part in PARTS]
    parts.append(estimate.secs_per_step)
    seconds = "".join(f"{in_units(secs, SECS):>8}" for secs in parts)
    # An estimate is accurate to two digits at most.
    rate = float(f"{estimate.examples_per_sec:.2g}")
    rounded = f"{rate:,.0f}" if 10 <= rate < 1e8 else f"{rate:.2g}"
    return f"{name:23}{estimate.replicas:>5}{seconds}{rounded:>11}"


SECS = dict(ns=1e-9, us=1e-6, ms=1e-3, s=1.0, h=3600.0, d=86400.0)
_BYTES = dict(B=1.0, kB=1e3, MB=1e6, GB=1e9, TB=1e12)


def in_units(value: float, units: Mapping[str, float]) -> str:
    """Formats a value with three digits, in the first unit that fits.

    >>> in_units(0.0123, SECS), in_units(7200, SECS), in_units(0.0, SECS)
    ('12.3 ms', '2 h', '0')
    """
    unit = next((u for u in units if value < 999.5 * units[u]), [*units][-1])
    number = value / units[unit]
    return f"{number:.3g} {unit}" if value >= min(units.values()) else "0"

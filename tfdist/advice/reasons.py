"""Why a strategy is advised, in the words of the field.

The first reason says why this one, the next what limits it and what would
help, the last what changes for the training itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfdist.advice.cost_model import Estimate, replica_bytes
from tfdist.advice.machines import Machines
from tfdist.advice.workload import Workload

Estimates = Mapping[str, Estimate]

# What takes a smaller share of the time is not worth a reason.
_NOTABLE = 0.1
# All-reduce that takes more of a step has no strong links.
_STRONG = 1 / 2


def reasons_for(
    chosen: Estimate, others: Estimates, step: Workload, machines: Machines
) -> tuple[str, ...]:
    """Says why `chosen` is advised, what limits it, and what to mind.

    Args:
        chosen: The estimate of the advised strategy.
        others: All estimates, by strategy.
        step: What was asked about.
        machines: What was asked about.

    Returns:
        Sentences, the most important first.
    """
    if chosen.strategy == "ps":
        why = _why_ps(chosen, others, step)
    elif chosen.strategy == "model_parallel":
        why = [
            "The model is too large for a device: a copy that trains needs "
            f"{bytes_text(replica_bytes(step))}, a device has "
            f"{bytes_text(machines.device_memory)}. Partition it: layers on "
            "different devices work as a pipeline (model parallelism)."
        ]
    elif chosen.replicas == 1:
        why = [_why_one(others)]
    else:
        why = _why_all_reduce(chosen, others, machines)
    return (*why, *_limit(chosen, machines), *_mind(chosen, step))


def reasons_for_none(
    made: Sequence[Estimate], step: Workload
) -> tuple[str, ...]:
    """Says why nothing is possible, and what would make it so."""
    short = ", ".join(e.strategy for e in made if e.bound == "memory")
    return (
        "The model is too large for these machines: a copy that trains needs "
        f"{bytes_text(replica_bytes(step))}, which is too much for {short}. "
        "Partition it over more of them: tables over parameter servers (CPU or "
        "GPU machines), layers over devices; or use more memory.",
    )


def _why_ps(chosen: Estimate, others: Estimates, step: Workload) -> list[str]:
    copied = others["multi_worker_mirrored"]
    if not copied.feasible:
        return [
            "The model is too large for a device: "
            f"{bytes_text(step.state_bytes)} with its slots. Partition it over "
            f"{chosen.num_ps} parameter server{'s' * (chosen.num_ps > 1)}: a "
            "worker holds and moves only the "
            f"{bytes_text(step.dense_bytes + step.rows_bytes)} that a step "
            "touches."
        ]
    why = []
    if chosen.kept - copied.kept > _NOTABLE / 2:
        why.append(
            f"Unreliable machines: all-reduce would lose {1 - copied.kept:.0%} "
            "of its time, since every failure takes all workers back to the "
            "last checkpoint. With parameter servers a lost worker costs its "
            "own dispatch."
        )
    if copied.wait_secs > _NOTABLE * copied.secs_per_step:
        why.append(
            "Many weak machines, of unequal pace: all-reduce would wait "
            f"{secs_text(copied.wait_secs)} a step for the slowest of "
            f"{copied.machines:,}. Asynchronous workers do not wait."
        )
    if copied.wire_secs - chosen.wire_secs > _NOTABLE * copied.secs_per_step:
        why.append(
            f"Weak links: all-reduce over {copied.replicas:,} devices would "
            f"spend {secs_text(copied.wire_secs)} a step on the wire, "
            f"parameter servers {secs_text(chosen.wire_secs)}."
        )
    return why or [
        "Parameter servers lose a little less than all-reduce to failures, to "
        "waiting and to the wire together."
    ]


def _why_one(others: Estimates) -> str:
    several = [e for e in others.values() if e.feasible and e.replicas > 1]
    if not several:
        return "One device: there is nothing to distribute over."
    best = max(several, key=lambda e: e.examples_per_sec)
    if best.bound == "input":
        return (
            "Not worth distributing: input for one device is all that a "
            "machine prepares."
        )
    return (
        "Not worth distributing: the step is too short, or the links are too "
        f"weak. {best.strategy} would spend {secs_text(best.wire_secs)} of a "
        f"step of {secs_text(best.secs_per_step)} on the wire. A larger batch "
        "a replica would change that."
    )


def _why_all_reduce(
    chosen: Estimate, others: Estimates, machines: Machines
) -> list[str]:
    share = chosen.wire_secs / chosen.secs_per_step
    who = (
        "Few machines, alike and reliable,"
        if machines.kind == "cpu"
        else "Fast devices"
    )
    why = [
        f"{who} with {'strong' if share <= _STRONG else 'sufficient'} links: "
        f"all-reduce takes {share:.0%} of a step. {chosen.replicas:,} devices, "
        f"each with a copy of the model, are worth "
        f"{_gain(chosen, others['one_device']):.3g}."
    ]
    wider = others["multi_worker_mirrored"]
    if chosen.strategy == "mirrored" and wider.feasible:
        weak = "Weak links between machines" if wider.bound == "wire" else ""
        why.append(
            f"{weak or 'More machines add little'}: all {machines.count:,} "
            f"would do {_gain(wider, chosen):.3g} times the examples a second."
        )
    return why


def _gain(estimate: Estimate, other: Estimate) -> float:
    """How many times the examples a second of another; a TPU has no other."""
    if not other.examples_per_sec:
        return estimate.replicas / other.replicas
    return estimate.examples_per_sec / other.examples_per_sec


def _limit(chosen: Estimate, machines: Machines) -> list[str]:
    """What most of a step is spent on, and what would help."""
    secs = secs_text(getattr(chosen, f"{chosen.bound}_secs"))
    if chosen.bound == "input":
        unused = chosen.machines < machines.count
        return [
            f"Input-bound: a machine prepares its batches in {secs}, computes "
            f"in {secs_text(chosen.compute_secs)}. "
            + (
                "A faster input pipeline or input workers help"
                if unused
                else "More machines, each preparing its share, or input "
                "workers (tf.data service) help"
            )
            + ", faster devices do not."
        ]
    if chosen.bound == "wire":
        return [
            f"Wire-bound: {secs} of a step of "
            f"{secs_text(chosen.secs_per_step)}. A faster network or a larger "
            "batch a replica helps, faster devices do not."
        ]
    if chosen.bound == "wait":
        return [
            f"Bound by the slowest of {chosen.machines:,} machines, {secs} a "
            "step. Fewer machines, or more alike, help."
        ]
    return ["Compute-bound: more or faster devices help."]


def _mind(chosen: Estimate, step: Workload) -> list[str]:
    """What changes for the training itself."""
    if chosen.replicas == 1:
        return []
    if chosen.strategy == "ps":
        return [
            f"Asynchronous: about {chosen.replicas - 1:,} other updates land "
            "between a worker's read and its write. Such stale gradients can "
            "delay convergence."
        ]
    batch = chosen.replicas * step.batch_size
    return [
        f"Synchronous: the global batch is {chosen.replicas:,} x "
        f"{step.batch_size:,} = {batch:,} examples. Tune the learning rate "
        "for it."
    ]


def secs_text(secs: float) -> str:
    """Returns seconds in three digits and a unit, at most seven characters.

    >>> secs_text(0.0123), secs_text(7200), secs_text(0.0)
    ('12.3 ms', '2 h', '0')
    """
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
    units |= {"h": 3600.0, "d": 86400.0}
    return _text(secs, units) if secs >= 1e-9 else "0"


def bytes_text(size: float) -> str:
    """Returns bytes in three digits and a unit.

    >>> bytes_text(102e6), bytes_text(160e9), bytes_text(0.0)
    ('102 MB', '160 GB', '0')
    """
    units = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    return _text(size, units) if size >= 0.01 else "0"


def _text(value: float, units: Mapping[str, float]) -> str:
    """In the first unit in which three digits can say it."""
    unit = next((u for u in units if value < 999.5 * units[u]), [*units][-1])
    return f"{value / units[unit]:.3g} {unit}"

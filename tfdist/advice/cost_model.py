"""What a step costs under each way to distribute it.

The formulas of `tfdist.advice.cost_formulas`, applied to a model and to
machines: to compare the ways with each other, not to predict a stopwatch. Every
replica takes `batch_size` examples a step, so more replicas mean more examples
a second, not shorter steps. Left out: compute overlapped with the wire, the
optimizer's own arithmetic, the chief's half millisecond a dispatch, and how
fast a model learns from large batches or stale gradients.
"""

from __future__ import annotations

import dataclasses
import math

from tfdist.advice.cost_formulas import (
    all_gather_secs,
    all_reduce_secs,
    pace,
    pipeline_secs,
    ps_secs,
)
from tfdist.advice.machines import Machines
from tfdist.advice.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step would cost in one way.

    `secs_per_step` is the larger of `compute_secs` and `input_secs` (batches
    are prepared while the last one is computed), `wait_secs` and `wire_secs`.

    Attributes:
        strategy: As in `RunConfig(strategy=...)`, or `"model_parallel"`.
        why_not: Why it cannot be done; empty if it can.
        replicas: Batches computed at the same time.
        machines: Machines used, parameter servers included.
        num_ps: Parameter servers among them.
        compute_secs: Forward and backward pass.
        input_secs: A machine's time to prepare one batch for each replica.
        wait_secs: Waiting for the slowest machine.
        wire_secs: Waiting for bytes.
        kept: Share of the time that is not lost by failures.
        examples_per_sec: Of all replicas, failures counted.
    """

    strategy: str
    why_not: str = ""
    replicas: int = 1
    machines: int = 1
    num_ps: int = 0
    compute_secs: float = 0.0
    input_secs: float = 0.0
    wait_secs: float = 0.0
    wire_secs: float = 0.0
    kept: float = 1.0
    examples_per_sec: float = 0.0

    @property
    def feasible(self) -> bool:
        """Whether it can be done."""
        return not self.why_not

    @property
    def secs_per_step(self) -> float:
        """Seconds from one step of a replica to its next; infinite if never."""
        if self.why_not:
            return math.inf
        busy = max(self.compute_secs, self.input_secs)
        # A step that needs nothing would take no time.
        return max(busy + self.wait_secs + self.wire_secs, 1e-12)

    @property
    def bound(self) -> str:
        """The largest part: `"compute"`, `"input"`, `"wait"` or `"wire"`.

        `"memory"` if it does not fit, `""` if it is impossible otherwise.
        """
        if self.why_not:
            return "memory" if self.why_not.startswith("memory") else ""
        parts = ("compute", "input", "wait", "wire")
        return max(parts, key=lambda part: getattr(self, f"{part}_secs"))


def estimates(step: Workload, machines: Machines) -> tuple[Estimate, ...]:
    """Estimates every way, from the simplest to the least simple.

    Args:
        step: What a step needs.
        machines: What there is.

    Returns:
        Six estimates: one_device, mirrored, tpu, multi_worker_mirrored, ps,
        model_parallel. One that is impossible says `why_not`.

    Example:
    >>> step = Workload(batch_size=32, dense_bytes=4e6, compute_secs=0.1)
    >>> [e.strategy for e in estimates(step, Machines(count=2)) if e.feasible]
    ['one_device', 'multi_worker_mirrored', 'ps', 'model_parallel']
    """
    ways = {
        "one_device": _one_device,
        "mirrored": _mirrored,
        "tpu": _tpu,
        "multi_worker_mirrored": _multi_worker_mirrored,
        "ps": _ps,
        "model_parallel": _model_parallel,
    }
    made = []
    for strategy, way in ways.items():
        try:
            made.append(way(step, machines))
        except _Impossible as e:
            made.append(Estimate(strategy=strategy, why_not=str(e)))
    return tuple(made)


def replica_bytes(step: Workload) -> float:
    """Bytes of a copy that trains: state, gradients, activations."""
    gradients = step.dense_bytes + step.rows_bytes
    return step.state_bytes + gradients + step.activation_bytes


class _Impossible(Exception):
    """A strategy that cannot train this model on these machines."""


def _need(possible: bool, why_not: str) -> None:
    if not possible:
        raise _Impossible(why_not)


def _need_memory(size: float, memory: float, holder: str) -> None:
    _need(
        size <= memory,
        f"memory: {size / 1e9:,.4g} GB, {holder} has {memory / 1e9:,.4g}",
    )


def _need_no_tpu(machines: Machines) -> None:
    _need(machines.kind != "tpu", "a TPU trains with TPUStrategy")


def _one_device(step: Workload, machines: Machines) -> Estimate:
    _need_no_tpu(machines)
    return _copies("one_device", step, machines, 1, 1, machines.near)


def _mirrored(step: Workload, machines: Machines) -> Estimate:
    _need_no_tpu(machines)
    _need(machines.devices > 1, "a machine has one device")
    return _copies(
        "mirrored", step, machines, 1, machines.devices, machines.near
    )


def _tpu(step: Workload, machines: Machines) -> Estimate:
    _need(machines.kind == "tpu", "there is no TPU")
    count, devices = machines.count, machines.devices
    return _copies("tpu", step, machines, count, devices, machines.near)


def _multi_worker_mirrored(step: Workload, machines: Machines) -> Estimate:
    _need_no_tpu(machines)
    _need(machines.count > 1, "there is one machine")
    return _copies(
        "multi_worker_mirrored",
        step,
        machines,
        machines.count,
        machines.devices,
        machines.far,
    )


def _copies(
    strategy: str,
    step: Workload,
    machines: Machines,
    count: int,
    devices: int,
    link: tuple[float, float],
) -> Estimate:
    """Synchronous training: a copy of the model on every device."""
    _need_memory(replica_bytes(step), machines.device_memory, "a device")
    replicas = count * devices
    return _synchronous(
        strategy,
        step,
        machines,
        count=count,
        replicas=replicas,
        compute=machines.compute_secs(step),
        fed=devices * step.input_secs,
        wire=all_reduce_secs(step.dense_bytes, replicas, *link)
        + all_gather_secs(step.rows_bytes, replicas, *link),
    )


def _model_parallel(step: Workload, machines: Machines) -> Estimate:
    """One pipeline over the devices of a machine; over all if it must."""
    _need_no_tpu(machines)
    total = machines.count * machines.devices
    memory = machines.device_memory
    size = replica_bytes(step)
    _need(total > 1, "there is one device")
    _need_memory(size / total, memory, f"each of {total} devices")
    _need_memory(_largest_layer(step), memory, "the device of one layer")
    near = machines.devices > 1 and size <= machines.devices * memory
    count = 1 if near else machines.count
    parts = count * machines.devices
    compute, wire = pipeline_secs(
        machines.compute_secs(step),
        step.boundary_bytes,
        parts,
        # GPipe finds filling and draining negligible from four a part on.
        min(int(step.batch_size), 4 * parts),
        *(machines.near if near else machines.far),
    )
    return _synchronous(
        "model_parallel",
        step,
        machines,
        count=count,
        replicas=1,
        compute=compute,
        fed=step.input_secs,
        wire=wire,
    )


def _largest_layer(step: Workload) -> float:
    """Bytes, with slots, of what no two devices share: tables count as one."""
    weights = step.dense_bytes + step.table_bytes
    largest = max(step.table_bytes, step.largest_bytes)
    return largest * step.state_bytes / weights if weights else 0.0


def _synchronous(
    strategy: str,
    step: Workload,
    machines: Machines,
    *,
    count: int,
    replicas: int,
    compute: float,
    fed: float,
    wire: float,
) -> Estimate:
    """All wait for the slowest; any failure takes all to the checkpoint."""
    slower = pace(count, machines.spread) - 1
    return _with_rate(
        Estimate(
            strategy=strategy,
            replicas=replicas,
            machines=count,
            compute_secs=compute,
            input_secs=fed,
            wait_secs=max(compute, fed) * slower,
            wire_secs=wire,
            kept=machines.kept_share(count),
        ),
        step,
    )


def _ps(step: Workload, machines: Machines) -> Estimate:
    """As many servers as give the most examples a second."""
    _need(machines.kind != "tpu", "parameter servers have no TPU workers")
    _need(machines.count > 1, "one machine cannot both serve and work")
    moved = step.dense_bytes + step.rows_bytes
    _need_memory(
        2 * moved + step.activation_bytes, machines.device_memory, "a worker"
    )
    most = machines.count - 1
    _need_memory(
        step.state_bytes,
        most * machines.host_memory,
        f"{most} server{'s' * (most > 1)}",
    )
    least = max(1, math.ceil(step.state_bytes / machines.host_memory))
    return max(
        (_served(step, machines, num_ps) for num_ps in range(least, most + 1)),
        key=lambda estimate: estimate.examples_per_sec,
    )


def _served(step: Workload, machines: Machines, num_ps: int) -> Estimate:
    """Asynchronous training: nobody waits for another worker."""
    devices = machines.devices
    workers = (machines.count - num_ps) * devices
    compute, fed = machines.compute_secs(step), devices * step.input_secs
    own, server = ps_secs(
        step.dense_bytes + step.rows_bytes,
        step.largest_bytes,
        workers,
        num_ps,
        machines.bandwidth,
        machines.latency,
        workers_per_machine=devices,
    )
    # A lost worker is missed until it is back. A lost server undoes what all
    # have done since the last checkpoint.
    missed = machines.restart_secs / machines.secs_between_failures
    return _with_rate(
        Estimate(
            strategy="ps",
            replicas=workers,
            machines=machines.count,
            num_ps=num_ps,
            compute_secs=compute,
            input_secs=fed,
            wire_secs=max(own, server - max(compute, fed)),
            kept=machines.kept_share(num_ps) / (1 + missed),
        ),
        step,
    )


def _with_rate(estimate: Estimate, step: Workload) -> Estimate:
    examples = estimate.replicas * step.batch_size * estimate.kept
    return dataclasses.replace(
        estimate, examples_per_sec=examples / estimate.secs_per_step
    )

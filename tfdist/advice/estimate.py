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
from typing import Any

from tfdist.advice.cost_formulas import (
    all_gather_secs,
    all_reduce_secs,
    goodput,
    pace,
    pipeline_secs,
    ps_secs,
)
from tfdist.advice.machines import Machines
from tfdist.advice.workload import Workload

Link = tuple[float, float]  # Bytes a second, and seconds of latency.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step would cost in one way.

    `secs_per_step` is the larger of `compute_secs` and `input_secs` (batches
    are prepared while the last one is computed), `wait_secs` and `wire_secs`.

    Attributes:
        strategy: As in `RunConfig(strategy=...)`, or `"model_parallel"`.
        batch_size: Examples of one replica.
        why_not: Why it cannot be done; empty if it can.
        replicas: Batches computed at the same time.
        machines: Machines used, parameter servers included.
        num_ps: Parameter servers among them.
        compute_secs: Forward and backward pass.
        input_secs: A machine's time to prepare one batch for each replica.
        wait_secs: Waiting for the slowest machine.
        wire_secs: Waiting for bytes.
        goodput: Share of the time that is not lost by failures.

    Example:
    >>> step = Estimate(strategy="ps", batch_size=8, replicas=4, wire_secs=0.5)
    >>> step.examples_per_sec, step.bound
    (64.0, 'wire')
    """

    strategy: str
    batch_size: int
    why_not: str = ""
    replicas: int = 1
    machines: int = 1
    num_ps: int = 0
    compute_secs: float = 0.0
    input_secs: float = 0.0
    wait_secs: float = 0.0
    wire_secs: float = 0.0
    goodput: float = 1.0

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
    def examples_per_sec(self) -> float:
        """Of all replicas, failures counted; 0.0 if it cannot be done."""
        examples = self.replicas * self.batch_size * self.goodput
        return examples / self.secs_per_step

    @property
    def bound(self) -> str:
        """The largest part: `"compute"`, `"input"`, `"wait"` or `"wire"`."""
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
    m = machines
    near = m.device_bandwidth, m.device_latency
    # The weakest link of a ring through all machines.
    far = min(m.bandwidth, near[0]), max(m.latency, near[1])
    tpu = "a TPU trains with TPUStrategy" * (m.kind == "tpu")
    alone = tpu or "a machine has one device" * (m.devices == 1)
    one = tpu or "there is one machine" * (m.count == 1)
    none = "there is no TPU" * (m.kind != "tpu")
    return (
        _copies("one_device", tpu, step, m, 1, 1, near),
        _copies("mirrored", alone, step, m, 1, m.devices, near),
        _copies("tpu", none, step, m, m.count, m.devices, near),
        _copies(
            *("multi_worker_mirrored", one, step, m, m.count, m.devices, far)
        ),
        _ps(step, m),
        _model_parallel(tpu, step, m, near, far),
    )


def replica_bytes(step: Workload) -> float:
    """Bytes of a copy that trains: state, gradients, activations."""
    gradients = step.dense_bytes + step.rows_bytes
    return step.state_bytes + gradients + step.activation_bytes


def _too_large(size: float, memory: float, holder: str) -> str:
    if size <= memory:
        return ""
    return f"memory: {size / 1e9:,.4g} GB, {holder} has {memory / 1e9:,.4g}"


def _copies(
    strategy: str,
    why_not: str,
    step: Workload,
    machines: Machines,
    count: int,
    devices: int,
    link: Link,
) -> Estimate:
    """Synchronous training: a copy of the model on every device."""
    replicas = count * devices
    return _synchronous(
        strategy,
        why_not
        or _too_large(replica_bytes(step), machines.device_memory, "a device"),
        step,
        machines,
        count=count,
        replicas=replicas,
        compute_secs=machines.compute_secs(step),
        input_secs=devices * step.input_secs,
        wire_secs=all_reduce_secs(step.dense_bytes, replicas, *link)
        + all_gather_secs(step.rows_bytes, replicas, *link),
    )


def _model_parallel(
    why_not: str, step: Workload, machines: Machines, near: Link, far: Link
) -> Estimate:
    """One pipeline over the devices of a machine; over all if it must."""
    total = machines.count * machines.devices
    memory, size = machines.device_memory, replica_bytes(step)
    # No two devices share a weight; tables count as one.
    largest = max(step.table_bytes, step.largest_bytes)
    if largest:
        largest *= step.state_bytes / (step.dense_bytes + step.table_bytes)
    is_near = machines.devices > 1 and size <= machines.devices * memory
    count = 1 if is_near else machines.count
    parts = count * machines.devices
    compute_secs, wire_secs = pipeline_secs(
        machines.compute_secs(step),
        step.boundary_bytes,
        parts,
        # GPipe finds filling and draining negligible from four a part on.
        min(int(step.batch_size), 4 * parts),
        *(near if is_near else far),
    )
    return _synchronous(
        "model_parallel",
        why_not
        or "there is one device" * (total == 1)
        or _too_large(size / total, memory, f"each of {total} devices")
        or _too_large(largest, memory, "the device of one layer"),
        step,
        machines,
        count=count,
        replicas=1,
        compute_secs=compute_secs,
        input_secs=step.input_secs,
        wire_secs=wire_secs,
    )


def _synchronous(
    strategy: str,
    why_not: str,
    step: Workload,
    machines: Machines,
    *,
    count: int,
    **fields: Any,
) -> Estimate:
    """All wait for the slowest; any failure takes all to the checkpoint."""
    busy = max(fields["compute_secs"], fields["input_secs"])
    return Estimate(
        strategy=strategy,
        why_not=why_not,
        batch_size=step.batch_size,
        machines=count,
        wait_secs=busy * (pace(count, machines.spread) - 1),
        goodput=_goodput(machines, count),
        **fields,
    )


def _ps(step: Workload, machines: Machines) -> Estimate:
    """Asynchronous, with the number of servers that is fastest."""
    most = machines.count - 1
    worker_bytes = 2 * (step.dense_bytes + step.rows_bytes)
    worker_bytes += step.activation_bytes
    servers = f"{most} server{'s' * (most > 1)}"
    why_not = (
        "parameter servers have no TPU workers" * (machines.kind == "tpu")
        or "one machine cannot both serve and work" * (most == 0)
        or _too_large(worker_bytes, machines.device_memory, "a worker")
        or _too_large(step.state_bytes, most * machines.host_memory, servers)
    )
    if why_not:
        return Estimate(
            strategy="ps", batch_size=step.batch_size, why_not=why_not
        )
    least = max(1, math.ceil(step.state_bytes / machines.host_memory))
    return max(
        (_served(step, machines, num_ps) for num_ps in range(least, most + 1)),
        key=lambda estimate: estimate.examples_per_sec,
    )


def _served(step: Workload, machines: Machines, num_ps: int) -> Estimate:
    """Nobody waits for another worker."""
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
    return Estimate(
        strategy="ps",
        batch_size=step.batch_size,
        replicas=workers,
        machines=machines.count,
        num_ps=num_ps,
        compute_secs=compute,
        input_secs=fed,
        wire_secs=max(own, server - max(compute, fed)),
        goodput=_goodput(machines, num_ps) / (1 + missed),
    )


def _goodput(machines: Machines, count: int) -> float:
    """If the loss of one of `count` machines stops all."""
    return goodput(
        count / machines.secs_between_failures,
        machines.checkpoint_secs,
        machines.restart_secs,
    )

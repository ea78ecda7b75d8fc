"""What a step costs under each way to distribute it.

To compare the ways with each other, not to predict a stopwatch. Every replica
takes `batch_size` examples a step, so more replicas mean more examples a
second, not shorter steps. Left out: compute overlapped with the wire, the
optimizer's own arithmetic, the chief's three milliseconds a dispatch, and how
fast a model learns from large batches or stale gradients.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from tfdist.advice import cost_formulas
from tfdist.advice.machines import Machines
from tfdist.advice.workload import Workload

PARTS = ("compute", "input", "wait", "wire")  # Of a step.
_Link = tuple[float, float]  # Bytes a second, and seconds of latency.


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
        return max(PARTS, key=lambda part: getattr(self, f"{part}_secs"))


def estimates(step: Workload, machines: Machines) -> tuple[Estimate, ...]:
    """Estimates every way, from the simplest to the least simple.

    They are: one_device, mirrored, tpu, multi_worker_mirrored, ps,
    model_parallel. One that is impossible says `why_not`.

    >>> step = Workload(batch_size=32, dense_bytes=4e6, compute_secs=0.1)
    >>> [e.strategy for e in estimates(step, Machines(count=2)) if e.feasible]
    ['one_device', 'multi_worker_mirrored', 'ps', 'model_parallel']
    """
    m = machines
    tpu = "a TPU trains with TPUStrategy" * (m.kind == "tpu")
    alone = tpu or "a machine has one device" * (m.devices == 1)
    one = tpu or "there is one machine" * (m.count == 1)
    none = "there is no TPU" * (m.kind != "tpu")
    job = _Job(step, m)
    near = m.device_bandwidth, m.device_latency
    # The weakest link of a ring through all machines.
    far = min(m.bandwidth, near[0]), max(m.latency, near[1])
    return (
        job.copies("one_device", tpu, 1, 1, near),
        job.copies("mirrored", alone, 1, m.devices, near),
        job.copies("tpu", none, m.count, m.devices, near),
        job.copies("multi_worker_mirrored", one, m.count, m.devices, far),
        job.served(),
        job.pipeline(tpu, near, far),
    )


def replica_bytes(step: Workload) -> float:
    """Bytes of a copy that trains: state, gradients, activations."""
    gradients = step.dense_bytes + step.rows_bytes
    return step.state_bytes + gradients + step.activation_bytes


class _Job(NamedTuple):
    step: Workload
    m: Machines

    def compute_secs(self) -> float:
        if self.step.compute_secs is not None:
            return self.step.compute_secs
        return self.step.flops / self.m.device_flops

    def goodput(self, count: int) -> float:
        m, rate = self.m, count / self.m.secs_between_failures
        return cost_formulas.goodput(rate, m.checkpoint_secs, m.restart_secs)

    def synchronous(
        self, strategy: str, why_not: str, count: int, **fields: Any
    ) -> Estimate:
        """All wait for the slowest; any failure takes all to the checkpoint."""
        busy = max(fields["compute_secs"], fields["input_secs"])
        return Estimate(
            strategy=strategy,
            why_not=why_not,
            batch_size=self.step.batch_size,
            machines=count,
            wait_secs=busy * (cost_formulas.pace(count, self.m.spread) - 1),
            goodput=self.goodput(count),
            **fields,
        )

    def copies(
        self, strategy: str, why_not: str, count: int, devices: int, link: _Link
    ) -> Estimate:
        """A copy of the model on every device."""
        step, memory = self.step, self.m.device_memory
        n, (bandwidth, latency) = count * devices, link
        wire = cost_formulas.all_reduce_secs(step.dense_bytes, n, *link)
        if step.rows_bytes:  # TensorFlow gathers `tf.IndexedSlices`.
            wire += (n - 1) * (step.rows_bytes / bandwidth + latency)
        return self.synchronous(
            strategy,
            why_not or _too_large(replica_bytes(step), memory, "a device"),
            count,
            replicas=n,
            compute_secs=self.compute_secs(),
            input_secs=devices * step.input_secs,
            wire_secs=wire,
        )

    def pipeline(self, why_not: str, near: _Link, far: _Link) -> Estimate:
        """Layers over the devices of a machine; over all if it must be.

        m micro-batches pass p devices in m + p - 1 turns (Huang et al., 2019,
        "GPipe"). Each turn moves a share of the boundary, forward and back.
        """
        step, memory = self.step, self.m.device_memory
        size, total = replica_bytes(step), self.m.count * self.m.devices
        # No two devices share a weight; tables count as one.
        largest = max(step.table_bytes, step.largest_bytes)
        if largest:
            largest *= step.state_bytes / (step.dense_bytes + step.table_bytes)
        is_near = self.m.devices > 1 and size <= self.m.devices * memory
        parts = self.m.devices if is_near else total
        bandwidth, latency = near if is_near else far
        # GPipe finds filling and draining negligible from four a part on.
        micro_batches = min(step.batch_size, 4 * parts)
        turns = micro_batches + parts - 1
        moved = step.boundary_bytes / micro_batches
        return self.synchronous(
            "model_parallel",
            why_not
            or "there is one device" * (total == 1)
            or _too_large(size / total, memory, f"each of {total} devices")
            or _too_large(largest, memory, "the device of one layer"),
            parts // self.m.devices,
            compute_secs=turns * self.compute_secs() / parts / micro_batches,
            input_secs=step.input_secs,
            wire_secs=turns * 2 * (moved / bandwidth + latency),
        )

    def served(self) -> Estimate:
        """Asynchronous, with the number of servers that is fastest."""
        step, m, most = self.step, self.m, self.m.count - 1
        held = 2 * (step.dense_bytes + step.rows_bytes) + step.activation_bytes
        servers = f"{most} server{'s' * (most > 1)}"
        why_not = (
            "parameter servers have no TPU workers" * (m.kind == "tpu")
            or "one machine cannot both serve and work" * (most == 0)
            or _too_large(held, m.device_memory, "a worker")
            or _too_large(step.state_bytes, most * m.host_memory, servers)
        )
        if why_not:
            return Estimate(
                strategy="ps", batch_size=step.batch_size, why_not=why_not
            )
        least = max(1, math.ceil(step.state_bytes / m.host_memory))
        by_number = map(self.served_by, range(least, most + 1))
        return max(by_number, key=lambda e: e.examples_per_sec)

    def served_by(self, num_ps: int) -> Estimate:
        """Nobody waits for another worker."""
        step, m = self.step, self.m
        workers = (m.count - num_ps) * m.devices
        compute, fed = self.compute_secs(), m.devices * step.input_secs
        size = step.dense_bytes + step.rows_bytes
        own, server = cost_formulas.ps_secs(
            *(size, step.largest_bytes, workers, num_ps),
            *(m.bandwidth, m.latency, m.devices),
        )
        # A lost worker is missed until it is back. A lost server undoes what
        # all have done since the last checkpoint.
        missed = m.restart_secs / m.secs_between_failures
        return Estimate(
            strategy="ps",
            batch_size=step.batch_size,
            replicas=workers,
            machines=m.count,
            num_ps=num_ps,
            compute_secs=compute,
            input_secs=fed,
            wire_secs=max(own, server - max(compute, fed)),
            goodput=self.goodput(num_ps) / (1 + missed),
        )


def _too_large(size: float, memory: float, holder: str) -> str:
    if size <= memory:
        return ""
    return f"memory: {size / 1e9:,.4g} GB, {holder} has {memory / 1e9:,.4g}"

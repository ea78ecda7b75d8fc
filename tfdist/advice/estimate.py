"""Estimates what a step costs under each strategy.

The estimates are for comparing strategies, not for predicting measured times.
Every replica processes `batch_size` examples per step, so more replicas mean
more examples per second, not shorter steps. Ignored are the overlap of compute
and communication, the optimizer's own arithmetic, the chief's 3 ms per
dispatch, and how fast a model learns from large batches or stale gradients.
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
    """The estimated costs of a step under one strategy.

    `secs_per_step` is the larger of `compute_secs` and `input_secs` (batches
    are prepared while the last one is computed), `wait_secs` and `wire_secs`.

    Attributes:
        strategy: As in `RunConfig(strategy=...)`, or `"model_parallel"`.
        batch_size: Examples per step of one replica.
        why_not: Why the strategy is infeasible; empty if it is feasible.
        replicas: Number of batches computed at the same time.
        machines: Machines used, including parameter servers.
        num_ps: Parameter servers among the machines.
        compute_secs: Time of the forward and backward pass.
        input_secs: A machine's time to prepare one batch for each replica.
        wait_secs: Time spent waiting for the slowest machine.
        wire_secs: Time spent waiting for the network or device links.
        goodput: Share of the time that is not lost to failures.

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
        """Whether the strategy can be used."""
        return not self.why_not

    @property
    def secs_per_step(self) -> float:
        """Seconds from one step of a replica to its next; infinite if never."""
        if self.why_not:
            return math.inf
        busy = max(self.compute_secs, self.input_secs)
        # Avoids a division by zero for an empty step.
        return max(busy + self.wait_secs + self.wire_secs, 1e-12)

    @property
    def examples_per_sec(self) -> float:
        """The rate of all replicas, after failures; 0.0 if infeasible."""
        examples = self.replicas * self.batch_size * self.goodput
        return examples / self.secs_per_step

    @property
    def bound(self) -> str:
        """The bottleneck: `"compute"`, `"input"`, `"wait"` or `"wire"`."""
        return max(PARTS, key=lambda part: getattr(self, f"{part}_secs"))


def estimates(step: Workload, machines: Machines) -> tuple[Estimate, ...]:
    """Estimates every strategy, from the simplest to the most complex.

    The order is one_device, mirrored, tpu, multi_worker_mirrored, ps,
    model_parallel. The estimate of an infeasible strategy has a `why_not`.

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
    # The slowest link of a ring through all machines.
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
    """Bytes of a replica in training: state, gradients, activations."""
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
        """Replicas wait for the slowest; any failure restores all of them."""
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
        """Data parallelism: a copy of the model on every device."""
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
        """Layers on the devices of one machine, or of all if one is too small.

        m micro-batches pass p devices in m + p - 1 turns (Huang et al., 2019,
        "GPipe"). Each turn moves a micro-batch's boundary forward and back.
        """
        step, memory = self.step, self.m.device_memory
        size, total = replica_bytes(step), self.m.count * self.m.devices
        # A weight is not split across devices; all tables count as one weight.
        largest = max(step.table_bytes, step.largest_bytes)
        if largest:
            largest *= step.state_bytes / (step.dense_bytes + step.table_bytes)
        is_near = self.m.devices > 1 and size <= self.m.devices * memory
        parts = self.m.devices if is_near else total
        bandwidth, latency = near if is_near else far
        # According to GPipe, the bubble is negligible from four per stage on.
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
        """Parameter servers, in the number that makes training fastest."""
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
        """Training with `num_ps` servers; no worker waits for another."""
        step, m = self.step, self.m
        workers = (m.count - num_ps) * m.devices
        compute, fed = self.compute_secs(), m.devices * step.input_secs
        size = step.dense_bytes + step.rows_bytes
        own, server = cost_formulas.ps_secs(
            *(size, step.largest_bytes, workers, num_ps),
            *(m.bandwidth, m.latency, m.devices),
        )
        # A lost worker is missing until it restarts. A lost server loses the
        # work of all workers since the last checkpoint.
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

"""What a step costs under each way to distribute it.

Six formulas, with their sources, and `estimates`, which applies them to a
model and to machines: to compare the ways with each other, not to predict a
stopwatch. Every replica takes `batch_size` examples a step, so more replicas
mean more examples a second, not shorter steps. Left out: compute overlapped
with the wire, the optimizer's own arithmetic, the chief's half millisecond a
dispatch, and how fast a model learns from large batches or stale gradients.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from tfdist.advice.machines import Machines
from tfdist.advice.workload import Workload

Link = tuple[float, float]  # Bytes a second, and seconds of latency.


def all_reduce_secs(
    size: float, replicas: int, bandwidth: float, latency: float
) -> float:
    """A ring sums `size` bytes of every replica, and gives all the sum.

    Each sends 2 (n - 1) messages of size / n to its neighbour (Patarasuk and
    Yuan, 2009, "Bandwidth optimal all-reduce algorithms").

    >>> all_reduce_secs(100e6, 2, bandwidth=1e9, latency=0.0)
    0.1
    """
    messages = 2 * (replicas - 1) if size else 0
    return messages * (size / replicas / bandwidth + latency)


def all_gather_secs(
    size: float, replicas: int, bandwidth: float, latency: float
) -> float:
    """A ring gives everybody the `size` bytes of each replica.

    TensorFlow reduces the gradient of a table (`tf.IndexedSlices`) like this.

    >>> all_gather_secs(1e6, 4, bandwidth=1e9, latency=0.0)
    0.003
    """
    return (replicas - 1) * (size / bandwidth + latency) if size else 0.0


def pace(machines: int, spread: float) -> float:
    """How many times the mean step the slowest of some machines takes.

    Blom's approximation (1958) of the largest of n normal numbers; `spread` is
    their deviation over their mean.

    >>> [round(pace(n, spread=0.2), 2) for n in (1, 2, 10, 100)]
    [1.0, 1.12, 1.31, 1.5]
    """
    smaller = (machines - 3 / 8) / (machines + 1 / 4)
    return 1 + spread * statistics.NormalDist().inv_cdf(smaller)


def ps_secs(
    size: float,
    largest: float,
    workers: int,
    num_ps: int,
    bandwidth: float,
    latency: float,
    workers_per_machine: int = 1,
) -> tuple[float, float]:
    """Seconds of a step on a worker's own link, and on the busiest server's.

    A worker pulls the `size` bytes of weights that it reads, and pushes as many
    bytes of gradients, by a request and an answer each. Meanwhile a server
    sends its share to all workers and receives as much; the busiest has at
    least the `largest` weight (Li et al., 2014, "Scaling distributed machine
    learning with the parameter server").

    >>> ps_secs(1e6, 4e5, 8, 4, bandwidth=1e9, latency=0.0)
    (0.002, 0.0032)
    """
    own = 2 * size * workers_per_machine / bandwidth + 4 * latency
    return own, workers * max(size / num_ps, largest) / bandwidth


def pipeline_secs(
    compute_secs: float,
    boundary: float,
    parts: int,
    micro_batches: int,
    bandwidth: float,
    latency: float,
) -> tuple[float, float]:
    """Seconds of computing and of the wire when layers are a pipeline.

    m micro-batches pass p devices in m + p - 1 turns (Huang et al., 2019,
    "GPipe"). Each turn moves a share of the `boundary` bytes between two parts,
    forward and back.

    >>> pipeline_secs(1.0, 0.0, 2, 4, bandwidth=1e9, latency=0.0)
    (0.625, 0.0)
    """
    turns = micro_batches + parts - 1
    moved = 2 * (boundary / micro_batches / bandwidth + latency)
    return turns * compute_secs / parts / micro_batches, turns * moved


def goodput(
    failures_per_sec: float, checkpoint_secs: float, restart_secs: float
) -> float:
    """Share of the time that is useful when a failure undoes unsaved work.

    Daly, 2006, "A higher order estimate of the optimum checkpoint interval for
    restart dumps".

    >>> round(goodput(1 / 3600, checkpoint_secs=600, restart_secs=30), 2)
    0.91
    """
    work = failures_per_sec * checkpoint_secs
    restart = failures_per_sec * restart_secs
    if not work:
        return 1.0
    if work + restart > 700:  # `exp` would overflow: no step is ever saved.
        return 0.0
    return work / (math.exp(restart) * math.expm1(work))


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
    why_not = why_not or _too_large(
        replica_bytes(step), machines.device_memory, "a device"
    )
    if why_not:
        return Estimate(
            strategy=strategy, batch_size=step.batch_size, why_not=why_not
        )
    replicas = count * devices
    wire = all_reduce_secs(step.dense_bytes, replicas, *link)
    wire += all_gather_secs(step.rows_bytes, replicas, *link)
    return Estimate(
        strategy=strategy,
        batch_size=step.batch_size,
        replicas=replicas,
        wire_secs=wire,
        **_together(
            machines,
            count,
            machines.compute_secs(step),
            devices * step.input_secs,
        ),
    )


def _together(
    machines: Machines, count: int, compute_secs: float, input_secs: float
) -> dict[str, float]:
    """All wait for the slowest; any failure takes all to the checkpoint."""
    slower = pace(count, machines.spread) - 1
    return {
        "machines": count,
        "compute_secs": compute_secs,
        "input_secs": input_secs,
        "wait_secs": max(compute_secs, input_secs) * slower,
        "goodput": _goodput(machines, count),
    }


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
    why_not = (
        why_not
        or "there is one device" * (total == 1)
        or _too_large(size / total, memory, f"each of {total} devices")
        or _too_large(largest, memory, "the device of one layer")
    )
    made = Estimate(
        strategy="model_parallel", batch_size=step.batch_size, why_not=why_not
    )
    if why_not:
        return made
    is_near = machines.devices > 1 and size <= machines.devices * memory
    count = 1 if is_near else machines.count
    parts = count * machines.devices
    compute, wire = pipeline_secs(
        machines.compute_secs(step),
        step.boundary_bytes,
        parts,
        # GPipe finds filling and draining negligible from four a part on.
        min(int(step.batch_size), 4 * parts),
        *(near if is_near else far),
    )
    return dataclasses.replace(
        made,
        wire_secs=wire,
        **_together(machines, count, compute, step.input_secs),
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

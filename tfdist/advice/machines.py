"""What machines can do, in numbers: how many, how fast, how far, how long.

`tfdist.advice.cost_model` turns a `Workload` on them into seconds.
"""

from __future__ import annotations

import dataclasses

from tfdist.advice.cost_formulas import kept_share
from tfdist.advice.workload import Workload, check_number


@dataclasses.dataclass(frozen=True)
class _Kind:
    flops: float
    memory: float
    bandwidth: float
    latency: float
    spread: float


# Round figures of a plain device of each kind, to begin with: a cloud machine
# of some cores shared with others, an A100, a core of a TPU v3.
_KINDS = {
    "cpu": _Kind(1e11, 16e9, 1e10, 1e-5, 0.2),
    "gpu": _Kind(5e13, 40e9, 2e11, 1e-5, 0.02),
    "tpu": _Kind(3e13, 16e9, 7e10, 5e-6, 0.01),
}
KINDS = tuple(_KINDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines that a job may use. They are alike.

    Attributes:
        count: Machines.
        devices: Devices on each. All cores of a CPU are one device.
        kind: `"cpu"`, `"gpu"` or `"tpu"`.
        device_flops: Multiplications and additions a second that a device
            attains. Default, as for the next four: a plain device of the kind.
        device_memory: Bytes that a device holds; for a CPU, its machine.
        device_bandwidth: Bytes a second between two devices of a machine; for
            TPUs, of all machines.
        device_latency: Seconds until a message between them arrives.
        spread: Standard deviation of a machine's step time, over its mean.
            Machines shared with others, or of different age, have a large one.
        host_memory: Bytes that a parameter server holds. Default: 64e9, and
            for a CPU its `device_memory`.
        bandwidth: Bytes a second that a machine sends, and receives at the
            same time. Default: 10 Gbit/s.
        latency: Seconds until a message between machines arrives, with what
            TensorFlow's gRPC takes for it.
        secs_between_failures: Mean time until a machine is lost, by failure or
            preemption; `math.inf` for never. Default: a year. Preemptible
            machines of Google Cloud end within a day.
        checkpoint_secs: Seconds between checkpoints, as in `RunConfig`.
        restart_secs: Seconds from a failure to the next step.

    Raises:
        TypeError, ValueError: A number is none, not positive (latencies and
            `spread`: negative), or `kind` is unknown.

    Example:
    >>> Machines(count=8, kind="gpu", devices=4).device_memory
    40000000000.0
    """

    count: int = 1
    devices: int = 1
    kind: str = "cpu"
    device_flops: float | None = None
    device_memory: float | None = None
    device_bandwidth: float | None = None
    device_latency: float | None = None
    spread: float | None = None
    host_memory: float | None = None
    bandwidth: float = 10e9 / 8
    latency: float = 1e-4
    secs_between_failures: float = 365 * 86400.0
    checkpoint_secs: float = 600.0
    restart_secs: float = 30.0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(
                f"Argument `kind` must be one of {KINDS}. "
                f"Received: kind={self.kind!r}."
            )
        plain = _KINDS[self.kind]
        memory = self.device_memory or plain.memory
        self._default("device_flops", plain.flops)
        self._default("device_memory", plain.memory)
        self._default("device_bandwidth", plain.bandwidth)
        self._default("device_latency", plain.latency)
        self._default("spread", plain.spread)
        self._default("host_memory", memory if self.kind == "cpu" else 64e9)
        may_be_zero = ("spread", "latency", "device_latency", "restart_secs")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("count", "devices"):
                _check_count(field.name, value)
            elif field.name != "kind":
                check_number(
                    field.name,
                    value,
                    positive=field.name not in may_be_zero,
                    finite=field.name != "secs_between_failures",
                )

    @property
    def near(self) -> tuple[float, float]:
        """Bandwidth and latency between devices of one machine."""
        return self.device_bandwidth, self.device_latency

    @property
    def far(self) -> tuple[float, float]:
        """Those of the weakest link of a ring through all machines."""
        return (
            min(self.bandwidth, self.device_bandwidth),
            max(self.latency, self.device_latency),
        )

    def compute_secs(self, step: Workload) -> float:
        """Seconds that a device computes a step."""
        if step.compute_secs is not None:
            return step.compute_secs
        return step.flops / self.device_flops

    def kept_share(self, count: int) -> float:
        """Share of the time kept if the loss of one of `count` stops all."""
        return kept_share(
            count / self.secs_between_failures,
            self.checkpoint_secs,
            self.restart_secs,
        )

    def _default(self, name: str, value: float) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)


def _check_count(name: str, value: int) -> None:
    check_number(name, value, positive=True)
    if not isinstance(value, int):
        raise TypeError(
            f"Argument `{name}` must be an integer. Received: {name}={value!r}."
        )

"""What machines can do, in numbers: how many, how fast, how reliable."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist.advice.workload import Workload, check_number

# Round figures of a plain device of each kind: a cloud machine of some cores
# shared with others, an A100, a core of a TPU v3.
_PLAIN = {
    "cpu": {
        "device_flops": 1e11,
        "device_memory": 16e9,
        "device_bandwidth": 1e10,
        "device_latency": 1e-5,
        "spread": 0.2,
    },
    "gpu": {
        "device_flops": 5e13,
        "device_memory": 40e9,
        "device_bandwidth": 2e11,
        "device_latency": 1e-5,
        "spread": 0.02,
    },
    "tpu": {
        "device_flops": 3e13,
        "device_memory": 16e9,
        "device_bandwidth": 7e10,
        "device_latency": 5e-6,
        "spread": 0.01,
    },
}
KINDS = tuple(_PLAIN)
_OF_KIND: Any = None  # Filled in from the above.
_MAY_BE_ZERO = ("spread", "latency", "device_latency", "restart_secs")


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
        ValueError: A number is not positive (latencies and `spread`: negative),
            or `kind` is unknown.

    Example:
    >>> Machines(count=8, kind="gpu", devices=4).device_memory
    40000000000.0
    """

    count: int = 1
    devices: int = 1
    kind: str = "cpu"
    device_flops: float = _OF_KIND
    device_memory: float = _OF_KIND
    device_bandwidth: float = _OF_KIND
    device_latency: float = _OF_KIND
    spread: float = _OF_KIND
    host_memory: float = _OF_KIND
    bandwidth: float = 10e9 / 8
    latency: float = 1e-4
    secs_between_failures: float = 365 * 86400.0
    checkpoint_secs: float = 600.0
    restart_secs: float = 30.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"Argument `kind` must be one of {KINDS}. "
                f"Received: kind={self.kind!r}."
            )
        plain = dict(_PLAIN[self.kind])
        memory = self.device_memory or plain["device_memory"]
        plain["host_memory"] = memory if self.kind == "cpu" else 64e9
        for name, value in plain.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            if field.name != "kind":
                check_number(
                    field.name,
                    getattr(self, field.name),
                    positive=field.name not in _MAY_BE_ZERO,
                    finite=field.name != "secs_between_failures",
                    whole=field.name in ("count", "devices"),
                )

    def compute_secs(self, step: Workload) -> float:
        """Seconds that a device computes a step."""
        if step.compute_secs is not None:
            return step.compute_secs
        return step.flops / self.device_flops

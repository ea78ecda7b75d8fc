"""The machines of a job in numbers: how many, how fast, how reliable."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfdist._tf.arguments import check_one_of, check_positive
from tfdist.advice.workload import check_numbers

# Round figures for a typical device of each kind: a shared cloud machine with a
# few cores, an A100, a core of a TPU v3.
_PLAIN = {
    "device_flops": dict(cpu=1e11, gpu=5e13, tpu=3e13),
    "device_memory": dict(cpu=16e9, gpu=40e9, tpu=16e9),
    "device_bandwidth": dict(cpu=1e10, gpu=2e11, tpu=7e10),
    "device_latency": dict(cpu=1e-5, gpu=1e-5, tpu=5e-6),
    "spread": dict(cpu=0.2, gpu=0.02, tpu=0.01),
}
_BY_KIND: Any = None  # Filled in from the above.
_MAY_BE_ZERO = {"spread", "latency", "device_latency", "restart_secs"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines that a job may use, all of the same type.

    Attributes:
        count: Number of machines.
        devices: Devices per machine. All cores of a CPU are one device.
        kind: `"cpu"`, `"gpu"` or `"tpu"`.
        device_flops: Multiplications and additions per second that a device
            attains. Default, also for the next four: a typical device.
        device_memory: Memory of a device in bytes; for a CPU, of its machine.
        device_bandwidth: Bytes per second between two devices of a machine; for
            TPUs, between any two devices.
        device_latency: Seconds until a message between devices arrives.
        spread: Standard deviation of a machine's step time divided by its mean.
            It is large for shared machines and machines of different age.
        host_memory: Memory of a parameter server in bytes. Default: 64e9, and
            for a CPU its `device_memory`.
        bandwidth: Bytes per second that a machine can send, and receive at the
            same time. Default: 10 Gbit/s.
        latency: Seconds until a message between machines arrives, including the
            overhead of TensorFlow's gRPC.
        secs_between_failures: Mean time until a machine is lost, by failure or
            preemption; `math.inf` for never. Default: a year. Preemptible
            machines of Google Cloud run for a day at most.
        checkpoint_secs: Seconds between checkpoints. Default: ten minutes, as
            in TF 1; `RunConfig` saves every 60 s, or as often as costs 1 %.
        restart_secs: Seconds from a failure to the next step.

    Raises:
        TypeError, ValueError: A field is not a number, is infinite or is not
            positive (latencies, `spread` and `restart_secs` may be 0), or
            `kind` is unknown.

    >>> Machines(count=8, kind="gpu", devices=4).device_memory
    40000000000.0
    """

    count: int = 1
    devices: int = 1
    kind: str = "cpu"
    device_flops: float = _BY_KIND
    device_memory: float = _BY_KIND
    device_bandwidth: float = _BY_KIND
    device_latency: float = _BY_KIND
    spread: float = _BY_KIND
    host_memory: float = _BY_KIND
    bandwidth: float = 10e9 / 8
    latency: float = 1e-4
    secs_between_failures: float = 365 * 86400.0
    checkpoint_secs: float = 600.0
    restart_secs: float = 30.0

    def __post_init__(self) -> None:
        check_one_of("kind", self.kind, tuple(_PLAIN["spread"]))
        for name, plain in _PLAIN.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, plain[self.kind])
        if self.host_memory is None:
            memory = self.device_memory if self.kind == "cpu" else 64e9
            object.__setattr__(self, "host_memory", memory)
        check_positive("count", self.count)
        check_positive("devices", self.devices)
        names = {field.name for field in dataclasses.fields(self)}
        check_numbers(self, positive=names - _MAY_BE_ZERO)

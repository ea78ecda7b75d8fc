"""Vertex AI's machine types, and the GPUs and TPUs that each can have.

Recorded from the service's page "Configure compute resources for custom
training" in 2026. A series that is not recorded here is accepted as it is: the
service adds some every year.
"""

from __future__ import annotations

import re

_SIZES = {
    "e2-standard": (4, 8, 16, 32),
    "e2-highmem": (2, 4, 8, 16),
    "e2-highcpu": (16, 32),
    "n1-standard": (4, 8, 16, 32, 64, 96),
    "n1-highmem": (2, 4, 8, 16, 32, 64, 96),
    "n1-highcpu": (16, 32, 64, 96),
    "n2-standard": (4, 8, 16, 32, 48, 64, 80),
    "n2-highmem": (4, 8, 16, 32, 48, 64, 80),
    "n2-highcpu": (16, 32, 48, 64, 80),
    "n4-standard": (2, 4, 8, 16, 32, 48, 64, 80),
    "n4-highmem": (2, 4, 8, 16, 32, 48, 64, 80),
    "n4-highcpu": (2, 4, 8, 16, 32, 48, 64, 80),
    "c2-standard": (4, 8, 16, 30, 60),
    "m1-ultramem": (40, 80, 160),
    "m1-megamem": (96,),
}
# Machines that come with their GPUs: type -> (GPU, how many).
_BUILT_IN = {
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    **{f"g2-standard-{n}": ("NVIDIA_L4", 1) for n in (4, 8, 12, 16, 32)},
    "g2-standard-24": ("NVIDIA_L4", 2),
    "g2-standard-48": ("NVIDIA_L4", 4),
    "g2-standard-96": ("NVIDIA_L4", 8),
    **{
        f"g4-standard-{48 * n}": ("NVIDIA_RTX_PRO_6000", n)
        for n in (1, 2, 4, 8)
    },
}
# TPU v5e: machine type -> topologies on one machine, and on several.
_TPU_TOPOLOGIES = {
    "ct5lp-hightpu-1t": (("1x1",), ()),
    "ct5lp-hightpu-4t": (
        ("2x2",),
        ("2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    ),
    "ct5lp-hightpu-8t": (("2x4",), ()),
}
_TPU_BOARD = 8  # Cores of one TPU v2 or v3; more of them are a pod.
_TYPES = [
    *(f"{name}-{n}" for name, sizes in _SIZES.items() for n in sizes),
    *_BUILT_IN,
    *_TPU_TOPOLOGIES,
]
_SERIES = {name.partition("-")[0] for name in _TYPES}


def built_in_gpu(machine_type: str) -> tuple[str, int] | None:
    """The GPU that a machine type comes with, and how many; else None.

    >>> built_in_gpu("a2-highgpu-2g"), built_in_gpu("n1-standard-4")
    (('NVIDIA_TESLA_A100', 2), None)
    """
    return _BUILT_IN.get(machine_type)


def is_tpu(machine_type: str) -> bool:
    """Whether a machine type is a TPU's."""
    return machine_type == "cloud-tpu" or machine_type.startswith(
        ("ct5lp-", "ct6e-", "tpu")
    )


def is_tpu_pod(
    machine_type: str, accelerator_count: int, topology: str | None
) -> bool:
    """Whether this is a TPU of several machines.

    >>> is_tpu_pod("cloud-tpu", 32, None), is_tpu_pod("cloud-tpu", 8, None)
    (True, False)
    >>> is_tpu_pod("ct5lp-hightpu-4t", 0, "4x4")
    True
    """
    if machine_type == "cloud-tpu":
        return accelerator_count > _TPU_BOARD
    _, of_several = _TPU_TOPOLOGIES.get(machine_type, ((), ()))
    return topology in of_several


def gpus_that_fit(machine_type: str) -> dict[str, tuple[int, ...]] | None:
    """GPU -> the numbers of it that a machine type can have.

    >>> gpus_that_fit("n1-standard-32")["NVIDIA_TESLA_V100"]
    (4, 8)
    >>> gpus_that_fit("e2-standard-4")
    {}

    Returns:
        None for a type of a series that is not recorded.
    """
    if machine_type in _BUILT_IN:
        gpu, count = _BUILT_IN[machine_type]
        return {gpu: (count,)}
    if machine_type.partition("-")[0] not in _SERIES:
        return None
    if not machine_type.startswith("n1-"):
        return {}
    # Every GPU brings CPUs and memory with it, which must cover the machine's.
    cpus = int(machine_type.rpartition("-")[2])
    small = (1, 2, 4) if cpus <= 16 else (2, 4) if cpus <= 32 else (4,)
    v100 = tuple(n for n in (1, 2, 4, 8) if n * 12 >= min(cpus, 96))
    return {
        "NVIDIA_TESLA_T4": small,
        "NVIDIA_TESLA_P4": small,
        "NVIDIA_TESLA_V100": v100,
    }


def problem_with(
    machine_type: str,
    accelerator_type: str | None = None,
    accelerator_count: int = 0,
    topology: str | None = None,
) -> str | None:
    """What is wrong with a machine, in a sentence; None if nothing is known.

    >>> problem_with("e2-standard-4", "NVIDIA_TESLA_T4", 1)
    'e2-standard-4 cannot have a GPU; n1-* and g2-* machines can.'
    """
    if is_tpu(machine_type):
        return _problem_with_tpu(
            machine_type, accelerator_type, accelerator_count, topology
        )
    if topology:
        return f"{machine_type} is no TPU and has no tpuTopology."
    series = machine_type.partition("-")[0]
    if series in _SERIES and machine_type not in _TYPES:
        known = ", ".join(t for t in _TYPES if t.startswith(f"{series}-"))
        return f"There is no machine type {machine_type}. Of {series}: {known}."
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", machine_type):
        return f"{machine_type!r} is no machine type, such as n1-standard-4."
    return _problem_with_gpus(machine_type, accelerator_type, accelerator_count)


def _problem_with_gpus(
    machine_type: str, gpu: str | None, count: int
) -> str | None:
    fitting = gpus_that_fit(machine_type)
    if gpu is None:
        if count:
            return f"{count} accelerators need an acceleratorType."
        if machine_type in _BUILT_IN:
            name, built_in = _BUILT_IN[machine_type]
            return (
                f"{machine_type} comes with its GPUs: acceleratorType must be "
                f"{name} and acceleratorCount {built_in}."
            )
        return None
    if fitting is None:
        return None
    if not fitting:
        return f"{machine_type} cannot have a GPU; n1-* and g2-* machines can."
    if gpu not in fitting:
        return f"{machine_type} can have {' or '.join(fitting)}, not {gpu}."
    if count not in fitting[gpu]:
        numbers = " or ".join(map(str, fitting[gpu]))
        return f"{machine_type} can have {numbers} of {gpu}, not {count}."
    return None


def _problem_with_tpu(
    machine_type: str, tpu: str | None, count: int, topology: str | None
) -> str | None:
    if machine_type == "cloud-tpu":
        if tpu not in ("TPU_V2", "TPU_V3"):
            return f"cloud-tpu is a TPU_V2 or TPU_V3. Received: {tpu}."
        if count != _TPU_BOARD and (count <= 0 or count % 32):
            return f"A {tpu} has 8 cores, or a multiple of 32, not {count}."
        return None
    if machine_type not in _TPU_TOPOLOGIES:
        return (
            f"TensorFlow does not run on {machine_type}; it does on cloud-tpu "
            f"and {', '.join(_TPU_TOPOLOGIES)}."
        )
    if tpu is not None or count:
        return f"{machine_type} takes a tpuTopology and no accelerators."
    known = [t for group in _TPU_TOPOLOGIES[machine_type] for t in group]
    if topology not in known:
        return (
            f"{machine_type} needs a tpuTopology of {', '.join(known)}. "
            f"Received: {topology}."
        )
    return None

"""The amount of memory available on a task's machine or in its container."""

from __future__ import annotations

import math
import re
import socket

import tensorflow as tf

from tfdist._tf import storage

_FILE = "ram://tfdist/free_bytes"  # In each server; the chief reads it.
# A container's limit, usage and usage details in cgroup v2 and v1.
_CGROUPS = (
    "memory.max memory.current memory.stat",
    "memory/memory.limit_in_bytes memory/memory.usage_in_bytes "
    "memory/memory.stat",
)


def free_bytes(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> float:
    """The machine's available memory, or less within a container's limit.

    Cached files count as free. Returns infinity if the system reports nothing.

    >>> free_bytes() > 0
    True
    """
    available = re.search(r"MemAvailable: +(\d+)", _read(f"{proc}/meminfo"))
    free = int(available[1]) * 1024 if available else math.inf
    for names in _CGROUPS:
        texts = [_read(f"{cgroup}/{name}") for name in names.split()]
        limit, used = (text.strip() for text in texts[:2])
        if limit.isdecimal() and used:
            cached = re.search(r"^inactive_file (\d+)", texts[2], re.MULTILINE)
            own = int(limit) - int(used) + (int(cached[1]) if cached else 0)
            free = min(free, own)
    return free


def publish_free_bytes() -> None:
    """Stores this host's name and free memory in this server's `ram://`."""
    storage.write_text(_FILE, f"{free_bytes()} {socket.gethostname()}")


def free_bytes_on(device: str) -> tuple[str, float]:
    """A device's host and its free bytes; the device and 0 if not reported.

    Raises OpError if the device's server does not answer.
    """
    if device == tf.constant(0).device:
        return socket.gethostname(), free_bytes()
    try:
        with tf.device(device):
            told = tf.io.read_file(_FILE).numpy().decode()
    except tf.errors.NotFoundError:
        return device, 0.0
    free, _, host = told.partition(" ")
    return host, float(free)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""

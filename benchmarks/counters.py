"""The resources a cluster has used: seconds, CPU, context switches, bytes.

The counters are read from the kernel with only the standard library, so every
contender uses this module, whatever its version of TensorFlow.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import time
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")

# Seconds by "time", CPU seconds of each task by "cpu", "bytes" on the wire,
# how often a thread of each task began or left off by "switches".
Usage = dict[str, Any]


def sent_bytes() -> int:
    """Bytes through the loopback interface of this network so far."""
    for line in pathlib.Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise RuntimeError("There is no loopback interface.")


def peak_bytes(pid: int | str = "self") -> int:
    """Returns the peak memory of a process."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    raise RuntimeError("The kernel tells no peak memory.")


def tasks() -> dict[str, list[int]]:
    """Process ids of the tasks of this process's cluster, by "job:index".

    They are those whose `TF_CONFIG` names the same cluster, and those that this
    process's launcher has forked, which keep its environment and are named for
    their task; a task's children are among its own. Without `TF_CONFIG` there
    is this process, "local:0".
    """
    own = os.environ.get("TF_CONFIG")
    if not own:
        return {"local:0": [os.getpid()]}
    cluster = json.loads(own)["cluster"]
    ancestors, pid = set(), os.getpid()
    while pid > 1:
        pid = int(_stat(pid)[1])
        ancestors.add(pid)
    found: dict[str, list[int]] = {}
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "environ").read_bytes().split(b"\0")
            name = (process / "comm").read_text().strip()
            parent = int(_stat(int(process.name))[1])
        except OSError:  # It has ended, or is another user's.
            continue
        is_task = re.fullmatch(r"[a-z]+:\d+", name) and parent in ancestors
        for line in lines:
            if line.startswith(b"TF_CONFIG="):
                config = _config(line.partition(b"=")[2])
                if is_task := config.get("cluster") == cluster:
                    task = config["task"]
                    name = f"{task['type']}:{task['index']}"
        if is_task:
            found.setdefault(name, []).append(int(process.name))
    return found


def _config(text: bytes) -> dict[str, Any]:
    """A `TF_CONFIG`; of another job it may be anything."""
    try:
        return dict(json.loads(text))
    except (TypeError, ValueError):
        return {}


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name."""
    text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return text.rpartition(")")[2].split()


def cpu_seconds(pid: int) -> float:
    """Seconds of a process so far, and of its children that have ended."""
    try:
        fields = _stat(pid)
    except OSError:  # It is one of them now.
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def context_switches(pid: int) -> int:
    """How often the threads that a process has were given a CPU so far."""
    switches = 0
    for thread in pathlib.Path(f"/proc/{pid}/task").glob("*/status"):
        try:
            text = thread.read_text()
        except OSError:  # It has ended.
            continue
        for line in text.splitlines():
            name, _, value = line.partition(":")
            if name.endswith("voluntary_ctxt_switches"):
                switches += int(value)
    return switches


def usage() -> Usage:
    """Returns the resources that this process's cluster has used so far."""
    pids = tasks()
    return {
        "time": time.monotonic(),
        "cpu": {name: sum(map(cpu_seconds, own)) for name, own in pids.items()},
        "bytes": sent_bytes(),
        "switches": {
            name: sum(map(context_switches, own)) for name, own in pids.items()
        },
    }


def difference(before: Usage, after: Usage, steps: int) -> dict[str, Any]:
    """Returns the resources that some steps have used.

    Args:
        before: `usage()` before them.
        after: `usage()` after them.
        steps: how many there were.

    Returns:
        "steps", "secs", "bytes", "cpu" and "switches" (of each task), and
        "began": when, by the machine's monotonic clock.
    """
    return {
        "steps": steps,
        "began": before["time"],
        "secs": after["time"] - before["time"],
        "bytes": after["bytes"] - before["bytes"],
        **{
            what: {
                name: number - before[what][name]
                for name, number in after[what].items()
                if name in before[what]
            }
            for what in ("cpu", "switches")
        },
    }

"""Starts the clusters of the benchmarks on parameter servers."""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

# Examples per step, ids per example, width of an embedding table.
BATCH, IDS, DIM = 256, 8, 16


def run_cluster(
    case: dict[str, Any],
    workers: int = 2,
    task: str = "benchmarks.ps_task",
    ps: int = 2,
) -> dict[str, Any]:
    """Runs `case` on a cluster and returns the results of the chief."""
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory) / "result.json"
        command = [
            *(sys.executable, "-m", "tfdist.launch", f"--ps={ps}"),
            *(f"--workers={workers}", "-m", task),
            json.dumps({**case, "output": str(output)}),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=900, check=False
        )
        if done.returncode:
            sys.exit(f"{case} failed:\n{done.stdout[-5000:]}")
        result = json.loads(output.read_text())
        if "peak_bytes" in result:
            result["peak_bytes"] |= {
                path.stem: int(path.read_text())
                for path in pathlib.Path(directory).glob("*.peak")
            }
        return result


def median_and_range(values: list[float]) -> str:
    """Formats measurements as `median (minimum-maximum)`."""
    return (
        f"{statistics.median(values):7.1f} "
        f"({min(values):.0f}-{max(values):.0f})"
    )

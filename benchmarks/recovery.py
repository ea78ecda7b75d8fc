"""How long training stands still after a parameter server was killed.

    python -m benchmarks.recovery [--runs=3]

Trains `trainer.task` on its synthetic click log with 2 ps and 2 workers, kills
ps:1 with SIGKILL, starts it again a second later, and prints the parts of the
standstill, as the chief's own log has them, for each run and their medians.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time

from tfdist.launch import testing

_PARTS = ("noticed", "waited", "connected", "built", "restored", "first steps")


def measure() -> dict[str, float]:
    """Seconds of each part of one recovery."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "trainer.task", "--max_steps=100000"),
            *(f"--model_dir={directory}", "--save_checkpoints_steps=1000"),
        ]
        with testing.LocalCluster(
            command, ps=2, workers=2, restart_secs=1.0
        ) as cluster:
            cluster.wait_until_step(600, timeout_secs=120)
            cluster.kill("ps:1")
            killed = time.monotonic()
            cluster.wait_for_line("chief:0", "Failed at step")
            noticed = time.monotonic() - killed
            line = cluster.wait_for_line("chief:0", "Recovered: .*")[0]
        numbers = [float(n) for n in re.findall(r" in ([0-9.]+) s", line)]
        return dict(zip(_PARTS, [noticed, *numbers], strict=True))


def main() -> None:
    """Prints a row for each run, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    print(*(f"{part:>12}" for part in _PARTS), "  after the wait")
    rows = []
    for _ in range(args.runs):
        rows.append(measure())
        _show(rows[-1])
    print("medians")
    _show({p: statistics.median(row[p] for row in rows) for p in _PARTS})


def _show(row: dict[str, float]) -> None:
    after = sum(row[part] for part in _PARTS[2:])
    print(*(f"{secs:12.1f}" for secs in row.values()), f"{after:12.1f}")


if __name__ == "__main__":
    main()

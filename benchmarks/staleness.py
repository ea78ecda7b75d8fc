"""How stale updates are, and whether a slow worker slows the others.

    python -m benchmarks.staleness [--steps=3000]

Each step of a worker sleeps for 20 ms, so that two cores can simulate five
machines; one worker may be ten times slower. Prints the staleness that the job
reports, the steps per second of all workers and, with a slow worker, the share
of the steps that the others run: the slow worker runs at most a tenth as many
steps as each of them.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile

from tfdist.launch import testing

_STEP_SECS = 0.02


def measure(workers: int, slow: bool, steps: int) -> tuple[str, float]:
    """Staleness in words, and steps per second."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "tests.recovery_job"),
            *(f"--model_dir={directory}", f"--max_steps={steps}"),
            *(f"--step_secs={_STEP_SECS}", "--save_steps=1000000"),
            f"--slow_worker={workers - 1 if slow else -1}",
        ]
        with testing.LocalCluster(command, ps=2, workers=workers) as cluster:
            if cluster.wait(timeout_secs=600):
                sys.exit(cluster.output("chief:0"))
            output = cluster.output("chief:0")
    (staleness,) = re.findall(r"staleness of .*", output)
    # The first and the last tenth hold tracing and the end.
    rates = [float(r) for r in re.findall(r"([0-9.]+) steps/s", output)]
    middle = rates[len(rates) // 10 : -len(rates) // 10]
    return staleness, len(middle) / sum(1 / rate for rate in middle)


def main() -> None:
    """Prints a row for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    alone = {}
    for workers in (1, 2, 4):
        staleness, rate = measure(workers, False, args.steps)
        alone[workers] = rate
        print(f"{workers} workers: {rate:.0f} steps/s, {staleness}", flush=True)
    for fast in (1, 2):
        staleness, rate = measure(fast + 1, True, args.steps)
        others = rate - alone[1] / 10
        print(
            f"{fast} and a slow one: {rate:.0f} steps/s, the others at least "
            f"{others:.0f}, {others / alone[fast]:.2f} of what they do without "
            f"it; {staleness}",
            flush=True,
        )


if __name__ == "__main__":
    main()

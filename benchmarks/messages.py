"""The benefit of sending one message instead of one per variable.

    python -m benchmarks.messages

A model of 100 small dense variables and one of 20 tables, each split over both
servers, on 2 ps and 2 workers: tfdist, and tfdist reading and updating one by
one; the same unrolled steps in a dispatch. Runs alternate.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.ps_harness import median_and_range, run_cluster


def main() -> None:
    """Prints steps per second of both, and their ratio, for each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="variables,tables")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    for model in args.models.split(","):
        speeds = {"tfdist": [], "one_by_one": []}
        for _ in range(args.rounds):
            for who, measured in speeds.items():
                measured += run_cluster(
                    {
                        "model": model,
                        "who": who,
                        "rows": 100_000,
                        "optimizer": "adagrad",
                        "steps": args.steps,
                        "repeats": 1,
                    }
                )["steps_per_sec"]
        ratio = statistics.median(speeds["tfdist"]) / statistics.median(
            speeds["one_by_one"]
        )
        for who, measured in speeds.items():
            print(f"{model:<10} {who:<11} {median_and_range(measured)}")
        print(f"{model:<10} ratio       {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()

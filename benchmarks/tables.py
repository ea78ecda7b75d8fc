"""Steps per second and bytes per step against the size of a table.

    python -m benchmarks.tables [--rows=10000,1000000] [--optimizers=adagrad]

Looks up 8 ids per example, 256 examples a step, on 2 ps and 2 workers in a
private network, with tfdist and with Keras' own layer and optimizer in a plain
`ClusterCoordinator` loop. Bytes are those on the loopback interface of that
network, which only the cluster uses, over the least that could travel: unique
rows and dense variables, down and up.
"""

from __future__ import annotations

import argparse

from benchmarks.ps_harness import median_and_range, run_cluster


def main() -> None:
    """Runs every case in a cluster of its own and prints a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="10000,100000,1000000,10000000")
    parser.add_argument("--optimizers", default="adagrad,adam")
    parser.add_argument("--contenders", default="tfdist,stock")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stock_steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(
        "rows       optimizer who      steps/s (range)      bytes  over least"
    )
    for optimizer in args.optimizers.split(","):
        for rows in map(int, args.rows.split(",")):
            for who in args.contenders.split(","):
                stock = who == "stock"
                result = run_cluster(
                    {
                        "model": "table",
                        "who": who,
                        "rows": rows,
                        "optimizer": optimizer,
                        "steps": args.stock_steps if stock else args.steps,
                        "repeats": args.repeats,
                    }
                )
                sent = result["bytes_per_step"]
                print(
                    f"{rows:<10} {optimizer:<9} {who:<7} "
                    f"{median_and_range(result['steps_per_sec']):<20} "
                    f"{sent:<10.0f} {sent / result['least_bytes']:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Steps per second and bytes per step against the size of a table.

    python -m benchmarks.tables [--rows=10000,1000000] [--optimizers=adagrad]

Looks up 8 ids per example, 256 examples a step, on 2 ps and 2 workers in a
private network, with tfdist and with Keras' own layer and optimizer in a plain
`ClusterCoordinator` loop. Bytes are those on the loopback interface of that
network, which only the cluster uses, over the least that could travel: unique
rows and dense variables, down and up.

Before that, how even the work is on 4 ps by each `partition_strategy`: rows
that each has served of a table of 100,000, to batches of 4,096 ids by Zipf's
law (1.05), counted on the servers.
"""

from __future__ import annotations

import argparse

from benchmarks.ps_harness import IDS, median_and_range, run_cluster


def load(strategy: str) -> float:
    """Rows of a table that the fullest of 4 ps serves, over their mean."""
    case = {"model": "table", "who": "tfdist", "optimizer": "none"}
    case |= {"rows": 100_000, "zipf": 1.05, "batch": 4096 // IDS, "shards": 4}
    case |= {"partition_strategy": strategy, "steps": 100, "repeats": 1}
    served = [*run_cluster(case, ps=4)["rows_served"].values()]
    assert len(served) == 4, served
    return max(served) * len(served) / sum(served)


def main() -> None:
    """Runs every case in a cluster of its own and prints a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="10000,100000,1000000,10000000")
    parser.add_argument("--optimizers", default="adagrad,adam")
    parser.add_argument("--contenders", default="tfdist,stock")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stock_steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", action="store_true", help="that alone")
    args = parser.parse_args()
    for strategy in ("div", "balanced"):
        print(f"{strategy:<9} fullest of 4 ps over mean {load(strategy):.3f}")
    if args.load:
        return
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

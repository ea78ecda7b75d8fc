"""Measures steps per second and bytes per step by the size of a table.

    python -m benchmarks.tables [--rows=10000,1000000] [--optimizers=adagrad]

Each step looks up 8 ids for each of 256 examples, on 2 ps and 2 workers in a
private network, with tfdist and with Keras' own layer and optimizer in a plain
`ClusterCoordinator` loop. Bytes are counted on the loopback interface of that
network, which only the cluster uses. "over least" is their ratio to the minimum
possible traffic: unique rows and dense variables, down and up.

Before that, the benchmark measures how evenly each `partition_strategy` spreads
the work over 4 ps: the servers count the rows they serve of a table of 100,000,
for batches of 4,096 ids drawn by Zipf's law (exponent 1.05).
"""

from __future__ import annotations

import argparse

from benchmarks.ps_harness import IDS, median_and_range, run_cluster


def load(strategy: str) -> float:
    """Returns the rows served by the busiest of 4 ps, divided by the mean."""
    case = {"model": "table", "who": "tfdist", "optimizer": "none"}
    case |= {"rows": 100_000, "zipf": 1.05, "batch": 4096 // IDS, "shards": 4}
    case |= {"partition_strategy": strategy, "steps": 100, "repeats": 1}
    served = [*run_cluster(case, ps=4)["rows_served"].values()]
    assert len(served) == 4, served
    return max(served) * len(served) / sum(served)


def main() -> None:
    """Runs each case in a new cluster and prints a row for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="10000,100000,1000000,10000000")
    parser.add_argument("--optimizers", default="adagrad,adam")
    parser.add_argument("--contenders", default="tfdist,stock")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--stock_steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", action="store_true", help="only the load")
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

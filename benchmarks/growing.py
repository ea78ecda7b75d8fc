"""Steps per second of a table that grows, over one of a known vocabulary.

    python -m benchmarks.growing [--rows=100000,1000000] [--new=0,100]
    python -m benchmarks.growing --rows=100000 --tables=26

Both look up the same 8 ids per example, 256 examples per step (2,048 ids), on 2
ps and 2 workers, in turns. `--new` ids of a step are new; the others are among
the `--rows` that had a row before the first step. Half of `--steps` run before
any step is timed. With several `--tables`, each has `--rows` rows and looks up
one id per example.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks.ps_harness import median_and_range, run_cluster

_ROUND = {"who": "tfdist", "repeats": 3}


def main() -> None:
    """Prints a row for each case; contenders take turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="100000,1000000")
    parser.add_argument("--new", default="0,100")
    parser.add_argument("--tables", type=int, default=1)
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print("rows       new   known ids           growing             ratio")
    for rows in map(int, args.rows.split(",")):
        for new in map(int, args.new.split(",")):
            # Of two workers, before and in three timed runs; a third is free.
            most = rows + 2 * new * args.steps * 4
            case = {**_ROUND, "rows": rows, "new": new, "steps": args.steps}
            case |= {"optimizer": args.optimizer, "capacity": most * 4 // 3}
            case["model"] = "table" if args.tables == 1 else "tables"
            case["tables"] = args.tables
            rates: dict[bool, list[float]] = {False: [], True: []}
            ratios = []
            for _ in range(args.rounds):
                for grows, found in rates.items():
                    measured = run_cluster({**case, "grows": grows})
                    found += measured["steps_per_sec"]
                known, growing = (
                    statistics.median(found[-_ROUND["repeats"] :])
                    for found in rates.values()
                )
                ratios.append(growing / known)
            told = [f"{median_and_range(each):<19}" for each in rates.values()]
            ratio = f"{statistics.median(ratios):.2f}"
            ratio += f" ({min(ratios):.2f}-{max(ratios):.2f})"
            print(f"{rows:<10} {new:<5}", *told, ratio, flush=True)


if __name__ == "__main__":
    main()

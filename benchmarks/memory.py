"""Peak memory of each task against the size of a table.

    python -m benchmarks.memory [--rows=10000000] [--shards=20]

Creates, trains and checkpoints a table of `rows` x 16 with Adagrad on 2 ps and
2 workers, and prints by how much each task's peak exceeds that with a table of
1,000 rows, beside the bytes of the table and its slot that the task holds.

While a shard is initialized or restored, its server holds a second copy of it,
since TensorFlow's assignment copies. Many small shards (64 MB each with
`variable_axis_size_partitioner(64 << 20)`) therefore need less memory than a
few large ones, as `--shards=2` shows.
"""

from __future__ import annotations

import argparse

from benchmarks.ps_harness import DIM, run_cluster


def main() -> None:
    """Runs both clusters and prints a row for each task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--shards", type=int, default=20)
    args = parser.parse_args()
    small, large = (
        run_cluster(
            {
                "model": "table",
                "who": "tfdist",
                "rows": rows,
                "shards": args.shards,
                "optimizer": "adagrad",
                "steps": 100,
                "repeats": 1,
                "save": True,
            }
        )["peak_bytes"]
        for rows in (1_000, args.rows)
    )
    share = args.rows * DIM * 4 * 2 / 2
    print("task      more than with 1,000 rows   its share   over its share")
    for task, peak in sorted(large.items()):
        held = share if task.startswith("ps") else 0
        more = peak - small[task]
        over = f"{more / held - 1:.1%}" if held else ""
        print(
            f"{task:<9} {more / 1e6:>17.0f} MB {held / 1e6:>14.0f} MB   {over}"
        )


if __name__ == "__main__":
    main()

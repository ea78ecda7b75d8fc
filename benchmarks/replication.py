"""Steps per second of one client for all workers, and of one per worker.

    python -m benchmarks.replication [--quick] [--json=FILE]

Between-graph replication on parameter servers, as TF1 had it, beside the
coordinator. On the same 2 ps, in a private network, the same steps are run by

* tfdist's `CoordinatedLoop`: the chief hands dispatches to the workers;
* as many clients: processes that find the variables by name on the ps and call
  the same `tf.function` again and again. Within each dispatch a client draws a
  ticket, an atomic counter on a ps, so that no two clients run the same steps
  and none goes beyond the last one; its updates pass a `Fence`, as the
  coordinator's do.

Both run K steps in a dispatch, `RunConfig`'s default, and one. The last column
has clients without ticket and fence, as in TF1, where `global_step` passed its
limit by up to a step for each worker but one. All take turns; a row has the
medians of the rounds. What the ps have counted must be what clients have done.

Steps: `empty` takes a number and does nothing; `dense` has six variables, of
19 kB; `sparse` eight tables of 100,000 x 16, each on both ps; `100 variables`
are small. All but the first train with Adagrad on batches of 256.

How to read it: a dispatch costs the coordinator CPU time in a single Python
process, whatever the number of workers (`empty` with one step shows the highest
rate of dispatches), and a client the round trip of its ticket. With one step
per dispatch, clients are up to twice as fast in an empty step; the advantage
shrinks as a step does more work. K steps per dispatch divide both costs by K;
the remaining work of workers and ps is the same in both forms. Clients thus pay
off only if the workers together need more dispatches than one process can make,
or if a dispatch must be a single step, as with finite data. The clients' thread
pools spin while they wait, unlike the workers': TensorFlow makes this
configurable for servers only.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics

from benchmarks.ps_harness import run_cluster

SCENARIOS = {
    "empty": {},
    "dense": {"model": "dense"},
    "sparse": {"model": "tables", "tables": 8},
    "100 variables": {"model": "variables"},
}
_COLUMNS = (
    "step",
    "workers",
    "K",
    "coordinator, K",
    "clients, K",
    "ratio",
    "coordinator, 1",
    "clients, 1",
    "ratio",
    "as TF1, 1",
)


def main() -> None:
    """Prints a table of steps per second; K is the steps in a dispatch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--secs", type=float, default=1.0, help="of a round")
    parser.add_argument(
        "--quick", action="store_true", help="two workers, one short round"
    )
    parser.add_argument("--json", help="file for the rate of each round")
    args = parser.parse_args()
    if args.quick:
        args.workers, args.rounds, args.secs = "2", 1, 0.5
    print(_row(_COLUMNS), _row(["---"] * len(_COLUMNS)), sep="\n")
    results = {}
    for workers in map(int, args.workers.split(",")):
        case = {
            "scenarios": args.scenarios.split(","),
            "rounds": args.rounds,
            "secs": args.secs,
        }
        results[workers] = run_cluster(
            case, workers, "benchmarks.replication_task"
        )
        for name, result in results[workers].items():
            print(_row(_cells(name, workers, result)), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))


def _cells(name: str, workers: int, result: dict) -> list[str]:
    rates = {
        form: statistics.median(rounds)
        for form, rounds in result["rates"].items()
    }
    cells = [name, str(workers), str(result["steps_per_dispatch"])]
    for form in ("full", "one"):
        coordinator = rates[f"coordinator {form}"]
        clients = rates[f"clients {form}"]
        cells += [
            f"{coordinator:,.0f}",
            f"{clients:,.0f}",
            f"{clients / coordinator:.2f}",
        ]
    return [*cells, f"{rates['clients bare']:,.0f}"]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()

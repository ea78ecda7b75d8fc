"""Measures tfdist and its peers, all with one command.

    python -m benchmarks.run [--quick] [--only=NAME,...] [--out=results]

Runs every scenario of `benchmarks/scenarios` and writes, after each of its
sizes, `<out>/<name>.json`, and after each scenario, of all that is there,
`<out>/report.md` with plots: the machine, the versions, medians and ranges, and
the ratios that tfdist must show, each beside its bar. The environments of
contenders with other packages are made in `<out>/venvs` and kept; one that
cannot be made is reported as missing.

`--quick` uses tiny sizes and one round, to test that everything runs, not how
fast. A full run takes about two hours on an otherwise idle machine.
`--only=null_step` runs one scenario; the page keeps the earlier results of the
others.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import time

from benchmarks import report
from benchmarks.contest import Bench
from benchmarks.environments import Environments

# In the order in which they run.
SCENARIOS = (
    "wide_and_deep",
    "null_step",
    "start_up",
    "checkpoints",
    "placements",
    "recoveries",
    "sync_scaling",
    "input_pipelines",
    "convergence",
)


def main() -> None:
    """Runs the scenarios and writes the page."""
    args = _options()
    args.out.mkdir(parents=True, exist_ok=True)
    environments = Environments(args.out / "venvs")
    bench = Bench(
        environments,
        rounds=args.rounds or (1 if args.quick else 5),
        quick=args.quick,
        only=frozenset(filter(None, args.contenders.split(";"))),
    )
    for name in args.only:
        _measure(name, bench, args.out)
        results = {
            done: json.loads(path.read_text())
            for done in SCENARIOS
            if (path := args.out / f"{done}.json").exists()
        }
        # Anew after each, with the environments that were made meanwhile.
        page = report.write(args.out, report.machine(environments), results)
    print(page)


def _measure(name: str, bench: Bench, directory: pathlib.Path) -> None:
    """Runs a scenario and writes its file, after each size."""
    print(f"{name} ...", flush=True)
    start = time.monotonic()
    about = {
        "measured": time.strftime("%Y-%m-%d %H:%M"),
        "rounds": bench.rounds,
        "load before": round(os.getloadavg()[0], 2),
    }
    if bench.quick:
        about["sizes"] = "tiny: these figures mean nothing"
    module = importlib.import_module(f"benchmarks.scenarios.{name}")
    for result in module.run(bench):
        found = dataclasses.asdict(result) | {"about": about}
        text = json.dumps(found, indent=1)
        (directory / f"{name}.json").write_text(text)
    for missing, reason in result.missing.items():
        print(f"  missing: {missing}: {reason}", flush=True)
    print(f"  {time.monotonic() - start:.0f} s", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one round"
    )
    parser.add_argument(
        "--only", default=",".join(SCENARIOS), help="scenarios, with commas"
    )
    parser.add_argument(
        "--contenders", default="", help="contenders, with semicolons"
    )
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument("--out", type=pathlib.Path, default="results")
    args = parser.parse_args()
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(SCENARIOS):
        parser.error(
            f"--only names {', '.join(sorted(unknown))}; there are "
            f"{', '.join(SCENARIOS)}."
        )
    return args


if __name__ == "__main__":
    main()

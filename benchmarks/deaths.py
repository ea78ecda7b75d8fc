"""How well a job learns when its workers die: the AUC for each seed.

    python -m benchmarks.deaths [--seeds=3] [--max_steps=6000] -- \
        --train_files='train.csv' --eval_files=eval.csv --label=income

Runs `trainer.task` with the flags after `--` on 2 ps and 3 workers:
undisturbed; with eight kills of workers that restart; with two workers killed
at step 500 that do not restart. Prints the AUC of each run, and the difference
between disturbed and undisturbed runs.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Callable

from tfdist.launch.testing import LocalCluster

_KILLS, _GONE_AT = 8, 500
_DEADLINE_SECS = 1800.0


def _undisturbed(cluster: LocalCluster, max_steps: int) -> None:
    del cluster, max_steps


def _kill_some(cluster: LocalCluster, max_steps: int) -> None:
    for kill in range(_KILLS):
        step = max_steps * (2 * kill + 1) // (2 * _KILLS)
        cluster.wait_until_step(step, timeout_secs=_DEADLINE_SECS)
        cluster.kill(f"worker:{kill % 3}")


def _kill_for_good(cluster: LocalCluster, max_steps: int) -> None:
    del max_steps
    cluster.wait_until_step(_GONE_AT, timeout_secs=_DEADLINE_SECS)
    for worker in ("worker:1", "worker:2"):
        cluster.set_restart_secs(worker, None)
        cluster.kill(worker)


CASES: dict[str, Callable[[LocalCluster, int], None]] = {
    "undisturbed": _undisturbed,
    "eight kills": _kill_some,
    "two gone for good": _kill_for_good,
}


def auc(case: str, seed: int, max_steps: int, flags: list[str]) -> float:
    """Trains once; returns the AUC on the evaluation examples."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *[sys.executable, "-m", "trainer.task", *flags],
            *[f"--model_dir={directory}", f"--seed={seed}"],
            *[f"--max_steps={max_steps}"],
            f"--save_checkpoints_steps={max_steps}",
        ]
        with LocalCluster(command, ps=2, workers=3, restart_secs=1) as cluster:
            CASES[case](cluster, max_steps)
            if code := cluster.wait(timeout_secs=_DEADLINE_SECS):
                raise RuntimeError(f"The chief ended with exit code {code}.")
            said = cluster.output("chief:0")
    return float(re.findall(r"(?m)^  auc +([\d.]+)", said)[-1])


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.deaths")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=6000)
    parser.add_argument("flags", nargs="*", help="of trainer.task, after --")
    args = parser.parse_args()
    means = {}
    for case in CASES:
        found = [
            auc(case, seed, args.max_steps, args.flags)
            for seed in range(args.seeds)
        ]
        means[case] = statistics.mean(found)
        shown = ", ".join(f"{value:.4f}" for value in found)
        away = means[case] - means["undisturbed"]
        print(f"{case:<20}{shown}   mean {away:+.4f}", flush=True)


if __name__ == "__main__":
    main()

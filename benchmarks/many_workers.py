"""What a cluster of many tasks costs its chief and its servers.

    python -m benchmarks.many_workers [--clusters=2x2,2x8,2x32,8x8]
        [--dispatches=20] [--sleep_ms=100] [--out=results]

Each worker waits `--sleep_ms` for each of its batches, so that many fit on a
few CPUs; a dispatch has ten steps of a small model with a table that is split
over all servers. Prints for each cluster, given as ps x workers:

    first step   seconds from the launcher's start to the first step
    steps/s      and the share of what the sleep alone would allow
    chief        CPU ms per dispatch, and MB of memory
    ps           CPU ms per dispatch of all servers
    wire         kB per dispatch
    recovered    seconds from the kill of a server to the next step

Then what 100 workers and 20 servers would need: the chief's CPU per dispatch
is taken as linear in the workers, that of all servers and the bytes as linear
in the servers. With `--out` and matplotlib, `many_workers.png` shows it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

import tfdist
from benchmarks import counters
from tfdist.launch.testing import LocalCluster

_UNROLLED, _BATCH, _ROWS, _DIM = 10, 32, 10_000, 16
_DEADLINE_SECS = 600.0


class _Measures(tfdist.SessionRunHook):
    """Says when the first step is made, and what `steps` after some cost."""

    def __init__(self, warm: int, steps: int) -> None:
        self._warm, self._steps = warm, steps
        self._before: tuple[int, counters.Usage] | None = None
        self._is_new, self._is_done = True, False

    def after_create_session(self, session: Any, coord: Any = None) -> None:
        """Again after each recovery."""
        self._is_new = True

    def steps_until_next(self, step: int) -> int | None:
        """Some: what is measured is the mean of many."""
        return 1 if self._is_new else 100

    def after_run(
        self,
        run_context: tfdist.SessionRunContext,
        run_values: tfdist.SessionRunValues,
    ) -> None:
        """Prints lines that the caller reads."""
        step = run_context.session.step
        if self._is_new:
            self._is_new = False
            print("STEP", time.monotonic(), flush=True)
        if self._before is None:
            if step >= self._warm:
                self._before = step, counters.usage()
        elif step >= self._before[0] + self._steps and not self._is_done:
            self._is_done, (first, before) = True, self._before
            used = counters.difference(before, counters.usage(), step - first)
            used["peak"] = counters.peak_bytes()
            print("USED", json.dumps(used), flush=True)


def _input(sleep_ms: int) -> Callable[[], tf.data.Dataset]:
    def batches() -> tf.data.Dataset:
        ids = tf.random.stateless_uniform(
            [_BATCH, 4], [1, 2], 0, _ROWS, tf.int64
        )
        labels = tf.cast(ids[:, :1] % 2, tf.float32)
        one = tf.data.Dataset.from_tensors((ids, labels)).repeat()
        return one.apply(testing.sleep(1000 * sleep_ms))

    return batches


def _model(num_shards: int) -> keras.Model:
    ids = keras.Input([4], dtype="int64")
    table = tfdist.PartitionedEmbedding(_ROWS, _DIM, num_shards=num_shards)
    hidden = keras.layers.Dense(32, "relu")(keras.layers.Flatten()(table(ids)))
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile("adagrad", loss)
    return model


def run_task(case: dict[str, Any]) -> None:
    """One task; the chief trains until it is told to end."""
    cluster = tfdist.Cluster.from_env()
    if cluster.role in ("ps", "worker"):
        return tfdist.cluster.serve(cluster)
    config = tfdist.RunConfig(
        case["directory"],
        steps_per_dispatch=_UNROLLED,
        save_checkpoints_secs=10,
    )
    estimator = tfdist.Estimator(lambda: _model(case["ps"]), config)
    estimator.train(
        _input(case["sleep_ms"]),
        hooks=[_Measures(case["warm"], case["steps"])],
        max_steps=10_000_000,
    )


def measure(
    ps: int, workers: int, dispatches: int, sleep_ms: int
) -> dict[str, float]:
    """Prints the row of one cluster, and returns what a dispatch costs."""
    each = _UNROLLED * workers
    with tempfile.TemporaryDirectory() as directory:
        case = {
            **{"directory": directory, "ps": ps, "sleep_ms": sleep_ms},
            **{"warm": 10 * each, "steps": dispatches * each},
        }
        task = [sys.executable, "-m", "benchmarks.many_workers"]
        start = time.monotonic()
        with LocalCluster(
            [*task, f"--task={json.dumps(case)}"],
            ps=ps,
            workers=workers,
            restart_secs=0.5,
        ) as cluster:

            def line(pattern: str) -> str:
                return cluster.wait_for_line(
                    "chief:0", pattern, timeout_secs=_DEADLINE_SECS
                ).group(1)

            first = float(line(r"(?m)^STEP (\S+)")) - start
            used = json.loads(line(r"(?m)^USED (.*)"))
            killed = time.monotonic()
            cluster.kill("ps:0")
            again = float(line(r"(?ms)^STEP .*^STEP (\S+)")) - killed
    count = used["steps"] / _UNROLLED
    row = {
        job: 1e3 * sum(v for k, v in used["cpu"].items() if k.startswith(job))
        for job in ("chief", "ps")
    } | {"wire": used["bytes"] / 1e3}
    row = {name: value / count for name, value in row.items()}
    rate = used["steps"] / used["secs"]
    print(
        f"{ps}x{workers:<6} {first:9.1f}   {rate:7.1f} "
        f"({rate * sleep_ms / 1e3 / workers:4.0%})   "
        f"{row['chief']:6.2f} ms {used['peak'] / 1e6:6.0f} MB   "
        f"{row['ps']:6.2f} ms   {row['wire']:6.0f} kB   {again:7.1f}",
        flush=True,
    )
    return row | {"servers": ps, "workers": workers}


# What is drawn: its unit, and what its cost per dispatch is linear in.
_LOADS = {
    "chief": ("the chief: cores", "workers"),
    "ps": ("each server: cores", "servers"),
    "wire": ("each server: MB/s", "servers"),
}


def _load(
    rows: Sequence[dict[str, float]], name: str, ps: int, workers: Any
) -> Any:
    """What is needed while each worker makes a dispatch a second."""
    along = _LOADS[name][1]
    sizes, costs = ([row[key] for row in rows] for key in (along, name))
    slope, constant = np.polyfit(sizes, costs, 1)
    cost = constant + slope * (workers if along == "workers" else ps)
    return cost * workers / 1e3 / (1 if name == "chief" else ps)


def _draw(rows: Sequence[dict[str, float]], path: pathlib.Path) -> None:
    """Loads over the number of workers; dots are what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(_LOADS), figsize=(11, 3.5), layout="constrained"
    )
    over = np.arange(1, 101)
    for panel, (name, (text, along)) in zip(
        panels, _LOADS.items(), strict=True
    ):
        for color, ps in enumerate((2, 8, 20)):
            if along == "workers" and color:
                continue  # All the same.
            load, shade = _load(rows, name, ps, over), f"C{color}"
            panel.plot(over, load, color=shade, label=f"{ps} ps")
            for row in rows:
                if row["servers"] == ps or along == "workers":
                    share = 1 if name == "chief" else ps
                    dot = row[name] * row["workers"] / 1e3 / share
                    panel.plot(row["workers"], dot, "o", color=shade)
        panel.set(xlabel="workers", ylabel=text, ylim=(0, None))
    panels[-1].legend()
    figure.suptitle(
        f"While each worker makes a dispatch of {_UNROLLED} steps a second"
    )
    figure.savefig(path / "many_workers.png", dpi=110)


def main() -> None:
    """Prints a row for each cluster, and what larger ones would need."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", default="2x2,2x8,2x32,8x8")
    parser.add_argument("--dispatches", type=int, default=20, help="per worker")
    parser.add_argument("--sleep_ms", type=int, default=100)
    parser.add_argument("--out", type=pathlib.Path, help="of the picture")
    parser.add_argument("--task", help="of a task: what it is to do")
    args = parser.parse_args()
    if args.task:
        return run_task(json.loads(args.task))
    print(
        "ps x workers  first step   steps/s        chief"
        "                 ps          wire        recovered"
    )
    rows = []
    for cluster in args.clusters.split(","):
        ps, workers = map(int, cluster.split("x"))
        rows.append(measure(ps, workers, args.dispatches, args.sleep_ms))
    if min(len({r[n] for r in rows}) for n in ("servers", "workers")) < 2:
        return None  # No line through one point.
    print("20x100, if each worker makes a dispatch a second:")
    for name, (text, _) in _LOADS.items():
        print(f"  {text} {_load(rows, name, 20, 100):.2f}")
    if args.out and importlib.util.find_spec("matplotlib"):
        args.out.mkdir(parents=True, exist_ok=True)
        _draw(rows, args.out)
    return None


if __name__ == "__main__":
    main()

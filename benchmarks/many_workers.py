"""The load that a cluster of many tasks puts on its chief and its servers.

    python -m benchmarks.many_workers [--clusters=2x2,2x8,2x32,8x8]
        [--dispatches=20] [--sleep_ms=100] [--out=results]

Each worker sleeps `--sleep_ms` per batch, so that many workers can share a few
CPUs. A dispatch has ten steps of a small model, whose table is partitioned over
all servers. Prints for each cluster, given as ps x workers:

    first step   seconds from the launcher's start to the first step
    steps/s      and the share of what the sleep alone would allow
    chief        CPU ms per dispatch, and MB of memory
    ps           CPU ms per dispatch of all servers
    wire         kB per dispatch
    recovered    seconds from the kill of a server to the next step

Of four clusters or more also what 20 servers and 100 workers would need, if CPU
and bytes grow as they do here: with the dispatches a second, and for each of
them with the servers. `--out` draws it, where matplotlib is installed.
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
    """Prints the row of one cluster, and returns the loads of its tasks."""
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
    count, secs = used["steps"] / _UNROLLED, used["secs"]
    cpu = {
        job: sum(v for k, v in used["cpu"].items() if k.startswith(job))
        for job in ("chief", "ps")
    }
    rate = used["steps"] / secs
    print(
        f"{ps}x{workers:<6} {first:9.1f}   {rate:7.1f} "
        f"({rate * sleep_ms / 1e3 / workers:4.0%})   "
        f"{1e3 * cpu['chief'] / count:6.2f} ms {used['peak'] / 1e6:6.0f} MB   "
        f"{1e3 * cpu['ps'] / count:6.2f} ms   "
        f"{used['bytes'] / 1e3 / count:6.0f} kB   {again:7.1f}",
        flush=True,
    )
    return {
        "servers": ps,
        "rate": count / secs,
        "chief": cpu["chief"] / secs,
        "ps": cpu["ps"] / secs / ps,
        "wire": used["bytes"] / 1e6 / secs / ps,
    }


# What is drawn, and the terms of its load: of servers and dispatches a second.
_LOADS: dict[str, tuple[str, Callable[[Any, Any], list[Any]]]] = {
    "chief": ("CPU of the chief, cores", lambda ps, rate: [1 + 0 * rate, rate]),
    "ps": (
        "CPU of each server, cores",
        lambda ps, rate: [1 + 0 * rate, rate / ps, rate],
    ),
    "wire": ("wire of each server, MB/s", lambda ps, rate: [rate / ps, rate]),
}


def _load(
    rows: Sequence[dict[str, float]], name: str, ps: float, rate: Any
) -> Any:
    """The load at `rate` dispatches a second, by least squares."""
    terms = _LOADS[name][1]
    known = [terms(row["servers"], row["rate"]) for row in rows]
    weights, *_ = np.linalg.lstsq(
        np.array(known), np.array([row[name] for row in rows])
    )
    return sum(w * t for w, t in zip(weights, terms(ps, rate), strict=True))


def _draw(rows: Sequence[dict[str, float]], path: pathlib.Path) -> None:
    """Loads over dispatches a second; dots are what was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(_LOADS), figsize=(11, 3.5), layout="constrained"
    )
    rates = np.arange(1, 101)
    sizes = sorted({row["servers"] for row in rows} | {20})
    for panel, (name, (text, _)) in zip(panels, _LOADS.items(), strict=True):
        for color, ps in enumerate(sizes):
            style = {"color": f"C{color}", "label": f"{ps:.0f} ps"}
            panel.plot(rates, _load(rows, name, ps, rates), **style)
            for row in rows:
                if row["servers"] == ps:
                    panel.plot(row["rate"], row[name], "o", color=f"C{color}")
        panel.set(xlabel="dispatches a second", ylabel=text, ylim=(0, None))
    panels[-1].legend()
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
    if len(rows) < 4:
        return None
    print("20x100, where each worker makes a dispatch a second:")
    for name, (text, _) in _LOADS.items():
        print(f"  {text}: {_load(rows, name, 20, 100):.2f}")
    if args.out and importlib.util.find_spec("matplotlib"):
        args.out.mkdir(parents=True, exist_ok=True)
        _draw(rows, args.out)
    return None


if __name__ == "__main__":
    main()

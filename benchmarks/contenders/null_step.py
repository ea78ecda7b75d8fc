"""Measures steps that only pull and push variables: tfdist or plain Keras 3.

    python -m benchmarks.contenders.null_step JSON

Runs one task of a cluster with parameter servers, or a single process, where
tfdist runs the same steps on local variables. Keras 3 runs in a coordinator
loop. The chief measures the cases of `benchmarks.scenarios.null_step` in turn.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks import counters, ps_task
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.training import optimizers
from tfdist.training.loop import LocalLoop, automatic_steps_per_dispatch
from tfdist.training.step import ModelStep


def measure(
    run: Callable[[int], Any], secs: float, num_workers: int
) -> dict[str, Any]:
    """Returns the resources used by about `secs` seconds of steps."""
    chunk = 20 * max(1, num_workers)  # Several dispatches per worker.
    for _ in range(3):  # The first run traces; the last gives the speed.
        start = time.monotonic()
        run(chunk)
        each = (time.monotonic() - start) / chunk
    steps = max(chunk, int(secs / each / chunk) * chunk)
    before = counters.usage()
    run(steps)
    return counters.difference(before, counters.usage(), steps)


def local_runner(case: dict[str, Any]) -> Callable[[int], Any]:
    """Returns a function that runs a number of steps in this process."""
    global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
    model = ps_task.model_fn(case)
    optimizers.build(model.optimizer, model.trainable_variables)
    examples = ps_task.input_fn(case["rows"], case["batch"])
    dataset = examples(tf.distribute.InputContext())
    step = ModelStep(model, dataset.element_spec, global_step=global_step)
    full = automatic_steps_per_dispatch(len(model.trainable_variables))
    return LocalLoop(step, global_step, dataset, full).run


def main() -> None:
    """Runs a server or, as the chief, the measurement."""
    told = json.loads(sys.argv[1])
    cluster = Cluster.from_env()
    if cluster.role in ("ps", "worker"):
        servers.serve(cluster)
        return
    if is_chief := cluster.role == "chief":
        strategy = parameter_server_strategy(cluster)
    results = {}
    for name, case in told["cases"].items():
        case = {**case, "who": told["who"], "unrolled": told["unrolled"]}
        if is_chief:
            run, _ = ps_task.runner(case, strategy, cluster)
        else:
            run = local_runner(case)
        results[name] = measure(run, told["secs"], cluster.num_workers)
    pathlib.Path(told["output"]).write_text(json.dumps(results))
    if is_chief:
        servers.release(cluster)


if __name__ == "__main__":
    main()

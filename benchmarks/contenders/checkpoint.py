"""Saves and restores a table of 16 columns in 20 shards.

    python -m benchmarks.contenders.checkpoint JSON

Runs one task of a cluster with parameter servers, or a single process. The key
`who` names the library: "tfdist", or "tensorflow" for `tf.train.Checkpoint`.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from benchmarks import counters
from benchmarks.ps_harness import DIM
from tfdist.checkpoint import checkpoints
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.embeddings.layer import PartitionedEmbedding
from tfdist.placement.scope import placed_scope
from tfdist.training import optimizers

# With this many saves, the median is not one of the first ones, which are slow
# in both libraries: they are limited by CPU time.
SHARDS, SAVES = 20, 11


def model_of(rows: int) -> keras.Model:
    """Builds a model of only the table, with an optimizer without slots."""
    ids = keras.Input([1], dtype="int32")
    table = PartitionedEmbedding(rows, DIM, num_shards=SHARDS)
    model = keras.Model(ids, table(ids))
    model.compile(keras.optimizers.SGD(0.01))
    optimizers.build(model.optimizer, model.trainable_variables)
    return model


def saving(
    who: str, directory: str, model: keras.Model
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns a function that saves and one that restores."""
    if who == "tfdist":
        variables = checkpoints.named_variables(model)
        saver = checkpoints.Checkpoints(directory, variables)
        saver.prepare()
        return lambda: saver.save(1), saver.restore
    shards = [v.value for v in model.trainable_variables]
    plain = tf.train.Checkpoint(shards=shards)

    def save() -> None:
        plain.write(f"{directory}/model")

    return save, lambda: plain.read(f"{directory}/model")


def seconds(call: Callable[[], Any]) -> float:
    """Returns how long a call takes."""
    start = time.monotonic()
    call()
    return time.monotonic() - start


def main() -> None:
    """Runs a server or, as the chief, the measurement."""
    case = json.loads(sys.argv[1])
    cluster = Cluster.from_env()
    if cluster.role == "local":
        model = model_of(case["rows"])
    elif cluster.role == "chief":
        strategy = parameter_server_strategy(cluster)
        with placed_scope(strategy, num_ps=cluster.num_ps):
            model = model_of(case["rows"])
    else:
        servers.serve(cluster)
        return
    directory = case["directory"] + "/model"
    save, restore = saving(case["who"], directory, model)
    saves = []
    for _ in range(SAVES):
        shutil.rmtree(directory, ignore_errors=True)
        pathlib.Path(directory).mkdir()
        saves.append(seconds(save))
    peaks = {
        task: max(map(counters.peak_bytes, pids))
        for task, pids in counters.tasks().items()
    }
    result = {
        "save": statistics.median(saves),
        "restore": seconds(restore),
        "peaks": peaks,
    }
    pathlib.Path(case["output"]).write_text(json.dumps(result))
    if cluster.role == "chief":
        servers.release(cluster)


if __name__ == "__main__":
    main()

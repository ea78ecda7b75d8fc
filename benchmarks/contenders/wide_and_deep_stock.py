"""Trains wide and deep with plain Keras 3 in a `ClusterCoordinator` loop.

    python -m benchmarks.contenders.wide_and_deep_stock JSON

The loop is that of TensorFlow's guide, with Keras' own layers, one step per
dispatch, and one optimizer for all variables, as `compile` accepts only one.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import keras

from benchmarks import clicks, counters, ps_task
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy


def main() -> None:
    """Runs a server or, as the chief, the measurement."""
    case = json.loads(sys.argv[1])
    cluster = Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    strategy = parameter_server_strategy(cluster)

    def table(rows: int, width: int, values: Any, name: str) -> Any:
        return keras.layers.Embedding(
            rows, width, embeddings_initializer=values, name=name
        )

    with strategy.scope():
        optimizer = keras.optimizers.Adagrad(clicks.DEEP_RATE)
        model = clicks.keras_model(keras, case["rows"], table, optimizer)
        optimizer.build(model.trainable_variables)
    run = ps_task.plain_loop(
        model,
        lambda context: clicks.train(case["data"]),
        strategy,
        ps_task.keras_update,
        unrolled=1,
    )
    run(case["warm"])
    before = counters.usage()
    run(case["steps"])
    result = counters.difference(before, counters.usage(), case["steps"])
    pathlib.Path(case["output"]).write_text(json.dumps(result))
    servers.release(cluster)


if __name__ == "__main__":
    main()

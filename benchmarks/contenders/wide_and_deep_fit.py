"""Trains wide and deep with Keras 3's own `fit` in one process.

    python -m benchmarks.contenders.wide_and_deep_fit JSON

With Keras' own layers, and one optimizer for all variables, as `compile`
accepts only one.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import keras

from benchmarks import clicks, counters

_EXECUTION = 10


def main() -> None:
    """Measures the steps and writes the results."""
    case = json.loads(sys.argv[1])
    keras.utils.set_random_seed(case["seed"])

    def table(rows: int, width: int, values: Any, name: str) -> Any:
        return keras.layers.Embedding(
            rows, width, embeddings_initializer=values, name=name
        )

    optimizer = keras.optimizers.Adagrad(clicks.DEEP_RATE)
    model = clicks.keras_model(keras, case["rows"], table, optimizer)
    model.steps_per_execution = _EXECUTION
    data = clicks.train(case["data"])
    model.fit(data, steps_per_epoch=case["warm"], verbose=0)
    before = counters.usage()
    model.fit(data, steps_per_epoch=case["steps"], verbose=0)
    result = counters.difference(before, counters.usage(), case["steps"])
    pathlib.Path(case["output"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

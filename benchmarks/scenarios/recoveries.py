"""How long training stands still after a parameter server was killed."""

from __future__ import annotations

from benchmarks import recovery
from benchmarks.contest import Bench, Result


def run(bench: Bench) -> Result:
    """One kill in each round."""
    result = Result(
        "Recovery",
        "`trainer.task` on 2 ps and 2 workers; one ps is killed and started "
        "again a second later. Seconds from the kill until the chief says so "
        "(noticed), waits for the server, connects, builds the model, restores "
        "the last checkpoint, and makes the first steps. Estimator's sessions "
        "recover, too; stock Keras 3 and `tf_keras` end with an error.",
    )
    runs = bench.turns({"tfdist": lambda number: recovery.measure()}, result)
    for measured in runs.values():
        for part in measured[0] if measured else ():
            values = [each[part] for each in measured]
            result.add("parts", part, "seconds", values)
        totals = [sum(each.values()) for each in measured]
        result.add("all", "tfdist", "seconds", totals)
    return result

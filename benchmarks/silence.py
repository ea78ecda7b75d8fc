"""The cost of safeguards: `check_numerics`, hooks, checkpoints.

    python -m benchmarks.silence
    python -m benchmarks.silence --save_secs=30 [--rounds=5] [--directory=DIR]

640 MB of variables are looked at and saved, in one process and on two
parameter servers, with and without `check_numerics`; a model trains with and
without a hook that is called at each step. One line of JSON for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfdist
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.cluster import servers
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.launch.testing import LocalCluster
from tfdist.placement.scope import placed_scope
from tfdist.training.finite import FiniteCheck

TABLES, ROWS, WIDTH = 10, 1_000_000, 16  # 640 MB.
ROUNDS = 7
STEPS = 2000


def tables(num_ps: int) -> dict[str, tf.Variable]:
    """Float tables, on each server as many."""
    strategy = tf.distribute.get_strategy()
    if num_ps:
        strategy = parameter_server_strategy(tfdist.Cluster.from_env())
    with placed_scope(strategy, num_ps=num_ps):
        return {
            str(i): tf.Variable(tf.zeros([ROWS, WIDTH])) for i in range(TABLES)
        }


def secs(act: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.monotonic()
    act()
    return time.monotonic() - start


def check(num_ps: int, sparse: bool) -> dict[str, object]:
    """Milliseconds of a look and of a save, with and without; medians.

    `sparse`: rows were updated, so that a table is copied when it is read.
    """
    variables = tables(num_ps)
    if sparse:
        for variable in variables.values():
            variable.scatter_sub(tf.IndexedSlices(tf.ones([1, WIDTH]), [0]))
    looks = FiniteCheck(variables)
    with (
        tempfile.TemporaryDirectory() as on,
        tempfile.TemporaryDirectory() as off,
    ):
        saves = {
            "save_on": Checkpoints(on, variables, max_to_keep=1),
            "save_off": Checkpoints(
                off, variables, max_to_keep=1, check_numerics=False
            ),
        }
        times = {"look": [], "save_on": [], "save_off": []}
        for i in range(ROUNDS + 1):
            times["look"].append(secs(looks.not_finite))
            for name, checkpoints in saves.items():
                times[name].append(secs(lambda: checkpoints.save(i)))  # noqa: B023
    # The first traces.
    medians = {
        f"{k}_ms": round(1000 * statistics.median(v[1:]), 1)
        for k, v in times.items()
    }
    share = medians["look_ms"] / medians["save_off_ms"]
    return {**medians, "share": round(share, 3)}


class EveryStep(tfdist.SessionRunHook):
    """Counts."""

    steps = 0

    def after_run(self, run_context: object, run_values: object) -> None:
        """Counts one."""
        self.steps += 1


class Seldom(EveryStep):
    """Counts runs."""

    def steps_until_next(self, step: int) -> None:
        """Any number."""


def model_fn() -> keras.Model:
    """A small dense network."""
    hidden = keras.layers.Dense(32, "relu")
    output = keras.layers.Dense(1, "sigmoid")
    model = keras.Sequential([keras.Input([16]), hidden, output])
    model.compile("adagrad", "binary_crossentropy", metrics=["auc"])
    return model


def input_fn() -> tf.data.Dataset:
    """The same batch, for ever."""
    batch = tf.random.normal([64, 16]), tf.ones([64, 1])
    return tf.data.Dataset.from_tensors(batch).repeat()


def rate(hook: EveryStep) -> float:
    """Steps per second between a quarter of the steps and the end."""
    with tempfile.TemporaryDirectory() as directory:
        config = tfdist.RunConfig(directory, log_step_count_steps=None)
        made = tfdist.Estimator(model_fn, config)
        made.train(input_fn, [hook], max_steps=STEPS // 4)
        clock = _Clock()
        made.train(input_fn, [hook, clock], max_steps=STEPS)
    return clock.rate


class _Clock(tfdist.SessionRunHook):
    """Measures from the second run on: the first traces."""

    first = None

    def steps_until_next(self, step: int) -> int:
        """Ten times in all."""
        return STEPS // 10 - step % (STEPS // 10)

    def after_run(self, run_context: object, run_values: object) -> None:
        """Looks at the clock."""
        now = time.monotonic(), run_context.session.step
        if self.first is None:
            self.first = now
        elif now[1] == STEPS:
            self.rate = (now[1] - self.first[1]) / (now[0] - self.first[0])


def hooks() -> dict[str, object]:
    """Steps per second with either hook; medians of three."""
    rates = {"seldom": [], "every_step": []}
    for _ in range(3):
        rates["seldom"].append(rate(Seldom()))
        rates["every_step"].append(rate(EveryStep()))
    return {k: round(statistics.median(v)) for k, v in rates.items()}


class _Alternates(tfdist.CheckpointSaverHook):
    """Saves in each second period of three intervals, and measures."""

    def __init__(self, directory: str, secs: float, rounds: int) -> None:
        super().__init__(directory, save_secs=secs)
        self._period, self._left = 3 * secs, 2 * rounds + 1
        self._since: tuple[float, int] | None = None
        self._saves = True
        self.rates: dict[bool, list[float]] = {False: [], True: []}
        self.pauses: list[float] = []

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Begins the next period if it is time to; the first one is none."""
        now, step = time.monotonic(), run_context.session.step
        then, before = self._since or (now - self._period, step)
        if now - then >= self._period:
            if self._since:
                rate = (step - before) / (now - then)
                self.rates[self._saves].append(rate)
            self._since, self._saves = (now, step), not self._saves
            self._timer.reset()  # Which triggers at once.
            self._left -= 1
            if self._left < 0:
                run_context.request_stop()
                return
        super().after_run(run_context, run_values)

    def on_trigger(self, context: Any, logs: Any) -> None:
        """Saves, in every other period."""
        if self._saves:
            trigger = super().on_trigger
            self.pauses.append(1000 * secs(lambda: trigger(context, logs)))


def saving(save_secs: float, rounds: int, where: str) -> dict[str, object]:
    """What is measured with `--save_secs`; of the first period nothing."""
    rows = 200_000_000 // (2 * 4 * WIDTH)

    def table() -> keras.Model:
        ids = keras.Input([8], dtype="int32")
        embed = tfdist.PartitionedEmbedding(
            rows, WIDTH, num_shards=2, embeddings_initializer="ones"
        )
        hidden = keras.layers.Flatten()(embed(ids))
        model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(hidden))
        model.compile("adagrad", "binary_crossentropy")
        return model

    def batches() -> tf.data.Dataset:
        ids = tf.random.uniform([64, 64, 8], 0, rows, tf.int32)
        batch = ids, tf.ones([64, 64, 1])
        return tf.data.Dataset.from_tensor_slices(batch).repeat()

    with tempfile.TemporaryDirectory() as directory:
        hook = _Alternates(where or directory, save_secs, rounds)
        config = tfdist.RunConfig(
            f"{directory}/model", save_checkpoints_secs=None
        )
        tfdist.Estimator(table, config).train(batches, [hook])
    off, on = hook.rates[False][1:], hook.rates[True]
    shares = [b / a for a, b in zip(off, on, strict=True)]
    return {
        "steps_per_sec_without": [*map(round, off)],
        "steps_per_sec_with": [*map(round, on)],
        "share": round(statistics.median(shares), 4),
        "shares": [round(share, 3) for share in shares],
        "pause_ms": [round(pause, 1) for pause in hook.pauses],
    }


def main() -> None:
    """Starts itself as every task of a cluster, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", action="store_true")
    parser.add_argument("--save_secs", type=float)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="Of the checkpoints.")
    parser.add_argument("--network", default="private", help="Of the cluster.")
    args, cluster = parser.parse_args(), tfdist.Cluster.from_env()
    if cluster.num_ps and cluster.role != "chief":
        servers.serve(cluster)
        return
    where = {"ps": cluster.num_ps, "workers": cluster.num_workers}
    if not args.save_secs:
        for sparse in (False, True):
            found = check(cluster.num_ps, sparse)
            print("RESULT", json.dumps({**where, "sparse": sparse, **found}))
        found = {**where, "steps_per_sec": hooks()}
        print("RESULT", json.dumps(found), flush=True)
    elif cluster.num_ps:
        found = {**where, **saving(args.save_secs, args.rounds, args.directory)}
        print("RESULT", json.dumps(found), flush=True)
    if cluster.num_ps:
        servers.release(cluster)
    elif not args.task:
        module = [sys.executable, "-m", "benchmarks.silence", "--task"]
        command = [*module, *sys.argv[1:]]
        with LocalCluster(
            command, ps=2, workers=2, network=args.network
        ) as job:
            job.wait(timeout_secs=3600)
            for line in job.output("chief:0").splitlines():
                if line.startswith("RESULT"):
                    print(line)


if __name__ == "__main__":
    main()

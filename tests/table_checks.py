"""The program of every task in tests of partitioned tables.

    python tests/table_checks.py CHECK DIRECTORY [NUMBER ...]

The chief writes what it found into `DIRECTORY/<check>.npz` or `.json`.
"""

import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist import PartitionedEmbedding
from tfdist._tf.private_keras import reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.placement.planner import plan
from tfdist.placement.scope import placed_scope
from tfdist.placement.strategies import (
    GreedyLoadBalancingStrategy,
    RandomStrategy,
    byte_size_load_fn,
)
from tfdist.placement.variables import describe
from tfdist.training import optimizers
from tfdist.training.coordinated_loop import CoordinatedLoop
from tfdist.training.loop import run_steps_ahead
from tfdist.training.step import ModelStep
from tfdist.training.workers import Workers

STEPS, BATCH = 30, 16
_HERE = Path(__file__).parent


def launched(check, directory, *numbers, ps, workers=1, deadline=240):
    """Runs a check on a cluster of its own; returns the launcher's log."""
    log = Path(directory) / f"{check}-{ps}-{workers}.log"
    with log.open("w") as file:
        code = subprocess.run(
            [
                *[sys.executable, "-m", "tfdist.launch"],
                *[f"--ps={ps}", f"--workers={workers}", "--max_restarts=0"],
                *[__file__, check, str(directory), *map(str, numbers)],
            ],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=deadline,
        ).returncode
    assert code == 0, log.read_text()[-8000:]
    return log.read_text()


def environment():
    """Of a launcher whose tasks shall find tfdist."""
    return {**os.environ, "PYTHONPATH": str(_HERE.parent)}


# --- The models --------------------------------------------------------------


def table_model(shards=(3, 2), rows=20, optimizer=None, strategy="balanced"):
    """Two tables of one width and one of another; moving averages."""
    reset_object_names()
    keras.utils.set_random_seed(1)
    table = functools.partial(PartitionedEmbedding, partition_strategy=strategy)
    tables = [
        table(rows, 4, num_shards=shards[0], name="deep"),
        table(rows + 1, 4, num_shards=shards[1], name="more"),
        table(rows + 2, 1, num_shards=shards[1], name="wide"),
    ]
    ids = keras.Input([3], dtype="int32")
    hidden = [keras.layers.Flatten()(table(ids)) for table in tables]
    hidden = keras.layers.Concatenate()(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dense(5, "tanh")(hidden)
    model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(hidden))
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def batches(context=None):
    """Different batches, the same on every worker."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (STEPS * BATCH, 3)).astype("int32")
    y = (x[:, :1] % 2).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()


def uneven_batches():
    """Some batches, the last of which is smaller."""
    return batches().take(9).unbatch().take(8 * BATCH + 3).batch(BATCH)


def whole(variables):
    """Values by name, tables in one piece."""
    return {name: variable.numpy() for name, variable in variables.items()}


def randomize(variables, seed=0):
    """Gives every variable, slots and counters too, values of its own."""
    rng = np.random.default_rng(seed)
    for variable in variables.values():
        for part in getattr(variable, "variables", [variable]):
            part.assign(tf.cast(100 * rng.normal(size=part.shape), part.dtype))


class Job:
    """A built model on the cluster."""

    def __init__(self, strategy, cluster, make=table_model, **placing):
        with placed_scope(strategy, num_ps=cluster.num_ps, **placing):
            self.global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.model = make()
            optimizers.build(
                self.model.optimizer, self.model.trainable_variables
            )
        self.strategy, self.cluster = strategy, cluster
        self.variables = checkpoints.named_variables(
            self.model, self.global_step
        )

    def step(self):
        return ModelStep(
            self.model,
            batches().element_spec,
            global_step=self.global_step,
            remote=True,
        )

    def loop(self, steps_per_dispatch):
        return CoordinatedLoop(
            self.step(),
            self.global_step,
            batches,
            strategy=self.strategy,
            num_workers=self.cluster.num_workers,
            steps_per_dispatch=steps_per_dispatch,
        )

    def tasks(self):
        """Index of the server of each variable, shards one by one."""
        of = {v.path: v.value.device for v in self.model.trainable_variables}
        for name, variable in self.variables.items():
            parts = getattr(variable, "variables", [variable])
            of[name] = [v.device for v in parts]
        return {name: _task(devices) for name, devices in of.items()}


def _task(device):
    if isinstance(device, list):
        return [_task(each) for each in device]
    spec = tf.DeviceSpec.from_string(device)
    assert spec.job == "ps", device
    return spec.task


# --- Messages ----------------------------------------------------------------


def messages(graph, captured):
    """What crosses between tasks, in a graph: `(from, to, dtype, tensor)`.

    An op without a device is where its resource is; a constant, as
    TensorFlow's placer has it, beside its only consumer; others on the worker.
    """
    places = {}
    for op in graph.get_operations():
        if op.device:
            places[op.name] = _place(op.device)
        elif op.type == "Placeholder" and op.outputs[0].name in captured:
            places[op.name] = _place(captured[op.outputs[0].name])
        else:
            held = [
                places[t.op.name] for t in op.inputs if t.dtype == tf.resource
            ]
            places[op.name] = held[0] if held else "worker"
    seen = set()
    for op in graph.get_operations():
        target = places[op.name]
        for tensor in op.inputs:
            alone = tensor.op.type == "Const" and len(tensor.consumers()) == 1
            source = target if alone else places[tensor.op.name]
            if source != target and tensor.dtype != tf.resource:
                seen.add((source, target, tensor.dtype.name, tensor.name))
        for before in op.control_inputs:
            if places[before.name] != target:
                seen.add((places[before.name], target, "control", before.name))
    return sorted(seen)


def _place(device):
    spec = tf.DeviceSpec.from_string(device)
    return f"ps:{spec.task}" if spec.job == "ps" else "worker"


def traced_steps(job, num_steps, read_ahead):
    """The graph of a dispatch, and the devices of what it captures."""
    step = job.step()

    def train(*given):
        get_next = functools.partial(next, iter(given))
        return run_steps_ahead(
            step,
            num_steps,
            types.SimpleNamespace(get_next=get_next),
            tf.constant(0, tf.int64),
            None,
            read_ahead,
        )

    with job.strategy.scope():
        function = tf.function(train, autograph=False).get_concrete_function(
            *num_steps * [batches().element_spec]
        )
    captured = {
        inner.name: outer.device
        for outer, inner in function.graph.captures
        if outer.dtype == tf.resource
    }
    return function.graph, captured


# --- Checks, on the chief ----------------------------------------------------


def exchange(strategy, cluster, directory):
    """Counts messages; trains on one worker."""
    job = Job(strategy, cluster)
    for numbers in ((1, 0), (3, 0), (3, 1)):
        found = messages(*traced_steps(job, *numbers))
        _write(directory, "messages_{}_{}".format(*numbers), found)
    _write(directory, "tasks", job.tasks())
    job.loop(steps_per_dispatch=2).run(STEPS)
    np.savez(directory / "trained.npz", **whole(job.variables))


def counters(strategy, cluster, directory):
    """Counts steps on several workers."""
    job = Job(strategy, cluster)
    loop = job.loop(steps_per_dispatch=3)
    counts = []
    for steps in (7, 1, 52):
        loop.run(steps)
        counts.append(
            [
                int(job.global_step.numpy()),
                int(job.model.optimizer.iterations.numpy()),
            ]
        )
    _write(directory, "counters", counts)


def inference(strategy, cluster, directory):
    """Evaluates and predicts on the workers."""
    job = Job(strategy, cluster)
    step, loop = job.step(), job.loop(steps_per_dispatch=1)
    loop.run(7)
    checkpoints.Checkpoints(str(directory), job.variables).save(7)
    _write(directory, "metrics", loop.evaluate(uneven_batches()))
    workers = Workers(strategy, cluster.num_workers)
    predict = tf.function(step.predict)
    outputs = list(workers.map(predict, uneven_batches()))
    np.save(directory / "outputs.npy", np.concatenate(outputs))
    workers.close()


def placed(strategy, cluster, directory):
    """Builds the model under several placements."""
    specs = describe(table_model)
    plan_ = plan(specs, cluster.num_ps, split=False)
    placements = {
        "greedy": GreedyLoadBalancingStrategy(
            cluster.num_ps, byte_size_load_fn
        ),
        "planned": plan_.as_strategy(),
        "random": RandomStrategy(cluster.num_ps, seed=3),
    }
    found = {}
    for name, strategy_ in placements.items():
        said = []

        def placement(spec, strategy_=strategy_, said=said):
            task = strategy_(spec)
            said.append([spec.name, task, byte_size_load_fn(spec)])
            return task

        job = Job(strategy, cluster, placement=placement, specs=specs)
        found[name] = {"said": said, "tasks": job.tasks()}
    _write(directory, "placed", found)


def save(strategy, cluster, directory, *shards):
    """Saves a model of random values."""
    job = Job(strategy, cluster, lambda: table_model(shards))
    randomize(job.variables)
    job.global_step.assign(7)
    checkpoints.Checkpoints(str(directory), job.variables).save(7)
    np.savez(directory / "saved.npz", **whole(job.variables))


def restore(strategy, cluster, directory, *shards):
    """Restores it."""
    job = Job(strategy, cluster, lambda: table_model(shards))
    checkpoints.Checkpoints(str(directory), job.variables).restore()
    name = f"restored-{cluster.num_ps}-{shards[0]}.npz"
    np.savez(directory / name, **whole(job.variables))


def save_forever(strategy, cluster, directory, rows):
    """Saves a small checkpoint, then ever again a large one."""
    job = Job(strategy, cluster, lambda: table_model((2, 2), rows))
    saver = checkpoints.Checkpoints(
        str(directory), job.variables, max_to_keep=None
    )
    randomize(job.variables)
    job.global_step.assign(1)
    saver.save(1)
    np.savez(directory / "saved.npz", **whole(job.variables))
    (directory / "pid").write_text(str(os.getpid()))
    for step in range(2, 100):
        for variable in job.variables.values():
            for part in getattr(variable, "variables", [variable]):
                part.assign_add(tf.ones_like(part))
        (directory / "begun").write_text(str(step))
        saver.save(step)


def _write(directory, name, found):
    (directory / f"{name}.json").write_text(json.dumps(found))


CHECKS = {
    check.__name__: check
    for check in (
        exchange,
        counters,
        inference,
        placed,
        save,
        restore,
        save_forever,
    )
}


def main():
    name, directory, *numbers = sys.argv[1:]
    cluster = Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    strategy = parameter_server_strategy(cluster, start_timeout_secs=120)
    CHECKS[name](strategy, cluster, Path(directory), *map(int, numbers))
    servers.release(cluster)


if __name__ == "__main__":
    main()

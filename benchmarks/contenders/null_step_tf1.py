"""Measures the null step with TF1's between-graph replication and sessions.

    python -m benchmarks.contenders.null_step_tf1 JSON

Runs one task of a cluster; chief and workers train. The program uses the
`tf.compat.v1` of TF 2.21: graphs, `replica_device_setter`, and optimizers whose
updates run on the parameter servers. Sessions have no hooks.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks import counters, ps_task
from benchmarks.ps_harness import BATCH, DIM, IDS

tf1 = tf.compat.v1
_WAIT_SECS = 120.0


class Meeting:
    """A barrier for all tasks, which can be used once per name.

    Args:
        directory: Folder that all tasks share.
        own: Name of this task.
        number: Number of tasks.
    """

    def __init__(self, directory: str, own: str, number: int) -> None:
        self._directory = pathlib.Path(directory)
        self._own, self._number = own, number

    def __call__(self, name: str) -> None:
        """Waits until all tasks have reached the barrier `name`.

        Raises:
            TimeoutError: If some task has not reached it in time.
        """
        (self._directory / f"{name}.{self._own}").touch()
        deadline = time.monotonic() + _WAIT_SECS
        while len(list(self._directory.glob(f"{name}.*"))) < self._number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"Not all tasks reached {name}.")
            time.sleep(0.01)


def train_op(
    case: dict[str, Any], scope: str, step: tf.Variable
) -> tuple[Any, Any]:
    """Adds a step of a case to the default graph; returns the op and loss."""
    examples = ps_task.input_fn(case["rows"], case.get("batch", BATCH))
    dataset = examples(tf.distribute.InputContext())
    ids, _ = tf1.data.make_one_shot_iterator(dataset).get_next()
    with tf1.variable_scope(scope, use_resource=True):
        loss = _LOSSES[case["model"]](case, ids)
        optimizer = {
            "sgd": tf1.train.GradientDescentOptimizer(0.01),
            "adagrad": tf1.train.AdagradOptimizer(0.05),
        }[case["optimizer"]]
        return optimizer.minimize(loss, step), loss


def _variable(name: str, shape: list[int], **options: Any) -> Any:
    zeros = tf1.zeros_initializer()
    return tf1.get_variable(name, shape, initializer=zeros, **options)


def _floats(case: dict[str, Any], ids: tf.Tensor) -> tf.Tensor:
    shapes = [[case["floats"]]] * 2 if case["floats"] else [[]]
    held = [_variable(f"v{i}", shape) for i, shape in enumerate(shapes)]
    total = sum(tf.reduce_sum(tf.square(each)) for each in held)
    return tf.reduce_mean(tf.cast(ids[:, 0], tf.float32)) + total


def _rows(case: dict[str, Any], ids: tf.Tensor) -> tf.Tensor:
    split = tf1.fixed_size_partitioner(2)
    table = _variable("table", [case["rows"], DIM], partitioner=split)
    found = tf1.nn.embedding_lookup(table, ids, partition_strategy="div")
    return tf.reduce_mean(tf.reduce_sum(tf.square(found), [1, 2]))


def _variables(case: dict[str, Any], ids: tf.Tensor) -> tf.Tensor:
    hidden = tf.cast(ids, tf.float32) / case["rows"]
    for i in range(50):
        size = 16 if i < 49 else 1
        kernel = _variable(f"kernel{i}", [IDS if not i else 16, size])
        hidden = tf.tanh(hidden @ kernel + _variable(f"bias{i}", [size]))
    return tf.reduce_mean(hidden)


_LOSSES = {"floats": _floats, "rows": _rows, "variables": _variables}


class Trainer:
    """A task that trains.

    Args:
        told: Settings from the scenario.
        spec: The cluster.
        job: Job of this task.
        index: Index of this task.
    """

    def __init__(
        self, told: dict[str, Any], spec: tf.train.ClusterSpec, job: str,
        index: int,
    ) -> None:  # fmt: skip
        self._told, self._spec = told, spec
        self._device = f"/job:{job}/task:{index}"
        self._is_chief = job == "chief"
        self._meet = Meeting(
            told["directory"], f"{job}-{index}", told["trainers"]
        )
        self._server = tf.distribute.Server(spec, job, index, protocol="grpc")

    def measure(self, name: str, case: dict[str, Any]) -> dict[str, Any]:
        """Returns the resources a case uses; empty except on the chief."""
        scope = name.replace(" ", "_").replace(",", "")
        setter = tf1.train.replica_device_setter(
            cluster=self._spec, worker_device=self._device
        )
        with tf.Graph().as_default(), tf1.device(setter):
            step = tf1.get_variable(
                f"{scope}/step", [], tf.int64, tf1.zeros_initializer(),
                trainable=False, use_resource=True,
            )  # fmt: skip
            train = train_op(case, scope, step)
            init = tf1.global_variables_initializer()
            with tf1.Session(self._server.target) as session:
                if self._is_chief:
                    session.run(init)
                self._meet(f"{scope}-built")
                one = session.make_callable(train)
                one()
                self._meet(f"{scope}-ready")
                used = self._window(scope, one, lambda: session.run(step))
                self._meet(f"{scope}-over")
        return used

    def _window(
        self, scope: str, one: Callable[[], Any], step: Callable[[], Any]
    ) -> dict[str, Any]:
        stop = pathlib.Path(self._told["directory"], f"{scope}-stop")
        if not self._is_chief:
            while not stop.exists():
                one()
            return {}
        self._run(one, self._told["secs"] / 5)
        first, before = step(), counters.usage()
        self._run(one, self._told["secs"])
        last, after = step(), counters.usage()
        stop.touch()
        return counters.difference(before, after, int(last - first))

    def _run(self, one: Callable[[], Any], secs: float) -> None:
        end = time.monotonic() + secs
        while time.monotonic() < end:
            one()


def main() -> None:
    """Runs a server or trains; the chief writes the results."""
    told = json.loads(sys.argv[1])
    tf1.disable_eager_execution()
    config = json.loads(os.environ["TF_CONFIG"])
    job, index = config["task"]["type"], config["task"]["index"]
    # The chief trains as well, so the cluster may have a worker too many.
    cluster, workers = config["cluster"], told["trainers"] - 1
    cluster["worker"] = cluster["worker"][:workers]
    if job == "worker" and index >= workers:
        return
    spec = tf.train.ClusterSpec({k: v for k, v in cluster.items() if v})
    if job == "ps":
        session_config = tf1.ConfigProto(inter_op_parallelism_threads=4)
        tf.distribute.Server(
            spec, job, index, protocol="grpc", config=session_config
        ).join()
    trainer = Trainer(told, spec, job, index)
    results = {
        name: trainer.measure(name, case)
        for name, case in told["cases"].items()
    }
    if job == "chief":
        pathlib.Path(told["output"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""One task of a benchmark on parameter servers.

    python -m benchmarks.ps_task JSON

`who` in the JSON selects the contender: "tfdist"; "one_by_one", a plain
`ClusterCoordinator` loop that looks up every table and updates every variable
separately, with the same kernels on the variable's device; or "stock", the same
loop with Keras' own layers and optimizer. All unroll ten steps per dispatch,
unless `unrolled` says otherwise.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks import counters
from benchmarks.ps_harness import BATCH, DIM, IDS
from tfdist.checkpoint import checkpoints
from tfdist.cluster import servers
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import parameter_server_strategy
from tfdist.embeddings.dynamic import DynamicEmbedding
from tfdist.embeddings.filling import fill
from tfdist.embeddings.layer import PartitionedEmbedding
from tfdist.placement.scope import placed_scope
from tfdist.training import optimizers
from tfdist.training.coordinated_loop import CoordinatedLoop
from tfdist.training.step import ModelStep

_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adam": lambda: keras.optimizers.Adam(0.001),
    "none": lambda: keras.optimizers.SGD(0.0),
}


@keras.saving.register_keras_serializable()
class _Count(keras.constraints.Constraint):
    """Adds 1 to each row that a step has read and updated, on its server."""

    def __call__(self, rows: Any) -> Any:
        return rows + 1.0


def model_fn(case: dict[str, Any]) -> keras.Model:
    """The model that `case` names, compiled."""
    ids = keras.Input([IDS], dtype="int32")
    model = keras.Model(ids, _MODELS[case["model"]](case, ids))
    loss = "binary_crossentropy"
    if case["model"] in ("floats", "rows"):  # Which compute nothing.
        loss = _mean
    model.compile(_OPTIMIZERS[case["optimizer"]](), loss)
    return model


def _mean(labels: Any, outputs: Any) -> Any:
    return keras.ops.mean(outputs)


def _table(case: dict[str, Any]) -> keras.layers.Layer:
    """A table, in two pieces unless `case` says otherwise."""
    if case["who"] == "stock":
        return keras.layers.Embedding(case["rows"], DIM)
    counted = {}
    if "zipf" in case:
        counted["partition_strategy"] = case["partition_strategy"]
        counted |= {"embeddings_initializer": "zeros"}
        counted |= {"embeddings_constraint": _Count()}
    rows, shards = case.get("capacity", case["rows"]), case.get("shards", 2)
    if case.get("grows"):
        return DynamicEmbedding(DIM, rows, num_shards=shards)
    return PartitionedEmbedding(rows, DIM, num_shards=shards, **counted)


def _one_table(case: dict[str, Any], ids: Any) -> Any:
    """A table in two pieces, a hidden layer."""
    hidden = keras.layers.Flatten()(_table(case)(ids))
    hidden = keras.layers.Dense(64, "relu")(hidden)
    return keras.layers.Dense(1, "sigmoid")(hidden)


def _many_tables(case: dict[str, Any], ids: Any) -> Any:
    """Some tables, each in two pieces, one id of each per example."""
    tables = case.get("tables", 20)
    rows = [_table(case)(ids[:, i % IDS]) for i in range(tables)]
    return keras.layers.Dense(1, "sigmoid")(keras.ops.concatenate(rows, -1))


def _many_variables(case: dict[str, Any], ids: Any) -> Any:
    """A hundred small dense variables."""
    hidden = keras.ops.cast(ids, "float32") / case["rows"]
    for _ in range(49):
        hidden = keras.layers.Dense(16, "tanh")(hidden)
    return keras.layers.Dense(1, "sigmoid")(hidden)


def _dense(case: dict[str, Any], ids: Any) -> Any:
    """Six dense variables, 19 kB."""
    hidden = keras.ops.cast(ids, "float32") / case["rows"]
    for _ in range(2):
        hidden = keras.layers.Dense(64, "relu")(hidden)
    return keras.layers.Dense(1, "sigmoid")(hidden)


class _Floats(keras.layers.Layer):
    """Adds the squares of its variables, each of `size` floats or a scalar.

    Squares, so that the gradient needs the values: else nobody pulls them.
    """

    def __init__(self, sizes: Sequence[int | None]) -> None:
        super().__init__()
        for size in sizes:
            shape = () if size is None else (size,)
            self.add_weight(shape=shape, initializer="zeros")

    def call(self, x: Any) -> Any:
        squares = [keras.ops.square(v) for v in self.trainable_weights]
        return x + sum(keras.ops.sum(square) for square in squares)


def _floats(case: dict[str, Any], ids: Any) -> Any:
    """`floats` on each server, all of which travel; 0: one scalar."""
    sizes = [case["floats"]] * 2 if case["floats"] else [None]
    return _Floats(sizes)(keras.ops.cast(ids[:, :1], "float32"))


def _rows(case: dict[str, Any], ids: Any) -> Any:
    """A table in two pieces; the squares of its rows are added up."""
    squares = keras.ops.square(_table(case)(ids))
    return keras.ops.sum(squares, (1, 2))[:, None]


_MODELS = {
    "floats": _floats,
    "rows": _rows,
    "dense": _dense,
    "table": _one_table,
    "tables": _many_tables,
    "variables": _many_variables,
}


def input_fn(
    rows: int, batch_size: int = BATCH, zipf: float = 0.0, new: int = 0
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """Ids by Zipf's law. Uniform ones are the worst case: few come twice.

    Of those of a batch so many are `new`, seen nowhere before.
    """
    shares = np.arange(1, rows + 1.0) ** -zipf
    below = (np.cumsum(shares) / shares.sum())[:-1]

    def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
        pipeline = tf.cast(context.input_pipeline_id, tf.int64)

        def batch(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            seed = tf.stack([pipeline, i])
            shape = [batch_size, IDS]
            ids = tf.random.stateless_uniform(shape, seed, 0, rows, tf.int32)
            if zipf:
                drawn = tf.random.stateless_uniform(
                    shape, seed, dtype="float64"
                )
                flat = tf.searchsorted(below, tf.reshape(drawn, [-1]))
                ids = tf.reshape(flat, shape)
            if new:
                batch = i * context.num_input_pipelines + pipeline
                first = rows + tf.cast(batch, tf.int32) * new
                old = tf.reshape(ids, [-1])[new:]
                ids = tf.concat([first + tf.range(new), old], axis=0)
                ids = tf.reshape(ids, shape)
            return ids, tf.cast(ids[:, :1] % 2, tf.float32)

        return tf.data.Dataset.counter().map(batch).prefetch(20)

    return dataset


def least_bytes(rows: int, dense: int) -> float:
    """Bytes that must travel per step: unique rows and dense, down and up.

    For the model of one table; ids are not counted.
    """
    lookups = BATCH * IDS
    unique = rows * (1.0 - (1.0 - 1.0 / rows) ** lookups)
    return 2 * 4 * (unique * DIM + dense)


def runner(
    case: dict[str, Any], strategy: tf.distribute.Strategy, cluster: Cluster
) -> tuple[Callable[[int], Any], keras.Model]:
    """What runs a number of steps, and the model."""
    with placed_scope(strategy, num_ps=cluster.num_ps):
        global_step = tf.Variable(0, dtype=tf.int64, trainable=False)
        model = model_fn(case)
        optimizers.build(model.optimizer, model.trainable_variables)
    for table in model.layers:
        if isinstance(table, DynamicEmbedding):
            rows = np.zeros([case["rows"], DIM], "float32")
            fill(table, np.arange(case["rows"]), rows)
    examples = input_fn(
        case["rows"],
        case.get("batch", BATCH),
        case.get("zipf", 0.0),
        case.get("new", 0),
    )
    unrolled = case.get("unrolled", 10)
    if case["who"] == "tfdist":
        spec = examples(tf.distribute.InputContext()).element_spec
        step = ModelStep(model, spec, global_step=global_step, remote=True)
        loop = CoordinatedLoop(
            step,
            global_step,
            examples,
            strategy=strategy,
            num_workers=cluster.num_workers,
            steps_per_dispatch=unrolled,
            **case.get("options", {}),
        )
        return loop.run, model
    update = _one_by_one if case["who"] == "one_by_one" else keras_update
    return plain_loop(model, examples, strategy, update, unrolled), model


def keras_update(
    model: keras.Model, gradients: list[Any], variables: list[keras.Variable]
) -> None:
    """Keras' way: the optimizer's own."""
    model.optimizer.apply_gradients(zip(gradients, variables, strict=True))


def _one_by_one(
    model: keras.Model, gradients: list[Any], variables: list[keras.Variable]
) -> None:
    """TF1's way: each update where its variable lives."""
    rate = tf.convert_to_tensor(model.optimizer.learning_rate)
    iteration = tf.constant(0, tf.int64)
    for gradient, variable in zip(gradients, variables, strict=True):
        if not isinstance(gradient, tf.IndexedSlices):
            with tf.device(variable.value.device):
                optimizers.update(
                    model.optimizer, variable, gradient, rate, iteration
                )
            continue
        ids, segments = tf.unique(gradient.indices)
        rows = tf.math.unsorted_segment_sum(
            gradient.values, segments, tf.size(ids)
        )
        with tf.device(variable.value.device):
            optimizers.update(
                model.optimizer, variable, rows, rate, iteration, ids
            )
    model.optimizer.iterations.value.assign_add(1)


def plain_loop(
    model: keras.Model,
    examples: Callable[[tf.distribute.InputContext], tf.data.Dataset],
    strategy: tf.distribute.Strategy,
    update: Callable[..., None],
    unrolled: int = 10,
) -> Callable[[int], None]:
    """A hand-written coordinator loop, as TensorFlow's guide has it.

    The loss is returned: else TensorFlow would leave out what only it needs.

    Args:
        model: Compiled, and its optimizer built.
        examples: The input of each worker.
        strategy: Of the cluster.
        update: Applies gradients to variables of the model.
        unrolled: Steps in a dispatch.

    Returns:
        What runs a number of steps, whole dispatches of them.
    """
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    context = tf.distribute.InputContext()
    iterator = iter(
        coordinator.create_per_worker_dataset(lambda: examples(context))
    )

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        variables = model.trainable_variables
        read = [v.value for v in variables]
        update(model, tape.gradient(loss, read), variables)
        return loss

    @tf.function
    def dispatch(batches: Iterator) -> list[tf.Tensor]:
        return [strategy.run(step, args=next(batches)) for _ in range(unrolled)]

    def run(steps: int) -> None:
        for _ in range(steps // unrolled):
            coordinator.schedule(dispatch, args=(iterator,))
        coordinator.join()

    return run


def main() -> None:
    """Serves, or measures as the chief."""
    case = json.loads(sys.argv[1])
    cluster = Cluster.from_env()
    if cluster.role != "chief":
        servers.serve(cluster)
        name = f"{cluster.task_type}{cluster.task_index}.peak"
        output = pathlib.Path(case["output"])
        output.with_name(name).write_text(str(counters.peak_bytes()))
        return
    strategy = parameter_server_strategy(cluster)
    run, model = runner(case, strategy, cluster)
    run(case["steps"] // 2 // 10 * 10)
    speeds = []
    bytes_before, steps = counters.sent_bytes(), case["steps"] // 10 * 10
    for _ in range(case["repeats"]):
        start = time.monotonic()
        run(steps)
        speeds.append(steps / (time.monotonic() - start))
    sent = counters.sent_bytes() - bytes_before
    dense = sum(
        v.shape.num_elements()
        for v in model.trainable_variables
        if "embeddings" not in v.path
    )
    if case.get("save"):
        checkpoints.Checkpoints(
            str(pathlib.Path(case["output"]).with_name("checkpoints")),
            checkpoints.named_variables(model),
        ).save(steps)
    result = {
        "steps_per_sec": speeds,
        "bytes_per_step": sent / (steps * case["repeats"]),
        "least_bytes": least_bytes(case["rows"], dense),
        "peak_bytes": {"chief0": counters.peak_bytes()},
        "rows_served": {
            v.value.device: float(v.numpy()[:, 0].sum())
            for v in model.trainable_variables
            if "zipf" in case and "embeddings" in v.path
        },
    }
    pathlib.Path(case["output"]).write_text(json.dumps(result))
    servers.release(cluster)


if __name__ == "__main__":
    main()

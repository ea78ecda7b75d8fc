"""Stock TensorFlow and Keras on a cluster: `fit`, then a loop by hand.

Usage: stock.py, as every task. With parameter servers the chief coordinates;
without any, all train by all-reduce. Each finding is a line of JSON.
"""

import json
import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")

import keras
import tensorflow as tf

BATCH = 16


def examples() -> tf.data.Dataset:
    """Four batches of 16; the label is the sum of four numbers."""
    x = tf.random.stateless_normal([64, 4], [1, 2])
    y = tf.reduce_sum(x, axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def model_fn() -> keras.Model:
    """A linear model that begins at zero."""
    layer = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input([4]), layer])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def say(**found: object) -> None:
    """Prints a line of JSON."""
    print(json.dumps(found), flush=True)


def kernel_of(model: keras.Model) -> list[float]:
    """What it has learned."""
    return model.layers[0].kernel.numpy().ravel().tolist()


def try_fit(strategy: tf.distribute.Strategy) -> None:
    """Keras' loop, as its user writes it."""
    with strategy.scope():
        model = model_fn()
    try:
        model.fit(examples(), epochs=10, verbose=0)
        say(fit="works", kernel=kernel_of(model))
    except ValueError as error:
        say(fit="ValueError", why=str(error))


class Loop:
    """A model, and one step of a replica."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        with strategy.scope():
            self.model = model_fn()
            # Here, or its variables would be made later, on the chief.
            self.model.optimizer.build(self.model.trainable_variables)
            self.steps = tf.Variable(
                0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
            )

    def step(self, batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Adds the gradient of this replica's part of the batch."""
        x, y = batch
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self.model(x) - y) ** 2) / BATCH
        self.model.optimizer.apply(tape.gradient(loss, variables), variables)
        self.steps.assign_add(1)
        return loss


def all_reduced(strategy: tf.distribute.Strategy) -> None:
    """Every step on all workers, each with its part of the batch."""
    loop = Loop(strategy)
    data = examples().repeat()
    batches = iter(strategy.experimental_distribute_dataset(data))

    @tf.function
    def step() -> tf.Tensor:
        losses = strategy.run(loop.step, args=(next(batches),))
        return strategy.reduce("SUM", losses, axis=None)

    losses = [float(step()) for _ in range(40)]
    say(loop=40, loss=losses[-1], kernel=kernel_of(loop.model))


def scheduled(strategy: tf.distribute.Strategy) -> None:
    """Each step on some worker, with a whole batch."""
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    loop = Loop(strategy)
    contexts = []

    def input_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        contexts.append(
            (context.num_input_pipelines, context.input_pipeline_id)
        )
        return examples().repeat()

    batches = iter(
        coordinator.create_per_worker_dataset(
            lambda: strategy.distribute_datasets_from_function(input_fn)
        )
    )

    def function_of(steps: int) -> tf.types.experimental.PolymorphicFunction:
        @tf.function
        def some(mine: tf.data.Iterator) -> tf.Tensor:
            for _ in range(steps):
                loss = strategy.run(loop.step, args=(next(mine),))
            return loss

        return some

    one = function_of(1)
    losses = [coordinator.schedule(one, args=(batches,)) for _ in range(400)]
    say(returned=type(losses[0]).__name__, done=coordinator.done())
    coordinator.join()
    variables = loop.model.variables
    say(
        scheduled=400,
        counter=int(loop.steps),
        iterations=int(loop.model.optimizer.iterations),
        loss=float(losses[-1].fetch()),
        devices=[variable.value.device for variable in variables],
        context=contexts[0],
    )
    for steps in 1, 5, 25:
        secs = seconds_of(coordinator, function_of(steps), batches)
        say(steps_per_call=steps, secs=secs / steps)


def seconds_of(
    coordinator: tf.distribute.coordinator.ClusterCoordinator,
    function: tf.types.experimental.PolymorphicFunction,
    batches: object,
) -> float:
    """Seconds of a call, many of them in the queue of two workers."""
    rounds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(20):
            coordinator.schedule(function, args=(batches,))
        coordinator.join()
        rounds.append((time.perf_counter() - start) / 20)
    return statistics.median(rounds[1:])  # In the first it is traced.


def main() -> None:
    """Does this task's part."""
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, task = tf.train.ClusterSpec(config["cluster"]), config["task"]
    if "ps" not in config["cluster"]:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        try_fit(strategy)
        all_reduced(strategy)
        return
    if task["type"] != "chief":
        tf.distribute.Server(cluster, task["type"], task["index"]).join()
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    try_fit(strategy)
    scheduled(strategy)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's threads would still wait for the others.

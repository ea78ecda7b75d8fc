"""Passes over the same examples, by a fast worker and a slow one.

Usage: passes.py MODEL_DIR KIND..., as every task of a cluster with ps and data
workers. A kind is "shares", "one pass" or "disturbed", which is one pass too.
Each step adds, in a table, one over the size of its batch to the row of each of
its examples: so the model itself counts what it was trained on, and how often.
"""

import json
import os
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from paced import pauses

import tfdist
from tfdist.hooks.session_run_hook import SessionRunContext, SessionRunValues

EXAMPLES, BLOCK, BATCH = 400, 20, 4
PAUSE = 15_000  # Microseconds; worker 1 takes five times as long.


def model_fn() -> keras.Model:
    """Two tables of zeros, of the examples and of the workers."""
    inputs, rows = {}, []
    for name, size in ("example", EXAMPLES), ("worker", 2):
        inputs[name] = keras.Input([1], dtype="int64", name=name)
        table = tfdist.PartitionedEmbedding(
            size,
            1,
            num_shards=1,
            name=f"{name}s",
            embeddings_initializer="zeros",
        )
        rows.append(table(inputs[name]))
    output = keras.layers.Flatten()(keras.layers.Add()(rows))
    model = keras.Model(inputs, output)
    # The gradient of -p is -1: a step of SGD adds.
    model.compile(keras.optimizers.SGD(1.0), lambda y, p: -p)
    return model


def input_fn(context: tf.distribute.InputContext, kind: str) -> tf.data.Dataset:
    """The numbers of the examples, once: by shares, or one pass for all."""
    blocks = tf.data.Dataset.range(0, EXAMPLES, BLOCK)
    worker = tf.cast(context.input_pipeline_id, tf.int64)
    if kind == "shares":
        blocks = blocks.shard(context.num_input_pipelines, worker)
    numbers = blocks.flat_map(lambda i: tf.data.Dataset.range(i, i + BLOCK))
    batches = numbers.batch(BATCH)
    if kind != "shares":
        batches = tfdist.one_pass(batches, context, name=kind)

    def features(numbers: tf.Tensor, _: tf.Tensor) -> tuple[dict, tf.Tensor]:
        numbers = numbers[:, None]
        workers = tf.fill(tf.shape(numbers), worker)
        x = {"example": numbers, "worker": workers}
        return x, tf.zeros(tf.shape(numbers))

    # Or TensorFlow would read ahead, and more would be lost with a worker.
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False
    slow = pauses(PAUSE * (1 + 4 * worker))
    batches = tf.data.Dataset.zip(batches, slow).map(features)
    return batches.with_options(options)


class Counts(tfdist.SessionRunHook):
    """Prints the step, and in the end what was trained on by whom."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._start = None

    def steps_until_next(self, step: int) -> int:
        """Every ten steps."""
        return 10 - step % 10

    def after_run(
        self, run_context: SessionRunContext, run_values: SessionRunValues
    ) -> None:
        """Says the step; the clock starts after the first ones."""
        self._start = self._start or time.perf_counter()
        print(self._kind, run_context.session.step, flush=True)

    def end(self, session: tfdist.MonitoredTrainingSession) -> None:
        """Prints a line of JSON."""
        row = {"kind": self._kind, "secs": time.perf_counter() - self._start}
        for table in session.model.variables:
            name = table.path.partition("/")[0]
            counts = BATCH * table.value.numpy()[:, 0]
            row[name] = counts.round().astype(int).tolist()
        print(json.dumps(row), flush=True)


def eval_input_fn() -> tf.data.Dataset:
    """A batch of one: this job is not about evaluation."""
    batch = {"example": [[0]], "worker": [[0]]}, [[0.0]]
    return tf.data.Dataset.from_tensors(batch)


def main(directory: str, *kinds: str) -> None:
    """Serves; on the chief, makes a pass of each kind."""
    for kind in kinds:
        config = tfdist.RunConfig(
            os.path.join(directory, kind),
            log_step_count_steps=None,
            audit_input=False,
        )
        estimator = tfdist.Estimator(model_fn, config)
        spec = tfdist.TrainSpec(
            lambda context, kind=kind: input_fn(context, kind),
            hooks=[Counts(kind)],
        )
        if kind == kinds[-1]:  # Now all may end.
            evaluation = tfdist.EvalSpec(eval_input_fn, throttle_secs=3600)
            tfdist.train_and_evaluate(estimator, spec, evaluation)
        elif config.cluster.is_chief:
            estimator.train(spec.input_fn, hooks=spec.hooks)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The program of every task in test_saving_behind.py.

    python -m tests.saving_job --model_dir=DIRECTORY [--max_steps=...]

Every gradient is a constant, so that after n steps each value is a function of
n alone, whoever ran them: checkpoints of a cluster equal those of one process,
bit by bit.
"""

import argparse
import json
import logging

import keras
import tensorflow as tf

import tfdist
from tests.recovery_job import INFINITE, slept

USED = 50  # Rows that steps update, all over the table.


class TellsSteps(tfdist.SessionRunHook):
    """Says how far it is, after each run."""

    def steps_until_next(self, step):
        return 1

    def after_run(self, run_context, run_values):
        print(f"At {run_context.session.step}.", flush=True)


class SavesAt(tfdist.SessionRunHook):
    """Saves at some steps, and at no other."""

    def __init__(self, directory, steps):
        self._directory, self._steps = directory, steps

    def after_create_session(self, session, coord):
        self._saved = session.checkpoints(self._directory, None)

    def steps_until_next(self, step):
        return min((s - step for s in self._steps if s > step), default=None)

    def after_run(self, run_context, run_values):
        session = run_context.session
        if session.step in self._steps:
            self._saved.save(session.step)


def model_fn(rows):
    x = keras.Input([4], name="x")
    ids = keras.Input([USED], dtype="int32", name="ids")
    table = tfdist.PartitionedEmbedding(
        rows, 32, num_shards=2, embeddings_initializer="ones", name="table"
    )
    both = [keras.layers.Flatten()(table(ids)), keras.layers.Dense(3)(x)]
    total = keras.ops.sum(keras.ops.concatenate(both, -1), -1, keepdims=True)
    model = keras.Model({"x": x, "ids": ids}, total)
    model.compile(
        keras.optimizers.Adagrad(0.1), lambda y, output: keras.ops.mean(output)
    )
    return model


def input_fn(rows, step_secs):
    ids = tf.range(USED) * (rows // USED)
    features = {"x": tf.ones([1, 4]), "ids": ids[None]}
    dataset = tf.data.Dataset.from_tensors((features, tf.zeros([1, 1])))
    return slept(dataset.repeat(), int(step_secs * 1e6)).apply(
        tf.data.experimental.assert_cardinality(INFINITE)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--max_steps", type=int, required=True)
    parser.add_argument("--save_steps", type=int)
    parser.add_argument("--save_secs", type=float)
    parser.add_argument("--save_at", type=json.loads)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--step_secs", type=float, default=0.005)
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    keras.utils.set_random_seed(1)
    config = tfdist.RunConfig(
        args.model_dir,
        save_checkpoints_steps=args.save_steps,
        save_checkpoints_secs=args.save_secs,
        keep_checkpoint_max=None,
        tf_random_seed=1,
        log_step_count_steps=10,
        save_summary_steps=0,
    )
    hooks = [TellsSteps()]
    if args.save_at:
        hooks = [SavesAt(args.model_dir, args.save_at)]
    tfdist.train_and_evaluate(
        tfdist.Estimator(lambda: model_fn(args.rows), config),
        tfdist.TrainSpec(
            lambda: input_fn(args.rows, args.step_secs),
            args.max_steps,
            hooks,
        ),
        None,
    )


if __name__ == "__main__":
    main()

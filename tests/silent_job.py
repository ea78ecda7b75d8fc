"""The program of every task in test_silent.py: jobs that end in an error.

    python -m tests.silent_job --directory=DIRECTORY --jobs JOB... [--go_on]

Runs small jobs, one after another; the leader writes a report of each. With
`--go_on`, it continues after an error, which the parameter servers survive.
"""

import argparse
import json
import logging
from pathlib import Path

import keras
import tensorflow as tf

import tfdist
from tests.small_models import blind, examples, logistic
from tfdist.cluster import servers

NAN = float("nan")
STEPS, SAVE_STEPS, NAN_AT = 100, 20, 30


def model_fn():
    hidden = keras.layers.Dense(8, blind, name="hidden")
    return logistic(hidden=[hidden], metrics=["accuracy"])


def endless(nan_at=-1):
    """Batches without an end; number `nan_at` has a NaN among its features."""
    x, y = examples(16)

    def batch(i):
        return x + tf.where(i == nan_at, NAN, 0.0), y

    return tf.data.Dataset.counter().map(batch)


def empty():
    return endless().take(0)


class Counts(tf.compat.v1.train.SessionRunHook):
    """A hook as it was for TF1."""

    def __init__(self):
        self.steps = []

    def after_run(self, run_context, run_values):
        self.steps.append(run_context.session.step)

    def end(self, session):
        print(f"Ended at step {session.step}.", flush=True)


class Raises(tf.compat.v1.train.SessionRunHook):
    """As one whose own server does not answer, to the leader.

    Of several processes the first that gives up would end another's count.
    """

    def after_run(self, run_context, run_values):
        session = run_context.session
        if session.is_chief and session.step == 4:
            raise tf.errors.UnavailableError(None, None, "the user's own")


def estimator(args, name):
    config = tfdist.RunConfig(
        f"{args.directory}/{name}", save_checkpoints_steps=SAVE_STEPS
    )
    return tfdist.Estimator(model_fn, config)


def counts(args):
    hook = Counts()
    estimator(args, "counts").train(endless, [hook], max_steps=STEPS)
    return hook.steps


def nan(args):
    made = estimator(args, "nan")
    made.train(lambda: endless(NAN_AT), max_steps=STEPS)


def no_batch(args):
    tfdist.train_and_evaluate(
        estimator(args, "no_batch"),
        tfdist.TrainSpec(empty, STEPS, [Counts()]),
        tfdist.EvalSpec(
            endless, steps=1, exporters=tfdist.FinalExporter("final")
        ),
    )


def raises(args):
    estimator(args, "raises").train(endless, [Raises()], max_steps=STEPS)


JOBS = {job.__name__: job for job in (counts, nan, no_batch, raises)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True)
    parser.add_argument("--jobs", nargs="+", choices=JOBS)
    parser.add_argument("--go_on", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    cluster = tfdist.Cluster.from_env()
    if cluster.num_ps and cluster.role != "chief":
        servers.serve(cluster)
        return
    for name in args.jobs:
        try:
            report = JOBS[name](args)
        except Exception as error:
            report = type(error).__name__, str(error)
            if not args.go_on:
                raise
        finally:
            if cluster.is_chief:
                path = Path(args.directory, f"{name}.json")
                path.write_text(json.dumps(report))
    if cluster.num_ps:
        servers.release(cluster)


if __name__ == "__main__":
    main()

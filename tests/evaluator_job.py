"""The program of every task in test_evaluator_failures.py.

    python -m tests.evaluator_job --model_dir=DIRECTORY [--max_steps=...]

The model of recovery_job.py, trained at a set pace until a file called `stop`
is in the model_dir, and evaluated at a set pace.
"""

import argparse
import logging
from pathlib import Path

import tensorflow as tf

import tfdist
from tests.recovery_job import BATCH, examples, model_fn, slept


def input_fn(args, context):
    """Endless; each worker has its own examples."""
    worker = tf.cast(context.input_pipeline_id, tf.int64)
    dataset = tf.data.Dataset.counter().map(
        lambda i: examples(BATCH, tf.stack([i, worker]))
    )
    return slept(dataset, int(args.step_secs * 1e6))


def eval_input_fn(args):
    dataset = tf.data.Dataset.from_tensor_slices(examples(512, [1, 2]))
    dataset = dataset.batch(32).take(args.eval_batches)
    return slept(dataset, int(args.eval_batch_secs * 1e6))


class StopWhenAsked(tfdist.SessionRunHook):
    """Ends training when a file is there."""

    def __init__(self, path):
        self._path = path

    def steps_until_next(self, step):
        return 10

    def after_run(self, run_context, run_values):
        if self._path.exists():
            run_context.request_stop()


class SayBatches(tfdist.SessionRunHook):
    """Prints a line after each batch of an evaluation."""

    def after_run(self, run_context, run_values):
        session = run_context.session
        step = int(session.global_step)
        print(f"Batch {session.step} of the evaluation of {step}.", flush=True)


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--max_steps", type=int)
    parser.add_argument("--save_steps", type=int, default=50)
    parser.add_argument("--step_secs", type=float, default=0.02)
    parser.add_argument("--eval_batches", type=int, default=16)
    parser.add_argument("--eval_batch_secs", type=float, default=0.0)
    parser.add_argument("--evaluator_timeout_secs", type=float, default=90.0)
    return parser.parse_args()


def main():
    args = flags()
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    config = tfdist.RunConfig(
        args.model_dir,
        save_checkpoints_steps=args.save_steps,
        log_step_count_steps=50,
        evaluator_timeout_secs=args.evaluator_timeout_secs,
    )
    result = tfdist.train_and_evaluate(
        tfdist.Estimator(model_fn, config),
        tfdist.TrainSpec(
            lambda context: input_fn(args, context),
            args.max_steps,
            hooks=[StopWhenAsked(Path(args.model_dir, "stop"))],
        ),
        tfdist.EvalSpec(
            lambda: eval_input_fn(args),
            steps=None,
            hooks=[SayBatches()],
            exporters=[tfdist.FinalExporter("final")],
            start_delay_secs=0,
            throttle_secs=0,
        ),
    )
    print(f"Returned {result}.", flush=True)


if __name__ == "__main__":
    main()

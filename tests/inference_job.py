"""The program of every task in test_inference.py.

    python -m tests.inference_job --model_dir=DIRECTORY

The cluster evaluates what is there, and trains a little; then it evaluates, and
predicts at a slow pace, so that a worker can be killed meanwhile.
"""

import argparse
import json
import os

import numpy as np
import tensorflow as tf

import tfdist
from tests import recovery_job
from tfdist.cluster import servers

BATCHES = 60


def features(pace_secs):
    """More than the model needs is not there: no label."""
    x, _ = recovery_job.examples(BATCHES * 16 - 5, [3, 4])
    dataset = tf.data.Dataset.from_tensor_slices((x,)).batch(16)
    return recovery_job.slept(dataset, int(pace_secs * 1e6))


def estimator(model_dir):
    config = tfdist.RunConfig(
        model_dir, save_checkpoints_steps=20, steps_per_dispatch=5
    )
    return tfdist.Estimator(recovery_job.model_fn, config)


def own_step_model_fn():
    """Which workers cannot evaluate."""
    model = recovery_job.model_fn()

    class OwnStep(type(model)):
        def train_step(self, batch):
            return super().train_step(batch)

    model.__class__ = OwnStep
    return model


def train_input_fn():
    return recovery_job.eval_input_fn().repeat()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", required=True)
    args = parser.parse_args()
    job = estimator(args.model_dir)
    cluster = job.config.cluster
    if cluster.role != "chief":
        servers.serve(cluster)
        return
    before = job.evaluate(recovery_job.eval_input_fn, steps=5)
    job.train(train_input_fn, max_steps=40)
    metrics = job.evaluate(recovery_job.eval_input_fn, steps=5)
    own = tfdist.Estimator(own_step_model_fn, job.config)
    own_metrics = own.evaluate(recovery_job.eval_input_fn, steps=5)
    outputs = []
    for output in job.predict(
        lambda: features(0.1), yield_single_examples=False
    ):
        outputs.append(output)
        print(f"Predicted batch {len(outputs)}.", flush=True)
    path = os.path.join(args.model_dir, "found")
    np.save(path, np.concatenate(outputs))
    with open(f"{path}.json", "w") as file:
        json.dump([before, metrics, own_metrics], file)
    servers.release(cluster)


if __name__ == "__main__":
    main()

"""A small job, as a user writes it: every task of it runs this program.

python first_job.py MODEL_DIR
python -m tfdist.launch --ps=2 --workers=2 first_job.py MODEL_DIR
"""

import logging
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import tfdist


def model_fn() -> keras.Model:
    """A network with two hidden layers, built and compiled."""
    model = keras.Sequential(
        [
            keras.Input([10]),
            keras.layers.Dense(32, "relu"),
            keras.layers.Dense(16, "relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.02), "mse")
    return model


def input_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Endless batches of 32, different for every worker."""
    seed = context.input_pipeline_id

    def batch(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.random.stateless_normal([32, 10], tf.stack([i, seed]))
        return x, tf.reduce_sum(tf.sin(x), axis=1, keepdims=True)

    return tf.data.Dataset.counter().map(batch)


def main(model_dir: str) -> None:
    """Trains for 600 steps; evaluates at the end."""
    logging.basicConfig(format="%(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    config = tfdist.RunConfig(
        model_dir,
        tf_random_seed=1,
        save_checkpoints_steps=600,
        log_step_count_steps=20,
        steps_per_dispatch=5,
    )
    results, _ = tfdist.train_and_evaluate(
        tfdist.Estimator(model_fn, config),
        tfdist.TrainSpec(input_fn, max_steps=600),
        tfdist.EvalSpec(input_fn, steps=20),
    )
    if results:
        print("trained to step", results["global_step"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

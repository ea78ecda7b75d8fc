"""A cluster whose second worker waits for its input: each task runs this.

    python -m tests.waiting_job FILE

The data of `worker:1` come when FILE is there. Then the job runs to its end.
"""

import sys

import tensorflow as tf

import tfdist
from tests.small_models import batches, logistic
from tfdist.data.input_wait import InputWatch


def input_fn(context):
    """Batches which `worker:1` gets when the file is there."""

    def there(x, y):
        (found,) = tf.while_loop(
            lambda n: tf.logical_and(
                tf.equal(n, 0), tf.equal(context.input_pipeline_id, 1)
            ),
            # TensorFlow looks but once for what does not depend on `n`.
            lambda n: tf.size(
                tf.io.matching_files(tf.strings.substr(sys.argv[1], n, 9999))
            ),
            [tf.constant(0)],
        )
        return x + tf.cast(found, tf.float32), y

    return batches().repeat().take(10_000).map(there)


def main():
    InputWatch.SECS = 3.0
    config = tfdist.RunConfig(
        sys.argv[1] + "-model",
        save_checkpoints_steps=1000000,
        steps_per_dispatch=2,
    )
    tfdist.train_and_evaluate(
        tfdist.Estimator(logistic, config),
        tfdist.TrainSpec(input_fn, max_steps=200),
        tfdist.EvalSpec(batches, steps=1),
    )


if __name__ == "__main__":
    main()

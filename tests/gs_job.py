"""The program of every task in test_gs_paths.py.

    python -m tests.gs_job --bucket=gs://BUCKET

All that it reads and writes is in the bucket: CSV files, a vocabulary,
checkpoints, summaries, exports.
"""

import argparse
import logging

import keras
import tensorflow as tf

import tfdist
from tests.recovery_job import slept

COLOURS = ("red", "green", "blue")
MAX_STEPS = 120
SAVE_STEPS = 40
KEEP = 2  # Checkpoints.


def estimator(bucket, model_dir):
    colour = tf.feature_column.categorical_column_with_vocabulary_file(
        "colour", f"{bucket}/words.txt"
    )
    return tfdist.DNNClassifier(
        hidden_units=[8],
        feature_columns=[
            tf.feature_column.numeric_column("size"),
            tf.feature_column.embedding_column(colour, 2),
        ],
        optimizer=keras.optimizers.Adagrad(0.1),
        config=tfdist.RunConfig(
            model_dir,
            save_checkpoints_steps=SAVE_STEPS,
            save_summary_steps=SAVE_STEPS,
            keep_checkpoint_max=KEEP,
            log_step_count_steps=20,
            steps_per_dispatch=5,
        ),
    )


def parsed(line):
    size, colour, label = tf.io.decode_csv(line, [0.0, "", 0])
    return {"size": size, "colour": colour}, label


def files(pattern):
    dataset = tf.data.Dataset.list_files(pattern, shuffle=False)
    return dataset.interleave(tf.data.TextLineDataset).map(parsed)


def train_input_fn(bucket):
    """Endless, at a pace that leaves time for a fault."""
    dataset = files(f"{bucket}/train-*.csv").shuffle(1000).repeat().batch(32)
    return slept(dataset, 20_000)


def eval_input_fn(bucket):
    return files(f"{bucket}/eval.csv").batch(64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bucket", required=True)
    bucket = parser.parse_args().bucket
    logging.basicConfig(format="%(levelname)s %(message)s", force=True)
    logging.getLogger("tfdist").setLevel(logging.INFO)
    tf.get_logger().setLevel(logging.ERROR)  # Feature columns are deprecated.
    # As Vertex AI gives it.
    model_dir = f"{bucket}/job/"
    result = tfdist.train_and_evaluate(
        estimator(bucket, model_dir),
        tfdist.TrainSpec(lambda: train_input_fn(bucket), MAX_STEPS),
        tfdist.EvalSpec(
            lambda: eval_input_fn(bucket),
            steps=None,
            exporters=[
                tfdist.BestExporter("best", exports_to_keep=1),
                tfdist.LatestExporter("latest", exports_to_keep=1),
            ],
            start_delay_secs=0,
            throttle_secs=0,
        ),
    )
    print(f"Returned {result}.", flush=True)


if __name__ == "__main__":
    main()

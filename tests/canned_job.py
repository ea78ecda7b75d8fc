"""A job: `python -m canned_job (linear|combined) <model_dir> <words>`."""

import sys

import canned_table
import keras

import tfdist
from tfdist.canned import estimators
from tfdist.estimator import exporters


def main(kind, model_dir, words):
    linear, dnn = canned_table.columns(words)
    options = {
        "weight_column": "w",
        "label_vocabulary": ["no", "yes"],
        "config": tfdist.RunConfig(model_dir, save_checkpoints_steps=100),
    }
    if kind == "linear":
        estimator = estimators.LinearClassifier(linear[:4], **options)
    else:
        estimator = estimators.DNNLinearCombinedClassifier(
            linear_feature_columns=[*linear[:4], *linear[-2:]],
            dnn_feature_columns=[*dnn[:2], *dnn[-2:]],
            dnn_hidden_units=[8, 4],
            linear_optimizer=keras.optimizers.Ftrl(0.1),
            dnn_optimizer=keras.optimizers.Adagrad(0.1),
            dnn_dropout=0.1,
            **options,
        )
    tfdist.train_and_evaluate(
        estimator,
        tfdist.TrainSpec(
            canned_table.input_fn("strings", 2048, sparse=True, epochs=None),
            max_steps=200,
        ),
        tfdist.EvalSpec(
            canned_table.input_fn("strings", 512, seed=9, sparse=True),
            start_delay_secs=0,
            throttle_secs=0,
            exporters=[
                exporters.BestExporter("best"),
                exporters.FinalExporter("final"),
            ],
        ),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

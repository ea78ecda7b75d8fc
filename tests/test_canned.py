import json
import pathlib

import canned_table
import keras
import numpy as np
import pytest
import tensorflow as tf
from serving_checks import example, serve
from small_models import local_loop

from tfdist import canned
from tfdist.estimator_checkpoint import read_estimator_checkpoint
from tfdist.exporters import export_saved_model
from tfdist.loop import EndOfInput
from tfdist.specs import RunConfig
from tfdist.step import ModelStep

GOLDEN = json.loads(
    (pathlib.Path(__file__).parent / "canned_golden.json").read_text()
)
fc = tf.feature_column


@pytest.fixture(scope="module")
def table_columns(tmp_path_factory):
    words = canned_table.write_words(tmp_path_factory.mktemp("words"))
    return canned_table.columns(words)


def evaluate(model, dataset):
    step = ModelStep(model, dataset.element_spec)
    update = tf.function(step.evaluate, reduce_retracing=True)
    states = step.zero_states()
    for batch in dataset:
        states = update(batch, states)
    return step.result(step.pack(states).numpy())


def write_checkpoint(path, values):
    """As a Session of TF1 wrote one: values by name, nothing else."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            name: tf.compat.v1.Variable(np.float32(value))
            for name, value in values.items()
        }
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(variables)
        return saver.save(session, str(path))


# What TF 2.15's canned estimators computed: 24 steps from the same weights,
# an evaluation, predictions. (Rules that decay moments are left out: of a
# table, tfdist moves only the rows that were looked up.)


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "linear sparse weighted",
        "combined",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in GOLDEN
            if name not in ("linear", "linear sparse weighted", "combined")
        ),
    ],
)
def test_same_numbers_as_tf_2_15(name, table_columns, tmp_path):
    golden = GOLDEN[name]
    labels, sparse, estimator = canned_table.estimators(
        canned, *table_columns, lambda name: {"model_dir": str(tmp_path)}
    )[name]
    model = estimator.model_fn()
    if golden["start"]:
        start = dict(golden["start"])
        for variable in model.variables:  # The others are zeros.
            if variable.path.startswith("linear/"):
                path = variable.path.replace("linear/", "linear/linear_model/")
                path = path.replace("kernel", "weights")
                path = path.replace("embeddings", "weights")
                start[path] = np.zeros(variable.shape)
        checkpoint = write_checkpoint(tmp_path / "start", start)
        read_estimator_checkpoint(model, checkpoint)

    data = canned_table.input_fn(labels, sparse=sparse, epochs=3)()
    loop, global_step = local_loop(model, data)
    with pytest.raises(EndOfInput):
        loop.run(100)
    assert global_step.numpy() == 24

    test = canned_table.input_fn(labels, 64, seed=9, sparse=sparse)()
    metrics = evaluate(model, test)
    expected = dict(golden["metrics"])
    del expected["global_step"]
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)

    predictions = model.predict_step(next(iter(test)))
    expected = golden["predictions"]
    assert set(predictions) == set(expected[0])
    for key, value in predictions.items():
        rows = np.array([each[key] for each in expected])
        if value.dtype == tf.string:
            assert value[:4].numpy().astype(str).tolist() == rows.tolist()
        else:
            np.testing.assert_allclose(value[:4], rows, rtol=1e-5, atol=1e-6)

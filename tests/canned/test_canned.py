import json
import os
import pathlib
import subprocess
import sys

import canned_table
import keras
import numpy as np
import pytest
import tensorflow as tf
from serving_checks import example, serve
from small_models import local_loop

import tfdist
from tfdist.canned import estimators
from tfdist.checkpoint.estimator_checkpoint import read_estimator_checkpoint
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.saved_models import export_saved_model, list_exports
from tfdist.training.loop import EndOfInput
from tfdist.training.step import ModelStep

GOLDEN = json.loads(
    (pathlib.Path(__file__).parents[1] / "canned_golden.json").read_text()
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


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_same_numbers_as_tf_2_15(name, table_columns, tmp_path):
    golden = GOLDEN[name]
    labels, sparse, estimator = canned_table.estimators(
        estimators, *table_columns, lambda name: {"model_dir": str(tmp_path)}
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
    loop, global_step = local_loop(model, data, steps_per_dispatch=1)
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


# Arguments.


def linear_columns():
    return [fc.numeric_column("x"), words_column()]


def words_column():
    return fc.categorical_column_with_vocabulary_list("f", ["a", "b"])


def dense_columns():
    return [fc.numeric_column("x"), fc.embedding_column(words_column(), 2)]


def rates(estimator):
    optimizer = estimator.model_fn().optimizer
    parts = getattr(optimizer, "parts", [optimizer])
    return [
        (type(part).__name__, pytest.approx(float(part.learning_rate)))
        for part in parts
    ]


def combined(**kwargs):
    return estimators.DNNLinearCombinedRegressor(
        "m",
        linear_feature_columns=linear_columns(),
        dnn_feature_columns=dense_columns(),
        dnn_hidden_units=[2],
        **kwargs,
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # TF 2.15's, see its linear.py, dnn.py and dnn_linear_combined.py.
        (
            lambda: estimators.LinearRegressor(linear_columns(), "m"),
            [("Ftrl", 0.2)],
        ),
        (
            lambda: estimators.LinearRegressor(
                [fc.numeric_column(f"x{i}") for i in range(100)],
                "m",
                optimizer=None,
            ),
            [("Ftrl", 0.1)],
        ),
        (
            lambda: estimators.LinearRegressor(
                linear_columns(), "m", optimizer="RMSProp"
            ),
            [("RMSprop", 0.2)],
        ),
        (
            lambda: estimators.DNNRegressor([2], dense_columns(), "m"),
            [("Adagrad", 0.001)],
        ),
        (
            lambda: estimators.DNNRegressor(
                [2], dense_columns(), "m", optimizer="SGD"
            ),
            [("SGD", 0.01)],
        ),
        (combined, [("Ftrl", 0.005), ("Adagrad", 0.001)]),
        (
            lambda: combined(
                linear_optimizer=keras.optimizers.SGD(0.5),
                dnn_optimizer=lambda: keras.optimizers.Adam(0.25),
            ),
            [("SGD", 0.5), ("Adam", 0.25)],
        ),
    ],
)
def test_optimizers(estimator, expected):
    assert rates(estimator()) == expected


def test_each_part_has_its_optimizer():
    model = combined().model_fn()
    optimizer = model.optimizer
    owners = {v.path: optimizer.owner(v) for v in model.trainable_variables}
    assert owners == {
        path: 0 if path.startswith("linear/") else 1 for path in owners
    }
    assert set(owners) == {
        "linear/x/kernel",
        "linear/f/embeddings",
        "linear/bias_weights",
        "dnn/input_layer/f_embedding/embeddings",
        "dnn/hiddenlayer_0/kernel",
        "dnn/hiddenlayer_0/bias",
        "dnn/logits/kernel",
        "dnn/logits/bias",
    }


def test_models_share_no_optimizer():
    estimator = combined(dnn_optimizer=keras.optimizers.Adam(0.5))
    models = [estimator.model_fn() for _ in range(2)]
    optimizers = [m.optimizer.parts[1] for m in models]
    assert optimizers[0] is not optimizers[1]


@pytest.mark.parametrize("part", ["linear", "dnn"])
def test_combined_without_one_part(part):
    columns = {"linear": linear_columns, "dnn": dense_columns}[part]()
    estimator = estimators.DNNLinearCombinedClassifier(
        "m", **{f"{part}_feature_columns": columns}, dnn_hidden_units=[2]
    )
    paths = [v.path for v in estimator.model_fn().trainable_variables]
    assert {path.split("/")[0] for path in paths} == {part}


def test_large_tables_are_split():
    partitioner = tf.compat.v1.fixed_size_partitioner(2)
    estimator = combined(input_layer_partitioner=partitioner)
    paths = [v.path for v in estimator.model_fn().variables]
    assert "linear/f/embeddings_part_1" in paths
    assert "dnn/input_layer/f_embedding/embeddings_part_1" in paths


def test_dropout_is_for_training():
    estimator = estimators.DNNRegressor(
        [50], dense_columns(), "m", dropout=0.5, batch_norm=True
    )
    model = estimator.model_fn()
    x = {"x": tf.ones([4]), "f": tf.constant(["a", "b", "a", ""])}
    np.testing.assert_array_equal(model(x), model(x))
    rows = model(x, training=True).numpy()
    assert not np.allclose(rows[0], rows[2])


def test_weights_of_keras_and_of_a_column_multiply():
    estimator = estimators.LinearRegressor(
        [fc.numeric_column("x")], "m", weight_column="w"
    )
    model = estimator.model_fn()
    x = {"x": tf.zeros([2]), "w": tf.constant([1.0, 2.0])}
    y, sample_weight = tf.constant([1.0, 2.0]), tf.constant([3.0, 0.5])
    loss = model.compute_loss(x, y, model(x), sample_weight)
    assert float(loss) == pytest.approx((3 + 4) / 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: estimators.LinearClassifier([], "m"), "must have columns"),
        (
            lambda: estimators.LinearClassifier(
                linear_columns(), "m", n_classes=1
            ),
            "`n_classes` must be an integer of at least 2",
        ),
        (
            lambda: estimators.LinearClassifier(
                linear_columns(),
                "m",
                n_classes=3,
                label_vocabulary=["a", "b"],
            ),
            "`label_vocabulary` must be a list of n_classes names",
        ),
        (
            lambda: estimators.LinearClassifier(
                linear_columns(), "m", loss_reduction="none"
            ),
            "`loss_reduction` must be one of",
        ),
        (
            lambda: estimators.LinearClassifier(
                linear_columns(), "m", optimizer="Adamax"
            ),
            "Unsupported optimizer name: 'Adamax'",
        ),
        (
            lambda: estimators.LinearClassifier(linear_columns()),
            "One of `model_dir` and `config`",
        ),
        (
            lambda: estimators.LinearClassifier(
                linear_columns(), "m", config=RunConfig("n")
            ),
            r"`model_dir` and `config\.model_dir` differ",
        ),
        (
            lambda: estimators.LinearRegressor(
                linear_columns(), "m", label_dimension=0
            ),
            "`label_dimension` must be a positive integer",
        ),
        (
            lambda: estimators.DNNClassifier([], dense_columns(), "m"),
            "`hidden_units` must have positive integers",
        ),
        (
            lambda: estimators.DNNClassifier([3], linear_columns(), "m"),
            "categorical column 'f': wrap it in",
        ),
        (
            lambda: estimators.DNNLinearCombinedClassifier("m"),
            "Either `linear_feature_columns` or `dnn_feature_columns`",
        ),
        (
            lambda: estimators.DNNLinearCombinedClassifier(
                "m", dnn_feature_columns=dense_columns()
            ),
            "`dnn_hidden_units` must have",
        ),
    ],
)
def test_bad_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": 3}, "An optimizer must be"),
        ({"weight_column": 3}, "`weight_column` must be a name"),
        ({"feature_columns": ["x"]}, "`feature_columns` must hold columns"),
    ],
)
def test_bad_type(options, message):
    options = {"feature_columns": linear_columns(), **options}
    with pytest.raises(TypeError, match=message):
        estimators.LinearClassifier(model_dir="m", **options)


def test_metrics_may_be_added(tmp_path):
    """As by `tf.estimator.add_metrics`."""
    canned = estimators.LinearClassifier(
        linear_columns(), "m", label_vocabulary=["no", "yes"]
    )

    def model_fn():
        model = canned.model_fn()
        auc = keras.metrics.AUC(from_logits=True, name="added")
        model.compile(model.optimizer, metrics=[auc])
        return model

    def input_fn():
        x = np.linspace(-1, 1, 64, dtype="float32")
        y = np.where(x + np.sin(40 * x) > 0, "yes", "no")
        features = {"x": x, "f": np.where(x > 0.3, "a", "b")}
        return tf.data.Dataset.from_tensor_slices((features, y)).batch(8)

    config = tfdist.RunConfig(str(tmp_path), log_step_count_steps=None)
    estimator = tfdist.Estimator(model_fn, config).train(input_fn)
    metrics = estimator.evaluate(input_fn)
    assert metrics["added"] == pytest.approx(metrics["auc"], abs=0.01)
    assert metrics["auc"] > 0.6


def test_logits_of_half_precision_are_float32(tmp_path):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        estimator = tfdist.LinearRegressor(
            [fc.numeric_column("a")], str(tmp_path), optimizer="SGD"
        )
        data = tf.data.Dataset.from_tensors(({"a": [1.0]}, [3.0]))
        estimator.train(lambda: data)
        metrics = estimator.evaluate(lambda: data)
    finally:
        keras.config.set_dtype_policy(policy)
    assert 0 < metrics["average_loss"] < 9


def test_features_that_are_no_dictionary():
    model = estimators.LinearRegressor(linear_columns(), "m").model_fn()
    with pytest.raises(ValueError, match="must be a dictionary"):
        model(tf.zeros([3, 2]))


# Exports.

RAW = {
    "x": np.array([1.0, -2.0, 0.5], "float32"),
    "f": np.array(["a", "z", ""], object),
    "g": np.array([3, 4, 3]),
}


def served(estimator, directory, *names):
    """Predictions, and the method and outputs of each signature."""
    keras.utils.set_random_seed(1)
    model = estimator.model_fn()
    for variable in model.trainable_variables:
        variable.assign(tf.random.normal(variable.shape))
    path = export_saved_model(model, str(directory))
    strings = [
        example(x=[1.0], f=["a"], g=[3]),
        example(x=[-2.0], f=["z"], g=[4]),
        example(x=[0.5], g=[3]),  # What is missing is not there.
    ]
    inputs = {name: {"inputs": strings} for name in names}
    inputs["predict"] = {"examples": strings}
    inputs["serve"] = {k: v[:, np.newaxis] for k, v in RAW.items()}
    results = serve(path, *inputs.items())
    raw = {k: tf.constant(v) for k, v in RAW.items()}
    predictions = {k: v.numpy() for k, v in model.predict_step(raw).items()}
    return predictions, dict(zip(inputs, results, strict=True))


def classifier(n_classes, **kwargs):
    cross = fc.crossed_column(
        [words_column(), fc.categorical_column_with_identity("g", 5)], 9
    )
    return estimators.DNNLinearCombinedClassifier(
        "m",
        linear_feature_columns=[*linear_columns(), cross],
        dnn_feature_columns=[*dense_columns(), fc.embedding_column(cross, 2)],
        dnn_hidden_units=[3],
        n_classes=n_classes,
        batch_norm=True,
        input_layer_partitioner=tf.compat.v1.fixed_size_partitioner(2),
        **kwargs,
    )


@pytest.mark.slow
@pytest.mark.parametrize("n_classes", [2, 3])
def test_export_of_a_classifier_is_served(n_classes, tmp_path):
    estimator = classifier(
        n_classes, label_vocabulary=["no", "yes", "both"][:n_classes]
    )
    names = ["classification", "serving_default"]
    names += ["regression"] * (n_classes == 2)
    expected, results = served(estimator, tmp_path, *names)
    for name in ("predict", "serve"):
        method, outputs = results[name]
        assert method == "tensorflow/serving/predict"
        assert set(outputs) == set(expected)
        for key, value in outputs.items():
            assert_same(value, expected[key])
    for name in ("classification", "serving_default"):
        method, outputs = results[name]
        assert method == "tensorflow/serving/classify"
        assert set(outputs) == {"classes", "scores"}
        assert_same(outputs["classes"], expected["all_classes"])
        assert_same(outputs["scores"], expected["probabilities"])
    if n_classes == 2:
        method, outputs = results["regression"]
        assert method == "tensorflow/serving/regress"
        assert set(outputs) == {"outputs"}
        assert_same(outputs["outputs"], expected["logistic"])


@pytest.mark.slow
def test_export_of_a_regressor_is_served(tmp_path):
    estimator = estimators.DNNRegressor([3], dense_columns(), "m")
    names = ["regression", "serving_default"]
    expected, results = served(estimator, tmp_path, *names)
    for name in names:
        method, outputs = results[name]
        assert method == "tensorflow/serving/regress"
        assert_same(outputs["outputs"], expected["predictions"])
    for name in ("predict", "serve"):
        assert_same(results[name][1]["predictions"], expected["predictions"])


def assert_same(value, expected):
    if expected.dtype == object:
        assert value.tolist() == expected.tolist()
    else:
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


# Whole jobs.


def run_job(kind, directory, *launch):
    """The last evaluation's metrics, and the exports."""
    tests = pathlib.Path(__file__).parents[1]
    words = canned_table.write_words(directory)
    log = directory / "log"
    with log.open("w") as output:
        code = subprocess.run(
            [
                *[sys.executable, *launch, "-m", "canned_job"],
                *[kind, str(directory / "job"), words],
            ],
            env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=280,
        ).returncode
    assert code == 0, log.read_text()
    path = directory / "job" / "eval" / "latest.json"
    result = json.loads(path.read_text())
    return result["metrics"], result["exports"]


@pytest.mark.parametrize(
    ("kind", "launch"),
    [
        pytest.param("linear", [], marks=pytest.mark.slow),
        pytest.param(
            "linear",
            ["-m", "tfdist.launch", "--ps=1", "--workers=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "combined",
            ["-m", "tfdist.launch", "--ps=2", "--workers=2", "--evaluator"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_job_learns_evaluates_and_exports(kind, launch, tmp_path):
    metrics, exports = run_job(kind, tmp_path, *launch)
    assert metrics["global_step"] == 200
    assert metrics["auc"] > 0.75
    assert metrics["accuracy"] > metrics["accuracy_baseline"]
    # The last model may not be the best one.
    best, final = (tmp_path / "job" / "export" / n for n in ("best", "final"))
    assert exports[1] == list_exports(str(final))[0]
    for path in (exports[1], list_exports(str(best))[0]):
        assert os.path.exists(os.path.join(path, "saved_model.pb"))

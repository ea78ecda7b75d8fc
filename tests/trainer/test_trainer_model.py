"""trainer/model.py."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from serving_checks import serve

from trainer import data, model
from trainer.source import CATEGORICAL, NUMERIC, Column, Schema

SCHEMA = Schema(
    columns=(
        Column("age", NUMERIC, mean=40.0, stddev=10.0, boundaries=(30.0, 50.0)),
        Column("job", CATEGORICAL, vocabulary=("clerk", "smith", "baker")),
        Column("sex", CATEGORICAL, vocabulary=("f", "m")),
        Column("user", CATEGORICAL, num_buckets=8),
    ),
    label="y",
    positive=("1",),
    num_train=100,
)
RAW = {
    "age": tf.constant([30.0, np.nan, 29.0, 1000.0]),
    "job": tf.constant(["smith", "?", "potter", "clerk"]),
    "sex": tf.constant(["m", "f", "", "f"]),
    "user": tf.constant(["a", "b", "", "a"]),
}


# The preprocessor.


def test_ids_of_each_kind():
    out = model.preprocessor(SCHEMA)(RAW)
    assert out["deep_age"].numpy().tolist() == [2, 0, 1, 3]
    assert out["deep_job"].numpy().tolist() == [3, 0, 1, 2]
    assert out["deep_sex"].numpy().tolist() == [3, 2, 0, 2]
    a, b, missing, again = out["deep_user"].numpy().tolist()
    assert a == again
    assert missing == 0
    assert {a, b} <= set(range(1, 9))


def test_numbers_are_normalized_missing_is_the_mean():
    out = model.preprocessor(SCHEMA)(RAW)["numeric"]
    np.testing.assert_allclose(out[:, 0], [-1.0, 0.0, -1.1, 5.0], rtol=1e-6)


def test_wide_ids_are_rows_of_one_table():
    sizes = [model.num_ids(column) for column in SCHEMA.columns]
    assert sizes == [4, 5, 4, 9]
    wide = model.preprocessor(SCHEMA)(RAW)["wide"].numpy()
    assert model.default_crosses(SCHEMA) == (("job", "sex"),)
    offsets = np.cumsum([0, *sizes])
    assert (wide[:, 4] - offsets[4]).tolist() == [
        3 * 4 + 3,
        0 * 4 + 2,
        1 * 4 + 0,
        2 * 4 + 2,
    ]
    for i, size in enumerate([*sizes, 20]):
        assert np.all(wide[:, i] >= offsets[i])
        assert np.all(wide[:, i] - offsets[i] < size)


def test_large_crosses_are_hashed(monkeypatch):
    monkeypatch.setattr(model, "CROSS_BUCKETS", 7)
    wide = model.preprocessor(SCHEMA, [("job", "user")])(RAW)["wide"].numpy()
    assert np.all(wide[:, 4] - (4 + 5 + 4 + 9) < 7)


def test_preprocessor_in_a_data_set_has_no_table():
    rows = tf.data.Dataset.from_tensor_slices(RAW).batch(3)
    prepare = model.preprocessor(SCHEMA)
    assert not prepare.variables
    inside = list(rows.map(prepare))
    outside = prepare(RAW)
    for name, expected in outside.items():
        got = tf.concat([batch[name] for batch in inside], 0)
        np.testing.assert_array_equal(got, expected)
    graph = tf.function(prepare).get_concrete_function(RAW).graph
    assert not [op.type for op in graph.get_operations() if "Table" in op.type]


# The model.


def test_variables_have_stable_paths():
    keras.layers.Dense(1)  # Counters of automatic names play no part.
    paths = [variable.path for variable in model.build(SCHEMA).variables]
    assert sorted(paths) == [
        "embedding_age/embeddings",
        "embedding_job/embeddings",
        "embedding_sex/embeddings",
        "embedding_user/embeddings",
        "hidden_0/bias",
        "hidden_0/kernel",
        "hidden_1/bias",
        "hidden_1/kernel",
        "logit/bias",
        "logit/kernel",
        "wide_numeric/kernel",
        "wide_weights/embeddings",
    ]


@pytest.mark.parametrize("kind", [NUMERIC, CATEGORICAL])
def test_columns_of_one_kind_only(kind):
    schema = Schema(
        tuple(c for c in SCHEMA.columns if c.kind == kind), "y", ("1",), 9
    )
    features = model.preprocessor(schema)(
        {c.name: RAW[c.name] for c in schema.columns}
    )
    assert ("numeric" in features) == (kind == NUMERIC)
    assert model.build(schema)(features).shape == (4, 1)


def test_the_wide_part_is_a_sum_of_weights():
    built = model.build(SCHEMA)
    features = model.preprocessor(SCHEMA)(RAW)
    for variable in built.variables:
        variable.assign(tf.zeros(variable.shape))
    weights = np.random.default_rng(0).normal(size=(4 + 5 + 4 + 9 + 20, 1))
    built.get_layer("wide_weights").set_weights([weights])
    logit = weights[features["wide"].numpy(), 0].sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        built(features), 1 / (1 + np.exp(-logit)), rtol=1e-5
    )


# Training and serving.


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A source and a model trained on it for a moment."""
    directory = tmp_path_factory.mktemp("trained")
    rng = np.random.default_rng(0)
    lines = ['"an age",job title,zip-code,y\n']
    for _ in range(600):
        age, job = rng.integers(20, 70), rng.choice(["a", "b", "?", '"c,""d"'])
        label = (age > 45) ^ (job == "a") ^ (rng.random() < 0.05)
        shown = age if rng.random() < 0.9 else ""
        lines.append(f"{shown},{job},{rng.integers(5)},{int(label)}\n")
    (directory / "train.csv").write_text("".join(lines[:500]))
    (directory / "eval.csv").write_text("".join([lines[0], *lines[500:]]))
    examples = data.csv_source(
        str(directory / "train.csv"),
        str(directory / "eval.csv"),
        "y",
        categorical_columns=["zip-code"],
    )
    keras.utils.set_random_seed(1)
    built = model.build(examples.schema)
    prepare = model.preprocessor(examples.schema)
    batches = examples.train_input_fn(batch_size=64, transform=prepare)
    built.fit(batches.take(200), verbose=0)
    return examples, built


@pytest.mark.slow
def test_it_learns(trained):
    examples, built = trained
    prepare = model.preprocessor(examples.schema)
    figures = built.evaluate(
        examples.eval_input_fn(transform=prepare), verbose=0, return_dict=True
    )
    # What is known of the age in nine of ten cases, and never turned around.
    assert figures["auc"] > 0.8
    assert figures["accuracy"] > 0.8


@pytest.mark.slow
def test_export_gives_the_same_predictions(trained, tmp_path):
    examples, built = trained
    prepare = model.preprocessor(examples.schema)
    expected = built.predict(
        examples.eval_input_fn(transform=prepare).map(lambda x, _: x),
        verbose=0,
    )
    serving = model.serving_model(built, examples.schema)
    raw = next(iter(examples.eval_input_fn()))[0]
    np.testing.assert_allclose(
        serving(raw)["probabilities"], expected, rtol=1e-5
    )

    serving.export(tmp_path / "export", verbose=False)
    inputs = {name: column.numpy() for name, column in raw.items()}
    ((_, served),) = serve(tmp_path / "export", ("serving_default", inputs))
    np.testing.assert_allclose(served["probabilities"], expected, rtol=1e-5)

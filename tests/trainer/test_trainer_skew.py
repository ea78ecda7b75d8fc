"""The schema of a job: made once, and the same in training and serving."""

import csv
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from serving_checks import serve

import tfdist
from tfdist.cluster.spec import Cluster
from trainer import data, model
from trainer.source import MAX_VOCABULARY

pytestmark = pytest.mark.slow  # A job is trained, twice.

HEADER = ["age", "gain", "job", "home", "person", "income"]
ROWS = 1500
# What no training file holds: missing, unknown, further out than anything.
UNSEEN = [
    ["", "", "", "", "", ">50K"],
    ["?", "?", "?", "?", "?", "<=50K"],
    ["nan", "NaN", "unknown", "Atlantis", "nobody", ">50K"],
    ["inf", "-inf", "SMITH", 'é, "ü" \'', "p1 ", ">50K"],
    ["-1e30", "3e38", "smith ", "0", "\u4e2d\u6587", "<=50K"],
    ["1e-45", "-0", "x" * 3000, "nan", "-1", "<=50K"],
    ["16777217", "0.1", "smith", "x", "p2", ">50K"],
]


def census(rows, seed):
    """Rows whose label depends on the age and on the job."""
    rng = np.random.default_rng(seed)
    for i in range(rows):
        age, job = rng.integers(17, 91), rng.choice(["clerk", "smith", "?"])
        rich = rng.random() < (0.8 if age > 40 and job != "clerk" else 0.1)
        yield [
            age if rng.random() < 0.9 else "",
            0 if rng.random() < 0.9 else rng.integers(99_999),
            job,
            rng.choice(["US", "IT", "Laos"], p=[0.8, 0.199, 0.001]),
            f"p{i}",
            ">50K" if rich else "<=50K",
        ]


def write(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([HEADER, *rows])
    return str(path)


def source(folder, **options):
    found = data.csv_source(
        str(folder / "train*.csv"),
        str(folder / "eval*.csv"),
        "income",
        min_count=3,
        **options,
    )
    found.share_schema(str(folder / "job" / "schema.json"), Cluster())
    return found


def train(folder, max_steps):
    """What `trainer.task` does, in this process."""
    examples = source(folder)
    schema_path = str(folder / "job" / "schema.json")
    estimator = tfdist.Estimator(
        lambda: model.build(examples.schema),
        tfdist.RunConfig(
            str(folder / "job"), cluster=Cluster(), tf_random_seed=1
        ),
    )
    _, (export,) = tfdist.train_and_evaluate(
        estimator,
        tfdist.TrainSpec(
            lambda context: examples.train_input_fn(
                context, transform=model.preprocessor(examples.schema)
            ),
            max_steps=max_steps,
        ),
        tfdist.EvalSpec(
            lambda: examples.eval_input_fn(
                transform=model.preprocessor(examples.schema)
            ),
            exporters=[
                tfdist.LatestExporter(
                    "serving",
                    lambda m: model.serving_model(m, examples.schema),
                    assets_extra={"schema.json": schema_path},
                )
            ],
        ),
    )
    predictions = estimator.predict(
        lambda: examples.eval_input_fn(
            transform=model.preprocessor(examples.schema)
        ).map(lambda features, _: features)
    )
    return examples.schema, export, np.array(list(predictions))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A trained job: its folder, schema, export and predictions."""
    folder = tmp_path_factory.mktemp("job")
    assert ROWS > MAX_VOCABULARY  # So persons are hashed.
    write(folder / "train.csv", census(ROWS, 0))
    write(folder / "eval.csv", [*census(20, 1), *UNSEEN])
    return folder, *train(folder, 30)


def served(export, path):
    """What the loader in C++ makes of the fields of a CSV file."""

    def number(text):
        return np.float32(np.nan if text in ("", "?") else text)

    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    inputs = {
        "age": np.array([number(row["age"]) for row in rows]),
        "gain": np.array([number(row["gain"]) for row in rows]),
        **{
            name: np.array([row[name].encode() for row in rows], object)
            for name in ("job", "home", "person")
        },
    }
    ((_, outputs),) = serve(export, ("serving_default", inputs))
    return outputs["probabilities"]


def test_export_predicts_as_the_training_graph(job):
    folder, _, export, expected = job
    found = served(export, folder / "eval.csv")
    assert np.isfinite(expected).all()
    assert len(np.unique(expected.round(6))) > 10
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    asset = Path(export) / "assets.extra" / "schema.json"
    assert asset.read_text() == (folder / "job" / "schema.json").read_text()


def test_what_is_known_of_the_columns(job):
    folder, schema, *_ = job
    columns = {column.name: column for column in schema.columns}
    assert columns["home"].vocabulary == ("US", "IT")  # Laos: twice.
    assert columns["job"].vocabulary[0] in ("clerk", "smith")
    assert columns["person"].num_buckets == 2048
    with (folder / "train.csv").open() as file:
        ages = [float(r["age"]) for r in csv.DictReader(file) if r["age"]]
    assert columns["age"].mean == pytest.approx(np.mean(ages), rel=1e-14)
    assert columns["age"].stddev == pytest.approx(np.std(ages), rel=1e-14)


def test_a_continued_job_keeps_its_schema(job, caplog):
    """Also with other data, which is checked as the first was."""
    folder, schema, *_ = job
    rows = [[a, g, "baker", h, p, y] for a, g, _, h, p, y in census(99, 2)]
    write(folder / "train-2.csv", rows)
    try:
        again, export, expected = train(folder, 40)
        assert again == schema
        found = served(export, folder / "eval.csv")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        later = source(folder)
        assert later.schema == schema
        column = later.train_input_fn(batch_size=ROWS + 99)
        (features, _) = next(iter(column))
        assert tf.reduce_any(features["job"] == "baker")
        write(folder / "train-2.csv", [*rows, [1, 2, "smith"]])
        with pytest.raises(ValueError, match=r"train-2\.csv, line 101: expec"):
            _ = source(folder).schema
        write(folder / "train-2.csv", [[*rows[0][:-1], "some"]])
        with pytest.raises(ValueError, match=r"train-2\.csv, line 2: the labe"):
            _ = source(folder).schema
    finally:
        (folder / "train-2.csv").unlink()


def test_other_arguments_need_another_job(job):
    folder, *_ = job
    with pytest.raises(ValueError, match=r"schema\.json holds the columns for"):
        _ = source(folder, categorical_columns=["age"]).schema

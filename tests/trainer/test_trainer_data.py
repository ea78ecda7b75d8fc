"""trainer/source.py, csv_files.py, data.py and click_log.py."""

import csv
import gzip
import io
import threading
import urllib.request

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from hypothesis import strategies as st
from pace import slow

from trainer import click_log, data, source
from trainer.source import CATEGORICAL, NUMERIC

HEADER = "age,job,zip,income\n"
ROWS = "30,clerk,101,low\n41,?,102,high\n,smith,101,low\n52,clerk,,high\n"


def write(path, text):
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="") as file:
        file.write(text)
    return str(path)


@pytest.fixture
def files(tmp_path):
    return [
        write(tmp_path / "train.csv", HEADER + ROWS),
        write(tmp_path / "eval.csv", HEADER + ROWS),
    ]


def columns(schema):
    return {column.name: column for column in schema.columns}


def rows(dataset):
    """Returns the rows of a data set: columns by name, then the label."""
    found = []
    for features, label in dataset:
        fields = [features[name].numpy() for name in sorted(features)]
        found += zip(*fields, label.numpy()[:, 0], strict=True)
    return found


# Reading CSV files.


@pytest.mark.slow
def test_schema_of_csv(files):
    schema = data.csv_source(*files, "income").schema
    assert schema.positive == ("low",)
    assert schema.num_train == 4
    assert [c.name for c in schema.numeric] == ["age", "zip"]
    assert columns(schema)["age"].mean == 41.0
    assert columns(schema)["age"].stddev == pytest.approx(np.std([30, 41, 52]))
    assert columns(schema)["job"].vocabulary == ("clerk", "smith")


@pytest.mark.slow
def test_overrides(files):
    schema = data.csv_source(
        *files,
        "income",
        categorical_columns=["zip"],
        ignore_columns=["job"],
        numeric_columns=["age"],
    ).schema
    assert {c.name: c.kind for c in schema.columns} == {
        "age": NUMERIC,
        "zip": CATEGORICAL,
    }
    assert columns(schema)["zip"].vocabulary == ("101", "102")


@pytest.mark.slow
def test_missing_values_and_order(files):
    found = rows(data.csv_source(*files, "income").eval_input_fn(batch_size=3))
    assert [row[1] for row in found] == [b"clerk", b"", b"smith", b"clerk"]
    np.testing.assert_array_equal([r[0] for r in found], [30, 41, np.nan, 52])
    np.testing.assert_array_equal(
        [r[2] for r in found], [101, 102, 101, np.nan]
    )
    assert [row[3] for row in found] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.slow
def test_columns_in_another_order(files, tmp_path):
    text = "income,zip,age,job\nlow,101,30,clerk\n"
    other = write(tmp_path / "other.csv", text)
    (row,) = rows(data.csv_source(files[0], other, "income").eval_input_fn())
    assert row == (30, b"clerk", 101, 1)


def test_what_is_no_quantity_is_missing(tmp_path):
    text = "x,y\n1,0\nnan,1\ninf,0\n-inf,0\n3,1\n"
    path = write(tmp_path / "a.csv", text)
    (column,) = data.csv_source(path, path, "y").schema.columns
    assert (column.kind, column.mean, column.stddev) == (NUMERIC, 2.0, 1.0)
    assert column.boundaries == (1.0, 3.0)


def test_a_gzip_file_that_was_cut_off(files, tmp_path):
    path = tmp_path / "cut.csv.gz"
    write(path, HEADER + ROWS * 50)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"cut\.csv\.gz is not a complete"):
        _ = data.csv_source(files[0], str(path), "income").schema


@pytest.mark.slow
@pytest.mark.parametrize(
    ("labels", "positive"),
    [
        ("0.0 1.0 1 0", ("1", "1.0")),
        ("<=50K >50K >50K <=50K", (">50K",)),
        *slow(("0 1 1 0", ("1",)), ("no yes no yes", ("yes",))),
    ],
)
def test_positive_label(tmp_path, labels, positive):
    text = "".join(f"{i},{v}\n" for i, v in enumerate(labels.split()))
    path = write(tmp_path / "a.csv", "x,y\n" + text)
    assert data.csv_source(path, path, "y").schema.positive == positive


@pytest.mark.slow
def test_patterns_gzip_quotes_and_line_ends(tmp_path):
    write(tmp_path / "part-0.csv", '\ufeff"a b",_t,y\r\n1,"x, ""y""",0\r\n')
    write(tmp_path / "part-1.csv.gz", 'a b,_t,y\n2,"",1\n\n\n')
    write(tmp_path / "part-2.csv", "a b,_t,y\n")
    files = data.csv_source(
        [str(tmp_path / "part-*.csv"), str(tmp_path / "*.gz")],
        str(tmp_path / "part-*"),
        "y",
    )
    assert [c.name for c in files.schema.columns] == ["a_b", "t"]
    assert rows(files.eval_input_fn()) == [(1, b'x, "y"', 0), (2, b"", 1)]


@pytest.mark.slow
@hypothesis.settings(deadline=None, max_examples=5)
@hypothesis.given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(-999, 999)),
            st.text("ab ,\";'é", max_size=4),
        ),
        min_size=2,
        max_size=40,
    )
)
def test_every_field_comes_back(tmp_path_factory, table):
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(["n", "s", "y"])
    writer.writerows((n, s, i % 2) for i, (n, s) in enumerate(table))
    path = write(tmp_path_factory.mktemp("csv") / "a.csv", text.getvalue())
    found = rows(
        data.csv_source(
            path, path, "y", numeric_columns="n", categorical_columns="s"
        ).eval_input_fn()
    )
    expected = [np.nan if n is None else n for n, _ in table]
    np.testing.assert_array_equal([row[0] for row in found], expected)
    assert [row[1].decode() for row in found] == [s for _, s in table]


def test_many_values_are_hashed(tmp_path):
    number = source.MAX_VOCABULARY + 1
    text = "".join(f"v{i},{i % 2}\n" for i in range(number))
    path = write(tmp_path / "a.csv", "s,y\n" + text)
    (column,) = data.csv_source(path, path, "y").schema.columns
    assert column.num_buckets == 1024
    assert not column.vocabulary


# What is wrong with CSV files.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"bad.csv, line 1: expected a header"),
        ("age,job,income\n1,a,low\n", r"bad.csv: the columns must be those"),
        (HEADER + "1,a,2,mid\n", r"line 2: the label .*'high', 'low'.*'mid'"),
        # What `tests/data/test_inputs.py` shows of the reader, and fast.
        *slow(
            (HEADER, r"bad.csv: expected at least one example"),
            (HEADER + ROWS + "1,a,2\n", r"bad.csv, line 6: expected 4 .*"),
            (HEADER + "1,a,2,?\n", r"line 2: the label 'income' must not"),
            # A byte order mark before a quoted name.
            ('\ufeff"income",age,job,zip\nmid,1,a,2\n', r"line 2: .*'mid'"),
            (HEADER + ROWS + "1,a,2,low,9\n", r"line 6: expected 4 .*,9$"),
            (HEADER + "1,a,2,low\n\n1,a,2\n", r"bad.csv, line 4: expected 4"),
            (HEADER + '1,"a,2,low\n', r"bad.csv, line 2: a quote is opened"),
            (HEADER + "old,a,2,low\n", r"age \(float32\).*: old,a,2,low"),
        ),
    ],
)
def test_bad_eval_file(files, tmp_path, text, message):
    bad = write(tmp_path / "bad.csv", text)
    with pytest.raises(ValueError, match=message):
        _ = data.csv_source(files[0], bad, "income").schema


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"bad.csv, line 1: expected a header"),
        (HEADER, r"bad.csv: expected at least one example"),
        (HEADER + "1,a,2,low\n1,a,2,\n", r"bad.csv, line 3: the label 'incom"),
        *slow(
            (HEADER + ROWS + "1,a,2\n", r"line 6: expected 4 fields: .*"),
            (HEADER + ROWS + "1,a,2,mid\n", r"3 distinct .* 'high', 'low', 'm"),
            (HEADER + "1,a,2,low\n", r"1 distinct values: 'low'"),
            (HEADER + "1,a,2,1\n2,b,3,2\n", r"0 and 1, or .* '1', '2'"),
        ),
        ("age,Age,income\n1,2,0\n", r"different names.*'age'"),
        (
            "age,job\n1,2\n",
            r"`label` must name a column.*'age', 'job'.*'income",
        ),
        ("income\n0\n1\n", r"at least one column"),
    ],
)
def test_bad_train_file(tmp_path, text, message):
    bad = write(tmp_path / "bad.csv", text)
    with pytest.raises(ValueError, match=message):
        _ = data.csv_source(bad, bad, "income").schema


@pytest.mark.parametrize("kind", ["numeric", "categorical", "ignore"])
@pytest.mark.parametrize("name", ["nobody", "income"])
def test_bad_override(files, kind, name):
    with pytest.raises(ValueError, match=f"`{kind}_columns` must.*{name!r}"):
        _ = data.csv_source(
            *files, "income", **{f"{kind}_columns": [name]}
        ).schema


def test_numeric_override_of_words(files):
    with pytest.raises(ValueError, match=r"line 2: .*job \(float32\)"):
        _ = data.csv_source(*files, "income", numeric_columns=["job"]).schema


def test_no_file(files, tmp_path):
    missing = str(tmp_path / "none-*.csv")
    with pytest.raises(FileNotFoundError, match=r"No file matches .*none-\*"):
        _ = data.csv_source(files[0], missing, "income").schema


def test_a_column_of_two_kinds(files):
    with pytest.raises(
        ValueError, match=r"`numeric_columns` and `ignore_.*zip"
    ):
        data.csv_source(
            *files, "income", numeric_columns=["zip"], ignore_columns=["zip"]
        )


def test_labels_in_another_encoding(tmp_path):
    """Of the two, the positive one would have been found nowhere."""
    path = tmp_path / "latin.csv"
    path.write_bytes("x,y\n1,non\n2,volontà\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"'y' must be UTF-8.*volont\\xe0"):
        _ = data.csv_source(str(path), str(path), "y").schema


def test_what_is_doubtful_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "0.csv", "x,c,id,y\n1,a,1,0\n ?,b,16777217,1\n")
    write(tmp_path / "1.csv", "x,c,id,y\n1,a,1,1\n2,b,2,1\n")
    one = str(tmp_path / "1.csv")
    with caplog.at_level("WARNING", "trainer"):
        schema = data.csv_source("*.csv", one, "y").schema
    assert schema.columns[0].kind == CATEGORICAL
    assert f"{one}: all examples have the same class" in caplog.text
    assert f"training and evaluation: 1 files, including {one}" in caplog.text
    assert "Column 'x' contains ' ?', which is treated as a" in caplog.text
    assert "Column 'id' has integers of 2**24 or more" in caplog.text
    assert len(caplog.records) == 4


# Which examples a worker reads.


def numbered(tmp_path, num_files, per_file):
    """Returns a source whose column x counts the examples."""
    count = iter(range(num_files * per_file))
    for i in range(num_files):
        text = "".join(f"{next(count)},{j % 2}\n" for j in range(per_file))
        write(tmp_path / f"{i}.csv", "x,y\n" + text)
    return data.csv_source(*[str(tmp_path / "*.csv")] * 2, "y")


def epoch(examples, worker, workers, size, *, traced=False, seed=0):
    """Returns column x of the first `size` examples of a worker."""

    def read(worker):
        context = tf.distribute.InputContext(workers, worker, workers)
        batches = examples.train_input_fn(context, batch_size=1, seed=seed)
        first = batches.take(size).batch(size, drop_remainder=True)
        return first.get_single_element()[0]["x"][:, 0]

    if traced:
        worker, read = tf.constant(worker), tf.function(read)
    return read(worker).numpy().astype(int).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_files", "workers", "traced"), [(4, 2, False), (1, 2, True)]
)
def test_workers_share_the_examples(tmp_path, num_files, workers, traced):
    examples = numbered(tmp_path, num_files, 12)
    size = 12 * num_files // workers
    shares = [
        epoch(examples, worker, workers, size, traced=traced)
        for worker in range(workers)
    ]
    assert sorted(np.concatenate(shares)) == list(range(12 * num_files))


@pytest.mark.slow
def test_seeds(tmp_path):
    examples = numbered(tmp_path, 1, 40)
    first = epoch(examples, 0, 1, 80)
    assert first == epoch(examples, 0, 1, 80)
    assert first != epoch(examples, 0, 1, 80, seed=1)
    assert first[:40] != first[40:]
    assert sorted(first) == sorted(2 * list(range(40)))
    # Neighbours do not go through their shares in the same order.
    even, odd = (epoch(examples, worker, 2, 20) for worker in range(2))
    assert [x // 2 for x in even] != [x // 2 for x in odd]


@pytest.mark.slow
def test_batches_are_full_and_transformed(tmp_path):
    batches = numbered(tmp_path, 1, 5).train_input_fn(
        batch_size=3, transform=lambda features: features["x"] * 0
    )
    assert batches.element_spec == (
        tf.TensorSpec([3], tf.float32),
        tf.TensorSpec([3, 1], tf.float32),
    )
    assert len(list(batches.take(7))) == 7


@pytest.mark.slow
def test_more_workers_than_examples(tmp_path):
    examples = numbered(tmp_path, 1, 3)
    with pytest.raises(ValueError, match="3 examples for 4 workers"):
        examples.train_input_fn(tf.distribute.InputContext(4, 0, 4))


# TensorFlow Datasets.


class Ships(tfds.core.GeneratorBasedBuilder):
    """Every sort of column, nested, and no split for evaluation."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None

    def _info(self):
        features = {
            "crew": {"number": np.int64, "home": np.str_},
            "size": tfds.features.Tensor(shape=(2,), dtype=np.float32),
            "old": np.bool_,
            "sunk": tfds.features.ClassLabel(num_classes=2),
            "kind": np.int64,
            "type": tfds.features.ClassLabel(names=["tug", "ferry"]),
            "photo": tfds.features.Image(shape=(1, 1, 3)),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=(("crew", "size", "old", "type"), "sunk"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(20):
            yield (
                i,
                {
                    "crew": {"number": i, "home": "ab"[i % 2]},
                    "size": [i / 2, 1.0],
                    "old": i < 5,
                    "sunk": int(i > 3),
                    "kind": i,
                    "type": i % 2,
                    "photo": np.zeros((1, 1, 3), np.uint8),
                },
            )


@pytest.fixture(scope="module")
def ships(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("tfds"))
    return lambda **arguments: data.tfds_source("ships", directory, **arguments)


def test_tfds_columns(ships):
    examples = ships()
    kinds = {c.name: c.kind for c in examples.schema.columns}
    assert kinds == {
        "crew_home": CATEGORICAL,
        "crew_number": NUMERIC,
        "old": CATEGORICAL,
        "size_0": NUMERIC,
        "size_1": NUMERIC,
        "type": CATEGORICAL,
    }
    assert set(columns(examples.schema)["type"].vocabulary) == {"tug", "ferry"}
    assert examples.schema.positive == ("1",)


def test_tfds_splits_and_values(ships):
    examples = ships(categorical_columns=["crew_number"])
    assert examples.schema.num_train == 16
    found = rows(examples.eval_input_fn())
    assert [row[:2] for row in found] == [
        (b"a", b"16"),
        (b"b", b"17"),
        (b"a", b"18"),
        (b"b", b"19"),
    ]
    assert {row[-1] for row in found} == {1.0}


@pytest.mark.slow
def test_tfds_slices(ships, caplog):
    examples = ships(train_split="train[:25%]", eval_split="train[50%:]")
    with caplog.at_level("WARNING", "trainer"):
        assert examples.schema.num_train == 5
        assert len(rows(examples.eval_input_fn())) == 10
        # TensorFlow Datasets logs about the folder while it makes it.
        assert not [x for x in caplog.records if x.name == "trainer"]
        _ = ships(eval_split="train[19:]").schema
        assert "overlap: train and train[19:]" in caplog.text
    with pytest.raises(
        ValueError, match=r"`eval_split` must name the examples"
    ):
        _ = ships(train_split="train[:50%]").schema
    with pytest.raises(ValueError, match=r"nosplit"):
        _ = ships(train_split="nosplit[:5%]", eval_split="train").schema


def test_no_such_builder(tmp_path):
    examples = data.tfds_source("nosuchbuilder", str(tmp_path))
    with pytest.raises(ValueError, match=r"has no builder 'nosuchbuilder'"):
        _ = examples.schema


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_tfds_workers_share_the_examples(ships, traced):
    schema = ships().schema

    @(tf.function if traced else lambda function: function)
    def read(worker):
        context = tf.distribute.InputContext(2, worker, 2)
        batches = ships().train_input_fn(context, batch_size=8)
        return batches.take(1).get_single_element()[0]["crew_number"]

    shares = [read(tf.constant(worker)).numpy() for worker in range(2)]
    assert schema.num_train == 16
    assert sorted(np.concatenate(shares)) == list(range(16))


def test_tfds_errors(ships):
    with pytest.raises(ValueError, match=r"`label` must name.*'nobody'"):
        _ = ships(label="nobody").schema
    with pytest.raises(ValueError, match=r"'photo' of ships.*must be a scalar"):
        _ = ships(label="old").schema
    with pytest.raises(ValueError, match="`ignore_columns` must name"):
        _ = ships(ignore_columns=["sunk"]).schema
    schema = ships(label="old", ignore_columns=["photo", "size"]).schema
    assert [c.name for c in schema.columns] == [
        "crew_home",
        "crew_number",
        "kind",
        "sunk",
        "type",
    ]


# The click log.

SIZES = {"num_train": 3000, "num_eval": 500, "num_shards": 3}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return data.click_log_source(
        str(tmp_path_factory.mktemp("click_log")), **SIZES
    )


def test_click_log_schema(log):
    assert "SYNTHETIC" in log.description
    assert log.schema.num_train == 3000
    assert "probability" not in columns(log.schema)
    assert {c.name for c in log.schema.numeric} == {
        "hour",
        "age",
        "price",
        "position",
    }
    assert columns(log.schema)["user"].num_buckets > 1000


def test_click_log_is_what_was_drawn(log):
    drawn = click_log.draw(500, 1)
    names = sorted(columns(log.schema))
    found = rows(log.eval_input_fn(batch_size=64))
    for place, name in enumerate([*names, "clicked"]):
        np.testing.assert_array_equal(
            [row[place] for row in found], drawn[name]
        )


def test_best_auc(log):
    drawn = click_log.draw(500, 1)
    metric = tf.keras.metrics.AUC(num_thresholds=20_000)
    metric.update_state(drawn["clicked"], drawn["probability"])
    assert log.best_auc == pytest.approx(float(metric.result()), abs=2e-3)
    assert 0.75 < log.best_auc < 0.9


def test_clicks_follow_their_probability():
    drawn = click_log.draw(50_000, 0)
    for low in (0.0, 0.25, 0.5, 0.75):
        some = (low <= drawn["probability"]) & (
            drawn["probability"] < low + 0.25
        )
        assert drawn["clicked"][some].mean() == pytest.approx(
            drawn["probability"][some].mean(), abs=0.02
        )


@hypothesis.given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2)
)
def test_auc(pairs):
    labels, scores = map(np.array, zip(*pairs, strict=True))
    hypothesis.assume(0 < labels.sum() < len(labels))
    won = scores[labels][:, None] - scores[~labels][None, :]
    expected = np.mean(won > 0) + np.mean(won == 0) / 2
    assert click_log.auc(labels, scores) == pytest.approx(expected)


def test_prepared_by_two_at_once(tmp_path):
    builders = []

    def prepare():
        builders.append(
            data.prepared(
                lambda: click_log.ClickLog(data_dir=str(tmp_path), **SIZES)
            )
        )

    threads = [threading.Thread(target=prepare) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [b.info.splits["test"].num_examples for b in builders] == [500] * 3
    version = tmp_path / "click_log" / "1.0.0"
    assert [path.name for path in version.parent.iterdir()] == [version.name]


def test_failure_to_prepare_is_explained(tmp_path):
    """The network is not there; so neither is the data."""

    class Remote(click_log.ClickLog):
        def _download_and_prepare(self, dl_manager, download_config=None):
            urllib.request.urlopen("http://127.0.0.1:9/data.zip", timeout=5)

    with pytest.raises(
        OSError,
        match=r"(?s)remote/1\.0\.0 could not .* refused.*tfds build remo",
    ):
        data.prepared(lambda: Remote(data_dir=str(tmp_path)))

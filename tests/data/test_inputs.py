"""In `tfdist/data/`: readers, reading, blocks, csv_records, record_files."""

import gc
import gzip
import itertools
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from pace import slow, slow_but
from tensorflow.python.eager import context

from tfdist.data import fit_data, readers, record_files
from tfdist.data.reading import shards_by_file
from tfdist.data.worker_context import WorkerContext

FEATURES = {"x": tf.io.FixedLenFeature([], tf.int64)}


def write(path, data):
    data = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def example(**values):
    feature = {
        name: tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
        for name, value in values.items()
    }
    features = tf.train.Features(feature=feature)
    return tf.train.Example(features=features).SerializeToString()


def write_records(path, records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def numbered(folder, sizes):
    """TFRecord files of so many examples each, which count x from 0."""
    count = itertools.count()
    return [
        write_records(
            folder / f"{i:04}.tfrecord",
            [example(x=next(count)) for _ in range(size)],
        )
        for i, size in enumerate(sizes)
    ]


def column(dataset, name="x"):
    """All values of a column, in order."""
    parts = [batch[name] for batch in dataset.as_numpy_iterator()]
    return np.concatenate(parts).tolist() if parts else []


def of_workers(input_fn, workers, as_tensor):
    """Each worker's dataset, with its index as the strategies give it."""

    def dataset(worker):
        return input_fn(tf.distribute.InputContext(workers, worker, workers))

    if not as_tensor:
        return [dataset(worker) for worker in range(workers)]
    spec = dataset(0).element_spec
    # As a parameter-server job has it: traced once, the index a tensor.
    traced = tf.function(lambda i: tf.data.experimental.to_variant(dataset(i)))
    return [
        tf.data.experimental.from_variant(
            traced(tf.constant(worker, tf.int64)), spec
        )
        for worker in range(workers)
    ]


@pytest.fixture(autouse=True)
def _no_global_seed():
    yield
    tf.random.set_seed(None)


# --- Which examples a worker reads -------------------------------------------


def shares(paths, workers, as_tensor=False, **options):
    def input_fn(context):
        return readers.read_tfrecords(
            paths, FEATURES, 4, context=context, num_epochs=1, **options
        )

    return [column(d) for d in of_workers(input_fn, workers, as_tensor)]


CASES = [(1, 2, False), (3, 2, True), (16, 3, True)]
# The index is an int for one half of these, a tensor for the other.
MORE_CASES = [
    (files, workers, bool((files + workers) % 2))
    for files in (1, 2, 3, 5, 8, 13, 16)
    for workers in (2, 3, 4)
]


def check_shares(tmp_path, num_files, workers, as_tensor):
    sizes = [5 + 5 * i % 7 for i in range(num_files)]
    found = shares(numbered(tmp_path, sizes), workers, as_tensor)
    assert sorted(itertools.chain(*found)) == list(range(sum(sizes)))
    assert all(found)


@pytest.mark.slow
@pytest.mark.parametrize(("num_files", "workers", "as_tensor"), CASES)
def test_workers_share_the_examples(tmp_path, num_files, workers, as_tensor):
    check_shares(tmp_path, num_files, workers, as_tensor)


@pytest.mark.slow
@pytest.mark.parametrize(("num_files", "workers", "as_tensor"), MORE_CASES)
def test_all_share_the_examples(tmp_path, num_files, workers, as_tensor):
    check_shares(tmp_path, num_files, workers, as_tensor)


@pytest.mark.parametrize("num_files", [2, 4])
def test_the_lecture_s_mistake(tmp_path, num_files):
    """Same files, same seed: every worker sees the same batch."""
    paths = numbered(tmp_path, [12] * num_files)

    def input_fn(context):
        tf.random.set_seed(7)  # As RunConfig's does in every process.
        files = tf.data.TFRecordDataset(paths).shuffle(100).batch(4)
        return files.map(lambda r: tf.io.parse_example(r, FEATURES))

    first, second = map(column, of_workers(input_fn, 2, False))
    assert first == second
    first, second = shares(paths, 2)
    assert not set(first) & set(second)


@pytest.mark.slow
def test_shares_by_example_are_even_whatever_the_files(tmp_path):
    paths = numbered(tmp_path, [1] * 3 + [2] * 4)
    found = shares(paths, 3, shard_by="example", shuffle=False)
    assert max(map(len, found)) - min(map(len, found)) <= 4
    assert sorted(itertools.chain(*found)) == list(range(11))
    # One file and no rest: the first to the first, and so on.
    (tmp_path / "one").mkdir()
    one = numbered(tmp_path / "one", [6])
    assert shares(one, 3, shuffle=False) == [[0, 3], [1, 4], [2, 5]]


def test_by_file_or_by_example():
    with pytest.raises(ValueError, match="2 files for 3 workers"):
        shards_by_file(2, 3, "file")
    assert shards_by_file(5, 4, "file")
    assert not shards_by_file(8, 4, "example")


def test_fewer_examples_than_workers(tmp_path):
    """In a pass some have none; each reads everything in the end."""
    paths = numbered(tmp_path, [2])
    context = tf.distribute.InputContext(4, 3, 4)
    dataset = readers.read_tfrecords(
        paths, FEATURES, 2, context=context, num_epochs=4
    )
    assert sorted(column(dataset)) == [0, 1]


def one_of_the_passes(paths, number, workers, as_tensor=False, **options):
    """What each worker reads in the pass of a number."""

    def input_fn(context):
        context = WorkerContext(
            workers, context.input_pipeline_id, tf.constant(number, tf.int64)
        )
        dataset = readers.read_tfrecords(
            paths, FEATURES, 4, context=context, num_epochs=1, **options
        )
        assert not context.fixed_share
        return dataset

    return [column(d) for d in of_workers(input_fn, workers, as_tensor)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_files", "as_tensor"), [(1, True), (2, False), (6, True)]
)
def test_every_pass_deals_again(tmp_path, num_files, as_tensor):
    """Nobody twice in a pass; each reads everything in as many passes."""
    paths = numbered(tmp_path, [30 // num_files + i for i in range(num_files)])
    everything = sorted(itertools.chain(*shares(paths, 1)))
    workers = range(3 if num_files > 1 else 2)
    passes = [
        one_of_the_passes(paths, 6 + number, len(workers), as_tensor, seed=5)
        for number in workers
    ]
    for found in passes:
        assert sorted(itertools.chain(*found)) == everything
    for worker in workers:
        alone = [found[worker] for found in passes]
        assert sorted(itertools.chain(*alone)) == everything
        assert alone[0] != alone[1]


@pytest.mark.slow
def test_passes_follow_each_other(tmp_path):
    """One that goes on reads what one that begins there would."""
    paths = numbered(tmp_path, [31])
    context = tf.distribute.InputContext(2, 1, 2)
    several = readers.read_tfrecords(
        paths, FEATURES, 5, context=context, num_epochs=2, seed=1
    )
    alone = [
        one_of_the_passes(paths, number, 2, seed=1)[1] for number in range(2)
    ]
    found = column(several)
    for own in alone:
        assert sorted(found[: len(own)]) == sorted(own)
        del found[: len(own)]
    assert not found


@pytest.mark.parametrize("attempt", range(4))
def test_passes_follow_each_other_without_a_seed(tmp_path, attempt):
    """What is parsed at once, all of a pass here, stays in order."""
    paths = numbered(tmp_path, [2000])
    firsts = [
        readers.read_tfrecords(paths, FEATURES, 100, context=context).take(10)
        for context in (
            tf.distribute.InputContext(2, worker, 2) for worker in range(2)
        )
    ]
    found = itertools.chain(*map(column, firsts))
    assert sorted(found) == list(range(2000))


@pytest.mark.slow
@pytest.mark.parametrize("num_files", [1, 4])
def test_who_begins_again_begins_elsewhere(tmp_path, num_files):
    """Ten lives, each of a tenth of the data: more than a tenth is seen."""
    size = 12_000
    for i in range(num_files):
        lines = range(i, size, num_files)
        write(tmp_path / f"{i}.txt", "".join(f"{line:08}\n" for line in lines))

    def life(first_pass):
        context = WorkerContext(1, 0, tf.constant(first_pass, tf.int64))
        dataset = readers.read_text(
            str(tmp_path / "*.txt"),
            100,
            context=context,
            seed=3,
            shuffle_buffer_size=50,
        )
        found = dataset.take(size // 1000)
        return {int(line) for batch in found for line in batch.numpy()}

    lives = [life(97 * number) for number in range(10)]
    assert life(97) == lives[1]
    assert len(set().union(*lives)) > 0.4 * size


def test_a_thousand_files(tmp_path):
    paths = numbered(tmp_path, [1] * 1000)
    (share,) = shares([str(tmp_path / "*.tfrecord")], 1)
    assert sorted(share) == list(range(len(paths)))


@pytest.mark.parametrize("kind", slow_but(["arrays"], ["lines", "arrays"]))
def test_a_process_may_read_often(tmp_path, kind):
    """As one that tunes: no function stays behind that read is done with."""
    path = tmp_path / "lines.txt"
    path.write_text("a\nb\n")
    arrays = np.zeros([4, 1])

    def functions():
        if kind == "lines":
            dataset = readers.read_text([str(path)], batch_size=1)
        else:
            dataset = fit_data.input_fns(arrays, "train")[1]()
        next(iter(dataset))
        del dataset
        gc.collect()
        return len(context.context().list_function_names())

    first = [functions() for _ in range(2)]
    assert functions() == functions() == first[-1]


# --- Shuffling ---------------------------------------------------------------


@pytest.mark.slow
def test_order(tmp_path):
    paths = numbered(tmp_path, [300, 40])

    def order(size=340, **options):
        dataset = readers.read_tfrecords(paths, FEATURES, 20, **options)
        return column(dataset.take(size // 20))

    first = order(680, seed=1)
    assert first == order(680, seed=1)
    assert first != order(680, seed=2)
    assert first[:340] != first[340:]
    assert sorted(first[:340]) == sorted(first[340:]) == list(range(340))
    assert order(shuffle=False, num_epochs=1) == list(range(340))
    # None set: by chance; set for all of TensorFlow: as that says.
    assert order() != order()
    tf.random.set_seed(5)
    seeded = order()
    assert seeded == order()
    context = tf.distribute.InputContext(2, 1, 2)
    other = order(160, context=context)
    assert [x for x in seeded if x in other] != other


@pytest.mark.parametrize("seed", [0, 1])
def test_global_seed(tmp_path, seed):
    """Of 0, too, which TensorFlow compares with the seeds of operations."""
    paths = numbered(tmp_path, [30])
    tf.random.set_seed(seed)
    dataset = readers.read_tfrecords(paths, FEATURES, 5, num_epochs=2)
    first = column(dataset)
    assert first == column(dataset)
    assert sorted(first[:30]) == sorted(first[30:]) == list(range(30))
    assert first[:30] != first[30:]


def test_settings_of_the_dataset(tmp_path):
    paths = numbered(tmp_path, [10])

    def read(**options):
        return readers.read_tfrecords(paths, FEATURES, 4, **options)

    endless = read(seed=1)
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
    assert endless.element_spec["x"].shape == [4]
    settings = endless.options()
    assert settings.experimental_distribute.auto_shard_policy == (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    assert settings.deterministic
    assert read(num_epochs=1).element_spec["x"].shape == [None]
    static = read(num_epochs=1, drop_remainder=True)
    assert static.element_spec["x"].shape == [4]
    assert len(column(static)) == 8
    user = tf.data.Options()
    user.deterministic = False
    assert not endless.with_options(user).options().deterministic


@pytest.mark.slow
def test_fewer_examples_than_a_batch(tmp_path):
    paths = numbered(tmp_path, [3])
    endless = readers.read_tfrecords(paths, FEATURES, 8)
    assert len(column(endless.take(2))) == 16
    once = readers.read_tfrecords(paths, FEATURES, 8, num_epochs=1)
    assert sorted(column(once)) == [0, 1, 2]
    static = readers.read_tfrecords(
        paths, FEATURES, 8, num_epochs=1, drop_remainder=True
    )
    assert column(static) == []


def test_transform_sees_labels(tmp_path):
    paths = numbered(tmp_path, [3])
    dataset = readers.read_tfrecords(
        paths,
        FEATURES,
        3,
        label_key="x",
        num_epochs=1,
        transform=lambda features, label: ({"y": label + 1}, label),
    )
    ((features, label),) = dataset.as_numpy_iterator()
    assert features["y"].tolist() == (label + 1).tolist()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_epochs": 0}, ValueError, "`num_epochs` must be at least 1"),
        ({"shuffle_buffer_size": 0}, ValueError, "`shuffle_buffer_size`"),
        ({"shard_by": "row"}, ValueError, "'file', 'example'.*'row'"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
        ({"batch_size": None}, TypeError, "`batch_size` must be an integer"),
        ({"label_key": "y"}, ValueError, r"one of the features: \['x'\]"),
        ({"sead": 1}, TypeError, "sead"),
    ],
)
def test_bad_options(tmp_path, options, error, message):
    paths = numbered(tmp_path, [3])
    with pytest.raises(error, match=message):
        readers.read_tfrecords(paths, FEATURES, **{"batch_size": 2, **options})


# --- Positions ---------------------------------------------------------------


def test_position(tmp_path):
    """Resumed exactly, in the middle of a pass."""
    paths = numbered(tmp_path, [100, 200])

    def batches():
        return iter(readers.read_tfrecords(paths, FEATURES, 10, seed=3))

    before = batches()
    for _ in range(17):
        next(before)
    saved = tf.train.Checkpoint(iterator=before).write(str(tmp_path / "ckpt"))
    expected = [next(before)["x"].numpy().tolist() for _ in range(60)]
    after = batches()
    tf.train.Checkpoint(iterator=after).read(saved).assert_consumed()
    assert [next(after)["x"].numpy().tolist() for _ in range(60)] == expected


# --- CSV ---------------------------------------------------------------------


def rows(paths, **options):
    dataset = readers.read_csv(
        paths, 100, shuffle=False, num_epochs=1, **options
    )
    return list(dataset.as_numpy_iterator())


def test_csv(tmp_path):
    write(
        tmp_path / "a.csv",
        '\ufeffn,s,f,y\r\n1,"a\r\nb",nan,0\r\n\r\n2,"c ""d"", e",,1\r\n',
    )
    write(tmp_path / "b.csv.gz", '"n",s , f,y\n3,"\n\n",-inf,0\n\n')
    write(tmp_path / "c.csv", "n,s,f,y\n")
    write(tmp_path / "d.csv", "")
    ((features, label),) = rows(str(tmp_path / "*.csv*"), label_name="y")
    assert features["n"].tolist() == [1, 2, 3]
    assert features["n"].dtype == label.dtype == np.int64
    assert features["s"].tolist() == [b"a\nb", b'c "d", e', b"\n\n"]
    np.testing.assert_array_equal(features["f"], [np.nan, np.nan, -np.inf])
    assert label.tolist() == [0, 1, 0]


def test_types_from_all_rows(tmp_path):
    """Of all files, where the first rows do not tell."""
    write(tmp_path / "a.csv", "n,m,s,e\n1,1,1,?\n")
    write(tmp_path / "b.csv", "n,m,s,e\n?,2,x,\n3,1.5,2,?\n\n")
    (features,) = rows(
        str(tmp_path / "*.csv"), na_value="?", num_rows_for_inference=None
    )
    np.testing.assert_array_equal(features["n"], [1, np.nan, 3])
    assert features["m"].tolist() == [1, 2, 1.5]
    assert features["s"].tolist() == [b"1", b"x", b"2"]
    assert features["e"].tolist() == [b"", b"", b""]


def test_csv_that_holds_its_header_again(tmp_path):
    """A row of words among words, unless it is no row, or may be a word."""
    for text in ("a,b\n1,x\n\ufeffa,b\n2,y\n", '"a",b\nx,y\n\n"a",b\n'):
        path = write(tmp_path / "twice.csv", text)
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="the header again"
        ):
            rows(path)
    (features,) = rows(write(tmp_path / "a.csv", 'a,b\n1,"x\na,b\n"\n'))
    assert features["b"].tolist() == [b"x\na,b\n"]
    (words,) = rows(write(tmp_path / "b.csv", "word\nany\nword\n"))
    assert words["word"].tolist() == [b"any", b"word"]


def test_csv_is_read_where_a_function_is_traced(tmp_path):
    """As on parameter servers, where the input function of a worker is."""
    path = write(tmp_path / "a.csv", "a,y\n1,0\n2,1\n")

    def total():
        dataset = readers.read_csv(path, 2, label_name="y", num_epochs=1)
        return dataset.reduce(tf.zeros([], tf.int64), add)

    def add(total, batch):
        return total + tf.reduce_sum(batch[0]["a"])

    assert int(tf.function(total, autograph=False)()) == 3


def test_types_from_the_first_file_with_a_row(tmp_path):
    """Of a header alone, as Spark writes some, all columns were strings."""
    write(tmp_path / "0.csv", "a,b\n\n")
    write(tmp_path / "1.csv", "a,b\n5,0.5\n")
    write(tmp_path / "2.csv", "a,b\n6,x\n")
    found = readers.csv_columns(str(tmp_path / "*.csv"))
    assert found["a"] is tf.int64
    assert np.isnan(found["b"])


def test_csv_without_header(tmp_path):
    path = write(tmp_path / "a.csv", '\ufeff1;x"y;NA\n2;z;5\n')
    (features,) = rows(
        path,
        column_names=["a", "b", "c"],
        column_defaults={"c": 7},
        select_columns=["c", "b"],
        field_delim=";",
        use_quote_delim=False,
        na_value="NA",
    )
    assert sorted(features) == ["b", "c"]
    assert features["b"].tolist() == [b'x"y', b"z"]
    assert features["c"].tolist() == [7, 5]


def test_csv_defaults_as_for_decode_csv(tmp_path):
    path = write(tmp_path / "a.csv", "a,b,c\n1,x,2\n,,3\n")
    (features,) = rows(path, column_defaults=[[7], ("",), []])
    assert features["a"].tolist() == [1, 7]
    assert features["b"].tolist() == [b"x", b""]
    assert features["c"].dtype == "float32"


@pytest.mark.slow
def test_csv_with_long_quotes_across_blocks(tmp_path):
    """Records of several lines are shared out as records, not as lines."""
    text = "".join(f'{i},"{i}\n\n{"z" * (i % 5)}"\n' for i in range(700))
    path = write(tmp_path / "a.csv", "x,s\n" + text)

    def input_fn(context):
        return readers.read_csv(path, 50, num_epochs=1, context=context)

    found = [column(d) for d in of_workers(input_fn, 3, False)]
    assert sorted(itertools.chain(*found)) == list(range(700))
    assert {len(share) for share in found} == {233, 234}
    (features,) = rows(path, transform=lambda f: f, select_columns=["s"])[:1]
    assert features["s"][7] == b"7\n\nzz"


def test_no_example_at_all(tmp_path):
    paths = [write(tmp_path / "a.csv", "x,y\n"), write(tmp_path / "b.csv", "")]
    assert rows(paths) == []
    with pytest.raises(ValueError, match=f"no example.*{paths[0]}"):
        readers.read_csv(paths, 2)


HEADER = "a,b,y\n"
GOOD = "1,x,0\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (HEADER + GOOD + "2,y\n", 3, "expected 3 fields.*Received: 2,y"),
        (HEADER + GOOD + '2,"y,0\n' + GOOD, 3, "a quote is opened there"),
        ("b,a,y\n" + GOOD, 1, "header of .*good.csv, a,b,y.*: b,a,y"),
        ((HEADER + GOOD) * 2, 3, "the header again"),
        *slow(
            (HEADER + GOOD * 400 + "2,y,0,9\n", 402, "3 fields: a .int64"),
            (HEADER + GOOD * 1500 + ",y,0\n", 1502, "a .int64, required"),
            (HEADER + GOOD * 1500 + "1.5,y,0\n", 1502, "Received: 1.5,y,0"),
            (HEADER + '"1\n",x,0\n\n3,"z"z,0\n', 5, "Received: 3,.*z.*z,0"),
            ("a,b\n" + GOOD, 1, "a,b,y. Received: a,b"),
            (GOOD, 1, "Received: 1,x,0"),
        ),
    ],
)
def test_bad_csv(tmp_path, text, line, message):
    good = write(tmp_path / "a-good.csv", HEADER + GOOD * 1200)
    bad = write(tmp_path / "bad.csv", text)
    dataset = readers.read_csv([good, bad], 32, num_epochs=1)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"{bad}, line {line}: .*{message}",
    ):
        list(dataset)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "line 1: expected a header"),
        ("a,a\n1,2\n", {}, r"be different and not.*Received: \['a', 'a'\]"),
        (b"\xe9,b\n1,2\n", {}, "in UTF-8 and without.*'b'"),
        ('"a\nb",c\n1,2\n', {}, "in UTF-8 and without line breaks"),
        (",b\n0,2\n", {}, "pandas writes an empty one for its index"),
        (HEADER, {"label_name": "z"}, "`label_name` must name a column.*'z'"),
        (HEADER, {"select_columns": ["z"]}, "`select_columns` must name"),
        (HEADER, {"column_defaults": {"z": 1}}, r"name columns.*\['z'\]"),
        (HEADER, {"column_defaults": [1]}, "each of the 3.*Received: 1 entr"),
        (HEADER, {"column_defaults": {"a": [1, 2]}}, r"column 'a'.*\[1, 2\]"),
    ],
)
def test_bad_csv_arguments(tmp_path, text, options, message):
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(ValueError, match=message):
        readers.read_csv(path, 2, **options)


# --- Files -------------------------------------------------------------------


def test_a_file_that_is_named_twice(tmp_path, caplog):
    path = write(tmp_path / "a.txt", "x\n")
    with caplog.at_level(logging.WARNING, "tfdist"):
        found = record_files.match([path, str(tmp_path / "*.txt")])
    assert found == [path]
    assert re.search(rf"1 of the files .*{path} among them", caplog.text)


def test_other_names_of_a_file(tmp_path, caplog, monkeypatch):
    """Each was a file of its own, and its examples read as often."""
    write(tmp_path / "a.txt", "1\n")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    monkeypatch.chdir(tmp_path)
    names = ["a.txt", str(tmp_path / "*.txt"), f"file://{tmp_path}/a.txt"]
    with caplog.at_level(logging.WARNING, "tfdist"):
        (lines,) = readers.read_text(names, 9, num_epochs=1)
    assert lines.numpy().tolist() == [b"1"]
    assert "3 of the files are named more than once" in caplog.text


def test_a_bracket_in_a_name(tmp_path):
    """As a pattern, `part[0]` is `part0`, which was read instead."""
    path = write(tmp_path / "part[0].txt", "1\n")
    assert record_files.match(path) == [path]
    write(tmp_path / "part0.txt", "2\n")
    assert record_files.match(path) == [path]


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_what_is_no_file(tmp_path, kind):
    """At once: a pattern may match it after thousands of files."""
    write(tmp_path / "a", "1\n")
    path = tmp_path / "b"
    {
        "directory": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "nowhere"),
    }[kind]()
    with pytest.raises(ValueError, match=f"{path} is no file, but"):
        readers.read_text(str(tmp_path / "*"), 1)
    with pytest.raises((ValueError, FileNotFoundError), match=str(path)):
        readers.read_text(str(path), 1)


def test_no_file_matches(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"No file matches.*none-\*"):
        readers.read_text([str(tmp_path / "none-*")], 2)
    with pytest.raises(ValueError, match="`file_pattern` must be a path"):
        readers.read_text([], 2)


def test_a_file_that_vanishes(tmp_path):
    path = write(tmp_path / "a", "1\n")
    dataset = readers.read_text(path, 1)
    Path(path).unlink()
    with pytest.raises(tf.errors.NotFoundError, match=path):
        next(iter(dataset))


def test_text(tmp_path):
    paths = [write(tmp_path / "a", "1\n\n2"), write(tmp_path / "b.gz", "3\r\n")]
    (lines,) = readers.read_text(paths, 9, shuffle=False, num_epochs=1)
    assert lines.numpy().tolist() == [b"1", b"", b"2", b"3"]


def damaged(path, data, kind):
    data = bytearray(data)
    if kind == "cut off":
        del data[-7:]
    elif kind == "damaged":
        data[len(data) // 2] ^= 255
    elif kind == "not compressed":
        path = path.with_suffix(".gz")
    elif kind == "compressed":
        data = gzip.compress(data)
    path.write_bytes(data)
    return str(path)


# 251 records are a block, of which TensorFlow tells whether it was the last.
DAMAGES = itertools.product(
    ["whole", "cut off", "damaged", "compressed"], [1, 251, 252, 502]
)


@pytest.mark.parametrize(
    ("kind", "size"), [("cut off", 251), ("damaged", 252), *slow(*DAMAGES)]
)
def test_damaged_tfrecords(tmp_path, size, kind):
    records = [example(x=1000)] * size
    data = Path(write_records(tmp_path / "a", records)).read_bytes()
    path = damaged(tmp_path / "other.tfrecord", data, kind)
    dataset = readers.read_tfrecords(path, FEATURES, 16, num_epochs=1)
    if kind == "whole":
        assert len(column(dataset)) == size
        return
    place = {"cut off": size, "damaged": size // 2 + 1, "compressed": 1}[kind]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"{path}, record {place}: the file cannot be read from there on",
    ):
        list(dataset)


def test_a_record_that_is_no_such_example(tmp_path):
    records = [example(x=1)] * 20 + [example(z=1)] + [example(x=1)] * 20
    path = write_records(tmp_path / "a", records)
    dataset = readers.read_tfrecords(path, FEATURES, 4)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=f"{path}, record 21: expected a tf.train.Example with x: Fixed",
    ):
        list(dataset.take(20))


@pytest.mark.parametrize("kind", ["cut off", "damaged", "not compressed"])
def test_damaged_gzip(tmp_path, kind, caplog, monkeypatch):
    text = "".join(f"{i}\n" for i in range(1000)).encode()
    data = text if kind == "not compressed" else gzip.compress(text)
    path = damaged(tmp_path / "a.gz", data, kind)
    with pytest.raises(ValueError, match=f"{path} is not a complete gzip"):
        readers.read_text(path, 10)
    # Unasked, TensorFlow finds it when it is there, and not who it is.
    unchecked = readers.read_text(path, 10, check_gzip=False, num_epochs=1)
    if kind != "cut off":
        with pytest.raises(tf.errors.DataLossError):
            list(unchecked)
    # Too many to be checked unasked.
    monkeypatch.setattr(record_files, "CHECKED_GZIP_BYTES", 10)
    with caplog.at_level(logging.WARNING, "tfdist"):
        readers.read_text(path, 10)
    assert "1 gzip files of 0.0 GB are not checked" in caplog.text


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ("a,b\n1,2\n".encode("utf-16"), "in UTF-16"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"PAR1rest", "a Parquet file"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), "its name must end in .gz"),
        ("a,b\n1,2\n".encode("utf-16-le"), "first line has zero bytes"),
    ],
)
def test_what_is_no_text(tmp_path, data, kind):
    path = tmp_path / "table.csv"
    path.write_bytes(data)
    message = rf"{path} is no text in UTF-8.*{kind}"
    with pytest.raises(ValueError, match=message):
        readers.read_csv(str(path), 2)
    with pytest.raises(ValueError, match=message):
        readers.read_text(str(path), 2)
    good = write(tmp_path / "a.csv", "1,2\n")  # Is read first.
    with pytest.raises(ValueError, match=message):
        readers.read_csv([good, str(path)], 2, column_names=["a", "b"])
    with pytest.raises(ValueError, match=message):
        readers.read_text([good, str(path)], 2)


def test_lines_that_end_in_cr(tmp_path):
    """TensorFlow would take the file for one line, and 1, 2 for 12."""
    path = tmp_path / "macintosh.csv"
    path.write_bytes(b"a\r1\r2\r")
    last = write(tmp_path / "last_macintosh.csv", "a,b\r1,2\r\n")
    packed = write(tmp_path / "macintosh.csv.gz", "a,b\r1,2\r")
    for read in (readers.read_csv, readers.read_text):
        for each in (str(path), last, packed):
            with pytest.raises(ValueError, match=f"of {each} end in CR"):
                read(each, 2, num_epochs=1)
    whole = write(tmp_path / "windows.csv", "a,b\r\r\n1,2\r\r\n")
    assert rows(whole)[0]["b"].tolist() == [2]


def test_a_long_field_ends_no_inference(tmp_path):
    """Python's csv module reads 128 KiB of one."""
    path = write(tmp_path / "0.csv", f"text,n\n{'a' * 140_000},1\nb,2.5\n")
    found = readers.csv_columns(str(path))
    assert found["text"] == ""
    assert np.isnan(found["n"])


def test_digits_that_only_python_reads_are_text(tmp_path):
    path = write(tmp_path / "0.csv", "n,text\n1,\u0663\n")
    assert readers.csv_columns(str(path)) == {"n": tf.int64, "text": ""}


@pytest.mark.parametrize(
    ("values", "doubtful"),
    [
        ("16777217,?", True),
        ("18446744073709551615,18446744073709551614", True),
        ("16777216,?", False),
        ("16777217,0.5", False),  # A quantity.
        ("9223372036854775807,-16777217", False),
    ],
)
def test_ids_that_would_be_equal_are_named(tmp_path, caplog, values, doubtful):
    path = write(tmp_path / "a.csv", values.replace(",", "\n"))
    with caplog.at_level(logging.WARNING, "tfdist"):
        found = readers.csv_columns(path, column_names=["id"], na_value="?")
    assert (found["id"] is tf.int64) == values.startswith("92")
    assert ("'id' has integers that float32" in caplog.text) == doubtful


def test_errors_about_other_bytes_name_the_file(tmp_path):
    """Not `'utf-8' codec can't decode byte`."""
    write(tmp_path / "0.csv", "a,b\n1,2\n")
    path = tmp_path / "1.csv"
    path.write_bytes("a,b\n1,2\n".encode("utf-16"))
    rows = readers.read_csv(
        str(tmp_path / "*.csv"), 2, num_epochs=1, shuffle=False
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{path}, line 1"):
        list(rows)

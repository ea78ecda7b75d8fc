"""Which dataset a position is of."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist._tf import private_positions
from tfdist._tf.private_positions import HeldPosition, restore_position
from tfdist.data import read_csv

ROOT = Path(__file__).parents[2]
Data = tf.data.Dataset


def pipelines(csv):
    """Of each kind two that differ in one thing."""
    drawn = tf.random.uniform([], 1 << 61, 1 << 62, dtype=tf.int64)
    lookup = keras.layers.StringLookup
    return {
        "constants": [Data.range(n).map(lambda i: i + 1) for n in (3, 4)],
        "functions": [
            Data.range(3).map(
                lambda i, k=k: tf.cond(i > k, lambda: i, lambda: -i)
            )
            for k in (1, 2)
        ],
        "arrays": [
            Data.from_tensor_slices(np.arange(99.0) + n) for n in (0, 1)
        ],
        "batches": [
            Data.range(99).shuffle(9).repeat().batch(n).prefetch(2)
            for n in (2, 3)
        ],
        "vocabularies": [
            Data.from_tensor_slices(["a"]).map(lookup(vocabulary=["a", last]))
            for last in "bc"
        ],
        "buckets": [
            Data.range(9)
            .map(tf.range)
            .bucket_by_sequence_length(tf.size, [5], [2, n])
            for n in (2, 3)
        ],
        "a seed that is given": [
            Data.range(n).map(lambda i: i + drawn) for n in (5, 6)
        ],
        "a number that is given": [
            Data.range(9).map(lambda i, day=day: i + day)
            for day in tf.constant([1, 20261124], tf.int64)
        ],
        "shuffled in a function": [
            Data.range(n).flat_map(lambda i: Data.range(i).shuffle(2))
            for n in (5, 6)
        ],
        "files": [read_csv(csv, n, label_name="y") for n in (4, 5)],
    }


def digest_of(dataset):
    return private_positions.digest_of(private_positions.graph_of(dataset))


def digests(csv):
    """Of each pipeline, which the process has begun to number somewhere."""
    found = pipelines(csv).items()
    return {name: [*map(digest_of, pair)] for name, pair in found}


@pytest.fixture
def csv(tmp_path):
    tf.random.set_seed(None)  # With one, files are read in another way.
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + "1,2\n" * 20)
    return str(path)


def test_datasets_that_differ(csv):
    for name, (first, second) in digests(csv).items():
        assert first != second, name


def test_the_same_dataset_made_again(csv):
    first = digests(csv)
    iter(tf.data.Dataset.range(3).shuffle(2))
    assert digests(csv) == first


def test_a_function_that_shuffles(csv):
    digests = set()
    for seed in (1, 2, 3):
        tf.random.set_seed(seed)
        shuffled = Data.range(9).flat_map(lambda i: Data.range(i).shuffle(2))
        digests.add(digest_of(shuffled.shuffle(3)))
    assert len(digests) == 1


def test_a_file_that_is_replaced(tmp_path):
    path, log = tmp_path / "day.csv", tmp_path / "log.txt"
    log.write_text("a line\n" * 1000)

    def digest(path):
        files = Data.from_tensors(str(path))
        return digest_of(files.flat_map(tf.data.TextLineDataset).repeat())

    found = []
    for day in (1, 2, 2):
        path.write_text(f"day,x\n{day},0\n")
        found.append(digest(path))
    assert found[0] != found[1] == found[2]
    before = digest(log)
    with log.open("a") as file:
        file.write("another line\n")
    assert digest(log) == before


def restored(make, num):
    """What a dataset has, `num` of it before its position was restored."""
    iterator = iter(make())
    found = [next(iterator) for _ in range(num)]
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoint.write(f"{directory}/position")
        iterator = iter(make())
        tf.train.Checkpoint(iterator=iterator).read(path)
        return np.ravel([*found, *iterator]).tolist()


def test_what_tensorflow_restores_with_rows_missing(tmp_path):
    """A canary; such positions are not saved."""
    path = tmp_path / "a.csv"
    path.write_text("".join(f"{i}\n" for i in range(10)))

    def make(header):
        csv = tf.data.experimental.CsvDataset
        return csv([str(path)], [tf.int64], header=header)

    assert restored(lambda: make(False), 2) == [*range(10)]
    HeldPosition(iter(make(False))).hold()
    assert restored(lambda: make(True), 2) == [1, 2]
    position = HeldPosition(iter(make(True).batch(2)))
    with pytest.raises(tf.errors.UnimplementedError, match="loses rows"):
        position.hold()


def mixed(other, **options):
    datasets = [Data.range(2), other]
    return Data.sample_from_datasets(datasets, [0.5, 0.5], 3, **options)


def test_what_tensorflow_restores_without_an_end():
    """Such positions are not saved."""
    for dataset in (
        mixed(Data.range(3)).repeat(),
        Data.range(3).flat_map(lambda _: mixed(Data.range(3))),
        mixed(Data.range(3).repeat().take(5)),
        mixed(Data.range(3).repeat(2)),
    ):
        position = HeldPosition(iter(dataset))
        with pytest.raises(tf.errors.UnimplementedError, match="end of all"):
            position.hold()
    for dataset in (
        mixed(Data.range(3).shuffle(2).repeat().map(lambda i: i).prefetch(1)),
        mixed(Data.range(3), stop_on_empty_dataset=True).repeat(),
    ):
        HeldPosition(iter(dataset)).hold()


@pytest.mark.parametrize("again", ["repeat first", "repeat last"])
def test_an_order_that_tensorflow_does_not_save(again, tmp_path, caplog):
    """Also a canary: it saves none at the end of a pass."""

    def make():
        shuffled = Data.range(10).shuffle(10, seed=3)
        if again == "repeat first":
            return shuffled.repeat(3).batch(5)
        return shuffled.batch(4).repeat(3)

    num = 2 if again == "repeat first" else 3
    exact = again == "repeat first"
    iterator = iter(make())
    for _ in range(num):
        next(iterator)
    position = HeldPosition(iterator)
    position.hold()
    saved = tf.train.Checkpoint(iterator=position)
    path = saved.write(str(tmp_path / "position"))
    other = iter(make())
    assert restore_position(other, path)
    rest = [np.concatenate([*each]).tolist() for each in (iterator, other)]
    assert (rest[0] == rest[1]) is exact
    assert ("same orders come again" not in caplog.text) is exact


def test_a_snapshot_that_is_being_written(tmp_path):
    snapshot = Data.range(9).snapshot(str(tmp_path)).repeat()
    with pytest.raises(tf.errors.UnimplementedError, match="snapshot"):
        HeldPosition(iter(snapshot)).hold()


@pytest.mark.slow
def test_the_same_dataset_in_another_process(csv):
    code = (
        "import json, sys; from tests._tf.test_positions import digests; "
        "print(json.dumps(digests(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, csv],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        timeout=120,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == digests(csv)

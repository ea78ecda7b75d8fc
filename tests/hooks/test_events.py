import gc
import glob
import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator,
)

from tfdist.hooks import events
from tfdist.hooks.events import (
    EventFile,
    ScalarReader,
    event_file,
    read_scalars,
)

SCALARS = {"loss": 0.5, "auc": 0.75}


def records(path):
    """The events of a file, without the fields that differ in each write."""
    found = []
    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
        event = tf.compat.v1.Event.FromString(record)
        event.ClearField("wall_time")
        event.ClearField("source_metadata")
        for value in event.summary.value:
            array = tf.make_ndarray(value.tensor)
            value.tensor.CopyFrom(tf.make_tensor_proto(array))
        found.append(event)
    return found


def test_scalars_are_written_as_tf_summary_writes_them(tmp_path):
    file = EventFile(str(tmp_path / "ours"))
    for name, value in SCALARS.items():
        file.write(3, {name: value})
    writer = tf.summary.create_file_writer(str(tmp_path / "theirs"))
    with writer.as_default(step=3):
        for name, value in SCALARS.items():
            tf.summary.scalar(name, value)
    writer.close()
    (ours,) = (tmp_path / "ours").iterdir()
    (theirs,) = (tmp_path / "theirs").iterdir()
    assert ours.name.startswith("events.out.tfevents.")
    assert records(ours) == records(theirs)


def test_a_histogram_of_counts(tmp_path):
    file = EventFile(str(tmp_path))
    file.write(1, {}, {"staleness": np.array([5, 0, 2])})
    (path,) = tmp_path.iterdir()
    (value,) = records(path)[1].summary.value
    assert value.metadata.plugin_data.plugin_name == "histograms"
    np.testing.assert_array_equal(
        tf.make_ndarray(value.tensor), [[0, 1, 5], [1, 2, 0], [2, 3, 2]]
    )


def test_no_file_without_an_event(tmp_path):
    EventFile(str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_one_file_for_a_directory(tmp_path):
    directory = tmp_path / "rate=[0.1]"  # No pattern.
    for step, kind in enumerate((str, Path, "{}/".format), 1):
        file = event_file(kind(directory))
        file.write(step, SCALARS)
    assert len(list(directory.iterdir())) == 1
    assert read_scalars(str(directory)) == dict.fromkeys((1, 2, 3), SCALARS)


def test_a_directory_that_is_made_again_gets_a_file_again(tmp_path):
    """The model_dir is removed between two jobs of one process."""
    for step in (1, 2):
        file = event_file(str(tmp_path / "job"))
        file.write_start(step)
        file.write(step, SCALARS)
        assert read_scalars(str(tmp_path / "job")) == {step: SCALARS}
        shutil.rmtree(tmp_path / "job")


# --- Reading -----------------------------------------------------------------


def test_reads_what_tf1_wrote_in_order_of_steps(tmp_path):
    with tf.Graph().as_default():
        writer = tf.compat.v1.summary.FileWriter(str(tmp_path))
        for step in (20, 10):
            value = tf.compat.v1.Summary.Value(tag="auc", simple_value=step)
            summary = tf.compat.v1.Summary(value=[value])
            writer.add_summary(summary, step)
        writer.close()
    scalars = read_scalars(str(tmp_path))
    assert list(scalars.items()) == [(10, {"auc": 10.0}), (20, {"auc": 20.0})]


def test_reads_scalars_alone(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default(step=1):
        tf.summary.scalar("loss", 2.0)
        tf.summary.histogram("h", [1.0, 2.0])
        tf.summary.text("t", "text")
    writer.close()
    assert read_scalars(str(tmp_path)) == {1: {"loss": 2.0}}


def test_the_later_file_counts(tmp_path):
    for value in (1.0, 2.0):
        file = EventFile(str(tmp_path))
        file.write(1, {"loss": value})
    assert read_scalars(str(tmp_path)) == {1: {"loss": 2.0}}


@pytest.mark.parametrize("cut", [1, 30])
def test_reads_a_file_that_is_being_written(tmp_path, cut):
    file = EventFile(str(tmp_path))
    file.write(1, {"loss": 1.0})
    file.write(2, {"loss": 2.0})
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_scalars(str(tmp_path)) == {1: {"loss": 1.0}}


def test_nothing_to_read(tmp_path):
    assert read_scalars(str(tmp_path / "missing")) == {}


# --- What TensorBoard makes of it --------------------------------------------


def test_tensorboard_forgets_what_is_void(tmp_path):
    file = EventFile(str(tmp_path))
    file.write_start(1)
    for step in (1, 4, 7):
        file.write(step, {"loss": 1.0})
    file.write_start(5)
    file.write(7, {"loss": 2.0})
    shown = EventAccumulator(str(tmp_path)).Reload().Tensors("loss")
    values = [(e.step, float(tf.make_ndarray(e.tensor_proto))) for e in shown]
    assert values == [(1, 1.0), (4, 1.0), (7, 2.0)]


def test_few_files_stay_open(tmp_path):
    """A process may train many models, each in its own directory."""
    for trial in range(40):
        event_file(str(tmp_path / str(trial))).write(1, SCALARS)
    gc.collect()
    links = map(os.path.realpath, glob.glob("/proc/self/fd/*"))
    assert (
        0
        < sum(link.startswith(os.path.realpath(tmp_path)) for link in links)
        <= 32
    )
    assert len([*tmp_path.glob("*/events*")]) == 40


def test_who_reads_again_reads_what_is_new_alone(tmp_path, monkeypatch):
    """Hooks read again after each of a job's thousand evaluations."""
    number = mock.Mock(side_effect=events._number)
    monkeypatch.setattr(events, "_number", number)
    file, reader = EventFile(str(tmp_path)), ScalarReader(str(tmp_path))
    for step, new in enumerate([100, 3, 0, 1]):
        for _ in range(new):
            file.write(step, SCALARS)
        number.reset_mock()
        scalars = reader.read()
        assert number.call_count == new * len(SCALARS)
        assert scalars == read_scalars(str(tmp_path))
    assert [*scalars] == [0, 1, 3]


def test_a_reader_goes_on_where_a_record_was_cut_off(tmp_path):
    whole, reader = EventFile(str(tmp_path)), ScalarReader(str(tmp_path))
    for step in (1, 2):
        whole.write(step, SCALARS)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes(data[:-5])
    assert [*reader.read()] == [1]
    path.write_bytes(data)
    assert (
        reader.read()
        == read_scalars(str(tmp_path))
        == {
            1: SCALARS,
            2: SCALARS,
        }
    )
    path.unlink()
    assert reader.read() == {}

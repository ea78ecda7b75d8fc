"""Event files: what TensorBoard reads.

`tf.summary` writes through a resource of TensorFlow's runtime, which is lost
when the runtime connects to a cluster again. An event file is a TFRecord of
`Event` protocol buffers, so a hook that lives through a recovery writes them
itself, in the format of `tf.summary`.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import time
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow as tf

from tfdist._tf import storage

_counter = itertools.count()


class EventFile:
    """One event file, opened when something is written.

    If the file is removed, as with a directory that is made again, the next
    event begins another.

    Args:
        directory: Where it lies; TensorBoard calls it a run.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._writer: tf.io.TFRecordWriter | None = None
        self._path = ""
        self._flushed = False

    def write_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes scalars of one step, as `tf.summary.scalar`."""
        self._write_values(
            [_value(k, np.float32(v), "scalars") for k, v in scalars.items()],
            step,
        )

    def write_counts(self, tag: str, counts: np.ndarray, step: int) -> None:
        """Writes a histogram of small integers, as `tf.summary.histogram`.

        Args:
            tag: Its name.
            counts: How often 0, 1, 2, ... were seen.
            step: The step.
        """
        left = np.arange(len(counts))
        buckets = np.stack([left, left + 1, counts], axis=1)
        value = _value(tag, buckets.astype(np.float64), "histograms")
        self._write_values([value], step)

    def write_start(self, step: int) -> None:
        """Says that a session begins: what was written from `step` on is void.

        TensorBoard then hides the points of steps that a recovery undid.
        """
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._write(tf.compat.v1.Event(session_log=start, step=step))

    def flush(self) -> None:
        """Makes all that was written readable."""
        if self._writer:
            self._writer.flush()
            self._flushed = True

    def _write_values(
        self, values: list[tf.compat.v1.Summary.Value], step: int
    ) -> None:
        summary = tf.compat.v1.Summary(value=values)
        self._write(tf.compat.v1.Event(summary=summary, step=step))

    def _write(self, event: tf.compat.v1.Event) -> None:
        # Before a flush there need not be a file to look for.
        if self._flushed and not tf.io.gfile.exists(self._path):
            self._writer = None
        self._flushed = False
        if self._writer is None:
            storage.make_directory(self._directory)
            self._path = os.path.join(self._directory, _file_name())
            self._writer = tf.io.TFRecordWriter(self._path)
            self._write(tf.compat.v1.Event(file_version="brain.Event:2"))
        event.wall_time = time.time()
        self._writer.write(event.SerializeToString())


@functools.cache
def event_file(directory: str) -> EventFile:
    """This process's event file in `directory`.

    All hooks share it: of several files in one directory TensorBoard follows
    only the newest.
    """
    return EventFile(directory)


def _file_name() -> str:
    """A name as `tf.summary` gives; later files sort after earlier ones."""
    return (
        f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}."
        f"{os.getpid()}.{next(_counter)}.v2"
    )


def _value(
    tag: str, value: np.ndarray | np.float32, plugin: str
) -> tf.compat.v1.Summary.Value:
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = plugin
    return tf.compat.v1.Summary.Value(
        tag=tag, tensor=tf.make_tensor_proto(value), metadata=metadata
    )


def read_scalars(directory: str) -> dict[int, dict[str, float]]:
    """The scalars in all event files of `directory`, by step, in order.

    As `read_eval_metrics` of Estimator's early stopping. Scalars of TF1's and
    of TF2's writers are read, other summaries are left out; of two values of
    one tag and step the later counts. A file that is being written is read up
    to its last whole record.

    Args:
        directory: Where the event files are; it need not exist.

    >>> with tf.summary.create_file_writer(directory).as_default():
    ...     done = tf.summary.scalar("accuracy", 0.5, step=7)
    >>> tfdist.hooks.read_scalars(directory)
    {7: {'accuracy': 0.5}}
    """
    scalars: dict[int, dict[str, float]] = {}
    for path in sorted(tf.io.gfile.glob(os.path.join(directory, "*tfevents*"))):
        for event in _events(path):
            for value in event.summary.value:
                number = _number(value)
                if number is not None:
                    scalars.setdefault(event.step, {})[value.tag] = number
    return dict(sorted(scalars.items()))


def _events(path: str) -> Iterator[tf.compat.v1.Event]:
    try:
        for record in tf.data.TFRecordDataset(path).as_numpy_iterator():
            yield tf.compat.v1.Event.FromString(record)
    except tf.errors.DataLossError:
        return  # The record at the end is not whole yet.


def _number(value: tf.compat.v1.Summary.Value) -> float | None:
    if value.HasField("simple_value"):
        return value.simple_value
    if value.HasField("tensor"):
        array = tf.make_ndarray(value.tensor)
        if array.shape == () and np.issubdtype(array.dtype, np.number):
            return float(array)
    return None

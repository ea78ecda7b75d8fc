"""Event files: what TensorBoard reads.

`tf.summary` writes through a resource that is lost when TensorFlow connects to
a cluster again: a hook that lives through a recovery writes the file itself.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist._tf import storage

_counter = itertools.count()
_Record: TypeAlias = tuple[int, dict[str, float]]  # Step, scalars by tag.


class EventFile:
    """An event file, begun when there is something to write.

    Where it has been removed since, with its directory, another is begun.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._writer: tf.io.TFRecordWriter | None = None
        self._path = ""

    def write(
        self,
        step: int,
        scalars: Mapping[str, float],
        counts: Mapping[str, np.ndarray] = {},
    ) -> None:
        """Writes scalars of one step, and how often 0, 1, ... were seen.

        As `tf.summary.scalar` and `tf.summary.histogram`, to be read at once.
        """
        values = []
        for tag, number in scalars.items():
            values.append(_value(tag, np.float32(number), "scalars"))
        for tag, seen in counts.items():
            left = np.arange(len(seen))
            buckets = np.stack([left, left + 1, seen], axis=1, dtype=np.float64)
            values.append(_value(tag, buckets, "histograms"))
        self._write(step=step, summary=tf.compat.v1.Summary(value=values))

    def write_start(self, step: int) -> None:
        """Says that a session begins: what was written from `step` on is void.

        TensorBoard then hides the points of steps that a recovery undid.
        """
        start = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._write(step=step, session_log=start)

    def _write(self, **event: Any) -> None:
        if self._writer is None or not tf.io.gfile.exists(self._path):
            storage.make_directory(self._directory)
            # As `tf.summary` names it; later files sort after earlier ones.
            name = (
                f"events.out.tfevents.{int(time.time()):010d}."
                f"{socket.gethostname()}.{os.getpid()}.{next(_counter)}.v2"
            )
            self._path = os.path.join(self._directory, name)
            self._writer = tf.io.TFRecordWriter(self._path)
            _append(self._writer, file_version="brain.Event:2")
        _append(self._writer, **event)
        self._writer.flush()


def _append(writer: tf.io.TFRecordWriter, **event: Any) -> None:
    record = tf.compat.v1.Event(wall_time=time.time(), **event)
    writer.write(record.SerializeToString())


# Files that are open, of many trials.
_event_file = functools.lru_cache(maxsize=32)(EventFile)


def event_file(directory: str | os.PathLike[str]) -> EventFile:
    """This process's, for all hooks: TensorBoard follows only the newest."""
    return _event_file(os.fspath(directory).rstrip("/") or "/")


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

    Scalars of TF1's and of TF2's writers; of two values of one tag and step the
    later counts. A file that is being written is read up to its last whole
    record.

    Args:
        directory: Where the event files are; it need not exist.

    >>> with tf.summary.create_file_writer(directory).as_default():
    ...     done = tf.summary.scalar("accuracy", 0.5, step=7)
    >>> tfdist.hooks.read_scalars(directory)
    {7: {'accuracy': 0.5}}
    """
    return ScalarReader(directory).read()


class ScalarReader:
    """Reads scalars as `read_scalars`; who reads again, what is new alone."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # Of each file, by name: what is in each of its records.
        self._files: dict[str, list[_Record]] = {}

    def read(self) -> dict[int, dict[str, float]]:
        """All scalars by step, in order."""
        scalars: dict[int, dict[str, float]] = {}
        found = storage.names_in(self._directory)
        names = sorted(name for name in found if "tfevents" in name)
        self._files = {name: self._records(name) for name in names}
        for step, numbers in itertools.chain(*self._files.values()):
            if numbers:
                scalars.setdefault(step, {}).update(numbers)
        return dict(sorted(scalars.items()))

    def _records(self, name: str) -> list[_Record]:
        known = self._files.get(name, [])
        dataset = tf.data.TFRecordDataset(os.path.join(self._directory, name))
        # The record at the end may not be whole yet.
        with contextlib.suppress(tf.errors.DataLossError):
            for record in dataset.skip(len(known)).as_numpy_iterator():
                event = tf.compat.v1.Event.FromString(record)
                pairs = ((v.tag, _number(v)) for v in event.summary.value)
                numbers = {tag: n for tag, n in pairs if n is not None}
                known.append((event.step, numbers))
        return known


def _number(value: tf.compat.v1.Summary.Value) -> float | None:
    if value.HasField("simple_value"):
        return value.simple_value
    if value.HasField("tensor"):
        array = tf.make_ndarray(value.tensor)
        if array.shape == () and np.issubdtype(array.dtype, np.number):
            return float(array)
    return None

"""Writes and reads the event files of TensorBoard.

`tf.summary` writes through a resource that is lost when TensorFlow reconnects
to a cluster, so hooks that survive a recovery write the file themselves.
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
    """An event file, created at the first write.

    If it has since been removed, a new file is created.
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
        """Writes the scalars of a step, and counts of the values 0, 1, ...

        Like `tf.summary.scalar` and `tf.summary.histogram`, and flushed.
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
        """Writes a session start, which voids earlier points from `step` on.

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


# Limits the open files of a process that runs many trials.
_event_file = functools.lru_cache(maxsize=32)(EventFile)


def event_file(directory: str | os.PathLike[str]) -> EventFile:
    """Returns the file all hooks share; TensorBoard follows only the newest."""
    return _event_file(
        storage.absolute(os.fspath(directory)).rstrip("/") or "/"
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
    """Returns the scalars in all event files of `directory`, sorted by step.

    Reads scalars of TF1's and TF2's writers; of two values with the same tag
    and step, the later one is used. A file being written is read up to its last
    complete record.

    Args:
        directory: Directory of the event files; it need not exist.

    >>> with tf.summary.create_file_writer(directory).as_default():
    ...     done = tf.summary.scalar("accuracy", 0.5, step=7)
    >>> tfdist.hooks.read_scalars(directory)
    {7: {'accuracy': 0.5}}
    """
    return ScalarReader(directory).read()


class ScalarReader:
    """Reads scalars like `read_scalars`; later reads parse only new records."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        # The parsed records of each file, by its name.
        self._files: dict[str, list[_Record]] = {}

    def read(self) -> dict[int, dict[str, float]]:
        """Returns all scalars, sorted by step."""
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
        # The last record may still be incomplete.
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

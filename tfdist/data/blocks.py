"""The records of a file, and errors that name it.

TensorFlow's errors tell neither the file nor the line. So a record travels with
its place, (file, number), and what cannot be parsed is looked for record by
record. A file is read in blocks, so that what there is to do for each block
costs a record next to nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

Parse = Callable[[tf.Tensor], Any]

# A place: the number of the file times this, plus that of the record in it.
_MOST_RECORDS = 1 << 40


class State(NamedTuple):
    """How far the reading of a file is.

    Attributes:
        lines: how many there were before this block, int64.
        records: how many they made.
        held: the beginning of a record that goes on in this block, or "".
        held_number: the number of its first line.
    """

    lines: tf.Tensor
    records: tf.Tensor
    held: tf.Tensor
    held_number: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Files:
    """Files, and how records are read from one of them.

    Attributes:
        paths: their names, for errors.
        sources: a tuple of lists or arrays as long as `paths`: the arguments
            of `read` for each file.
        read: from those of one file to a dataset of its records, scalar
            strings.
        frame: turns the lines of a block into records, if they are not the
            same: from `(state, lines, numbers, path, ended)` to `(state,
            records, numbers)`. `numbers` are int64 and count lines from 0;
            `ended` tells that no line follows.
        unit: what a record is called.
        expected: what a record must be, for errors.
        is_text: whether an error can show the record.
        skips_errors: whether what `read` returns ends after an error that
            names no file, as a `TFRecordDataset` does. Any other would give
            the same error again and again.
    """

    paths: Sequence[str]
    sources: tuple[Any, ...]
    read: Callable[..., tf.data.Dataset]
    frame: Callable[..., tuple[State, tf.Tensor, tf.Tensor]] | None = None
    unit: str = "record"
    expected: str = ""
    is_text: bool = False
    skips_errors: bool = False


def read_blocks(
    files: Files,
    block: int,
    index: tf.Tensor,
    path: tf.Tensor,
    source: tuple[tf.Tensor, ...],
    every: int,
    offset: tf.Tensor | int,
) -> tf.data.Dataset:
    """The records of a file, in blocks, with their places."""
    lines = files.read(*source).batch(block)
    if files.skips_errors:
        lines = lines.ignore_errors(log_warning=False)
    # An empty block at the end asks whether there was an error: only if those
    # before it were full, for it is a whole block that an error takes away.
    lines = lines.concatenate(
        tf.data.Dataset.from_tensors(tf.constant([], tf.string))
    )

    def step(state: State, lines: tf.Tensor) -> tuple[State, tuple]:
        size = tf.size(lines, tf.int64)
        ended = size == 0
        if files.skips_errors:
            tf.cond(
                ended & (state.lines % block == 0),
                lambda: _check_whole(files, source, path, state.lines),
                tf.no_op,
            )
        numbers = tf.range(state.lines, state.lines + size)
        if files.frame is not None:
            state, lines, numbers = files.frame(
                state, lines, numbers, path, ended
            )
        first = (offset - state.records) % every
        state = state._replace(
            lines=state.lines + size,
            records=state.records + tf.size(lines, tf.int64),
        )
        places = index * _MOST_RECORDS + numbers
        if every > 1:
            lines, places = lines[first::every], places[first::every]
        return state, (lines, places)

    zero = tf.constant(0, tf.int64)
    return lines.scan(State(zero, zero, tf.constant(""), zero), step)


class RecordParser:
    """Parses a batch of records, or says which one it is that cannot be."""

    def __init__(self, files: Files, parse: Parse) -> None:
        self._files = files
        self._parse = parse

    def __call__(self, records: tf.Tensor, places: tf.Tensor) -> Any:
        """Examples of the records; an error names the place of a bad one."""
        explained = tf.data.Dataset.from_tensors((records, places)).map(
            self._explain
        )
        return (
            self._attempt(records)
            .concatenate(explained)
            .take(1)
            .get_single_element()
        )

    def _attempt(self, records: tf.Tensor) -> tf.data.Dataset:
        """A dataset of the examples, or of nothing."""
        return (
            tf.data.Dataset.from_tensors(records)
            .map(self._parse)
            .ignore_errors(log_warning=False)
        )

    def _explain(self, records: tf.Tensor, places: tf.Tensor) -> Any:
        """Raises an error about the first record that cannot be parsed."""

        def is_bad(records: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            good = self._attempt(records)
            zero = tf.constant(0, tf.int64)
            return good.reduce(zero, lambda n, *_: n + 1) == 0

        record, place = (
            tf.data.Dataset.from_tensor_slices((records, places))
            .batch(64)
            .filter(is_bad)
            .take(1)
            .unbatch()
            .batch(1)
            .filter(is_bad)
            .take(1)
            .unbatch()
            .concatenate(
                tf.data.Dataset.from_tensors(("", tf.constant(-1, tf.int64)))
            )
            .take(1)
            .get_single_element()
        )
        path = tf.gather(
            list(self._files.paths), tf.maximum(place // _MOST_RECORDS, 0)
        )
        shown = ""
        if self._files.is_text:
            shown = ". Received: " + tf.strings.substr(record, 0, 200)
        checked = check(
            place < 0,
            where(path, self._files.unit, place % _MOST_RECORDS),
            f"expected {self._files.expected}",
            shown,
        )
        with tf.control_dependencies([checked]):
            # No single one is bad: then this raises TensorFlow's own error.
            return self._parse(tf.identity(records))


def _check_whole(
    files: Files, source: tuple, path: tf.Tensor, number: tf.Tensor
) -> tf.Operation:
    """Raises an error unless a file has so many lines and ends well."""

    def count(_: tf.Tensor) -> tf.Tensor:
        return files.read(*source).reduce(tf.constant(0, tf.int64), _plus_one)

    whole = (
        tf.data.Dataset.from_tensors(0)
        .map(count)
        .ignore_errors(log_warning=False)
        .concatenate(tf.data.Dataset.from_tensors(tf.constant(-1, tf.int64)))
        .take(1)
        .get_single_element()
    )
    good = (
        files.read(*source)
        .ignore_errors(log_warning=False)
        .reduce(tf.constant(0, tf.int64), _plus_one)
    )
    return check(
        tf.equal(whole, number),
        where(path, files.unit, good),
        "the file cannot be read from there on. It was cut off or damaged, it "
        "is compressed in another way than its name says, or it is no such "
        "file at all.",
    )


def check(condition: tf.Tensor, *message: tf.Tensor | str) -> tf.Operation:
    """An assertion for dataset functions, whose message may have tensors."""
    return tf.debugging.Assert(condition, [tf.strings.join(message)])


def where(path: tf.Tensor, unit: str, number: tf.Tensor) -> tf.Tensor:
    """The beginning of a message about a record; `number` counts from 0."""
    counted = tf.strings.as_string(number + 1)
    return tf.strings.join([path, f", {unit} ", counted, ": "])


def _plus_one(count: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
    return count + 1

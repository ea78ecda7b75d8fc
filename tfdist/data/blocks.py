"""Reads records from files, with errors that name the file and the record.

TensorFlow's errors name neither. Each record therefore carries its place (file
and number), and the records of a batch that cannot be parsed are tried one by
one. This happens in the graph, because workers of a parameter-server job do not
run Python. Files are read in blocks, to keep the overhead per record small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Parse = Callable[[tf.Tensor], Any]

# A place is the file's number times this, plus the record's number in the file.
_MOST_RECORDS = 1 << 40


@dataclasses.dataclass(frozen=True)
class Files:
    """Files, and how to read the records of a file.

    Attributes:
        paths: The names of the files, for errors.
        sources: The arguments of `read`, each a sequence as long as `paths`.
        read: Maps the arguments of one file to a dataset of scalar strings.
        expected: Description of a valid record, for errors.
        unit: "record" or "line". Errors about lines quote the line.
        split: Joins lines to records: maps `(lines, number, held, path)` to
            `(records, numbers, held)`. A number is that of a record's first
            line, from 0; `held` is the beginning of a record that continues in
            the next block, or "". An empty `lines` marks the end of the file.
        skips_errors: Whether to replace errors of `read`, which do not name
            the file, with errors that do.
    """

    paths: Sequence[str]
    sources: tuple[Any, ...]
    read: Callable[..., tf.data.Dataset]
    expected: str = ""
    unit: str = "record"
    split: Callable[..., tuple[tf.Tensor, tf.Tensor, tf.Tensor]] | None = None
    skips_errors: bool = False

    def path(self, index: tf.Tensor) -> tf.Tensor:
        """The name of the file with this number."""
        return tf.gather(list(self.paths), index)

    def lines(self, index: tf.Tensor) -> tf.data.Dataset:
        """The dataset that `read` returns for the file with this number."""
        return self.read(*(tf.gather(column, index) for column in self.sources))


def read_blocks(
    files: Files,
    index: tf.Tensor,
    block: int,
    every: int = 1,
    offset: tf.Tensor | int = 0,
) -> tf.data.Dataset:
    """Reads every n-th record of a file, with its place, in blocks."""
    path = files.path(index)
    blocks = files.lines(index).batch(block)
    if files.skips_errors:
        blocks = blocks.ignore_errors(log_warning=False)
    # An empty block marks the end.
    end = tf.data.Dataset.from_tensors(tf.constant([], tf.string))
    blocks = blocks.concatenate(end)

    def step(state: tuple, lines: tf.Tensor) -> tuple[tuple, tuple]:
        num_lines, num_records, held = state
        size = tf.size(lines, tf.int64)
        if files.skips_errors:
            # An error removes a whole block, so all before it were full.
            suspect = (size == 0) & (num_lines % block == 0)
            tf.cond(suspect, lambda: _check_whole(files, index), tf.no_op)
        records, numbers = lines, num_lines + tf.range(size)
        if files.split is not None:
            records, numbers, held = files.split(lines, num_lines, held, path)
        state = num_lines + size, num_records + tf.size(records, tf.int64), held
        places = index * _MOST_RECORDS + numbers
        if every > 1:
            first = (offset - num_records) % every
            records, places = records[first::every], places[first::every]
        return state, (records, places)

    zero = tf.constant(0, tf.int64)
    return blocks.scan((zero, zero, tf.constant("")), step)


def parser(files: Files, parse: Parse) -> Callable[[tf.Tensor, tf.Tensor], Any]:
    """Wraps `parse` to take records and places, and to name a bad record."""
    parse = tf.function(parse, autograph=False)  # Traced once, not five times.

    def is_bad(records: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return _count(_attempt(parse, records)) == 0

    def parsed(records: tf.Tensor, places: tf.Tensor) -> Any:
        def explain(record: tf.Tensor, place: tf.Tensor) -> Any:
            path = files.path(place // _MOST_RECORDS)
            message = [f"expected {files.expected}"]
            if files.unit == "line":
                message += ". Received: ", tf.strings.substr(record, 0, 200)
            number = place % _MOST_RECORDS
            error = check(False, path, files.unit, number, *message)
            with tf.control_dependencies([error]):
                return parse(tf.identity(records))

        # Datasets are lazy: none of this runs unless there is an error.
        explained = (
            tf.data.Dataset.from_tensor_slices((records, places))
            .batch(64)  # An attempt takes milliseconds.
            .filter(is_bad)
            .unbatch()
            .batch(1)
            .filter(is_bad)
            .unbatch()
            .map(explain)
        )
        # If no record is bad by itself, raises TensorFlow's own error.
        unexplained = tf.data.Dataset.from_tensors(records).map(parse)
        found = _attempt(parse, records).concatenate(explained)
        return found.concatenate(unexplained).take(1).get_single_element()

    return parsed


def check(
    condition: tf.Tensor | bool,
    path: tf.Tensor,
    unit: str,
    number: tf.Tensor,
    *message: tf.Tensor | str,
) -> tf.Operation:
    """Asserts a condition about a record of a file; `number` is from 0."""
    counted = tf.strings.as_string(number + 1)
    text = tf.strings.join([path, f", {unit} ", counted, ": ", *message])
    # Errors must be UTF-8, but the content of files may not be.
    text = tf.strings.unicode_transcode(text, "UTF-8", "UTF-8")
    return tf.debugging.Assert(condition, [text])


def _check_whole(files: Files, index: tf.Tensor) -> tf.Operation:
    """Asserts that a file can be read to its end."""
    whole = _attempt(lambda _: _count(files.lines(index)), 0)
    readable = _count(files.lines(index).ignore_errors(log_warning=False))
    return check(
        _count(whole) == 1,
        files.path(index),
        files.unit,
        readable,
        "the file cannot be read from there on. It is truncated or damaged, "
        "compressed in another way than its name says, or in another format.",
    )


def _attempt(function: Callable, argument: Any) -> tf.data.Dataset:
    """A dataset of the function's result; empty if the function fails."""
    returned = tf.data.Dataset.from_tensors(argument).map(function)
    return returned.ignore_errors(log_warning=False)


def _count(dataset: tf.data.Dataset) -> tf.Tensor:
    return dataset.reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1)

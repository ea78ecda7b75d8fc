"""The records of a file, and errors that name the file and the record.

TensorFlow's errors name neither. So each record travels with its place, (file,
number), and when a batch cannot be parsed its records are tried one by one.
This happens in the graph, because a worker of a parameter-server job runs no
Python. Files are read in blocks, which makes the overhead per record small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Parse = Callable[[tf.Tensor], Any]

# A place: the number of the file times this, plus that of the record in it.
_MOST_RECORDS = 1 << 40


@dataclasses.dataclass(frozen=True)
class Files:
    """Files, and how to read the records of one of them.

    Attributes:
        paths: their names, for errors.
        sources: a tuple of lists or arrays as long as `paths`: the arguments
            of `read` for each file.
        read: from those of one file to a dataset of scalar strings.
        expected: what a record must be, for errors.
        unit: "record" or "line". An error shows the line.
        split: makes records of lines: from `(lines, number, held, path)` to
            `(records, numbers, held)`. Numbers are those of the first lines,
            from 0; `held` is the beginning of a record that goes on in the
            next block, or "". No lines: the end of the file.
        skips_errors: whether errors of `read` do not name the file.
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
        """What `read` reads of the file with this number."""
        return self.read(*(tf.gather(column, index) for column in self.sources))


def read_blocks(
    files: Files,
    index: tf.Tensor,
    block: int,
    every: int = 1,
    offset: tf.Tensor | int = 0,
) -> tf.data.Dataset:
    """Every n-th record of a file with its place, in blocks."""
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
    """From records and places to examples; an error names the bad record."""
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

        # Datasets are lazy: without an error none of this happens.
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
        # If no record is bad by itself, TensorFlow's own error.
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
    """An assertion about a record of a file; `number` counts from 0."""
    counted = tf.strings.as_string(number + 1)
    text = tf.strings.join([path, f", {unit} ", counted, ": ", *message])
    # Errors are UTF-8, what files hold need not be.
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
    """A dataset of what the function returns; empty if it fails."""
    returned = tf.data.Dataset.from_tensors(argument).map(function)
    return returned.ignore_errors(log_warning=False)


def _count(dataset: tf.data.Dataset) -> tf.Tensor:
    return dataset.reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1)

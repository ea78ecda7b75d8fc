"""The records of a file, and errors that name the file and the record.

TensorFlow's errors name neither. So each record travels with its place, (file,
number), and when a batch cannot be parsed its records are tried one by one.
This happens in the graph, because a worker of a parameter-server job runs no
Python. Files are read in blocks, which makes the overhead per record small.
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
    """Progress within a file.

    Attributes:
        lines: how many there were before this block, int64.
        records: how many records they made, int64.
        held: the beginning of a record that goes on in this block, or "".
        held_number: the number of its first line, int64.
    """

    lines: tf.Tensor
    records: tf.Tensor
    held: tf.Tensor
    held_number: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Files:
    """Files, and how to read the records of one of them.

    Attributes:
        paths: their names, for errors.
        sources: a tuple of lists or arrays as long as `paths`: the arguments
            of `read` for each file.
        read: from those of one file to a dataset of scalar strings.
        frame: turns the lines of a block into records, where a line is not a
            record: from `(state, lines, numbers, path, ended)` to `(state,
            records, numbers)`. `numbers` are int64 and count lines from 0;
            `ended` tells that no line follows.
        unit: what a record is called, for errors.
        expected: what a record must be, for errors.
        is_text: whether an error can show the record.
        skips_errors: whether the dataset of `read` ends after an error that
            does not name the file, as a `TFRecordDataset` does.
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
    """Every n-th record of a file with its place, in blocks."""
    lines = files.read(*source).batch(block)
    if files.skips_errors:
        lines = lines.ignore_errors(log_warning=False)
    # An empty block marks the end.
    lines = lines.concatenate(
        tf.data.Dataset.from_tensors(tf.constant([], tf.string))
    )

    def step(state: State, lines: tf.Tensor) -> tuple[State, tuple]:
        size = tf.size(lines, tf.int64)
        ended = size == 0
        if files.skips_errors:
            # An error removes a whole block, so all before it were full.
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


def parser(files: Files, parse: Parse) -> Callable[[tf.Tensor, tf.Tensor], Any]:
    """From records and places to examples; an error names the bad record."""

    def is_bad(records: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return _count(_attempt(parse, records)) == 0

    def explain(records: tf.Tensor, places: tf.Tensor) -> Any:
        nothing = ("", tf.constant(-1, tf.int64))
        record, place = _first(
            tf.data.Dataset.from_tensor_slices((records, places))
            .batch(64)  # An attempt takes milliseconds.
            .filter(is_bad)
            .unbatch()
            .batch(1)
            .filter(is_bad)
            .unbatch()
            .concatenate(tf.data.Dataset.from_tensors(nothing))
        )
        shown = ""
        if files.is_text:
            shown = ". Received: " + tf.strings.substr(record, 0, 200)
        index = tf.maximum(place // _MOST_RECORDS, 0)
        checked = check(
            place < 0,
            where(
                tf.gather(list(files.paths), index),
                files.unit,
                place % _MOST_RECORDS,
            ),
            f"expected {files.expected}",
            shown,
        )
        with tf.control_dependencies([checked]):
            # If no record is bad by itself, TensorFlow's own error.
            return parse(tf.identity(records))

    def parsed(records: tf.Tensor, places: tf.Tensor) -> Any:
        # Datasets are lazy: without an error nothing is explained.
        explained = tf.data.Dataset.from_tensors((records, places)).map(explain)
        return _first(_attempt(parse, records).concatenate(explained))

    return parsed


def check(condition: tf.Tensor, *message: tf.Tensor | str) -> tf.Operation:
    """An assertion whose message may contain tensors."""
    return tf.debugging.Assert(condition, [tf.strings.join(message)])


def where(path: tf.Tensor, unit: str, number: tf.Tensor) -> tf.Tensor:
    """The beginning of a message about a record; `number` counts from 0."""
    counted = tf.strings.as_string(number + 1)
    return tf.strings.join([path, f", {unit} ", counted, ": "])


def _check_whole(
    files: Files, source: tuple, path: tf.Tensor, number: tf.Tensor
) -> tf.Operation:
    """Asserts that a file has so many records and no error after them."""
    whole = _first(
        _attempt(
            lambda _: _count(files.read(*source)), tf.constant(0)
        ).concatenate(tf.data.Dataset.from_tensors(tf.constant(-1, tf.int64)))
    )
    readable = _count(files.read(*source).ignore_errors(log_warning=False))
    return check(
        tf.equal(whole, number),
        where(path, files.unit, readable),
        "the file cannot be read from there on. It is truncated or damaged, "
        "compressed in another way than its name says, or in another format.",
    )


def _attempt(function: Callable, argument: tf.Tensor) -> tf.data.Dataset:
    """A dataset of what the function returns; empty if it fails."""
    return (
        tf.data.Dataset.from_tensors(argument)
        .map(function)
        .ignore_errors(log_warning=False)
    )


def _first(dataset: tf.data.Dataset) -> Any:
    return dataset.take(1).get_single_element()


def _count(dataset: tf.data.Dataset) -> tf.Tensor:
    return dataset.reduce(tf.constant(0, tf.int64), lambda n, *_: n + 1)

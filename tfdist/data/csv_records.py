"""Records of CSV files (RFC 4180), as tf.data sees them.

`tf.io.decode_csv` parses a vector of records, and `TextLineDataset` gives
lines. Between the two: a quoted field may hold line breaks, the first line may
be a header and begin with a byte order mark, and blank lines hold nothing.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.blocks import State, check, where

# A quoted field longer than this was not closed where its author thought.
_LONGEST_RECORD = 1 << 20
_BOM = "\ufeff"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns of CSV files and how they are written.

    Attributes:
        names: of all columns, in the order of the files.
        defaults: for each column a default, or a dtype if it must be present.
        header: whether the first line of a file names the columns.
        origin: the file whose header they are from.
        field_delim: what is between two fields.
        use_quote_delim: whether fields may be quoted.
        na_value: what stands for a missing value, beside nothing.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    header: bool = True
    origin: str = ""
    field_delim: str = ","
    use_quote_delim: bool = True
    na_value: str = ""

    def parse(self, records: tf.Tensor) -> dict[str, tf.Tensor]:
        """The columns of a vector of records.

        None is left out, or a line with too many fields would pass.
        """
        columns = tf.io.decode_csv(
            records,
            [_record_default(default) for default in self.defaults],
            field_delim=self.field_delim,
            use_quote_delim=self.use_quote_delim,
            na_value=self.na_value,
        )
        return dict(zip(self.names, columns, strict=True))

    def __str__(self) -> str:
        """What a line must be, for errors."""
        fields = []
        for name, default in zip(self.names, self.defaults, strict=True):
            required = ""
            if isinstance(default, tf.DType):
                required = ", required"
            dtype = _record_default(default).dtype.name
            fields.append(f"{name} ({dtype}{required})")
        return f"{len(fields)} fields: {', '.join(fields)}"

    def frame(
        self,
        state: State,
        lines: tf.Tensor,
        numbers: tf.Tensor,
        path: tf.Tensor,
        ended: tf.Tensor,
    ) -> tuple[State, tf.Tensor, tf.Tensor]:
        """Makes records of lines; see `blocks.Files.frame`."""
        lines, numbers = tf.cond(
            (state.lines == 0) & ~ended,
            lambda: self._without_header(lines, numbers, path),
            lambda: (lines, numbers),
        )
        if self.use_quote_delim:
            state, lines, numbers = self._joined(
                state, lines, numbers, path, ended
            )
        filled = lines != ""
        lines, numbers = tf.cond(
            tf.reduce_all(filled),
            lambda: (lines, numbers),
            lambda: (lines[filled], numbers[filled]),
        )
        return state, lines, numbers

    def _without_header(
        self, lines: tf.Tensor, numbers: tf.Tensor, path: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """The first block without its header, or its byte order mark."""
        first = tf.strings.regex_replace(lines[0], f"^{_BOM}", "")
        if not self.header:
            return tf.concat([[first], lines[1:]], 0), numbers
        columns = [tf.constant("")] * len(self.names)
        decode = functools.partial(
            tf.io.decode_csv,
            record_defaults=columns,
            field_delim=self.field_delim,
            use_quote_delim=self.use_quote_delim,
        )
        names = (
            tf.data.Dataset.from_tensors(first)
            .map(lambda line: tf.strings.strip(tf.stack(decode(line))))
            .ignore_errors(log_warning=False)
            .concatenate(tf.data.Dataset.from_tensors(columns))
            .take(1)
            .get_single_element()
        )
        checked = check(
            tf.reduce_all(names == list(self.names)),
            where(path, "line", numbers[0]),
            f"expected the header of {self.origin}, ",
            self.field_delim.join(self.names),
            ". Received: ",
            tf.strings.substr(first, 0, 1000),
        )
        with tf.control_dependencies([checked]):
            return lines[1:], numbers[1:]

    def _joined(
        self,
        state: State,
        lines: tf.Tensor,
        numbers: tf.Tensor,
        path: tf.Tensor,
        ended: tf.Tensor,
    ) -> tuple[State, tf.Tensor, tf.Tensor]:
        """Lines, with those joined that a quoted line break parted."""
        is_held = state.held != ""
        bad = tf.strings.length(state.held) > _LONGEST_RECORD
        checked = check(
            ~(bad | (ended & is_held)),
            where(path, "line", state.held_number),
            "a quote is opened there and not closed in the next "
            f"{_LONGEST_RECORD >> 20} MB, or to the end of the file",
        )
        with tf.control_dependencies([checked]):
            # One search in all lines costs a tenth of one in each.
            unquoted = tf.strings.regex_full_match(
                tf.strings.reduce_join(lines), '[^"]*'
            )
            held, first, lines, numbers = tf.cond(
                is_held | ~unquoted,
                lambda: _join(state, lines, numbers),
                lambda: (state.held, state.held_number, lines, numbers),
            )
        return state._replace(held=held, held_number=first), lines, numbers


def _join(
    state: State, lines: tf.Tensor, numbers: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """What to hold back, the number of its line, records, their numbers."""
    quotes = tf.strings.length(lines) - tf.strings.length(
        tf.strings.regex_replace(lines, '"', "")
    )
    odd = quotes % 2
    before = tf.cast(state.held != "", tf.int32)
    lines = tf.concat([tf.fill([before], state.held), lines], 0)
    numbers = tf.concat([tf.fill([before], state.held_number), numbers], 0)
    odd = tf.concat([tf.ones([before], tf.int32), odd], 0)
    # A line begins a record if the quotes before it are closed.
    begins = tf.cumsum(odd, exclusive=True) % 2 == 0
    ids = tf.cumsum(tf.cast(begins, tf.int32)) - 1
    records = tf.strings.unsorted_segment_join(
        lines, ids, ids[-1] + 1, separator="\n"
    )
    numbers = tf.boolean_mask(numbers, begins)
    return tf.cond(
        tf.reduce_sum(odd) % 2 == 1,
        lambda: (records[-1], numbers[-1], records[:-1], numbers[:-1]),
        lambda: ("", tf.constant(0, tf.int64), records, numbers),
    )


def _record_default(default: Any) -> tf.Tensor:
    """As `decode_csv` takes it: empty for a column that must be present."""
    if isinstance(default, tf.DType):
        return tf.constant([], default)
    if isinstance(default, tf.Tensor):
        return default
    if isinstance(default, int):
        return tf.constant([default], tf.int64)
    return tf.constant([default])


def infer(
    path: str,
    rows: Sequence[str],
    *,
    names: Sequence[str] | None,
    defaults: Mapping[str, Any] | Sequence[Any] | None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
) -> Layout:
    """The layout of files, from the first lines of one.

    Args:
        path: of the file, for errors.
        rows: its first lines.
        names: of the columns; the first line has them if omitted.
        defaults: of all columns, in order, or of some, by name. The others are
            int64 if all their values are present and integers, else float32 if
            all that are present are numbers, with NaN for a missing one, else
            strings, with "".
        field_delim: as in `Layout`, like the following.
        use_quote_delim: see there.
        na_value: see there.

    Raises:
        ValueError: there is no line, names repeat, or `defaults` do not fit.
    """
    lines = [
        line.removeprefix(_BOM) if not i else line
        for i, line in enumerate(rows)
    ]
    quoting = csv.QUOTE_MINIMAL if use_quote_delim else csv.QUOTE_NONE
    table = list(csv.reader(lines, delimiter=field_delim, quoting=quoting))
    header = names is None
    if header:
        if not table:
            raise ValueError(
                f"{path}, line 1: expected a header with the names of the "
                "columns. Received: an empty file."
            )
        names = [name.strip() for name in table.pop(0)]
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(
            f"{path}: the columns must have names, each another. "
            f"Received: {list(names)}."
        )
    # The last one may be cut off; what does not fit is an error in its place.
    table = [row for row in table[:-1] or table if len(row) == len(names)]
    columns = zip(*table, strict=True) if table else [()] * len(names)
    known = _by_name(names, defaults)
    return Layout(
        tuple(names),
        tuple(
            known.get(name, _default(values, na_value))
            for name, values in zip(names, columns, strict=True)
        ),
        header=header,
        origin=path,
        field_delim=field_delim,
        use_quote_delim=use_quote_delim,
        na_value=na_value,
    )


def _by_name(
    names: Sequence[str], defaults: Mapping[str, Any] | Sequence[Any] | None
) -> dict[str, Any]:
    if defaults is None:
        return {}
    if not isinstance(defaults, Mapping):
        if len(defaults) != len(names):
            raise ValueError(
                "Argument `column_defaults` must have an entry for each of the "
                f"{len(names)} columns {list(names)}, or be a dictionary. "
                f"Received: {len(defaults)} entries."
            )
        defaults = dict(zip(names, defaults, strict=True))
    unknown = sorted(set(defaults) - set(names))
    if unknown:
        raise ValueError(
            f"Argument `column_defaults` must name columns: {list(names)}. "
            f"Received: {unknown}."
        )
    return dict(defaults)


def _default(values: Sequence[str], na_value: str) -> Any:
    present = [value for value in values if value not in ("", na_value)]
    if present and len(present) == len(values) and all(map(_is_int, present)):
        return tf.int64
    if present and all(map(_is_float, present)):
        return math.nan
    return ""


def _is_int(text: str) -> bool:
    try:
        return -(2**63) <= int(text) < 2**63 and "_" not in text
    except ValueError:
        return False


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text

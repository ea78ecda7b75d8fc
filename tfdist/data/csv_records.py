"""CSV files (RFC 4180): their columns, and records made of lines.

`tf.io.decode_csv` parses a vector of records, and `TextLineDataset` gives
lines. Between the two, lines are joined that belong to one quoted field, and
the header, a byte order mark and blank lines are removed.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.blocks import State, check, where

# A quoted field longer than this lacks its closing quote.
_LONGEST_RECORD = 1 << 20
_BOM = "\ufeff"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns of CSV files and how they are written.

    Attributes:
        names: of all columns, in the order of the files.
        defaults: for each column a default, or a dtype if it is required.
        header: whether the first line of a file names the columns.
        origin: the file whose header they are from.
        field_delim: as in `tf.io.decode_csv`, like the following.
        use_quote_delim: See `field_delim`.
        na_value: See `field_delim`.
    """

    names: tuple[str, ...]
    defaults: tuple[Any, ...]
    header: bool
    origin: str
    field_delim: str
    use_quote_delim: bool
    na_value: str

    def parse(self, records: tf.Tensor) -> dict[str, tf.Tensor]:
        """The columns of a vector of records."""
        # All of them: with `select_cols` a line with too many fields passes.
        columns = tf.io.decode_csv(
            records,
            [_record_default(default) for default in self.defaults],
            field_delim=self.field_delim,
            use_quote_delim=self.use_quote_delim,
            na_value=self.na_value,
        )
        return dict(zip(self.names, columns, strict=True))

    def __str__(self) -> str:
        fields = []
        for name, default in zip(self.names, self.defaults, strict=True):
            required = ", required" if isinstance(default, tf.DType) else ""
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
            checked = check(
                (state.held == "")
                | ~(ended | (tf.strings.length(state.held) > _LONGEST_RECORD)),
                where(path, "line", state.held_number),
                "a quote is opened there and not closed in the next "
                f"{_LONGEST_RECORD >> 20} MB, or to the end of the file",
            )
            with tf.control_dependencies([checked]):
                # One search in all lines costs a tenth of one in each.
                is_plain = (state.held == "") & tf.strings.regex_full_match(
                    tf.strings.reduce_join(lines), '[^"]*'
                )
                held, held_number, lines, numbers = tf.cond(
                    is_plain,
                    lambda: (state.held, state.held_number, lines, numbers),
                    lambda: _joined(state, lines, numbers),
                )
            state = state._replace(held=held, held_number=held_number)
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
        first = tf.strings.regex_replace(lines[0], f"^{_BOM}", "")
        if not self.header:
            return tf.concat([[first], lines[1:]], 0), numbers
        header = self.field_delim.join(self.names)
        checked = check(
            _without_quotes(first) == _without_quotes(header),
            where(path, "line", numbers[0]),
            f"expected the header of {self.origin}, {header}. Received: ",
            tf.strings.substr(first, 0, 1000),
        )
        with tf.control_dependencies([checked]):
            return lines[1:], numbers[1:]


def _without_quotes(header: tf.Tensor | str) -> tf.Tensor:
    return tf.strings.regex_replace(header, '[" ]', "")


def _joined(
    state: State, lines: tf.Tensor, numbers: tf.Tensor
) -> tuple[tf.Tensor, ...]:
    """(held, held_number, records, numbers): lines joined inside quotes."""
    before = tf.cast(state.held != "", tf.int32)
    quotes = tf.strings.length(lines) - tf.strings.length(
        tf.strings.regex_replace(lines, '"', "")
    )
    # What is held has an opened quote.
    odd = tf.concat([tf.ones([before], tf.int32), quotes % 2], 0)
    lines = tf.concat([tf.fill([before], state.held), lines], 0)
    numbers = tf.concat([tf.fill([before], state.held_number), numbers], 0)
    # A line begins a record if all quotes before it are closed.
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
    """As `decode_csv` takes it: empty for a required column."""
    if isinstance(default, tf.DType):
        return tf.constant([], default)
    if isinstance(default, tf.Tensor):
        return default
    return tf.constant(
        [default], tf.int64 if isinstance(default, int) else None
    )


def infer(
    path: str,
    lines: Iterable[str],
    *,
    names: Sequence[str] | None,
    defaults: Mapping[str, Any] | Sequence[Any] | None,
    field_delim: str,
    use_quote_delim: bool,
    na_value: str,
) -> Layout:
    """The layout of CSV files.

    Args:
        path: of the first file, for errors.
        lines: the header, unless `names` are given, and the rows that tell
            the types.
        names: of the columns. Default: from the header.
        defaults: of all columns, in order, or of some, by name. Default: as
            `read_csv` says.
        field_delim: as in `Layout`.
        use_quote_delim: as in `Layout`.
        na_value: as in `Layout`.

    Raises:
        ValueError: there is no header, names repeat, or `defaults` do not fit.
    """
    rows = csv.reader(
        lines,
        delimiter=field_delim,
        quoting=csv.QUOTE_MINIMAL if use_quote_delim else csv.QUOTE_NONE,
    )
    header = names is None
    if names is None:
        row = next(rows, None)
        if row is None:
            raise ValueError(
                f"{path}, line 1: expected a header with the names of the "
                "columns. Received: an empty file."
            )
        names = [name.strip() for name in row]
    if len(set(names)) < len(names) or "" in names:
        raise ValueError(
            f"{path}: the names of the columns must be different and not "
            f"empty. Received: {list(names)}."
        )
    known = _by_name(path, names, defaults)
    free = [i for i, name in enumerate(names) if name not in known]
    known |= {names[i]: d for i, d in _inferred(rows, names, free, na_value)}
    return Layout(
        tuple(names),
        tuple(known[name] for name in names),
        header=header,
        origin=path,
        field_delim=field_delim,
        use_quote_delim=use_quote_delim,
        na_value=na_value,
    )


def _by_name(
    path: str,
    names: Sequence[str],
    defaults: Mapping[str, Any] | Sequence[Any] | None,
) -> dict[str, Any]:
    defaults = {} if defaults is None else defaults
    if not isinstance(defaults, Mapping):
        if len(defaults) != len(names):
            raise ValueError(
                "Argument `column_defaults` must have an entry for each of the "
                f"{len(names)} columns {list(names)} of {path}, or be a dict. "
                f"Received: {len(defaults)} entries."
            )
        defaults = dict(zip(names, defaults, strict=True))
    unknown = sorted(set(defaults) - set(names))
    if unknown:
        raise ValueError(
            f"Argument `column_defaults` must name columns of {path}: "
            f"{list(names)}. Received: {unknown}."
        )
    return dict(defaults)


def _inferred(
    rows: Iterator[Sequence[str]],
    names: Sequence[str],
    columns: Sequence[int],
    na_value: str,
) -> Iterator[tuple[int, Any]]:
    """(column, default) of each of the columns."""
    integers, numbers = set(columns), set(columns)
    present = set()
    # Reading the file will name the line of a quote that is not closed.
    with contextlib.suppress(csv.Error):
        for row in rows:
            if len(row) != len(names):
                continue
            for i in tuple(numbers):
                value = row[i]
                if value in ("", na_value):
                    integers.discard(i)
                    continue
                present.add(i)
                if i in integers and not _is_int(value):
                    integers.discard(i)
                if i not in integers and not _is_float(value):
                    numbers.discard(i)
    for i in columns:
        is_number = i in numbers and i in present
        default = tf.int64 if i in integers else math.nan
        yield i, default if is_number else ""


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

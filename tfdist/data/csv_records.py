"""CSV files (RFC 4180): infers their columns and joins lines to records.

`TextLineDataset` yields lines, and `tf.io.decode_csv` parses a vector of
records. Between the two, this module joins the lines of a quoted field, and
removes the header, a byte order mark and blank lines.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import itertools
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data import record_files
from tfdist.data.blocks import check

_log = logging.getLogger(__name__)

# A quoted field longer than this lacks its closing quote.
_LONGEST_RECORD = 1 << 20
_BOM = "\ufeff"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns and the format of CSV files.

    Attributes:
        columns: The default of each column by name, in the order of the files;
            a dtype if the column is required.
        header: The first line of the files, which names the columns, or "".
        origin: The file that the columns were read from.
        field_delim, use_quote_delim, na_value: As in `tf.io.decode_csv`.
    """

    columns: dict[str, Any]
    header: str
    origin: str
    field_delim: str
    use_quote_delim: bool
    na_value: str

    def parse(self, records: tf.Tensor) -> dict[str, tf.Tensor]:
        """Parses a vector of records into columns."""
        # All columns: with `select_cols`, lines with too many fields pass.
        values = tf.io.decode_csv(
            records,
            [_record_default(default) for default in self.columns.values()],
            field_delim=self.field_delim,
            use_quote_delim=self.use_quote_delim,
            na_value=self.na_value,
        )
        return dict(zip(self.columns, values, strict=True))

    def __str__(self) -> str:
        fields = []
        for name, default in self.columns.items():
            required = ", required" if isinstance(default, tf.DType) else ""
            dtype = _record_default(default).dtype.name
            fields.append(f"{name} ({dtype}{required})")
        return f"{len(fields)} fields: {', '.join(fields)}"

    def split(
        self,
        lines: tf.Tensor,
        number: tf.Tensor,
        held: tf.Tensor,
        path: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Joins lines to records; see `blocks.Files.split`."""
        ended = tf.size(lines) == 0
        numbers = number + tf.range(tf.size(lines, tf.int64))
        lines, numbers = tf.cond(
            (number == 0) & ~ended,
            lambda: self._without_header(lines, numbers, path),
            lambda: (lines, numbers),
        )
        if self.use_quote_delim:
            too_long = tf.strings.length(held) > _LONGEST_RECORD
            checked = check(
                (held == "") | ~(ended | too_long),
                path,
                "line",
                number - _count(held, "\n"),
                "a quote is opened there and not closed in the next "
                f"{_LONGEST_RECORD >> 20} MB, or to the end of the file",
            )
            with tf.control_dependencies([checked]):
                # One search in all lines is ten times faster than one in each.
                is_plain = (held == "") & tf.strings.regex_full_match(
                    tf.strings.reduce_join(lines), '[^"]*'
                )
            lines, numbers, held = tf.cond(
                is_plain,
                lambda: (lines, numbers, ""),
                lambda: _joined(lines, numbers, held),
            )
        filled = lines != ""
        with tf.control_dependencies(self._checked(lines, numbers, path)):
            return lines[filled], numbers[filled], held

    def _checked(
        self, records: tf.Tensor, numbers: tf.Tensor, path: tf.Tensor
    ) -> list[tf.Operation]:
        """Asserts that the header does not recur among the records."""
        if not self.header or len(self.columns) == 1:  # It may be a value.
            return []
        again = (records == self.header) | (records == _BOM + self.header)
        number = tf.reduce_min(tf.where(again, numbers, numbers.dtype.max))
        advice = "the header again, as in files put together. Remove this line"
        return [check(~tf.reduce_any(again), path, "line", number, advice)]

    def _without_header(
        self, lines: tf.Tensor, numbers: tf.Tensor, path: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        first = tf.strings.regex_replace(lines[0], f"^{_BOM}", "")
        if not self.header:
            return tf.concat([[first], lines[1:]], 0), numbers
        header = self.field_delim.join(self.columns)
        checked = check(
            _without_quotes(first) == _without_quotes(header),
            path,
            "line",
            numbers[0],
            f"expected the header of {self.origin}, {header}. Received: ",
            tf.strings.substr(first, 0, 1000),
        )
        with tf.control_dependencies([checked]):
            return lines[1:], numbers[1:]


def _without_quotes(header: tf.Tensor | str) -> tf.Tensor:
    return tf.strings.regex_replace(header, '[" ]', "")


def _joined(
    lines: tf.Tensor, numbers: tf.Tensor, held: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Joins lines inside quotes; returns records, their numbers and `held`."""
    lines = tf.concat([[held + lines[0]], lines[1:]], 0)
    numbers = tf.concat([[numbers[0] - _count(held, "\n")], numbers[1:]], 0)
    quotes = _count(lines, '"')
    # A line begins a record if all quotes before it are closed.
    begins = tf.cumsum(quotes, exclusive=True) % 2 == 0
    ids = tf.cumsum(tf.cast(begins, tf.int32)) - 1
    records = tf.strings.unsorted_segment_join(lines, ids, ids[-1] + 1, "\n")
    whole = tf.size(records, tf.int64) - tf.reduce_sum(quotes) % 2
    numbers = tf.boolean_mask(numbers, begins)[:whole]
    held = tf.strings.reduce_join(records[whole:] + "\n")
    return records[:whole], numbers, held


def _count(text: tf.Tensor, char: str) -> tf.Tensor:
    """Counts a character in each text; returns int64."""
    others = tf.strings.regex_replace(text, char, "")
    number = tf.strings.length(text) - tf.strings.length(others)
    return tf.cast(number, tf.int64)


def _record_default(default: Any) -> tf.Tensor:
    """A default in the form of `decode_csv`: empty for a required column."""
    if isinstance(default, tf.DType):
        return tf.constant([], default)
    if isinstance(default, tf.Tensor):
        return default
    dtype = tf.int64 if isinstance(default, int) else None
    return tf.constant([default], dtype)


def infer(
    paths: Sequence[str],
    *,
    column_names: Sequence[str] | None = None,
    column_defaults: Mapping[str, Any] | Sequence[Any] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    num_rows_for_inference: int | None = 1000,
) -> Layout:
    """Infers the layout of CSV files; the arguments are those of `read_csv`."""
    rows = functools.partial(
        csv.reader,
        delimiter=field_delim,
        quoting=csv.QUOTE_MINIMAL if use_quote_delim else csv.QUOTE_NONE,
    )
    csv.field_size_limit(sys.maxsize)  # Of this process; else 128 KiB.
    skip = int(column_names is None)
    with tf.init_scope():
        # The first file that is not empty determines the columns.
        files = [*itertools.dropwhile(lambda p: not any(_lines(p)), paths)]
        origin = files[0] if files else paths[0]
        record_files.check_text(origin)
        beginning = _lines(origin)
        top = next(beginning, "")
        first = rows(itertools.chain([top], beginning))
        header = next(first, None)
        if column_names is not None:
            names = list(column_names)
        elif not header:
            raise ValueError(
                f"{origin}, line 1: expected a header with the names of the "
                "columns. Received: an empty line."
            )
        else:
            names = [name.strip() for name in header]
        strange = skip and (first.line_num > 1 or "\ufffd" in "".join(names))
        if len(set(names)) < len(names) or "" in names or strange:
            raise ValueError(
                f"{origin}: the names of the columns must be different and not "
                "empty, in UTF-8 and without line breaks (pandas writes an "
                "empty one for its index, unless `index=False`). "
                f"Received: {names}."
            )
        known = _by_name(origin, names, column_defaults)
        if num_rows_for_inference is not None:
            # The first file with a row: some jobs write files without rows.
            filled = (path for path in files if any(_lines(path, skip)))
            files = [*itertools.islice(filled, 1)]
        lines = itertools.chain.from_iterable(_lines(p, skip) for p in files)
        told = itertools.islice(lines, num_rows_for_inference)
        inferred = _inferred(rows(told), names, set(known), na_value)
    return Layout(
        {name: (inferred | known)[name] for name in names},
        header=top if skip else "",
        origin=origin,
        field_delim=field_delim,
        use_quote_delim=use_quote_delim,
        na_value=na_value,
    )


def _lines(path: str, skip: int = 0) -> Iterator[str]:
    """Yields the lines of a file after `skip`, without a byte order mark."""
    start = "" if skip else _BOM
    lines = tf.data.TextLineDataset(path, record_files.compression(path))
    for block in lines.skip(skip).batch(256).as_numpy_iterator():
        for line in block.tolist():
            yield line.decode(errors="replace").removeprefix(start)
            start = ""


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
    return {name: _unlisted(name, value) for name, value in defaults.items()}


def _unlisted(name: str, default: Any) -> Any:
    """Unpacks a default that is in a list, as `tf.io.decode_csv` allows."""
    if not isinstance(default, list | tuple):
        return default
    if len(default) > 1:
        raise ValueError(
            f"Argument `column_defaults` must have one value for column "
            f"{name!r}. Received: {default!r}."
        )
    return default[0] if default else tf.float32


def _inferred(
    rows: Iterator[list[str]],
    names: Sequence[str],
    known: set[str],
    na_value: str,
) -> dict[str, Any]:
    """Infers the defaults of the columns that are not `known`."""
    others = (i for i, name in enumerate(names) if name not in known)
    found: dict[int, set[int]] = {i: set() for i in others}
    # Reading the file later names the line of a quote that is not closed.
    with contextlib.suppress(csv.Error):
        for row in rows:
            for i, kinds in found.items() if len(row) == len(names) else ():
                if 3 not in kinds:
                    kinds.add(_kind(row[i], na_value))
    return {names[i]: _default(names[i], kinds) for i, kinds in found.items()}


def _kind(text: str, na_value: str) -> int:
    """Returns 1: a missing value, 2: a non-integer number, 3: a string.

    For integers 0: float32 represents it, 4: only int64 does, 5: neither does.
    """
    if text in ("", na_value):
        return 1
    if "_" in text or not text.isascii():  # Python accepts other digits, too.
        return 3
    with contextlib.suppress(ValueError):
        value = int(text)
        if not -(2**63) <= value < 2**63:
            return 5
        exact = abs(value) <= 2**24 or float(np.float32(value)) == value
        return 0 if exact else 4
    with contextlib.suppress(ValueError):
        float(text)
        return 2
    return 3


def _default(name: str, kinds: set[int]) -> Any:
    if 3 in kinds or kinds <= {1}:
        return ""
    if kinds <= {0, 4}:
        return tf.int64
    if 2 not in kinds and kinds & {4, 5}:
        _log.warning(
            "Column %r has integers that float32 does not represent exactly, "
            "but is read as float32 because some are missing or no int64. If "
            "they are ids, give the column a default in `column_defaults`: "
            '"" for strings, or an integer.',
            name,
        )
    return math.nan

"""Examples from CSV files.

The files are read twice before the first training: once as strings, to see
which columns hold numbers, and once as they will be read in training. Both
times the reader is the one of the training, `tf.io.decode_csv`, so what passes
here does not fail there; and every line of every file passes here, so a bad one
is an error that names it at once, not a dead worker in the middle of the night.
What a job has checked once it reads without another look.
"""

from __future__ import annotations

import collections
import concurrent.futures
import csv
import functools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.blocks import Files
from tfdist.data.reading import ReadOptions, batches
from tfdist.data.record_files import check_gzip
from trainer.source import (
    CATEGORICAL,
    NUMERIC,
    Features,
    Parse,
    Schema,
    Source,
    Statistics,
    column_name,
)

_SCAN_LINES = 8192
_THREADS = 16
_DEFAULTS = {NUMERIC: float("nan"), CATEGORICAL: ""}

_Checked = tuple[str, int, Features, tf.Tensor]


class CsvSource(Source):
    """Examples from CSV files with a header line.

    A file that ends in `.gz` is compressed with gzip. Fields are read as
    `tf.io.decode_csv` reads them: they may be quoted, a quote inside is
    doubled, and no field holds a line break. An empty field and `?` are
    missing values. A column is numeric if every value present in the training
    files is a number, also if there are few different ones; else categorical.
    In the names of columns, what is no letter, digit or underscore becomes an
    underscore.

    Args:
        train_files: patterns as in `tf.io.gfile.glob`, local or `gs://`.
        eval_files: the same, for the evaluation examples.
        label: name of the label column. It holds 0 and 1, or two strings of
            which the one that sorts last is the positive one.
        numeric_columns: columns that must hold numbers.
        categorical_columns: columns that are categorical though they look
            numeric, such as a postal code.
        ignore_columns: columns that the model never sees.
        min_count: how often a string must occur in the training files to have
            a place of its own; a rarer one is treated as an unknown one.
    """

    def __init__(
        self,
        train_files: str | Sequence[str],
        eval_files: str | Sequence[str],
        label: str,
        *,
        numeric_columns: Sequence[str] = (),
        categorical_columns: Sequence[str] = (),
        ignore_columns: Sequence[str] = (),
        min_count: int = 1,
    ) -> None:
        self._patterns = {
            "train": _as_tuple(train_files),
            "eval": _as_tuple(eval_files),
        }
        self._label = column_name(label)
        self._overrides = {
            NUMERIC: tuple(map(column_name, numeric_columns)),
            CATEGORICAL: tuple(map(column_name, categorical_columns)),
            "ignore": tuple(map(column_name, ignore_columns)),
        }
        self._min_count = min_count
        super().__init__(
            {
                "label": self._label,
                "min_count": min_count,
                **{k: sorted(names) for k, names in self._overrides.items()},
            }
        )
        self._header: tuple[str, ...] = ()
        self._labels: Container[bytes] = ()
        self._rows = collections.Counter()
        self.description = f"CSV files {', '.join(self._patterns['train'])}"

    @functools.cached_property
    def _paths(self) -> dict[str, list[str]]:
        return {
            split: sorted(set().union(*map(_glob, patterns)))
            for split, patterns in self._patterns.items()
        }

    def _scan(self) -> Schema:
        every = self._paths["train"] + self._paths["eval"]
        check_gzip(every)
        self._header = self._check_headers(every)
        self._check_names()
        kinds = self._infer_kinds()
        statistics = Statistics(kinds)
        for _, _, features, labels in self._checked("train", kinds):
            statistics.add(features, labels)
        schema = statistics.schema(self._label, self._min_count)
        self._labels = statistics.labels.counts.keys()
        self._check_labels(self._checked("eval", kinds))
        return schema

    def _found(self) -> dict[str, Any]:
        return {
            "header": self._header,
            "labels": sorted(label.decode() for label in self._labels),
            "files": {
                path: [size, self._rows[path]]
                for path, size in _sizes(self._rows).items()
            },
        }

    def _adopt(self, schema: Schema, found: Mapping[str, Any]) -> None:
        self._header = tuple(found["header"])
        self._labels = {label.encode() for label in found["labels"]}
        checked = {path: rows for path, (_, rows) in found["files"].items()}
        kinds = self._kinds(schema)
        for split, paths in self._paths.items():
            sizes = _sizes(paths)
            others = [
                path
                for path in paths
                if found["files"].get(path, [None])[0] != sizes[path]
            ]
            self._rows.update({p: checked[p] for p in {*paths} - {*others}})
            # The job goes on with data that came later.
            check_gzip(others)
            self._check_headers(others, self._header)
            self._check_labels(self._checked(split, kinds, others))

    def _check_labels(self, examples: Iterator[_Checked]) -> None:
        for path, number, _, labels in examples:
            for offset, value in enumerate(labels.numpy()):
                if value not in self._labels:
                    known = sorted(v.decode() for v in self._labels)
                    raise ValueError(
                        f"{path}, line {number + offset}: the label "
                        f"{self._label!r} must be one of those in the "
                        f"training files, {known}. Received: "
                        f"{value.decode(errors='replace')!r}."
                    )

    def _check_headers(
        self, paths: Sequence[str], header: tuple[str, ...] | None = None
    ) -> tuple[str, ...] | None:
        """The header of the files, which is the same in all of them."""
        first = "the job"
        for path in paths:
            found = None
            for line in _lines(path).take(1).as_numpy_iterator():
                cells = next(csv.reader([line.decode("utf-8-sig")]), [])
                found = tuple(
                    column_name(cell) or f"column_{position}"
                    for position, cell in enumerate(cells)
                )
            if found is None:
                raise ValueError(
                    f"{path}, line 1: expected a header line with the names "
                    "of the columns. Received: an empty file."
                )
            if header is None:
                first, header = path, found
            if found != header:
                raise ValueError(
                    f"{path}, line 1: the header must be that of {first}, "
                    f"{_listed(header)}. Received: {_listed(found)}."
                )
        return header

    def _check_names(self) -> None:
        path = self._paths["train"][0]
        # TensorFlow takes "Age" and "age" for one name.
        counts = collections.Counter(name.lower() for name in self._header)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                f"{path}, line 1: the names of the columns must differ. "
                f"Received more than once: {_listed(twice)}."
            )
        if self._label not in self._header:
            raise ValueError(
                f"Argument `label` must name a column of {path}: "
                f"{_listed(self._header)}. Received: label={self._label!r}."
            )
        for kind, names in self._overrides.items():
            for name in names:
                if name not in self._header or name == self._label:
                    raise ValueError(
                        f"Argument `{kind}_columns` must name columns of "
                        f"{path} other than the label: "
                        f"{_listed(self._header)}. Received: {name!r}."
                    )

    def _infer_kinds(self) -> dict[str, str]:
        """Returns the kind of each column that the model sees."""
        kinds = dict.fromkeys(self._header, NUMERIC)
        for kind, names in self._overrides.items():
            kinds.update(dict.fromkeys(names, kind))
        del kinds[self._label]
        kinds = {name: kind for name, kind in kinds.items() if kind != "ignore"}
        free = {name for name, kind in kinds.items() if kind == NUMERIC}
        free -= set(self._overrides[NUMERIC])
        strings = dict.fromkeys(kinds, CATEGORICAL)
        for _, _, features, _ in self._checked("train", strings):
            words = {name for name in free if not _is_number(features[name])}
            kinds.update(dict.fromkeys(words, CATEGORICAL))
            free -= words
        return kinds

    def _checked(
        self,
        split: str,
        kinds: Mapping[str, str],
        only: Container[str] | None = None,
    ) -> Iterator[_Checked]:
        """Yields (path, number of the first line, features, labels).

        Of all files of the split, or of those in `only`.

        Raises:
            ValueError: for the first line that cannot be parsed, and when
                there is no line at all.
        """
        for path in self._paths[split]:
            if only is not None and path not in only:
                continue
            self._rows[path] = 0
            for number, lines in _numbered(path):
                # Where a part of the file ended in blank lines, the next part
                # may hold nothing else.
                if self._rows[path] != number - 2:
                    number, lines = self._rows[path] + 2, tf.constant([""])
                yield (
                    path,
                    number,
                    *self._parse_or_explain(path, number, lines, kinds),
                )
                self._rows[path] += len(lines)
        if not any(self._rows[path] for path in self._paths[split]):
            raise ValueError(
                f"{', '.join(self._paths[split])}: expected at least one line "
                "after the header. Received: none."
            )

    def _parse_or_explain(
        self,
        path: str,
        number: int,
        lines: tf.Tensor,
        kinds: Mapping[str, str],
    ) -> tuple[Features, tf.Tensor]:
        try:
            features, labels = self._parse(lines, kinds)
            if not tf.reduce_any(labels == ""):
                return features, labels
        except tf.errors.InvalidArgumentError:
            pass  # Below, line by line, it comes out which one it was.
        for offset, line in enumerate(lines):
            where = f"{path}, line {number + offset}"
            try:
                _, label = self._parse(line[tf.newaxis], kinds)
            except tf.errors.InvalidArgumentError as error:
                raise ValueError(
                    f"{where}: expected {len(self._header)} fields, "
                    f"{self._layout(kinds)}. Received: "
                    f"{line.numpy().decode(errors='replace')!r} "
                    f"({_reason(error)})."
                ) from None
            if label[0] == "":
                raise ValueError(
                    f"{where}: the label {self._label!r} must not be missing."
                )
        raise AssertionError("The lines fail together, but none of them alone.")

    def _layout(self, kinds: Mapping[str, str]) -> str:
        return ", ".join(
            f"{name} (numeric)" if kinds.get(name) == NUMERIC else name
            for name in self._header
        )

    def _batches(
        self,
        split: str,
        batch_size: int,
        kinds: Mapping[str, str],
        transform: Parse,
        **options: Any,
    ) -> tf.data.Dataset:
        paths = [path for path in self._paths[split] if self._rows[path]]
        rows = np.array([self._rows[path] for path in paths], np.int64)
        files = Files(
            paths,
            (paths, rows),
            lambda path, rows: _lines(path).skip(1).take(rows),
            unit="example",
            expected=f"the columns of {self.description}",
            is_text=True,
        )
        parse = functools.partial(self._parse, kinds=kinds)
        reading = ReadOptions(transform=transform, **options)
        return batches(files, parse, batch_size, reading)

    def _parse(
        self, records: tf.Tensor, kinds: Mapping[str, str]
    ) -> tuple[Features, tf.Tensor]:
        # Also what is ignored is decoded, as strings: only so does a line with
        # too many fields fail.
        values = tf.io.decode_csv(
            records,
            [
                tf.constant(_DEFAULTS[kinds.get(name, CATEGORICAL)])
                for name in self._header
            ],
            na_value="?",
        )
        fields = dict(zip(self._header, values, strict=True))
        return {name: fields[name] for name in kinds}, fields[self._label]


def _as_tuple(patterns: str | Sequence[str]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def _glob(pattern: str) -> list[str]:
    paths = [p for p in tf.io.gfile.glob(pattern) if not tf.io.gfile.isdir(p)]
    if not paths:
        raise FileNotFoundError(
            f"No file matches {pattern!r}. Expected the path or pattern "
            "(*, ?, [...]) of CSV files."
        )
    return paths


def _sizes(paths: Iterable[str]) -> dict[str, int]:
    """Bytes of each file; many are asked for at once."""
    paths = list(paths)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        stats = pool.map(tf.io.gfile.stat, paths)
        return {p: stat.length for p, stat in zip(paths, stats, strict=True)}


def _lines(path: str | tf.Tensor) -> tf.data.Dataset:
    compressed = tf.strings.regex_full_match(path, r".*\.gz")
    return tf.data.TextLineDataset(path, tf.where(compressed, "GZIP", ""))


def _numbered(path: str) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields (number of the first line, lines) without blank lines at ends."""
    for part, lines in enumerate(_lines(path).skip(1).batch(_SCAN_LINES)):
        filled = tf.where(lines != "")
        if len(filled):
            yield 2 + part * _SCAN_LINES, lines[: int(filled[-1, 0]) + 1]


def _is_number(texts: tf.Tensor) -> bool:
    """Tells whether all that is present parses as `decode_csv` will."""
    try:
        tf.strings.to_number(tf.boolean_mask(texts, texts != ""))
    except tf.errors.InvalidArgumentError:
        return False
    return True


def _reason(error: tf.errors.OpError) -> str:
    """Returns what TensorFlow says, without its names of ops and records."""
    text = re.sub(r"\{\{.*?\}\}|\[Op:.*|in record \d+", "", error.message)
    return " ".join(text.split())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))

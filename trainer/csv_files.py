"""Examples from CSV files, read with `tfdist.read_csv`.

All files are read once before training starts, with the reader that training
uses: a malformed line is reported at once instead of hours later. A job that
resumes does not check the same files again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import csv
import functools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import tfdist
from trainer.source import (
    CATEGORICAL,
    NUMERIC,
    Features,
    Parse,
    Schema,
    Source,
    column_name,
    listed,
    positive_labels,
)

_log = logging.getLogger(__name__)

_MISSING = "?"


class CsvSource(Source):
    """Examples from CSV files with a header line.

    `tfdist.read_csv` reads the files. Empty fields and `?` are missing values.
    A column is numeric if every value present in the training files is a
    number, even if there are few distinct values; otherwise it is categorical.
    In column names, characters other than letters, digits and underscores are
    replaced by underscores.

    Args:
        train_files: patterns as in `tf.io.gfile.glob`, local or `gs://`.
        eval_files: patterns of the files with evaluation examples.
        label: name of the label column. It holds 0 and 1, or two strings, of
            which the one that sorts last is the positive label.
        numeric_columns: columns that must hold numbers.
        categorical_columns: columns that are categorical although they look
            numeric, such as a postal code.
        ignore_columns: columns that the model never sees.
        min_count: how often a string must occur in the training files to be in
            the vocabulary; rarer strings are treated as unknown.
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
        self._files = {
            split: [files] if isinstance(files, str) else list(files)
            for split, files in (("train", train_files), ("eval", eval_files))
        }
        self._label = column_name(label)
        self._labels: set[bytes] = set()
        self._integers: list[str] = []
        self.description = f"CSV files {', '.join(self._files['train'])}"
        super().__init__(
            {"label": self._label, "min_count": min_count},
            numeric=numeric_columns,
            categorical=categorical_columns,
            ignore=ignore_columns,
        )

    @functools.cached_property
    def _columns(self) -> dict[str, str]:
        """Maps each name to its column in the files, in order."""
        train, evaluation = (
            list(tfdist.data.csv_columns(files, num_rows_for_inference=1))
            for files in self._files.values()
        )
        if set(train) != set(evaluation):
            raise ValueError(
                f"{', '.join(self._files['eval'])}: the columns must be those "
                f"of the training files, {listed(train)}. "
                f"Received: {listed(evaluation)}."
            )
        names = [column_name(c) or f"column_{i}" for i, c in enumerate(train)]
        # For TensorFlow, "Age" and "age" are the same name.
        counts = collections.Counter(name.lower() for name in names)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                "The columns must have different names. "
                f"Received more than once: {listed(twice)}."
            )
        if self._label not in names:
            raise ValueError(
                "Argument `label` must name a column of "
                f"{', '.join(self._files['train'])}: {listed(names)}. "
                f"Received: label={self._label!r}."
            )
        self._check_overrides([n for n in names if n != self._label])
        return dict(zip(names, train, strict=True))

    def _infer_kinds(self) -> dict[str, str]:
        fixed = {self._label: "ignore"}
        for kind, names in self._overrides.items():
            fixed |= dict.fromkeys(names, kind)
        columns = self._columns
        inferred = tfdist.data.csv_columns(
            self._files["train"],
            column_defaults={
                columns[name]: _default(kind) for name, kind in fixed.items()
            },
            na_value=_MISSING,
            num_rows_for_inference=None,
        )
        self._integers = [
            n for n, c in columns.items() if inferred[c] is tf.int64
        ]
        kinds = {
            name: CATEGORICAL if inferred[column] == "" else NUMERIC
            for name, column in columns.items()
        } | fixed
        return {name: kind for name, kind in kinds.items() if kind != "ignore"}

    def _check(
        self, kinds: Mapping[str, str], statistics: tfdist.FeatureStatistics
    ) -> None:
        labels = statistics[self._label]
        self._labels = set(labels.counts)
        if labels.missing:
            raise ValueError(self._bad_label(self._files["train"]))
        self._check_evaluation(kinds)
        for name, kind in kinds.items():
            words = statistics[name].counts if kind == CATEGORICAL else ()
            for word in words:
                if word.strip() in (b"", _MISSING.encode()):
                    _log.warning(
                        "Column %r contains %r, which is treated as a string, "
                        "not as a missing value or a number, because it has "
                        "blanks. Remove them if the value is missing.",
                        name,
                        word.decode(),
                    )
        for name in filter(kinds.__contains__, self._integers):
            number = statistics[name]
            if max(-number.minimum, number.maximum) >= 2**24:
                _log.warning(
                    "Column %r has integers of 2**24 or more, which float32 "
                    "cannot always tell apart. If they are ids, add the column "
                    "to `categorical_columns`.",
                    name,
                )

    def _check_evaluation(self, kinds: Mapping[str, str]) -> None:
        """Reads all evaluation examples; warns if metrics would mislead."""
        positive = positive_labels(self._label, self._labels)
        found = self._check_labels(self._files["eval"], kinds)
        evaluated = ", ".join(self._files["eval"])
        if not found:
            raise ValueError(
                f"{evaluated}: expected at least one example. Received: none."
            )
        if len({label.decode() in positive for label in found}) == 1:
            _log.warning(
                "%s: all examples have the same class, so AUC is undefined; "
                "ignore the reported value.",
                evaluated,
            )
        train, evaluation = (
            {*map(os.path.realpath, _sizes(files))}
            for files in self._files.values()
        )
        if both := train & evaluation:
            _log.warning(
                "Used for both training and evaluation: %d files, including "
                "%s. Metrics do not show how the model performs on new data.",
                len(both),
                min(both),
            )

    def _found(self) -> dict[str, Any]:
        return {
            "labels": sorted(label.decode() for label in self._labels),
            "files": _sizes([*self._files["train"], *self._files["eval"]]),
        }

    def _check_new(self, schema: Schema, found: Mapping[str, Any]) -> None:
        self._labels = {label.encode() for label in found["labels"]}
        missing = {c.name for c in schema.columns}.difference(self._columns)
        if missing:
            raise ValueError(
                f"{self.description} must have all columns of the job. "
                f"Missing: {listed(sorted(missing))}."
            )
        sizes = _sizes([*self._files["train"], *self._files["eval"]])
        new = [p for p, size in sizes.items() if found["files"].get(p) != size]
        if new:
            self._check_labels(new, self._kinds(schema))

    def _check_labels(
        self, files: Sequence[str], kinds: Mapping[str, str]
    ) -> set[bytes]:
        """Reads all examples and returns the set of their labels."""
        found: set[bytes] = set()
        for _, labels in self._once("", kinds, files=files):
            found.update(labels.numpy())
            if not self._labels.issuperset(found):
                raise ValueError(self._bad_label(files))
        return found

    def _bad_label(self, files: Sequence[str]) -> str:
        """Returns an error message about the first invalid label."""
        for path in _sizes(files):
            packed = "GZIP" if path.endswith((".gz", ".gzip")) else ""
            lines = tf.data.TextLineDataset(path, packed).as_numpy_iterator()
            rows = csv.DictReader(
                # A byte order mark would make quotes a part of the name.
                line.decode("utf-8-sig", "replace")
                for line in lines
            )
            rows.fieldnames = list(map(column_name, rows.fieldnames or ()))
            for row in rows:
                label = row[self._label]
                where = f"{path}, line {rows.line_num}: the label"
                if label in ("", _MISSING):
                    return f"{where} {self._label!r} must not be missing."
                if label.encode() not in self._labels:
                    known = sorted(label.decode() for label in self._labels)
                    return (
                        f"{where} {self._label!r} must be one of those in the "
                        f"training files, {known}. Received: {label!r}."
                    )
        raise AssertionError("No invalid label found in the files.")

    def _batches(
        self,
        split: str,
        batch_size: int,
        kinds: Mapping[str, str],
        transform: Parse,
        files: Sequence[str] | None = None,
        **options: Any,
    ) -> tf.data.Dataset:
        columns = self._columns

        def renamed(features: Features, label: tf.Tensor) -> Any:
            return transform({n: features[columns[n]] for n in kinds}, label)

        return tfdist.read_csv(
            files or self._files[split],
            batch_size,
            label_name=columns[self._label],
            column_defaults={
                column: _default(kinds.get(name))
                for name, column in columns.items()
            },
            select_columns=[columns[name] for name in kinds],
            na_value=_MISSING,
            transform=renamed,
            **options,
        )


def _default(kind: str | None) -> float | str:
    return math.nan if kind == NUMERIC else ""


def _sizes(patterns: Sequence[str]) -> dict[str, int]:
    """Returns the size of each file in bytes."""
    exists, glob = tf.io.gfile.exists, tf.io.gfile.glob
    paths = sorted(
        {f for p in patterns for f in ([p] if exists(p) else glob(p))}
    )
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        stats = pool.map(tf.io.gfile.stat, paths)
        return {p: stat.length for p, stat in zip(paths, stats, strict=True)}

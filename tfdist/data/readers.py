"""Which examples a worker reads: from files to batches, for every strategy.

    def train_input_fn(context):
        return tfdist.read_csv("gs://bucket/train-*.csv.gz", 128,
                               label_name="income", context=context)

Each function gives a dataset of batches, shuffled, for ever, prefetched; with a
`context` every worker reads other examples than its neighbours, in another
order. Each pass deals the examples to the workers again, so that all are read
whoever is slow or gone. What the functions have in common are the keyword
arguments of `ReadOptions`:

    read_csv(..., seed=7)                         the same order every time
    read_csv(..., shuffle=False, num_epochs=1)    once and in order
    read_csv(..., num_epochs=1, drop_remainder=True)    static shapes, for a TPU

They are to TF's `make_csv_dataset` and `make_batched_features_dataset` what a
cluster needs: those read the same examples on every worker unless told
otherwise, and their errors name no file.

`python -m tfdist.audit --workers=4 --input=package.module:input_fn` shows what
each of four workers would read; see `tfdist.audit`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data import csv_records, record_files
from tfdist.data.blocks import Files, Parse
from tfdist.data.reading import ReadOptions, batches

__all__ = [
    "ReadOptions",
    "read_csv",
    "read_text",
    "read_tfrecords",
]

Features = dict[str, Any]


def read_csv(
    file_pattern: str | Sequence[str],
    batch_size: int,
    *,
    label_name: str | None = None,
    column_names: Sequence[str] | None = None,
    column_defaults: Mapping[str, Any] | Sequence[Any] | None = None,
    select_columns: Sequence[str] | None = None,
    field_delim: str = ",",
    use_quote_delim: bool = True,
    na_value: str = "",
    num_rows_for_inference: int = 1000,
    **options: Any,
) -> tf.data.Dataset:
    """Batches of the rows of CSV files.

    As `tf.data.experimental.make_csv_dataset`, but: in each pass a worker
    reads another share; many rows are parsed at once, several times as fast;
    every file's header is compared, and an error names the file and the line;
    a missing number is NaN, not 0; integers are int64, all other numbers
    float32.

    Fields may be quoted (RFC 4180), with line breaks inside; lines end in LF
    or CRLF; a byte order mark and blank lines are left out. A file that ends
    in ".gz" is compressed with gzip.

    Args:
        file_pattern: paths or patterns, local or `gs://`.
        batch_size: rows in a batch.
        label_name: column of the labels.
        column_names: names of all columns, where the files have no header.
        column_defaults: for each column, in order, a default for a missing
            value, whose type is that of the column, or a dtype (`tf.float32`,
            `tf.float64`, `tf.int32`, `tf.int64`, `tf.string`) if it must be
            present. Or the same for some columns, by name. The others are told
            by the first rows: `tf.int64` if all are present and integers, else
            `math.nan` if those present are numbers, else "".
        select_columns: the columns to give; all if omitted.
        field_delim: what is between two fields.
        use_quote_delim: whether a field may be quoted.
        na_value: what stands for a missing value, beside an empty field.
        num_rows_for_inference: how many rows tell the types.
        **options: those of `ReadOptions`.

    Returns:
        A dataset of dictionaries from the name of a column to a vector of
        `batch_size`, or of `(dictionary, labels)` with a `label_name`.

    Raises:
        FileNotFoundError: no file matches.
        TypeError: an unknown option.
        ValueError: a column that is none, a file without a header, or an
            option out of range. What is wrong further down in a file raises
            `tf.errors.InvalidArgumentError` when it is read.
    """
    reading = ReadOptions(**options)
    paths = record_files.match(file_pattern)
    record_files.check_gzip(paths, reading.check_gzip)
    path, rows = _first_lines(paths, num_rows_for_inference)
    layout = csv_records.infer(
        path,
        rows,
        names=column_names,
        defaults=column_defaults,
        field_delim=field_delim,
        use_quote_delim=use_quote_delim,
        na_value=na_value,
    )
    chosen = list(layout.names if select_columns is None else select_columns)
    for argument, names in (
        ("label_name", [] if label_name is None else [label_name]),
        ("select_columns", chosen),
    ):
        for name in names:
            if name not in layout.names:
                raise ValueError(
                    f"Argument `{argument}` must name a column of {path}: "
                    f"{list(layout.names)}. Received: {name!r}."
                )

    def parse(records: tf.Tensor) -> Features | tuple[Features, tf.Tensor]:
        columns = layout.parse(records)
        features = {n: columns[n] for n in chosen if n != label_name}
        if label_name is None:
            return features
        return features, columns[label_name]

    files = Files(
        paths,
        _sources(paths),
        tf.data.TextLineDataset,
        frame=layout.frame,
        unit="line",
        expected=str(layout),
        is_text=True,
    )
    return batches(files, parse, batch_size, reading)


def read_text(
    file_pattern: str | Sequence[str], batch_size: int, **options: Any
) -> tf.data.Dataset:
    """Batches of the lines of text files.

    Args:
        file_pattern: as in `read_csv`.
        batch_size: lines in a batch.
        **options: those of `ReadOptions`.

    Returns:
        A dataset of string vectors of `batch_size`: lines without their ends.

    Raises:
        FileNotFoundError: no file matches.
        TypeError: an unknown option.
        ValueError: an option out of range.
    """
    reading = ReadOptions(**options)
    paths = record_files.match(file_pattern)
    record_files.check_gzip(paths, reading.check_gzip)
    files = Files(paths, _sources(paths), tf.data.TextLineDataset, unit="line")
    return batches(files, tf.identity, batch_size, reading)


def read_tfrecords(
    file_pattern: str | Sequence[str],
    features: Mapping[str, Any] | None,
    batch_size: int,
    *,
    label_key: str | None = None,
    **options: Any,
) -> tf.data.Dataset:
    """Batches of the `tf.train.Example`s in TFRecord files.

    As `tf.data.experimental.make_batched_features_dataset`, but: in each
    pass a worker reads another share, many examples are parsed at once, and an
    error names the file and the number of the record.

    Args:
        file_pattern: as in `read_csv`.
        features: what to read of an example, as `tf.io.parse_example` takes
            it. None: the records stay as they are, for `dataset.map`.
        batch_size: examples in a batch.
        label_key: the feature with the labels.
        **options: those of `ReadOptions`.

    Returns:
        A dataset of dictionaries from the name of a feature to a tensor whose
        first dimension is `batch_size` (or to a sparse or ragged one), or of
        `(dictionary, labels)` with a `label_key`; of string vectors without
        `features`.

    Raises:
        FileNotFoundError: no file matches.
        TypeError: an unknown option.
        ValueError: `label_key` is no feature, or an option out of range.
    """
    reading = ReadOptions(**options)
    paths = record_files.match(file_pattern)
    record_files.check_gzip(paths, reading.check_gzip)
    files = Files(
        paths,
        _sources(paths),
        tf.data.TFRecordDataset,
        expected=expected_example(features),
        skips_errors=True,
    )
    parse = example_parser(features, label_key)
    return batches(files, parse, batch_size, reading)


def example_parser(
    features: Mapping[str, Any] | None, label_key: str | None
) -> Parse:
    """From `tf.train.Example`s to features, or `(features, labels)`."""
    if label_key is not None and label_key not in (features or {}):
        raise ValueError(
            f"Argument `label_key` must be one of the features: "
            f"{sorted(features or {})}. Received: label_key={label_key!r}."
        )
    if features is None:
        return tf.identity

    def parse(records: tf.Tensor) -> Features | tuple[Features, tf.Tensor]:
        parsed = tf.io.parse_example(records, dict(features))
        if label_key is None:
            return parsed
        label = parsed.pop(label_key)
        return parsed, label

    return parse


def expected_example(features: Mapping[str, Any] | None) -> str:
    """What a record must be, for errors."""
    listed = ", ".join(f"{k}: {v}" for k, v in (features or {}).items())
    return f"a tf.train.Example with {listed}"


def _sources(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """What TensorFlow's datasets of files take: a path, its compression."""
    return list(paths), [record_files.compression(path) for path in paths]


def _first_lines(paths: Sequence[str], number: int) -> tuple[str, list[str]]:
    """The first file with a line in it, and its first lines."""
    with tf.init_scope():
        for path in paths:
            lines = tf.data.TextLineDataset(
                path, record_files.compression(path)
            ).take(number + 1)
            rows = [
                line.decode(errors="replace")
                for line in lines.as_numpy_iterator()
            ]
            if rows:
                return path, rows
    return paths[0], []


if __name__ == "__main__":
    from tfdist.data import audit

    sys.exit(audit.main())

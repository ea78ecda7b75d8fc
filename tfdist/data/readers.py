"""Batches of examples from files, for every strategy.

    def train_input_fn(context):
        return tfdist.read_csv("gs://bucket/train-*.csv.gz", 128,
                               label_name="income", context=context)

Each function returns an infinite dataset of batches, shuffled and prefetched.
With a `context`, no two workers read the same examples in a pass; each pass
distributes the examples anew. The functions share the keyword arguments of
`ReadOptions`:

    read_csv(..., seed=7)                         the same order every time
    read_csv(..., shuffle=False, num_epochs=1)    once and in order
    read_csv(..., num_epochs=1, drop_remainder=True)    static shapes, for a TPU

`python -m tfdist.audit --workers=4 --input=package.module:input_fn` shows what
each of four workers would read; see `tfdist.audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data import csv_records, record_files
from tfdist.data.blocks import Files, Parse
from tfdist.data.reading import ReadOptions, batches

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
    num_rows_for_inference: int | None = 1000,
    **options: Any,
) -> tf.data.Dataset:
    """Reads batches of rows from CSV files.

    Like `tf.data.experimental.make_csv_dataset`, but a worker reads a different
    share in each pass; many rows are parsed at once, which is several times as
    fast; the header of every file is checked, and errors name the file and
    line; a missing number is NaN, not 0; integers are int64, and all other
    numbers float32.

    Fields may be quoted (RFC 4180) and then contain line breaks, which are read
    as LF. Lines end in LF or CRLF; a byte order mark and blank lines are
    skipped. A file whose name ends in ".gz" or ".gzip" is decompressed.

    >>> path = os.path.join(directory, "people.csv")
    >>> with open(path, "w") as file:
    ...     for line in ("age,job,rich", "30,smith,0", "41,clerk,1"):
    ...         print(line, file=file)
    >>> rows = read_csv(path, 2, label_name="rich", shuffle=False, num_epochs=1)
    >>> for features, labels in rows.as_numpy_iterator():
    ...     print(features["age"], features["job"], labels)
    [30 41] [b'smith' b'clerk'] [0 1]

    Args:
        file_pattern: Paths or patterns, local or `gs://`.
        batch_size: Number of rows in a batch.
        label_name: The column with the labels. Default: no labels.
        column_names: The names of all columns, if the files have no header.
        column_defaults: For each column, in order, a default for missing
            values, which sets the column's type; or, if the column is required,
            a dtype (`tf.float32`, `tf.float64`, `tf.int32`, `tf.int64`,
            `tf.string`). Entries may be wrapped in lists, as for
            `tf.io.decode_csv`. Or a dict with entries for some columns.
            Default: inferred; `tf.int64` if all values are present and
            integers, else `math.nan` if those present are numbers, else "".
        select_columns: The columns to return. Default: all.
        field_delim: The separator of fields.
        use_quote_delim: Whether fields may be quoted.
        na_value: A string that marks a missing value, like an empty field.
        num_rows_for_inference: Number of rows to infer types from, in the first
            file with rows. None: all rows of all files.
        **options: The attributes of `ReadOptions`.

    Returns:
        A dataset of dictionaries that map column names to vectors of
        `batch_size`, or, with a `label_name`, of `(dictionary, labels)`.

    Raises:
        FileNotFoundError: No file matches.
        TypeError: An option is unknown.
        ValueError: A column is unknown, a file has no header, or an option is
            out of range.
        tf.errors.InvalidArgumentError: On reading a malformed row.
    """
    reading = ReadOptions(**options)
    paths = record_files.match(file_pattern, reading.check_gzip)
    layout = csv_records.infer(
        paths,
        column_names=column_names,
        column_defaults=column_defaults,
        field_delim=field_delim,
        use_quote_delim=use_quote_delim,
        na_value=na_value,
        num_rows_for_inference=num_rows_for_inference,
    )
    if not layout.header:  # Else the header of each file is compared.
        record_files.check_all_text(paths)
    known = list(layout.columns)
    chosen = known if select_columns is None else list(select_columns)
    asked = {} if label_name is None else {"label_name": [label_name]}
    asked["select_columns"] = chosen
    for argument, names in asked.items():
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"Argument `{argument}` must name a column of "
                f"{layout.origin}: {known}. Received: {unknown[0]!r}."
            )

    def parse(records: tf.Tensor) -> Features | tuple[Features, tf.Tensor]:
        columns = layout.parse(records)
        features = {n: columns[n] for n in chosen if n != label_name}
        if label_name is None:
            return features
        return features, columns[label_name]

    lines = tf.data.TextLineDataset
    files = _files(
        paths, lines, split=layout.split, unit="line", expected=str(layout)
    )
    return batches(files, parse, batch_size, reading)


def csv_columns(
    file_pattern: str | Sequence[str], **options: Any
) -> dict[str, Any]:
    """Returns the columns of CSV files, as inferred by `read_csv`.

    >>> path = os.path.join(directory, "people.csv")
    >>> with open(path, "w") as file:
    ...     for line in ("age,height,job", "30,1.7,smith", "41,?,?"):
    ...         print(line, file=file)
    >>> csv_columns(path, na_value="?")
    {'age': tf.int64, 'height': nan, 'job': ''}

    Takes those arguments of `read_csv` that describe the format of the files,
    and raises the same errors.

    Returns:
        A dict from column names, in order, to defaults: the `column_defaults`
        with which `read_csv` infers nothing.
    """
    paths = record_files.match(file_pattern)
    return csv_records.infer(paths, **options).columns


def read_text(
    file_pattern: str | Sequence[str], batch_size: int, **options: Any
) -> tf.data.Dataset:
    """Reads batches of lines from text files.

    >>> path = os.path.join(directory, "lines.txt")
    >>> with open(path, "w") as file:
    ...     print("to be", file=file)
    ...     print("or not", file=file)
    >>> lines = read_text(path, 2, shuffle=False, num_epochs=1)
    >>> print(*lines.as_numpy_iterator())
    [b'to be' b'or not']

    Takes `ReadOptions` and raises errors like `read_csv`.

    Returns:
        A dataset of string vectors of `batch_size`: lines without line breaks.
    """
    reading = ReadOptions(**options)
    paths = record_files.match(file_pattern, reading.check_gzip)
    record_files.check_all_text(paths)
    files = _files(paths, tf.data.TextLineDataset, unit="line")
    return batches(files, tf.identity, batch_size, reading)


def read_tfrecords(
    file_pattern: str | Sequence[str],
    features: Mapping[str, Any] | None,
    batch_size: int,
    *,
    label_key: str | None = None,
    **options: Any,
) -> tf.data.Dataset:
    """Reads batches of `tf.train.Example`s from TFRecord files.

    Like `tf.data.experimental.make_batched_features_dataset`, but a worker
    reads a different share in each pass, many examples are parsed at once, and
    errors name the file and the number of the record.

    >>> path = os.path.join(directory, "a.tfrecord")
    >>> with tf.io.TFRecordWriter(path) as writer:
    ...     writer.write(b"one")
    ...     writer.write(b"two")
    >>> records = read_tfrecords(path, None, 2, shuffle=False, num_epochs=1)
    >>> print(*records.as_numpy_iterator())
    [b'one' b'two']

    Args:
        file_pattern: As in `read_csv`.
        features: As for `tf.io.parse_example`. None: return the serialized
            records, for `dataset.map`.
        batch_size: Number of examples in a batch.
        label_key: The feature with the labels. Default: no labels.
        **options: The attributes of `ReadOptions`.

    Returns:
        A dataset of dictionaries that map feature names to (dense, sparse or
        ragged) tensors whose first dimension is `batch_size`, or, with a
        `label_key`, of `(dictionary, labels)`. Without `features`, a dataset of
        string vectors.

    Raises:
        FileNotFoundError, TypeError: As for `read_csv`.
        ValueError: `label_key` is not a feature, or an option is out of range.
    """
    reading = ReadOptions(**options)
    parse, expected = example_parser(features, label_key)
    paths = record_files.match(file_pattern, reading.check_gzip)
    records = tf.data.TFRecordDataset
    files = _files(paths, records, expected=expected, skips_errors=True)
    return batches(files, parse, batch_size, reading)


def example_parser(
    features: Mapping[str, Any] | None, label_key: str | None
) -> tuple[Parse, str]:
    """Returns a parser of `tf.train.Example`s and, for errors, their format.

    The parser returns features, or `(features, labels)` with a `label_key`.
    """
    if label_key is not None and label_key not in (features or {}):
        raise ValueError(
            "Argument `label_key` must be one of the features: "
            f"{sorted(features or {})}. Received: label_key={label_key!r}."
        )
    if features is None:
        return tf.identity, ""

    def parse(records: tf.Tensor) -> Features | tuple[Features, tf.Tensor]:
        parsed = tf.io.parse_example(records, dict(features))
        if label_key is None:
            return parsed
        label = parsed.pop(label_key)
        return parsed, label

    listed = ", ".join(f"{k}: {v}" for k, v in features.items())
    return parse, f"a tf.train.Example with {listed}"


def _files(
    paths: list[str], read: Callable[..., tf.data.Dataset], **attributes: Any
) -> Files:
    compressions = [record_files.compression(path) for path in paths]
    return Files(paths, (paths, compressions), read, **attributes)

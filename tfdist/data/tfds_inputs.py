"""Reads batches from TensorFlow Datasets and ArrayRecord files.

Like `tfdist.data.readers`, but needs additional packages.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data import record_files
from tfdist.data.blocks import Files, Parse
from tfdist.data.readers import example_parser
from tfdist.data.reading import ReadOptions, batches

# Records to read from an ArrayRecord file at once.
_CHUNK = 256


def read_tfds(
    builder: Any,
    split: Any,
    batch_size: int,
    *,
    data_dir: str | None = None,
    as_supervised: bool = False,
    select_features: Sequence[str] | None = None,
    **options: Any,
) -> tf.data.Dataset:
    """Reads batches of a prepared dataset of TensorFlow Datasets.

    Like `builder.as_dataset`, but a worker reads a different share in each
    pass, even if its index is a tensor, and many examples are parsed at once if
    they contain only numbers and strings.

    Args:
        builder: A `tfds.core.DatasetBuilder` or the name of one, optionally
            with configuration and version, such as "titanic:4.*.*".
        split: As in `builder.as_dataset`: "train", "train[:80%]",
            "train+test", a `tfds.core.ReadInstruction`.
        batch_size: Number of examples in a batch.
        data_dir: Directory of prepared datasets. Default: that of TFDS.
        as_supervised: Whether to return `(features, label)`, according to the
            builder's `supervised_keys`, instead of all features.
        select_features: The features to parse and return. Default: all.
        **options: The attributes of `ReadOptions`.

    Returns:
        A dataset of the form of `builder.as_dataset().batch(batch_size)`.

    Raises:
        ImportError: TensorFlow Datasets is not installed.
        TypeError: An option is unknown.
        ValueError: The dataset is not prepared, there is no such split, or an
            option is out of range.
    """
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}. TensorFlow Datasets is an extra: "
            "python -m pip install 'tfdist[tfds]'"
        ) from error

    reading = ReadOptions(**options)
    if isinstance(builder, str):
        builder = tfds.builder(builder, data_dir=data_dir)
    if not builder.is_prepared():
        raise ValueError(
            f"Dataset {builder.info.full_name} is not prepared in "
            f"{builder.data_dir}. Prepare it once, where its sources can be "
            f"reached: `tfds build {builder.name} --data_dir=...`, or "
            "`builder.download_and_prepare()`."
        )
    parts = builder.info.splits[split].file_instructions
    read = {
        tfds.core.FileFormat.TFRECORD: _tfrecords,
        tfds.core.FileFormat.ARRAY_RECORD: _array_records,
    }.get(builder.info.file_format)
    if read is None:
        raise ValueError(
            f"The records of {builder.info.full_name} must be in TFRecord or "
            f"ArrayRecord files. Received: {builder.info.file_format.value}. "
            "Prepare it with download_and_prepare(file_format='tfrecord')."
        )
    if read is _array_records:
        _check_index(reading)
        _reader.cache_clear()
    paths = [str(part.filename) for part in parts]
    starts = np.array([part.skip for part in parts])
    stops = [
        part.skip + part.take if part.take >= 0 else part.examples_in_shard
        for part in parts
    ]
    sources = paths, starts, np.array(stops)
    expected = f"an example of {builder.info.full_name}"
    files = Files(
        paths, sources, read, expected, skips_errors=read is _tfrecords
    )
    parse = _tfds_parser(builder.info, as_supervised, select_features)
    return batches(files, parse, batch_size, reading)


def read_array_records(
    file_pattern: str | Sequence[str],
    features: Mapping[str, Any] | None,
    batch_size: int,
    *,
    label_key: str | None = None,
    **options: Any,
) -> tf.data.Dataset:
    """Reads batches of `tf.train.Example`s from ArrayRecord files.

    TensorFlow has no operation for these files. They are read in Python, which
    the workers of a parameter-server strategy do not run. Arguments, result and
    errors are those of `tfdist.read_tfrecords`, but files must be local.

    Raises:
        ImportError: The package `array_record` is not installed.
        ValueError: A file is not an ArrayRecord file, or the index of the
            worker is a tensor.
    """
    reading = ReadOptions(**options)
    _check_index(reading)
    paths = record_files.match(file_pattern)
    _reader.cache_clear()  # Files may have been rewritten.
    stops = np.array([_reader(path).num_records() for path in paths])
    parse, expected = example_parser(features, label_key)
    sources = paths, np.zeros_like(stops), stops
    files = Files(paths, sources, _array_records, expected)
    return batches(files, parse, batch_size, reading)


def _check_index(reading: ReadOptions) -> None:
    if reading.context and tf.is_tensor(reading.context.input_pipeline_id):
        raise ValueError(
            "ArrayRecord files are read by Python, which the workers of a "
            "parameter-server strategy do not run. Write the records to "
            "TFRecord files."
        )


def _tfrecords(
    path: tf.Tensor, start: tf.Tensor, stop: tf.Tensor
) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(path).take(stop).skip(start)


def _array_records(
    path: tf.Tensor, start: tf.Tensor, stop: tf.Tensor
) -> tf.data.Dataset:
    def chunk(first: tf.Tensor) -> tf.Tensor:
        end = tf.minimum(first + _CHUNK, stop)
        records = tf.numpy_function(_chunk, [path, first, end], tf.string)
        return tf.ensure_shape(records, [None])

    return tf.data.Dataset.range(start, stop, _CHUNK).map(chunk).unbatch()


_reading = threading.Lock()


def _chunk(path: bytes, start: int, stop: int) -> Any:
    with _reading:
        records = _reader(path.decode()).read(list(range(start, stop)))
    return np.array(records, object)


@functools.lru_cache(maxsize=128)
def _reader(path: str) -> Any:
    from array_record.python import array_record_module

    reader = array_record_module.ArrayRecordReader(path)
    if not reader.ok():
        try:
            reader.read([0])  # Only this error states the reason.
        except RuntimeError as error:
            raise ValueError(
                f"{path} cannot be read as an ArrayRecord file: {error}."
            ) from None
    return reader


def _tfds_parser(
    info: Any, as_supervised: bool, select_features: Sequence[str] | None
) -> Parse:
    import tensorflow_datasets as tfds

    features = info.features
    for name in select_features or ():
        if name not in features:
            raise ValueError(
                "Argument `select_features` must name features of "
                f"{info.full_name}: {sorted(features)}. Received: {name!r}."
            )
    if select_features is not None:
        chosen = {name: features[name] for name in select_features}
        features = tfds.features.FeaturesDict(chosen)
    if as_supervised and not info.supervised_keys:
        raise ValueError(
            f"Argument `as_supervised` needs a label, and {info.full_name} "
            f"names none. Its features: {sorted(info.features)}."
        )
    spec = features.get_tensor_spec()
    each: Any = functools.partial(tf.map_fn, fn_output_signature=spec)
    if _is_plain(features):
        each = tf.vectorized_map

    def parse(records: tf.Tensor) -> Any:
        examples = each(features.deserialize_example, records)
        if not as_supervised:
            return examples
        return tuple(
            tf.nest.map_structure(lambda key: examples[key], keys)
            for keys in info.supervised_keys
        )

    return parse


def _is_plain(feature: Any) -> bool:
    """Whether a feature has only numbers and strings, no images, sequences."""
    import tensorflow_datasets as tfds

    if isinstance(feature, tfds.features.FeaturesDict):
        return all(map(_is_plain, feature.values()))
    if not isinstance(feature, tfds.features.Tensor):
        return False
    given, stored = feature.get_tensor_info(), feature.get_serialized_info()
    return stored.shape == given.shape and None not in given.shape

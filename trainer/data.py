"""Where the examples come from: CSV files, TensorFlow Datasets, a click log.

source = csv_source(["train-*.csv"], ["eval.csv"], label="income")
source.schema               # the columns, from one pass over the data
source.train_input_fn(...)  # shuffled, for ever, a share for each worker
source.eval_input_fn(...)   # once, in order
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from trainer import click_log
from trainer.csv_files import CsvSource
from trainer.source import (
    CATEGORICAL,
    NUMERIC,
    Column,
    Features,
    Schema,
    Shard,
    Source,
    Statistics,
    column_name,
)

__all__ = [
    "Column",
    "Schema",
    "Source",
    "csv_source",
    "tfds_source",
    "click_log_source",
]

_log = logging.getLogger(__name__)

# CsvSource tells its arguments.
csv_source = CsvSource

# Where the evaluation examples are, the first of these that exists; else the
# last fifth of the training examples.
_EVAL_SPLITS = ("test", "eval", "validation", "valid", "val", "dev")
# More examples change the statistics of a column no further.
_MAX_SCANNED = 1_000_000
_SCAN_BATCH = 8192


def tfds_source(
    name: str,
    data_dir: str | None = None,
    *,
    label: str | None = None,
    categorical_columns: Sequence[str] = (),
    ignore_columns: Sequence[str] = (),
) -> Source:
    """Returns the examples of a builder of TensorFlow Datasets.

    Any builder whose features are numbers, strings, class labels and short
    vectors of numbers, possibly in nested dictionaries: "titanic",
    "wine_quality", "higgs", ... It is read from disk, or downloaded and
    prepared when it is not there.

    Args:
        name: of the builder, with version or configuration if need be.
        data_dir: where prepared data sets are; the default of TFDS if omitted.
        label: name of the label column; the builder's own if omitted.
        categorical_columns: columns of integers that are not quantities.
        ignore_columns: columns that the model never sees.
    """
    return TfdsSource(
        functools.partial(tfds.builder, name, data_dir=data_dir),
        description=f"TensorFlow Datasets: {name}",
        label=label,
        categorical_columns=categorical_columns,
        ignore_columns=ignore_columns,
    )


def click_log_source(data_dir: str | None = None, **sizes: int) -> Source:
    """Returns the examples of the synthetic click log.

    Args:
        data_dir: where it is, or will be prepared in a few seconds.
        **sizes: `num_train`, `num_eval` and `num_shards` of `ClickLog`.
    """
    return _ClickLogSource(
        functools.partial(click_log.ClickLog, data_dir=data_dir, **sizes),
        description=(
            "a SYNTHETIC click log, drawn from a known model "
            "(trainer/click_log.py)"
        ),
    )


class TfdsSource(Source):
    """The source that `tfds_source` returns.

    Args:
        make_builder: returns the builder; called only when data is needed.
        description: one line for people.
        label: as in `tfds_source`, like the following.
        categorical_columns: see there.
        ignore_columns: see there.
    """

    def __init__(
        self,
        make_builder: Callable[[], tfds.core.DatasetBuilder],
        *,
        description: str,
        label: str | None = None,
        categorical_columns: Sequence[str] = (),
        ignore_columns: Sequence[str] = (),
    ) -> None:
        self._make_builder = make_builder
        self._label_argument = label
        self._overrides = {
            CATEGORICAL: tuple(map(column_name, categorical_columns)),
            "ignore": tuple(map(column_name, ignore_columns)),
        }
        self.description = description

    @functools.cached_property
    def _builder(self) -> tfds.core.DatasetBuilder:
        builder = prepared(self._make_builder)
        if builder.info.file_format != tfds.core.FileFormat.TFRECORD:
            raise ValueError(
                f"The records of {builder.info.full_name} must be in TFRecord "
                f"files. Received: {builder.info.file_format.value}. Prepare "
                "it with download_and_prepare(file_format='tfrecord')."
            )
        return builder

    @functools.cached_property
    def _features(self) -> dict[str, tfds.features.FeatureConnector]:
        """Every feature, by its name in the records."""
        return dict(sorted(_flatten(self._builder.info.features).items()))

    @functools.cached_property
    def _label(self) -> str:
        """The key of the label in the records."""
        label = self._label_argument
        if label is None:
            label = (self._builder.info.supervised_keys or (None, None))[1]
        for key in self._features:
            if isinstance(label, str) and column_name(key) == column_name(
                label
            ):
                return key
        raise ValueError(
            f"Argument `label` must name a column of "
            f"{self._builder.info.full_name}: {list(self._features)}. "
            f"Received: label={label!r}"
            + (" (the builder names none)." if label is None else ".")
        )

    def _scan(self) -> Schema:
        kinds = self._kinds()
        statistics = Statistics(kinds)
        records = self._records("train").take(_MAX_SCANNED)
        parse = functools.partial(self._parse, kinds=kinds)
        for features, labels in records.batch(_SCAN_BATCH).map(parse):
            statistics.add(features, labels)
        return statistics.schema(self._label)

    @functools.cached_property
    def _columns(self) -> dict[str, tuple[str, int | None]]:
        """(key in the records, place in its vector) of every column."""
        columns = {}
        for key, feature in self._features.items():
            name = column_name(key)
            shape = feature.get_tensor_info().shape
            if shape == ():
                columns[name] = (key, None)
            elif len(shape) == 1 and shape[0] and _is_quantity(feature):
                columns |= {f"{name}_{i}": (key, i) for i in range(shape[0])}
            elif self._is_input(key):
                raise ValueError(
                    f"Feature {key!r} of {self._builder.info.full_name} must "
                    "be a scalar or a vector of numbers of known length, or "
                    f"be named in `ignore_columns`. Received: {feature}."
                )
        return columns

    def _is_input(self, key: str) -> bool:
        """Tells whether a feature is one that a model may see."""
        if key == self._label or column_name(key) in self._overrides["ignore"]:
            return False
        inputs, label = (self._builder.info.supervised_keys or (None, None))[:2]
        if label != self._label:  # The user's label: all others are inputs.
            return True
        names = tf.nest.flatten(inputs)
        return any(key == name or key.startswith(f"{name}/") for name in names)

    def _kinds(self) -> dict[str, str]:
        """Returns the kind of each column that the model sees."""
        for kind, names in self._overrides.items():
            known = set(self._columns) | set(map(column_name, self._features))
            for name in names:
                if name not in known - {column_name(self._label)}:
                    raise ValueError(
                        f"Argument `{kind}_columns` must name columns of "
                        f"{self._builder.info.full_name} other than the "
                        f"label: {list(self._columns)}. Received: {name!r}."
                    )
        kinds = {}
        for name, (key, _) in self._columns.items():
            words = name in self._overrides[CATEGORICAL]
            if self._is_input(key) and name not in self._overrides["ignore"]:
                number = _is_quantity(self._features[key]) and not words
                kinds[name] = NUMERIC if number else CATEGORICAL
        return kinds

    def _shards(self, split: str) -> Sequence[Shard]:
        splits = self._builder.info.splits
        names = [name for name in _EVAL_SPLITS if name in splits]
        if names:
            chosen = {"train": "train", "eval": names[0]}
        else:
            chosen = {"train": "train[:80%]", "eval": "train[80%:]"}
        return [
            Shard(str(part.filename), part.skip, part.take)
            for part in splits[chosen[split]].file_instructions
        ]

    def _read(
        self, path: tf.Tensor, skip: tf.Tensor, take: tf.Tensor
    ) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path).skip(skip).take(take)

    def _parse(
        self, records: tf.Tensor, kinds: Mapping[str, str]
    ) -> tuple[Features, tf.Tensor]:
        # TFDS itself parses one record at a time.
        keys = {self._columns[name][0] for name in kinds} | {self._label}
        values = tf.io.parse_example(
            records, {key: _format(self._features[key]) for key in keys}
        )
        columns = {}
        for name, kind in kinds.items():
            key, place = self._columns[name]
            value = values[key] if place is None else values[key][:, place]
            if kind == NUMERIC:
                columns[name] = tf.cast(value, tf.float32)
            else:
                columns[name] = _as_strings(value, self._features[key])
        label = values[self._label]
        if label.dtype != tf.string:
            label = tf.strings.as_string(label)
        return columns, label


class _ClickLogSource(TfdsSource):
    """The click log, whose probabilities are known."""

    @functools.cached_property
    def best_auc(self) -> float:
        """The AUC of the true probabilities of the evaluation examples."""
        kinds = {"probability": NUMERIC}
        parse = functools.partial(self._parse, kinds=kinds)
        with tf.init_scope():
            parts = [
                (labels.numpy().astype(int), columns["probability"].numpy())
                for columns, labels in self._records("eval")
                .batch(_SCAN_BATCH)
                .map(parse)
            ]
        labels, scores = map(np.concatenate, zip(*parts, strict=True))
        return click_log.auc(labels, scores)


def prepared(
    make_builder: Callable[[], tfds.core.DatasetBuilder],
) -> tfds.core.DatasetBuilder:
    """Returns a builder whose data is on disk, prepared now if need be.

    TFDS writes into a directory beside the right one and renames it when it
    is complete. So several processes may start at the same time: one of them
    is first, and the others, whose rename fails, use what it has written.
    """
    builder = make_builder()
    if not builder.is_prepared():
        _log.info("Preparing %s, once.", builder.data_dir)
        # Of what is not downloaded, TFDS says that it is downloaded.
        downloads = bool(builder.info.download_size)
        stdout = sys.stdout if downloads else io.StringIO()
        try:
            with contextlib.redirect_stdout(stdout):
                builder.download_and_prepare(file_format="tfrecord")
        except Exception:
            # Its own copy is gone; is there another's?
            builder = make_builder()
            if not builder.is_prepared():
                raise
    return builder


def _flatten(
    features: tfds.features.FeaturesDict, prefix: str = ""
) -> dict[str, tfds.features.FeatureConnector]:
    flat = {}
    for name, feature in features.items():
        if isinstance(feature, tfds.features.FeaturesDict):
            flat |= _flatten(feature, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = feature
    return flat


def _is_quantity(feature: tfds.features.FeatureConnector) -> bool:
    dtype = np.dtype(feature.get_tensor_info().np_dtype)
    is_number = np.issubdtype(dtype, np.number)
    return is_number and not isinstance(feature, tfds.features.ClassLabel)


def _format(feature: tfds.features.FeatureConnector) -> tf.io.FixedLenFeature:
    """Returns how TFDS stores the feature in a `tf.train.Example`."""
    info = feature.get_tensor_info()
    dtype = tf.as_dtype(info.tf_dtype)
    if dtype != tf.string:
        dtype = tf.float32 if dtype.is_floating else tf.int64
    return tf.io.FixedLenFeature(info.shape, dtype)


def _as_strings(
    value: tf.Tensor, feature: tfds.features.FeatureConnector
) -> tf.Tensor:
    if value.dtype == tf.string:
        return value
    if isinstance(feature, tfds.features.ClassLabel) and feature.names:
        # TFDS writes -1 for a class that is not known.
        return tf.gather(["", *feature.names], value + 1)
    return tf.strings.as_string(value)

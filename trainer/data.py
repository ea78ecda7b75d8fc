"""The sources of examples: CSV files, TensorFlow Datasets, a click log.

source = csv_source(["train-*.csv"], ["eval.csv"], label="income")
source.schema               # the columns, from one pass over the data
source.train_input_fn(...)  # shuffled, repeated, a share for each worker
source.eval_input_fn(...)   # once, in order
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

import tfdist
from trainer import click_log
from trainer.csv_files import CsvSource
from trainer.source import (
    CATEGORICAL,
    NUMERIC,
    Column,
    Features,
    Parse,
    Schema,
    Source,
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

# The first of these splits that exists holds the evaluation examples; otherwise
# the last fifth of the training split does.
_EVAL_SPLITS = ("test", "eval", "validation", "valid", "val", "dev")


class TfdsSource(Source):
    """Examples from a builder of TensorFlow Datasets.

    Any builder works whose features are numbers, strings, class labels and
    short vectors of numbers, possibly in nested dictionaries: "titanic",
    "wine_quality", "higgs", ... The data set is downloaded and prepared unless
    it is on disk already. If its sources cannot be reached, the error message
    explains how to prepare it elsewhere.

    Args:
        name: name of the builder, optionally with a version or configuration.
        data_dir: directory of prepared data sets. Default: that of TFDS.
        train_split: a split of TFDS: "train[:80%]", "train+validation".
            Default: "train", or four fifths of it if there is no other split
            for evaluation.
        eval_split: the split for evaluation. Default: the first of "test",
            "eval", "validation", ... that exists, else the last fifth of
            "train".
        label: name of the label column. Default: the builder's label.
        categorical_columns: columns of integers that are not quantities.
        ignore_columns: columns that the model never sees.
        min_count: as in `csv_source`.
    """

    def __init__(
        self,
        name: str,
        data_dir: str | None = None,
        *,
        train_split: str | None = None,
        eval_split: str | None = None,
        label: str | None = None,
        categorical_columns: Sequence[str] = (),
        ignore_columns: Sequence[str] = (),
        min_count: int = 1,
    ) -> None:
        self._name, self._data_dir = name, data_dir
        self._label_argument = label
        self._wanted_splits = {"train": train_split, "eval": eval_split}
        self.description = self.description or f"TensorFlow Datasets: {name}"
        super().__init__(
            {"data": self.description, "label": label, "min_count": min_count},
            categorical=categorical_columns,
            ignore=ignore_columns,
        )

    def _make_builder(self) -> tfds.core.DatasetBuilder:
        try:
            return tfds.builder(self._name, data_dir=self._data_dir)
        except tfds.core.DatasetNotFoundError as error:
            # The rest of the message lists all known builders.
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"TensorFlow Datasets has no builder {self._name!r}, and no "
                "prepared dataset with this name was found in "
                f"{self._data_dir or 'its default'}: {reason}"
            ) from None

    @functools.cached_property
    def _builder(self) -> tfds.core.DatasetBuilder:
        return prepared(self._make_builder)

    @functools.cached_property
    def _splits(self) -> dict[str, str]:
        """The splits of TFDS for "train" and "eval"."""
        splits = self._builder.info.splits
        names = [name for name in _EVAL_SPLITS if name in splits]
        chosen = {"train": "train", "eval": names[0] if names else None}
        chosen |= {k: v for k, v in self._wanted_splits.items() if v}
        if not names and not any(self._wanted_splits.values()):
            chosen = {"train": "train[:80%]", "eval": "train[80%:]"}
        if chosen["eval"] is None:
            raise ValueError(
                f"{self._builder.info.full_name} has the splits "
                f"{sorted(splits)}, but no evaluation split. Argument "
                "`eval_split` must name the examples not in `train_split`. "
                f"Received: train_split={chosen['train']!r}, eval_split=None."
            )
        trained = collections.defaultdict(list)
        for part in splits[chosen["train"]].file_instructions:
            trained[part.filename].append(part)
        if any(
            _overlap(part, other)
            for part in splits[chosen["eval"]].file_instructions
            for other in trained[part.filename]
        ):
            _log.warning(
                "The examples for training and evaluation of %s overlap: %s.",
                self._builder.info.full_name,
                " and ".join(chosen.values()),
            )
        return chosen

    @functools.cached_property
    def _features(self) -> dict[str, tfds.features.FeatureConnector]:
        """All features by their names in the records."""
        return dict(sorted(_flatten(self._builder.info.features).items()))

    @functools.cached_property
    def _label(self) -> str:
        """The key of the label in the records."""
        label = self._label_argument
        if label is None:
            label = (self._builder.info.supervised_keys or (None, None))[1]
        for key in self._features if isinstance(label, str) else ():
            if column_name(key) == column_name(label):
                return key
        raise ValueError(
            f"Argument `label` must name a column of "
            f"{self._builder.info.full_name}: {list(self._features)}. "
            f"Received: label={label!r}"
            + (" (the builder has no default)." if label is None else ".")
        )

    @functools.cached_property
    def _columns(self) -> dict[str, tuple[str, int | None]]:
        """Maps each column to (key in the records, index in its vector)."""
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
                    "be a scalar or a vector of numbers of known length. Or "
                    f"name it in `ignore_columns`. Received: {feature}."
                )
        return columns

    def _is_input(self, key: str) -> bool:
        """Whether a feature may be an input of the model."""
        if key == self._label or column_name(key) in self._overrides["ignore"]:
            return False
        inputs, label = (self._builder.info.supervised_keys or (None, None))[:2]
        if label != self._label:  # The user's label: all others are inputs.
            return True
        names = tf.nest.flatten(inputs)
        return any(key == name or key.startswith(f"{name}/") for name in names)

    def _infer_kinds(self) -> dict[str, str]:
        """Returns the kind of each column that the model sees."""
        # A vector may be named as a whole, too.
        known = dict.fromkeys(
            [*self._columns, *map(column_name, self._features)]
        )
        del known[column_name(self._label)]
        self._check_overrides(known)
        kinds = {}
        for name, (key, _) in self._columns.items():
            words = name in self._overrides[CATEGORICAL]
            if self._is_input(key) and name not in self._overrides["ignore"]:
                number = _is_quantity(self._features[key]) and not words
                kinds[name] = NUMERIC if number else CATEGORICAL
        return kinds

    def _batches(
        self,
        split: str,
        batch_size: int,
        kinds: Mapping[str, str],
        transform: Parse,
        **options: Any,
    ) -> tf.data.Dataset:
        keys = {self._columns[name][0] for name in kinds} | {self._label}
        return tfdist.read_tfds(
            self._builder,
            self._splits[split],
            batch_size,
            select_features=sorted({key.split("/")[0] for key in keys}),
            transform=lambda examples: transform(*self._flat(examples, kinds)),
            **options,
        )

    def _flat(
        self, examples: Mapping[str, Any], kinds: Mapping[str, str]
    ) -> tuple[Features, tf.Tensor]:
        """Returns the columns in `kinds`, and the label as strings."""
        columns = {}
        for name, kind in kinds.items():
            key, place = self._columns[name]
            value = _at(examples, key)
            if place is not None:
                value = value[:, place]
            if kind == NUMERIC:
                columns[name] = tf.cast(value, tf.float32)
            else:
                columns[name] = _as_strings(value, self._features[key])
        label = _at(examples, self._label)
        return columns, label if label.dtype == tf.string else _digits(label)


class ClickLogSource(TfdsSource):
    """Examples of the synthetic click log.

    Args:
        data_dir: directory of the log, which is prepared there if missing.
        min_count: as in `csv_source`.
        **sizes: `num_train`, `num_eval` and `num_shards` of `ClickLog`.
    """

    description = (
        "a SYNTHETIC click log, drawn from a known model (trainer/click_log.py)"
    )

    def __init__(
        self, data_dir: str | None = None, *, min_count: int = 1, **sizes: int
    ) -> None:
        self._sizes = sizes
        super().__init__("click_log", data_dir, min_count=min_count)

    def _make_builder(self) -> tfds.core.DatasetBuilder:
        return click_log.ClickLog(data_dir=self._data_dir, **self._sizes)

    @functools.cached_property
    def best_auc(self) -> float:
        """The AUC of the true probabilities of the evaluation examples."""
        kinds = {"probability": NUMERIC}
        with tf.init_scope():
            parts = [
                (labels.numpy().astype(int), columns["probability"].numpy())
                for columns, labels in self._once("eval", kinds)
            ]
        labels, scores = map(np.concatenate, zip(*parts, strict=True))
        return click_log.auc(labels, scores)


csv_source, tfds_source = CsvSource, TfdsSource
click_log_source = ClickLogSource


def prepared(
    make_builder: Callable[[], tfds.core.DatasetBuilder],
) -> tfds.core.DatasetBuilder:
    """Returns a builder whose data is on disk; prepares the data if necessary.

    Several processes may prepare the data at once: TFDS renames a complete
    directory, and processes whose rename fails use that of the first.

    Raises:
        OSError: the data could not be prepared, for example downloaded.
    """
    builder = make_builder()
    if not builder.is_prepared():
        _log.info("Preparing %s (only once).", builder.data_dir)
        # TFDS announces a download even if there is nothing to download.
        downloads = bool(builder.info.download_size)
        stdout = sys.stdout if downloads else io.StringIO()
        try:
            with contextlib.redirect_stdout(stdout):
                builder.download_and_prepare(file_format="tfrecord")
        except Exception as error:
            # Another process may have prepared the data meanwhile.
            builder = make_builder()
            if not builder.is_prepared():
                raise OSError(
                    f"{builder.info.full_name} could not be prepared in "
                    f"{builder.data_dir}: {error}\n"
                    "Prepare it once on a machine that can download it, with "
                    f"`tfds build {builder.name} --file_format=tfrecord "
                    "--data_dir=DIR`, copy DIR to where all tasks can read it, "
                    "and pass that path as --data_dir."
                ) from error
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


def _at(examples: Mapping[str, Any], key: str) -> tf.Tensor:
    """Returns the value of a key that `_flatten` has returned."""
    for name in key.split("/"):
        examples = examples[name]
    return examples


def _digits(value: tf.Tensor) -> tf.Tensor:
    """Returns numbers as strings, and booleans as "0" and "1"."""
    is_bool = value.dtype == tf.bool
    return tf.strings.as_string(tf.cast(value, tf.int64) if is_bool else value)


def _as_strings(
    value: tf.Tensor, feature: tfds.features.FeatureConnector
) -> tf.Tensor:
    if value.dtype == tf.string:
        return value
    if isinstance(feature, tfds.features.ClassLabel) and feature.names:
        # TFDS encodes an unknown class as -1.
        return tf.gather(["", *feature.names], value + 1)
    return _digits(value)


def _overlap(one: Any, other: Any) -> bool:
    """Whether two ranges of a file have an example in common."""
    first, second = sorted((one, other), key=lambda part: part.skip)
    # A negative `take` means all that follow.
    return first.take < 0 or first.take > second.skip - first.skip

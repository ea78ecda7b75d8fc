"""What `tf.feature_column`s make of a batch of features.

TF 2.21 has no layer any more that reads columns, but each column still knows
how to transform features (`get_sparse_tensors`, `get_dense_tensor`): same hash,
same buckets, same crosses as in TF 2.15. Only its lookup tables are replaced,
by `Vocabulary`.

A feature is a tensor `(batch,)` or `(batch, n)`, where `""` and `-1` stand for
"missing" in a categorical column, or a `tf.SparseTensor` or `tf.RaggedTensor`
`(batch, None)`. As in TF, a cross of features by their names crosses what is
missing in a dense tensor as well; one of columns does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.canned.vocabulary import Vocabulary
from tfdist.embeddings.layer import PartitionedEmbedding

Features = Mapping[str, Any]
# One of the classes behind `tf.feature_column`; they have no public name.
Column = Any
Partitioner = Callable[..., Any]

_CLASSES = {
    "BucketizedColumn",
    "CrossedColumn",
    "EmbeddingColumn",
    "HashedCategoricalColumn",
    "IdentityCategoricalColumn",
    "IndicatorColumn",
    "NumericColumn",
    "VocabularyFileCategoricalColumn",
    "VocabularyListCategoricalColumn",
    "WeightedCategoricalColumn",
}

# Those of them that map each value of one feature to an id.
_VALUE_BY_VALUE = {
    "HashedCategoricalColumn",
    "IdentityCategoricalColumn",
    "VocabularyFileCategoricalColumn",
    "VocabularyListCategoricalColumn",
}


# Options of an embedding, and the only values that tables can have.
_OPTIONS = {"ckpt_to_load_from": None, "max_norm": None, "trainable": True}


def checked_columns(name: str, columns: Any) -> tuple[Column, ...]:
    """Argument `name`, a column or several, ordered by name, as TF did.

    Raises:
        TypeError: something else than a column of `tf.feature_column`.
        ValueError: two columns of one name, or an option that has no
            counterpart.
    """
    columns = [columns] if _class(columns) in _CLASSES else list(columns or ())
    for column in columns:
        if _class(column) not in _CLASSES:
            raise TypeError(
                f"Argument `{name}` must hold columns of `tf.feature_column`, "
                "none of a sequence and none with a shared embedding (which TF "
                f"2.21 makes only in a graph). Received: {column!r} of type "
                f"{_class(column)}."
            )
        for option, value in _OPTIONS.items():
            if getattr(column, option, value) != value:
                raise ValueError(
                    f"Column {column.name!r} has {option}="
                    f"{getattr(column, option)!r}, which tfdist's tables do "
                    "not support."
                )
    names = sorted(column.name for column in columns)
    if len(set(names)) < len(names):
        raise ValueError(
            f"Argument `{name}` must have columns of different names. "
            f"Received: {names}."
        )
    return tuple(sorted(columns, key=lambda column: column.name))


def _class(column: Any) -> str:
    return type(column).__name__


def is_categorical(column: Column) -> bool:
    """Whether `column` gives ids; a bucketized one gives both."""
    return hasattr(column, "get_sparse_tensors")


def is_dense(column: Column) -> bool:
    """Whether `column` gives numbers."""
    return hasattr(column, "get_dense_tensor")


def dense_size(column: Column) -> int:
    """Numbers that a dense column gives for an example."""
    return math.prod(column.variable_shape)


def read_vocabularies(columns: Iterable[Column]) -> dict[Column, Lookup]:
    """The vocabularies of columns and of those they are made of."""
    lookups: dict[Column, Lookup] = {}
    waiting = list(columns)
    while waiting:
        column = waiting.pop()
        if _class(column).startswith("Vocabulary") and column not in lookups:
            lookups[column] = Lookup(column)
        elif not isinstance(column, str):
            waiting.extend(column.parents)
    return lookups


class Lookup:
    """What a vocabulary column takes for its lookup table."""

    def __init__(self, column: Column) -> None:
        self._buckets = column.num_oov_buckets
        self._default = np.int64(column.default_value)
        self._vocabulary = Vocabulary(_words(column))

    def lookup(self, words: tf.SparseTensor) -> tf.SparseTensor:
        """Ids of words; of others the default, or a bucket after the words."""
        ids, others = self._vocabulary.ids(words.values), self._default
        if self._buckets:
            values = words.values
            if values.dtype != tf.string:
                values = tf.strings.as_string(values)
            others = tf.strings.to_hash_bucket_fast(values, self._buckets)
            others += len(self._vocabulary)
        elif others == -1:
            return words.with_values(ids)
        return words.with_values(tf.where(ids < 0, others, ids))


class Batch:
    """A batch of features, read by columns.

    For a column it is both the `FeatureTransformationCache` (`get`) and the
    `StateManager` with its tables (`has_resource`, `get_resource`).
    """

    def __init__(
        self, features: Features, vocabularies: Mapping[Column, Lookup]
    ) -> None:
        self._features = features
        self._vocabularies = vocabularies
        self._known: dict[str | Column, Any] = {}

    def ids(
        self, column: Column
    ) -> tuple[tf.Tensor | tf.SparseTensor, tf.SparseTensor | None]:
        """Ids of a categorical column, and their weights or None.

        A negative id is missing, or no word of the vocabulary, and counts for
        nothing.
        """
        of_values = _class(column) in _VALUE_BY_VALUE
        if of_values and isinstance(self.get(column.key), tf.Tensor):
            ids, weights = self._dense_ids(column), None
        else:
            ids, weights = column.get_sparse_tensors(self, self)
        if ids.shape.rank not in (2, None):
            raise ValueError(
                f"The feature of column {column.name!r} must be a tensor "
                f"(batch,) or (batch, n). Received the shape {ids.shape}."
            )
        return ids, weights

    def dense(self, column: Column) -> tf.Tensor:
        """The numbers, float32 `(batch, dense_size)`, of a dense column.

        Not those of an embedding, which has a table: see `look_up`.
        """
        values = column.get_dense_tensor(self, self)
        return tf.reshape(values, [tf.shape(values)[0], dense_size(column)])

    def _dense_ids(self, column: Column) -> tf.Tensor:
        """Ids of a dense feature, -1 for what is missing.

        TF would make it sparse; a step with many such columns is then half as
        long again.
        """
        feature = self.get(column.key)
        values = tf.SparseTensor(
            tf.where(tf.ones_like(feature, tf.bool)),
            tf.reshape(feature, [-1]),
            tf.shape(feature, tf.int64),
        )
        only = SimpleNamespace(get=lambda key, manager: values)
        ids = column.transform_feature(only, self).values
        missing = "" if feature.dtype == tf.string else -1
        return tf.where(
            feature == missing, np.int64(-1), tf.reshape(ids, tf.shape(feature))
        )

    def get(self, key: str | Column, _: Any = None) -> Any:
        """The feature called `key`, or what column `key` makes of its own."""
        if key not in self._known:
            if isinstance(key, str):
                self._known[key] = self._feature(key)
            elif _class(key) == "WeightedCategoricalColumn":
                self._known[key] = self._weighted(key)
            else:
                self._known[key] = key.transform_feature(self, self)
                if _class(key) == "NumericColumn":
                    _check_shape(key, self._known[key])
        return self._known[key]

    def has_resource(self, column: Column, name: str) -> bool:
        """Whether there is a table for `column`."""
        return True

    def get_resource(self, column: Column, name: str) -> Lookup:
        """The table of a vocabulary column."""
        return self._vocabularies[column]

    def _feature(self, key: str) -> tf.Tensor | tf.SparseTensor:
        if key not in self._features:
            raise ValueError(
                f"Feature {key!r} is missing. The input function gave: "
                f"{sorted(self._features)}."
            )
        value = self._features[key]
        if isinstance(value, tf.RaggedTensor):
            value = value.to_sparse()
        if not isinstance(value, tf.SparseTensor):
            value = tf.convert_to_tensor(value)
            if value.shape.rank == 1:
                value = value[:, tf.newaxis]
        if (value.shape.rank or 0) < 2:
            raise ValueError(
                f"Feature {key!r} must be a tensor (batch,) or (batch, n). "
                f"Received the shape {value.shape}."
            )
        return value

    def _weighted(
        self, column: Column
    ) -> tuple[tf.SparseTensor, tf.SparseTensor]:
        """Ids and weights; TF lost a dense weight of 0, but not its id."""
        ids, _ = column.categorical_column.get_sparse_tensors(self, self)
        weights = self.get(column.weight_feature_key)
        if isinstance(weights, tf.SparseTensor):
            x, y, values = ids.indices, weights.indices, weights.values
        else:
            x, y = ids.dense_shape, tf.shape(weights, tf.int64)
            values = tf.gather_nd(weights, ids.indices)
        same = tf.raw_ops.Equal(x=x, y=y, incompatible_shape_error=False)
        check = tf.debugging.Assert(
            tf.reduce_all(same),
            [f"Column {column.name} needs a weight for each of its values."],
        )
        with tf.control_dependencies([check]):
            return ids, ids.with_values(tf.cast(values, tf.float32))


def _check_shape(column: Column, values: tf.Tensor) -> None:
    if values.shape[1:].num_elements() not in (None, math.prod(column.shape)):
        raise ValueError(
            f"Numeric column {column.key!r} takes examples of the shape "
            f"{column.shape}. Received a batch of the shape {values.shape}."
        )


def look_up(
    table: PartitionedEmbedding,
    ids: tf.Tensor | tf.SparseTensor,
    weights: tf.SparseTensor | None = None,
) -> tf.Tensor:
    """The combined rows of what `Batch.ids` gives; zeros for no id.

    As in TF, what is not summed leaves out ids whose weight is not positive.
    """
    if isinstance(ids, tf.Tensor):
        return table(tf.maximum(ids, 0), tf.cast(ids >= 0, tf.float32))
    keep = ids.values >= 0
    if weights is None:
        return table(tf.sparse.retain(ids, keep))
    if table.combiner != "sum":
        keep &= weights.values > 0
    return table(tf.sparse.retain(ids, keep), tf.sparse.retain(weights, keep))


def embedding(
    column: Column, partitioner: Partitioner | None
) -> PartitionedEmbedding:
    """The table of an embedding column."""
    return PartitionedEmbedding(
        column.categorical_column.num_buckets,
        column.dimension,
        partitioner=partitioner,
        combiner=column.combiner,
        embeddings_initializer=_initializer(column.initializer),
        name=layer_name(column),
    )


def layer_name(column: Column) -> str:
    """The name of the column, without the separator of variable paths."""
    return column.name.replace("/", "_")


def _initializer(initializer: Any) -> Callable:
    """Keras' counterpart of the default one, which Keras' seed governs."""
    if type(initializer).__name__ == "TruncatedNormal":
        config = initializer.get_config()
        return keras.initializers.TruncatedNormal(
            config["mean"], config["stddev"], config["seed"]
        )
    return initializer


def _words(column: Column) -> list:
    """The words of a vocabulary, in order."""
    if _class(column) == "VocabularyListCategoricalColumn":
        return list(column.vocabulary_list)
    if column.file_format == "tfrecord_gzip":
        records = tf.data.TFRecordDataset(column.vocabulary_file, "GZIP")
        words = [r.decode() for r in records.as_numpy_iterator()]
    else:
        with tf.io.gfile.GFile(column.vocabulary_file) as file:
            words = [line.rstrip("\n") for line in file]
    if len(words) < column.vocabulary_size:
        raise ValueError(
            f"Vocabulary {column.vocabulary_file!r} of column {column.key!r} "
            f"has {len(words)} words, fewer than vocabulary_size="
            f"{column.vocabulary_size}."
        )
    words = words[: column.vocabulary_size]
    return words if column.dtype == tf.string else [int(w) for w in words]

"""Applies `tf.feature_column`s to a batch of features.

TF 2.21 no longer has a layer that reads feature columns, but each column can
still transform features (`get_sparse_tensors`, `get_dense_tensor`), with the
same hashes, buckets and crosses as in TF 2.15. Only their lookup tables are
replaced, by `Vocabulary`.

A feature is a tensor `(batch,)` or `(batch, n)`, where `""` and `-1` stand for
"missing" in a categorical column, or a `tf.SparseTensor` or `tf.RaggedTensor`
`(batch, None)`. As in TF, a crossed column of feature names also crosses the
missing values of a dense tensor; a crossed column of columns does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.private import shared_table
from tfdist.canned.vocabulary import Vocabulary
from tfdist.embeddings.layer import PartitionedEmbedding

Features = Mapping[str, Any]
# One of the column classes of `tf.feature_column`, which are not public.
Column = Any
Partitioner = Callable[..., Any]
Sparse: TypeAlias = tf.SparseTensor

# Classes that map each value of one feature to an id.
_VALUE_BY_VALUE = {
    "HashedCategoricalColumn",
    "IdentityCategoricalColumn",
    "VocabularyFileCategoricalColumn",
    "VocabularyListCategoricalColumn",
}
_CLASSES = _VALUE_BY_VALUE | {
    "BucketizedColumn",
    "CrossedColumn",
    "EmbeddingColumn",
    "IndicatorColumn",
    "NumericColumn",
    "SharedEmbeddingColumn",
    "WeightedCategoricalColumn",
}
# Options of an embedding that must be None.
_OPTIONS = ("ckpt_to_load_from", "max_norm")


def checked_columns(
    name: str, columns: Any, dense: bool = False
) -> tuple[Column, ...]:
    """Returns the columns of argument `name`, validated and in TF's order."""
    columns = [columns] if _class(columns) in _CLASSES else list(columns or ())
    if not columns:
        raise ValueError(f"Argument `{name}` must have columns.")
    for column in _with_parents(columns):
        if _class(column) not in _CLASSES:
            raise TypeError(
                f"Argument `{name}` must hold columns of `tf.feature_column`, "
                f"except sequence columns. Received: {column!r} of type "
                f"{_class(column)}."
            )
    for column in columns:
        if dense and not hasattr(column, "get_dense_tensor"):
            raise ValueError(
                f"Argument `{name}` must have dense columns. Received the "
                f"categorical column {column.name!r}: wrap it in an "
                "embedding_column or indicator_column."
            )
        for holder, option in product((column, table_of(column)), _OPTIONS):
            value = getattr(holder, option, None)
            if value is not None:
                raise ValueError(
                    f"Column {column.name!r} has {option}={value!r}, which "
                    "tfdist's tables do not support."
                )
    tables = {table_of(column) for column in columns} - {None}
    for named in (columns, tables):
        names = sorted(one.name for one in named)
        if len(set(names)) < len(names):
            raise ValueError(
                f"Argument `{name}` must have columns with different names. "
                f"Received: {names}."
            )
    return tuple(sorted(columns, key=lambda column: column.name))


def shared_embeddings(
    categorical_columns: Iterable[Column],
    dimension: int,
    *arguments: Any,
    **options: Any,
) -> list[Column]:
    """Embedding columns of several features that share one embedding table.

    >>> bought, seen = (
    ...     tf.feature_column.categorical_column_with_identity(name, 100)
    ...     for name in ("bought", "seen")
    ... )
    >>> columns = tfdist.canned.shared_embeddings([bought, seen], 8)
    >>> layer = tfdist.canned.DenseFeatures(columns)
    >>> layer({"bought": tf.constant([3]), "seen": tf.constant([5])}).shape
    TensorShape([1, 16])
    >>> [tuple(table.shape) for table in layer.weights]
    [(100, 8)]

    Calls `tf.feature_column.shared_embeddings`, which in TF 2.21 works only in
    a graph. The arguments are the same, but `max_norm` and `ckpt_to_load_from`
    are not supported. Columns that you created in a graph yourself also work.
    Pass all columns to one layer, or to the network of one canned estimator:
    each layer creates its own table.
    """
    with tf.Graph().as_default():
        return tf.feature_column.shared_embeddings(
            list(categorical_columns), dimension, *arguments, **options
        )


def _class(column: Any) -> str:
    # Keras wraps shared columns, and `type` would return the wrapper.
    return column.__class__.__name__


def is_categorical(column: Column) -> bool:
    """Whether `column` yields ids; bucketized columns are dense as well."""
    return hasattr(column, "get_sparse_tensors")


def dense_size(column: Column) -> int:
    """The number of values that a dense column yields per example."""
    return math.prod(column.variable_shape)


def read_vocabularies(columns: Iterable[Column]) -> dict[Column, Lookup]:
    """Returns the vocabularies of columns and of their parent columns."""
    found = dict.fromkeys(_with_parents(columns))
    return {c: Lookup(c) for c in found if _class(c).startswith("Vocabulary")}


def _with_parents(columns: Iterable[Column]) -> Iterator[Column]:
    """Yields columns and their parent columns."""
    waiting = list(columns)
    while waiting:
        column = waiting.pop()
        yield column
        parents = getattr(column, "parents", ())
        waiting.extend(p for p in parents if not isinstance(p, str))


class Lookup:
    """The replacement for the lookup table of a vocabulary column."""

    def __init__(self, column: Column) -> None:
        self._buckets = column.num_oov_buckets
        self._default = np.int64(column.default_value)
        self._vocabulary = Vocabulary(_words(column))

    def lookup(self, words: Sparse) -> Sparse:
        """Ids of words; unknown ones get the default or an OOV bucket."""
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
    """A batch of features that feature columns read.

    Columns use a batch as their `FeatureTransformationCache` (`get`) and as the
    `StateManager` of their lookup tables (`has_resource`, `get_resource`).
    """

    def __init__(
        self, features: Features, vocabularies: Mapping[Column, Lookup]
    ) -> None:
        if not isinstance(features, Mapping):
            raise ValueError(
                "Features must be a dictionary from names to tensors; the "
                "input function must return (features, labels). "
                f"Received: {type(features).__name__}."
            )
        self._features = features
        self._vocabularies = vocabularies
        self._known: dict[str | Column, Any] = {}

    def ids(self, column: Column) -> tuple[tf.Tensor | Sparse, Sparse | None]:
        """Returns the ids of a categorical column, and their weights or None.

        A negative id stands for a missing value or for a word that is not in
        the vocabulary, and is ignored.
        """
        of_values = _class(column) in _VALUE_BY_VALUE
        if of_values and isinstance(self.get(column.key), tf.Tensor):
            ids, weights = self._dense_ids(column), None
        else:
            ids, weights = column.get_sparse_tensors(self, self)
        if ids.shape.rank not in (2, None):
            raise ValueError(
                f"The feature of column {column.name!r} must be a tensor "
                f"(batch,) or (batch, n). Received: shape {ids.shape}."
            )
        return ids, weights

    def dense(self, column: Column) -> tf.Tensor:
        """Returns a dense column's values, float32 `(batch, dense_size)`.

        Not for embedding columns, which have a table: see `look_up`.
        """
        values = column.get_dense_tensor(self, self)
        return tf.reshape(values, [tf.shape(values)[0], dense_size(column)])

    def _dense_ids(self, column: Column) -> tf.Tensor:
        """Returns the ids of a dense feature, -1 for missing values.

        TF would convert the feature to a sparse tensor, which makes a step with
        many such columns 50 % slower.
        """
        feature = self.get(column.key)
        shape = tf.shape(feature, tf.int64)
        every = tf.where(tf.ones_like(feature, tf.bool))
        values = tf.SparseTensor(every, tf.reshape(feature, [-1]), shape)
        only = SimpleNamespace(get=lambda key, manager: values)
        ids = column.transform_feature(only, self).values
        ids = tf.reshape(ids, shape)
        if feature.dtype.is_unsigned:
            return ids  # None is missing; -1 would be cast to 255.
        missing = "" if feature.dtype == tf.string else -1
        return tf.where(feature == missing, np.int64(-1), ids)

    def get(self, key: str | Column, _: Any = None) -> Any:
        """Returns the feature named `key`, or the output of column `key`."""
        if key not in self._known:
            if isinstance(key, str):
                self._known[key] = self._feature(key)
            elif _class(key) == "WeightedCategoricalColumn":
                self._known[key] = self._weighted(key)
            elif _class(key) == "NumericColumn":
                self._known[key] = self._numbers(key)
            else:
                self._known[key] = key.transform_feature(self, self)
        return self._known[key]

    def has_resource(self, column: Column, name: str) -> bool:
        """Whether there is a table for `column`."""
        return True

    def get_resource(self, column: Column, name: str) -> Lookup:
        """Returns the lookup table of a vocabulary column."""
        return self._vocabularies[column]

    def _feature(self, key: str) -> tf.Tensor | Sparse:
        if key not in self._features:
            raise ValueError(
                f"Feature {key!r} is missing. The input function returned: "
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
                f"Received: shape {value.shape}."
            )
        return value

    def _numbers(self, column: Column) -> tf.Tensor:
        if self.get(column.key).dtype == tf.string:
            raise ValueError(
                f"Numeric column {column.key!r} must have numbers. Received: "
                "strings. Convert them with `tf.strings.to_number` in the "
                "input function."
            )
        values = column.transform_feature(self, self)
        if values.shape[1:].num_elements() not in (None, dense_size(column)):
            raise ValueError(
                f"Numeric column {column.key!r} needs examples of shape "
                f"{column.shape}. Received: a batch of shape {values.shape}."
            )
        return values

    def _weighted(self, column: Column) -> tuple[Sparse, Sparse]:
        """Ids and weights; TF dropped dense weights of 0, but not their ids."""
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


def look_up(
    table: PartitionedEmbedding,
    ids: tf.Tensor | Sparse,
    weights: Sparse | None = None,
) -> tf.Tensor:
    """Returns the combined rows of `Batch.ids`' result; zeros for no ids.

    As in TF, combiners other than "sum" ignore ids without a positive weight.
    """
    if isinstance(ids, tf.Tensor):
        # Instead of a missing id, one that the batch looks up anyway: a lookup
        # changes a row, even with a gradient of zero (momentum, decay).
        other = tf.maximum(tf.reduce_max(ids), 0)
        known = tf.where(ids >= 0, ids, other)
        return table(known, tf.cast(ids >= 0, tf.float32))
    keep = ids.values >= 0
    if weights is None:
        return table(tf.sparse.retain(ids, keep))
    if table.combiner != "sum":
        keep &= weights.values > 0
    return table(tf.sparse.retain(ids, keep), tf.sparse.retain(weights, keep))


def table_of(column: Column) -> Any:
    """The object that describes an embedding column's table, or None."""
    if _class(column) == "SharedEmbeddingColumn":
        return shared_table(column)
    return column if _class(column) == "EmbeddingColumn" else None


def layer_name(column: Any) -> str:
    """The name of a column or table without "/", which separates paths."""
    return column.name.replace("/", "_")


def initializer_of(table: Any) -> Callable:
    """A table's initializer; TF's default becomes Keras', with Keras' seed."""
    initializer = table.initializer
    if type(initializer).__name__ == "TruncatedNormal":
        config = initializer.get_config()
        arguments = config["mean"], config["stddev"], config["seed"]
        return keras.initializers.TruncatedNormal(*arguments)
    return initializer


def _words(column: Column) -> list:
    """Returns the words of a vocabulary column, in order."""
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

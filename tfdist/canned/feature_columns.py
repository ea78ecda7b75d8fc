"""What `tf.feature_column`s make of a batch of features.

TF 2.21 can still make the columns, but holds nothing any more that reads them.
Here their attributes are read, and ids, buckets and crosses come out as
TF 2.15 computed them: same hash, same order of the vocabulary. No lookup table
is made, and ids depend on the features alone, as steps on parameter servers
need it.

A feature is a tensor `(batch,)` or `(batch, n)`, where `""` and `-1` stand for
"missing" in a categorical column, or a `tf.SparseTensor` or `tf.RaggedTensor`
`(batch, None)`. As in TF, a cross of features by their names crosses what is
missing in a dense tensor as well; one of columns does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Ids:
    """Ids of a categorical column.

    Attributes:
        values: int64, `(batch, n)` or sparse `(batch, None)`; a negative one
            counts for nothing: a missing value, or one that is no word of the
            vocabulary.
        weights: float32 of the same form, or None for ones.
        present: bool of the same form: what is not missing, for crosses. None
            if nothing is, always so for sparse values.
    """

    values: tf.Tensor | tf.SparseTensor
    weights: tf.Tensor | tf.SparseTensor | None = None
    present: tf.Tensor | None = None


def checked_columns(name: str, columns: Any) -> tuple[Column, ...]:
    """The columns, ordered by their names, as TF ordered them.

    Args:
        name: Of the argument, for errors.
        columns: A column or several.

    Raises:
        TypeError: something else than a column of `tf.feature_column`.
        ValueError: two columns of one name, or an option that has no
            counterpart.
    """
    if _kind(columns) in _KINDS:
        columns = [columns]
    columns = list(columns or ())
    for column in columns:
        _check(name, column)
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Argument `{name}` must have columns of different names. "
            f"Received: {sorted(names)}."
        )
    return tuple(sorted(columns, key=lambda column: column.name))


def is_categorical(column: Column) -> bool:
    """Whether `column` gives ids; a bucketized one gives both."""
    return _kind(column) in _CATEGORICAL


def is_dense(column: Column) -> bool:
    """Whether `column` gives numbers."""
    return _kind(column) in _DENSE


def dense_size(column: Column) -> int:
    """Numbers that a dense column gives for an example."""
    if _kind(column) == "NumericColumn":
        return math.prod(column.shape)
    if _kind(column) == "EmbeddingColumn":
        return column.dimension
    if _kind(column) == "IndicatorColumn":
        return column.categorical_column.num_buckets
    return column.num_buckets


class ColumnReader:
    """Reads columns; vocabularies are read once, when it is made.

    Args:
        columns: From `checked_columns`.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self._vocabularies: dict[Column, Vocabulary] = {}
        waiting = list(columns)
        while waiting:
            column = waiting.pop()
            if _kind(column).startswith("Vocabulary"):
                self._vocabularies[column] = Vocabulary(_words(column))
            elif not isinstance(column, str):
                waiting.extend(column.parents)

    def ids(self, column: Column, features: Features) -> Ids:
        """The ids of a categorical column."""
        return _CATEGORICAL[_kind(column)](self, column, features)

    def dense(self, column: Column, features: Features) -> tf.Tensor:
        """The numbers, float32 `(batch, dense_size)`, of a dense column.

        Not those of an embedding, which has a table: see `look_up`.
        """
        return _DENSE[_kind(column)](self, column, features)

    def _hashed(self, column: Column, features: Features) -> Ids:
        def hashed(values: tf.Tensor) -> tf.Tensor:
            if values.dtype != tf.string:
                values = tf.strings.as_string(values)
            return tf.strings.to_hash_bucket_fast(
                values, column.hash_bucket_size
            )

        return _each(column, features, hashed)

    def _known(self, column: Column, features: Features) -> Ids:
        vocabulary = self._vocabularies[column]

        def known(values: tf.Tensor) -> tf.Tensor:
            ids = vocabulary.ids(values)
            if not column.num_oov_buckets:
                return tf.where(ids < 0, np.int64(column.default_value), ids)
            if values.dtype != tf.string:
                values = tf.strings.as_string(values)
            others = len(vocabulary) + tf.strings.to_hash_bucket_fast(
                values, column.num_oov_buckets
            )
            return tf.where(ids < 0, others, ids)

        return _each(column, features, known)

    def _identity(self, column: Column, features: Features) -> Ids:
        def identity(values: tf.Tensor) -> tf.Tensor:
            ids = tf.cast(values, tf.int64)
            if column.default_value is None:
                return ids  # The table refuses what it does not hold.
            inside = (ids >= 0) & (ids < column.num_buckets)
            return tf.where(inside, ids, np.int64(column.default_value))

        return _each(column, features, identity)

    def _buckets(self, column: Column, features: Features) -> Ids:
        buckets = self._bucketized(column, features)
        count = len(column.boundaries) + 1
        offsets = count * np.arange(buckets.shape[1], dtype=np.int64)
        return Ids(tf.cast(buckets, tf.int64) + offsets)

    def _weighted(self, column: Column, features: Features) -> Ids:
        ids = self.ids(column.categorical_column, features)
        weights = _raw(features, column.weight_feature_key)
        if isinstance(weights, tf.SparseTensor) != isinstance(
            ids.values, tf.SparseTensor
        ):
            raise ValueError(
                f"The weights and the values of column {column.name!r} must "
                "both be sparse or both be dense."
            )
        return dataclasses.replace(ids, weights=tf.cast(weights, tf.float32))

    def _crossed(self, column: Column, features: Features) -> Ids:
        parts = []
        for key in _leaves(column):
            if isinstance(key, str):
                # As in TF, no value of a feature by itself is missing.
                parts.append(Ids(_raw(features, key)))
            else:
                parts.append(self.ids(key, features))
        sparse = any(isinstance(p.values, tf.SparseTensor) for p in parts)
        values = [_to_sparse(p) if sparse else p.values for p in parts]
        crossed = tf.sparse.cross_hashed(
            values, column.hash_bucket_size, column.hash_key
        )
        if sparse:
            return Ids(crossed)
        widths = [v.shape[1] or tf.shape(v)[1] for v in values]
        shape = [tf.shape(values[0])[0], math.prod(widths)]
        ids = tf.reshape(crossed.values, shape)
        if all(isinstance(width, int) for width in widths):
            ids.set_shape([None, math.prod(widths)])
        present = _all_present(parts)
        if present is not None:
            ids = tf.where(present, ids, -1)
        return Ids(ids, present=present)

    def _numeric(self, column: Column, features: Features) -> tf.Tensor:
        values = _raw(features, column.key, rank=None)
        if isinstance(values, tf.SparseTensor):
            raise ValueError(
                f"Numeric column {column.key!r} must get a dense tensor. "
                "Received a sparse or ragged one."
            )
        if column.normalizer_fn is not None:
            values = column.normalizer_fn(values)
        size = math.prod(column.shape)
        if values.shape[1:].num_elements() not in (None, size):
            raise ValueError(
                f"Numeric column {column.key!r} takes examples of the shape "
                f"{column.shape}. Received a batch of the shape "
                f"{values.shape}."
            )
        return tf.reshape(
            tf.cast(values, tf.float32), [tf.shape(values)[0], size]
        )

    def _bucketized(self, column: Column, features: Features) -> tf.Tensor:
        return tf.raw_ops.Bucketize(
            input=self._numeric(column.source_column, features),
            boundaries=list(column.boundaries),
        )

    def _one_hot(self, column: Column, features: Features) -> tf.Tensor:
        buckets = self._bucketized(column, features)
        one_hot = tf.one_hot(buckets, len(column.boundaries) + 1)
        return tf.reshape(one_hot, [-1, dense_size(column)])

    def _indicator(self, column: Column, features: Features) -> tf.Tensor:
        """How often, or with which weight, each id occurs in an example."""
        ids = self.ids(column.categorical_column, features)
        size = dense_size(column)
        if isinstance(ids.values, tf.SparseTensor):
            ids = _counting(ids)
            values, weights = ids.values, ids.weights
            where = tf.stack([values.indices[:, 0], values.values], axis=1)
            counts = (
                tf.ones_like(values.values, tf.float32)
                if weights is None
                else weights.values
            )
            shape = tf.stack([values.dense_shape[0], size])
            return tf.ensure_shape(
                tf.scatter_nd(where, counts, shape), [None, size]
            )
        one_hot = tf.one_hot(ids.values, size)
        if ids.weights is not None:
            one_hot *= ids.weights[..., tf.newaxis]
        return tf.reduce_sum(one_hot, axis=1)


_CATEGORICAL = {
    "HashedCategoricalColumn": ColumnReader._hashed,
    "VocabularyListCategoricalColumn": ColumnReader._known,
    "VocabularyFileCategoricalColumn": ColumnReader._known,
    "IdentityCategoricalColumn": ColumnReader._identity,
    "WeightedCategoricalColumn": ColumnReader._weighted,
    "CrossedColumn": ColumnReader._crossed,
    "BucketizedColumn": ColumnReader._buckets,
}
_DENSE = {
    "NumericColumn": ColumnReader._numeric,
    "BucketizedColumn": ColumnReader._one_hot,
    "IndicatorColumn": ColumnReader._indicator,
    "EmbeddingColumn": None,
}
_KINDS = {*_CATEGORICAL, *_DENSE}


def look_up(table: PartitionedEmbedding, ids: Ids) -> tf.Tensor:
    """Combines the rows of each example's ids; zeros where it has none.

    Args:
        table: With a combiner.
        ids: From `ColumnReader.ids`.

    Returns:
        `(batch, table.output_dim)`.
    """
    if isinstance(ids.values, tf.SparseTensor):
        ids = _counting(ids, only_positive=table.combiner != "sum")
        return table(ids.values, ids.weights)
    counts = ids.values >= 0
    weights = tf.cast(counts, tf.float32)
    if ids.weights is not None:
        weights *= ids.weights
        if table.combiner != "sum":
            weights = tf.maximum(weights, 0.0)
    return table(tf.maximum(ids.values, 0), weights)


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


def _initializer(initializer: Callable) -> Callable:
    """Keras' counterpart of the default one, which Keras' seed governs."""
    if type(initializer).__name__ == "TruncatedNormal":
        config = initializer.get_config()
        return keras.initializers.TruncatedNormal(
            config["mean"], config["stddev"], config["seed"]
        )
    return initializer


def _kind(column: Any) -> str:
    return type(column).__name__


def _check(name: str, column: Any) -> None:
    kind = _kind(column)
    if kind not in _KINDS:
        raise TypeError(
            f"Argument `{name}` must hold columns of `tf.feature_column`, none "
            "of a sequence and none with a shared embedding (which TF 2.21 "
            f"makes only in a graph). Received: {column!r} of type {kind}."
        )
    if kind == "EmbeddingColumn":
        for option, plain in (
            ("ckpt_to_load_from", None),
            ("max_norm", None),
            ("trainable", True),
        ):
            value = getattr(column, option)
            if value != plain:
                raise ValueError(
                    f"Column {column.name!r} has {option}={value!r}, which "
                    "tfdist's tables do not support."
                )


def _words(column: Column) -> list:
    """The words of a vocabulary, in order."""
    if _kind(column) == "VocabularyListCategoricalColumn":
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


def _raw(
    features: Features, key: str, rank: int | None = 2
) -> tf.Tensor | tf.SparseTensor:
    """A feature, of rank 2, or of any more if `rank` is None."""
    if key not in features:
        raise ValueError(
            f"Feature {key!r} is missing. The input function gave: "
            f"{sorted(features)}."
        )
    value = features[key]
    if isinstance(value, tf.RaggedTensor):
        value = value.to_sparse()
    if not isinstance(value, tf.SparseTensor):
        value = tf.convert_to_tensor(value)
        if value.shape.rank == 1:
            value = value[:, tf.newaxis]
    if value.shape.rank < 2 or rank not in (None, value.shape.rank):
        raise ValueError(
            f"Feature {key!r} must be a tensor (batch,) or (batch, n). "
            f"Received the shape {value.shape}."
        )
    return value


def _each(column: Column, features: Features, function: Callable) -> Ids:
    """The ids of a column that maps one feature value by value."""
    value = _raw(features, column.key)
    dtype = getattr(column, "dtype", tf.int64)
    if dtype.is_integer != value.dtype.is_integer:
        raise ValueError(
            f"Column {column.key!r} takes {dtype.name} values. Received: "
            f"{value.dtype.name}."
        )
    if isinstance(value, tf.SparseTensor):
        return Ids(value.with_values(function(value.values)))
    present = value != ("" if value.dtype == tf.string else -1)
    return Ids(tf.where(present, function(value), -1), present=present)


def _counting(ids: Ids, only_positive: bool = False) -> Ids:
    """Sparse ids without those that count for nothing."""
    keep = ids.values.values >= 0
    if ids.weights is None:
        return Ids(tf.sparse.retain(ids.values, keep))
    if only_positive:
        keep &= ids.weights.values > 0
    return Ids(
        tf.sparse.retain(ids.values, keep),
        tf.sparse.retain(ids.weights, keep),
    )


def _leaves(column: Column) -> list[Any]:
    """What a cross crosses: a cross in it stands for what that crosses."""
    leaves = []
    for key in column.keys:
        leaves += _leaves(key) if _kind(key) == "CrossedColumn" else [key]
    return leaves


def _to_sparse(ids: Ids) -> tf.SparseTensor:
    if isinstance(ids.values, tf.SparseTensor):
        return ids.values
    present = ids.present
    if present is None:
        present = tf.ones_like(ids.values, tf.bool)
    where = tf.where(present)
    return tf.SparseTensor(
        where,
        tf.gather_nd(ids.values, where),
        tf.shape(ids.values, out_type=tf.int64),
    )


def _all_present(parts: Sequence[Ids]) -> tf.Tensor | None:
    """For each combination, last part fastest, whether no part is missing."""
    if all(part.present is None for part in parts):
        return None
    whole = None
    for part in parts:
        present = part.present
        if present is None:
            present = tf.ones_like(part.values, tf.bool)
        if whole is not None:
            pairs = whole[:, :, tf.newaxis] & present[:, tf.newaxis, :]
            count = tf.reduce_prod(tf.shape(pairs)[1:])
            present = tf.reshape(pairs, [tf.shape(pairs)[0], count])
        whole = present
    return whole

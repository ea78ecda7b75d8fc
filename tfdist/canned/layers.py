"""Layers for `tf.feature_column`s: dense features, a linear model, a network.

In a canned model, the variables have the shapes of TF 2.15's canned estimators
and nearly the same names; `tfdist.checkpoint.estimator_checkpoint` maps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.private import column_config, column_from_config
from tfdist.canned.feature_columns import (
    Batch,
    Column,
    Features,
    Lookup,
    Partitioner,
    checked_columns,
    dense_size,
    initializer_of,
    is_categorical,
    layer_name,
    look_up,
    read_vocabularies,
    table_of,
)
from tfdist.embeddings.layer import PartitionedEmbedding


class _OfColumns(keras.layers.Layer):
    """Reads features, or the `Batch` shared by the parts of a canned model."""

    _tables: Mapping[str, PartitionedEmbedding]

    def __init__(self, columns: Any, dense: bool, **kwargs: Any) -> None:
        # Features cast to 16 bits would fall into other buckets.
        super().__init__(autocast=False, **kwargs)
        checked = checked_columns("feature_columns", columns, dense=dense)
        self.feature_columns = checked

    @functools.cached_property
    def _vocabularies(self) -> Mapping[Column, Lookup]:
        with tf.init_scope():
            return read_vocabularies(self.feature_columns)

    def _batch(self, features: Features | Batch) -> Batch:
        if isinstance(features, Batch):
            return features
        return Batch(features, self._vocabularies)

    def build(self, features_shape: Any = None) -> None:
        """Creates the embedding tables."""
        for table in self._tables.values():
            table.build()

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration for `from_config`."""
        columns = [column_config(column) for column in self.feature_columns]
        return {**super().get_config(), "feature_columns": columns}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> keras.layers.Layer:
        """Creates a layer from its configuration, with one shard per table."""
        columns = [column_from_config(c) for c in config["feature_columns"]]
        return cls(**{**config, "feature_columns": columns})


@keras.saving.register_keras_serializable(package="tfdist")
class DenseFeatures(_OfColumns):
    """Concatenates the dense values that `tf.feature_column`s produce.

    >>> age = tf.feature_column.numeric_column("age")
    >>> job = tf.feature_column.categorical_column_with_hash_bucket("job", 100)
    >>> job = tf.feature_column.embedding_column(job, 8)
    >>> features = {
    ...     "age": keras.Input([1], name="age"),
    ...     "job": keras.Input([1], dtype="string", name="job"),
    ... }
    >>> net = tfdist.canned.DenseFeatures([age, job])(features)
    >>> keras.Model(features, keras.layers.Dense(1)(net)).output_shape
    (None, 1)

    Like `tf.keras.layers.DenseFeatures` of TF 2.15: the same values, ordered by
    column name. A `.keras` file contains the paths of vocabulary files, not the
    words, and requires that a `normalizer_fn` is registered as a custom object
    in `keras.saving`. A layer with columns of `shared_embeddings` cannot be
    saved as `.keras`: save its weights instead.

    Args:
        feature_columns: Dense columns of `tf.feature_column` or of
            `shared_embeddings`.
        partitioner: Partitions the embedding tables, which are
            `PartitionedEmbedding`s; see `tfdist.placement`. Default: one shard.
        **kwargs: As for `keras.layers.Layer`.

    Call arguments:
        features: Dictionary from name to a tensor `(batch,)` or `(batch, n)`,
            dense, ragged or sparse. In dense tensors `""` and `-1` stand for a
            missing id. Features that no column uses are ignored. The layer
            returns `(batch, n)` in its compute dtype.

    Raises:
        TypeError: An entry of `feature_columns` is not a column.
        ValueError: There are no columns, one is categorical or has an
            unsupported option (`max_norm`, `ckpt_to_load_from`), or two have
            the same name; in a call: a feature is missing or has a wrong shape.
    """

    def __init__(
        self,
        feature_columns: Iterable[Column] | Column,
        *,
        partitioner: Partitioner | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_columns, dense=True, **kwargs)
        self.size = sum(map(dense_size, self.feature_columns))
        self._tables = {
            table.name: PartitionedEmbedding(
                column.categorical_column.num_buckets,
                table.dimension,
                partitioner=partitioner,
                combiner=column.combiner,
                embeddings_initializer=initializer_of(table),
                trainable=table.trainable,
                name=layer_name(table),
                dtype=self.dtype_policy,
            )
            for column in self.feature_columns
            if (table := table_of(column)) is not None
        }

    def call(self, features: Features | Batch) -> tf.Tensor:
        """Returns the dense values; see the class."""
        batch, parts = self._batch(features), []
        for column in self.feature_columns:
            table = table_of(column)
            if table is None:
                values = batch.dense(column)
            else:
                ids = batch.ids(column.categorical_column)
                values = look_up(self._tables[table.name], *ids)
            parts.append(tf.cast(values, self.compute_dtype))
        return tf.concat(parts, axis=1)


@keras.saving.register_keras_serializable(package="tfdist")
class LinearModel(_OfColumns):
    """A linear model: for each unit a weighted sum of features, plus a bias.

    >>> job = tf.feature_column.categorical_column_with_hash_bucket("job", 100)
    >>> model = keras.Sequential([tfdist.canned.LinearModel(job)])
    >>> model({"job": tf.constant(["clerk", "baker"])}).numpy().tolist()
    [[0.0], [0.0]]

    Computes the same as `tf.compat.v1.feature_column.linear_model`. All weights
    are initialized to zero; those of a categorical column are a table. See
    `DenseFeatures` for the other arguments, the features and the errors.

    Args:
        feature_columns: Categorical or dense columns of `tf.feature_column`.
        units: Number of outputs: the result is `(batch, units)`.
        sparse_combiner: `"sum"`, `"mean"` or `"sqrtn"`: how to combine the
            weights of several ids of one column.
    """

    def __init__(
        self,
        feature_columns: Iterable[Column] | Column,
        units: int = 1,
        sparse_combiner: str = "sum",
        *,
        partitioner: Partitioner | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_columns, dense=False, **kwargs)
        self.units, self.sparse_combiner = units, sparse_combiner
        self._tables = {
            column.name: PartitionedEmbedding(
                column.num_buckets,
                units,
                partitioner=partitioner,
                combiner=sparse_combiner,
                embeddings_initializer="zeros",
                name=layer_name(column),
                dtype=self.dtype_policy,
            )
            for column in self.feature_columns
            if is_categorical(column)
        }
        self._dense = [c for c in self.feature_columns if not is_categorical(c)]
        self._numbers = self._dense and DenseFeatures(
            self._dense,
            partitioner=partitioner,
            name="input_layer",
            dtype=self.dtype_policy,
        )
        self._kernels = [
            keras.layers.Dense(
                units,
                use_bias=False,
                kernel_initializer="zeros",
                name=layer_name(column),
                dtype=self.dtype_policy,
            )
            for column in self._dense
        ]

    def build(self, features_shape: Any = None) -> None:
        """Creates the weights."""
        super().build()
        if self._numbers:
            self._numbers.build()
        for layer, column in zip(self._kernels, self._dense, strict=True):
            layer.build((None, dense_size(column)))
        self.bias = self.add_weight((self.units,), "zeros", name="bias_weights")

    def call(self, features: Features | Batch) -> tf.Tensor:
        """Returns the weighted sums; see the class."""
        batch = self._batch(features)
        columns = filter(is_categorical, self.feature_columns)
        parts = [look_up(self._tables[c.name], *batch.ids(c)) for c in columns]
        if self._numbers:
            kernel = tf.concat([layer.kernel for layer in self._kernels], 0)
            kernel = tf.cast(kernel, self.compute_dtype)
            parts.append(tf.matmul(self._numbers(features=batch), kernel))
        return tf.add_n(parts) + tf.cast(self.bias, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration for `from_config`."""
        own = {"units": self.units, "sparse_combiner": self.sparse_combiner}
        return {**super().get_config(), **own}


class DNNModel(keras.layers.Layer):
    """Hidden layers on dense columns, followed by a linear layer.

    A hidden layer: dense with activation, dropout, batch normalization.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        units: int,
        partitioner: Partitioner | None,
        hidden_units: Sequence[int],
        activation_fn: Callable | str | None,
        dropout: float | None,
        batch_norm: bool,
    ) -> None:
        super().__init__(name="dnn")
        layers = keras.layers
        self._input_layer = DenseFeatures(
            columns, partitioner=partitioner, name="input_layer"
        )
        self.feature_columns = self._input_layer.feature_columns
        self._hidden = []
        activation = activation_fn or "relu"
        for i, size in enumerate(hidden_units):
            hidden = layers.Dense(size, activation, name=f"hiddenlayer_{i}")
            self._hidden.append(hidden)
            if dropout is not None:
                self._hidden.append(layers.Dropout(dropout))
            if batch_norm:
                # TF 2.15: Keras' 0.99 "crashes on certain problem[s]".
                options = {"momentum": 0.999, "name": f"batchnorm_{i}"}
                self._hidden.append(layers.BatchNormalization(**options))
        self._hidden.append(layers.Dense(units, name="logits"))

    def build(self) -> None:
        """Creates the weights."""
        self._input_layer.build()
        size = self._input_layer.size
        for layer in self._hidden:
            layer.build((None, size))
            size = getattr(layer, "units", size)

    def call(self, features: Batch, training: bool | None = None) -> tf.Tensor:
        """Returns `(batch, units)` in the layer's compute dtype."""
        values = self._input_layer(features=features)
        for layer in self._hidden:
            # Keras passes `training` on to the layers that accept it.
            values = layer(values)
        return values

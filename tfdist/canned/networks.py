"""The parts of a canned model: a weighted sum of features, a network over them.

Variables have the shapes of TF 2.15's canned estimators and nearly the same
names; `tfdist.checkpoint.estimator_checkpoint` knows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.canned import feature_columns
from tfdist.canned.feature_columns import (
    Batch,
    Column,
    Partitioner,
    dense_size,
    is_categorical,
    layer_name,
)
from tfdist.embeddings.layer import PartitionedEmbedding

# TF 2.15's choice: it found that Keras' 0.99 "crashes on certain problem[s]".
_BATCH_NORM_MOMENTUM = 0.999


class InputLayer(keras.layers.Layer):
    """Dense columns side by side: what `tf.keras.layers.DenseFeatures` was."""

    def __init__(
        self, columns: Sequence[Column], partitioner: Partitioner | None
    ) -> None:
        super().__init__(name="input_layer")
        self._columns = tuple(columns)
        self._tables = {
            column.name: feature_columns.embedding(column, partitioner)
            for column in columns
            if hasattr(column, "dimension")
        }
        self.size = sum(dense_size(column) for column in columns)

    def build(self) -> None:
        """Creates the tables."""
        for table in self._tables.values():
            table.build()

    def call(self, batch: Batch) -> tf.Tensor:
        """The numbers, float32 `(batch, size)`."""
        parts = []
        for column in self._columns:
            table = self._tables.get(column.name)
            if table is None:
                parts.append(batch.dense(column))
            else:
                ids, weights = batch.ids(column.categorical_column)
                parts.append(feature_columns.look_up(table, ids, weights))
        return tf.concat(parts, axis=1)


class LinearModel(keras.layers.Layer):
    """A weighted sum of features for each unit, and a bias; zeros at first.

    The weights of a column that gives ids are a table.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        units: int,
        partitioner: Partitioner | None,
        sparse_combiner: str,
    ) -> None:
        super().__init__(name="linear")
        self._units = units
        self._categorical = [c for c in columns if is_categorical(c)]
        self._tables = [
            PartitionedEmbedding(
                column.num_buckets,
                units,
                partitioner=partitioner,
                combiner=sparse_combiner,
                embeddings_initializer="zeros",
                name=layer_name(column),
            )
            for column in self._categorical
        ]
        self._numeric = [c for c in columns if not is_categorical(c)]
        self._dense = [
            keras.layers.Dense(
                units,
                use_bias=False,
                kernel_initializer="zeros",
                name=layer_name(column),
            )
            for column in self._numeric
        ]

    def build(self) -> None:
        """Creates the weights."""
        for table in self._tables:
            table.build()
        for column, layer in zip(self._numeric, self._dense, strict=True):
            layer.build((None, dense_size(column)))
        self._bias = self.add_weight(
            shape=(self._units,), initializer="zeros", name="bias_weights"
        )

    def call(self, batch: Batch) -> tf.Tensor:
        """The sums, float32 `(batch, units)`."""
        parts = [
            feature_columns.look_up(table, *batch.ids(column))
            for column, table in zip(
                self._categorical, self._tables, strict=True
            )
        ]
        if self._numeric:
            values = [batch.dense(column) for column in self._numeric]
            weights = [tf.convert_to_tensor(d.kernel) for d in self._dense]
            parts.append(
                tf.matmul(tf.concat(values, axis=1), tf.concat(weights, axis=0))
            )
        return tf.add_n(parts) + tf.convert_to_tensor(self._bias)


class DNNModel(keras.layers.Layer):
    """Hidden layers over dense columns, then one linear layer.

    A hidden layer is: weights, activation, dropout, batch normalization.
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
        self._input_layer = InputLayer(columns, partitioner)
        self._hidden = []
        for i, size in enumerate(hidden_units):
            self._hidden.append(
                layers.Dense(
                    size, activation_fn or "relu", name=f"hiddenlayer_{i}"
                )
            )
            if dropout is not None:
                self._hidden.append(layers.Dropout(dropout))
            if batch_norm:
                self._hidden.append(
                    layers.BatchNormalization(
                        momentum=_BATCH_NORM_MOMENTUM, name=f"batchnorm_{i}"
                    )
                )
        self._hidden.append(layers.Dense(units, name="logits"))

    def build(self) -> None:
        """Creates the weights."""
        self._input_layer.build()
        size = self._input_layer.size
        for layer in self._hidden:
            layer.build((None, size))
            size = getattr(layer, "units", size)

    def call(self, batch: Batch, training: bool | None = None) -> tf.Tensor:
        """The numbers, float32 `(batch, units)`."""
        values = self._input_layer(batch=batch)
        for layer in self._hidden:
            # Keras hands `training` on to the layers that take it.
            values = layer(values)
        return values

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
    Column,
    ColumnReader,
    Features,
    Partitioner,
    dense_size,
    is_categorical,
    layer_name,
)
from tfdist.embeddings.layer import PartitionedEmbedding

# TF 2.15's choice: it found that Keras' 0.99 "crashes on certain problem[s]".
_BATCH_NORM_MOMENTUM = 0.999


class InputLayer(keras.layers.Layer):
    """Columns side by side, in the order of their names.

    What `tf.keras.layers.DenseFeatures` was.

    Args:
        columns: Dense columns from `feature_columns.checked_columns`.
        partitioner: Splits the tables of embeddings.
        name: Name of the layer.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        partitioner: Partitioner | None,
        name: str = "input_layer",
    ) -> None:
        super().__init__(name=name)
        self._columns = tuple(columns)
        self._reader = ColumnReader(columns)
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

    def call(self, features: Features) -> tf.Tensor:
        """The numbers, float32 `(batch, size)`."""
        parts = []
        for column in self._columns:
            if column.name in self._tables:
                ids = self._reader.ids(column.categorical_column, features)
                table = self._tables[column.name]
                parts.append(feature_columns.look_up(table, ids))
            else:
                parts.append(self._reader.dense(column, features))
        return tf.concat(parts, axis=1)


class LinearModel(keras.layers.Layer):
    """A weighted sum of features for each unit, and a bias; zeros at first.

    Args:
        columns: From `feature_columns.checked_columns`. The weights of one
            that gives ids are a table.
        units: Sums for an example.
        sparse_combiner: "sum", "mean" or "sqrtn": how the weights of several
            ids of one column are combined.
        partitioner: Splits the tables.
        name: Name of the layer.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        units: int,
        sparse_combiner: str = "sum",
        partitioner: Partitioner | None = None,
        name: str = "linear",
    ) -> None:
        super().__init__(name=name)
        self._units = units
        self._categorical = [c for c in columns if is_categorical(c)]
        self._reader = ColumnReader(self._categorical)
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
        dense = [c for c in columns if not is_categorical(c)]
        self._input_layer = InputLayer(dense, partitioner) if dense else None
        self._sizes = [dense_size(column) for column in dense]
        self._dense = [
            keras.layers.Dense(
                units,
                use_bias=False,
                kernel_initializer="zeros",
                name=layer_name(column),
            )
            for column in dense
        ]

    def build(self) -> None:
        """Creates the weights."""
        for table in self._tables:
            table.build()
        if self._input_layer is not None:
            self._input_layer.build()
        for layer, size in zip(self._dense, self._sizes, strict=True):
            layer.build((None, size))
        self._bias = self.add_weight(
            shape=(self._units,), initializer="zeros", name="bias_weights"
        )

    def call(self, features: Features) -> tf.Tensor:
        """The sums, float32 `(batch, units)`."""
        parts = [
            feature_columns.look_up(table, self._reader.ids(column, features))
            for column, table in zip(
                self._categorical, self._tables, strict=True
            )
        ]
        if self._input_layer is not None:
            values = self._input_layer(features)
            weights = [tf.convert_to_tensor(d.kernel) for d in self._dense]
            parts.append(tf.matmul(values, tf.concat(weights, axis=0)))
        return tf.add_n(parts) + tf.convert_to_tensor(self._bias)


class DNNModel(keras.layers.Layer):
    """Hidden layers over dense columns, then one linear layer.

    A hidden layer is: weights, activation, dropout, batch normalization.

    Args:
        columns: Dense columns from `feature_columns.checked_columns`.
        units: Numbers for an example.
        hidden_units: Sizes of the hidden layers.
        activation_fn: After each hidden layer.
        dropout: Part of each hidden layer's outputs that is dropped.
        batch_norm: Whether to normalize after each hidden layer.
        partitioner: Splits the tables of embeddings.
        name: Name of the layer.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        units: int,
        hidden_units: Sequence[int],
        activation_fn: Callable | str | None = "relu",
        dropout: float | None = None,
        batch_norm: bool = False,
        partitioner: Partitioner | None = None,
        name: str = "dnn",
    ) -> None:
        super().__init__(name=name)
        self._input_layer = InputLayer(columns, partitioner)
        self._hidden = []
        self._sizes = [self._input_layer.size]
        for i, size in enumerate(hidden_units):
            self._add(
                keras.layers.Dense(
                    size,
                    activation_fn or "relu",
                    name=f"hiddenlayer_{i}",
                )
            )
            if dropout is not None:
                self._add(keras.layers.Dropout(dropout))
            if batch_norm:
                self._add(
                    keras.layers.BatchNormalization(
                        momentum=_BATCH_NORM_MOMENTUM, name=f"batchnorm_{i}"
                    )
                )
        self._add(keras.layers.Dense(units, name="logits"))

    def _add(self, layer: keras.layers.Layer) -> None:
        self._hidden.append(layer)
        self._sizes.append(getattr(layer, "units", self._sizes[-1]))

    def build(self) -> None:
        """Creates the weights."""
        self._input_layer.build()
        for layer, size in zip(self._hidden, self._sizes, strict=False):
            layer.build((None, size))

    def call(
        self, features: Features, training: bool | None = None
    ) -> tf.Tensor:
        """The numbers, float32 `(batch, units)`."""
        values = self._input_layer(features)
        for layer in self._hidden:
            # Keras hands `training` on to the layers that take it.
            values = layer(values)
        return values

"""The parts of a canned model: a weighted sum of features, a network over them.

Variables are named as in TF 2.15's canned estimators, as far as Keras names
allow, and shaped and ordered as there:

    linear/<column>/weights           linear/linear_model/<column>/weights
    linear/bias_weights               linear/linear_model/bias_weights
    dnn/<column>_embedding/embeddings dnn/input_from_feature_columns/
                                      input_layer/<column>_embedding/
                                      embedding_weights
    dnn/hiddenlayer_<i>/kernel, bias  the same
    dnn/batchnorm_<i>/gamma, ...      dnn/hiddenlayer_<i>/batchnorm_<i>/...
    dnn/logits/kernel, bias           the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import feature_columns
from tfdist.embedding import PartitionedEmbedding
from tfdist.feature_columns import (
    Column,
    ColumnReader,
    Features,
    Partitioner,
    dense_size,
    layer_name,
)

# TF 2.15's reason: with Keras' 0.99 training "crashes on certain problems".
_BATCH_NORM_MOMENTUM = 0.999


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
        self.units = units
        self._columns = _Columns(columns)
        self._inputs = _DenseInputs(columns, partitioner)
        self._tables = {
            column.name: PartitionedEmbedding(
                column.num_buckets,
                units,
                partitioner=partitioner,
                combiner=sparse_combiner,
                embeddings_initializer="zeros",
                name=layer_name(column),
            )
            for column in columns
            if feature_columns.is_categorical(column)
        }

    def build(self) -> None:
        """Creates the weights."""
        for table in self._tables.values():
            table.build()
        self._weights_of = {}
        for column in self._columns.all:
            if column.name in self._tables:
                continue
            self._inputs.build(column)
            self._weights_of[column.name] = self.add_weight(
                shape=(dense_size(column), self.units),
                initializer="zeros",
                name=f"{layer_name(column)}_weights",
            )
        self.bias = self.add_weight(
            shape=(self.units,), initializer="zeros", name="bias_weights"
        )

    def call(self, features: Features) -> tf.Tensor:
        """The sums, float32 `(batch, units)`."""
        total = self.bias
        for column in self._columns.all:
            if column.name in self._tables:
                ids = self._columns.reader.ids(column, features)
                total += feature_columns.look_up(
                    self._tables[column.name], ids
                )
            else:
                values = self._inputs(column, features)
                total += tf.matmul(values, self._weights_of[column.name])
        return total

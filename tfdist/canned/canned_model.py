"""The Keras model of a canned estimator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.arguments import check_one_of
from tfdist.canned import heads
from tfdist.canned.feature_columns import Batch, Features, read_vocabularies
from tfdist.canned.heads import Head
from tfdist.estimator.serving import Serving

_REDUCTIONS = ("sum_over_batch_size", "sum")


class CannedModel(keras.Model):
    """The Keras model of a canned estimator: features to logits.

    The logits are the sum of the outputs of `parts`, which are layers of
    feature columns. `head` computes predictions, losses and metrics from the
    logits. The other arguments are those of the canned estimators.
    """

    def __init__(
        self,
        head: Head,
        parts: Sequence[keras.layers.Layer],
        weight_column: Any,
        loss_reduction: str,
    ) -> None:
        super().__init__(name="canned")
        self._head = head
        self._parts = list(parts)
        self._columns = [c for part in parts for c in part.feature_columns]
        self._vocabularies = read_vocabularies(self._columns)
        self._weight_column = weight_column
        self._reduction = loss_reduction
        self._metrics_of_head = head.metrics()
        for part in self._parts:
            # Not in `build`: variable paths must begin with the part's name.
            part.build()
        self.built = True

    def call(
        self, features: Features, training: bool | None = None
    ) -> tf.Tensor:
        """Returns the logits, float32 `(batch, head.units)`."""
        batch = Batch(features, self._vocabularies)
        # By keyword: Keras accepts only tensors as positional arguments.
        logits = [part(features=batch) for part in self._parts]
        return tf.add_n([tf.cast(each, tf.float32) for each in logits])

    def compute_loss(
        self,
        x: Features,
        y: tf.Tensor,
        y_pred: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        training: bool = True,
    ) -> tf.Tensor:
        """Returns the loss of a batch, reduced as `loss_reduction` says."""
        losses = self._head.losses(self._head.labels(y), y_pred)
        weights = self._weights(x, sample_weight)
        loss = heads.total_loss(losses, weights, self._reduction)
        return tf.add_n([loss, *self.losses])

    def compute_metrics(
        self,
        x: Features,
        y: tf.Tensor,
        y_pred: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
    ) -> dict[str, Any]:
        """Updates the head's metrics, and compiled metrics with the logits."""
        labels, weights = self._head.labels(y), self._weights(x, sample_weight)
        values = self._head.values(labels, y_pred)
        heads.update(self._metrics_of_head, values, weights)
        return super().compute_metrics(x, labels, y_pred, weights)

    def predict_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Returns the predictions for a batch, whose labels are ignored."""
        features, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.predictions(features)

    def predictions(self, features: Features) -> dict[str, tf.Tensor]:
        """Returns the head's predictions by name, each `(batch, n)`."""
        return self._head.predictions(self(features, training=False))

    def serving(self) -> Serving:
        """Returns the signatures to export; see `tfdist.estimator.serving`.

        Features that are passed as tensors are dense. In a categorical column
        `""` or -1 marks a missing value.
        """
        examples = tf.feature_column.make_parse_example_spec(self._columns)
        inputs = {}
        for name, feature in examples.items():
            # A feature without a shape has a variable length.
            shape = [None, *getattr(feature, "shape", [None])]
            inputs[name] = tf.TensorSpec(shape, feature.dtype, name)
        return Serving(
            model=self,
            inputs=inputs,
            predict=self.predictions,
            examples=examples,
            classification=self._head.classification,
            regression=self._head.regression,
        )

    def _weights(
        self, features: Features, sample_weight: tf.Tensor | None
    ) -> tf.Tensor | None:
        """The weights of the examples, `(batch, n)`: column times Keras'."""
        weights = []
        if self._weight_column is not None:
            column = self._weight_column
            if isinstance(column, str):
                column = tf.feature_column.numeric_column(column)
            weights.append(Batch(features, {}).dense(column))
        if sample_weight is not None:
            weight = tf.cast(sample_weight, tf.float32)
            one_each = weight.shape.rank == 1
            weights.append(weight[:, tf.newaxis] if one_each else weight)
        return math.prod(weights) if weights else None


def check_loss(weight_column: Any, loss_reduction: str) -> None:
    """Raises for an unknown reduction or a non-numeric weight column."""
    check_one_of("loss_reduction", loss_reduction, _REDUCTIONS)
    if not isinstance(weight_column, str | None) and (
        type(weight_column).__name__ != "NumericColumn"
    ):
        raise TypeError(
            "Argument `weight_column` must be a name or a numeric_column. "
            f"Received: weight_column={weight_column!r}."
        )

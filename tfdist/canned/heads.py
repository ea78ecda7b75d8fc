"""Prediction heads: from logits and labels to loss, metrics, predictions.

Metrics, their names and weighting, and predictions are those of TF 2.15. All
metrics keep sums, so that the metrics of several workers can be added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_positive
from tfdist.canned.vocabulary import Vocabulary

Metrics = dict[str, keras.Metric]
# What to update each metric with: values, or labels and values.
Values = dict[str, tuple[tf.Tensor, ...]]


class Head:
    """The interface of all heads.

    Attributes:
        units: Number of logits per example.
        classification, regression: As in `tfdist.Serving`.
    """

    units: int
    classification: tuple[str, str] | None = None
    regression: str | None = None
    _metrics: ClassVar[Mapping[str, Callable[..., keras.Metric]]]

    def labels(self, y: tf.Tensor) -> tf.Tensor:
        """Returns the labels as numbers, in the shape of `losses`."""
        raise NotImplementedError

    def losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """Returns the unweighted loss of each label."""
        raise NotImplementedError

    def metrics(self) -> Metrics:
        """Returns new metrics by name."""
        return {name: make(name=name) for name, make in self._metrics.items()}

    def values(self, labels: tf.Tensor, logits: tf.Tensor) -> Values:
        """Returns the values with which `update` updates each metric."""
        raise NotImplementedError

    def predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the predictions by name, each `(batch, n)`."""
        raise NotImplementedError


class _ClassHead(Head):
    """A head for classes that have names or are numbered from 0."""

    classification = ("all_classes", "probabilities")

    def __init__(self, n_classes: int, names: Sequence[str] | None) -> None:
        self.units = n_classes if n_classes > 2 else 1
        self._names = [str(i) for i in range(n_classes)]
        self._vocabulary = None
        if names is not None:
            self._names, self._vocabulary = list(names), Vocabulary(names)

    def _ids(self, y: tf.Tensor) -> tf.Tensor:
        """Returns numbers unchanged, strings as indices in the vocabulary."""
        labels = _column(y, 1)
        if (labels.dtype == tf.string) != (self._vocabulary is not None):
            raise ValueError(
                "Labels must be strings if `label_vocabulary` is given, else "
                f"numbers. Received: labels of type {labels.dtype.name}."
            )
        return self._vocabulary.ids(labels) if self._vocabulary else labels

    def _classes(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the predictions for logits `(batch, classes)`."""
        class_ids = tf.argmax(logits, axis=1)[:, tf.newaxis]
        every = tf.ones_like(logits, tf.int32) * tf.range(len(self._names))
        names = tf.constant(self._names)
        return {
            "probabilities": tf.nn.softmax(logits),
            "class_ids": class_ids,
            "classes": tf.gather(names, class_ids),
            "all_class_ids": every,
            "all_classes": tf.gather(names, every),
        }


class _AccuracyBaseline(keras.metrics.Mean):
    """Accuracy of always predicting the more frequent class."""

    def result(self) -> tf.Tensor:
        mean = super().result()
        return keras.ops.maximum(mean, 1.0 - mean)


class _BinaryHead(_ClassHead):
    """Two classes, one logit; labels are `(batch, 1)` and between 0 and 1."""

    regression = "logistic"
    _metrics: ClassVar = {
        "accuracy": keras.metrics.Mean,
        "accuracy_baseline": _AccuracyBaseline,
        "auc": keras.metrics.AUC,
        "auc_precision_recall": partial(keras.metrics.AUC, curve="PR"),
        "average_loss": keras.metrics.Mean,
        "label/mean": keras.metrics.Mean,
        "precision": keras.metrics.Precision,
        "prediction/mean": keras.metrics.Mean,
        "recall": keras.metrics.Recall,
    }

    def labels(self, y: tf.Tensor) -> tf.Tensor:
        labels = tf.cast(self._ids(y), tf.float32)
        return _in_range(labels, (labels >= 0) & (labels <= 1), "[0, 1]")

    def losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)

    def values(self, labels: tf.Tensor, logits: tf.Tensor) -> Values:
        logistic = tf.sigmoid(logits)
        # Like the argmax of (0, logit): a logit of 0 means class 0.
        class_ids = tf.cast(logits > 0, tf.float32)
        return {
            "accuracy": (tf.cast(class_ids == labels, tf.float32),),
            "accuracy_baseline": (labels,),
            "auc": (labels, logistic),
            "auc_precision_recall": (labels, logistic),
            "average_loss": (self.losses(labels, logits),),
            "label/mean": (labels,),
            "precision": (labels, class_ids),
            "prediction/mean": (logistic,),
            "recall": (labels, class_ids),
        }

    def predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        two = tf.concat([tf.zeros_like(logits), logits], axis=1)
        logistic = tf.sigmoid(logits)
        return {"logits": logits, "logistic": logistic, **self._classes(two)}


class _MultiClassHead(_ClassHead):
    """More than two classes, one logit each; labels are int64 `(batch, 1)`.

    Losses are `(batch, 1)` as well.
    """

    _metrics = dict.fromkeys(("accuracy", "average_loss"), keras.metrics.Mean)

    def labels(self, y: tf.Tensor) -> tf.Tensor:
        labels = self._ids(y)
        if not labels.dtype.is_integer:
            raise ValueError(
                "Labels of a classifier with n_classes > 2 must be integers, "
                "or strings with a `label_vocabulary`. Received: "
                f"{labels.dtype.name}."
            )
        labels = tf.cast(labels, tf.int64)
        inside = (labels >= 0) & (labels < self.units)
        return _in_range(labels, inside, f"[0, {self.units})")

    def losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits
        return cross_entropy(labels[:, 0], logits)[:, tf.newaxis]

    def values(self, labels: tf.Tensor, logits: tf.Tensor) -> Values:
        class_ids = tf.argmax(logits, axis=1)[:, tf.newaxis]
        return {
            "accuracy": (tf.cast(class_ids == labels, tf.float32),),
            "average_loss": (self.losses(labels, logits),),
        }

    def predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"logits": logits, **self._classes(logits)}


class _RegressionHead(Head):
    """Regression by squared errors; all `(batch, label_dimension)`."""

    regression = "predictions"
    _metrics = dict.fromkeys(
        ("average_loss", "label/mean", "prediction/mean"), keras.metrics.Mean
    )

    def __init__(self, label_dimension: int) -> None:
        self.units = label_dimension

    def labels(self, y: tf.Tensor) -> tf.Tensor:
        return tf.cast(_column(y, self.units), tf.float32)

    def losses(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return tf.math.squared_difference(logits, labels)

    def values(self, labels: tf.Tensor, logits: tf.Tensor) -> Values:
        return {
            "average_loss": (self.losses(labels, logits),),
            "label/mean": (labels,),
            "prediction/mean": (logits,),
        }

    def predictions(self, logits: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"predictions": logits}


def class_head(
    n_classes: int = 2, label_vocabulary: Sequence[str] | None = None
) -> Head:
    """Returns the head of a classifier."""
    if not isinstance(n_classes, int | np.integer) or n_classes < 2:
        raise ValueError(
            "Argument `n_classes` must be an integer of at least 2. Received: "
            f"n_classes={n_classes!r}."
        )
    if label_vocabulary is not None and (
        not isinstance(label_vocabulary, list | tuple)
        or len(label_vocabulary) != n_classes
    ):
        raise ValueError(
            "Argument `label_vocabulary` must be a list of n_classes names. "
            f"Received: n_classes={n_classes}, label_vocabulary="
            f"{label_vocabulary!r}."
        )
    kind = _BinaryHead if n_classes == 2 else _MultiClassHead
    return kind(n_classes, label_vocabulary)


def regression_head(label_dimension: int = 1) -> Head:
    """Returns the head of a regressor."""
    check_positive("label_dimension", label_dimension)
    return _RegressionHead(label_dimension)


def update(metrics: Metrics, values: Values, weights: tf.Tensor | None) -> None:
    """Updates metrics; weights are `(batch, 1)` or have the labels' shape."""
    for name, arguments in values.items():
        sample_weight = weights
        if weights is not None:
            shape = tf.shape(arguments[0])
            sample_weight = tf.reshape(tf.broadcast_to(weights, shape), [-1])
        flat = [tf.reshape(argument, [-1]) for argument in arguments]
        metrics[name].update_state(*flat, sample_weight=sample_weight)


def total_loss(
    losses: tf.Tensor, weights: tf.Tensor | None, reduction: str
) -> tf.Tensor:
    """Returns the loss of a batch: the sum or the mean of weighted losses."""
    weighted = losses if weights is None else losses * weights
    reduce = tf.reduce_sum if reduction == "sum" else tf.reduce_mean
    return reduce(weighted)


def _column(y: Any, size: int) -> tf.Tensor:
    """Returns labels as a tensor of rank 2."""
    if y is None:
        raise ValueError(
            "A canned estimator needs input of the form (features, labels). "
            "Received: only features."
        )
    if isinstance(y, tf.SparseTensor | tf.RaggedTensor):
        raise ValueError("Labels must be a dense tensor.")
    y = tf.convert_to_tensor(y)
    if y.shape.rank == 1 and size == 1:
        return y[:, tf.newaxis]
    if y.shape.rank != 2 or y.shape[1] not in (size, None):
        raise ValueError(
            f"Labels must have the shape (batch, {size})"
            f"{' or (batch,)' if size == 1 else ''}. Received: {y.shape}."
        )
    # Checks an unknown shape at each step; losses would silently broadcast.
    return tf.ensure_shape(y, [None, size])


def _in_range(labels: tf.Tensor, inside: tf.Tensor, interval: str) -> tf.Tensor:
    """Returns `labels` after an assertion that all are `inside`."""
    if tf.executing_eagerly():
        # Check only in training steps: before the first one, the metrics are
        # built by calling the model on zeros and empty strings.
        return labels
    check = tf.debugging.Assert(
        tf.reduce_all(inside),
        [
            f"Labels must be in {interval}, or words of the vocabulary (others "
            "are shown as -1). Received:",
            tf.boolean_mask(labels, ~inside),
        ],
    )
    with tf.control_dependencies([check]):
        return tf.identity(labels)

"""The Keras model of a canned estimator, and what it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist.canned import feature_columns as columns_lib
from tfdist.canned import heads
from tfdist.canned.feature_columns import Column, Features, Partitioner
from tfdist.canned.heads import Head
from tfdist.canned.networks import DNNModel, LinearModel
from tfdist.estimator.serving import Serving
from tfdist.training.multi_optimizer import MultiOptimizer

Optimizer: TypeAlias = (
    str
    | keras.optimizers.Optimizer
    | Callable[[], keras.optimizers.Optimizer]
    | None
)
# Arguments of a part's layer, and its "optimizer".
Part = Mapping[str, Any]

_OPTIMIZERS = {
    "Adagrad": keras.optimizers.Adagrad,
    "Adam": keras.optimizers.Adam,
    "Ftrl": keras.optimizers.Ftrl,
    "RMSProp": keras.optimizers.RMSprop,
    "SGD": keras.optimizers.SGD,
}
_REDUCTIONS = ("sum_over_batch_size", "sum")


class CannedModel(keras.Model):
    """The Keras model of a canned estimator: features to logits.

    Its features are a dictionary; those that no column names are ignored.

    Args:
        head: Makes predictions, losses and metrics of the logits.
        parts: Layers whose outputs, added up, are the logits.
        columns: All columns that the parts read.
        weight_column: Feature with the weights of the examples: a name, or a
            numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".
    """

    def __init__(
        self,
        head: Head,
        parts: Sequence[keras.layers.Layer],
        columns: Sequence[Column],
        weight_column: Any = None,
        loss_reduction: str = "sum_over_batch_size",
    ) -> None:
        super().__init__(name="canned")
        self._head = head
        self._parts = list(parts)
        self._columns = tuple(columns)
        self._weight_column = weight_column
        self._reduction = loss_reduction
        self._metrics_of_head = head.metrics()
        for part in self._parts:
            # Here and not in `build`: paths of variables begin with the part.
            part.build()
        self.built = True

    def call(
        self, features: Features, training: bool | None = None
    ) -> tf.Tensor:
        """Logits, float32 `(batch, head.units)`."""
        _check_features(features)
        return tf.add_n([part(features) for part in self._parts])

    def compute_output_spec(
        self, features: Features, training: bool | None = None
    ) -> keras.KerasTensor:
        """Shape and dtype of the logits."""
        batch = keras.tree.flatten(features)[0].shape[0]
        return keras.KerasTensor((batch, self._head.units), "float32")

    def compute_loss(
        self,
        x: Features,
        y: tf.Tensor,
        y_pred: tf.Tensor,
        sample_weight: tf.Tensor | None = None,
        training: bool = True,
    ) -> tf.Tensor:
        """The loss of a batch, reduced as `loss_reduction` says."""
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
        """Updates the head's metrics and returns them."""
        values = self._head.values(self._head.labels(y), y_pred)
        weights = self._weights(x, sample_weight)
        heads.update(self._metrics_of_head, values, weights)
        return self.get_metrics_result()

    def predict_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Predictions of a batch: features, alone or with labels."""
        features, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self.predictions(features)

    def predictions(self, features: Features) -> dict[str, tf.Tensor]:
        """The head's predictions of a batch by name, each `(batch, n)`."""
        return self._head.predictions(self(features, training=False))

    def serving(self) -> Serving:
        """What an export answers; see `tfdist.estimator.serving`.

        As tensors, features are dense: what an example does not have is `""`
        or -1 in a categorical column.
        """
        examples = tf.feature_column.make_parse_example_spec(self._columns)
        return Serving(
            model=self,
            inputs={
                # Of variable length, if it has no shape.
                name: tf.TensorSpec(
                    [None, *getattr(feature, "shape", [None])],
                    feature.dtype,
                    name=name,
                )
                for name, feature in examples.items()
            },
            predict=self.predictions,
            examples=examples,
            classification=self._head.classification,
            regression=self._head.regression,
        )

    def _weights(
        self, features: Features, sample_weight: tf.Tensor | None
    ) -> tf.Tensor | None:
        """Of the examples, `(batch, n)`: by column, by Keras, or both."""
        weights = []
        if self._weight_column is not None:
            column = self._weight_column
            if isinstance(column, str):
                column = tf.feature_column.numeric_column(column)
            weights.append(columns_lib.Batch(features, {}).dense(column))
        if sample_weight is not None:
            weight = tf.cast(sample_weight, tf.float32)
            weights.append(
                weight[:, tf.newaxis] if weight.shape.rank == 1 else weight
            )
        return math.prod(weights) if weights else None


def build(
    head: Head,
    parts: Mapping[str, Part],
    partitioner: Partitioner,
    weight_column: Any,
    loss_reduction: str,
) -> CannedModel:
    """The compiled model of "linear" and "dnn" parts, or of one of them."""
    layers, columns, optimizers = [], [], []
    for name, kind in (("linear", LinearModel), ("dnn", DNNModel)):
        if name in parts:
            part = dict(parts[name])
            optimizers.append((f"^{name}/", part.pop("optimizer")()))
            columns.extend(part["columns"])
            layers.append(
                kind(units=head.units, partitioner=partitioner, **part)
            )
    model = CannedModel(head, layers, columns, weight_column, loss_reduction)
    (_, first), *others = optimizers
    model.compile(MultiOptimizer(optimizers) if others else first)
    return model


def linear_part(
    feature_columns: Iterable[Column],
    optimizer: Optimizer,
    sparse_combiner: str,
    name: str = "feature_columns",
    learning_rate: float = 0.2,
) -> Part:
    """A linear part; `learning_rate` is that of an optimizer given by name."""
    columns = _some_columns(name, feature_columns)
    if optimizer is None:
        optimizer = "Ftrl"
        learning_rate = min(learning_rate, 1 / math.sqrt(len(columns)))
    return {
        "columns": columns,
        "optimizer": _optimizer_fn(optimizer, learning_rate),
        "sparse_combiner": sparse_combiner,
    }


def dnn_part(
    feature_columns: Iterable[Column],
    optimizer: Optimizer,
    hidden_units: Iterable[int] | None,
    activation_fn: Callable | str | None,
    dropout: float | None,
    batch_norm: bool,
    *,
    prefix: str = "",
    learning_rate: float | None = None,
) -> Part:
    """A deep part; the names of its arguments begin with `prefix`."""
    name = f"{prefix}feature_columns"
    columns = _some_columns(name, feature_columns)
    for column in columns:
        if not columns_lib.is_dense(column):
            raise ValueError(
                f"Argument `{name}` must have dense columns. Received the "
                f"categorical column {column.name!r}: put it into an "
                "embedding_column or indicator_column."
            )
    hidden_units = list(hidden_units or ())
    if not hidden_units or not all(
        isinstance(size, int) and size > 0 for size in hidden_units
    ):
        raise ValueError(
            f"Argument `{prefix}hidden_units` must have positive integers. "
            f"Received: {prefix}hidden_units={hidden_units}."
        )
    return {
        "columns": columns,
        "optimizer": _optimizer_fn(optimizer or "Adagrad", learning_rate),
        "hidden_units": hidden_units,
        "activation_fn": activation_fn,
        "dropout": dropout,
        "batch_norm": batch_norm,
    }


def combined_parts(
    linear_feature_columns: Iterable[Column] | None,
    linear_optimizer: Optimizer,
    linear_sparse_combiner: str,
    dnn_feature_columns: Iterable[Column] | None,
    dnn_optimizer: Optimizer,
    *network: Any,
) -> dict[str, Part]:
    """The parts of a combined model that have columns."""
    parts = {}
    name = "linear_feature_columns"
    columns = columns_lib.checked_columns(name, linear_feature_columns)
    if columns:
        rate = min(0.005, 1 / math.sqrt(len(columns)))
        parts["linear"] = linear_part(
            columns, linear_optimizer, linear_sparse_combiner, name, rate
        )
    columns = columns_lib.checked_columns(
        "dnn_feature_columns", dnn_feature_columns
    )
    if columns:
        parts["dnn"] = dnn_part(
            columns, dnn_optimizer, *network, prefix="dnn_", learning_rate=0.001
        )
    if not parts:
        raise ValueError(
            "Either `linear_feature_columns` or `dnn_feature_columns` must "
            "have columns."
        )
    return parts


def _some_columns(name: str, columns: Iterable[Column]) -> tuple[Column, ...]:
    columns = columns_lib.checked_columns(name, columns)
    if not columns:
        raise ValueError(f"Argument `{name}` must have columns.")
    return columns


def _optimizer_fn(
    optimizer: Optimizer, learning_rate: float | None
) -> Callable[[], keras.optimizers.Optimizer]:
    """Makes a new optimizer for each model that is built.

    Args:
        optimizer: A name, an optimizer, or what makes one.
        learning_rate: Of one that is given by its name. Default: Keras'.
    """
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS:
            raise ValueError(
                f"Unsupported optimizer name: {optimizer!r}. Supported names "
                f"are: {tuple(_OPTIMIZERS)}."
            )
        rate = {} if learning_rate is None else {"learning_rate": learning_rate}
        return lambda: _OPTIMIZERS[optimizer](**rate)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        config = optimizer.get_config()
        return lambda: type(optimizer).from_config(config)
    if not callable(optimizer):
        raise TypeError(
            "An optimizer must be a name, a keras.optimizers.Optimizer or a "
            f"function that returns one. Received: {optimizer!r}."
        )
    return optimizer


def check_loss(weight_column: Any, loss_reduction: str) -> None:
    """Checks the arguments of the loss.

    Raises:
        ValueError: an unknown `loss_reduction`.
        TypeError: `weight_column` is neither a name nor a numeric column.
    """
    if loss_reduction not in _REDUCTIONS:
        raise ValueError(
            f"Argument `loss_reduction` must be one of {_REDUCTIONS}. "
            f"Received: loss_reduction={loss_reduction!r}."
        )
    if not isinstance(weight_column, str | None) and (
        type(weight_column).__name__ != "NumericColumn"
    ):
        raise TypeError(
            "Argument `weight_column` must be a name or a numeric_column. "
            f"Received: weight_column={weight_column!r}."
        )


def _check_features(features: Any) -> None:
    if not isinstance(features, Mapping):
        raise ValueError(
            "The features of a canned estimator must be a dictionary from "
            "name to tensor; the input function gives (features, labels). "
            f"Received: {type(features).__name__}."
        )

"""Ready-made estimators for tables: linear, deep, and both together.

`tf.estimator`'s six, for the columns that people's programs still make with
`tf.feature_column` (or from Keras layers, see `tfdist.keras_columns`):

    estimator = tfdist.DNNLinearCombinedClassifier(
        linear_feature_columns=[job_x_age],
        dnn_feature_columns=[tf.feature_column.embedding_column(job, 8), age],
        dnn_hidden_units=[64, 32],
        config=tfdist.RunConfig(model_dir="gs://bucket/job"))
    tfdist.train_and_evaluate(estimator, train_spec, eval_spec)

Arguments, defaults (those of TF 2.15, also the learning rates), metrics and
predictions are theirs. Tables of ids, however large, are
`PartitionedEmbedding`s, split as TF1 split them. What differs:

- metrics are also computed while training;
- `loss` is the mean over examples of the batches' losses, where theirs was the
  mean over batches: the same for batches of one size;
- an exporter needs no `serving_input_receiver_fn`: the columns say what a
  `tf.Example` holds. Every export has the signatures `predict`,
  `classification` (of a classifier), `regression` (of a regressor, or of two
  classes), `serving_default` and `serve`, see `tfdist.serving`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import feature_columns as columns_lib
from tfdist import heads
from tfdist.estimator import Estimator
from tfdist.feature_columns import Column, Features, Partitioner
from tfdist.heads import BinaryClassHead, Head, MultiClassHead, RegressionHead
from tfdist.multi_optimizer import MultiOptimizer
from tfdist.networks import DNNModel, LinearModel
from tfdist.partition import min_max_variable_partitioner
from tfdist.serving import Serving
from tfdist.specs import RunConfig

Optimizer = (
    str
    | keras.optimizers.Optimizer
    | Callable[[], keras.optimizers.Optimizer]
    | None
)

_OPTIMIZERS = {
    "Adagrad": keras.optimizers.Adagrad,
    "Adam": keras.optimizers.Adam,
    "Ftrl": keras.optimizers.Ftrl,
    "RMSProp": keras.optimizers.RMSprop,
    "SGD": keras.optimizers.SGD,
}
_REDUCTIONS = ("sum_over_batch_size", "sum")
# Bytes that a shard of a table has at least; 64 MB as in TF1's canned models.
_LEAST_SHARD = 64 << 20


class CannedModel(keras.Model):
    """The Keras model of a canned estimator: features to logits.

    Its features are a dictionary; those that no column names are ignored.

    Args:
        head: What follows the logits.
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
        """What the head says of a batch, by name, each `(batch, n)`."""
        return self._head.predictions(self(features, training=False))

    def serving(self) -> Serving:
        """What an export answers; see `tfdist.serving`.

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
            reader = columns_lib.ColumnReader([column])
            weights.append(reader.dense(column, features))
        if sample_weight is not None:
            weight = tf.cast(sample_weight, tf.float32)
            weights.append(
                weight[:, tf.newaxis] if weight.shape.rank == 1 else weight
            )
        return math.prod(weights) if weights else None


class _CannedEstimator(Estimator):
    """A linear part, a deep part or both, under a head."""

    def __init__(
        self,
        head: Head,
        *,
        model_dir: str | None,
        config: RunConfig | None,
        warm_start_from: Any,
        weight_column: Any,
        loss_reduction: str,
        linear: Mapping[str, Any] | None = None,
        dnn: Mapping[str, Any] | None = None,
        partitioner: Partitioner | None = None,
    ) -> None:
        _check_reduction(loss_reduction)
        _check_weight_column(weight_column)
        config = _config(model_dir, config)
        partitioner = partitioner or min_max_variable_partitioner(
            max(config.cluster.num_ps, 1), min_slice_size=_LEAST_SHARD
        )

        def model_fn() -> keras.Model:
            parts, columns, optimizers = [], [], []
            for kind, pattern, part in (
                (LinearModel, "^linear/", linear),
                (DNNModel, "^dnn/", dnn),
            ):
                if part is None:
                    continue
                part = dict(part)
                optimizer = part.pop("optimizer")
                optimizers.append((pattern, optimizer()))
                columns.extend(part["columns"])
                parts.append(
                    kind(units=head.units, partitioner=partitioner, **part)
                )
            model = CannedModel(
                head, parts, columns, weight_column, loss_reduction
            )
            model.compile(
                MultiOptimizer(optimizers)
                if len(optimizers) > 1
                else optimizers[0][1]
            )
            return model

        # Only Estimators that can start warm have such an argument.
        options = {"warm_start_from": warm_start_from}
        super().__init__(
            model_fn, config, **(options if warm_start_from else {})
        )


class LinearClassifier(_CannedEstimator):
    """A weighted sum of features: logistic regression, or softmax.

    As `tf.estimator.LinearClassifier`, without `LinearSDCA`.

    Args:
        feature_columns: Columns of `tf.feature_column`: categorical ones have
            a weight for each id, dense ones a weight for each number. All
            weights start at zero.
        model_dir: Directory of the job, if `config` does not say it.
        n_classes: Number of classes, at least 2.
        weight_column: Feature with the weights of the examples: its name, or
            a `numeric_column`. Default: all are 1.
        label_vocabulary: The names of the classes, if labels are strings.
            Default: labels are integers from 0 (or floats from 0 to 1, for
            two classes).
        optimizer: A name ("Adagrad", "Adam", "Ftrl", "RMSProp", "SGD"), with
            a learning rate of 0.2; a Keras optimizer; or a function that
            returns one. None for Ftrl with `min(0.2, 1/sqrt(columns))`.
        config: The configuration.
        warm_start_from: As for `tfdist.Estimator`.
        loss_reduction: "sum_over_batch_size", or "sum", the default of
            `tf.compat.v1`.
        sparse_combiner: "sum", "mean" or "sqrtn": how several values of one
            column are combined.
        partitioner: Splits tables of weights. Default: one shard for each
            parameter server, none smaller than 64 MB.

    Raises:
        ValueError: no column, two of one name, one with an option that is not
            supported; an argument out of range; neither `model_dir` nor
            `config`, or both and they differ.
        TypeError: an argument of another type.
    """

    def __init__(
        self,
        feature_columns: Iterable[Column],
        model_dir: str | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Optimizer = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        sparse_combiner: str = "sum",
        *,
        partitioner: Partitioner | None = None,
    ) -> None:
        super().__init__(
            _class_head(n_classes, label_vocabulary),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            linear=_linear(feature_columns, optimizer, sparse_combiner),
            partitioner=partitioner,
        )


class LinearRegressor(_CannedEstimator):
    """A weighted sum of features: least squares.

    As `tf.estimator.LinearRegressor`. Arguments that are not here: see
    `LinearClassifier`.

    Args:
        feature_columns: See `LinearClassifier`.
        model_dir: See there.
        label_dimension: Labels of an example.
        weight_column: See there; a `numeric_column` of the shape
            `(label_dimension,)` weighs the labels of an example one by one.
        optimizer: See there.
        config: See there.
        warm_start_from: See there.
        loss_reduction: See there; over all labels of all examples.
        sparse_combiner: See there.
        partitioner: See there.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """

    def __init__(
        self,
        feature_columns: Iterable[Column],
        model_dir: str | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Optimizer = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        sparse_combiner: str = "sum",
        *,
        partitioner: Partitioner | None = None,
    ) -> None:
        super().__init__(
            _regression_head(label_dimension),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            linear=_linear(feature_columns, optimizer, sparse_combiner),
            partitioner=partitioner,
        )


class DNNClassifier(_CannedEstimator):
    """A network of fully connected layers that tells classes apart.

    As `tf.estimator.DNNClassifier`. Arguments that are not here: see
    `LinearClassifier`.

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Dense columns of `tf.feature_column`; a categorical
            one goes through `embedding_column` or `indicator_column`.
        model_dir: See `LinearClassifier`.
        n_classes: See there.
        weight_column: See there.
        label_vocabulary: See there.
        optimizer: See there; a name means Keras' default learning rate:
            0.001, of SGD 0.01 (TF1 had 0.05 for all).
        activation_fn: After each hidden layer: a function or Keras' name.
        dropout: Part of each hidden layer's outputs that is dropped.
        config: See there.
        warm_start_from: See there.
        loss_reduction: See there.
        batch_norm: Whether to normalize after each hidden layer.
        input_layer_partitioner: Splits embeddings; as `partitioner` there.

    Raises:
        ValueError: as there, or no hidden layer.
        TypeError: as there.
    """

    def __init__(
        self,
        hidden_units: Iterable[int],
        feature_columns: Iterable[Column],
        model_dir: str | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: Optimizer = "Adagrad",
        activation_fn: Callable | str | None = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        *,
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        super().__init__(
            _class_head(n_classes, label_vocabulary),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            dnn=_dnn(
                feature_columns,
                optimizer,
                hidden_units,
                activation_fn,
                dropout,
                batch_norm,
            ),
            partitioner=input_layer_partitioner,
        )


class DNNRegressor(_CannedEstimator):
    """A network of fully connected layers that predicts numbers.

    As `tf.estimator.DNNRegressor`.

    Args:
        hidden_units: See `DNNClassifier`.
        feature_columns: See there.
        model_dir: See `LinearClassifier`.
        label_dimension: See `LinearRegressor`.
        weight_column: See there.
        optimizer: See `DNNClassifier`.
        activation_fn: See there.
        dropout: See there.
        config: See `LinearClassifier`.
        warm_start_from: See there.
        loss_reduction: See there.
        batch_norm: See `DNNClassifier`.
        input_layer_partitioner: See there.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """

    def __init__(
        self,
        hidden_units: Iterable[int],
        feature_columns: Iterable[Column],
        model_dir: str | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        optimizer: Optimizer = "Adagrad",
        activation_fn: Callable | str | None = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        *,
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        super().__init__(
            _regression_head(label_dimension),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            dnn=_dnn(
                feature_columns,
                optimizer,
                hidden_units,
                activation_fn,
                dropout,
                batch_norm,
            ),
            partitioner=input_layer_partitioner,
        )


class DNNLinearCombinedClassifier(_CannedEstimator):
    """A linear model and a network, trained together: wide and deep.

    As `tf.estimator.DNNLinearCombinedClassifier`: the logits of the two are
    added up, and each has its own optimizer. Without columns, a part is
    left out.

    Args:
        model_dir: See `LinearClassifier`.
        linear_feature_columns: Columns of the linear part, see there.
        linear_optimizer: See there; a name means a learning rate of
            `min(0.005, 1/sqrt(linear columns))`.
        dnn_feature_columns: Columns of the network, see `DNNClassifier`.
        dnn_optimizer: See there; a name means a learning rate of 0.001.
        dnn_hidden_units: Sizes of the hidden layers.
        dnn_activation_fn: See `DNNClassifier`.
        dnn_dropout: See there.
        n_classes: See `LinearClassifier`.
        weight_column: See there.
        label_vocabulary: See there.
        config: See there.
        warm_start_from: See there.
        loss_reduction: See there.
        batch_norm: See `DNNClassifier`.
        linear_sparse_combiner: See `LinearClassifier`.
        input_layer_partitioner: Splits the tables of both parts.

    Raises:
        ValueError: as there, or neither part has a column.
        TypeError: as there.
    """

    def __init__(
        self,
        model_dir: str | None = None,
        linear_feature_columns: Iterable[Column] | None = None,
        linear_optimizer: Optimizer = "Ftrl",
        dnn_feature_columns: Iterable[Column] | None = None,
        dnn_optimizer: Optimizer = "Adagrad",
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Callable | str | None = "relu",
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: Any = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        *,
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        super().__init__(
            _class_head(n_classes, label_vocabulary),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            partitioner=input_layer_partitioner,
            **_combined(
                linear_feature_columns,
                linear_optimizer,
                linear_sparse_combiner,
                dnn_feature_columns,
                dnn_optimizer,
                dnn_hidden_units,
                dnn_activation_fn,
                dnn_dropout,
                batch_norm,
            ),
        )


class DNNLinearCombinedRegressor(_CannedEstimator):
    """A linear model and a network, trained together, that predict numbers.

    As `tf.estimator.DNNLinearCombinedRegressor`.

    Args:
        model_dir: See `DNNLinearCombinedClassifier`.
        linear_feature_columns: See there.
        linear_optimizer: See there.
        dnn_feature_columns: See there.
        dnn_optimizer: See there.
        dnn_hidden_units: See there.
        dnn_activation_fn: See there.
        dnn_dropout: See there.
        label_dimension: See `LinearRegressor`.
        weight_column: See there.
        config: See `LinearClassifier`.
        warm_start_from: See there.
        loss_reduction: See there.
        batch_norm: See `DNNClassifier`.
        linear_sparse_combiner: See `LinearClassifier`.
        input_layer_partitioner: See `DNNLinearCombinedClassifier`.

    Raises:
        ValueError: as there.
        TypeError: as there.
    """

    def __init__(
        self,
        model_dir: str | None = None,
        linear_feature_columns: Iterable[Column] | None = None,
        linear_optimizer: Optimizer = "Ftrl",
        dnn_feature_columns: Iterable[Column] | None = None,
        dnn_optimizer: Optimizer = "Adagrad",
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Callable | str | None = "relu",
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: Any = None,
        config: RunConfig | None = None,
        warm_start_from: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        *,
        input_layer_partitioner: Partitioner | None = None,
    ) -> None:
        super().__init__(
            _regression_head(label_dimension),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
            weight_column=weight_column,
            loss_reduction=loss_reduction,
            partitioner=input_layer_partitioner,
            **_combined(
                linear_feature_columns,
                linear_optimizer,
                linear_sparse_combiner,
                dnn_feature_columns,
                dnn_optimizer,
                dnn_hidden_units,
                dnn_activation_fn,
                dnn_dropout,
                batch_norm,
            ),
        )


def _linear(
    feature_columns: Iterable[Column],
    optimizer: Optimizer,
    sparse_combiner: str,
    name: str = "feature_columns",
    learning_rate: float = 0.2,
) -> dict[str, Any]:
    """What makes a linear part: arguments of `LinearModel`, an optimizer."""
    columns = columns_lib.checked_columns(name, feature_columns)
    if not columns:
        raise ValueError(f"Argument `{name}` must have columns.")
    if optimizer is None:
        optimizer = "Ftrl"
        learning_rate = min(learning_rate, 1 / math.sqrt(len(columns)))
    return {
        "columns": columns,
        "optimizer": _optimizer_fn(optimizer, learning_rate),
        "sparse_combiner": sparse_combiner,
    }


def _dnn(
    feature_columns: Iterable[Column],
    optimizer: Optimizer,
    hidden_units: Iterable[int] | None,
    activation_fn: Callable | str | None,
    dropout: float | None,
    batch_norm: bool,
    prefix: str = "",
    learning_rate: float | None = None,
) -> dict[str, Any]:
    """What makes a deep part: arguments of `DNNModel`, and an optimizer."""
    name = f"{prefix}feature_columns"
    columns = columns_lib.checked_columns(name, feature_columns)
    if not columns:
        raise ValueError(f"Argument `{name}` must have columns.")
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


def _combined(
    linear_feature_columns: Iterable[Column] | None,
    linear_optimizer: Optimizer,
    linear_sparse_combiner: str,
    dnn_feature_columns: Iterable[Column] | None,
    dnn_optimizer: Optimizer,
    dnn_hidden_units: Iterable[int] | None,
    dnn_activation_fn: Callable | str | None,
    dnn_dropout: float | None,
    batch_norm: bool,
) -> dict[str, dict[str, Any]]:
    """The parts of a combined model that have columns."""
    parts = {}
    linear_feature_columns = list(linear_feature_columns or ())
    if linear_feature_columns:
        parts["linear"] = _linear(
            linear_feature_columns,
            linear_optimizer,
            linear_sparse_combiner,
            "linear_feature_columns",
            min(0.005, 1 / math.sqrt(len(linear_feature_columns))),
        )
    dnn_feature_columns = list(dnn_feature_columns or ())
    if dnn_feature_columns:
        parts["dnn"] = _dnn(
            dnn_feature_columns,
            dnn_optimizer,
            dnn_hidden_units,
            dnn_activation_fn,
            dnn_dropout,
            batch_norm,
            "dnn_",
            0.001,
        )
    if not parts:
        raise ValueError(
            "Either `linear_feature_columns` or `dnn_feature_columns` must "
            "have columns."
        )
    return parts


def _optimizer_fn(
    optimizer: Optimizer, learning_rate: float | None
) -> Callable[[], keras.optimizers.Optimizer]:
    """Makes a new optimizer for each model that is built."""
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


def _class_head(
    n_classes: int, label_vocabulary: Sequence[str] | None
) -> Head:
    if not isinstance(n_classes, int) or n_classes < 2:
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
    if n_classes == 2:
        return BinaryClassHead(label_vocabulary)
    return MultiClassHead(n_classes, label_vocabulary)


def _regression_head(label_dimension: int) -> Head:
    if not isinstance(label_dimension, int) or label_dimension < 1:
        raise ValueError(
            "Argument `label_dimension` must be a positive integer. Received: "
            f"label_dimension={label_dimension!r}."
        )
    return RegressionHead(label_dimension)


def _config(model_dir: str | None, config: RunConfig | None) -> RunConfig:
    if config is None:
        if model_dir is None:
            raise ValueError("One of `model_dir` and `config` must be given.")
        return RunConfig(model_dir)
    if model_dir is not None and RunConfig(model_dir).model_dir != (
        config.model_dir
    ):
        raise ValueError(
            "`model_dir` and `config.model_dir` differ: "
            f"{model_dir!r} and {config.model_dir!r}. Give only one."
        )
    return config


def _check_reduction(loss_reduction: str) -> None:
    if loss_reduction not in _REDUCTIONS:
        raise ValueError(
            f"Argument `loss_reduction` must be one of {_REDUCTIONS}. "
            f"Received: loss_reduction={loss_reduction!r}."
        )


def _check_weight_column(weight_column: Any) -> None:
    if weight_column is None or isinstance(weight_column, str):
        return
    if type(weight_column).__name__ != "NumericColumn":
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

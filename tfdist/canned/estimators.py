"""Ready-made estimators for tables: linear, deep, and both together.

`tf.estimator`'s six, for the columns that people's programs still make with
`tf.feature_column`:

    estimator = tfdist.DNNLinearCombinedClassifier(
        linear_feature_columns=[job_x_age],
        dnn_feature_columns=[tf.feature_column.embedding_column(job, 8), age],
        dnn_hidden_units=[64, 32],
        config=tfdist.RunConfig(model_dir="gs://bucket/job"))
    tfdist.train_and_evaluate(estimator, train_spec, eval_spec)

Arguments, defaults (those of TF 2.15, also the learning rates), metrics and
predictions are theirs. Tables of ids, however large, are
`PartitionedEmbedding`s, split as TF1 split them. What differs:

- of a table, Adam and RMSProp move only the rows that were looked up (see
  `tfdist.training.optimizers`); all other optimizers compute the same;
- metrics are also computed while training;
- `loss` is the mean over examples of the batches' losses, where theirs was the
  mean over batches: the same for batches of one size;
- an exporter needs no `serving_input_receiver_fn`: the columns say what a
  `tf.Example` holds. See also `tfdist.estimator.serving` for the signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfdist.canned import canned_model
from tfdist.canned.canned_model import (
    CannedModel,
    Optimizer,
    Part,
    combined_parts,
    dnn_part,
    linear_part,
)
from tfdist.canned.feature_columns import Column, Partitioner
from tfdist.canned.heads import Head, class_head, regression_head
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.specs import RunConfig
from tfdist.placement.partitioners import min_max_variable_partitioner

# Bytes that a shard of a table has at least; 64 MB as in TF1's canned models.
_LEAST_SHARD = 64 << 20


class _CannedEstimator(Estimator):
    """A linear part, a deep part or both, under a head."""

    def __init__(
        self,
        head: Head,
        parts: Mapping[str, Part],
        model_dir: str | None,
        config: RunConfig | None,
        warm_start_from: Any,
        weight_column: Any,
        loss_reduction: str,
        partitioner: Partitioner | None,
    ) -> None:
        canned_model.check_loss(weight_column, loss_reduction)
        config = _config(model_dir, config)
        partitioner = partitioner or min_max_variable_partitioner(
            max(config.cluster.num_ps, 1), min_slice_size=_LEAST_SHARD
        )

        def model_fn() -> CannedModel:
            return canned_model.build(
                head, parts, partitioner, weight_column, loss_reduction
            )

        super().__init__(model_fn, config, warm_start_from)


class LinearClassifier(_CannedEstimator):
    """A weighted sum of features: logistic regression, or softmax.

    As `tf.estimator.LinearClassifier`, without `LinearSDCA`.

    >>> age = tf.feature_column.numeric_column("age")
    >>> estimator = tfdist.LinearClassifier([age], "job", n_classes=3)
    >>> estimator.model_fn().count_params()
    6

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
        linear = linear_part(feature_columns, optimizer, sparse_combiner)
        super().__init__(
            class_head(n_classes, label_vocabulary),
            {"linear": linear},
            model_dir,
            config,
            warm_start_from,
            weight_column,
            loss_reduction,
            partitioner,
        )


class LinearRegressor(_CannedEstimator):
    """A weighted sum of features: least squares.

    >>> age = tf.feature_column.numeric_column("age")
    >>> tfdist.LinearRegressor([age], "job").model_fn().count_params()
    2

    As `tf.estimator.LinearRegressor`. See also `LinearClassifier`, whose
    arguments and errors are the same, except for:

    Args:
        label_dimension: Labels of an example.
        weight_column: A `numeric_column` of the shape `(label_dimension,)`
            weighs the labels of an example one by one.
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
        linear = linear_part(feature_columns, optimizer, sparse_combiner)
        super().__init__(
            regression_head(label_dimension),
            {"linear": linear},
            model_dir,
            config,
            warm_start_from,
            weight_column,
            loss_reduction,
            partitioner,
        )


class DNNClassifier(_CannedEstimator):
    """A network of fully connected layers that tells classes apart.

    >>> age = tf.feature_column.numeric_column("age")
    >>> tfdist.DNNClassifier([4], [age], "job").model_fn().count_params()
    13

    As `tf.estimator.DNNClassifier`. See also `LinearClassifier` for the
    arguments that are not listed here.

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Dense columns of `tf.feature_column`; a categorical
            one goes through `embedding_column` or `indicator_column`.
        optimizer: As there; a name means Keras' default learning rate: 0.001,
            of SGD 0.01 (TF1 had 0.05 for all).
        activation_fn: After each hidden layer: a function or Keras' name.
        dropout: Part of each hidden layer's outputs that is dropped.
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
        dnn = dnn_part(
            feature_columns,
            optimizer,
            hidden_units,
            activation_fn,
            dropout,
            batch_norm,
        )
        super().__init__(
            class_head(n_classes, label_vocabulary),
            {"dnn": dnn},
            model_dir,
            config,
            warm_start_from,
            weight_column,
            loss_reduction,
            input_layer_partitioner,
        )


class DNNRegressor(_CannedEstimator):
    """A network of fully connected layers that predicts numbers.

    >>> age = tf.feature_column.numeric_column("age")
    >>> tfdist.DNNRegressor([4], [age], "job").model_fn().count_params()
    13

    As `tf.estimator.DNNRegressor`. See also `DNNClassifier` for its arguments
    and errors, and `LinearRegressor` for `label_dimension` and `weight_column`.
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
        dnn = dnn_part(
            feature_columns,
            optimizer,
            hidden_units,
            activation_fn,
            dropout,
            batch_norm,
        )
        super().__init__(
            regression_head(label_dimension),
            {"dnn": dnn},
            model_dir,
            config,
            warm_start_from,
            weight_column,
            loss_reduction,
            input_layer_partitioner,
        )


class DNNLinearCombinedClassifier(_CannedEstimator):
    """A linear model and a network, trained together: wide and deep.

    >>> age = tf.feature_column.numeric_column("age")
    >>> decade = tf.feature_column.bucketized_column(age, [20.0, 30.0, 40.0])
    >>> estimator = tfdist.DNNLinearCombinedClassifier(
    ...     "job",
    ...     linear_feature_columns=[decade],
    ...     dnn_feature_columns=[age],
    ...     dnn_hidden_units=[4],
    ... )
    >>> estimator.model_fn().count_params()
    18

    As `tf.estimator.DNNLinearCombinedClassifier`: the logits of the two are
    added up, and each has its own optimizer. A part without columns is left
    out. See also `LinearClassifier` and `DNNClassifier` for the arguments that
    are not listed here.

    Args:
        linear_feature_columns: Columns of the linear part.
        linear_optimizer: Of the linear part; a name means a learning rate of
            `min(0.005, 1/sqrt(columns))`.
        dnn_feature_columns: Dense columns, for the network.
        dnn_optimizer: Of the network; a name means a learning rate of 0.001.
        dnn_hidden_units: Sizes of the hidden layers.
        dnn_activation_fn: After each hidden layer.
        dnn_dropout: Part of each hidden layer's outputs that is dropped.
        linear_sparse_combiner: As `sparse_combiner` of `LinearClassifier`.
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
            class_head(n_classes, label_vocabulary),
            combined_parts(
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
            model_dir,
            config,
            warm_start_from,
            weight_column,
            loss_reduction,
            input_layer_partitioner,
        )


class DNNLinearCombinedRegressor(_CannedEstimator):
    """A linear model and a network, trained together, that predict numbers.

    >>> age = tf.feature_column.numeric_column("age")
    >>> estimator = tfdist.DNNLinearCombinedRegressor(
    ...     "job", dnn_feature_columns=[age], dnn_hidden_units=[4]
    ... )
    >>> estimator.model_fn().count_params()
    13

    As `tf.estimator.DNNLinearCombinedRegressor`. See also
    `DNNLinearCombinedClassifier` for its arguments and errors, and
    `LinearRegressor` for `label_dimension` and `weight_column`.
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
            regression_head(label_dimension),
            combined_parts(
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
            model_dir,
            config,
            warm_start_from,
            weight_column,
            loss_reduction,
            input_layer_partitioner,
        )


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

"""Ready-made estimators for tabular data: linear, deep, and both combined.

The six canned estimators of `tf.estimator`, for programs that still define
their columns with `tf.feature_column`:

    estimator = tfdist.DNNLinearCombinedClassifier(
        linear_feature_columns=[job_x_age],
        dnn_feature_columns=[tf.feature_column.embedding_column(job, 8), age],
        dnn_hidden_units=[64, 32],
        config=tfdist.RunConfig(model_dir="gs://bucket/job"))
    tfdist.train_and_evaluate(estimator, train_spec, eval_spec)

Arguments, defaults (including learning rates), metrics and predictions are
those of TF 2.15. Embedding tables are `PartitionedEmbedding`s. Differences:

- arguments after `model_dir` are keyword-only;
- Adam and RMSProp update only the rows of a table that a step looks up (see
  `tfdist.training.optimizers`); all other optimizers compute the same updates;
- metrics are also computed during training;
- `loss` is a mean over examples, not over batches;
- an exporter needs no `serving_input_receiver_fn`: the columns define how to
  parse a `tf.Example`. See `tfdist.estimator.serving` for the signatures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import keras
import numpy as np

from tfdist.canned.canned_model import CannedModel, check_loss
from tfdist.canned.feature_columns import Column, Partitioner, checked_columns
from tfdist.canned.heads import Head, class_head, regression_head
from tfdist.canned.layers import DNNModel, LinearModel
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.run_config import RunConfig
from tfdist.placement.partitioners import min_max_variable_partitioner
from tfdist.training.multi_optimizer import MultiOptimizer

OptimizerFn: TypeAlias = Callable[[], keras.optimizers.Optimizer]
Optimizer: TypeAlias = str | keras.optimizers.Optimizer | OptimizerFn | None
# A function that creates a layer with logits as outputs, and its optimizer's.
_Part: TypeAlias = tuple[Callable[..., keras.layers.Layer], OptimizerFn]

_OPTIMIZERS = {
    "Adagrad": keras.optimizers.Adagrad,
    "Adam": keras.optimizers.Adam,
    "Ftrl": keras.optimizers.Ftrl,
    "RMSProp": keras.optimizers.RMSprop,
    "SGD": keras.optimizers.SGD,
}
# Minimum size of a table's shard in bytes; 64 MB as in TF1's canned models.
_LEAST_SHARD = 64 << 20


class _CannedEstimator(Estimator):
    """An estimator of `parts` and a head created from `head_arguments`."""

    _make_head: ClassVar[Callable[..., Head]]

    def __init__(
        self,
        parts: Sequence[_Part],
        model_dir: str | None,
        *,
        config: RunConfig | None = None,
        warm_start_from: Any = None,
        weight_column: Any = None,
        loss_reduction: str = "sum_over_batch_size",
        partitioner: Partitioner | None = None,
        **head_arguments: Any,
    ) -> None:
        head = self._make_head(**head_arguments)
        check_loss(weight_column, loss_reduction)

        def model_fn() -> CannedModel:
            own = partitioner or min_max_variable_partitioner(
                max(self.config.cluster.num_ps, 1), min_slice_size=_LEAST_SHARD
            )
            layers = [
                layer_fn(units=head.units, partitioner=own)
                for layer_fn, _ in parts
            ]
            model = CannedModel(head, layers, weight_column, loss_reduction)
            optimizers = [
                (f"^{layer.name}/", optimizer_fn())
                for layer, (_, optimizer_fn) in zip(layers, parts, strict=True)
            ]
            one = optimizers[0][1] if len(parts) == 1 else None
            model.compile(one or MultiOptimizer(optimizers))
            return model

        super().__init__(model_fn, config, warm_start_from, model_dir=model_dir)


class _Linear(_CannedEstimator):
    def __init__(
        self,
        feature_columns: Iterable[Column],
        model_dir: str | None = None,
        *,
        optimizer: Optimizer = "Ftrl",
        sparse_combiner: str = "sum",
        **others: Any,
    ) -> None:
        columns = checked_columns("feature_columns", feature_columns)
        part = _linear_part(columns, optimizer, sparse_combiner, 0.2)
        super().__init__([part], model_dir, **others)


class _DNN(_CannedEstimator):
    def __init__(
        self,
        hidden_units: Iterable[int],
        feature_columns: Iterable[Column],
        model_dir: str | None = None,
        *,
        optimizer: Optimizer = "Adagrad",
        activation_fn: Callable | str | None = "relu",
        dropout: float | None = None,
        batch_norm: bool = False,
        input_layer_partitioner: Partitioner | None = None,
        **others: Any,
    ) -> None:
        part = _dnn_part(
            "",
            feature_columns,
            _optimizer_fn(optimizer or "Adagrad"),
            hidden_units=hidden_units,
            activation_fn=activation_fn,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        super().__init__(
            [part], model_dir, partitioner=input_layer_partitioner, **others
        )


class _DNNLinearCombined(_CannedEstimator):
    def __init__(
        self,
        model_dir: str | None = None,
        *,
        linear_feature_columns: Iterable[Column] | None = None,
        linear_optimizer: Optimizer = "Ftrl",
        dnn_feature_columns: Iterable[Column] | None = None,
        dnn_optimizer: Optimizer = "Adagrad",
        dnn_hidden_units: Iterable[int] | None = None,
        dnn_activation_fn: Callable | str | None = "relu",
        dnn_dropout: float | None = None,
        batch_norm: bool = False,
        linear_sparse_combiner: str = "sum",
        input_layer_partitioner: Partitioner | None = None,
        **others: Any,
    ) -> None:
        parts = []
        if linear_feature_columns:
            columns = checked_columns(
                "linear_feature_columns", linear_feature_columns
            )
            rate = min(0.005, 1 / math.sqrt(len(columns)))
            options = linear_optimizer, linear_sparse_combiner, rate
            parts.append(_linear_part(columns, *options))
        if dnn_feature_columns:
            parts.append(
                _dnn_part(
                    "dnn_",
                    dnn_feature_columns,
                    _optimizer_fn(dnn_optimizer or "Adagrad", 0.001),
                    hidden_units=dnn_hidden_units,
                    activation_fn=dnn_activation_fn,
                    dropout=dnn_dropout,
                    batch_norm=batch_norm,
                )
            )
        if not parts:
            raise ValueError(
                "Either `linear_feature_columns` or `dnn_feature_columns` must "
                "have columns."
            )
        super().__init__(
            parts, model_dir, partitioner=input_layer_partitioner, **others
        )


class LinearClassifier(_Linear):
    """A linear classifier: logistic regression, or softmax regression.

    Like `tf.estimator.LinearClassifier`, without `LinearSDCA`.

    >>> age = tf.feature_column.numeric_column("age")
    >>> estimator = tfdist.LinearClassifier([age], "job", n_classes=3)
    >>> estimator.model_fn().count_params()
    6

    Args:
        feature_columns: Columns of `tf.feature_column`. A categorical column
            has a weight for each id, a dense column a weight for each number.
            All weights are initialized to zero.
        model_dir: Directory of the job, if `config` does not set one.
        n_classes: Number of classes, at least 2. Default: 2.
        label_vocabulary: The names of the classes, if the labels are strings.
            Default: labels are integers from 0 (or floats from 0 to 1, for
            two classes).
        weight_column: The feature that holds the example weights: its name or
            a `numeric_column`. Default: all weights are 1.
        optimizer: A name ("Adagrad", "Adam", "Ftrl", "RMSProp", "SGD"), with
            a learning rate of 0.2; a Keras optimizer, but not in an all-reduce
            job; or a function that returns an optimizer. None for Ftrl with a
            rate of `min(0.2, 1/sqrt(columns))`. Default: "Ftrl".
        config: The configuration.
        warm_start_from: As for `tfdist.Estimator`.
        loss_reduction: "sum_over_batch_size" (default), or "sum", the default
            of `tf.compat.v1`.
        sparse_combiner: "sum", "mean" or "sqrtn": how several values of one
            column are combined. Default: "sum".
        partitioner: Partitions the weight tables. Default: one shard for each
            parameter server, none smaller than 64 MB.

    Raises:
        ValueError: There are no columns, two have the same name, or one has an
            unsupported option; an argument is out of range; neither `model_dir`
            nor `config` is given, or the two name different directories.
        TypeError: An argument has the wrong type.
    """

    _make_head = staticmethod(class_head)


class LinearRegressor(_Linear):
    """A linear regression model, fitted by least squares.

    >>> age = tf.feature_column.numeric_column("age")
    >>> tfdist.LinearRegressor([age], "job").model_fn().count_params()
    2

    Like `tf.estimator.LinearRegressor`. Arguments and errors are those of
    `LinearClassifier`, except for:

    Args:
        label_dimension: Number of labels per example. Default: 1.
        weight_column: A `numeric_column` of shape `(label_dimension,)` gives
            each label of an example a weight of its own.
    """

    _make_head = staticmethod(regression_head)


class DNNClassifier(_DNN):
    """A classifier with fully connected hidden layers.

    >>> age = tf.feature_column.numeric_column("age")
    >>> tfdist.DNNClassifier([4], [age], "job").model_fn().count_params()
    13

    Like `tf.estimator.DNNClassifier`. See `LinearClassifier` for the arguments
    and errors that are not listed here.

    Args:
        hidden_units: Sizes of the hidden layers.
        feature_columns: Dense columns of `tf.feature_column`; wrap categorical
            columns in `embedding_column` or `indicator_column`.
        optimizer: As in `LinearClassifier`, but a name has Keras' default
            learning rate: 0.01 for SGD, 0.001 for the others (in TF1 0.05 for
            all). Default: "Adagrad".
        activation_fn: The activation of the hidden layers: a function or a
            Keras name. Default: "relu".
        dropout: Fraction of each hidden layer's outputs to drop.
        batch_norm: Whether to apply batch normalization to hidden layers.
        input_layer_partitioner: Partitions the embeddings, as `partitioner`.
    """

    _make_head = staticmethod(class_head)


class DNNRegressor(_DNN):
    """A regressor with fully connected hidden layers.

    >>> age = tf.feature_column.numeric_column("age")
    >>> tfdist.DNNRegressor([4], [age], "job").model_fn().count_params()
    13

    Like `tf.estimator.DNNRegressor`. See `DNNClassifier` for the arguments and
    errors, and `LinearRegressor` for `label_dimension` and `weight_column`.
    """

    _make_head = staticmethod(regression_head)


class DNNLinearCombinedClassifier(_DNNLinearCombined):
    """A wide-and-deep classifier: a linear model and a deep network combined.

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

    Like `tf.estimator.DNNLinearCombinedClassifier`: the logits of the two parts
    are added, and each part has its own optimizer. A part without columns is
    omitted; at least one part must have columns. Arguments that begin with
    `dnn_` or `linear_` configure that part, as in `DNNClassifier` and
    `LinearClassifier`; the others apply to both, except for:

    Args:
        linear_optimizer: A name means a learning rate of
            `min(0.005, 1/sqrt(columns))`.
        dnn_optimizer: A name means a learning rate of 0.001.
        input_layer_partitioner: Partitions the tables of both parts.
    """

    _make_head = staticmethod(class_head)


class DNNLinearCombinedRegressor(_DNNLinearCombined):
    """A wide-and-deep regressor: a linear model and a deep network combined.

    >>> age = tf.feature_column.numeric_column("age")
    >>> estimator = tfdist.DNNLinearCombinedRegressor(
    ...     "job", dnn_feature_columns=[age], dnn_hidden_units=[4]
    ... )
    >>> estimator.model_fn().count_params()
    13

    Like `tf.estimator.DNNLinearCombinedRegressor`. See
    `DNNLinearCombinedClassifier` for the arguments and errors, and
    `LinearRegressor` for `label_dimension` and `weight_column`.
    """

    _make_head = staticmethod(regression_head)


def _linear_part(
    columns: tuple[Column, ...],
    optimizer: Optimizer,
    sparse_combiner: str,
    learning_rate: float,
) -> _Part:
    if optimizer is None:
        optimizer = "Ftrl"
        learning_rate = min(learning_rate, 1 / math.sqrt(len(columns)))
    layer_fn = partial(
        LinearModel, columns, sparse_combiner=sparse_combiner, name="linear"
    )
    return layer_fn, _optimizer_fn(optimizer, learning_rate)


def _dnn_part(
    prefix: str,
    columns: Iterable[Column],
    optimizer_fn: OptimizerFn,
    *,
    hidden_units: Iterable[int] | None,
    **network: Any,
) -> _Part:
    """Returns a deep part; errors put `prefix` before argument names."""
    checked = checked_columns(f"{prefix}feature_columns", columns, dense=True)
    sizes = list(() if hidden_units is None else hidden_units)
    are_sizes = (isinstance(n, int | np.integer) and n > 0 for n in sizes)
    if not sizes or not all(are_sizes):
        raise ValueError(
            f"Argument `{prefix}hidden_units` must have positive integers. "
            f"Received: {prefix}hidden_units={hidden_units}."
        )
    layer_fn = partial(DNNModel, checked, hidden_units=sizes, **network)
    return layer_fn, optimizer_fn


def _optimizer_fn(optimizer: Any, rate: float | None = None) -> OptimizerFn:
    """Returns a function that creates optimizers; `rate` is for names only."""
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS:
            raise ValueError(
                f"Unsupported optimizer name: {optimizer!r}. Supported names "
                f"are: {tuple(_OPTIMIZERS)}."
            )
        options = {} if rate is None else {"learning_rate": rate}
        return partial(_OPTIMIZERS[optimizer], **options)
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return partial(type(optimizer).from_config, optimizer.get_config())
    if not callable(optimizer):
        raise TypeError(
            "An optimizer must be a name, a keras.optimizers.Optimizer or a "
            f"function that returns one. Received: {optimizer!r}."
        )
    return optimizer

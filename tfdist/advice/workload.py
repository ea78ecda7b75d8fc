"""What one training step needs: bytes, arithmetic, input.

Told by numbers, read from a model that is never allocated, or measured here and
now. `tfdist.advice.cost_model` turns it into seconds on machines.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import numbers
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.placement.variables import VariableSpec, describe

# Multiplications and additions for each weight and example: two forward, four
# backward (Kaplan et al., 2020, "Scaling Laws for Neural Language Models").
_FLOPS_PER_WEIGHT = 6
_FLOAT_BYTES = 4
# How `keras.layers.Embedding` and `PartitionedEmbedding` name their weights.
_TABLE = re.compile(r"(.*/)?embeddings(?P<part>_part_\d+)?$")
_RECURRENT = (keras.layers.RNN, keras.layers.Bidirectional)
_REPEATS = 5
_BATCHES = 20
_MATMUL_SIZE = 1024
_COPY_BYTES = 1 << 26


def check_number(
    name: str, value: Any, *, positive: bool = False, finite: bool = True
) -> None:
    """Raises unless `value` is a number that is not negative, nor NaN.

    Args:
        name: Of the argument, for the message.
        value: To be checked.
        positive: Zero is refused too.
        finite: Infinity is refused too.

    Raises:
        TypeError: It is no real number.
        ValueError: It is out of range.
    """
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(
            f"Argument `{name}` must be a number. Received: {name}={value!r}."
        )
    low_enough = value < math.inf or (value == math.inf and not finite)
    if not (value > 0 or (value == 0 and not positive)) or not low_enough:
        wanted = "positive" if positive else "zero or more"
        raise ValueError(
            f"Argument `{name}` must be {wanted}{' and finite' * finite}. "
            f"Received: {name}={value!r}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of one replica, in numbers.

    Attributes:
        batch_size: Examples that one replica takes in a step.
        dense_bytes: Weights that every step reads whole, and trains.
        table_bytes: Embedding tables, looked up by row.
        rows_bytes: Different rows of them that one step of one replica reads.
        slot_bytes: What is held beside these weights and not exchanged: the
            optimizer's slots, weights that are not trained.
        largest_bytes: The largest dense weight. No server shares it with
            another, and no device.
        activation_bytes: What the forward pass keeps for the backward one.
        boundary_bytes: What one layer hands to the next, for a whole batch.
        flops: Multiplications and additions. Default: six for each float32
            weight that is read whole and each example, as in dense layers.
        compute_secs: The same, as measured on such a device. Default: `flops`
            over what the device attains.
        input_secs: What one machine takes to prepare a batch of `batch_size`.

    Raises:
        TypeError, ValueError: A number is none, negative or infinite, or a
            part (`rows_bytes`, `largest_bytes`) exceeds its whole.

    Example:
    >>> step = Workload(batch_size=32, dense_bytes=4e6, slot_bytes=8e6)
    >>> step.state_bytes, step.flops
    (12000000.0, 192000000.0)
    """

    batch_size: int
    dense_bytes: float
    table_bytes: float = 0.0
    rows_bytes: float = 0.0
    slot_bytes: float = 0.0
    largest_bytes: float = 0.0
    activation_bytes: float = 0.0
    boundary_bytes: float = 0.0
    flops: float | None = None
    compute_secs: float | None = None
    input_secs: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                check_number(
                    field.name, value, positive=field.name == "batch_size"
                )
        for part, whole in (
            ("rows_bytes", "table_bytes"),
            ("largest_bytes", "dense_bytes"),
        ):
            if getattr(self, part) > getattr(self, whole):
                raise ValueError(
                    f"Argument `{part}` is a part of `{whole}`. Received: "
                    f"{part}={getattr(self, part)}, "
                    f"{whole}={getattr(self, whole)}."
                )
        if self.flops is None:
            flops = _FLOPS_PER_WEIGHT * self.dense_bytes / _FLOAT_BYTES
            object.__setattr__(self, "flops", flops * self.batch_size)

    @property
    def state_bytes(self) -> float:
        """Weights and slots together: what a checkpoint holds."""
        return self.dense_bytes + self.table_bytes + self.slot_bytes

    @classmethod
    def of(
        cls,
        model_fn: Callable[[], keras.Model],
        batch_size: int,
        *,
        rows_per_step: Mapping[str, int] | None = None,
    ) -> Workload:
        """Reads a model's step without allocating the model.

        Tables are the weights of `keras.layers.Embedding` and of
        `tfdist.PartitionedEmbedding`. A layer applies its weights at every
        position of its output (of its input, if it is recurrent), a dimension
        of unknown length counts as 1, and a layer that was not called on Keras
        tensors counts as one position without output.

        Args:
            model_fn: As for `tfdist.placement.describe`.
            batch_size: Examples that one replica takes in a step.
            rows_per_step: Different rows that a step reads of a table, by the
                table's name (without `_part_0`). Default: as if no two ids of
                a batch were equal, and one id an example where the shape of
                the layer's input does not tell.

        Returns:
            A `Workload` without `compute_secs` and `input_secs`.

        Raises:
            TypeError, ValueError: As `tfdist.placement.describe`;
                `rows_per_step` names what is no table.

        Example:
        >>> def model_fn():
        ...     ids = keras.Input([8], dtype="int32")
        ...     rows = keras.layers.Embedding(1_000_000, 16, name="words")(ids)
        ...     flat = keras.layers.Flatten()(rows)
        ...     return keras.Model(ids, keras.layers.Dense(1)(flat))
        >>> step = Workload.of(model_fn, 256)
        >>> int(step.table_bytes), int(step.rows_bytes)
        (64000000, 131072)
        """
        check_number("batch_size", batch_size, positive=True)
        shapes = _Shapes()
        specs = describe(
            (lambda: shapes.seen(model_fn()))
            if callable(model_fn)
            else model_fn  # `describe` says what is wrong.
        )
        others = [spec for spec in specs if not _is_table(spec)]
        dense = [_num_bytes(spec) for spec in others if spec.trainable]
        fixed = [_num_bytes(spec) for spec in others if not spec.trainable]
        weights = shapes.more_weights + sum(
            spec.num_elements for spec in others if _is_weight(spec.dtype)
        )
        numbers = _FLOAT_BYTES * batch_size
        return cls(
            batch_size=batch_size,
            dense_bytes=sum(dense),
            table_bytes=sum(_num_bytes(s) for s in specs if _is_table(s)),
            rows_bytes=_rows_bytes(
                specs, shapes, batch_size, dict(rows_per_step or {})
            ),
            slot_bytes=sum(fixed) + sum(map(_slot_bytes, specs)),
            largest_bytes=max(dense, default=0),
            activation_bytes=numbers * sum(shapes.outputs),
            boundary_bytes=numbers * statistics.fmean(shapes.outputs or [0]),
            flops=_FLOPS_PER_WEIGHT * batch_size * weights,
        )


def _is_table(spec: VariableSpec) -> bool:
    return _TABLE.match(spec.name) is not None and len(spec.shape) == 2


def _is_weight(dtype: str) -> bool:
    """Whether it takes part in arithmetic; the state of a seed does not."""
    return tf.as_dtype(dtype).is_floating


def _table_name(spec: VariableSpec) -> str:
    return spec.name.removesuffix(_TABLE.match(spec.name)["part"] or "")


def _num_bytes(spec: VariableSpec) -> int:
    return spec.num_elements * tf.as_dtype(spec.dtype).size


def _slot_bytes(spec: VariableSpec) -> int:
    return spec.num_slots * _num_bytes(spec) + spec.extra_bytes


def _rows_bytes(
    specs: Sequence[VariableSpec],
    shapes: _Shapes,
    batch_size: int,
    rows_per_step: dict[str, int],
) -> float:
    """Bytes of the different rows that a step reads, of all tables."""
    tables = collections.defaultdict(list)
    for spec in filter(_is_table, specs):
        tables[_table_name(spec)].append(spec)
    unknown = sorted(set(rows_per_step) - set(tables))
    if unknown:
        raise ValueError(
            "Argument `rows_per_step` must name tables. Received: "
            f"{unknown}; the model's tables are {sorted(tables)}."
        )
    total = 0.0
    for name, shards in tables.items():
        ids = batch_size * shapes.ids.get(name.rpartition("/")[0], 1)
        num_rows = max(1, sum(spec.num_rows for spec in shards))
        share = min(1.0, rows_per_step.get(name, ids) / num_rows)
        total += share * sum(map(_num_bytes, shards))
    return total


class _Shapes:
    """What only a model's layers tell, kept while it is described.

    Attributes:
        ids: By path of a layer, the numbers in one example of its input.
        outputs: Numbers in one example of each layer's output.
        more_weights: Weights, counted once more for each position after the
            first at which they are applied.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.outputs: list[int] = []
        self.more_weights = 0

    def seen(self, model: keras.Model) -> keras.Model:
        """Looks at the layers of a model, and returns it."""
        for layer in _leaves(model) if isinstance(model, keras.Model) else ():
            try:
                taken, given = (
                    tf.nest.flatten(tensors)[0].shape[1:]
                    for tensors in (layer.input, layer.output)
                )
            except (AttributeError, IndexError):
                continue  # Never called on Keras tensors, or an input layer.
            self.ids[layer.path] = _size(taken)
            self.outputs.append(_size(given))
            if not isinstance(layer, keras.layers.Embedding):
                recurrent = isinstance(layer, _RECURRENT)
                positions = _size((taken if recurrent else given)[:-1])
                self.more_weights += (positions - 1) * sum(
                    _size(w.shape) for w in layer.weights if _is_weight(w.dtype)
                )
        return model


def _leaves(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for inner in getattr(layer, "layers", ()):
        yield from _leaves(inner) if hasattr(inner, "layers") else (inner,)


def _size(shape: tuple[int | None, ...]) -> int:
    return math.prod(1 if n is None else n for n in shape)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What `measure` found on this machine.

    Attributes:
        compute_secs: A forward and backward pass of one batch.
        input_secs: Preparing a batch; 0.0 if no dataset was given.
        flops: Multiplications and additions a second, of a matrix product.
        copy_bandwidth: Bytes a second, copied in memory.
    """

    compute_secs: float
    input_secs: float
    flops: float
    copy_bandwidth: float


def measure(
    model_fn: Callable[[], keras.Model],
    batch: Any,
    *,
    dataset: tf.data.Dataset | None = None,
) -> Measured:
    """Measures a step on this machine's first device.

    Put `compute_secs` and `input_secs` into the `Workload`, `flops` into the
    `Machines`, where they are machines like this one. The optimizer's update is
    not part of the step; a network cannot be measured by one process.

    Args:
        model_fn: Returns a built model, which is allocated here.
        batch: `(x, y)` as the dataset yields it; the model's compiled loss is
            differentiated. Or a batch size: then the inputs are zeros, and the
            mean of the outputs is differentiated.
        dataset: Whose batches are timed, without the first. Default: none.

    Returns:
        A `Measured`: medians of five, and the mean of twenty batches.

    Raises:
        ValueError: The dataset has too few batches.
    """
    model = model_fn()
    if isinstance(batch, numbers.Integral):
        x, y = _zeros(model, int(batch)), None
    else:
        x, y = batch

    @tf.function
    def step() -> tuple[tf.Tensor, list[Any]]:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            if y is None:
                means = map(tf.reduce_mean, tf.nest.flatten(outputs))
                loss = tf.add_n([tf.cast(mean, tf.float32) for mean in means])
            else:
                loss = model.compute_loss(x=x, y=y, y_pred=outputs)
        weights = [weight.value for weight in model.trainable_weights]
        return loss, tape.gradient(loss, weights)

    square = tf.ones([_MATMUL_SIZE, _MATMUL_SIZE])
    memory = np.ones(_COPY_BYTES, np.uint8)
    return Measured(
        # A loss on the host has been computed, on whatever device.
        compute_secs=_secs(lambda: step()[0].numpy()),
        input_secs=0.0 if dataset is None else _input_secs(dataset),
        flops=2 * _MATMUL_SIZE**3 / _secs(lambda: (square @ square).numpy()),
        copy_bandwidth=_COPY_BYTES / _secs(memory.copy),
    )


def _zeros(model: keras.Model, batch_size: int) -> Any:
    def zeros(tensor: keras.KerasTensor) -> tf.Tensor:
        shape = [1 if n is None else n for n in tensor.shape[1:]]
        return tf.zeros([batch_size, *shape], tensor.dtype)

    inputs = (
        model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    )
    return tf.nest.map_structure(zeros, inputs)


def _secs(run: Callable[[], Any]) -> float:
    """Median of some runs, after one that traces and fills caches."""
    run()
    return statistics.median([_timed(run) for _ in range(_REPEATS)])


def _input_secs(dataset: tf.data.Dataset) -> float:
    """Mean of many: what was prefetched comes at once, the rest later."""
    batches = iter(dataset)
    try:
        next(batches)
        some = range(_BATCHES)
        return _timed(lambda: [next(batches) for _ in some]) / _BATCHES
    except StopIteration:
        raise ValueError(
            f"Argument `dataset` must have more than {_BATCHES} batches. "
            f"Received: dataset={dataset}. Add `.repeat()`."
        ) from None


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

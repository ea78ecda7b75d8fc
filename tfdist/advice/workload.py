"""What one training step needs: bytes, arithmetic, input.

Given as numbers, or read from a model that is never allocated.
`tfdist.advice.estimate` turns it into seconds on machines.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import numbers
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.placement.variables import VariableSpec, describe

# Multiplications and additions for each weight and example: two forward, four
# backward (Kaplan et al., 2020, "Scaling Laws for Neural Language Models").
_FLOPS_PER_WEIGHT = 6
_FLOAT_BYTES = 4
_DERIVED: Any = None  # Filled in from other numbers.
# How `keras.layers.Embedding` and `PartitionedEmbedding` name their weights.
_TABLE = re.compile(r"(?P<table>(.*/)?embeddings)(_part_\d+)?$")
_RECURRENT = (keras.layers.RNN, keras.layers.Bidirectional)


def check_number(
    name: str,
    value: Any,
    *,
    positive: bool = False,
    finite: bool = True,
    whole: bool = False,
) -> None:
    """Raises `ValueError` unless `value` is such a number, and at least 0."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    good = good and (value > 0 if positive else value >= 0)
    if not good or (finite and math.isinf(value)):
        wanted = "positive" if positive else "zero or more"
        raise ValueError(
            f"Argument `{name}` must be {wanted}{' and finite' * finite}. "
            f"Received: {name}={value!r}."
        )
    if whole and not isinstance(value, int):
        raise ValueError(
            f"Argument `{name}` must be an integer. Received: {name}={value!r}."
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
        ValueError: A number is negative or infinite, or a part (`rows_bytes`,
            `largest_bytes`) exceeds its whole.

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
    flops: float = _DERIVED
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
            (lambda: shapes.read(model_fn()))
            if callable(model_fn)
            else model_fn  # `describe` says what is wrong.
        )
        dense, fixed, weights = [0], 0, shapes.repeated_weights
        tables = collections.defaultdict(list)
        for spec in specs:
            match = _TABLE.match(spec.name)
            if match and len(spec.shape or ()) == 2:
                tables[match["table"]].append(spec)
                continue
            if spec.trainable:
                dense.append(_num_bytes(spec))
            else:
                fixed += _num_bytes(spec)
            # The state of a seed takes no part in arithmetic.
            weights += _size(spec.shape or ()) * _is_float(spec.dtype)
        for spec in specs:
            fixed += spec.num_slots * _num_bytes(spec) + spec.extra_bytes
        numbers = _FLOAT_BYTES * batch_size
        return cls(
            batch_size=batch_size,
            dense_bytes=sum(dense),
            table_bytes=sum(
                _num_bytes(spec) for table in tables.values() for spec in table
            ),
            rows_bytes=_rows_bytes(
                tables, shapes.ids, batch_size, rows_per_step or {}
            ),
            slot_bytes=fixed,
            largest_bytes=max(dense),
            activation_bytes=numbers * sum(shapes.outputs),
            boundary_bytes=numbers * statistics.fmean(shapes.outputs or [0]),
            flops=_FLOPS_PER_WEIGHT * batch_size * weights,
        )


def _is_float(dtype: str) -> bool:
    return tf.as_dtype(dtype).is_floating


def _num_bytes(spec: VariableSpec) -> int:
    return spec.num_elements * tf.as_dtype(spec.dtype).size


def _rows_bytes(
    tables: Mapping[str, Sequence[VariableSpec]],
    ids: Mapping[str, int],
    batch_size: int,
    rows_per_step: Mapping[str, int],
) -> float:
    """Bytes of the different rows that a step reads, of all tables."""
    unknown = sorted(set(rows_per_step) - set(tables))
    if unknown:
        raise ValueError(
            "Argument `rows_per_step` must name tables. Received: "
            f"{unknown}; the model's tables are {sorted(tables)}."
        )
    total = 0.0
    for name, shards in tables.items():
        rows = batch_size * ids.get(name.rpartition("/")[0], 1)
        num_rows = max(1, sum(spec.num_rows for spec in shards))
        share = min(1.0, rows_per_step.get(name, rows) / num_rows)
        total += share * sum(map(_num_bytes, shards))
    return total


class _Shapes:
    """What only a model's layers tell, kept while it is described.

    Attributes:
        ids: By path of a layer, the numbers in one example of its input.
        outputs: Numbers in one example of each layer's output.
        repeated_weights: Weights, counted once for each position after the
            first at which they are applied.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.outputs: list[int] = []
        self.repeated_weights = 0

    def read(self, model: keras.Model) -> keras.Model:
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
                self.repeated_weights += (positions - 1) * sum(
                    _size(w.shape) * _is_float(w.dtype) for w in layer.weights
                )
        return model


def _leaves(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for inner in getattr(layer, "layers", ()):
        yield from _leaves(inner) if hasattr(inner, "layers") else (inner,)


def _size(shape: tuple[int | None, ...]) -> int:
    return math.prod(1 if n is None else n for n in shape)

"""What one training step needs: bytes, arithmetic, input.

The numbers are given, derived from an unallocated model, or measured.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import statistics
import sys
import timeit
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.arguments import check_at_least, check_callable, check_positive
from tfdist.placement.variables import VariableSpec, describe

ModelFn = Callable[[], keras.Model]

# Multiplications and additions per weight and example: two forward, four
# backward (Kaplan et al., 2020, "Scaling Laws for Neural Language Models").
_FLOPS_PER_WEIGHT = 6
_FLOAT_BYTES = 4
_DERIVED: Any = None  # Derived from other fields.
# How `keras.layers.Embedding` and `PartitionedEmbedding` name their weights.
_TABLE = re.compile(r"((?P<layer>.*)/)?embeddings(_part_\d+)?$")
_RECURRENT = (keras.layers.RNN, keras.layers.Bidirectional)


def check_numbers(record: Any, positive: Collection[str]) -> None:
    """Raises unless numbers are finite, and at least 0 or `positive`."""
    for field in dataclasses.fields(record):
        name, value = field.name, getattr(record, field.name)
        if isinstance(field.default, str):
            continue
        check_at_least(name, value, sys.float_info.min * (name in positive))
        if value == math.inf and name != "secs_between_failures":
            raise ValueError(
                f"Argument `{name}` must be finite. Received: {name}={value}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The cost of one step of one replica, in numbers.

    Attributes:
        batch_size: Examples per step of one replica.
        dense_bytes: Trainable weights that every step reads in full.
        table_bytes: Embedding tables, which are looked up by row.
        rows_bytes: Distinct table rows that one step of one replica reads.
        slot_bytes: State that is stored but not exchanged: slot variables of
            the optimizer and weights that are not trainable.
        largest_bytes: The largest dense weight, which cannot be split across
            servers or devices.
        activation_bytes: Activations kept for the backward pass.
        boundary_bytes: Output that one layer passes to the next, per batch.
        flops: Multiplications and additions. Default: six per example and
            float32 weight that is read in full, as in dense layers.
        compute_secs: Computing time measured on such a device. Default: `flops`
            divided by `Machines.device_flops`.
        input_secs: Time one machine takes to prepare a batch of `batch_size`.

    Raises:
        ValueError: A number is negative or infinite, `rows_bytes` exceeds
            `table_bytes`, or `largest_bytes` exceeds `dense_bytes`.

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
        check_numbers(self, positive=["batch_size"])
        sizes = vars(self)
        parts = {"rows_bytes": "table_bytes", "largest_bytes": "dense_bytes"}
        for part, whole in parts.items():
            if sizes[part] > sizes[whole]:
                raise ValueError(
                    f"Argument `{part}` is a part of `{whole}`, so it must not "
                    f"be larger. Received: {part}={sizes[part]}, "
                    f"{whole}={sizes[whole]}."
                )
        if self.flops is None:
            flops = _FLOPS_PER_WEIGHT * self.dense_bytes / _FLOAT_BYTES
            object.__setattr__(self, "flops", flops * self.batch_size)

    @property
    def state_bytes(self) -> float:
        """Size of the weights and slot variables, which checkpoints store."""
        return self.dense_bytes + self.table_bytes + self.slot_bytes

    @classmethod
    def of(cls, model_fn: ModelFn, batch_size: int) -> Workload:
        """Derives a model's workload without allocating the model.

        `model_fn` and errors are those of `tfdist.placement.describe`. The
        result has no `compute_secs` or `input_secs`; override fields with
        `dataclasses.replace(workload, rows_bytes=...)`.

        Tables are the weights of `keras.layers.Embedding` and
        `tfdist.PartitionedEmbedding`; a batch's ids are assumed distinct. A
        layer applies its other weights at every position of its output (or
        input, if it is recurrent). A dimension of unknown length counts as 1.
        A layer that was not called on Keras tensors looks up one id, and counts
        as one position without output.

        >>> def model_fn():
        ...     ids = keras.Input([8], dtype="int32")
        ...     rows = keras.layers.Embedding(1_000_000, 16, name="words")(ids)
        ...     flat = keras.layers.Flatten()(rows)
        ...     return keras.Model(ids, keras.layers.Dense(1)(flat))
        >>> step = Workload.of(model_fn, 256)
        >>> int(step.table_bytes), int(step.rows_bytes)
        (64000000, 131072)
        """
        check_positive("batch_size", batch_size)
        check_callable("model_fn", model_fn)
        layers: list[keras.layers.Layer] = []

        def build() -> keras.Model:
            model = model_fn()
            layers.extend(_leaves(model))
            return model

        specs = describe(build)
        tables = collections.defaultdict(list)
        for spec in specs:
            if match := _TABLE.match(spec.name):
                tables[match["layer"]].append(spec)
        whole = [spec for spec in specs if not _TABLE.match(spec.name)]
        dense = [_num_bytes(spec) for spec in whole if spec.trainable]
        slots = [s.num_slots * _num_bytes(s) + s.extra_bytes for s in specs]
        fixed = [_num_bytes(spec) for spec in whole if not spec.trainable]
        weights = sum(map(_num_floats, whole))
        ids, outputs = {}, []
        for layer in layers:
            try:
                taken, given = (
                    tf.nest.flatten(tensors)[0].shape[1:]
                    for tensors in (layer.input, layer.output)
                )
            except (AttributeError, IndexError):
                continue  # Never called on Keras tensors, or an input layer.
            ids[layer.path] = _size(taken)
            outputs.append(_FLOAT_BYTES * batch_size * _size(given))
            applied = taken if isinstance(layer, _RECURRENT) else given
            read_whole = (w for w in layer.weights if not _TABLE.match(w.path))
            floats = sum(map(_num_floats, read_whole))
            weights += (_size(applied[:-1]) - 1) * floats
        rows_bytes = 0.0
        for name, shards in tables.items():
            num_rows = max(1, sum(spec.num_rows for spec in shards))
            read = min(batch_size * ids.get(name, 1), num_rows)
            rows_bytes += sum(map(_num_bytes, shards)) * read / num_rows
        return cls(
            batch_size=batch_size,
            dense_bytes=sum(dense),
            table_bytes=sum(map(_num_bytes, specs)) - sum(dense) - sum(fixed),
            rows_bytes=rows_bytes,
            slot_bytes=sum(slots) + sum(fixed),
            largest_bytes=max(dense, default=0),
            activation_bytes=sum(outputs),
            boundary_bytes=statistics.fmean(outputs or [0]),
            flops=_FLOPS_PER_WEIGHT * batch_size * weights,
        )


def _leaves(layer: Any) -> Iterator[keras.layers.Layer]:
    for inner in getattr(layer, "layers", ()):
        yield from _leaves(inner) if hasattr(inner, "layers") else (inner,)


def _size(shape: Sequence[int | None]) -> int:
    return math.prod(1 if n is None else n for n in shape)


def _num_bytes(spec: VariableSpec) -> int:
    return _size(spec.shape or ()) * tf.as_dtype(spec.dtype).size


def _num_floats(weight: VariableSpec | keras.Variable) -> int:
    """Returns 0 for integers, such as a seed's state, which cost no flops."""
    return _size(weight.shape or ()) * tf.as_dtype(weight.dtype).is_floating


def measure(model_fn: ModelFn, batch_size: int) -> float:
    """Measures `compute_secs` of a step on this machine's first device.

    Returns the median of five forward and backward passes of the mean output
    on zeros, without the optimizer's update. The model is allocated on this
    machine, and must be built.

    >>> def model_fn():
    ...     return keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> measure(model_fn, 8) > 0
    True
    """
    model = model_fn()
    x = tf.nest.map_structure(
        lambda x: tf.zeros(
            [batch_size, *(n or 1 for n in x.shape[1:])], x.dtype
        ),
        model.inputs[0] if isinstance(model, keras.Sequential) else model.input,
    )

    @tf.function(autograph=False)
    def step() -> tuple[tf.Tensor, list[Any]]:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(x, training=True))
            means = [tf.reduce_mean(tf.cast(y, tf.float32)) for y in outputs]
            loss = tf.add_n(means)
        weights = [weight.value for weight in model.trainable_weights]
        return loss, tape.gradient(loss, weights)

    # Fetching the loss waits for the step. The first call traces.
    secs = timeit.repeat(lambda: step()[0].numpy(), number=1, repeat=6)
    return statistics.median(secs[1:])

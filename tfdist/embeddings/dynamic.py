"""Embedding tables for ids that are not known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_positive
from tfdist._tf.private_keras import VariableBeside
from tfdist.embeddings.admission import MOST, WIDTH
from tfdist.embeddings.growing import COUNTED, Found, Growing, GrowingShards
from tfdist.embeddings.index import BUCKET, MOST_ROWS, OLDEST, SEGMENT, mixed
from tfdist.embeddings.initial import first_rows, salt
from tfdist.embeddings.layer import PartitionedEmbedding, mark_shard, own_rows
from tfdist.embeddings.places import places_of
from tfdist.embeddings.routing import KeyedGroup
from tfdist.placement.partitioners import Run, row_slices

_NOT_HERE = (
    "partition_strategy embeddings_regularizer embeddings_constraint mask_zero"
).split()

# Variables that accompany each shard: name, dtype and shape per segment.
_BESIDE = (
    ("keys", "int64", (SEGMENT // BUCKET, BUCKET)),
    ("seen", "int32", (SEGMENT,)),
    ("counters", "int64", (1, 3)),
    ("sketch", "int32", (1, WIDTH)),
)


@keras.saving.register_keras_serializable(package="tfdist")
class DynamicEmbedding(PartitionedEmbedding):
    """An embedding layer that allocates a row for an id when it is trained.

    Like `PartitionedEmbedding`, without a vocabulary: ids are any integers or
    strings, hashed or not, and no two share a row. Training allocates the row
    of an id in its first update, or a later one (`admit_after`); evaluation,
    prediction and exports never do. An id without a row reads its row's
    initial value; its gradients are dropped and counted (`counters`) until it
    has a row.

    >>> layer = DynamicEmbedding(4, capacity=10_000, combiner="sum")
    >>> layer(tf.constant([["a user", "an item"], ["a user", ""]])).shape
    TensorShape([2, 4])
    >>> layer.num_ids()
    0

    Tables of the same width and options are looked up together, with hardly
    more ops than a single table. SavedModels exported by tfdist contain only
    the rows in use. Not supported: regularizers, constraints, `mask_zero`.

    Args:
        output_dim: The length of a row.
        capacity: The number of rows, rounded up to a multiple of 4,096; each
            takes about 12 bytes besides its values and optimizer slots. An id
            is refused if its segment of 4,096 rows is full, so choose a third
            more than the number of ids that you expect.
        num_shards: The number of shards, of at least 4,096 rows each; see
            `PartitionedEmbedding`.
        partitioner: Excludes `num_shards`; receives the rounded capacity.
        combiner: As for `PartitionedEmbedding`.
        admit_after: The update (1 to 127) in which an id gets its row, so that
            ids that occur only once take none. A sketch of 2 bytes per row
            counts ids, and halves its counts whenever it has counted half as
            many ids as the table has rows: a rare id may wait longer, and about
            one new id in 20 waits less. Default: 1. It may change when a job
            resumes; a new sketch counts from 0.
        evict_after_steps: An id that appeared in none of the last so many
            updates (of all workers) may lose its row to an id that finds no
            room: the oldest of the 32 rows that the new id may take. If it
            returns it starts over, even if its row was read before the
            eviction and is updated afterwards. Updates of a server's evicting
            tables take turns. Default: never. If it is enabled later, ids count
            as never seen until they are seen.
        embeddings_initializer: Keras' constant, uniform or normal. The initial
            row is a function of the id, the layer's name and the initializer's
            seed (None counts as 0), so it is independent of `num_shards`.
        name: The name of the layer.
        **kwargs: Arguments of every Keras layer.

    Call arguments:
        ids: Integers or strings; a dense, ragged or sparse tensor.
        weights: As for `PartitionedEmbedding`.

    Raises:
        ValueError: a size is not positive, more shards than `capacity` has
            segments, another initializer, an argument that is not supported.
        TypeError: at the call: ids of another dtype.
        LookupError: the model is not trained by steps of tfdist.
        tf.errors.InvalidArgumentError: at run time: the id -2**63, or a batch
            with more ids than the table has rows.
    """

    _arguments: ClassVar[Sequence[str]] = (
        "output_dim capacity num_shards combiner admit_after evict_after_steps "
        "embeddings_initializer"
    ).split()
    group_type = KeyedGroup
    _ids_are = "integers or strings"

    def __init__(
        self,
        output_dim: int,
        capacity: int,
        *,
        num_shards: int | None = None,
        partitioner: Callable[..., Any] | None = None,
        combiner: str | None = None,
        admit_after: int = 1,
        evict_after_steps: int | None = None,
        embeddings_initializer: Any = "uniform",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        evicted_after = 1 if evict_after_steps is None else evict_after_steps
        for argument, value, most in (
            ("capacity", capacity, MOST_ROWS),
            ("admit_after", admit_after, MOST),
            ("evict_after_steps", evicted_after, OLDEST),
        ):
            check_positive(argument, value)
            if value > most:
                raise ValueError(
                    f"Argument `{argument}` must be at most {most}. "
                    f"Received: {argument}={value}."
                )
        if refused := sorted({*_NOT_HERE} & kwargs.keys()):
            raise ValueError(
                f"A DynamicEmbedding does not support {refused}. Leave it "
                "out, or use a PartitionedEmbedding."
            )
        self.num_segments = -(-int(capacity) // SEGMENT)
        super().__init__(
            self.num_segments * SEGMENT,
            output_dim,
            num_shards,
            partitioner,
            combiner,
            embeddings_initializer,
            name,
            "div",
            **kwargs,
        )
        self.capacity = capacity
        self.admit_after = admit_after
        self.evict_after_steps = evict_after_steps
        if self.num_shards > self.num_segments:
            raise ValueError(
                f"Argument `capacity` must be at least {SEGMENT} for each "
                f"shard, here {SEGMENT * self.num_shards}, or `num_shards` at "
                f"most {self.num_segments}. Received: capacity={capacity}, "
                f"num_shards={self.num_shards}."
            )
        self._segments = row_slices(self.num_segments, self.num_shards)
        self.slices = tuple(
            (a * SEGMENT, n * SEGMENT) for a, n in self._segments
        )
        self.runs = tuple(
            Run(row, size, i, 0) for i, (row, size) in enumerate(self.slices)
        )
        self._drawn = first_rows(self.embeddings_initializer, output_dim)
        self.salt = salt(self.embeddings_initializer, self.name)
        self._growing: list[Growing] = []

    def build(self, *input_shapes: Any) -> None:
        """Creates the shards, and the variables that each needs to grow."""
        if self.built:
            return
        super().build(*input_shapes)
        for i, shard in enumerate(self.shards):
            kinds = _BESIDE if self.admit_after > 1 else _BESIDE[:-1]
            beside = [self._beside(i, *kind) for kind in kinds]
            self._growing.append(
                Growing(self, shard, self._segments[i][0], *beside)
            )

    def _initializer_of(self, shard: int) -> Callable[..., tf.Tensor]:
        """Returns zeros: rows are initialized when they are claimed."""
        return keras.initializers.Zeros()

    def _beside(
        self, i: int, name: str, dtype: str, shape: tuple[int, ...]
    ) -> keras.Variable:
        """Creates a variable next to a shard, with `shape` per segment."""
        (first, num), (size, *rest) = self._segments[i], shape
        part = f"_part_{i}" if self.num_shards > 1 else ""
        variable = VariableBeside(
            self.shards[i], (num * size, *rest), dtype, f"{name}{part}"
        )
        if part:
            mark_shard(variable, part, [(first * size, num * size)])
        self._track_variable(variable)
        return variable

    @property
    def pieces(self) -> list[keras.Variable]:
        """The variables that hold the table."""
        return [v for growing in self._growing for v in growing.pieces]

    def num_ids(self) -> int:
        """Returns the number of ids that have a row."""
        return int(self.counters()["num_ids"])

    def counters(self) -> dict[str, float]:
        """Returns the numbers about the table that TensorBoard shows.

        `num_ids` have a row, `admitted_ids` got one, `evicted_ids` lost theirs.
        `fullest_segment` is the largest share of rows in use in a segment; at 1
        it refuses ids. `dropped_gradients` is the sum of `refused` (no room)
        and `not_admitted` (not yet).
        """
        by_segment = [each.ids_by_segment().numpy() for each in self._growing]
        held = np.concatenate(by_segment)
        counts = sum(g.counters.numpy().sum(axis=0) for g in self._growing)
        told = dict(zip(COUNTED, map(int, counts), strict=True))
        num_ids = int(held.sum())
        return {
            "num_ids": num_ids,
            "admitted_ids": num_ids + told["evicted_ids"],
            "fullest_segment": float(held.max() / SEGMENT),
            "dropped_gradients": told["refused"] + told["not_admitted"],
            **told,
        }

    def initial_rows(self, ids: Any) -> tf.Tensor:
        """Returns the initial rows `(n, output_dim)` of ids `(n,)`."""
        return self.first_rows(mixed(self._as_ids(tf.convert_to_tensor(ids))))

    def first_rows(
        self, keys: tf.Tensor, salt: tf.Tensor | int | None = None
    ) -> tf.Tensor:
        """Returns the initial rows of keys, given the salts of their tables."""
        return self._drawn(keys, self.salt if salt is None else salt)

    @property
    def group_key(self) -> Any:  # type: ignore[override]
        """The options shared by tables that are looked up together."""
        config = self.embeddings_initializer.get_config()
        config.pop("seed", None)  # It is part of the salt.
        kind = type(self.embeddings_initializer).__name__, repr(config)
        return *kind, self.admit_after, self.evict_after_steps

    def _takes(self, dtype: str) -> bool:
        return dtype == "string" or tf.as_dtype(dtype).is_integer

    def _as_ids(self, flat: tf.Tensor) -> tf.Tensor:
        if flat.dtype == tf.string:
            return tf.bitcast(tf.fingerprint(flat), tf.int64)
        return super()._as_ids(flat)

    def _read(self, flat: tf.Tensor) -> tf.Tensor:
        group = KeyedGroup([self], 0, lambda _: "")
        route = group.route([(self, flat)])
        places = places_of(route.counts[""], self.num_shards)
        asked = Found(route.ids[""], places)
        rows = GrowingShards(group.shards).rows(asked).rows
        if self.trainable:
            # With such a gradient, ids without a row would never learn.
            rows = tf.raw_ops.PreventGradient(
                input=rows,
                message=f"Table {self.path} gives ids their rows in steps of "
                "tfdist's. Train by tfdist.fit or an Estimator, not by the "
                "model's own `fit`, nor by its own `train_step` in one "
                "process.",
            )
        return tf.gather(rows, route.positions)

    def _by_kind(self) -> list[list[keras.Variable]]:
        """Lists the shards of the table and of each accompanying variable."""
        each = (growing.pieces for growing in self._growing)
        return [list(kind) for kind in zip(*each, strict=True)]

    def get_weights(self) -> list[np.ndarray]:
        """Returns table, keys, seen, counters and any sketch, an array each."""
        return [
            np.concatenate([v.numpy() for v in each])
            for each in self._by_kind()
        ]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets arrays that `get_weights` returned, for any number of shards."""
        wanted = [each.shape for each in self.get_weights()]
        if (found := [*map(np.shape, weights)]) != wanted:
            raise ValueError(
                f"Layer {self.path!r} has arrays of shape: {wanted}. Received "
                f"arrays of shape: {found}. Is it of the same capacity?"
            )
        for each, whole in zip(self._by_kind(), weights, strict=True):
            for variable in each:
                variable.assign(own_rows(variable, whole))

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Reads the arrays; resets `seen`, which refers to another job."""
        arrays = [store[str(i)] for i in range(len(store))]
        arrays[2] = np.zeros_like(arrays[2])
        self.set_weights(arrays)

"""Embedding tables for ids that nobody can list beforehand."""

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

# Beside each shard: name and dtype, and the shape of what a segment has.
_BESIDE = (
    ("keys", "int64", (SEGMENT // BUCKET, BUCKET)),
    ("seen", "int32", (SEGMENT,)),
    ("counters", "int64", (1, 3)),
    ("sketch", "int32", (1, WIDTH)),
)


@keras.saving.register_keras_serializable(package="tfdist")
class DynamicEmbedding(PartitionedEmbedding):
    """Looks up rows of any ids; an id gets its row when it is first trained.

    As `PartitionedEmbedding`, without a vocabulary: ids are any integers or
    strings, hashed or not, and no two share a row. Training gives an id a
    row in its first update, or a later one (`admit_after`); evaluation,
    prediction and exports never do. An id without a row reads what its row
    would begin with; until it gets one its gradients are dropped, and counted
    (`counters`).

    >>> layer = DynamicEmbedding(4, capacity=10_000, combiner="sum")
    >>> layer(tf.constant([["a user", "an item"], ["a user", ""]])).shape
    TensorShape([2, 4])
    >>> layer.num_ids()
    0

    Tables of one width with the same options are looked up together, in hardly
    more ops than one. A SavedModel that tfdist exports holds the rows in use
    alone. Not supported yet: regularizers, constraints, `mask_zero`.

    Args:
        output_dim: Length of a row.
        capacity: Rows, rounded up to 4,096; some 12 bytes each on top of row
            and optimizer slots. An id finds no room where its segment of 4,096
            is full, so let it be a third more than the ids that you expect.
        num_shards: Pieces, of 4,096 rows at least; see `PartitionedEmbedding`.
        partitioner: Excludes `num_shards`; sees the rounded capacity.
        combiner: As of `PartitionedEmbedding`.
        admit_after: An id gets its row in the update that is its so many-th, at
            most 127, so that ids that come once take none. A sketch of 2 bytes
            a row counts them, and halves its counts whenever it has counted
            half as many ids as the table has rows: a rare id may wait longer,
            and of 20 new ones about one waits shorter. Default: 1. A job may go
            on with another: what it turns on counts from 0.
        evict_after_steps: An id that has been in none of so many updates, of
            all workers together, may lose its row to one that finds no room:
            the oldest of the 32 that the new one may take. It begins anew when
            it comes back, even if it was read before and is updated after the
            loss. Updates of a server's tables that evict take turns. Default:
            never. Switched on later, ids count as never seen until they are.
        embeddings_initializer: Constant, uniform or normal, of Keras'. A row
            begins with a function of id, layer name and the initializer's
            seed (None counts as 0), so it does not depend on `num_shards`.
        name: Name of the layer.
        **kwargs: As for every layer.

    Call arguments:
        ids: Integers or strings: dense, ragged or sparse.
        weights: As of `PartitionedEmbedding`.

    Raises:
        ValueError: a size is not positive, more shards than `capacity` has
            segments, another initializer, an argument that is not supported.
        TypeError: at the call: ids of another dtype.
        LookupError: a model is trained by other means than tfdist's steps.
        tf.errors.InvalidArgumentError: at run time: the id -2**63, or a batch
            that has more ids than the table has rows.
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
        """Creates the shards, and beside each what it needs to grow."""
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
        """Zeros: rows begin when they are claimed."""
        return keras.initializers.Zeros()

    def _beside(
        self, i: int, name: str, dtype: str, shape: tuple[int, ...]
    ) -> keras.Variable:
        """A variable beside a shard, of this shape for each segment of it."""
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
        """All variables that hold the table."""
        return [v for growing in self._growing for v in growing.pieces]

    def num_ids(self) -> int:
        """How many ids have a row."""
        return int(self.counters()["num_ids"])

    def counters(self) -> dict[str, float]:
        """What TensorBoard shows of the table.

        How many ids have a row, `num_ids`, got one, `admitted_ids`, and lost
        theirs, `evicted_ids`; the share of rows in use in the
        `fullest_segment`, at 1 the first ids find no room; `dropped_gradients`:
        of ids that found none, `refused`, or were `not_admitted` yet.
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
        """What the rows of ids `(n,)` begin with, `(n, output_dim)`."""
        return self.first_rows(mixed(self._as_ids(tf.convert_to_tensor(ids))))

    def first_rows(
        self, keys: tf.Tensor, salt: tf.Tensor | int | None = None
    ) -> tf.Tensor:
        """What the rows of keys begin with, by the salts of their tables."""
        return self._drawn(keys, self.salt if salt is None else salt)

    @property
    def group_key(self) -> Any:  # type: ignore[override]
        """What tables have in common that are looked up together."""
        config = self.embeddings_initializer.get_config()
        config.pop("seed", None)  # Is in the salt.
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
            # By it, an id without a row would learn nothing, silently.
            rows = tf.raw_ops.PreventGradient(
                input=rows,
                message=f"Table {self.path} gives ids their rows in steps of "
                "tfdist's. Train by tfdist.fit or an Estimator, not by the "
                "model's own `fit`, nor by its own `train_step` in one "
                "process.",
            )
        return tf.gather(rows, route.positions)

    def _by_kind(self) -> list[list[keras.Variable]]:
        """Shards of the table and of each variable beside it."""
        each = (growing.pieces for growing in self._growing)
        return [list(kind) for kind in zip(*each, strict=True)]

    def get_weights(self) -> list[np.ndarray]:
        """Table, keys, seen, counters and any sketch, as one array each."""
        return [
            np.concatenate([v.numpy() for v in each])
            for each in self._by_kind()
        ]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets what `get_weights` has returned, in any number of shards."""
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
        """Reads them; when ids were seen is another job's."""
        arrays = [store[str(i)] for i in range(len(store))]
        arrays[2] = np.zeros_like(arrays[2])
        self.set_weights(arrays)

"""Embedding tables for ids that are not known in advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_positive
from tfdist._tf.private_keras import ColocatedZeros
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

# Auxiliary variables of each shard: name, dtype, and shape for one segment.
_AUXILIARY = (
    ("keys", "int64", (SEGMENT // BUCKET, BUCKET)),
    ("seen", "int32", (SEGMENT,)),
    ("counters", "int64", (1, 3)),
    ("sketch", "int32", (1, WIDTH)),
)


@keras.saving.register_keras_serializable(package="tfdist")
class DynamicEmbedding(PartitionedEmbedding):
    """Looks up rows of any ids; an id gets its row when it is first trained.

    Like `PartitionedEmbedding`, but without a vocabulary: ids are any integers
    or strings, hashed or not, and no two share a row. Training gives an id a
    row in its first update, or in a later one (`admit_after`); evaluation,
    prediction and exports do not. The lookup of an id without a row returns its
    initial row; until it gets a row, its gradients are dropped, and counted
    (`counters`).

    >>> layer = DynamicEmbedding(4, capacity=10_000, combiner="sum")
    >>> layer(tf.constant([["a user", "an item"], ["a user", ""]])).shape
    TensorShape([2, 4])
    >>> layer.num_ids()
    0

    Tables with equal width and options are looked up together, in hardly more
    ops than a single table. A SavedModel exported by tfdist contains only the
    rows in use. Not supported yet: regularizers, constraints, `mask_zero`.

    Args:
        output_dim: Length of a row.
        capacity: Number of rows, rounded up to a multiple of 4,096. Each takes
            about 12 bytes in addition to the row and its optimizer slots. An id
            gets no row if its segment of 4,096 rows is full, so make `capacity`
            a third larger than the expected number of ids.
        num_shards: See `PartitionedEmbedding`; 4,096 rows at least in each.
        partitioner: Excludes `num_shards`; receives the rounded capacity.
        combiner: See `PartitionedEmbedding`.
        admit_after: Number of updates that must contain an id; the last of them
            gives it a row. At most 127. With 2 or more, ids that occur once get
            none. A sketch of 2 bytes per row counts ids, and halves its counts
            when it has counted half as many as there are rows: a rare id may
            get its row later, and about one of 20 new ids gets it earlier. If a
            resumed job turns this on, counts start at 0. Default: 1.
        evict_after_steps: An id in none of the last `evict_after_steps` updates
            of all workers together may lose its row to an id that finds no
            room, which takes the oldest of its 32 possible rows. An evicted id
            that returns starts from its initial row, even if it was read before
            the eviction and updated after it. Updates of evicting tables on the
            same server run one at a time. If a resumed job turns this on, an id
            counts as never seen until its next update. Default: never.
        embeddings_initializer: Keras' constant, uniform or normal initializer.
            The initial value of a row depends on the id, the layer name and the
            initializer's seed (None counts as 0), not on `num_shards`.
        name: Name of the layer.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        ids: Integers or strings: dense, ragged or sparse.
        weights: See `PartitionedEmbedding`.

    Raises:
        ValueError: if a size is not positive, there are more shards than
            segments, or an argument or the initializer is not supported.
        TypeError: at the call, if ids have an unsupported dtype.
        LookupError: if a model is not trained by the steps of tfdist.
        tf.errors.InvalidArgumentError: at run time, if an id is -2**63, or a
            batch has more ids than the table has rows.
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
        """Creates the shards and their auxiliary variables."""
        if self.built:
            return
        super().build(*input_shapes)
        for i, shard in enumerate(self.shards):
            kinds = _AUXILIARY if self.admit_after > 1 else _AUXILIARY[:-1]
            auxiliary = [self._auxiliary(i, *kind) for kind in kinds]
            self._growing.append(
                Growing(self, shard, self._segments[i][0], *auxiliary)
            )

    def _initializer_of(self, shard: int) -> Callable[..., tf.Tensor]:
        """Returns zeros: a row is initialized when an id gets it."""
        return keras.initializers.Zeros()

    def _auxiliary(
        self, i: int, name: str, dtype: str, shape: tuple[int, ...]
    ) -> keras.Variable:
        """Creates an auxiliary variable; `shape` is that for one segment."""
        (first, num), (size, *rest) = self._segments[i], shape
        part = f"_part_{i}" if self.num_shards > 1 else ""
        variable = ColocatedZeros(
            self.shards[i], (num * size, *rest), dtype, f"{name}{part}"
        )
        if part:
            mark_shard(variable, part, [(first * size, num * size)])
        self._track_variable(variable)
        return variable

    @property
    def pieces(self) -> list[keras.Variable]:
        """All variables that make up the table."""
        return [v for growing in self._growing for v in growing.pieces]

    def num_ids(self) -> int:
        """Returns the number of ids that have a row."""
        return int(self.counters()["num_ids"])

    def counters(self) -> dict[str, float]:
        """Returns the statistics of the table that TensorBoard shows.

        Ids that have a row (`num_ids`), got one (`admitted_ids`) or lost it
        (`evicted_ids`); the share of rows in use in the `fullest_segment` (at
        1, ids start to find no room); and `dropped_gradients`, of ids that
        found no room (`refused`) or were `not_admitted` yet.
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
        """Equal for tables of one width that can be looked up together."""
        config = self.embeddings_initializer.get_config()
        config.pop("seed", None)  # Part of the salt.
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
            # Through it, an id without a row would silently learn nothing.
            rows = tf.raw_ops.PreventGradient(
                input=rows,
                message=f"Table {self.path} adds rows for new ids only in the "
                "training steps of tfdist. Train with tfdist.fit or an "
                "Estimator, not with the model's own `fit`, nor with its own "
                "`train_step` in one process.",
            )
        return tf.gather(rows, route.positions)

    def _by_kind(self) -> list[list[keras.Variable]]:
        """Returns the shards of the table, then of each auxiliary variable."""
        each = (growing.pieces for growing in self._growing)
        return [list(kind) for kind in zip(*each, strict=True)]

    def get_weights(self) -> list[np.ndarray]:
        """Returns the table, keys, seen, counters and any sketch, unsharded."""
        return [
            np.concatenate([v.numpy() for v in each])
            for each in self._by_kind()
        ]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets arrays from `get_weights`, also if its shards were different."""
        wanted = [each.shape for each in self.get_weights()]
        if (found := [*map(np.shape, weights)]) != wanted:
            raise ValueError(
                f"Layer {self.path!r} needs arrays of shape: {wanted}. Received"
                f" shapes: {found}. Use layers with the same capacity."
            )
        for each, whole in zip(self._by_kind(), weights, strict=True):
            for variable in each:
                variable.assign(own_rows(variable, whole))

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Reads all but `seen`, whose steps are those of another job."""
        arrays = [store[str(i)] for i in range(len(store))]
        arrays[2] = np.zeros_like(arrays[2])
        self.set_weights(arrays)

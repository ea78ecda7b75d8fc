"""Embedding tables split along rows over the parameter servers.

TF1's `tf.get_variable(..., partitioner=...)` with
`tf.nn.embedding_lookup(..., partition_strategy="div")`, as a Keras layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.embeddings import lookups
from tfdist.placement.partitioners import apply_partitioner, row_slices

# Attribute that a shard carries: a checkpoint saves shards as one variable.
_SHARD_OF = "_tfdist_shard_of"
_COMBINERS = ("sum", "mean", "sqrtn")


@keras.saving.register_keras_serializable(package="tfdist")
class PartitionedEmbedding(keras.layers.Layer):
    """Looks up rows of a table that is held in pieces.

    Each shard is an ordinary variable on one parameter server, with consecutive
    rows ("div"). A step gathers each row that it needs once, on the server that
    holds it; only these rows travel. Without a cluster it is an ordinary layer
    with the same numbers.

    >>> layer = PartitionedEmbedding(10, 4, num_shards=3)
    >>> layer(tf.constant([[1, 9], [1, 0]])).shape
    TensorShape([2, 2, 4])
    >>> [shard.shape[0] for shard in layer.shards]
    [4, 3, 3]

    A model may look it up, several times, in `call`, in losses and in metrics,
    by ids that depend on the batch and on `keras.random`. Ids that depend on
    variables or on rows, and lookups inside a `tf.cond`, a loop or a
    `tf.function`, are refused when training starts.

    Differs from `keras.layers.Embedding`: ids are dense, ragged or sparse; a
    `combiner` reduces the ids of an example to one row; an id out of range is
    an error on every device, never another row; no `mask_zero`.

    Args:
        input_dim: Rows of the table.
        output_dim: Length of a row.
        num_shards: Pieces. Default: 1, or what `partitioner` says. A server
            holds a second copy of a shard while that is initialized or
            restored, so let none be larger than some 64 MB.
        partitioner: One of `tfdist.placement.partitioners`'s; excludes
            `num_shards`.
        combiner: `"sum"`, `"mean"` or `"sqrtn"` (the sum over the root of the
            sum of squared weights) over the last axis of dense ids, over each
            row of ragged or sparse ones. Default: none; sparse ids need one.
            An example without ids gets zeros.
        embeddings_initializer: Keras initializer, applied to each shard on
            the server that holds it. A random one draws differently for each
            shard, so a table's initial values depend on `num_shards`.
        name: Name of the layer.
        **kwargs: As for every layer.

    Call arguments:
        ids: int32 or int64: a dense tensor `(batch, ...)`, a
            `tf.RaggedTensor` or `tf.SparseTensor` `(batch, None)`.
        weights: Of the form of `ids`, float; for a combiner. Default: ones.

    Returns:
        `ids.shape + (output_dim,)`, without the last axis of `ids` if there
        is a combiner.

    Raises:
        ValueError: a size is not positive, more shards than rows, an unknown
            combiner, a partitioner that splits another axis than 0; at the
            call: sparse ids or weights without a combiner.
        TypeError: at the call: ids of another dtype than int32 or int64.
        tf.errors.InvalidArgumentError: at run time: a negative id or one of
            at least `input_dim`.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        num_shards: int | None = None,
        partitioner: Callable[..., Any] | None = None,
        combiner: str | None = None,
        embeddings_initializer: Any = "uniform",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        if input_dim <= 0 or output_dim <= 0:
            raise ValueError(
                "Arguments `input_dim` and `output_dim` must be positive. "
                f"Received: input_dim={input_dim}, output_dim={output_dim}."
            )
        if combiner not in (None, *_COMBINERS):
            raise ValueError(
                f"Argument `combiner` must be one of {_COMBINERS} or None. "
                f"Received: combiner={combiner!r}."
            )
        if partitioner is not None:
            if num_shards is not None:
                raise ValueError(
                    "Only one of `num_shards` and `partitioner` can be given."
                )
            shape = tf.TensorShape([input_dim, output_dim])
            num_shards = apply_partitioner(partitioner, shape)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.num_shards = 1 if num_shards is None else num_shards
        self.slices = row_slices(input_dim, self.num_shards)
        self.combiner = combiner
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer
        )
        self.shards: list[keras.Variable] = []

    def build(self, *input_shapes: Any) -> None:
        """Creates the shards."""
        for i, (_, num_rows) in enumerate(self.slices):
            part = f"_part_{i}" if self.num_shards > 1 else ""
            shard = self.add_weight(
                shape=(num_rows, self.output_dim),
                initializer=_of_shard(self.embeddings_initializer, i),
                name=f"embeddings{part}",
            )
            if part:
                setattr(shard, _SHARD_OF, shard.path.removesuffix(part))
            self.shards.append(shard)

    def call(self, ids: Any, weights: Any = None) -> Any:
        """Looks up `ids`; see the class."""
        if self.combiner is None and weights is not None:
            raise ValueError("Argument `weights` needs a `combiner`.")
        if isinstance(ids, tf.SparseTensor):
            if self.combiner is None:
                raise ValueError("Sparse ids need a `combiner`.")
            segment, num = ids.indices[:, 0], ids.dense_shape[0]
            weights = weights.values if weights is not None else None
            ids = ids.values
        elif isinstance(ids, tf.RaggedTensor):
            if self.combiner is None:
                return ids.with_flat_values(self._rows(ids.flat_values))
            segment, num = ids.value_rowids(), ids.nrows()
            weights = weights.flat_values if weights is not None else None
            ids = ids.flat_values
        else:
            ids = tf.convert_to_tensor(ids)
            flat = ids if ids.shape.rank == 1 else tf.reshape(ids, [-1])
            rows = _reshaped(self._rows(flat), ids, self.output_dim)
            if self.combiner is None:
                return rows
            total = functools.partial(tf.reduce_sum, axis=-2)
            return self._combined(ids, rows, weights, total)
        total = functools.partial(
            tf.math.unsorted_segment_sum, segment_ids=segment, num_segments=num
        )
        return self._combined(ids, self._rows(ids), weights, total)

    def _combined(
        self,
        ids: tf.Tensor,
        rows: tf.Tensor,
        weights: tf.Tensor | None,
        total: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """The combined rows, given the sum over an example; no id: zeros."""
        if weights is None:
            weights = tf.ones_like(ids, rows.dtype)
        weights = tf.cast(weights, rows.dtype)[..., tf.newaxis]
        combined = total(rows * weights)
        if self.combiner == "mean":
            return tf.math.divide_no_nan(combined, total(weights))
        if self.combiner == "sqrtn":
            norm = tf.sqrt(total(weights * weights))
            return tf.math.divide_no_nan(combined, norm)
        return combined

    def compute_output_spec(
        self, ids: Any, weights: Any = None
    ) -> keras.KerasTensor:
        """Shape and dtype of the result for a symbolic input."""
        self._check_dtype(ids.dtype)
        shape = ids.shape if self.combiner is None else ids.shape[:-1]
        return keras.KerasTensor(
            (*shape, self.output_dim), dtype=self.compute_dtype
        )

    def _rows(self, flat: tf.Tensor) -> tf.Tensor:
        """Rows `(n, output_dim)` of ids `(n,)`."""
        self._check_dtype(flat.dtype.name)
        flat = tf.cast(flat, tf.int64)
        provider = lookups.current()
        if provider is not None:
            return provider.rows(self, flat)
        rows = tf.compat.v1.nn.embedding_lookup(
            [shard.value for shard in self.shards],
            self.checked(flat),
            partition_strategy="div",
        )
        return tf.cast(rows, self.compute_dtype)

    def _check_dtype(self, dtype: str) -> None:
        if dtype not in ("int32", "int64"):
            raise TypeError(
                f"Ids of table {self.path!r} must be int32 or int64. "
                f"Received: {dtype}."
            )

    def checked(self, flat: tf.Tensor) -> tf.Tensor:
        """`flat`, if every id is in the table."""
        inside = (flat >= 0) & (flat < self.input_dim)
        check = tf.debugging.Assert(
            tf.reduce_all(inside),
            [
                # No quotes: TensorFlow would escape them.
                f"Ids of table {self.path} must be in "
                f"[0, {self.input_dim}). Received:",
                tf.boolean_mask(flat, ~inside),
            ],
        )
        if check is None:
            return flat
        with tf.control_dependencies([check]):
            return tf.identity(flat)

    def get_config(self) -> dict[str, Any]:
        """Configuration from which `from_config` makes the same layer."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "num_shards": self.num_shards,
            "combiner": self.combiner,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
        }


def shard_of(variable: keras.Variable) -> str | None:
    """Path of the whole of which `variable` is a shard; None if it is none."""
    return getattr(variable, _SHARD_OF, None)


def logical_path(variable: keras.Variable) -> str:
    """Path of `variable`, or of the whole of which it is a shard."""
    return shard_of(variable) or variable.path


def copy_shard(variable: keras.Variable, slot: keras.Variable) -> None:
    """Marks a slot of a shard as a shard."""
    setattr(slot, _SHARD_OF, shard_of(variable))


def _of_shard(
    initializer: keras.initializers.Initializer, shard: int
) -> Callable[..., tf.Tensor]:
    """The initializer of one shard; TF1 gave every shard the same values."""
    # Keras draws a seed when an initializer is made; each shard needs its own.
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, int):
        config = initializer.get_config()
        initializer = initializer.from_config({**config, "seed": seed + shard})
    return initializer


def _reshaped(rows: tf.Tensor, ids: tf.Tensor, dim: int) -> tf.Tensor:
    """Rows in the shape of `ids`; at run time only what is not static."""
    if ids.shape.rank == 1:
        return rows
    if (ids.shape.rank or 0) >= 2 and all(ids.shape[1:]):
        return tf.reshape(rows, [-1, *ids.shape[1:], dim])
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], axis=0))
    rows.set_shape([*ids.shape, dim])
    return rows

"""A Keras layer whose embedding table is sharded over the parameter servers.

It replaces TF1's `tf.get_variable(..., partitioner=...)` with
`tf.nn.embedding_lookup(..., partition_strategy=...)`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras import constraints, initializers, regularizers

from tfdist._tf.arguments import check_one_of, check_positive
from tfdist.embeddings import lookups
from tfdist.embeddings.initial import shard_rows
from tfdist.embeddings.routing import Group
from tfdist.placement.partitioners import (
    apply_partitioner,
    row_runs,
    row_slices,
)

# Attribute of a shard, from which checkpoints save all shards as one variable:
# the suffix of its path, and the first row and size of each run of rows in it.
_SHARD = "_tfdist_shard"
_COMBINERS = (None, "sum", "mean", "sqrtn")
_STRATEGIES = ("balanced", "div")
# Each float type represents all integers up to this one exactly.
_EXACT = dict(bfloat16=2**8, float16=2**11, float32=2**24, float64=2**53)


@keras.saving.register_keras_serializable(package="tfdist")
class PartitionedEmbedding(keras.layers.Layer):
    """Looks up rows of an embedding table that is split into shards.

    Each shard is an ordinary variable on one parameter server. A step gathers
    each row it needs once, on its server, and transfers only these rows.
    Without a cluster, the layer computes the same values locally. Checkpoints,
    Keras files and exports store the table as one tensor.

    >>> layer = PartitionedEmbedding(10, 4, num_shards=3)
    >>> layer(tf.constant([[1, 9], [1, 0]])).shape
    TensorShape([2, 2, 4])
    >>> [shard.shape[0] for shard in layer.shards]
    [4, 3, 3]

    A model may look up the table several times, in `call`, losses and metrics.
    Ids may depend on the batch and on `keras.random`. When training starts, ids
    that depend on variables or on embedding rows raise an error, as do lookups
    inside a `tf.cond`, a loop or a `tf.function`.

    Differs from `keras.layers.Embedding`: ids are dense, ragged or sparse; a
    `combiner` reduces the ids of an example to one row; an id out of range is
    an error on every device; regularizer and constraint see the batch's rows.

    Args:
        input_dim: Number of rows of the table.
        output_dim: Length of a row.
        num_shards: Number of shards. Default: that of `partitioner`, else 1.
            A server holds a second copy of a shard while it initializes or
            restores the shard, so keep each shard below about 64 MB.
        partitioner: A `tfdist.placement` partitioner; excludes `num_shards`.
        combiner: `"sum"`, `"mean"` or `"sqrtn"` (the sum divided by the root of
            the sum of squared weights) over the last axis of ids. Default:
            None; sparse ids need one. An example without ids gets zeros.
        embeddings_initializer: Keras initializer, applied to each shard on
            the server that holds it. A random initializer draws differently
            for each shard, so initial values depend on `num_shards`. With
            `keras.initializers.Constant(matrix)`, such as pretrained rows, each
            shard takes its own rows. An initializer that scales the variance
            uses the shape of the whole table, as in TF1.
        name: Name of the layer.
        partition_strategy: Which rows a shard holds. The default, `"balanced"`,
            gives each shard an equal share of the frequent ids if ids are
            sorted by frequency, as in vocabularies. TF1's `"div"` gives it
            consecutive rows. Each can restore checkpoints of the other.
        embeddings_regularizer: Keras regularizer. Each call adds the loss of
            the rows it looks up (of the whole batch if replicas share it in
            training), each row once. Workers that share a step on ps average
            this loss, so a row that only some of them look up counts less.
        embeddings_constraint: Keras constraint that treats each row separately
            (`axis=1`). Each step applies it to the rows it has updated.
        mask_zero: Whether id 0 is padding, which a `combiner` leaves out and
            which is masked for later layers.
        **kwargs: Arguments of `keras.layers.Layer`.

    Call arguments:
        ids: Integers `(batch, ...)`: a tensor, a `tf.RaggedTensor` or a
            `tf.SparseTensor`. Floats, as from a `keras.Sequential` without
            input, are accepted if they represent every id of the table exactly:
            float32 up to 16,777,216 rows.
        weights: Floats for a combiner, of the form of `ids`. Default: ones.

    Returns:
        `ids.shape + (output_dim,)`; a combiner removes the last axis of `ids`.

    Raises:
        ValueError: if a size is not positive, there are more shards than rows,
            the combiner or strategy is unknown, the partitioner splits an axis
            other than 0, or the constraint combines rows; at the call, without
            a combiner: for sparse ids, weights, or ragged ids with `mask_zero`.
        TypeError: at the call, if ids have an unsupported dtype.
        tf.errors.InvalidArgumentError: at run time, if an id is negative, not
            less than `input_dim`, or not a whole number.
    """

    _arguments: ClassVar[Sequence[str]] = (
        "input_dim output_dim num_shards combiner partition_strategy mask_zero "
        "embeddings_initializer embeddings_regularizer embeddings_constraint"
    ).split()
    group_type = Group
    # Tables with equal keys are looked up together.
    group_key: Any = None
    _ids_are = "integers"

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        num_shards: int | None = None,
        partitioner: Callable[..., Any] | None = None,
        combiner: str | None = None,
        embeddings_initializer: Any = "uniform",
        name: str | None = None,
        partition_strategy: str = "balanced",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, **kwargs)
        check_positive("input_dim", input_dim)
        check_positive("output_dim", output_dim)
        check_one_of("combiner", combiner, _COMBINERS)
        check_one_of("partition_strategy", partition_strategy, _STRATEGIES)
        if partitioner is not None:
            if num_shards is not None:
                raise ValueError(
                    "Only one of `num_shards` and `partitioner` can be passed."
                )
            shape = tf.TensorShape([input_dim, output_dim])
            dtype = self.variable_dtype
            num_shards = apply_partitioner(partitioner, shape, dtype)
        self.input_dim, self.output_dim = input_dim, output_dim
        self.num_shards = 1 if num_shards is None else num_shards
        self.slices = row_slices(input_dim, self.num_shards)
        self.partition_strategy = partition_strategy
        self.runs = row_runs(input_dim, self.num_shards, partition_strategy)
        self.combiner = combiner
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        self.embeddings_regularizer = regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = constraints.get(embeddings_constraint)
        axis = getattr(self.embeddings_constraint, "axis", 1)
        if [*np.ravel(axis)] not in ([1], [-1]):
            raise ValueError(
                "Argument `embeddings_constraint` must apply to each row "
                "alone, since steps update some rows. Use axis=1. Received: "
                f"{embeddings_constraint!r} with axis={axis}."
            )
        self.mask_zero = self.supports_masking = mask_zero
        self.autocast = False  # Keras would cast float ids.
        self.shards: list[keras.Variable] = []

    def build(self, *input_shapes: Any) -> None:
        """Creates the shards, if an earlier call has not built them."""
        if self.built:
            return
        for i, (_, num_rows) in enumerate(self.slices):
            part = f"_part_{i}" if self.num_shards > 1 else ""
            shard = self.add_weight(
                shape=(num_rows, self.output_dim),
                initializer=self._initializer_of(i),
                constraint=self.embeddings_constraint,
                name=f"embeddings{part}",
            )
            if part:
                mark_shard(shard, part, self._runs_of(i))
            self.shards.append(shard)

    @property
    def pieces(self) -> list[keras.Variable]:
        """All variables that make up the table."""
        return self.shards

    def _runs_of(self, shard: int) -> list[tuple[int, int]]:
        """The first row and the size of each run of rows of a shard."""
        return [(r.row, r.size) for r in self.runs if r.shard == shard]

    def _initializer_of(self, shard: int) -> Callable[..., tf.Tensor]:
        """Returns a shard's initializer; in TF1, all drew the same values."""
        # Keras sets the seed at construction; each shard needs its own.
        initializer = self.embeddings_initializer
        seed = getattr(initializer, "seed", None)
        if isinstance(seed, int):
            config = {**initializer.get_config(), "seed": seed + shard}
            initializer = initializer.from_config(config)
        whole = self.input_dim, self.output_dim
        runs = self._runs_of(shard)
        return functools.partial(shard_rows, initializer, whole, runs)

    def get_weights(self) -> list[np.ndarray]:
        """Returns the table as a list of one array, in the order of ids."""
        shards = [shard.numpy() for shard in self.shards]
        pieces = [shards[i][at : at + size] for _, size, i, at in self.runs]
        return [np.concatenate(pieces)]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the table from a list of one `(input_dim, output_dim)` array."""
        if not self.shards:
            raise ValueError(f"Layer {self.name!r} has no weights. Build it.")
        wanted = [(self.input_dim, self.output_dim)]
        if (found := [*map(np.shape, weights)]) != wanted:
            raise ValueError(
                f"Layer {self.path!r} needs one array of shape {wanted[0]}. "
                f"Received arrays of shape: {found}."
            )
        for shard in self.shards:
            shard.assign(own_rows(shard, weights[0]))

    def save_own_variables(self, store: dict[str, Any]) -> None:
        """Writes the table to a Keras file, independently of its shards."""
        for i, array in enumerate(self.get_weights()):
            store[str(i)] = array

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Reads the table, or the "div" shards that earlier versions wrote."""
        if not len(store):
            why = "from another layer class: pass its array to `set_weights`"
            raise ValueError(f"The saved table of {self.path!r} is {why}.")
        shards = [store[str(i)] for i in range(len(store))]
        self.set_weights([np.concatenate(shards)])

    def call(self, ids: Any, weights: Any = None) -> Any:
        """Looks up `ids`; see the class docstring."""
        if weights is not None:
            weights = lookups.checked_weights(weights, ids, self.combiner)
        if not isinstance(ids, tf.RaggedTensor | tf.SparseTensor):
            ids = tf.convert_to_tensor(ids)
            flat = ids if ids.shape.rank == 1 else tf.reshape(ids, [-1])
            rows = _reshaped(self._rows(flat), ids, self.output_dim)
            if self.combiner is None:
                return rows
            total = functools.partial(tf.reduce_sum, axis=-2)
            return self._combined(ids, rows, weights, total)
        weights = getattr(weights, "values", None)
        if isinstance(ids, tf.RaggedTensor):
            if self.combiner is None and self.mask_zero:
                raise ValueError("Ragged ids have no padding to mask.")
            if self.combiner is None or ids.shape.rank != 2:
                return ids.with_values(self.call(ids.values, weights))
        elif self.combiner is None:
            raise ValueError("Sparse ids require a `combiner`.")
        example, num = lookups.examples_of(ids)
        total = functools.partial(
            tf.math.unsorted_segment_sum, segment_ids=example, num_segments=num
        )
        rows = self._rows(ids.values)
        rows = self._combined(ids.values, rows, weights, total)
        return rows if ids.shape.rank == 2 else lookups.by_example(rows, ids)

    def _combined(
        self,
        ids: tf.Tensor,
        rows: tf.Tensor,
        weights: tf.Tensor | None,
        total: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Combines rows by `total`, the sum over an example; zeros if empty."""
        if weights is None:
            weights = tf.ones_like(ids, rows.dtype)
        weights = tf.cast(weights, rows.dtype)[..., tf.newaxis]
        if self.mask_zero:
            weights *= tf.cast(ids != 0, rows.dtype)[..., tf.newaxis]
        combined = total(rows * weights)
        if self.combiner == "sum":
            return combined
        is_mean = self.combiner == "mean"
        norm = total(weights) if is_mean else tf.sqrt(total(weights * weights))
        return tf.math.divide_no_nan(combined, norm)

    def compute_mask(self, ids: Any, previous_mask: Any = None) -> Any:
        """Returns which ids are not padding; None if rows are combined."""
        if not self.mask_zero or self.combiner is not None:
            return None
        return keras.ops.not_equal(ids, 0)

    def compute_output_spec(
        self, ids: Any, weights: Any = None
    ) -> keras.KerasTensor:
        """Returns the shape and dtype of the result for a symbolic input."""
        self._check_dtype(ids.dtype)
        shape = ids.shape if self.combiner is None else ids.shape[:-1]
        return keras.KerasTensor(
            (*shape, self.output_dim), dtype=self.compute_dtype
        )

    def _rows(self, flat: tf.Tensor) -> tf.Tensor:
        """Returns the rows `(n, output_dim)` of ids `(n,)`."""
        self._check_dtype(flat.dtype.name)
        flat = self._as_ids(flat)
        provider = lookups.current()
        rows = provider.rows(self, flat) if provider else self._read(flat)
        if self.embeddings_regularizer is not None:
            unique, which = tf.unique(flat)
            if provider:
                once = provider.rows(self, unique, of_all=True)
            else:
                num = tf.size(unique)
                once = tf.math.unsorted_segment_mean(rows, which, num)
            once = tf.cast(once, self.variable_dtype)
            loss = self.embeddings_regularizer(once)
            self.add_loss(tf.cast(loss, keras.config.floatx()))  # As in Keras.
        return tf.cast(rows, self.compute_dtype)

    def _as_ids(self, flat: tf.Tensor) -> tf.Tensor:
        ids = tf.cast(flat, tf.int64)
        if flat.dtype.is_integer:
            return ids
        is_whole = tf.cast(ids, flat.dtype) == flat
        wanted = f"Ids of table {self.path} must be whole numbers. Received:"
        bad = tf.boolean_mask(flat, ~is_whole)
        return lookups.checked(ids, tf.reduce_all(is_whole), wanted, bad)

    def _read(self, flat: tf.Tensor) -> tf.Tensor:
        """Reads the rows of int64 ids from the shards."""
        return tf.compat.v1.nn.embedding_lookup(
            [shard.value for shard in self.shards],
            self._dealt(self.checked(flat)),
            partition_strategy="div",
        )

    def _dealt(self, flat: tf.Tensor) -> tf.Tensor:
        """Maps ids to row numbers in the concatenation of the shards."""
        if len(self.runs) == self.num_shards:
            return flat
        starts = np.array([run.row for run in self.runs], np.int64)
        ends = [self.slices[run.shard][0] + run.position for run in self.runs]
        which = tf.searchsorted(starts, flat, side="right") - 1
        return flat + tf.gather(np.array(ends, np.int64) - starts, which)

    def _check_dtype(self, dtype: str) -> None:
        if self._takes(dtype):
            return
        wanted = f"Ids of table {self.path!r} must be {self._ids_are}."
        message = f"{wanted} Received: {dtype}"
        if dtype in _EXACT:
            message += (
                ", which cannot represent all integers above "
                f"{_EXACT[dtype]}. It is the default dtype of `keras.Input` "
                "and of a `keras.Sequential` without an input layer. Start the "
                "model with `keras.Input(shape, dtype='int64')`"
            )
        raise TypeError(f"{message}.")

    def _takes(self, dtype: str) -> bool:
        exact = self.input_dim <= _EXACT.get(dtype, 0)
        return tf.as_dtype(dtype).is_integer or exact

    def checked(self, flat: tf.Tensor) -> tf.Tensor:
        """Returns `flat`, after a check that every id is in the table."""
        # Without ids, these are the greatest and the least int64.
        least, greatest = tf.reduce_min(flat), tf.reduce_max(flat)
        inside = (least >= 0) & (greatest < self.input_dim)
        wanted = f"Ids of table {self.path} must be in [0, {self.input_dim})."
        received = f"{wanted} Received: from", least, "to", greatest
        return lookups.checked(flat, inside, *received)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration for `from_config`."""
        config = super().get_config()
        for name in self._arguments:
            value = getattr(self, name)
            config[name] = keras.saving.serialize_keras_object(value)
        return config


def mark_shard(
    variable: keras.Variable, part: str, runs: Sequence[tuple[int, int]]
) -> None:
    """Marks a variable as a shard, for checkpoints to save the whole variable.

    The path of the shard is that of the whole variable followed by `part`.
    """
    setattr(variable, _SHARD, (part, runs))


def shard_of(variable: keras.Variable) -> str | None:
    """Returns the path of a shard's whole variable; None if it is no shard."""
    part, _ = getattr(variable, _SHARD, (None, None))
    return None if part is None else variable.path.removesuffix(part)


def runs_of(variable: keras.Variable) -> list[tuple[int, int]]:
    """Returns the first row and size of each run of rows in a shard."""
    return getattr(variable, _SHARD)[1]


def own_rows(variable: keras.Variable, table: Any) -> Any:
    """Returns the rows of `table` that `variable` holds; all if unsharded."""
    if not hasattr(variable, _SHARD):
        return table
    runs = runs_of(variable)
    return np.concatenate([table[row : row + size] for row, size in runs])


def logical_path(variable: keras.Variable) -> str:
    """Returns the path of `variable`, or of the whole variable of a shard."""
    return shard_of(variable) or variable.path


def copy_shard(variable: keras.Variable, slot: keras.Variable) -> None:
    """Marks a slot variable of a shard as a shard."""
    if shard := getattr(variable, _SHARD, None):
        mark_shard(slot, *shard)


def _reshaped(rows: tf.Tensor, ids: tf.Tensor, dim: int) -> tf.Tensor:
    """Reshapes rows to the shape of `ids`, statically where possible."""
    if ids.shape.rank == 1:
        return rows
    if ids.shape.rank and all(ids.shape[1:]):
        return tf.reshape(rows, [-1, *ids.shape[1:], dim])
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], axis=0))
    rows.set_shape([*ids.shape, dim])
    return rows

"""Embedding tables split along rows over the parameter servers.

TF1's `tf.get_variable(..., partitioner=...)` with
`tf.nn.embedding_lookup(..., partition_strategy=...)`, as a Keras layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from keras import constraints, initializers, regularizers

from tfdist._tf.arguments import check_positive
from tfdist.embeddings import lookups
from tfdist.embeddings.initial import shard_rows
from tfdist.embeddings.routing import Group
from tfdist.placement.partitioners import (
    apply_partitioner,
    row_runs,
    row_slices,
)

# Attribute that a shard carries: a checkpoint saves shards as one variable. The
# end of its path, and the first row and the size of each run of rows it holds.
_SHARD = "_tfdist_shard"
_COMBINERS = (None, "sum", "mean", "sqrtn")
_STRATEGIES = ("balanced", "div")
# Floats tell all integers apart up to this.
_EXACT = dict(bfloat16=2**8, float16=2**11, float32=2**24, float64=2**53)


@keras.saving.register_keras_serializable(package="tfdist")
class PartitionedEmbedding(keras.layers.Layer):
    """Looks up rows of a table that is held in pieces.

    Each shard is an ordinary variable on one parameter server. A step gathers
    each row that it needs once, on the server that holds it; only these rows
    travel. Without a cluster it is an ordinary layer with the same numbers.
    Checkpoints, Keras' files and exports hold the table as one tensor.

    >>> layer = PartitionedEmbedding(10, 4, num_shards=3)
    >>> layer(tf.constant([[1, 9], [1, 0]])).shape
    TensorShape([2, 2, 4])
    >>> [shard.shape[0] for shard in layer.shards]
    [4, 3, 3]

    A model may look it up several times, in `call`, losses and metrics, by ids
    that depend on the batch and on `keras.random`. When training starts, ids
    that depend on variables or rows are refused, and lookups inside a
    `tf.cond`, a loop or a `tf.function`.

    Differs from `keras.layers.Embedding`: ids are dense, ragged or sparse; a
    `combiner` reduces the ids of an example to one row; an id out of range is
    an error on every device; regularizer and constraint see the batch's rows.

    Args:
        input_dim: Rows of the table.
        output_dim: Length of a row.
        num_shards: Pieces. Default: 1, or what `partitioner` says. A server
            holds a second copy of a shard while that is initialized or
            restored, so let none be larger than some 64 MB.
        partitioner: One of `tfdist.placement`'s; excludes `num_shards`.
        combiner: `"sum"`, `"mean"` or `"sqrtn"` (the sum over the root of the
            sum of squared weights) over the last axis of ids. Default: none;
            sparse ids need one. An example without ids gets zeros.
        embeddings_initializer: Keras initializer, applied to each shard on
            the server that holds it. A random one draws differently for each
            shard, so initial values depend on `num_shards`. Of
            `keras.initializers.Constant(matrix)`, such as rows that another
            model has learnt, each shard takes its rows; one that scales the
            variance does so by the shape of the table, as in TF1.
        name: Name of the layer.
        partition_strategy: Which rows a shard has. Default: `"balanced"`, for
            ids in the order of their frequency, as in vocabularies: each shard
            has the same share of the frequent ones. `"div"`, TF1's:
            consecutive rows. Both read each other's checkpoints.
        embeddings_regularizer: Keras regularizer. Each call adds its loss for
            the rows that it looks up, each row once: of the whole batch where
            replicas share it in training. (Of workers that share a step on ps
            it is the mean, so less for rows that some do not look up.)
        embeddings_constraint: Keras constraint of each row by itself, `axis=1`,
            applied in a step to the rows that it has updated.
        mask_zero: Whether id 0 is padding, which a `combiner` leaves out, and
            later layers by their mask.
        **kwargs: As for every layer.

    Call arguments:
        ids: Integers `(batch, ...)`: a tensor, a `tf.RaggedTensor` or a
            `tf.SparseTensor`. Also floats, as from a `keras.Sequential` without
            input, which hold all ids of the table: 16,777,216 in float32.
        weights: Of the form of `ids`, float; for a combiner. Default: ones.

    Returns:
        `ids.shape + (output_dim,)`; a combiner removes the last axis of `ids`.

    Raises:
        ValueError: a size is not positive, more shards than rows, an unknown
            combiner or strategy, a partitioner that splits another axis than
            0, a constraint across rows; at the call, without a combiner:
            sparse ids, weights, or ragged ids with `mask_zero`.
        TypeError: at the call: ids of another dtype.
        tf.errors.InvalidArgumentError: at run time: a negative id, one of at
            least `input_dim`, or one that is no whole number.
    """

    _arguments: ClassVar[Sequence[str]] = (
        "input_dim output_dim num_shards combiner partition_strategy mask_zero "
        "embeddings_initializer embeddings_regularizer embeddings_constraint"
    ).split()
    group_type = Group
    # Tables are looked up together if theirs are equal.
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
        for argument, value, known in (
            ("combiner", combiner, _COMBINERS),
            ("partition_strategy", partition_strategy, _STRATEGIES),
        ):
            if value not in known:
                raise ValueError(
                    f"Argument `{argument}` must be one of {known}. "
                    f"Received: {argument}={value!r}."
                )
        if partitioner is not None:
            if num_shards is not None:
                raise ValueError(
                    "Only one of `num_shards` and `partitioner` can be given."
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
                "Argument `embeddings_constraint` must treat each row by "
                "itself, as steps update some rows: give it axis=1. Received: "
                f"{embeddings_constraint!r} with axis={axis}."
            )
        self.mask_zero = self.supports_masking = mask_zero
        self.autocast = False  # Of ids.
        self.shards: list[keras.Variable] = []

    def build(self, *input_shapes: Any) -> None:
        """Creates the shards, once: a model may build its layers itself."""
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
        """All variables that hold the table."""
        return self.shards

    def _runs_of(self, shard: int) -> list[tuple[int, int]]:
        """The first row and the size of each run of rows of a shard."""
        return [(r.row, r.size) for r in self.runs if r.shard == shard]

    def _initializer_of(self, shard: int) -> Callable[..., tf.Tensor]:
        """The initializer of one shard; TF1 gave all the same values."""
        # Keras draws a seed when one is made; each shard needs its own.
        initializer = self.embeddings_initializer
        seed = getattr(initializer, "seed", None)
        if isinstance(seed, int):
            config = {**initializer.get_config(), "seed": seed + shard}
            initializer = initializer.from_config(config)
        whole = self.input_dim, self.output_dim
        runs = self._runs_of(shard)
        return functools.partial(shard_rows, initializer, whole, runs)

    def get_weights(self) -> list[np.ndarray]:
        """The table, as one array in the order of ids."""
        shards = [shard.numpy() for shard in self.shards]
        pieces = [shards[i][at : at + size] for _, size, i, at in self.runs]
        return [np.concatenate(pieces)]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the rows to those of the one array `(input_dim, output_dim)`."""
        if not self.shards:
            raise ValueError(f"Layer {self.name!r} has no weights: build it.")
        wanted = [(self.input_dim, self.output_dim)]
        if (found := [*map(np.shape, weights)]) != wanted:
            raise ValueError(
                f"Layer {self.path!r} has one table of shape {wanted[0]}. "
                f"Received arrays of shape: {found}."
            )
        for shard in self.shards:
            shard.assign(own_rows(shard, weights[0]))

    def save_own_variables(self, store: dict[str, Any]) -> None:
        """Writes `get_weights`, whatever the shards, to a file of Keras'."""
        for i, array in enumerate(self.get_weights()):
            store[str(i)] = array

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        """Reads it, or the shards ("div") that earlier versions wrote."""
        if not len(store):
            why = "one of another class of layer: give it to `set_weights`"
            raise ValueError(f"The saved table of {self.path!r} is {why}.")
        shards = [store[str(i)] for i in range(len(store))]
        self.set_weights([np.concatenate(shards)])

    def call(self, ids: Any, weights: Any = None) -> Any:
        """Looks up `ids`; see the class."""
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
            raise ValueError("Sparse ids need a `combiner`.")
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
        """The combined rows, given the sum over an example; no id: zeros."""
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
        """Where ids are not padding, if rows are not combined."""
        if not self.mask_zero or self.combiner is not None:
            return None
        return keras.ops.not_equal(ids, 0)

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
            self.add_loss(tf.cast(loss, keras.config.floatx()))  # As others.
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
        """Rows of int64 ids, from where they are."""
        return tf.compat.v1.nn.embedding_lookup(
            [shard.value for shard in self.shards],
            self._dealt(self.checked(flat)),
            partition_strategy="div",
        )

    def _dealt(self, flat: tf.Tensor) -> tf.Tensor:
        """Where rows are if the shards are laid end to end."""
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
                f", which tells none apart beyond {_EXACT[dtype]}. That is "
                "what `keras.Input` is by default, and the input of a "
                "`keras.Sequential` that has none: give it "
                "`keras.Input(shape, dtype='int64')`"
            )
        raise TypeError(f"{message}.")

    def _takes(self, dtype: str) -> bool:
        exact = self.input_dim <= _EXACT.get(dtype, 0)
        return tf.as_dtype(dtype).is_integer or exact

    def checked(self, flat: tf.Tensor) -> tf.Tensor:
        """`flat`, if every id is in the table."""
        # Of no ids, the greatest and the least int64.
        least, greatest = tf.reduce_min(flat), tf.reduce_max(flat)
        inside = (least >= 0) & (greatest < self.input_dim)
        wanted = f"Ids of table {self.path} must be in [0, {self.input_dim})."
        received = f"{wanted} Received: from", least, "to", greatest
        return lookups.checked(flat, inside, *received)

    def get_config(self) -> dict[str, Any]:
        """Configuration from which `from_config` makes the same layer."""
        config = super().get_config()
        for name in self._arguments:
            value = getattr(self, name)
            config[name] = keras.saving.serialize_keras_object(value)
        return config


def mark_shard(
    variable: keras.Variable, part: str, runs: Sequence[tuple[int, int]]
) -> None:
    """Has a checkpoint save a variable as rows of a whole.

    Its name is that of the whole and `part`.
    """
    setattr(variable, _SHARD, (part, runs))


def shard_of(variable: keras.Variable) -> str | None:
    """Path of the whole of which `variable` is a shard; None if it is none."""
    part, _ = getattr(variable, _SHARD, (None, None))
    return None if part is None else variable.path.removesuffix(part)


def runs_of(variable: keras.Variable) -> list[tuple[int, int]]:
    """First row and size of each run of rows that a shard holds."""
    return getattr(variable, _SHARD)[1]


def own_rows(variable: keras.Variable, table: Any) -> Any:
    """The rows of a table that `variable` holds, which may be the table."""
    if not hasattr(variable, _SHARD):
        return table
    runs = runs_of(variable)
    return np.concatenate([table[row : row + size] for row, size in runs])


def logical_path(variable: keras.Variable) -> str:
    """Path of `variable`, or of the whole of which it is a shard."""
    return shard_of(variable) or variable.path


def copy_shard(variable: keras.Variable, slot: keras.Variable) -> None:
    """Marks a slot of a shard as a shard."""
    if shard := getattr(variable, _SHARD, None):
        mark_shard(slot, *shard)


def _reshaped(rows: tf.Tensor, ids: tf.Tensor, dim: int) -> tf.Tensor:
    """Rows in the shape of `ids`; at run time only what is not static."""
    if ids.shape.rank == 1:
        return rows
    if ids.shape.rank and all(ids.shape[1:]):
        return tf.reshape(rows, [-1, *ids.shape[1:], dim])
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], axis=0))
    rows.set_shape([*ids.shape, dim])
    return rows

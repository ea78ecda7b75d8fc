"""Replicas that run each step in sync and all-reduce its gradients.

As in `tf.distribute`'s synchronous strategies, each has a copy of every
variable, and applies the mean gradient of all shares of the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

_WIDE = {tf.float16: tf.float32, tf.bfloat16: tf.float32}
_context = tf.distribute.get_replica_context


class Replicas:
    """The collective operations of a step, called by each replica.

    `anchor` is any variable that was created in the strategy's scope.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, anchor: tf.Variable
    ) -> None:
        self.strategy, self.num = strategy, strategy.num_replicas_in_sync
        # Whether a step for which no replica has an example does not count.
        # This costs no message: gradients come with the number of examples.
        self.skips_empty = False
        self._anchor = anchor
        # TensorFlow traces each replica on a thread of its own.
        self._traced = threading.local()

    def index(self) -> tf.Tensor:
        """The index of this replica, a scalar int32 from 0."""
        return tf.convert_to_tensor(_context().replica_id_in_sync_group)

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over all replicas, in one message for each dtype."""
        sums: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            own = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            flat = [tf.reshape(tensors[i], [-1]) for i in own]
            total = _context().all_reduce(
                tf.distribute.ReduceOp.SUM, tf.concat(flat, axis=0)
            )
            pieces = tf.split(total, [tf.size(f) for f in flat], num=len(own))
            for i, piece in zip(own, pieces, strict=True):
                sums[i] = tf.reshape(piece, tf.shape(tensors[i]))
        return sums

    def mean(
        self,
        tensors: Sequence[tf.Tensor | None],
        size: tf.Tensor,
        counts: Collection[int] = (),
    ) -> tuple[list[tf.Tensor | None], tf.Tensor]:
        """Returns means over all examples, and the number of these.

        `tensors` are means over this replica's `size` examples, a scalar
        float32 that may be 0. Those at `counts` are summed; None stays None.
        """
        known = {i: t for i, t in enumerate(tensors) if t is not None}
        # Sums may overflow a dtype of two bytes.
        wide = [tf.cast(t, _WIDE.get(t.dtype, t.dtype)) for t in known.values()]
        any_here = tf.cast(size > 0, size.dtype)
        sizes = [any_here if i in counts else size for i in known]
        *sums, total = self.sum([*map(mean_to_sum, wide, sizes), size])
        self._traced.total = total
        means: list[tf.Tensor | None] = [None] * len(tensors)
        for (i, own), mean in zip(known.items(), sums, strict=True):
            mean = mean if i in counts else mean / tf.cast(total, mean.dtype)
            means[i] = as_dtype(mean, own.dtype)
        return means, total

    def gather(self, tensor: tf.Tensor) -> tf.Tensor:
        """Concatenates the tensors of all replicas along axis 0."""
        # TensorFlow crashes (SIGSEGV) if all are empty: the last adds a row.
        is_last = tf.cast(self.index() == self.num - 1, tf.int32)
        paddings = [[0, is_last], *[[0, 0]] * (tensor.shape.rank - 1)]
        return _context().all_gather(tf.pad(tensor, paddings), axis=0)[:-1]

    def keep_if_empty(
        self, after: Sequence[tf.Tensor], before: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns tensors `after` a step, or `before` it if it was skipped."""
        if not self.skips_empty:
            return list(after)
        counts = self._traced.total > 0
        pairs = zip(after, before, strict=True)
        return [tf.where(counts, new, old) for new, old in pairs]

    def update(self, function: Callable[[Any], object], args: Any) -> None:
        """Calls `function(args)` where each variable is this replica's copy.

        Elsewhere, a replica may not assign to a copy. Call this after `mean`.
        """

        def update_one(_: tf.Variable, total: tf.Tensor, args: Any) -> None:
            def apply() -> tf.Tensor:
                function(args)
                return total

            if self.skips_empty:
                tf.cond(total > 0, apply, lambda: total)
            else:
                apply()

        def update_all(strategy: tf.distribute.Strategy, *args: Any) -> None:
            strategy.extended.update(self._anchor, update_one, args=args)

        _context().merge_call(update_all, args=(self._traced.total, args))


def as_dtype(mean: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Casts a mean to `dtype`; rounds it for integers, such as step counts."""
    return tf.cast(tf.round(mean) if dtype.is_integer else mean, dtype)


def mean_to_sum(mean: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """The sum of `size` values with this mean; 0 for none, even of NaN."""
    total = mean * tf.cast(size, mean.dtype)
    return tf.where(size > 0, total, tf.zeros_like(total))


def share(batch: Any, index: int, num: int) -> Any:
    """One of `num` shares of a batch, whose sizes differ by at most one.

    >>> [share(tf.range(5), i, 2).numpy().tolist() for i in range(2)]
    [[0, 1], [2, 3, 4]]

    The batch may contain ragged and sparse tensors. If its size is static and
    divisible by `num`, the shares have a static size, too.
    """
    leaf = tf.nest.flatten(batch)[0]
    size = leaf.shape[0]
    if size is None:
        size = tf.shape(leaf, tf.int64)[0]
    start, end = size * index // num, size * (index + 1) // num
    return tf.nest.map_structure(lambda t: _rows(t, start, end), batch)


def without_examples(spec: Any) -> Any:
    """A batch without examples, for a `dataset.element_spec`.

    >>> spec = {"x": tf.TensorSpec([8, None, 3]), "y": tf.TensorSpec([None, 1])}
    >>> {k: v.shape.as_list() for k, v in without_examples(spec).items()}
    {'x': [0, 1, 3], 'y': [0, 1]}
    """
    return tf.nest.map_structure(_no_rows, spec)


def _no_rows(spec: tf.TypeSpec) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        splits = tf.zeros([1], spec.row_splits_dtype)
        inner = spec.shape[spec.ragged_rank + 1 :]
        return tf.RaggedTensor.from_nested_row_splits(
            tf.zeros([0, *inner], spec.dtype), [splits] * spec.ragged_rank
        )
    # Layers may reject an axis of length 0 other than the batch axis.
    inner = [1 if size is None else size for size in spec.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        indices = tf.zeros([0, 1 + len(inner)], tf.int64)
        return tf.SparseTensor(indices, tf.zeros([0], spec.dtype), [0, *inner])
    return tf.zeros([0, *inner], spec.dtype)


def _rows(tensor: Any, start: Any, end: Any) -> Any:
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start:end]
    shape = tensor.dense_shape
    start, end = tf.cast(start, tf.int64), tf.cast(end, tf.int64)
    first = tf.concat([[start], tf.zeros_like(shape[1:])], axis=0)
    size = tf.concat([[end - start], shape[1:]], axis=0)
    return tf.sparse.slice(tensor, first, size)

"""Synchronous steps on parameter servers: several workers, one update.

TF1's `SyncReplicasOptimizer` had an accumulator for each variable, which took
the first gradients to arrive. Here the servers keep each worker's gradients
separately, and the chief decides which to use: all servers use those of the
same workers, so a step has a global batch with exact size, metrics and mean
gradient.

    worker w                              server k
      gradients ------------------------>  kept for worker w
    chief, once enough have arrived
      number of examples of each ------->  mean gradient -> update
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.embeddings.growing import Found
from tfdist.training import exchange, optimizers
from tfdist.training.exchange import Request, StepGradients
from tfdist.training.fence import Fence
from tfdist.training.layout import Server
from tfdist.training.replicas import as_dtype
from tfdist.training.updates import Update


class Kept(NamedTuple):
    """One worker's results for the variables on one server."""

    whole: dict[int, tf.Variable]  # By index in `Layout.reads`.
    # By index of the group of tables: ids, number per shard, gradients.
    rows: dict[int, list[tf.Variable]]


class Mean(NamedTuple):
    """A step's mean results for the variables on one server, kept there."""

    server: Server
    whole: dict[int, tf.Tensor]  # By index in `Layout.reads`.
    rows: dict[int, tf.Tensor]  # By index of the group of tables.
    asked: dict[int, Request]  # Which rows these are.


class Accumulators:
    """Each worker's results of a step, on the servers; never saved.

    Each worker's results take as much memory as all variables other than
    tables, and the rows of a batch.

    Attributes:
        of_workers: For each worker, its results by server.

    Raises:
        ValueError: The optimizer needs values that no single server has.
    """

    def __init__(self, update: Update, num_workers: int) -> None:
        _check(update)
        self._layout, self._counters = update.layout, update.counters
        self._changed: set[int] = set()  # Known once a step was traced.
        self.of_workers = [
            {s.device: self._made(s) for s in self._layout.servers}
            for _ in range(num_workers)
        ]

    def _made(self, server: Server) -> Kept:
        layout = self._layout
        num = len(layout.dense) + len(layout.moving)
        whole = {i: self._dtype(i) for i in server.reads if i < num}
        dtypes = {
            g: [tf.int64, tf.int32, shards[0].dtype]
            for g, shards in server.trained.items()
        }
        with tf.device(server.device):
            return Kept(*tf.nest.map_structure(_variable, (whole, dtypes)))

    def _dtype(self, index: int) -> tf.DType:
        """The dtype kept for one of `Layout.reads`: shares are no integers."""
        dtype = tf.as_dtype(self._layout.reads[index].dtype)
        return dtype if dtype.is_floating else tf.float64

    def keep(
        self, found: StepGradients, own: dict[str, Kept], fence: Fence | None
    ) -> None:
        """Stores a worker's results in `own`, its entry in `of_workers`."""
        layout = self._layout
        for server, updates, sent in exchange.deliver(layout, found, [], fence):
            self._changed.update(updates)
            kept, asked = own[server.device], found.requests.at[server.device]
            values = iter(sent)
            with tf.device(server.device):
                for i, value in zip(updates, values, strict=False):
                    kept.whole[i].assign(tf.cast(value, self._dtype(i)))
                for g, rows in zip(server.trained, values, strict=True):
                    ids, counts = asked[g]
                    ids = ids.keys if isinstance(ids, Found) else ids
                    new = tf.concat(ids, 0), counts, rows
                    for variable, value in zip(kept.rows[g], new, strict=True):
                        variable.assign(value)

    def apply(self, sizes: tf.Tensor, step: tf.Tensor) -> None:
        """Applies the mean gradient over all examples of selected workers.

        Args:
            sizes: float32 `(num_workers,)`: examples of each; 0: not selected.
            step: Scalar int64: the number of the step.
        """
        layout, counters = self._layout, self._counters
        iteration, rates, _ = counters.of_step(step)
        for part in layout.parts:
            optimizers.begin_step(part, iteration)
        scalars = [*rates, *exchange.as_floats(iteration)]
        means = [self._mean(server, sizes) for server in layout.servers]
        for index, part in enumerate(layout.parts):
            self._clip(index, part, means)
        arrived = {}
        for mean in means:
            values = [*mean.whole.values(), *mean.rows.values()]
            if not values:
                continue
            args = scalars, values, list(mean.whole), mean.asked
            with tf.device(mean.server.device):
                arrived[mean.server.device] = tf.identity_n(values)[-1]
                exchange.apply(layout, mean.server, *args)
        counters.count(layout.device_of, arrived, [sizes])

    def _mean(self, server: Server, sizes: tf.Tensor) -> Mean:
        """What one worker with all batches would send to a server."""
        updates = [i for i in server.reads if i in self._changed]
        mean = Mean(server, {}, {}, {})
        with tf.device(server.device):
            shares = sizes / tf.reduce_sum(sizes)
            each = [
                self._share(own[server.device], server, updates, shares[worker])
                for worker, own in enumerate(self.of_workers)
            ]
            parts = iter(zip(*each, strict=True))
            for i in updates:
                dtype = tf.as_dtype(self._layout.reads[i].dtype)
                # As in `exchange.difference`.
                dtype = tf.int32 if dtype.is_bool else dtype
                mean.whole[i] = as_dtype(tf.add_n(next(parts)), dtype)
            for g, shards in server.trained.items():
                pieces = [_by_id(next(parts), next(parts)) for _ in shards]
                ids = [own for own, _ in pieces]
                counts = tf.stack([tf.size(i) for i in ids])
                mean.asked[g] = Request(ids, counts)
                mean.rows[g] = tf.concat([sums for _, sums in pieces], 0)
        return mean

    def _clip(self, index: int, part: Any, means: Sequence[Mean]) -> None:
        """Clips the gradients of a part of the optimizer."""
        owners = dict(enumerate(self._layout.owners))  # Not of moving averages.
        own: list[tuple[str, dict[int, tf.Tensor], int]] = []
        for server, whole, rows, _ in means:
            dense = [i for i in whole if owners.get(i) == index]
            own += [(server.device, whole, i) for i in dense]
            groups = [g for g in rows if self._layout.groups[g].part == index]
            own += [(server.device, rows, g) for g in groups]
        # By the norm of all together, or each on its own device.
        many = [own] if part.global_clipnorm else [[each] for each in own]
        for some in many:
            with tf.device(None if part.global_clipnorm else some[0][0]):
                clipped = optimizers.clip(part, [v[k] for _, v, k in some])
            for (_, values, key), value in zip(some, clipped, strict=True):
                values[key] = value

    def _share(
        self, kept: Kept, server: Server, updates: list[int], share: tf.Tensor
    ) -> Sequence[tf.Tensor]:
        """A worker's share of the means; nothing if it is not selected."""
        layout, trained = self._layout, server.trained

        def taken() -> list[tf.Tensor]:
            values = []
            for i in updates:
                value = kept.whole[i].read_value()
                if i not in layout.sums:
                    value *= tf.cast(share, value.dtype)
                values.append(tf.ensure_shape(value, layout.reads[i].shape))
            for g, shards in trained.items():
                ids, counts, rows = [v.read_value() for v in kept.rows[g]]
                counts = tf.ensure_shape(counts, [len(shards)])
                ids = tf.split(tf.ensure_shape(ids, [None]), counts)
                rows = tf.ensure_shape(rows, [None, layout.groups[g].dim])
                rows = tf.split(rows * tf.cast(share, rows.dtype), counts)
                values += itertools.chain(*zip(ids, rows, strict=True))
            return values

        def nothing() -> list[tf.Tensor]:
            shapes = [(layout.reads[i].shape, self._dtype(i)) for i in updates]
            for g, shards in trained.items():
                rows = [0, layout.groups[g].dim], shards[0].dtype
                shapes += [([0], tf.int64), rows] * len(shards)
            return [tf.zeros(shape, dtype) for shape, dtype in shapes]

        return tf.cond(share > 0, taken, nothing)


@dataclasses.dataclass(frozen=True)
class Contribution:
    """A worker's part of a synchronous step."""

    accumulators: Accumulators  # Where its results are kept.
    worker: tf.Tensor  # The worker's index, a scalar int64.
    own: dict[str, Kept]  # Its entry in `accumulators.of_workers`.

    def __call__(self, found: StepGradients, fence: Fence | None) -> None:
        """Stores the results on the servers."""
        self.accumulators.keep(found, self.own, fence)

    def index(self) -> tf.Tensor:
        """The worker's index; see `Replicas.index`."""
        return self.worker


def _by_id(
    ids: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    """The unique ids of several workers, with the sum of their gradients."""
    unique, index = tf.unique(tf.concat(ids, 0))
    every, num = tf.concat(gradients, 0), tf.size(unique)
    return unique, tf.math.unsorted_segment_sum(every, index, num)


def _variable(dtype: str | tf.DType) -> tf.Variable:
    """A variable for tensors of any shape."""
    nothing, any_shape = tf.zeros([0], dtype), tf.TensorShape(None)
    return tf.Variable(nothing, trainable=False, shape=any_shape)


def _check(update: Update) -> None:
    if isinstance(update.optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Synchronous steps on parameter servers (`backup_workers`) do not "
            "support LossScaleOptimizer. Use mixed_bfloat16, which needs no "
            "scale."
        )
    for part in update.layout.parts:
        by_norm = optimizers.limit(part, "clipnorm")
        if by_norm and update.layout.groups:
            raise ValueError(
                f"Optimizer {part.name!r} clips a table's gradient by its norm"
                ", which synchronous steps on parameter servers "
                "(`backup_workers`) do not support. Use clipvalue or "
                "global_clipnorm."
            )

"""What a step reads from and writes to each parameter server.

Below a megabyte the number of tensors that cross the wire costs, not their
bytes. So a step sends each server one message with the ids of all table rows
that it needs, gets one message with these rows and all dense variables, and
sends one message with all gradients. The server knows the ids already, so the
gradients of rows travel without them.

    worker                                server k
      ids of rows ----------------------->  gather
      dense variables, rows <-------------  read
      gradients ------------------------->  update variables and slots
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import lookups, optimizers


@dataclasses.dataclass(frozen=True)
class _Shard:
    """One stored piece of a table: rows `start` on, counted over a group."""

    variable: keras.Variable
    start: int


class _Group:
    """Tables of one width and optimizer, whose rows are numbered through.

    Treating them as one makes routing independent of their number.
    """

    def __init__(self, tables: Sequence[Any], part: int) -> None:
        self.tables = list(tables)
        self.part = part
        self.offsets: dict[int, int] = {}
        self.shards: list[_Shard] = []
        start = 0
        for table in tables:
            self.offsets[id(table)] = start
            for variable, (offset, _) in zip(
                table.shards, table.slices, strict=True
            ):
                self.shards.append(_Shard(variable, start + offset))
            start += table.input_dim

    def route(self, calls: Sequence[tuple[Any, tf.Tensor]]) -> _Route:
        """Finds each unique row once, and the shard that holds it."""
        numbered = tf.concat(
            [
                table.checked(ids) + self.offsets[id(table)]
                for table, ids in calls
            ],
            axis=0,
        )
        unique, inverse = tf.unique(numbered)
        starts = [shard.start for shard in self.shards]
        shard = tf.searchsorted(tf.constant(starts, tf.int64), unique, "right")
        order = tf.dynamic_partition(
            tf.range(tf.size(unique)), shard - 1, len(starts)
        )
        ids = [
            tf.gather(unique, where) - start
            for where, start in zip(order, starts, strict=True)
        ]
        position = tf.math.invert_permutation(tf.concat(order, axis=0))
        sizes = tf.stack([tf.size(ids) for _, ids in calls])
        positions = tf.split(
            tf.gather(position, inverse), sizes, num=len(calls)
        )
        return _Route(ids, positions)


@dataclasses.dataclass(frozen=True)
class _Route:
    """Where the rows of a step are.

    Attributes:
        ids: For each shard of the group, the int64 rows of it that are needed.
        positions: For each lookup, where its rows are in the concatenation of
            the shards' rows.
    """

    ids: list[tf.Tensor]
    positions: list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What a step has read.

    Attributes:
        values: One tensor for each of `Exchange.reads`.
        rows: For each group, the unique rows `(n, dim)`.
        positions: For each lookup, where its rows are in those of its group.
        ids: For each server, the ids of its shards' rows, where they are used.
    """

    values: list[tf.Tensor]
    rows: list[tf.Tensor]
    positions: list[tf.Tensor]
    ids: dict[str, list[tf.Tensor]]


class Exchange:
    """Moves parameters and gradients between a worker and the servers.

    Args:
        model: A built model with a built optimizer.
        tables: Its `PartitionedEmbedding` layers.
        packed: Whether to pack messages; worth it only across processes.
    """

    def __init__(
        self, model: keras.Model, tables: Sequence[Any], packed: bool
    ) -> None:
        self._optimizer = model.optimizer
        self._packed = packed
        by_width = collections.defaultdict(list)
        for table in tables:
            part = optimizers.owner(self._optimizer, table.shards[0])
            # The norm of one variable needs its rows alone.
            alone = optimizers.parts(self._optimizer)[part].clipnorm
            key = (
                table.output_dim,
                table.variable_dtype,
                part,
                id(table) if alone else None,
            )
            by_width[key].append(table)
        self._groups = [
            _Group(tables, part) for (_, _, part, _), tables in by_width.items()
        ]
        self.shards = [s.variable for g in self._groups for s in g.shards]
        held = {id(v) for v in self.shards}
        self.dense = [v for v in model.trainable_variables if id(v) not in held]
        self._trained = {id(v) for v in model.trainable_variables}

    def answers(
        self,
        rows: Sequence[tf.Tensor],
        tables: Sequence[Any],
        positions: Sequence[tf.Tensor],
    ) -> lookups.Answers:
        """Answers for the lookups in `tables` from `Pulled`'s rows."""
        group_of = {
            id(table): group
            for group, each in enumerate(self._groups)
            for table in each.tables
        }
        return lookups.Answers(
            [rows[group_of[id(table)]] for table in tables], positions
        )

    def clipped(self, gradients: Sequence[Any]) -> list[tf.Tensor | None]:
        """Clips the gradients of each part of the optimizer together.

        Args:
            gradients: Of `dense`, then of each group's rows; `IndexedSlices`
                are summed up, row by row.

        Returns:
            Tensors; None where the loss does not depend on a variable.

        Raises:
            ValueError: it depends on none.
        """
        if all(gradient is None for gradient in gradients):
            raise ValueError(
                "The loss depends on no trainable variable: every gradient is "
                f"None. Variables: {[v.path for v in self.dense]}."
            )
        owners = [optimizers.owner(self._optimizer, v) for v in self.dense]
        owners += [group.part for group in self._groups]
        clipped = list(gradients)
        for index, part in enumerate(optimizers.parts(self._optimizer)):
            own = [
                i
                for i, gradient in enumerate(gradients)
                if owners[i] == index and gradient is not None
            ]
            values = [tf.convert_to_tensor(gradients[i]) for i in own]
            values = optimizers.clip(part, values)
            for i, value in zip(own, values, strict=True):
                clipped[i] = value
        return clipped

    def pull(
        self,
        reads: Sequence[keras.Variable],
        calls: Sequence[tuple[Any, tf.Tensor]],
    ) -> Pulled:
        """Reads `reads` and the rows that `calls` look up.

        Args:
            reads: Variables read as a whole.
            calls: `(table, int64 ids)` of each lookup, in order.

        Returns:
            Tensors on the worker.
        """
        routes, positions = self._route(calls)
        needed = [ids for route in routes for ids in route.ids]
        values: dict[int, tf.Tensor] = {}
        rows: dict[int, tf.Tensor] = {}
        ids_at: dict[str, list[tf.Tensor]] = {}
        for device in self._devices([*reads, *self.shards]):
            whole = _at(device, reads)
            parts = _at(device, self.shards)
            ids = [needed[i] for i in parts]
            counts = [tf.size(each) for each in ids]
            there = ids
            if self._packed and ids:
                there = _send_ids(ids, counts, device)
            with tf.device(device):
                read = [tf.convert_to_tensor(reads[i].value) for i in whole]
                read += [
                    tf.gather(self.shards[i].value, each)
                    for i, each in zip(parts, there, strict=True)
                ]
            shapes = [list(reads[i].shape) for i in whole]
            shapes += [
                [count, self.shards[i].shape[1]]
                for i, count in zip(parts, counts, strict=True)
            ]
            if self._packed:
                read = _send(read, shapes, device, None)
            values.update(zip(whole, read[: len(whole)], strict=True))
            rows.update(zip(parts, read[len(whole) :], strict=True))
            ids_at[device] = there
        grouped, start = [], 0
        for group in self._groups:
            end = start + len(group.shards)
            grouped.append(tf.concat([rows[i] for i in range(start, end)], 0))
            start = end
        return Pulled(
            [values[i] for i in range(len(reads))], grouped, positions, ids_at
        )

    def push(
        self,
        pulled: Pulled,
        dense: Sequence[tf.Tensor],
        rows: Sequence[tf.Tensor],
        moves: Sequence[tuple[keras.Variable, tf.Tensor]],
        rates: Sequence[tf.Tensor],
        iteration: tf.Tensor,
    ) -> None:
        """Updates every variable where it lives.

        Args:
            pulled: What `pull` returned.
            dense: Clipped gradients of `self.dense`.
            rows: For each group, the clipped gradients of `pulled.rows`.
            moves: Variables to add a tensor to (moving averages).
            rates: Learning rate of each part of the optimizer.
            iteration: Scalar int64.
        """
        rows = [
            tf.zeros_like(values) if gradient is None else gradient
            for gradient, values in zip(rows, pulled.rows, strict=True)
        ]
        row_gradients = self._split_rows(pulled, rows)
        moving = [v for v, _ in moves]
        deltas = [delta for _, delta in moves]
        scalars = [*rates, tf.cast(iteration, tf.float32)]
        for device in self._devices([*self.dense, *self.shards, *moving]):
            whole = [i for i in _at(device, self.dense) if dense[i] is not None]
            parts, moved = _at(device, self.shards), _at(device, moving)
            sent = [
                *scalars,
                *(dense[i] for i in whole),
                *(deltas[i] for i in moved),
                *(row_gradients[i] for i in parts),
            ]
            if self._packed:
                with tf.device(device):
                    counts = [tf.size(each) for each in pulled.ids[device]]
                shapes = [[] for _ in scalars]
                shapes += [list(self.dense[i].shape) for i in whole]
                shapes += [list(moving[i].shape) for i in moved]
                shapes += [
                    [count, self.shards[i].shape[1]]
                    for i, count in zip(parts, counts, strict=True)
                ]
                sent = _send(sent, shapes, None, device)
            with tf.device(device):
                self._apply(
                    collections.deque(sent),
                    whole,
                    [moving[i] for i in moved],
                    parts,
                    pulled.ids[device] if parts else [],
                )

    def _apply(
        self,
        sent: collections.deque[tf.Tensor],
        whole: list[int],
        moving: list[keras.Variable],
        parts: list[int],
        ids: list[tf.Tensor],
    ) -> None:
        """The server's part of `push`, in the order in which it was sent."""
        rates = [sent.popleft() for _ in optimizers.parts(self._optimizer)]
        iteration = tf.cast(sent.popleft(), tf.int64)
        for i in whole:
            variable = self.dense[i]
            part = optimizers.owner(self._optimizer, variable)
            optimizers.update(
                optimizers.parts(self._optimizer)[part],
                variable,
                sent.popleft(),
                rates[part],
                iteration,
            )
        for variable in moving:
            variable.value.assign_add(sent.popleft())
        for i, rows in zip(parts, ids, strict=True):
            gradient, variable = sent.popleft(), self.shards[i]
            if id(variable) not in self._trained:
                continue
            part = optimizers.owner(self._optimizer, variable)
            optimizers.update_rows(
                optimizers.parts(self._optimizer)[part],
                variable,
                rows,
                gradient,
                rates[part],
                iteration,
            )

    def _route(
        self, calls: Sequence[tuple[Any, tf.Tensor]]
    ) -> tuple[list[_Route], list[tf.Tensor]]:
        """The route of each group, and the positions of each call."""
        routes: list[_Route] = []
        positions: dict[int, tf.Tensor] = {}
        for group in self._groups:
            own = [
                i
                for i, (table, _) in enumerate(calls)
                if id(table) in group.offsets
            ]
            route = group.route([calls[i] for i in own])
            routes.append(route)
            positions.update(zip(own, route.positions, strict=True))
        return routes, [positions[i] for i in range(len(calls))]

    def _split_rows(
        self, pulled: Pulled, rows: Sequence[tf.Tensor]
    ) -> dict[int, tf.Tensor]:
        """The gradient of each shard's rows, by index in `self.shards`."""
        counts = {}
        for device, ids in pulled.ids.items():
            counts.update(
                zip(_at(device, self.shards), map(tf.size, ids), strict=True)
            )
        split, start = {}, 0
        for group, gradient in zip(self._groups, rows, strict=True):
            own = range(start, start + len(group.shards))
            pieces = tf.split(
                gradient, tf.stack([counts[i] for i in own]), num=len(own)
            )
            split.update(zip(own, pieces, strict=True))
            start = own.stop
        return split

    @staticmethod
    def _devices(variables: Sequence[keras.Variable]) -> list[str]:
        return sorted({v.value.device for v in variables})


def _at(device: str, variables: Sequence[keras.Variable]) -> list[int]:
    """Indices of the variables that live on `device`."""
    return [i for i, v in enumerate(variables) if v.value.device == device]


def _send(
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[list[Any]],
    source: str | None,
    target: str | None,
) -> list[tf.Tensor]:
    """Moves tensors from one device to another, in one message per dtype.

    Args:
        tensors: On `source`; None is the device that runs the step.
        shapes: Shape of each; scalar int32 tensors on `target` where a
            dimension is not static.
        source: Device.
        target: Device.

    Returns:
        The tensors on `target`, in the same order.
    """
    received: list[tf.Tensor] = [None] * len(tensors)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        own = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        with tf.device(source):
            message = tf.concat(
                [tf.reshape(tensors[i], [-1]) for i in own], axis=0
            )
        with tf.device(target):
            sizes = [_size(shapes[i]) for i in own]
            if all(isinstance(size, int) for size in sizes):
                pieces = tf.split(message, sizes)
            else:
                pieces = tf.split(message, tf.stack(sizes), num=len(own))
            for i, piece in zip(own, pieces, strict=True):
                received[i] = tf.reshape(piece, shapes[i])
    return received


def _size(shape: list[Any]) -> Any:
    """Number of elements: an int where it is static, else a tensor."""
    dynamic = [d for d in shape if not isinstance(d, int)]
    static = int(np.prod([d for d in shape if isinstance(d, int)], dtype=int))
    return static * dynamic[0] if dynamic else static


def _send_ids(
    ids: Sequence[tf.Tensor], counts: Sequence[tf.Tensor], device: str
) -> list[tf.Tensor]:
    """Sends lists of ids to a server, their lengths in front."""
    with tf.device(None):
        message = tf.concat([tf.cast(tf.stack(counts), tf.int64), *ids], axis=0)
    with tf.device(device):
        lengths = message[: len(ids)]
        return tf.split(message[len(ids) :], lengths, num=len(ids))

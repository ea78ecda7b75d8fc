"""What a step reads from and writes to each parameter server.

Below a megabyte the number of tensors that cross the wire costs, not their
bytes. So a step sends each server one message with the ids of all table rows
that it needs, gets one message with these rows and all dense variables, and
sends one message with all gradients; larger variables go alone. The server
knows the ids already, so the gradients of rows travel without them.

    worker                                server k
      ids of rows ----------------------->  gather
      dense variables, rows <-------------  read
      gradients ------------------------->  update variables and slots
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.embeddings import lookups
from tfdist.embeddings.routing import Group, Route, stacked
from tfdist.training import optimizers
from tfdist.training.fence import Fence

# Bytes from which on copying a tensor costs more than another message.
_LARGE = 1 << 20
# Integers below are float32 numbers.
_EXACT = 1 << 24


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What a step has read.

    Attributes:
        values: One tensor for each variable that was asked for.
        rows: For each group of tables, the unique rows `(n, dim)`.
        positions: For each group, where the row of each id is in `rows`.
        routes: For each group.
        there: For each server, what it knows of the rows it was asked for.
    """

    values: list[tf.Tensor]
    rows: list[tf.Tensor]
    positions: list[tf.Tensor]
    routes: list[Route]
    there: dict[str, dict[int, _Asked]]


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a server knows of the rows it was asked for, in one group.

    Attributes:
        ids: For each of its shards, on the server.
        counts: int32, how many of each.
    """

    ids: list[tf.Tensor]
    counts: tf.Tensor


class Exchange:
    """Moves parameters and gradients between a worker and the servers.

    Args:
        model: A built model with a built optimizer.
        tables: Its `PartitionedEmbedding` layers that a step looks up.
        others: Those that it does not; it never reads them.
        remote: Whether the variables live in other processes, the tasks of
            which are told apart by device, and get one packed message each.
            Else all are where the step runs.
    """

    def __init__(
        self,
        model: keras.Model,
        tables: Sequence[Any],
        remote: bool,
        others: Sequence[Any] = (),
    ) -> None:
        self._optimizer = model.optimizer
        self._remote = remote
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
            Group(tables, part, self.device_of)
            for (_, _, part, _), tables in by_width.items()
        ]
        self.shards = [s for g in self._groups for s in g.shards]
        held = {id(s) for table in (*tables, *others) for s in table.shards}
        self.dense = [v for v in model.trainable_variables if id(v) not in held]
        self.fixed = [
            v for v in model.non_trainable_variables if id(v) not in held
        ]
        self._trained = {id(v) for v in model.trainable_variables}
        for group in self._groups:
            for shard in group.shards:
                if id(shard) in self._trained:
                    part = optimizers.parts(self._optimizer)[group.part]
                    optimizers.check_rows(part, shard)

    def device_of(self, variable: keras.Variable | tf.Variable) -> str:
        """The server that holds a variable; "" is where the step runs."""
        if isinstance(variable, keras.Variable):
            variable = variable.value
        return variable.device if self._remote else ""

    def check_read(self, read: Sequence[keras.Variable]) -> None:
        """Raises `ValueError` if rows are read in another way than looked up.

        Args:
            read: What the loss or the metrics of a model read as a whole.
        """
        shards = {id(v) for v in self.shards} & self._trained
        for variable in read:
            if id(variable) in shards:
                raise ValueError(
                    f"The model looks up rows of {variable.path!r}, and also "
                    "reads it as a whole, which would not count for its "
                    "gradient. Look up the rows that are wanted, or use "
                    "keras.layers.Embedding."
                )

    def answers(
        self,
        rows: Sequence[tf.Tensor],
        positions: Sequence[tf.Tensor],
        calls: Sequence[tuple[Any, Any]],
    ) -> lookups.Answers:
        """Answers for lookups, from what was pulled.

        Args:
            rows: `Pulled.rows`.
            positions: `Pulled.positions`.
            calls: `(table, number of ids)` of each lookup, in order.
        """
        answers: list[Any] = [None] * len(calls)
        for group, own_rows, own in zip(
            self._groups, rows, positions, strict=True
        ):
            which = [i for i, (t, _) in enumerate(calls) if group.holds(t)]
            lengths = stacked([calls[i][1] for i in which])
            # One gather for all, whose gradient is one sum over duplicates.
            pieces = tf.split(tf.gather(own_rows, own), lengths, num=len(which))
            for i, piece in zip(which, pieces, strict=True):
                answers[i] = piece
        return lookups.Answers([table for table, _ in calls], answers)

    def clipped(
        self, dense: Sequence[Any], rows: Sequence[Any]
    ) -> tuple[list[tf.Tensor | None], list[tf.Tensor | None]]:
        """Clips the gradients of each part of the optimizer together.

        Args:
            dense: Gradient of each of `dense`, None where there is none.
            rows: Of each group's rows.

        Returns:
            The same, clipped.
        """
        owners = [optimizers.owner(self._optimizer, v) for v in self.dense]
        owners += [group.part for group in self._groups]
        clipped = [*dense, *rows]
        for index, part in enumerate(optimizers.parts(self._optimizer)):
            own = [
                i
                for i, gradient in enumerate(clipped)
                if owners[i] == index and gradient is not None
            ]
            values = optimizers.clip(part, [clipped[i] for i in own])
            for i, value in zip(own, values, strict=True):
                clipped[i] = value
        return clipped[: len(self.dense)], clipped[len(self.dense) :]

    def summed(self, gradients: Sequence[Any]) -> list[tf.Tensor | None]:
        """Gradients as tensors: `IndexedSlices` are summed up, row by row.

        Args:
            gradients: Of `dense`, then of each group's rows.

        Raises:
            ValueError: the loss depends on no variable: all are None.
        """
        if all(gradient is None for gradient in gradients):
            raise ValueError(
                "The loss depends on no trainable variable: every gradient is "
                f"None. Variables: {[v.path for v in self.dense]}."
            )
        return [
            None if gradient is None else tf.convert_to_tensor(gradient)
            for gradient in gradients
        ]

    def over_replicas(
        self,
        pulled: Pulled,
        rows: Sequence[tf.Tensor | None],
        gather: Callable[[tf.Tensor], tf.Tensor],
    ) -> tuple[Pulled, list[tf.Tensor | None]]:
        """What `push` needs where every replica has looked up other rows.

        Args:
            pulled: What this replica has read.
            rows: For each group, the gradients of this replica's rows.
            gather: Concatenates a tensor of every replica along axis 0.

        Returns:
            As if one replica had looked up all rows: their gradients are
            sums over the replicas.
        """
        routes, sums = [], []
        for group, route, gradient, values in zip(
            self._groups, pulled.routes, rows, pulled.rows, strict=True
        ):
            merged = group.routed(gather(group.numbered(route)))
            routes.append(merged)
            if gradient is None:
                gradient = tf.zeros_like(values)
            sums.append(
                tf.math.unsorted_segment_sum(
                    gather(gradient),
                    merged.positions,
                    tf.reduce_sum(merged.sizes),
                )
            )
        there = {"": self._ask("", routes)} if routes else pulled.there
        merged = dataclasses.replace(
            pulled, rows=sums, routes=routes, there=there
        )
        return merged, sums

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
        routes = [
            group.route([call for call in calls if group.holds(call[0])])
            for group in self._groups
        ]
        values: dict[int, tf.Tensor] = {}
        rows: list[list[tf.Tensor]] = [[] for _ in self._groups]
        there: dict[str, dict[int, _Asked]] = {}
        for device in self._devices(reads):
            whole = self._at(device, reads)
            groups = self._groups_at(device)
            there[device] = asked = self._ask(device, routes)
            with tf.device(device):
                read = [tf.convert_to_tensor(reads[i].value) for i in whole]
                read += [
                    tf.concat(
                        [
                            tf.gather(shard.value, each)
                            for shard, each in zip(
                                self._shards_at(device, g),
                                asked[g].ids,
                                strict=True,
                            )
                        ],
                        axis=0,
                    )
                    for g in groups
                ]
            shapes = [list(reads[i].shape) for i in whole]
            shapes += [
                [_at_device(routes[g], device), self._groups[g].dim]
                for g in groups
            ]
            if self._remote:
                read = _send(read, shapes, device, None)
            values.update(zip(whole, read[: len(whole)], strict=True))
            for g, block in zip(groups, read[len(whole) :], strict=True):
                rows[g].append(block)
        return Pulled(
            [values[i] for i in range(len(reads))],
            [tf.concat(blocks, axis=0) for blocks in rows],
            [route.positions for route in routes],
            routes,
            there,
        )

    def push(
        self,
        pulled: Pulled,
        dense: Sequence[tf.Tensor | None],
        rows: Sequence[tf.Tensor | None],
        moves: Sequence[tuple[keras.Variable, tf.Tensor]],
        rates: Sequence[tf.Tensor],
        iteration: tf.Tensor,
        fence: Fence | None = None,
    ) -> dict[str, tf.Tensor]:
        """Updates every variable where it lives.

        Args:
            pulled: What `pull` returned.
            dense: Clipped gradients of `self.dense`, None for no update.
            rows: For each group, the clipped gradients of `pulled.rows`.
            moves: Variables to add a tensor to (moving averages).
            rates: Learning rate of each part of the optimizer.
            iteration: Scalar int64.
            fence: What the gradients must pass on each server.

        Returns:
            For each server, a tensor there that depends on the gradients.
        """
        blocks = self._blocks(pulled, rows)
        arrived: dict[str, tf.Tensor] = {}
        moving = [v for v, _ in moves]
        # As two numbers: a float is exact up to 2**24.
        parts = [iteration // _EXACT, iteration % _EXACT]
        scalars = [*rates, *(tf.cast(part, tf.float32) for part in parts)]
        if fence:
            scalars = [fence.generation, *scalars]
        for device in self._devices([*self.dense, *moving]):
            whole = self._at(device, self.dense)
            whole = [i for i in whole if dense[i] is not None]
            moved, groups = self._at(device, moving), self._groups_at(device)
            asked = pulled.there[device]
            sent = [
                *scalars,
                *(dense[i] for i in whole),
                *(moves[i][1] for i in moved),
                *(blocks[g][device] for g in groups),
            ]
            if self._remote:
                with tf.device(device):
                    counts = [tf.reduce_sum(asked[g].counts) for g in groups]
                shapes = [[] for _ in scalars]
                shapes += [list(self.dense[i].shape) for i in whole]
                shapes += [list(moving[i].shape) for i in moved]
                shapes += [
                    [count, self._groups[g].dim]
                    for g, count in zip(groups, counts, strict=True)
                ]
                sent = _send(sent, shapes, None, device, fence)
            with tf.device(device):
                # Not the tensor itself: a control edge from the output of a
                # function waits for its side effects alone.
                arrived[device] = tf.identity_n(sent)[-1]
                self._apply(
                    collections.deque(sent[1:] if fence else sent),
                    [self.dense[i] for i in whole],
                    [moving[i] for i in moved],
                    {g: self._shards_at(device, g) for g in groups},
                    asked,
                )
        return arrived

    def _apply(
        self,
        sent: collections.deque[tf.Tensor],
        dense: Sequence[keras.Variable],
        moving: Sequence[keras.Variable],
        shards: dict[int, list[keras.Variable]],
        asked: dict[int, _Asked],
    ) -> None:
        """A server's part of `push`, in the order in which it was sent."""
        parts = optimizers.parts(self._optimizer)
        rates = [sent.popleft() for _ in parts]
        high, low = (tf.cast(sent.popleft(), tf.int64) for _ in range(2))
        iteration = high * _EXACT + low
        for variable in dense:
            owner = optimizers.owner(self._optimizer, variable)
            optimizers.update(
                parts[owner],
                variable,
                sent.popleft(),
                rates[owner],
                iteration,
            )
        for variable in moving:
            variable.value.assign_add(sent.popleft())
        for g, own in shards.items():
            owner, block = self._groups[g].part, sent.popleft()
            gradients = tf.split(block, asked[g].counts, num=len(own))
            for shard, each, gradient in zip(
                own, asked[g].ids, gradients, strict=True
            ):
                if id(shard) in self._trained:
                    optimizers.update_rows(
                        parts[owner],
                        shard,
                        each,
                        gradient,
                        rates[owner],
                        iteration,
                    )

    def _ask(self, device: str, routes: Sequence[Route]) -> dict[int, _Asked]:
        """Sends a server the ids of the rows that it shall read."""
        groups = self._groups_at(device)
        nums = [self._groups[g].at[device] for g in groups]
        counts = [routes[g].counts[device] for g in groups]
        ids = [routes[g].ids[device] for g in groups]
        if not groups:
            return {}
        if self._remote:
            message = tf.concat(
                [tf.cast(count, tf.int64) for count in counts] + ids, axis=0
            )
            with tf.device(device):
                total = sum(nums)
                count = tf.cast(message[:total], tf.int32)
                each = tf.split(message[total:], count, num=total)
                counts = tf.split(count, nums)
        else:
            each = [
                piece
                for i, count, num in zip(ids, counts, nums, strict=True)
                for piece in tf.split(i, count, num=num)
            ]
        pieces = iter(each)
        return {
            g: _Asked(list(itertools.islice(pieces, num)), count)
            for g, num, count in zip(groups, nums, counts, strict=True)
        }

    def _blocks(
        self, pulled: Pulled, rows: Sequence[tf.Tensor | None]
    ) -> list[dict[str, tf.Tensor]]:
        """For each group, the gradients of the rows of each server."""
        blocks = []
        for group, route, gradient, values in zip(
            self._groups, pulled.routes, rows, pulled.rows, strict=True
        ):
            if gradient is None:
                gradient = tf.zeros_like(values)
            split = tf.split(gradient, route.sizes, num=len(group.at))
            blocks.append(dict(zip(group.at, split, strict=True)))
        return blocks

    def _devices(self, variables: Sequence[keras.Variable]) -> list[str]:
        """Servers that hold one of `variables` or a shard."""
        return sorted({self.device_of(v) for v in [*variables, *self.shards]})

    def _at(
        self, device: str, variables: Sequence[keras.Variable]
    ) -> list[int]:
        """Indices of the variables that live on `device`."""
        return [
            i for i, v in enumerate(variables) if self.device_of(v) == device
        ]

    def _groups_at(self, device: str) -> list[int]:
        """Groups that have a shard on a server."""
        return [g for g, group in enumerate(self._groups) if device in group.at]

    def _shards_at(self, device: str, group: int) -> list[keras.Variable]:
        """A group's shards on a server, by rank."""
        shards = self._groups[group].shards
        return [shards[i] for i in self._at(device, shards)]


def _at_device(route: Route, device: str) -> tf.Tensor:
    """How many rows of a route are on a server."""
    return route.sizes[list(route.ids).index(device)]


def _send(
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[list[Any]],
    source: str | None,
    target: str | None,
    fence: Fence | None = None,
) -> list[tf.Tensor]:
    """Moves tensors from one device to another, in one message per dtype.

    But a large one goes alone: to put it into a message and to take it out
    are two copies.

    Args:
        tensors: On `source`; None is the device that runs the step.
        shapes: Shape of each; scalar int32 tensors on `target` where a
            dimension is not static.
        source: Device.
        target: Device.
        fence: What the messages must pass on `target`; the first of `tensors`
            is then their generation.

    Returns:
        The tensors on `target`, in the same order.
    """
    received: list[tf.Tensor] = [None] * len(tensors)
    generation = None
    for own in _messages([t.dtype for t in tensors], shapes):
        with tf.device(source):
            message = tf.concat(
                [tf.reshape(tensors[i], [-1]) for i in own], axis=0
            )
        with tf.device(target):
            if fence:
                generation = message[0] if generation is None else generation
                message = fence.passed(target, generation, message)
            sizes = stacked([_size(shapes[i]) for i in own])
            pieces = tf.split(message, sizes, num=len(own))
            for i, piece in zip(own, pieces, strict=True):
                static = [d if isinstance(d, int) else -1 for d in shapes[i]]
                received[i] = tf.reshape(piece, static)
    return received


def _messages(
    dtypes: Sequence[tf.DType], shapes: Sequence[list[Any]]
) -> list[list[int]]:
    """Which tensors share a message; the first of all is in the first.

    >>> _messages([tf.float32, tf.int64, tf.float32], [[], [2], [1 << 18]])
    [[0], [1], [2]]
    """
    messages = collections.defaultdict(list)
    for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True)):
        static = all(isinstance(d, int) for d in shape)
        large = static and _size(shape) * dtype.size >= _LARGE
        messages[dtype, i if large else None].append(i)
    return list(messages.values())


def _size(shape: list[Any]) -> Any:
    """Number of elements: an int where it is static, else a tensor."""
    dynamic = [d for d in shape if not isinstance(d, int)]
    static = int(np.prod([d for d in shape if isinstance(d, int)], dtype=int))
    return static * dynamic[0] if dynamic else static

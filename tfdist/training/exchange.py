"""Moves parameters from servers to a step, and its gradients back to them.

A step sends each server one message with the ids of all table rows that it
needs, and gets one with these rows and all dense variables. The server keeps
the ids, so the gradients of rows are sent without them, in one message with all
other clipped gradients. Large tensors are sent separately. Within a dispatch,
ids of the next step are sent with the gradients: two messages per step, not 3.

    worker                                server k
      ids of rows ----------------------->  gather
      dense variables, rows <-------------  read
      gradients, next ids --------------->  update variables and slots, gather
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist._tf.private import accessed
from tfdist.embeddings import growing, lookups
from tfdist.embeddings.routing import Group, Route, stacked
from tfdist.training import optimizers
from tfdist.training.fence import Fence
from tfdist.training.layout import Layout, Server
from tfdist.training.messages import send
from tfdist.training.replicas import Replicas, mean_to_sum

# Integers below are float32 numbers.
_EXACT = 1 << 24


class Request(NamedTuple):
    """The rows requested from a server, in one group of tables."""

    ids: Any  # For each of its shards, on the server; see `rows_at`.
    counts: tf.Tensor  # The number of ids of each shard, int32.


class Lookups(NamedTuple):
    """The rows that a pass looks up."""

    routes: Sequence[Route]  # For each group of tables.
    lengths: Sequence[Any]  # How many ids each lookup has.


class Requests(NamedTuple):
    """Where the rows are that a step reads and updates."""

    routes: Sequence[Route]  # For each group of tables.
    at: dict[str, dict[int, Request]]  # For each server, by group.


class Parameters(NamedTuple):
    """The parameters that a step has read."""

    values: list[tf.Tensor]  # Those of `Layout.reads`.
    rows: list[tf.Tensor]  # For each group, its unique rows `(n, dim)`.
    positions: list[tf.Tensor]  # For each group, each id's index in `rows`.
    lengths: Sequence[Any]  # How many ids each lookup has.


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """The gradients and other results of a step, before they are applied."""

    requests: Requests  # Those by which the step read rows.
    dense: list[tf.Tensor | None]  # None: the loss does not depend on it.
    rows: list[tf.Tensor]  # For each group of tables.
    # The difference to add to each of `Layout.moving`, or its new value if the
    # layout `assigns` it. None: the pass did not change the variable.
    deltas: list[tf.Tensor | None]
    rates: list[tf.Tensor]  # Learning rate of each part of the optimizer.
    iteration: tf.Tensor  # Updates before this one, a scalar int64.
    scale: tf.Tensor | None = None  # Loss scale, if it is a variable.
    finite: tf.Tensor | None = None  # Whether the update happens. None: yes.


def looked_up(layout: Layout, calls: list[tuple[Any, tf.Tensor]]) -> Lookups:
    """Routes the lookups of a pass, each given as `(table, int64 ids)`."""
    routes = [
        group.route([call for call in calls if group.holds(call[0])])
        for group in layout.groups
    ]
    return Lookups(routes, [lookups.length(ids) for _, ids in calls])


def request(layout: Layout, routes: Sequence[Route]) -> Requests:
    """Sends each server the ids of the rows to read."""
    at: dict[str, dict[int, Request]] = {}
    for server in layout.servers:
        device = server.device
        if layout.remote and server.shards:
            at[device] = _unpacked(server, _packed_ids(server, routes))
        else:
            at[device] = {}
            for g, shards in server.shards.items():
                counts = routes[g].counts[device]
                ids = tf.split(routes[g].ids[device], counts, num=len(shards))
                at[device][g] = Request(ids, counts)
    return Requests(routes, at)


def pull(layout: Layout, found: Lookups, requests: Requests) -> Parameters:
    """Reads all parameters that a pass needs."""
    groups, routes = layout.groups, found.routes
    values: dict[int, tf.Tensor] = {}
    rows: list[list[tf.Tensor]] = [[] for _ in groups]
    for server in layout.servers:
        asked = requests.at[server.device]
        with tf.device(server.device):
            whole = [layout.reads[i].value for i in server.reads]
            read = [tf.convert_to_tensor(value) for value in whole]
            for g, shards in server.shards.items():
                held = server.growing.get(g, shards)
                own, ids = growing.rows_at(held, *asked[g])
                read.append(own)
                asked[g] = asked[g]._replace(ids=ids)
        if layout.remote:
            shapes = [list(layout.reads[i].shape) for i in server.reads]
            shapes += [
                [routes[g].size_at(server.device), groups[g].dim]
                for g in server.shards
            ]
            read = send(read, shapes, server.device, None)
        values.update(zip(server.reads, read, strict=False))
        blocks = read[len(server.reads) :]
        for g, block in zip(server.shards, blocks, strict=True):
            rows[g].append(block)
    return Parameters(
        [values[i] for i in range(len(layout.reads))],
        [tf.concat(blocks, axis=0) for blocks in rows],
        [route.positions for route in routes],
        found.lengths,
    )


def answers(
    layout: Layout,
    read: Parameters,
    tables: Sequence[Any],
    rows_of: Callable[[Group], tf.Tensor] | None = None,
) -> lookups.Answers:
    """Answers lookups of `tables` with the rows read, or with `rows_of`."""
    found: list[Any] = [None] * len(tables)
    for group, rows, own in zip(
        layout.groups, read.rows, read.positions, strict=True
    ):
        which = [i for i, table in enumerate(tables) if group.holds(table)]
        lengths = stacked([read.lengths[i] for i in which])
        # One gather for all, whose gradient is one sum over duplicates.
        every = own if rows_of else tf.gather(rows, own)

        def answer(piece: tf.Tensor, group: Group = group) -> tf.Tensor:
            if rows_of:
                return tf.gather(rows_of(group), piece)
            return accessed(piece)

        pieces = tf.split(every, lengths, num=len(which))
        for i, piece in zip(which, pieces, strict=True):
            found[i] = functools.partial(answer, piece)
    return lookups.Answers(tables, found)


def over_replicas(
    layout: Layout, found: StepGradients, replicas: Replicas, size: tf.Tensor
) -> StepGradients:
    """The gradients that a single replica would find in the global batch.

    `size`: the number of examples on this replica, a scalar float32.
    """
    num, whole = len(found.dense), [*found.dense, *found.deltas]
    means, total = replicas.mean(whole, size, layout.sums)
    # Each replica has looked up different rows. Frozen tables are left out.
    routes, rows = [], []
    for group, route, gradient in zip(
        layout.groups, found.requests.routes, found.rows, strict=True
    ):
        if group.part is not None:
            gradient = mean_to_sum(gradient, size / total)
            route = group.routed(replicas.gather(route.rows))
            gradient = tf.math.unsorted_segment_sum(
                replicas.gather(gradient),
                route.positions,
                tf.reduce_sum(route.sizes),
            )
        routes.append(route)
        rows.append(gradient)
    return dataclasses.replace(
        found,
        requests=request(layout, routes),
        dense=means[:num],
        rows=rows,
        deltas=means[num:],
    )


def push(
    layout: Layout,
    found: StepGradients,
    fence: Fence | None = None,
    following: Sequence[Route] = (),
) -> tuple[dict[str, tf.Tensor], Requests]:
    """Clips gradients; applies or accumulates them on the variables' devices.

    The ids that the next step looks up (`following`) are sent along. Returns,
    for each server, a tensor there that depends on the gradients, and requests.
    """
    found = _clipped(layout, found)
    # A step that has failed or found no batch must not change anything.
    known = [g for g in (*found.dense, *found.rows) if g is not None]
    with tf.control_dependencies(tf.identity_n([*known, found.iteration])):
        iteration = tf.identity(found.iteration)
    for part in layout.parts:
        optimizers.begin_step(part, iteration, found.finite, layout.remote)
    scalars = [*found.rates, *as_floats(found.iteration)]
    if found.finite is not None:
        scalars.append(tf.cast(found.finite, tf.float32))
    arrived: dict[str, tf.Tensor] = {}
    requests = Requests(following, {s.device: {} for s in layout.servers})
    for server, updates, sent in deliver(
        layout, found, scalars, fence, following
    ):
        if following and server.shards:
            requests.at[server.device] = _unpacked(server, sent.pop())
        with tf.device(server.device):
            # Not the tensor itself: a control edge from a function's output
            # waits for the function's side effects only.
            arrived[server.device] = tf.identity_n(sent)[-1]
            num, asked = len(scalars), found.requests.at[server.device]
            update = functools.partial(
                apply, *(layout, server, sent[:num], sent[num:], updates, asked)
            )
            shards = itertools.chain(*server.shards.values())
            growing.serialized_updates(shards, update, after=sent)
    return arrived, requests


def as_floats(number: tf.Tensor) -> list[tf.Tensor]:
    """Splits an int64 into two float32: one is exact only up to 2**24."""
    parts = number // _EXACT, number % _EXACT
    return [tf.cast(part, tf.float32) for part in parts]


def deliver(
    layout: Layout,
    found: StepGradients,
    scalars: Sequence[tf.Tensor],
    fence: Fence | None,
    following: Sequence[Route] = (),
) -> Iterator[tuple[Server, list[int], list[tf.Tensor]]]:
    """Sends the results of a step to the servers that need them.

    Yields:
        A server; the indices in `Layout.reads` of the variables that change on
        it; and, on its device, `scalars`, the changes of these variables, the
        gradients of rows for each group, and the packed ids of `following`.
    """
    whole = [*found.dense, *found.deltas]
    blocks = []
    for route, gradient in zip(found.requests.routes, found.rows, strict=True):
        split = tf.split(gradient, route.sizes, num=len(route.ids))
        blocks.append(dict(zip(route.ids, split, strict=True)))
    known = {i for i, value in enumerate(whole) if value is not None}
    scalars = [*([fence.generation] if fence else []), *scalars]
    packed = tf.stack(scalars) if layout.remote else None
    for server in layout.servers:
        device, asked = server.device, found.requests.at[server.device]
        updates = [i for i in server.reads if i in known]
        if not (updates or server.shards):
            continue
        sent = [whole[i] for i in updates]
        sent += [blocks[g][device] for g in server.trained]
        numbers: Sequence[tf.Tensor] = scalars
        if layout.remote:
            shapes: list[list[Any]] = [[len(scalars)]]
            shapes += [list(layout.reads[i].shape) for i in updates]
            with tf.device(device):
                shapes += [
                    [tf.reduce_sum(asked[g].counts), layout.groups[g].dim]
                    for g in server.trained
                ]
            if following and server.shards:
                # Ids are sent as the bits of floats, which copies preserve. If
                # one did not, the counts, tiny as floats, would become 0.
                ids = tf.bitcast(_packed_ids(server, following), tf.float32)
                sent.append(tf.reshape(ids, [-1]))
                shapes.append([-1])
            head, *sent = send([packed, *sent], shapes, None, device, fence)
            with tf.device(device):
                numbers = tf.unstack(head)
                if following and server.shards:
                    words = tf.reshape(sent[-1], [-1, 2])
                    sent[-1] = tf.bitcast(words, tf.int64)
        yield server, updates, [*numbers[bool(fence) :], *sent]


def apply(
    layout: Layout,
    server: Server,
    scalars: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    updates: list[int],
    asked: dict[int, Request],
) -> None:
    """Does one server's part of `push` with the tensors sent to it."""
    num, sent = len(layout.parts), iter(values)
    rates, (high, low, *finite) = scalars[:num], scalars[num:]
    iteration = tf.cast(high, tf.int64) * _EXACT + tf.cast(low, tf.int64)
    found: list[list[Any]] = [[] for _ in layout.parts]
    for i, value in zip(updates, sent, strict=False):
        if i < len(layout.dense):
            found[layout.owners[i]].append((layout.dense[i], value, None))
        elif layout.assigns:
            layout.reads[i].value.assign(value)
        else:
            add(layout.reads[i].value, value)
    for (g, shards), rows in zip(server.trained.items(), sent, strict=True):
        own, (ids, counts) = found[layout.groups[g].part], asked[g]
        if traced := server.growing.get(g):
            own.append((traced, rows, growing.requested_keys(ids, counts)))
        else:
            gradients = tf.split(rows, counts, num=len(shards))
            own += zip(shards, gradients, ids, strict=True)

    def update() -> None:
        for part, own, rate in zip(layout.parts, found, rates, strict=True):
            if own:
                shared, kept = layout.remote, server.updates
                optimizers.apply(part, own, rate, iteration, shared, kept)

    if finite:
        tf.cond(finite[0] > 0, update, lambda: None)
    else:
        update()


def difference(new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """The value to `add`; an int32 for booleans, such as "is initialized"."""
    if new.dtype.is_bool:
        return tf.cast(new, tf.int32) - tf.cast(old, tf.int32)
    return new - old


def add(variable: tf.Variable, value: tf.Tensor) -> None:
    """Adds a `difference`, or the mean of several, to a variable."""
    if variable.dtype.is_bool:
        variable.assign(tf.cast(variable, tf.int32) + value > 0)
    else:
        variable.assign_add(value)


def _clipped(layout: Layout, found: StepGradients) -> StepGradients:
    """Clips the gradients of each part of the optimizer together."""
    owners = [*layout.owners, *(group.part for group in layout.groups)]
    every = [*found.dense, *found.rows]
    known = [i for i, gradient in enumerate(every) if gradient is not None]
    for index, part in enumerate(layout.parts):
        own = [i for i in known if owners[i] == index]
        values = optimizers.clip(part, [every[i] for i in own])
        for i, value in zip(own, values, strict=True):
            every[i] = value
    num = len(found.dense)
    return dataclasses.replace(found, dense=every[:num], rows=every[num:])


def _packed_ids(server: Server, routes: Sequence[Route]) -> tf.Tensor:
    """The ids of a server's rows, preceded by the number of ids per shard."""
    counts = [routes[g].counts[server.device] for g in server.shards]
    ids = [routes[g].ids[server.device] for g in server.shards]
    return tf.concat([*(tf.cast(c, tf.int64) for c in counts), *ids], axis=0)


def _unpacked(server: Server, packed: tf.Tensor) -> dict[int, Request]:
    """Unpacks the requests to a server, on its device."""
    nums = [len(shards) for shards in server.shards.values()]
    with tf.device(server.device):
        count = tf.cast(packed[: sum(nums)], tf.int32)
        pieces = iter(tf.split(packed[sum(nums) :], count, num=sum(nums)))
        counts = tf.split(count, nums)
    return {
        g: Request(list(itertools.islice(pieces, num)), count)
        for g, num, count in zip(server.shards, nums, counts, strict=True)
    }

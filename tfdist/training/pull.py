"""Parameters out: from the servers to the worker that runs a step.

A step sends each server one message with the ids of all table rows that it
needs, and gets one message with these rows and all dense variables. The server
keeps the ids, so the gradients of rows travel without them (`push.py`).

    worker                                server k
      ids of rows ----------------------->  gather
      dense variables, rows <-------------  read
      gradients ------------------------->  update variables and slots
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.embeddings import lookups
from tfdist.embeddings.routing import Route, stacked
from tfdist.training.layout import Layout, Server
from tfdist.training.messages import send


@dataclasses.dataclass(frozen=True)
class Request:
    """The rows that a server was asked for, in one group of tables.

    Attributes:
        ids: For each of its shards, on the server.
        counts: int32, how many of each.
    """

    ids: list[tf.Tensor]
    counts: tf.Tensor


Requests = dict[str, dict[int, Request]]
"""For each server, by group."""


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What a step has read.

    Attributes:
        values: One tensor for each of `Layout.reads`.
        rows: For each group of tables, the unique rows `(n, dim)`.
        routes: For each group, where its rows are.
        requests: What each server was asked for.
        lengths: How many ids each lookup has.
    """

    values: list[tf.Tensor]
    rows: list[tf.Tensor]
    routes: list[Route]
    requests: Requests
    lengths: list[Any]

    @property
    def positions(self) -> list[tf.Tensor]:
        """For each group, where the row of each id is in `rows`."""
        return [route.positions for route in self.routes]


def pull(layout: Layout, calls: Sequence[tuple[Any, tf.Tensor]]) -> Parameters:
    """Reads all that a pass needs, to the worker.

    `calls` are `(table, int64 ids)` of each lookup, in order.
    """
    groups = layout.groups
    routes = [
        group.route([call for call in calls if group.holds(call[0])])
        for group in groups
    ]
    requests = request_rows(layout, routes)
    values: dict[int, tf.Tensor] = {}
    rows: list[list[tf.Tensor]] = [[] for _ in groups]
    for server in layout.servers:
        asked = requests[server.device]
        with tf.device(server.device):
            read = [
                tf.convert_to_tensor(layout.reads[i].value)
                for i in server.reads
            ]
            read += [
                tf.concat(
                    [
                        tf.gather(shard.value, ids)
                        for shard, ids in zip(shards, asked[g].ids, strict=True)
                    ],
                    axis=0,
                )
                for g, shards in server.shards.items()
            ]
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
        routes,
        requests,
        [lookups.length(ids) for _, ids in calls],
    )


def request_rows(layout: Layout, routes: Sequence[Route]) -> Requests:
    """Sends every server the ids of the rows that it shall read."""
    return {
        server.device: _request(layout, server, routes)
        for server in layout.servers
    }


def _request(
    layout: Layout, server: Server, routes: Sequence[Route]
) -> dict[int, Request]:
    device = server.device
    nums = [len(shards) for shards in server.shards.values()]
    counts = [routes[g].counts[device] for g in server.shards]
    ids = [routes[g].ids[device] for g in server.shards]
    if not nums:
        return {}
    if layout.remote:
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
        g: Request(list(itertools.islice(pieces, num)), count)
        for g, num, count in zip(server.shards, nums, counts, strict=True)
    }


def answers(
    layout: Layout,
    rows: Sequence[tf.Tensor],
    positions: Sequence[tf.Tensor],
    calls: Sequence[tuple[Any, Any]],
) -> lookups.Answers:
    """Answers lookups by the rows and positions of `Parameters`.

    `calls` are `(table, number of ids)` of each lookup, in order.
    """
    found: list[Any] = [None] * len(calls)
    for group, own_rows, own in zip(
        layout.groups, rows, positions, strict=True
    ):
        which = [i for i, (table, _) in enumerate(calls) if group.holds(table)]
        lengths = stacked([calls[i][1] for i in which])
        # One gather for all, whose gradient is one sum over duplicates.
        pieces = tf.split(tf.gather(own_rows, own), lengths, num=len(which))
        for i, piece in zip(which, pieces, strict=True):
            found[i] = piece
    return lookups.Answers([table for table, _ in calls], found)

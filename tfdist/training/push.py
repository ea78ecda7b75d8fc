"""Gradients back: each variable is updated on the server that holds it.

A step sends each server one message with the clipped gradients of all that it
holds; larger ones go alone. See `pull.py` for what went the other way.
"""

from __future__ import annotations

import collections
import dataclasses

import tensorflow as tf

from tfdist.training import optimizers
from tfdist.training.fence import Fence
from tfdist.training.layout import Layout, Server
from tfdist.training.messages import send
from tfdist.training.pull import Parameters, Request, request_rows
from tfdist.training.replicas import Replicas, mean_to_sum

# Integers below are float32 numbers.
_EXACT = 1 << 24

Gradients = list[tf.Tensor | None]
"""None where the loss does not depend on the variable."""


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """What a step found out, before it changes anything.

    Attributes:
        parameters: What it has read.
        dense: Gradients of `Layout.dense`.
        rows: Gradients of the rows of each group of tables.
        deltas: What to add to each of `Layout.moving`; None: nothing.
        rates: Learning rate of each part of the optimizer.
        iteration: Scalar int64: updates of the optimizer before this one.
    """

    parameters: Parameters
    dense: Gradients
    rows: Gradients
    deltas: Gradients
    rates: list[tf.Tensor]
    iteration: tf.Tensor


def push(
    layout: Layout, found: StepGradients, fence: Fence | None = None
) -> dict[str, tf.Tensor]:
    """Clips gradients and updates every variable where it lives.

    Returns:
        For each server, a tensor there that depends on the gradients.
    """
    for part in layout.parts:
        optimizers.begin_step(part, found.iteration)
    found = _clipped(layout, found)
    whole, blocks = [*found.dense, *found.deltas], _blocks(found)
    # As two numbers: a float is exact up to 2**24.
    counts = [found.iteration // _EXACT, found.iteration % _EXACT]
    scalars = [fence.generation] if fence else []
    scalars += [*found.rates, *(tf.cast(c, tf.float32) for c in counts)]
    arrived: dict[str, tf.Tensor] = {}
    for server in layout.servers:
        if not (server.updates or server.shards):
            continue
        device = server.device
        updates = [i for i in server.updates if whole[i] is not None]
        requests = found.parameters.requests[device]
        sent = [
            *scalars,
            *(whole[i] for i in updates),
            *(blocks[g][device] for g in server.shards),
        ]
        if layout.remote:
            shapes: list[list[int | tf.Tensor]] = [[] for _ in scalars]
            shapes += [list(layout.reads[i].shape) for i in updates]
            with tf.device(device):
                shapes += [
                    [tf.reduce_sum(requests[g].counts), layout.groups[g].dim]
                    for g in server.shards
                ]
            sent = send(sent, shapes, None, device, fence)
        with tf.device(device):
            # Not the tensor itself: a control edge from the output of a
            # function waits for its side effects alone.
            arrived[device] = tf.identity_n(sent)[-1]
            queue = collections.deque(sent[1:] if fence else sent)
            _apply(layout, server, queue, updates, requests)
    return arrived


def _apply(
    layout: Layout,
    server: Server,
    sent: collections.deque[tf.Tensor],
    updates: list[int],
    requests: dict[int, Request],
) -> None:
    """A server's part of `push`, in the order in which it was sent."""
    rates = [sent.popleft() for _ in layout.parts]
    high, low = (tf.cast(sent.popleft(), tf.int64) for _ in range(2))
    iteration = high * _EXACT + low
    for i in updates:
        if i >= len(layout.dense):
            layout.reads[i].value.assign_add(sent.popleft())
            continue
        owner = layout.owners[i]
        optimizers.update(
            layout.parts[owner],
            layout.dense[i],
            sent.popleft(),
            rates[owner],
            iteration,
        )
    for g, shards in server.shards.items():
        owner = layout.groups[g].part
        gradients = tf.split(
            sent.popleft(), requests[g].counts, num=len(shards)
        )
        for shard, ids, gradient in zip(
            shards, requests[g].ids, gradients, strict=True
        ):
            if layout.is_trained(shard):
                optimizers.update(
                    layout.parts[owner],
                    shard,
                    gradient,
                    rates[owner],
                    iteration,
                    ids,
                )


def over_replicas(
    layout: Layout, found: StepGradients, replicas: Replicas, size: tf.Tensor
) -> StepGradients:
    """What one replica would have found in the global batch.

    `size` is how many of its examples this one has, a scalar float32.
    """
    known = [g for g in found.dense if g is not None]
    means, total = replicas.mean([*known, *found.deltas], size)
    mean = iter(means)
    dense = [g if g is None else next(mean) for g in found.dense]
    # Every replica has looked up other rows.
    routes, rows = [], []
    read = found.parameters
    for group, route, gradient, values in zip(
        layout.groups, read.routes, found.rows, read.rows, strict=True
    ):
        if gradient is not None:
            gradient = mean_to_sum(gradient, size) / total
        route = group.routed(replicas.gather(group.numbered(route)))
        routes.append(route)
        rows.append(
            tf.math.unsorted_segment_sum(
                replicas.gather(_or_zeros(gradient, values)),
                route.positions,
                tf.reduce_sum(route.sizes),
            )
        )
    requests = request_rows(layout, routes)
    merged = dataclasses.replace(
        read, rows=rows, routes=routes, requests=requests
    )
    return dataclasses.replace(
        found,
        parameters=merged,
        dense=dense,
        rows=rows,
        deltas=list(mean),
    )


def _clipped(layout: Layout, found: StepGradients) -> StepGradients:
    """Clips the gradients of each part of the optimizer together."""
    owners = [*layout.owners, *(group.part for group in layout.groups)]
    clipped = [*found.dense, *found.rows]
    for index, part in enumerate(layout.parts):
        own = [
            i
            for i, gradient in enumerate(clipped)
            if owners[i] == index and gradient is not None
        ]
        values = optimizers.clip(part, [clipped[i] for i in own])
        for i, value in zip(own, values, strict=True):
            clipped[i] = value
    num = len(found.dense)
    return dataclasses.replace(found, dense=clipped[:num], rows=clipped[num:])


def _blocks(found: StepGradients) -> list[dict[str, tf.Tensor]]:
    """For each group, the gradients of the rows of each server."""
    blocks = []
    read = found.parameters
    for route, gradient, values in zip(
        read.routes, found.rows, read.rows, strict=True
    ):
        split = tf.split(
            _or_zeros(gradient, values), route.sizes, num=len(route.ids)
        )
        blocks.append(dict(zip(route.ids, split, strict=True)))
    return blocks


def _or_zeros(gradient: tf.Tensor | None, values: tf.Tensor) -> tf.Tensor:
    return tf.zeros_like(values) if gradient is None else gradient

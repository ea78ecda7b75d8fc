"""Sends tensors between devices in as few messages as is worthwhile.

Below a megabyte, cost depends on the number of tensors, not of bytes: they are
packed, one message per dtype. Larger ones go separately: packing copies twice.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.embeddings.routing import stacked
from tfdist.training.fence import Fence

# Size in bytes from which copying a tensor costs more than another message.
_LARGE = 1 << 20


def send(
    tensors: Sequence[tf.Tensor],
    shapes: Sequence[list[Any]],
    source: str | None,
    target: str | None,
    fence: Fence | None = None,
) -> list[tf.Tensor]:
    """Moves tensors from one device to another.

    None is the device that runs the step. `shapes` have scalar int32 tensors on
    `target` where a dimension is not static. With a `fence`, the first tensor
    begins with the generation.
    """
    received: list[tf.Tensor] = [None] * len(tensors)
    generation = None
    for own in _messages([t.dtype for t in tensors], shapes):
        with tf.device(source):
            flat = [tf.reshape(tensors[i], [-1]) for i in own]
            message = tf.concat(flat, axis=0)
        with tf.device(target):
            if fence:
                assert target is not None  # A server.
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
    """Groups tensors into messages; the first tensor is in the first message.

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
    """The number of elements: an int if it is static, else a tensor."""
    dynamic = [d for d in shape if not isinstance(d, int)]
    static = math.prod(d for d in shape if isinstance(d, int))
    return static * dynamic[0] if dynamic else static

"""Fills an empty growing table with many ids and their rows at once."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.embeddings import index
from tfdist.embeddings.growing import growing_of
from tfdist.embeddings.layer import own_rows
from tfdist.embeddings.places import Places

_KEYS = 1 << 16  # Keys per insert, which takes 512 bytes of memory for each.


def place(
    keys: np.ndarray, num_segments: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Inserts unique keys, int64 `(n,)`, into an empty table.

    Returns the keys in all slots, int64 `(buckets, 16)`, and the slot of each
    key. Raises ValueError, which names the table, if keys find no room.
    """
    shape = [num_segments * index.SEGMENT // index.BUCKET, index.BUCKET]
    with tf.device("CPU"):
        held = keras.Variable(tf.zeros(shape, tf.int64), dtype="int64")
        into = index.Index([held], [0], [num_segments])
        add = tf.function(
            lambda some: index.insert(into, some, Places(), lambda *_: []),
            [tf.TensorSpec([None], tf.int64)],
            autograph=False,
        )
        parts = [
            add(keys[i : i + _KEYS]).numpy() for i in range(0, len(keys), _KEYS)
        ]
    slots = np.concatenate([np.zeros([0], np.int64), *parts])
    if lost := np.count_nonzero(slots < 0):
        raise ValueError(
            f"{lost} of {len(keys)} ids of table {name!r} do not fit in a "
            f"capacity of {num_segments * index.SEGMENT}. Use a capacity of at "
            f"least {-(-len(keys) * 4 // 3)}."
        )
    return held.numpy(), slots


def fill(table: Any, ids: Any, rows: np.ndarray) -> None:
    """Sets the contents of a table to the ids `(n,)` and rows `(n, dim)`.

    Raises:
        TypeError: if ids are neither integers nor strings.
        ValueError: if rows have another shape, or ids repeat or find no room.
    """
    ids = tf.constant(np.asarray(ids))
    table._check_dtype(ids.dtype.name)
    keys = index.mixed(table._as_ids(ids)).numpy()
    different = len(np.unique(keys[keys != index.EMPTY]))
    if rows.shape != (different, table.output_dim) or different < len(keys):
        raise ValueError(
            f"Table {table.path!r} needs rows of length {table.output_dim}, "
            f"each with a unique id other than {index.NO_ID}. Received: "
            f"{len(keys)} ids ({different} different, valid ones) for rows of "
            f"shape {rows.shape}."
        )
    held, slots = place(keys, table.num_segments, table.path)
    for growing in filter(None, map(growing_of, table.shards)):
        at = slots - growing.first_segment * index.SEGMENT
        own = np.flatnonzero((at >= 0) & (at < growing.shard.shape[0]))
        shard = np.zeros(growing.shard.shape, rows.dtype)
        shard[at[own]] = rows[own]
        growing.shard.assign(shard)
        growing.keys.assign(own_rows(growing.keys, held))

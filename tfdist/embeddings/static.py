"""Growing tables in a SavedModel, which keeps only the rows in use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.embeddings import lookups
from tfdist.embeddings.growing import growing_of
from tfdist.embeddings.index import EMPTY, NO_ID, mixed


class StaticTables:
    """Answers lookups of growing tables from copies of their rows in use.

    For `lookups.answered_by`. Must stay alive until the SavedModel is written.
    `replaced` has the `id()` of each model variable that the copies replace.
    """

    def __init__(self, variables: Iterable[keras.Variable]) -> None:
        shards = filter(None, map(growing_of, variables))
        tables = {id(growing.table): growing.table for growing in shards}
        self._copies = {key: _copied(table) for key, table in tables.items()}
        every = (table.pieces for table in tables.values())
        self.replaced = {id(piece) for pieces in every for piece in pieces}

    def rows(
        self, table: Any, ids: tf.Tensor, of_all: bool = False
    ) -> tf.Tensor:
        """Returns the rows `(n, dim)` of ids `(n,)`, as the table would."""
        if id(table) not in self._copies:
            return table._read(ids)
        held, rows = self._copies[id(table)]
        keys = mixed(ids)
        message = f"Ids of table {table.path} must not be {NO_ID}."
        any_id = tf.reduce_all(tf.not_equal(keys, EMPTY))
        keys = lookups.checked(keys, any_id, message)
        at = tf.searchsorted(held, keys, out_type=tf.int64)
        at = tf.minimum(at, held.shape[0] - 1)
        missing = tf.where(tf.not_equal(tf.gather(held, at), keys))
        first = table.first_rows(tf.gather_nd(keys, missing))
        return tf.tensor_scatter_nd_update(
            tf.gather(rows, at), missing, tf.cast(first, rows.dtype)
        )


def _copied(table: Any) -> tuple[tf.Variable, tf.Variable]:
    """Returns the keys in use and `EMPTY`, sorted, and their rows."""
    growing = filter(None, map(growing_of, table.shards))
    held = [each.keys.numpy().ravel() for each in growing]
    slots = [np.flatnonzero(each) for each in held]
    in_use = (e[own] for e, own in zip(held, slots, strict=True))
    keys = np.concatenate([[EMPTY], *in_use])  # At least one key.
    order = np.argsort(keys)
    place = np.argsort(order)[1:]
    dtype = tf.as_dtype(table.variable_dtype).as_numpy_dtype
    rows = np.zeros([len(keys), table.output_dim], dtype)
    # One shard at a time, since a whole table may be as large as the memory.
    for shard, own in zip(table.shards, slots, strict=True):
        where, place = np.split(place, [len(own)])
        rows[where] = tf.gather(shard.value, own).numpy()
    return tuple(
        tf.Variable(value, trainable=False, name=f"{table.name}_{kind}")
        for kind, value in (("keys", keys[order]), ("rows", rows))
    )

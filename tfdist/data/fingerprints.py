"""Numbers that identify examples."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf


def fingerprints(batch: Any, key: str | None = None) -> np.ndarray:
    """int64 `(batch,)`: equal numbers for equal examples.

    Args:
        batch: a structure of tensors (also sparse or ragged) whose first
            dimension is the batch.
        key: the feature that identifies an example. Default: all together.

    Raises:
        ValueError: there is no such feature, or a scalar.
    """
    if key is not None:
        features = batch[0] if isinstance(batch, tuple) else batch
        if not isinstance(features, dict) or key not in features:
            names = sorted(features) if isinstance(features, dict) else "none"
            raise ValueError(
                f"Argument `key` must name a feature: {names}. "
                f"Received: key={key!r}."
            )
        batch = features[key]
    columns = [_rows(tensor) for tensor in tf.nest.flatten(batch)]
    digests = b"".join(
        hashlib.blake2b(b"".join(parts), digest_size=8).digest()
        for parts in zip(*columns, strict=True)
    )
    return np.frombuffer(digests, np.int64)


def _rows(tensor: Any) -> list[bytes]:
    """The bytes of each example in a tensor."""
    if not tensor.shape.rank:
        raise ValueError(
            "The dataset must give batches: tensors whose first dimension is "
            f"the batch. Received: {tensor!r}. Use `dataset.batch(...)`."
        )
    if isinstance(tensor, tf.SparseTensor):
        rows = tf.data.Dataset.from_tensor_slices(tensor)
        return [
            repr((row.indices.numpy().tolist(), row.values.numpy())).encode()
            for row in rows
        ]
    if isinstance(tensor, tf.RaggedTensor):
        return [repr(row).encode() for row in tensor.to_list()]
    values = tensor.numpy().reshape(len(tensor), -1)
    if tensor.dtype == tf.string:
        return [repr(row).encode() for row in values.tolist()]
    return [row.tobytes() for row in np.ascontiguousarray(values)]

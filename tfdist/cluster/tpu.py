"""What a TPU asks of a program: XLA compiles the whole step, for fixed shapes.

No TPU was at hand when this was written: nothing here has run on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def check(element_spec: Any, tables: Sequence[Any]) -> None:
    """Raises if XLA could not compile the step of a model.

    Args:
        element_spec: `tf.TypeSpec` structure of one batch.
        tables: The model's `PartitionedEmbedding` layers.

    Raises:
        ValueError: tells each reason, and what to do about it.
    """
    specs = tf.nest.flatten(element_spec)
    problems = [
        f"Its table {table.path!r} looks up each row once, so the number of "
        "rows differs from step to step. Use keras.layers.Embedding."
        for table in tables
    ]
    if any(spec.dtype == tf.string for spec in specs):
        problems.append(
            "Its batches have strings. Turn them into numbers in the input "
            "function."
        )
    dynamic = [
        spec
        for spec in specs
        if not isinstance(spec, tf.TensorSpec)
        or not spec.shape.is_fully_defined()
    ]
    if dynamic:
        problems.append(
            f"The shape of a part of its batches is not fixed: {dynamic[0]}. "
            "Use batch(..., drop_remainder=True) and dense tensors."
        )
    if problems:
        raise ValueError(
            "The model cannot be trained on a TPU:\n  " + "\n  ".join(problems)
        )

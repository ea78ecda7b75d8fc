"""Checkpoints with tables in slices, written by one traced function.

This uses private names of TensorFlow; see `private`.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# A checkpoint saves this as slices of one tensor; public TensorFlow creates it
# only through a `variable_partitioner`, which Keras 3 cannot use.
from tensorflow.python.distribute.sharded_variable import (
    ShardedVariable as ShardedVariable,
)

# The parts of a checkpoint for one variable: here, several slices.
from tensorflow.python.training.saving import saveable_object

from tfdist._tf import storage

Saveable = tf.Variable | ShardedVariable
"""An object that a checkpoint stores under one name."""


class PartitionedVariable(ShardedVariable):
    """The shards of one table, saved and read in the order of its rows.

    Each server writes its shard, one slice for each run (first row and size).
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        runs: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        super().__init__(variables)
        self.runs = list(zip(self._variables, runs, strict=True))

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def saveables(name: str) -> list[_Slices]:
            return [_Slices(*shard, self.shape, name) for shard in self.runs]

        return {"VARIABLE_VALUE": saveables}

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        pieces: dict[int, tf.Tensor] = {}
        for variable, runs in self.runs:
            split = tf.split(variable.read_value(), [size for _, size in runs])
            pieces |= zip((row for row, _ in runs), split, strict=True)
        return tf.concat([pieces[row] for row in sorted(pieces)], 0, name)

    def __getitem__(self, spec: Any) -> tf.Tensor:
        return tf.convert_to_tensor(self)[spec]

    def numpy(self) -> np.ndarray:
        """Returns the whole table."""
        return tf.convert_to_tensor(self).numpy()

    def assign(self, value: np.ndarray) -> None:
        """Assigns to each shard its rows of the table `value`."""
        for variable, runs in self.runs:
            rows = [value[row : row + size] for row, size in runs]
            variable.assign(np.concatenate(rows))


# At multiples of so many rows, a float32 table of any width is cut uncopied.
ALIGNED = 16


class _Slices(saveable_object.SaveableObject):
    """One shard in a checkpoint: its runs, as slices of the table."""

    def __init__(
        self,
        variable: tf.Variable,
        runs: Sequence[tuple[int, int]],
        shape: tf.TensorShape,
        name: str,
    ) -> None:
        runs = _aligned(runs)
        sizes = [size for _, size in runs]
        left: list[tf.Tensor] = []

        def piece(is_first: bool) -> tf.Tensor:
            """The next slice, in order; none is kept until the next save."""
            if is_first:
                left[:] = reversed(_pieces(variable, sizes))
            return left.pop()

        specs, rest = [], shape.as_list()[1:]
        for i, (row, size) in enumerate(runs):
            where = tf.Variable.SaveSliceInfo(
                name, shape.as_list(), [row] + [0] * len(rest), [size, *rest]
            )
            spec = where.spec, name, variable.dtype, variable.device
            own = functools.partial(piece, i == 0)
            specs.append(saveable_object.SaveSpec(own, *spec))
        super().__init__(variable, specs, name)

    def restore(
        self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any
    ) -> Any:
        with tf.device(self.op.device):
            return self.op.assign(tf.concat(restored_tensors, axis=0))


def _aligned(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The runs of a shard, with odd rows at its end as a separate run.

    TensorFlow takes parts between multiples of 64 bytes without copying.
    """
    *others, (row, size) = runs
    odd = sum(size for _, size in runs) % ALIGNED
    if not others or not 0 < odd < size:
        return [*runs]
    return [*others, (row, size - odd), (row + size - odd, odd)]


# Shards up to this size in bytes may be copied: many small ops take longer.
_SMALL = 1 << 18


def _pieces(variable: tf.Variable, sizes: Sequence[int]) -> list[tf.Tensor]:
    """Cuts a shard into runs of rows; a large one without copying.

    TensorFlow's `split` does not copy if a row is a multiple of 64 bytes.
    """
    with tf.device(variable.device):
        value = variable.read_value_no_copy()
        # Copied from a GPU, where no file can be written.
        with tf.device("/device:CPU:0"):
            value = tf.identity(value)
            if len(sizes) == 1:
                return [value]
            row = value.shape[1:].num_elements() * value.dtype.size
            if row % 64 == 0 or row * sum(sizes) <= _SMALL:
                return tf.split(value, sizes)
            return _cutter(value.shape, value.dtype, tuple(sizes))(value)


@functools.cache
def _cutter(
    shape: tf.TensorShape, dtype: tf.DType, sizes: tuple[int, ...]
) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    """Returns a function, traced once, that cuts a tensor into runs of rows."""
    ends, rest = [*itertools.accumulate(sizes)], shape[1:]
    cuts = [0, *(end for end in ends if end % ALIGNED == 0)]
    width = rest.num_elements()
    middle = cuts[-1] * width

    def cut(value: tf.Tensor) -> list[tf.Tensor]:
        flat = tf.reshape(value, [-1])
        parts = [flat[middle:]]
        if middle:
            groups = tf.reshape(flat[:middle], [-1, ALIGNED * width])
            parts[:0] = tf.split(groups, np.diff(cuts) // ALIGNED)
        pieces: list[tf.Tensor] = []
        runs = itertools.groupby(
            zip(ends, sizes, strict=True),
            lambda run: bisect.bisect_left(cuts, run[0]) - 1,
        )
        for which, own in runs:
            rows = tf.reshape(parts[which], [-1, *rest])
            split = [size for _, size in own]
            pieces += tf.split(rows, split) if len(split) > 1 else [rows]
        return pieces

    with tf.init_scope(), tf.device(None):
        traced = tf.function(cut, autograph=False)
        return traced.get_concrete_function(tf.TensorSpec(shape, dtype))


class CheckpointTracedOnce(tf.train.Checkpoint):
    """A checkpoint that is written by one function, traced once.

    If variables are on several devices, TensorFlow traces a function for each
    checkpoint and contacts every task for each function, which takes time and
    hangs while a task is frozen. A `CheckpointManager` calls `_write`.
    """

    _traced: Callable[[str], tf.Tensor] | None = None

    def trace(self) -> None:
        """Traces the function, before the first checkpoint."""
        assert self.save_counter is not None  # Created and tracked on access.
        here, write = tf.constant(0).device, super()._write

        @tf.function(autograph=False)
        def written(prefix: tf.Tensor) -> tf.Tensor:
            # In a graph "CPU:0" is no full name, and would get its own file.
            with tf.device(here):
                return write(prefix)

        with warnings.catch_warnings():
            # A warning that an iterator's options may be unknown in a graph.
            warnings.simplefilter("ignore", UserWarning)
            concrete = written.get_concrete_function(
                tf.TensorSpec([], tf.string)
            )
        # Not the function itself: it would become a part of the checkpoint.
        self._traced = lambda prefix: concrete(tf.constant(prefix))

    def _write(self, file_prefix: str, options: Any) -> str:
        if self._traced is None:
            self.trace()
            assert self._traced is not None
        storage.make_directory(os.path.dirname(file_prefix))
        path = self._traced(file_prefix).numpy().decode()
        for callback in options.experimental_write_callbacks:
            callback(path)
        return path

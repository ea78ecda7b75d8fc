"""Partitioners, which split a variable by rows into shards of similar size.

The three partitioners are TF1's own, except that arguments which TF1 accepted
and then failed on, or ignored, raise an error. A partitioner is a callable
`(shape: tf.TensorShape, dtype)` that returns the number of parts along each
axis, a list of int. Like `ParameterServerStrategy`, tfdist splits only axis 0.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist._tf.arguments import check_callable, check_positive
from tfdist._tf.private_checkpoints import ALIGNED

Partitioner = Callable[..., Sequence[int]]


class Run(NamedTuple):
    """Rows of a table that are consecutive both in the table and in a shard."""

    row: int  # The first row of the run in the table.
    size: int
    shard: int
    position: int  # The position of the run's first row in the shard.


def fixed_size_partitioner(num_shards: int, axis: int = 0) -> Partitioner:
    """Splits every variable into the same number of shards.

    See also `tf.compat.v1.fixed_size_partitioner`, which accepts `num_shards=0`
    and fails later. A variable of fewer rows than shards gets a shard per row.

    Args:
        num_shards: Number of shards, at least 1.
        axis: Axis to split. Default: 0, the only one tfdist can split.

    Raises:
        ValueError: If `num_shards` is not a positive integer.

    >>> fixed_size_partitioner(3)(shape=tf.TensorShape([10, 4]))
    [3, 1]
    """
    check_positive("num_shards", num_shards)
    return tf.compat.v1.fixed_size_partitioner(num_shards, axis)


def variable_axis_size_partitioner(
    max_shard_bytes: int,
    axis: int = 0,
    bytes_per_string_element: int = 16,
    max_shards: int | None = None,
) -> Partitioner:
    """Splits a variable so that no shard has more than `max_shard_bytes`.

    See also `tf.compat.v1.variable_axis_size_partitioner`. A row larger than
    `max_shard_bytes` becomes a shard of its own.

    Args:
        max_shard_bytes: Maximum size of a shard in bytes, at least 1.
        axis: Same as for `fixed_size_partitioner`.
        bytes_per_string_element: Assumed bytes per string. Default: 16.
        max_shards: Maximum number, whatever the shards' size. Default: none.

    Raises:
        ValueError: If one of the numbers is not positive.

    >>> partitioner = variable_axis_size_partitioner(100)
    >>> partitioner(shape=tf.TensorShape([10, 4]), dtype=tf.float32)
    [2, 1]
    """
    check_positive("max_shard_bytes", max_shard_bytes, numbers.Real)
    check_positive("bytes_per_string_element", bytes_per_string_element)
    if max_shards is not None:
        check_positive("max_shards", max_shards)
    return tf.compat.v1.variable_axis_size_partitioner(
        max_shard_bytes, axis, bytes_per_string_element, max_shards
    )


def min_max_variable_partitioner(
    max_partitions: int = 1,
    axis: int = 0,
    min_slice_size: int = 256 << 10,
    bytes_per_string_element: int = 16,
) -> Partitioner:
    """Splits a variable, keeping at least `min_slice_size` bytes per shard.

    See also `tf.compat.v1.min_max_variable_partitioner`, which divides by zero
    for `min_slice_size=0` and treats `max_partitions=0` as 1.

    Args:
        max_partitions: Maximum number of shards. Default: 1.
        axis: Same as for `fixed_size_partitioner`.
        min_slice_size: Minimum size of a shard in bytes. Default: 256 KiB.
        bytes_per_string_element: Assumed bytes per string. Default: 16.

    Raises:
        ValueError: If one of the numbers is not positive.

    >>> partitioner = min_max_variable_partitioner(max_partitions=8)
    >>> partitioner(shape=tf.TensorShape([1024, 256]), dtype=tf.float32)
    [4, 1]
    """
    check_positive("max_partitions", max_partitions)
    check_positive("min_slice_size", min_slice_size, numbers.Real)
    check_positive("bytes_per_string_element", bytes_per_string_element)
    return tf.compat.v1.min_max_variable_partitioner(
        max_partitions, axis, min_slice_size, bytes_per_string_element
    )


def row_slices(num_rows: int, num_shards: int) -> tuple[tuple[int, int], ...]:
    """Splits rows into slices as TF1 did ("div"), the first ones a row longer.

    Returns the `(offset, size)` of each shard, in order.

    Raises:
        ValueError: If a number is not positive or a shard would be empty.

    >>> row_slices(13, 3)
    ((0, 5), (5, 4), (9, 4))
    """
    check_positive("num_rows", num_rows)
    check_positive("num_shards", num_shards)
    if num_shards > num_rows:
        raise ValueError(
            "Argument `num_shards` must be at most the number of rows, so that "
            f"no shard is empty. Received: num_shards={num_shards}, "
            f"num_rows={num_rows}."
        )
    size, longer = divmod(int(num_rows), int(num_shards))
    return tuple(
        (shard * size + min(shard, longer), size + (shard < longer))
        for shard in range(num_shards)
    )


def row_runs(
    num_rows: int, num_shards: int, strategy: str = "balanced"
) -> tuple[Run, ...]:
    """Returns the runs of rows, in order, for shards of `row_slices`' sizes.

    "div" gives each shard one run, as TF1 did. "balanced" is for rows ordered
    by frequency and assigns them in rounds, at first one row per shard; later
    rounds have two fifths of all rows up to their end. The order of the shards
    varies by round, so each has about the same share of the rows between any
    two ranks. A run is a slice in a checkpoint and takes 1 ms to restore.

    >>> [(run.row, run.size, run.shard) for run in row_runs(8, 2)]
    [(0, 1, 1), (1, 1, 0), (2, 1, 1), (3, 3, 0), (6, 2, 1)]
    """
    sizes = [size for _, size in row_slices(num_rows, num_shards)]
    ends, end = [sizes[0]], sizes[-1]
    while strategy == "balanced" and (end := end * 3 // 5):
        if end >= 64:
            # A checkpoint can slice a table here without copying.
            end -= end % ALIGNED
        ends.append(end)
    forth = [*range(num_shards)]
    middle = num_shards // 2
    turned = forth[middle:] + forth[:middle]
    orders = forth, forth[::-1], turned, turned[::-1]
    runs: list[Run] = []
    row = start = 0
    for number, end in reversed([*enumerate(ends)]):
        for shard in orders[number % 4]:
            size = min(end, sizes[shard]) - start
            if runs and runs[-1].shard == shard:
                runs[-1] = runs[-1]._replace(size=runs[-1].size + size)
            else:
                runs.append(Run(row, size, shard, start))
            row += size
        start = end
    return tuple(runs)


def apply_partitioner(
    partitioner: Partitioner, shape: tf.TensorShape, dtype: str = "float32"
) -> int:
    """Returns the number of shards that a partitioner chooses for a variable.

    The checks are those of TF1's `get_variable`, but only axis 0 may be split.

    Raises:
        TypeError: If it is not callable or returns no sequence of integers.
        ValueError: If the numbers of parts do not fit the shape.
    """
    check_callable("partitioner", partitioner)
    parts = partitioner(shape=shape, dtype=tf.as_dtype(dtype))
    error: type[Exception] = ValueError
    if not isinstance(parts, Sequence) or not all(
        isinstance(part, numbers.Integral) for part in parts
    ):
        error, problem = TypeError, "which is not a sequence of integers"
    elif len(parts) != shape.rank:
        problem = f"which has {len(parts)} axes"
    elif min(parts) < 1:
        problem = "which has no part along some axis"
    elif max(parts[1:], default=1) > 1:
        problem = (
            "but only axis 0 can be split: a lookup by row must find its row "
            "on one server"
        )
    elif parts[0] > shape[0]:
        problem = "which is more parts than rows"
    else:
        return int(parts[0])
    raise error(
        "Argument `partitioner` must return the number of parts along each "
        f"axis, like [2, 1], for shape={shape}. Received: {parts!r}, {problem}."
    )

"""The `InputContext`s that describe a worker to its input function."""

from __future__ import annotations

import tensorflow as tf


class WorkerContext(tf.distribute.InputContext):
    """The `InputContext` of a worker of a parameter-server job.

    The context also sets the first pass over the data. A restarted worker or
    job starts with a new pass, in a different order and at different places in
    the files. Otherwise a dataset that cannot be read between two failures
    would never be read completely.

    >>> context = WorkerContext(3, worker=1, first_pass=7)
    >>> context.num_input_pipelines, context.input_pipeline_id
    (3, 1)

    Args:
        num_workers: How many workers share the data.
        worker: Index of this worker, an int or a scalar tensor.
        first_pass: Number of the first pass, an int or a scalar int64 tensor.

    Attributes:
        fixed_share: Whether only this worker ever reads its share of the data.
            False for readers that redistribute the examples in each pass.
        each_once: Whether batches that a worker has got are lost with it, as
            no other worker gets them.
        is_dealt: Whether the input function has read `num_input_pipelines`, so
            that its data depends on the number of workers.
    """

    def __init__(
        self,
        num_workers: int,
        worker: int | tf.Tensor,
        first_pass: int | tf.Tensor = 0,
    ) -> None:
        super().__init__(num_workers, worker, num_replicas_in_sync=1)
        self.first_pass = first_pass
        self.fixed_share = True
        self.each_once = False
        self.is_dealt = False

    @property
    def num_input_pipelines(self) -> int:
        """How many workers share the data."""
        self.is_dealt = True
        return self._num_input_pipelines


class GroupContext(tf.distribute.InputContext):
    """The `InputContext` of a process of an all-reduce job.

    The global batch size stays the same when the size of the group changes.

    >>> context = GroupContext(4, 0, num_replicas_in_sync=4)
    >>> context.get_per_replica_batch_size(64)
    16

    Args:
        first_pass: Number of the first pass, as in `WorkerContext`.
        *args, **kwargs: As for `tf.distribute.InputContext`.
    """

    def __init__(self, *args: int, first_pass: int = 0, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        self.first_pass = first_pass
        self._global_batch_size: int | None = None

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The batch size per replica; ValueError if it is not an integer."""
        self._global_batch_size = global_batch_size
        self.check(self.num_replicas_in_sync)
        return global_batch_size // self.num_replicas_in_sync

    def check(self, num_replicas: int) -> None:
        """Raises `ValueError` unless replicas can share the global batch."""
        size = self._global_batch_size
        if size is None:
            raise ValueError(
                "A group that changes its size keeps the global batch size, "
                "which the input function has not set. Let it make batches of "
                "context.get_per_replica_batch_size(GLOBAL_BATCH), "
                "or take no argument and return global batches."
            )
        if size % num_replicas:
            raise ValueError(
                f"The global batch of {size} examples is not divisible by "
                f"{num_replicas} replicas: choose another number of workers or "
                "batch size, or an input function that takes no argument and "
                "returns global batches, whose shares may differ."
            )


def first_pass(context: tf.distribute.InputContext | None) -> int | tf.Tensor:
    """The number of a worker's first pass. Default: 0."""
    return getattr(context, "first_pass", 0)


def pass_numbers(context: tf.distribute.InputContext | None) -> tf.data.Dataset:
    """A dataset of the number of a worker's first pass and all later ones."""
    first = tf.cast(first_pass(context), tf.int64)
    # With `counter`, TensorFlow would keep a function until the process ends.
    return tf.data.Dataset.range(first, tf.int64.max)


def read_by_all(
    context: tf.distribute.InputContext | None, each_once: bool = False
) -> None:
    """Declares that a reader does not always give a worker the same share."""
    if isinstance(context, WorkerContext):
        context.fixed_share, context.each_once = False, each_once

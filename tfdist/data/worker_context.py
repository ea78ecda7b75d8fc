"""What an input function knows about the worker that it reads for."""

from __future__ import annotations

import tensorflow as tf


class WorkerContext(tf.distribute.InputContext):
    """The `InputContext` of a worker of a parameter-server job.

    It also tells with which pass over the data to begin. A restarted worker or
    job begins with another pass, in another order and at other places in the
    files: else a dataset larger than the work between two failures would never
    be read completely.

    >>> context = WorkerContext(3, worker=1, first_pass=7)
    >>> context.num_input_pipelines, context.input_pipeline_id
    (3, 1)

    Args:
        num_workers: How many workers share the data.
        worker: Index of this one, an int or a scalar tensor.
        first_pass: Number of the first pass, an int or a scalar int64 tensor.

    Attributes:
        first_pass: As given.
        fixed_share: Whether only this worker ever reads its share of the data.
            False for readers that deal the examples again in each pass.
        is_dealt: Whether the input function has asked how many workers there
            are: what it reads then depends on it.
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
        self.is_dealt = False

    @property
    def num_input_pipelines(self) -> int:
        """How many workers share the data."""
        self.is_dealt = True
        return self._num_input_pipelines


def first_pass(context: tf.distribute.InputContext | None) -> int | tf.Tensor:
    """The pass that a worker begins with. Default: 0."""
    return getattr(context, "first_pass", 0)


def read_by_all(context: tf.distribute.InputContext | None) -> None:
    """For readers whose shares are not those of one worker for good."""
    if isinstance(context, WorkerContext):
        context.fixed_share = False

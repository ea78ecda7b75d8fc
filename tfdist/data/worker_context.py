"""What an input function is told of the worker that it reads for."""

from __future__ import annotations

import tensorflow as tf


class WorkerContext(tf.distribute.InputContext):
    """The `InputContext` of a worker of a parameter-server job.

    Beside its place among the workers, it tells a reader with which pass over
    the data to begin. Whoever is started again, a worker or the whole job,
    begins with another pass, in another order and at other places of the
    files: else a data set that is larger than the work between two failures
    would never be read to its end.

    Args:
        num_workers: How many workers share the data.
        worker: Index of this one, an int or a scalar tensor.
        first_pass: Number of the first pass, an int or a scalar int64 tensor.

    Attributes:
        first_pass: As given.
        fixed_share: Whether the worker's share of the data is its own for
            good, so that nobody reads it while the worker is gone. A reader
            that deals the examples again in each pass says that it is not
            (`read_by_all`), as `tfdist.read_csv` and its kin do.
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


def first_pass(context: tf.distribute.InputContext | None) -> int | tf.Tensor:
    """The pass that a worker begins with; 0 where nothing says otherwise.

    >>> first_pass(WorkerContext(3, 1, first_pass=7)), first_pass(None)
    (7, 0)
    """
    return getattr(context, "first_pass", 0)


def read_by_all(context: tf.distribute.InputContext | None) -> None:
    """A reader says that no share of the data is one worker's for good."""
    if isinstance(context, WorkerContext):
        context.fixed_share = False

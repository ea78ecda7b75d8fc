"""Runs steps on several replicas in sync: devices of one or many processes.

Each replica gets a share of the global batch and applies the mean of all
gradients (`replicas.py`), so the weights equal those of one device with the
whole batch. Layers that depend on their whole batch see only the share:
`BatchNormalization` normalizes by the share, unless it is `synchronized` (and
gets no mask, with which Keras ignores that), and updates its averages with the
mean over replicas. Changes of weights with `aggregation="sum"` are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.input_wait import TimedIterator
from tfdist.data.worker_context import GroupContext
from tfdist.training.loop import LocalLoop
from tfdist.training.replicas import Replicas, share, without_examples
from tfdist.training.step import ModelStep


class ReplicatedLoop(LocalLoop):
    """Runs steps on the replicas of a synchronous strategy.

    With `own_batches`, the data of some replicas may end sooner: these then
    take part without examples until the data of the last replica has ended. (On
    TPUs, whose shapes are fixed, all end with the first.)

    Args:
        step: A `ModelStep` created with `replicas`.
        dataset: The global batches, the same in every process, of which some
            replicas may get one example less than others; with `own_batches`,
            the batches of this process's replicas, one for each.
        strategy: The synchronous strategy of `replicas`.
        context: The context that was passed to the function of the batches.
    """

    def __init__(
        self,
        step: ModelStep,
        global_step: tf.Variable,
        dataset: tf.data.Dataset,
        *,
        strategy: tf.distribute.Strategy,
        replicas: Replicas,
        own_batches: bool = False,
        context: GroupContext | None = None,
        steps_per_dispatch: int | None = None,
    ) -> None:
        self.own_batches = own_batches
        self._context = context if own_batches else None
        self._strategy = strategy
        self._replicas = replicas
        ids = strategy.experimental_distribute_values_from_function(
            lambda context: context.replica_id_in_sync_group
        )
        here = strategy.experimental_local_results(ids)
        self._first, self._num_here = here[0], len(here)
        if own_batches:
            self._batches_per_step = len(here)
            ends = dataset.cardinality() != tf.data.INFINITE_CARDINALITY
            if ends and not isinstance(strategy, tf.distribute.TPUStrategy):
                replicas.skips_empty = True
                nothing = without_examples(dataset.element_spec)
                empty = tf.data.Dataset.from_tensors(nothing).repeat()
                dataset = dataset.concatenate(empty)
        super().__init__(step, global_step, dataset, steps_per_dispatch)
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            task = strategy.cluster_resolver
            self._task = f"{task.task_type}:{task.task_id}"
            self._secs_alone = 0.0  # All processes run the same functions.

    def check_resize(self, num_processes: int) -> None:
        """See `Loop.check_resize`; shares of global batches have any size."""
        if self._context is not None:
            self._context.check(num_processes * self._num_here)

    def _ended_before(self, step: int) -> bool:
        """Steps for which no replica had an example did not count."""
        return self._replicas.skips_empty and self.step < step

    def _steps(
        self, num_steps: int, iterator: TimedIterator, first_step: tf.Tensor
    ) -> tf.Tensor:
        """Runs steps; returns packed metric states of all replicas."""
        batches = self._batches(num_steps, iterator)
        states = self._strategy.run(self._train, (batches, first_step))
        local = self._strategy.experimental_local_results
        return self._step.pack([local(state)[0] for state in states])

    def _batches(self, num_steps: int, iterator: TimedIterator) -> Any:
        """Each replica's batches: its own, or its shares of global batches."""
        read = [
            [iterator.get_next() for _ in range(self._batches_per_step)]
            for _ in range(num_steps)
        ]

        def of_replica(context: Any) -> list[Any]:
            index = context.replica_id_in_sync_group
            if self.own_batches:
                return [each[index - self._first] for each in read]
            num = context.num_replicas_in_sync
            return [share(batch, index, num) for (batch,) in read]

        distribute = self._strategy.experimental_distribute_values_from_function
        return distribute(of_replica)

    def _train(
        self, batches: Sequence[Any], first_step: tf.Tensor
    ) -> list[tf.Tensor]:
        """One replica's part of `_steps`."""
        states = self._step.zero_states()
        for i, batch in enumerate(batches):
            after = self._step.train(batch, first_step + i, states)
            states = self._replicas.keep_if_empty(after, states)
        return self._replicas.sum(states)

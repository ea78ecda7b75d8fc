"""Steps on several replicas in sync: devices of this process, or of several.

Each replica gets a share of the global batch and the mean of what all of them
found (`replicas.py`), so the weights are those of one device that had the whole
batch. Layers that look at their whole batch see the share alone:
`BatchNormalization` normalizes by it, unless it is `synchronized`, and moves
its averages by the mean over replicas. What is added to weights with
`aggregation="sum"` adds up.
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
    """Steps on the replicas of a synchronous strategy.

    Batches of their own may end sooner on some replicas: those then take part
    with no example, until the data of the last have ended. (On TPUs, whose
    shapes are fixed, all end with the first.)

    Args:
        step: Made with `replicas`.
        dataset: The global batches, the same in every process, of which some
            replicas may get one example less than others; with `own_batches`
            those of this process's replicas, one for each.
        strategy: A synchronous one, of these `replicas`.
        context: What the function that has returned the batches was given.
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
        """As for `Loop`; shares of global batches may be of any size."""
        if self._context is not None:
            self._context.check(num_processes * self._num_here)

    def _ended_before(self, step: int) -> bool:
        """Steps for which nobody had an example did not count."""
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
        """Each replica's batches: its own, or its shares of global ones."""
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
            states = self._replicas.unless_empty(after, states)
        return self._replicas.sum(states)

"""Derives counts, learning rates and random seeds from a step's number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist._tf import private_keras
from tfdist.training import optimizers
from tfdist.training.fence import Fence


class Counters:
    """Counts steps; computes each update's number and learning rates.

    An update's number follows from its step's number, so workers read no
    counter and never use the same number twice. Without a `global_step`, the
    job's scalar int64 variable, only counters of the (built) optimizer count.
    """

    def __init__(
        self, optimizer: Optimizer, global_step: tf.Variable | None
    ) -> None:
        self._parts = optimizers.parts(optimizer)
        self._global_step = global_step
        self._counter = private_keras.counter(optimizer)
        counters = map(private_keras.counter, [optimizer, *self._parts])
        self._counters = {id(c): c.value for c in counters}
        self._ahead: int | None = None
        rates = [part.learning_rate for part in self._parts]
        self._rates = [r for r in rates if isinstance(r, keras.Variable)]
        scaled = keras.optimizers.LossScaleOptimizer
        self._is_scaled = isinstance(optimizer, scaled)
        # The variables that a step reads for `of_step`. With a dynamic loss
        # scale, not every step is an update.
        self.reads = list(self._rates)
        if self._is_scaled or global_step is None:
            self.reads.append(self._counter)
        if self._is_scaled:
            self.reads.append(optimizer.dynamic_scale)

    def iteration(self, step: tf.Tensor) -> tf.Tensor:
        """Scalar int64: the updates before a step, if every step is one."""
        if self._ahead is None:
            assert self._global_step is not None
            # Not 0 if a trained optimizer starts a new job. Read once, before
            # any step is running, as both counters advance.
            with tf.init_scope():
                before = int(self._global_step.numpy())
                self._ahead = int(self._counter.numpy()) - before
        return step + self._ahead

    def of_step(
        self,
        step: tf.Tensor | None = None,
        values: Sequence[tf.Tensor] | None = None,
    ) -> tuple[tf.Tensor, list[tf.Tensor], tf.Tensor | None]:
        """Returns the iteration, learning rates and the dynamic loss scale.

        For `step` or, without a `global_step`, for the next update. `values`
        are those of `reads`; by default they are read here.
        """
        if values is None:
            values = [tf.convert_to_tensor(v.value) for v in self.reads]
        num = len(self._rates)
        known = list(zip(self._rates, values[:num], strict=True))
        if len(values) > num:
            iteration = tf.cast(values[num], tf.int64)
        else:
            iteration = self.iteration(step)
        rate_of = optimizers.learning_rate
        rates = [rate_of(part, iteration, known) for part in self._parts]
        return iteration, rates, values[-1] if self._is_scaled else None

    def count(
        self,
        device_of: Callable[[tf.Variable], str],
        arrived: Mapping[str, tf.Tensor],
        read: Sequence[tf.Tensor],
        fence: Fence | None = None,
        is_update: tf.Tensor | None = None,
    ) -> None:
        """Counts a step, atomically on the server that holds a counter.

        A counter waits until gradients have `arrived` on its server or, if it
        gets none, the batch was `read`: a step that failed or found no batch
        does not count. The optimizer only counts a step that `is_update`.
        """
        steps = [] if self._global_step is None else [self._global_step]
        for counter in (*steps, *self._counters.values()):
            device = device_of(counter)
            gradients = arrived.get(device)
            with tf.device(device):
                one = tf.ones([1], counter.dtype)
            if is_update is not None and counter is not self._global_step:
                one = tf.cast([is_update], counter.dtype)
            if gradients is None and fence:
                one = fence.passed(device, fence.generation, one)
            needed = read if gradients is None else [gradients]
            with tf.device(device), tf.control_dependencies(needed):
                counter.assign_add(one[0])


def refuse_counters(
    optimizer: Optimizer, assigned: Sequence[keras.Variable]
) -> None:
    """Raises `ValueError` if counters of an optimizer have been assigned."""
    every = [optimizer, *optimizers.parts(optimizer)]
    counters = {id(private_keras.counter(each)) for each in every}
    if any(id(variable) in counters for variable in assigned):
        raise ValueError(
            "A callback has assigned the `iterations` of an optimizer, but "
            "steps take their number from the job's global step, so learning "
            "rates and bias corrections would not follow. Assign the "
            "`learning_rate`, or use a schedule that begins again by itself, "
            "such as CosineDecayRestarts."
        )


def step_seeds(
    generators: Sequence[keras.Variable], *numbers: tf.Tensor
) -> list[tf.Tensor]:
    """The state of each random generator in a step, derived from `numbers`.

    These are the step's number and any replica's index. Keras' generators count
    in a shared variable, so two workers could draw the same dropout mask.
    """
    # The seeds never change, so they are read while the step is traced.
    with tf.init_scope():
        starts = [generator.numpy() for generator in generators]
    seeds = [tf.cast(start, tf.int64) for start in starts]
    for number in numbers:
        seeds = [tf.random.fold_in(seed, number) for seed in seeds]
    pairs = zip(seeds, generators, strict=True)
    return [tf.cast(seed, generator.dtype) for seed, generator in pairs]

"""Random numbers of a step: a seed for each generator that is the step's own.

Keras' generators count in a shared variable, so two workers could draw the same
dropout mask; the seed of a step depends on nothing but its number.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf


def step_seeds(
    generators: Sequence[keras.Variable], *numbers: tf.Tensor
) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Each generator's state, and its value in a step.

    Args:
        generators: States of generators. Read once, while the step is traced:
            they never change.
        *numbers: Of the step, and of the replica if there are several.
    """
    seeds = []
    for generator in generators:
        with tf.init_scope():
            start = generator.numpy()
        seed = tf.cast(start, tf.int64)
        for number in numbers:
            seed = tf.random.fold_in(seed, number)
        seeds.append((generator, tf.cast(seed, generator.dtype)))
    return seeds

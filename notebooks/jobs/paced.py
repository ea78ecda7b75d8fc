"""Pauses in the graph, with which two cores play many machines."""

import tensorflow as tf


def pauses(microseconds: tf.Tensor | int) -> tf.data.Dataset:
    """Zeros without end, each after a pause.

    By TensorFlow's own op, since no Python runs on a worker. The op locks
    itself while it reads its input, which therefore is a constant: a function
    there (as in `map`) would make a step that fails wait for ever.
    """
    zeros = tf.data.Dataset.from_tensors(0).repeat()
    paused = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(zeros),
        sleep_microseconds=tf.cast(microseconds, tf.int64),
        output_types=[tf.int32],
        output_shapes=[[]],
    )
    return tf.data.experimental.from_variant(paused, zeros.element_spec)


def pause(microseconds: tf.Tensor | int) -> tf.Tensor:
    """A zero, after a pause."""
    return pauses(microseconds).take(1).get_single_element()

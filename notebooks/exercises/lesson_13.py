"""Exercises of lesson 13, tf.distribute by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from exercises import Exercise


def is_reduced(
    answer: tuple[Any, Any], mirrored: tf.distribute.MirroredStrategy
) -> bool:
    """Exercise 1, compared with what the strategy returns."""

    def replica() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        index = context.replica_id_in_sync_group
        return tf.gather([[1.0, 2.0], [3.0, 6.0]], index)

    values = mirrored.run(replica)
    wanted = (
        mirrored.reduce("MEAN", values, axis=None),
        mirrored.reduce("SUM", values, axis=0),
    )
    return len(answer) == 2 and all(
        np.shape(a) == np.shape(b) and np.allclose(a, b)
        for a, b in zip(answer, wanted, strict=True)
    )


def adds_up(loss_of: Callable[..., Any]) -> bool:
    """Exercise 2: the replicas' losses, for two ways to cut the batch."""
    errors = tf.constant([1.0, 4.0, 9.0, 16.0, 25.0, 36.0, 49.0])
    cuts = [errors[:4], errors[4:]], [errors[:1], errors[1:3], errors[3:]]
    sums = [sum(float(loss_of(part, 7)) for part in cut) for cut in cuts]
    return np.allclose(sums, np.mean(errors))


def shards_first(input_fn: Callable[..., tf.data.Dataset]) -> bool:
    """Exercise 3, for four pipelines and eight replicas."""
    contexts = [tf.distribute.InputContext(4, i, 8) for i in range(4)]
    datasets = [input_fn(context).take(65) for context in contexts]
    batches = [batch.numpy() for dataset in datasets for batch in dataset]
    read = sorted(np.concatenate(batches))
    return read == list(range(64)) and {len(b) for b in batches} == {2}


def of_three_tasks(found: dict[str, dict[str, Any]]) -> bool:
    """Exercise 4: the same weights everywhere, and the right ones."""
    if len(found) != 3:
        raise ValueError(f"three tasks are asked for; here: {len(found)}")
    first, *others = found.values()
    return (
        first["steps"] == 40
        and np.allclose(first["kernel"], 1, atol=0.01)
        and all(row["kernel"] == first["kernel"] for row in others)
    )


EXERCISES = {
    1: Exercise(
        (
            "Which of the two calls keeps the shape of a replica's tensor?",
            "`axis=None` combines the replicas element by element. `axis=0` "
            "also reduces within each of them, down to one number.",
        ),
        is_right=is_reduced,
    ),
    2: Exercise(
        (
            "The mean of two means is not the mean of all. What do all "
            "replicas have to divide by?",
            "Add up the replica's own errors, and divide by the size of the "
            "global batch.",
        ),
        is_right=adds_up,
    ),
    3: Exercise(
        (
            "Shard first, then batch. Whose batch size is it?",
            "`dataset.shard(context.num_input_pipelines, "
            "context.input_pipeline_id)`, then batches of what the context "
            "says for a global batch of 16.",
        ),
        is_right=shards_first,
    ),
    4: Exercise(
        (
            "`run` of this notebook returns the output of two tasks only. "
            "Which one is missing?",
            "Start a `testing.LocalCluster` with `workers=2`, wait until each "
            "task has printed a line that begins with "
            '`{"steps"`, and take the only element of `course.records` of '
            "each task's output.",
        ),
        is_right=of_three_tasks,
    ),
    5: Exercise(
        (
            "For each situation ask first: are the devices in one process? Do "
            "they stay?",
            "Name the class of the strategy, whether Keras' `fit` runs under "
            "it, and one thing to check before the job is started. Write at "
            "least 25 words.",
        ),
    ),
}

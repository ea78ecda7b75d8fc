"""Checkpoints: variables by name, whatever the cluster (design decision D6).

Keras 3 numbers the variables in its checkpoints, so the order in which layers
were made is part of the format. Here a checkpoint names every variable by its
path, and slots after their optimizer, so the same checkpoint restores into a
cluster of any shape and into a plain model in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

_PREFIX = "variables/"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
GLOBAL_STEP = "global_step"
BASENAME = "model.ckpt"


def named_variables(
    model: keras.Model,
    global_step: tf.Variable | None = None,
    optimizer: bool = True,
) -> dict[str, tf.Variable]:
    """What a checkpoint of `model` holds, by name.

    Args:
        model: A built model.
        global_step: The job's step counter, saved as `global_step`.
        optimizer: Whether the optimizer's variables are included, as
            `optimizer/<path>`.

    Raises:
        ValueError: two variables have one path.
    """
    metrics = {id(v) for v in model.metrics_variables}
    named: dict[str, tf.Variable] = {}
    pairs = [(v.path, v) for v in model.variables if id(v) not in metrics]
    if optimizer:
        pairs += [(f"optimizer/{v.path}", v) for v in model.optimizer.variables]
    for name, variable in pairs:
        if name in named:
            raise ValueError(
                f"Two variables of model {model.name!r} are both called "
                f"{name!r}; a checkpoint could not tell them apart. Give "
                "their layers different names."
            )
        named[name] = variable.value
    if global_step is not None:
        named[GLOBAL_STEP] = global_step
    return named


class Checkpoints:
    """The checkpoints of a job: `model_dir/model.ckpt-<step>`.

    A thin layer over `tf.train.Checkpoint` and `CheckpointManager`: each
    parameter server writes what it holds, in parallel; a checkpoint becomes
    the latest only when it is complete.

    Args:
        directory: Where the checkpoints are.
        variables: Name to variable, from `named_variables`.
        max_to_keep: Most recent checkpoints kept; `None` or 0 keeps all.
        keep_every_n_hours: In addition keeps one per so many hours.
    """

    def __init__(
        self,
        directory: str,
        variables: Mapping[str, tf.Variable],
        max_to_keep: int | None = 5,
        keep_every_n_hours: float | None = None,
    ) -> None:
        self._variables = dict(variables)
        self._manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(variables=dict(variables)),
            directory,
            max_to_keep=max_to_keep or None,
            keep_checkpoint_every_n_hours=keep_every_n_hours,
            checkpoint_name=BASENAME,
        )

    @property
    def latest(self) -> str | None:
        """Path of the newest complete checkpoint, or None."""
        return self._manager.latest_checkpoint

    def save(self, step: int) -> str:
        """Writes `model.ckpt-<step>` and returns its path."""
        return self._manager.save(checkpoint_number=step)

    def restore(self) -> str | None:
        """Restores the latest checkpoint, if there is one; returns its path."""
        if self.latest:
            restore(self.latest, self._variables)
        return self.latest


def restore(path: str, variables: Mapping[str, tf.Variable]) -> None:
    """Assigns the values in checkpoint `path` to `variables`, by name.

    The checkpoint may hold more than `variables`.

    Raises:
        ValueError: `path` lacks some of `variables` or holds them in another
            shape; the message lists each.
    """
    saved = saved_shapes(path)
    problems = [
        f"  {name}: shape {tuple(v.shape)} in the model, "
        + (f"{tuple(saved[name])}" if name in saved else "missing")
        + " in the checkpoint"
        for name, v in variables.items()
        if saved.get(name) != list(v.shape)
    ]
    if problems:
        raise ValueError(
            f"Checkpoint {path} does not fit the model:\n"
            + "\n".join(problems)
            + "\nIt was written by another model function. Restore the "
            "matching code, or choose another model_dir."
        )
    checkpoint = tf.train.Checkpoint(variables=dict(variables))
    checkpoint.restore(path).expect_partial()


def saved_shapes(path: str) -> dict[str, Sequence[int]]:
    """Name to shape of every variable in checkpoint `path`."""
    return {
        key.removeprefix(_PREFIX)
        .removesuffix(_SUFFIX)
        .replace(".S", "/")
        .replace("..", "."): shape
        for key, shape in tf.train.list_variables(path)
        if key.startswith(_PREFIX)
    }


def step_of(path: str) -> int:
    """The step at which checkpoint `path` was written."""
    return int(tf.train.load_variable(path, f"{_PREFIX}{GLOBAL_STEP}{_SUFFIX}"))

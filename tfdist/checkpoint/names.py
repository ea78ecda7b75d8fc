"""What the variables of a model are called in its checkpoints.

Keras 3 numbers them, so the order in which layers were made is part of its
format. Here every variable has the name of its path.
"""

from __future__ import annotations

import collections

import keras
import tensorflow as tf

from tfdist._tf.private import Saveable, ShardedVariable
from tfdist.embeddings.layer import copy_shard, logical_path, shard_of
from tfdist.training import optimizers, slots

GLOBAL_STEP = "global_step"


def named_variables(
    model: keras.Model,
    global_step: tf.Variable | None = None,
    optimizer: bool = True,
) -> dict[str, Saveable]:
    """What a checkpoint of `model` holds, by name.

    A variable is called by its path, the shards of a table together by the
    path that the table would have in one piece, and a slot
    `<variable>/<optimizer>/<slot>`, as in TF1.

    >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> [name.split("/")[-1] for name in named_variables(model)]
    ['kernel', 'bias']

    Args:
        model: A built model.
        global_step: The job's step counter, saved as `global_step`.
        optimizer: Whether the optimizer's variables are included.

    Raises:
        ValueError: two variables have one name.
    """
    grouped: dict[str, list[keras.Variable]] = collections.defaultdict(list)
    metrics = {id(v) for v in model.metrics_variables}
    for variable in model.variables:
        if id(variable) not in metrics:
            grouped[logical_path(variable)].append(variable)
    if optimizer and getattr(model, "optimizer", None) is not None:
        _add_optimizer(grouped, model)
    named: dict[str, Saveable] = {}
    for name, variables in grouped.items():
        if len(variables) == 1:
            named[name] = variables[0].value
        elif all(shard_of(v) is not None for v in variables):
            named[name] = ShardedVariable([v.value for v in variables])
        else:
            raise ValueError(
                f"Two variables of model {model.name!r} are both called "
                f"{name!r}; a checkpoint could not tell them apart. Give "
                "their layers different names."
            )
    if global_step is not None:
        named[GLOBAL_STEP] = global_step
    return named


def _add_optimizer(
    grouped: dict[str, list[keras.Variable]], model: keras.Model
) -> None:
    """Adds the slots, after their variables, and what all variables share."""
    parts = optimizers.parts(model.optimizer)
    names = optimizers.part_names(model.optimizer)
    seen = set()
    for variable in model.trainable_variables:
        i = optimizers.owner(model.optimizer, variable)
        prefix = f"{logical_path(variable)}/{names[i]}/"
        for kind, slot in slots.named_slots(parts[i], variable).items():
            copy_shard(variable, slot)
            grouped[prefix + kind].append(slot)
            seen.add(id(slot))
    for part, name in zip(
        [*parts, model.optimizer], [*names, model.optimizer.name], strict=True
    ):
        for variable in part.variables:
            if id(variable) not in seen:
                kind = slots.shared_name(part, variable)
                grouped[f"{name}/{kind}"].append(variable)
                seen.add(id(variable))

"""The names of a model's variables in its checkpoints.

Keras 3 numbers variables, so its format depends on the order in which layers
were created. Here each variable is stored under its path.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.private_checkpoints import PartitionedVariable, Saveable
from tfdist._tf.private_keras import SEED_STATE_NAME, make_paths_unique
from tfdist.embeddings.index import unmixed
from tfdist.embeddings.layer import copy_shard, logical_path, runs_of, shard_of
from tfdist.training import optimizers, slots

GLOBAL_STEP = "global_step"
# TensorFlow can restore slices of these dtypes only into the same slices.
_NO_SLICES = {"float16", "uint16", "uint32", "uint64"}
_OF_STEP = "train_step"  # Prefix of variables that only `train_step` uses.
_PREFIX = "variables/"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def named_variables(
    model: keras.Model,
    global_step: tf.Variable | None = None,
    optimizer: bool = True,
) -> dict[str, Saveable]:
    """Maps names to the variables in a checkpoint of `model`.

    A variable is named by its path; the shards of a table have the path of the
    whole table; and a slot variable is `<variable>/<optimizer>/<slot>`, as in
    TF1. Variables with equal paths get distinct ones from their layers' names.

    >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> [name.split("/")[-1] for name in named_variables(model)]
    ['kernel', 'bias']

    Args:
        model: A built model.
        global_step: The job's step counter, saved as `global_step`.
        optimizer: Whether to include the optimizer's variables; it is built.

    Raises:
        ValueError: two variables have the same name, or one has that of the
            step counter; a table in shards is of float16 or unsigned integers.
    """
    make_paths_unique(model)
    grouped: dict[str, list[keras.Variable]] = collections.defaultdict(list)
    metrics = {id(v) for v in model.metrics_variables}
    for variable in model.variables:
        if id(variable) not in metrics:
            grouped[logical_path(variable)].append(variable)
    if optimizer and getattr(model, "optimizer", None) is not None:
        if not model.optimizer.built:
            optimizers.build(model.optimizer, model.trainable_variables)
        _add_optimizer(grouped, model)
    named: dict[str, Saveable] = {}
    for name, variables in grouped.items():
        if len(variables) == 1:
            named[name] = variables[0].value
        elif _is_whole(variables):
            if (dtype := variables[0].dtype) in _NO_SLICES:
                raise ValueError(
                    f"{name!r} is a table of {dtype} in {len(variables)} "
                    "shards. TensorFlow cannot restore it into another number "
                    "of shards. Use dtype='bfloat16' or `num_shards=1`."
                )
            named[name] = PartitionedVariable(
                [v.value for v in variables], list(map(runs_of, variables))
            )
        else:
            raise ValueError(
                f"Two variables of model {model.name!r} are both called "
                f"{name!r}; a checkpoint could not tell them apart. Give "
                "their layers different names."
            )
    if global_step is not None:
        if GLOBAL_STEP in named:
            raise ValueError(
                f"A variable of model {model.name!r} is called {GLOBAL_STEP!r} "
                "like the job's step counter. Give it another name."
            )
        named[GLOBAL_STEP] = global_step
    return named


def values_of(variables: Mapping[str, Any]) -> dict[str, Saveable]:
    """Maps names to variables, with Keras variables as `tf.Variable`s."""
    return {
        name: v.value if isinstance(v, keras.Variable) else v
        for name, v in variables.items()
    }


def _is_whole(shards: Sequence[keras.Variable]) -> bool:
    """Whether variables are the shards of one table, without common rows."""
    if any(shard_of(shard) is None for shard in shards):
        return False
    rows = [row for shard in shards for row, _ in runs_of(shard)]
    return len({*rows}) == len(rows)


def _add_optimizer(
    grouped: dict[str, list[keras.Variable]], model: keras.Model
) -> None:
    """Adds slots, named after their variables, and shared variables."""
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
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    every = [*parts, inner, model.optimizer]
    names += [inner.name, model.optimizer.name]
    for part, name in zip(every, names, strict=True):
        for variable in part.variables:
            if id(variable) not in seen:
                kind = slots.shared_name(part, variable)
                grouped[f"{name}/{kind}"].append(variable)
                seen.add(id(variable))


def changed_slots(saved: Iterable[str], names: Iterable[str]) -> set[str]:
    """Returns optimizer variables if slots differ since others are trained.

    >>> saved = ["a/kernel", "b/kernel", "adam/iteration"]
    >>> sorted(changed_slots(saved, [*saved, "a/kernel/adam/momentum"]))
    ['a/kernel/adam/momentum', 'adam/iteration']
    """
    both = {*saved, *names}
    end = "/iteration"
    beside = (n.rpartition("/")[0].rpartition("/") for n in both)
    have_slots = {name for head, _, name in beside if head in both}
    optimizers = {  # A layer may also have a weight with this name.
        name
        for n in both
        if n.endswith(end) and (name := n.removesuffix(end))
        if name in have_slots or f"{name}/learning_rate" in both
    }

    def variable(name: str) -> str:
        """The variable that a slot belongs to, or ""."""
        head, _, optimizer = name.rpartition("/")[0].rpartition("/")
        return head if optimizer in optimizers else ""

    changed = {*map(variable, saved)} ^ {*map(variable, names)}
    differ = {*map(variable, {*saved} ^ {*names})}
    if not changed or not differ <= changed:
        return set()
    return {
        n for n in both if variable(n) or n.rpartition("/")[0] in optimizers
    }


def missing(saved: Iterable[str], names: Iterable[str]) -> list[str]:
    """Returns the weights in `saved` that a model with `names` lacks.

    Ignores optimizer variables, random seeds, and variables that may differ.

    >>> missing(["a/bias", "a/bias/sgd/momentum", "b/bias", "sgd/iteration"],
    ...          ["a/bias"])
    ['b/bias']
    """
    saved, names, end = {*saved}, {*names}, "/iteration"
    others = {n.removesuffix(end) for n in saved if n.endswith(end)}
    others |= {_OF_STEP, SEED_STATE_NAME}
    return sorted(
        name
        for name in saved - names - {GLOBAL_STEP} - optional_names(saved, names)
        # Neither the name of a slot, nor of another optimizer variable.
        if not others.intersection(name.split("/")[-2:])
        and name.partition("/")[0] not in others
    )


def optional_names(saved: Iterable[str], names: Iterable[str]) -> set[str]:
    """Returns variables that only one side has, and that are optional.

    Learning rates, if the other side has a schedule; the counts of
    `DynamicEmbedding(admit_after=...)`, if the other side admits every id.

    >>> optional_names(["a/iteration", "a/learning_rate"], ["a/iteration"])
    {'a/learning_rate'}
    """
    one, both = {*saved} ^ {*names}, {*saved} & {*names}
    beside = {"learning_rate": "iteration", "sketch": "keys"}
    return {
        name
        for name in one
        for head, _, kind in (name.rpartition("/"),)
        if kind in beside and f"{head}/{beside[kind]}" in both
    }


def saved_shapes(path: str) -> dict[str, Sequence[int]]:
    """Maps names to shapes of all variables in a checkpoint of tfdist."""
    shapes = {
        name: shape
        for key, shape in tf.train.list_variables(path)
        if (name := name_of(key))
    }
    if not shapes:
        raise ValueError(
            f"Checkpoint {path} was not written by tfdist. If TF1 or its "
            "Estimator wrote it, choose another model_dir and pass that path "
            "as `warm_start_from`; see tfdist/MIGRATION.md."
        )
    return shapes


def other_dtypes(path: str, variables: Mapping[str, Saveable]) -> list[str]:
    """Lists the variables that checkpoint `path` has in another dtype."""
    dtypes = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    saved = {name_of(key): dtype for key, dtype in dtypes.items()}
    return [
        f"  {name}: {v.dtype.name} in the model, {saved[name].name} saved"
        for name, v in variables.items()
        if saved.get(name, v.dtype) != v.dtype
    ]


def tables_in(path: str, tables: Iterable[str]) -> dict[str, Sequence[int]]:
    """Like `saved_shapes`; raises if it lacks one of the growing tables."""
    shapes = saved_shapes(path)
    found = {n.removesuffix("/seen") for n in shapes if n.endswith("/seen")}
    if unknown := sorted({*tables} - found):
        raise ValueError(
            f"Checkpoint {path} has the growing tables {sorted(found)}. "
            f"Received: {unknown}, which it does not have."
        )
    return shapes


def name_of(key: str) -> str:
    """Returns the name of the variable of a checkpoint's key, or "".

    >>> name_of("variables/encoder..Self.Sq/.ATTRIBUTES/VARIABLE_VALUE")
    'encoder.Self/q'
    """
    if not key.startswith(_PREFIX):
        return ""
    name = key.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return re.sub(r"\.[.S]", lambda m: "." if m[0] == ".." else "/", name)


def load_variable(path: str, name: str) -> np.ndarray:
    """Returns the value of a variable in checkpoint `path`.

    >>> variables = {"weight": tf.Variable([1.0, 2.0])}
    >>> path = tfdist.checkpoint.Checkpoints(directory, variables).save(1)
    >>> tfdist.checkpoint.load_variable(path, "weight")
    array([1., 2.], dtype=float32)
    """
    key = name.replace(".", "..").replace("/", ".S")
    return tf.train.load_variable(path, f"{_PREFIX}{key}{_SUFFIX}")


def load_rows(
    path: str, table: str
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Reads the ids, rows and slots of a `DynamicEmbedding`.

    `path` is a checkpoint, or a directory whose newest one is read; `table` is
    the path of the layer. Returns, in no particular order, ids int64 `(n,)`,
    rows `(n, output_dim)`, and arrays like the rows by the optimizer's names of
    slots. The ids of strings are `tf.bitcast(tf.fingerprint(strings),
    tf.int64)`. Needs memory for the results, plus twice that of all saved rows
    (or of a slot), including unused ones.

    >>> def model_fn():
    ...     ids = keras.Input([], dtype="int64")
    ...     table = tfdist.DynamicEmbedding(2, capacity=4096, name="table")
    ...     model = keras.Model(ids, table(ids))
    ...     model.compile("adagrad", "mse")
    ...     return model
    >>> data = np.array([5, -7]), np.zeros([2, 2])
    >>> quiet = {"model_dir": directory, "log_step_count_steps": None}
    >>> _ = tfdist.fit(model_fn, data, **quiet)
    >>> ids, rows, slots = tfdist.checkpoint.load_rows(directory, "table")
    >>> sorted(ids.tolist()), rows.shape, [*slots]
    ([-7, 5], (2, 2), ['accumulator'])

    Raises:
        ValueError: there is no such table; the message lists those there are.
    """
    # Resolved once: a job may write the next checkpoint meanwhile.
    path = tf.train.latest_checkpoint(path) or path
    shapes, name = tables_in(path, [table]), f"{table}/embeddings"
    keys = load_variable(path, f"{table}/keys").ravel()
    live = np.flatnonzero(keys)
    slots = {
        slot.rpartition("/")[-1]: load_variable(path, slot)[live]
        for slot, shape in shapes.items()
        if slot.startswith(f"{name}/") and shape == shapes[name]
    }
    rows = load_variable(path, name)[live]
    return unmixed(keys[live]), rows, slots


def step_of(path: str) -> int:
    """Returns the step at which checkpoint `path` was written.

    >>> variables = {"global_step": tf.Variable(7, dtype=tf.int64)}
    >>> path = tfdist.checkpoint.Checkpoints(directory, variables).save(7)
    >>> tfdist.checkpoint.step_of(path)
    7
    """
    saved_shapes(path)  # Raises if it is not one of tfdist's.
    return int(load_variable(path, GLOBAL_STEP))

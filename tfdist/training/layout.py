"""Maps servers to the variables that a pass over a model reads and updates."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.private_keras import SEED_STATE_NAME
from tfdist.embeddings.growing import TracedShards, growing_of
from tfdist.training import optimizer_checks, optimizers


class Updated(NamedTuple):
    """A part of a model with its own optimizer."""

    optimizer: keras.optimizers.Optimizer
    trainable_variables: list[keras.Variable]
    non_trainable_variables: Sequence[keras.Variable] = ()


class Server(NamedTuple):
    """The variables that one server holds."""

    device: str  # "" is where the step runs.
    reads: list[int]  # Indices in `Layout.reads`.
    shards: dict[int, list[keras.Variable]]  # By index of the group of tables.
    trained: dict[int, list[keras.Variable]]  # Only trainable groups.
    growing: dict[int, TracedShards]  # All shards of groups that grow.
    updates: dict[Any, Any]  # See `functions` of `optimizers.apply`.


class Layout:
    """Maps servers to the variables that a pass reads and updates.

    Args:
        model: A built model with a built optimizer, or a part of it.
        tables: Its `PartitionedEmbedding` layers that the pass looks up.
        remote: Whether the variables live in other processes, identified by
            device. Otherwise all are on the device that runs the step.
        assigns: Whether to assign new values to `moving`, as nobody else
            changes it. Adding a difference fails at infinity, and is inexact.
        others: Tables that the pass never reads.
        rates: The variables in `Counters.reads`.

    Attributes:
        groups: The tables, grouped by width and optimizer.
        dense: Trainable variables that are read as a whole.
        moving: Other variables that are read and changed (moving averages).
        reads: All variables read as a whole: `dense`, `moving`, `rates`.
        sums: Indices in `reads` of counters (`aggregation="sum"`), for which
            the changes by several replicas are summed.
        parts: The optimizers that the model's optimizer consists of.
        owners: For each variable in `dense`, the index of its part.
        servers: The variables that each server holds.
    """

    def __init__(
        self,
        model: keras.Model | Updated,
        tables: Sequence[Any],
        *,
        remote: bool,
        assigns: bool = False,
        others: Sequence[Any] = (),
        rates: Sequence[keras.Variable] = (),
    ) -> None:
        self.remote, self.assigns = remote, assigns
        self.parts = optimizers.parts(model.optimizer)
        self._trained = {id(v) for v in model.trainable_variables}
        by_width = collections.defaultdict(list)
        for table in tables:
            part = alone = None
            if id(table.shards[0]) in self._trained:
                part = optimizers.owner(model.optimizer, table.shards[0])
                # `clipnorm` needs the rows of one variable by themselves.
                by_norm = optimizers.limit(self.parts[part], "clipnorm")
                alone = id(table) if by_norm else None
            key = table.output_dim, table.variable_dtype, part, alone
            by_width[*key, table.group_key].append(table)
        self.groups = [
            tables[0].group_type(tables, part, self.device_of)
            for (_, _, part, *_), tables in by_width.items()
        ]
        for group in self.groups:
            for shard in group.shards if group.part is not None else ():
                optimizers.check_rows(self.parts[group.part], shard)
        is_split = any(len(group.shards) > 1 for group in self.groups)
        for part in self.parts if remote or is_split else ():
            optimizer_checks.check_norms(part, remote)
        held = {id(v) for table in (*tables, *others) for v in table.pieces}
        self.dense = [v for v in model.trainable_variables if id(v) not in held]
        self.owners = [optimizers.owner(model.optimizer, v) for v in self.dense]
        fixed = [v for v in model.non_trainable_variables if id(v) not in held]
        self.moving = [v for v in fixed if not is_seed(v)]
        self.reads = [*self.dense, *self.moving, *rates]
        counts = [v.aggregation == "sum" for v in self.moving]
        self.sums = {
            i for i, is_sum in enumerate(counts, len(self.dense)) if is_sum
        }
        shards = [s for group in self.groups for s in group.shards]
        devices = sorted({self.device_of(v) for v in [*self.reads, *shards]})
        self.servers = [self._server(device) for device in devices]

    def _server(self, device: str) -> Server:
        reads = [
            i for i, v in enumerate(self.reads) if self.device_of(v) == device
        ]
        shards = {
            g: [v for v in group.shards if self.device_of(v) == device]
            for g, group in enumerate(self.groups)
            if device in group.num_shards
        }
        trained = {
            g: v for g, v in shards.items() if self.groups[g].part is not None
        }
        growing = {
            g: TracedShards(v) for g, v in shards.items() if growing_of(v[0])
        }
        return Server(device, reads, shards, trained, growing, {})

    def device_of(self, variable: keras.Variable | tf.Variable) -> str:
        """The server that holds a variable; "" is where the step runs."""
        if isinstance(variable, keras.Variable):
            variable = variable.value
        return variable.device if self.remote else ""

    def warn_of_missing(self, gradients: Sequence[tf.Tensor | None]) -> None:
        """Warns, as Keras does, of variables the loss does not depend on.

        `gradients`: those of `dense`, then those of the rows of each group.
        """
        trained = [[v] for v in self.dense]
        trained += [g.tables if g.part is not None else [] for g in self.groups]
        missing = [
            each.path
            for own, gradient in zip(trained, gradients, strict=True)
            for each in own
            if gradient is None
        ]
        if missing:
            warnings.warn(
                f"Gradients do not exist for variables {missing} when "
                "minimizing the loss, which does not depend on them.",
                stacklevel=2,
            )

    def check_read(self, read: Sequence[keras.Variable]) -> None:
        """Raises `ValueError` if a table that is looked up is in `read`."""
        shards = {id(s) for group in self.groups for s in group.shards}
        for variable in read:
            if id(variable) in shards & self._trained:
                raise ValueError(
                    f"The model looks up rows of {variable.path!r}, and also "
                    "reads it as a whole, but the gradient of that would be "
                    "ignored. Look up only the rows that you need, or use "
                    "keras.layers.Embedding."
                )

    def check_updated(self, updated: Sequence[keras.Variable]) -> None:
        """Raises `ValueError` if a pass assigns what the optimizer updates.

        Also if an assigned variable begins at infinity, to which no difference
        can be added, or if a gradient is the next value, as for float8.
        """
        for variable in self.dense:
            if variable.overwrite_with_gradient:
                raise ValueError(
                    f"The gradient of {variable.path!r} is its next value: "
                    "layers quantized to float8 update their scales in this "
                    "way. tfdist would apply it as a gradient. Train in "
                    "mixed_bfloat16, or with Keras' `fit`."
                )
        adds = set() if self.assigns else {id(v) for v in self.moving}
        for variable in updated:
            if id(variable) in self._trained:
                raise ValueError(
                    f"The model assigns variable {variable.path!r} while it is "
                    "called in training, as SpectralNormalization does, and "
                    "the optimizer updates the same variable. Give the layer a "
                    "`kernel_constraint`, which is applied after each update, "
                    "or override `train_step`, on one device."
                )
            is_added = id(variable) in adds and "float" in variable.dtype
            if is_added and not np.isfinite(variable.numpy()).all():
                raise ValueError(
                    f"The model assigns weight {variable.path!r}, so workers "
                    "and devices add up its changes, but its initial value is "
                    "not finite. Use one near the values that you expect."
                )


def is_seed(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a random generator."""
    return variable.path.endswith(SEED_STATE_NAME)

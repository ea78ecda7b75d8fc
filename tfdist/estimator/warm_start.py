"""Warm start: the weights of a new model from an older one's checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.private_checkpoints import Saveable
from tfdist.checkpoint import checkpoints
from tfdist.embeddings.filling import fill
from tfdist.embeddings.growing import growing_of
from tfdist.embeddings.layer import logical_path
from tfdist.hooks.session_run_hook import Session, SessionRunHook
from tfdist.training import optimizers
from tfdist.training.layout import is_seed

_log = logging.getLogger(__name__)

_Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Which weights a new job takes from which checkpoint.

    As `tf.estimator.WarmStartSettings`; for its `var_name_to_vocab_info` there
    is `var_name_to_ids`.

    >>> settings = tfdist.WarmStartSettings(
    ...     "old_job", vars_to_warm_start="embedding")
    >>> settings.ckpt_to_initialize_from
    'old_job'

    Attributes:
        ckpt_to_initialize_from: A checkpoint, or a directory with some.
        vars_to_warm_start: Regular expression that a weight's name must match
            somewhere, or a list of such; not trained ones too, unlike in TF.
            Slots and counters are never taken. Default: all. None: those of
            `var_name_to_ids` alone.
        var_name_to_prev_var_name: Names in the checkpoint, of variables that
            had another name there.
        var_name_to_ids: For a `DynamicEmbedding` that takes the rows of a
            table with a vocabulary: `<layer>/embeddings` to the ids of the rows
            there, one for each, int or str; `range(n)` where ids are row
            numbers. They have rows at once, whatever `admit_after` is.

    Raises:
        ValueError: `ckpt_to_initialize_from` is empty.
    """

    ckpt_to_initialize_from: _Path
    vars_to_warm_start: str | list[str] | None = ".*"
    var_name_to_prev_var_name: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )
    var_name_to_ids: Mapping[str, Sequence[int] | Sequence[str]] = (
        dataclasses.field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        if not self.ckpt_to_initialize_from:
            raise ValueError(
                "Argument `ckpt_to_initialize_from` must be the path of a "
                f"checkpoint. Received: {self.ckpt_to_initialize_from!r}."
            )


class WarmStartHook(SessionRunHook):
    """Takes the weights when a job begins; a job that goes on has its own."""

    def __init__(self, settings: WarmStartSettings | _Path) -> None:
        if not isinstance(settings, WarmStartSettings):
            settings = WarmStartSettings(settings)
        self._settings = settings

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Assigns the weights, unless the session was restored."""
        if session.restored_from is None:
            model = session.model
            assert model is not None  # An `Estimator` always has one.
            self.assign(model, session.variables)
            optimizers.begin(model.optimizer, model.trainable_variables)

    def assign(
        self, model: keras.Model, variables: Mapping[str, Saveable]
    ) -> None:
        """Assigns the weights of a new model; `variables` are those it has."""
        settings = self._settings
        given = os.fspath(settings.ckpt_to_initialize_from)
        path = checkpoints.latest(given) if tf.io.gfile.isdir(given) else given
        if not (path and tf.io.gfile.exists(f"{path}.index")):
            raise ValueError(
                f"There is no checkpoint to start warm from at {given!r}."
            )
        patterns = settings.vars_to_warm_start or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        names = {logical_path(v) for v in model.weights if not is_seed(v)}
        renamed = settings.var_name_to_prev_var_name
        chosen = {n for n in names if any(re.search(p, n) for p in patterns)}
        tables = {
            logical_path(growing.shard): growing.table
            for growing in filter(None, map(growing_of, model.weights))
        }
        filled = settings.var_name_to_ids
        for name in filled.keys() & tables.keys():
            chosen -= {*map(logical_path, tables[name].pieces)}
        _check_whole(model, chosen)
        unknown = filled.keys() - tables.keys()
        unknown |= renamed.keys() - chosen - filled.keys()
        if unknown or not (chosen or filled):
            raise ValueError(
                "A warm start must name variables of the model, and rename "
                "those alone that it takes. Received: "
                f"vars_to_warm_start={settings.vars_to_warm_start!r}, "
                f"var_name_to_prev_var_name={dict(renamed)}, var_name_to_ids "
                f"of {[*filled]}; the model has "
                f"{sorted(names)}, of growing tables {sorted(tables)}."
            )
        left = sorted(chosen)
        while left:
            # Some may be given the same.
            taken = {renamed.get(n, n): n for n in left}
            values = {before: variables[n] for before, n in taken.items()}
            checkpoints.restore(path, values)
            left = [n for n in left if n not in taken.values()]
        for name, ids in filled.items():
            before = renamed.get(name, name)
            if before not in checkpoints.saved_shapes(path):
                raise ValueError(
                    f"Checkpoint {path} has no variable {before!r}, the ids of "
                    "whose rows `var_name_to_ids` lists. If it had another "
                    "name there, say so by `var_name_to_prev_var_name`."
                )
            fill(tables[name], ids, checkpoints.load_variable(path, before))
        for growing in filter(None, map(growing_of, model.weights)):
            # It was seen in steps of the other job.
            growing.seen.value.assign(tf.zeros_like(growing.seen.value))
        number = len(chosen) + len(filled)
        _log.info("Warm start: %d variables from %s.", number, path)


def _check_whole(model: keras.Model, chosen: set[str]) -> None:
    """Raises `ValueError` for rows of a growing table without their ids."""
    for growing in filter(None, map(growing_of, model.weights)):
        pieces = {logical_path(piece) for piece in growing.pieces}
        if len(pieces & chosen) not in (0, len(pieces)):
            raise ValueError(
                "A warm start takes all variables of a DynamicEmbedding, which "
                f"say whose its rows are, or none. Received a pattern for "
                f"{sorted(pieces & chosen)} and not for "
                f"{sorted(pieces - chosen)}. Choose them by the layer's name, "
                f"{growing.table.path!r}."
            )

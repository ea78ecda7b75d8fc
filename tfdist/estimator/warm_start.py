"""Warm start: initializes a new model with weights from a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_type
from tfdist._tf.private_checkpoints import Saveable
from tfdist.checkpoint import checkpoints
from tfdist.checkpoint import estimator_checkpoint as of_tf1
from tfdist.checkpoint.names import name_of
from tfdist.embeddings.filling import fill
from tfdist.embeddings.growing import Growing, growing_of
from tfdist.embeddings.layer import logical_path
from tfdist.estimator import results
from tfdist.hooks.session_run_hook import Session, SessionRunHook
from tfdist.training import optimizers
from tfdist.training.layout import is_seed

_log = logging.getLogger(__name__)

VocabInfo: TypeAlias = tf.compat.v1.train.VocabInfo
_Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Which weights a new job takes from which checkpoint.

    Like `tf.estimator.WarmStartSettings`, plus `var_name_to_ids`.

    >>> settings = tfdist.WarmStartSettings(
    ...     "old_job", vars_to_warm_start="embedding")
    >>> settings.ckpt_to_initialize_from
    'old_job'

    Attributes:
        ckpt_to_initialize_from: A checkpoint or a directory of checkpoints, or
            those of TF1 or its Estimator (canned models' names are translated).
        vars_to_warm_start: Regular expression to search for in the names of
            weights, or a list of them; unlike in TF, it also selects
            non-trainable weights. A list also restores the slots, for which
            the optimizer must be the same, and, if all trainable weights are
            selected, its counters; not the learning rate and, unlike in TF, not
            the global step. Default: all weights. None: only those of
            `var_name_to_vocab_info` and `var_name_to_ids`.
        var_name_to_vocab_info: Maps weights to
            `tf.compat.v1.train.VocabInfo`s, for embedding tables whose
            vocabulary has changed: words of the old vocabulary keep their rows;
            new words and OOV buckets use the layer's initializer. Unlike in TF
            there is no `backup_initializer`, and `axis` must be 0.
        var_name_to_prev_var_name: Maps weights to their names in the
            checkpoint, where these differ.
        var_name_to_ids: For a `DynamicEmbedding` initialized from a static
            embedding table: maps `<layer>/embeddings` to the ids of the table's
            rows, int or str; `range(n)` if ids are row numbers. These ids are
            admitted immediately, whatever `admit_after` is.

    Raises:
        ValueError: `ckpt_to_initialize_from` is empty; an invalid `VocabInfo`,
            or one with an unsupported argument.
    """

    ckpt_to_initialize_from: _Path
    vars_to_warm_start: str | list[str] | None = ".*"
    var_name_to_vocab_info: Mapping[str, VocabInfo] = dataclasses.field(
        default_factory=dict
    )
    var_name_to_prev_var_name: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )
    var_name_to_ids: Mapping[str, Sequence[int] | Sequence[str]] = (
        dataclasses.field(default_factory=dict)
    )

    def __post_init__(self) -> None:
        name = "ckpt_to_initialize_from"
        check_type(name, self.ckpt_to_initialize_from, str | os.PathLike)
        if not self.ckpt_to_initialize_from:
            raise ValueError(
                "Argument `ckpt_to_initialize_from` must be the path of a "
                f"checkpoint. Received: {self.ckpt_to_initialize_from!r}."
            )
        for name, info in self.var_name_to_vocab_info.items():
            if getattr(info, "axis", None) != 0 or info.backup_initializer:
                raise ValueError(
                    "Argument `var_name_to_vocab_info` must map names to "
                    "`tf.compat.v1.train.VocabInfo`s with axis 0 and without "
                    "`backup_initializer` (the layer initializes new rows). "
                    f"Received: {info!r} for {name!r}."
                )


class WarmStartHook(SessionRunHook):
    """Assigns the weights when a job begins, but not when it resumes."""

    def __init__(self, settings: WarmStartSettings | _Path) -> None:
        if not isinstance(settings, WarmStartSettings):
            settings = WarmStartSettings(settings)
        self._settings = settings

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Assigns the weights, unless the session was restored."""
        if session.restored_from is not None:
            _log.info(
                "No warm start from %s: the job resumes from %s.",
                self._settings.ckpt_to_initialize_from,
                session.restored_from,
            )
            return
        model = session.model
        assert model is not None  # An `Estimator` always has one.
        saved = self._checkpoint()  # Once: a newer one may appear meanwhile.
        before = self._assign_weights(saved, model, session.variables)
        optimizers.begin(model.optimizer, model.trainable_variables)
        if isinstance(self._settings.vars_to_warm_start, list | tuple):
            self._assign_slots(saved, model, session.variables, before)
        else:
            _warn_of_ftrl(model, before)

    def assign(
        self, model: keras.Model, variables: Mapping[str, Saveable]
    ) -> None:
        """Assigns the weights of a new model with these `variables`."""
        self._assign_weights(self._checkpoint(), model, variables)

    def _assign_weights(
        self,
        saved: _Checkpoint,
        model: keras.Model,
        variables: Mapping[str, Saveable],
    ) -> dict[str, str]:
        """Like `assign`; returns the assigned weights' names in `saved`."""
        settings = self._settings
        patterns = settings.vars_to_warm_start or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        names = {logical_path(v) for v in model.weights if not is_seed(v)}
        renamed = settings.var_name_to_prev_var_name
        chosen = {n for n in names if any(re.search(p, n) for p in patterns)}
        growing = [*filter(None, map(growing_of, model.weights))]
        tables = {logical_path(each.shard): each.table for each in growing}
        vocabularies = settings.var_name_to_vocab_info
        chosen |= names & vocabularies.keys()
        filled = settings.var_name_to_ids
        for name in filled.keys() & tables.keys():
            chosen -= {*map(logical_path, tables[name].pieces)}
        _check_whole(growing, chosen)
        unknown = filled.keys() - tables.keys() | vocabularies.keys() - chosen
        unknown |= renamed.keys() - chosen - filled.keys()
        if unknown or not (chosen or filled):
            raise ValueError(
                "A warm start must name variables of the model, and may rename "
                "only variables that it restores. Received: "
                f"vars_to_warm_start={settings.vars_to_warm_start!r}, "
                f"var_name_to_vocab_info for {[*vocabularies]}, "
                f"var_name_to_prev_var_name={dict(renamed)}, var_name_to_ids "
                f"for {[*filled]}; the model has the variables {sorted(names)} "
                f"and the growing tables {sorted(tables)}."
            )
        before = {n: renamed.get(n) or saved.weight(n) for n in sorted(chosen)}
        saved.restore(before, variables, vocabularies)
        for name, ids in filled.items():
            fill(tables[name], ids, saved.table(renamed.get(name, name)))
        for each in growing:  # Its values are steps of the other job.
            each.seen.value.assign(tf.zeros_like(each.seen.value))
        number = len(chosen) + len(filled)
        _log.info("Warm start: %d variables from %s.", number, saved.path)
        return before

    def _checkpoint(self) -> _Checkpoint:
        given = os.fspath(self._settings.ckpt_to_initialize_from)
        path = checkpoints.latest(given) if tf.io.gfile.isdir(given) else given
        if not (path and tf.io.gfile.exists(f"{path}.index")):
            raise ValueError(
                f"There is no checkpoint for a warm start at {given!r}."
            )
        return _Checkpoint(path)

    def _assign_slots(
        self,
        saved: _Checkpoint,
        model: keras.Model,
        variables: Mapping[str, Saveable],
        weights: Mapping[str, str],
    ) -> None:
        """Assigns the optimizer's slots of `weights`, and its counters."""
        optimizer = model.optimizer
        names = optimizers.part_names(optimizer)
        parts = zip(names, optimizers.parts(optimizer), strict=True)
        rules = {name: type(part).__name__ for name, part in parts}
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        counting = {*rules, inner.name, optimizer.name}
        every = {logical_path(v) for v in model.trainable_variables}
        whole = every <= weights.keys()
        infos = self._settings.var_name_to_vocab_info
        before, changed = {}, {}
        for name in variables.keys() - {logical_path(v) for v in model.weights}:
            rest, _, kind = name.rpartition("/")
            weight, _, part = rest.rpartition("/")
            if weight in weights and part in rules:
                before[name] = saved.slot(weights[weight], rules, part, kind)
                if weight in infos:
                    changed[name] = infos[weight]
            elif whole and rest in counting and kind != "learning_rate":
                before[name] = saved.counter(name)
        if missing := sorted({*before.values()} - saved.names):
            string = "|".join(self._settings.vars_to_warm_start or [])
            raise ValueError(
                f"Checkpoint {saved.path} has no {missing}. As in TF, a list "
                "in `vars_to_warm_start` also restores slots, which needs the "
                f"same optimizer; the string {string!r} restores only weights."
            )
        saved.restore(before, variables, changed)


class _Checkpoint:
    """The checkpoint a warm start reads, written by tfdist or TF1."""

    def __init__(self, path: str) -> None:
        self.path = path
        with results.reading(path):
            keys = {key for key, _ in tf.train.list_variables(path)}
        names = {*map(name_of, keys)} - {""}
        self._is_of_tf1 = not names
        self.names = names or keys

    def weight(self, name: str) -> str:
        """Returns the name of a weight in the checkpoint."""
        tf1 = self._is_of_tf1
        return of_tf1.saved_weight_name(name, self.names) if tf1 else name

    def slot(
        self, weight: str, rules: Mapping[str, str], part: str, kind: str
    ) -> str:
        """Returns the name of a weight's slot in the checkpoint."""
        if self._is_of_tf1:
            return of_tf1.saved_slot_name(weight, rules[part], kind, self.names)
        return f"{weight}/{part}/{kind}"

    def counter(self, name: str) -> str:
        """Returns the name of an optimizer's counter in the checkpoint."""
        is_iteration = name.endswith("/iteration")
        return "global_step" if self._is_of_tf1 and is_iteration else name

    def restore(
        self,
        names: Mapping[str, str],
        variables: Mapping[str, Saveable],
        vocabularies: Mapping[str, VocabInfo],
    ) -> None:
        """Restores `variables`; `names` maps them to the checkpoint's names."""
        for name, info in vocabularies.items():
            _assign_words(variables[name], self.table(names[name]), info)
        restore = of_tf1.restore if self._is_of_tf1 else checkpoints.restore
        left = {n: names[n] for n in names.keys() - vocabularies.keys()}
        while left:  # Several variables may share a source.
            taken = {before: name for name, before in left.items()}
            values = {before: variables[n] for before, n in taken.items()}
            try:
                restore(self.path, values)
            except ValueError as error:
                error.add_note(
                    "For a warm start, leave such variables out of "
                    "`vars_to_warm_start`, or describe them in "
                    "`var_name_to_prev_var_name` or `var_name_to_vocab_info`."
                )
                raise
            left = {n: b for n, b in left.items() if n not in taken.values()}

    def table(self, name: str) -> np.ndarray:
        """Returns the value of an embedding table."""
        if name not in self.names:
            raise ValueError(
                f"Checkpoint {self.path} has no variable {name!r}, named in "
                "`var_name_to_ids` or `var_name_to_vocab_info`. If its name "
                "differs there, set `var_name_to_prev_var_name`."
            )
        library = tf.train if self._is_of_tf1 else checkpoints
        return library.load_variable(self.path, name)


def _assign_words(variable: Saveable, old: np.ndarray, info: VocabInfo) -> None:
    """Assigns the rows of `old` to the same words of the new vocabulary."""
    words = _words(info.new_vocab, info.new_vocab_size)
    old_words = _words(info.old_vocab, info.old_vocab_size)
    value = variable.numpy()
    size = len(words) + info.num_oov_buckets
    if (
        len(value) != size
        or len(old_words) > len(old)
        or value.shape[1:] != old.shape[1:]
    ):
        raise ValueError(
            f"A table of shape {value.shape}, previously {old.shape}, does not "
            f"fit {len(words)} words and {info.num_oov_buckets} buckets for "
            f"others, previously {len(old_words)} words. Received: {info}."
        )
    rows = {word: row for row, word in enumerate(old_words)}
    kept = [row for row, word in enumerate(words) if word in rows]
    value[kept] = old[[rows[words[row]] for row in kept]]
    variable.assign(value)


def _words(path: str, size: int) -> list[bytes]:
    """Returns the first `size` words of a vocabulary file; -1: all."""
    return list(tf.data.TextLineDataset(path).take(size).as_numpy_iterator())


def _warn_of_ftrl(model: keras.Model, weights: Collection[str]) -> None:
    """Warns of Ftrl, which computes weights from its (new) slots."""
    optimizer, ftrl = model.optimizer, keras.optimizers.Ftrl
    parts = optimizers.parts(optimizer)
    lost = {
        logical_path(v)
        for v in model.trainable_variables
        if isinstance(parts[optimizers.owner(optimizer, v)], ftrl)
    } & {*weights}
    if lost:
        _log.warning(
            "Ftrl computes weights from its slots: as these begin anew, the "
            "first step will forget %s. A list in `vars_to_warm_start`, such "
            "as ['.*'], takes the slots too.",
            sorted(lost),
        )


def _check_whole(growing: Iterable[Growing], chosen: set[str]) -> None:
    """Raises `ValueError` if only part of a growing table is selected."""
    for each in growing:
        pieces = {logical_path(piece) for piece in each.pieces}
        if len(pieces & chosen) not in (0, len(pieces)):
            raise ValueError(
                "A warm start restores all variables of a DynamicEmbedding or "
                f"none. Received patterns for {sorted(pieces & chosen)}, but "
                f"not for {sorted(pieces - chosen)}. Select them by the "
                f"layer's name, {each.table.path!r}."
            )

"""Warm start: the weights of a new model from an older one's checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist.checkpoint import checkpoints
from tfdist.embeddings.layer import logical_path
from tfdist.hooks.session_run_hook import Session, SessionRunHook

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Which weights a new job takes from which checkpoint.

    As `tf.estimator.WarmStartSettings`, without `var_name_to_vocab_info`.

    >>> settings = tfdist.WarmStartSettings(
    ...     "old_job", vars_to_warm_start="embedding")
    >>> settings.ckpt_to_initialize_from
    'old_job'

    Attributes:
        ckpt_to_initialize_from: A checkpoint, or a directory with some.
        vars_to_warm_start: Regular expression that a trainable variable's name
            must match somewhere, or a list of such. Slots and counters are
            never taken. Default: all.
        var_name_to_prev_var_name: Names in the checkpoint, of variables that
            had another name there.

    Raises:
        ValueError: `ckpt_to_initialize_from` is empty.
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | list[str] = ".*"
    var_name_to_prev_var_name: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if not self.ckpt_to_initialize_from:
            raise ValueError(
                "Argument `ckpt_to_initialize_from` must be the path of a "
                f"checkpoint. Received: {self.ckpt_to_initialize_from!r}."
            )


class WarmStartHook(SessionRunHook):
    """Takes the weights when a job begins; a job that goes on has its own."""

    def __init__(self, settings: WarmStartSettings | str) -> None:
        if isinstance(settings, str):
            settings = WarmStartSettings(settings)
        self._settings = settings

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Assigns the weights, unless the session was restored."""
        if session.restored_from is not None:
            return
        settings = self._settings
        given = settings.ckpt_to_initialize_from
        path = checkpoints.latest(given) if tf.io.gfile.isdir(given) else given
        if not (path and tf.io.gfile.exists(f"{path}.index")):
            raise ValueError(
                f"There is no checkpoint to start warm from at {given!r}."
            )
        patterns = settings.vars_to_warm_start
        patterns = [patterns] if isinstance(patterns, str) else patterns
        assert session.model is not None  # An `Estimator` always has one.
        names = {logical_path(v) for v in session.model.trainable_variables}
        renamed = settings.var_name_to_prev_var_name
        taken = {
            renamed.get(name, name): session.variables[name]
            for name in sorted(names)
            if any(re.search(pattern, name) for pattern in patterns)
        }
        unknown = sorted(set(renamed) - names)
        if unknown or not taken:
            raise ValueError(
                "A warm start must name variables of the model. Received: "
                f"vars_to_warm_start={settings.vars_to_warm_start!r}, "
                f"var_name_to_prev_var_name={dict(renamed)}; the model has "
                f"{sorted(names)}."
            )
        checkpoints.restore(path, taken)
        _log.info("Warm start: %d variables from %s.", len(taken), path)

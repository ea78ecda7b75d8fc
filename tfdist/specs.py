"""What a job is told: `RunConfig`, `TrainSpec`, `EvalSpec`.

Frozen values, checked when they are made. As in `tf.estimator`, what the model
computes is no part of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tfdist.cluster import Cluster
from tfdist.exporters import Exporter
from tfdist.saving_hooks import CheckpointSaverListener
from tfdist.variables import VariableSpec

InputFn = Callable[..., tf.data.Dataset]

_DEFAULT_SAVE_SECS = 600


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a job runs; what it computes is the model function's matter.

    As `tf.estimator.RunConfig`, for the fields it shares with it.

    Attributes:
        model_dir: Directory of checkpoints, summaries and exports, shared by
            all tasks (`gs://` works).
        tf_random_seed: Seeds Python, NumPy and the initializers. Default: none.
        save_summary_steps: Steps between TensorBoard scalars; 0 for none.
        save_checkpoints_steps: Steps between checkpoints.
        save_checkpoints_secs: Seconds between checkpoints. At most one of the
            two; neither means every 600 s.
        keep_checkpoint_max: Most recent checkpoints kept; 0 or None keeps all.
        keep_checkpoint_every_n_hours: Also keeps one per so many hours.
        log_step_count_steps: Steps between progress lines.
        steps_per_dispatch: Steps a worker runs per request (decision D4).
            Default: up to ten, fewer for models of many variables.
        placement: Which parameter server holds a variable: "round_robin",
            "greedy" or "planned" (see `tfdist.strategy.placement_by_name`), or
            a callable from a `VariableSpec` to the index of a server.
        session_creation_timeout_secs: Seconds the chief waits for workers and
            ps that are missing, at the start and after one was lost.
        evaluator_timeout_secs: Seconds the chief waits at the end for the
            evaluator's last result.
        cluster: Default: from the environment.

    Raises:
        ValueError: a value out of range, or both `save_checkpoints_*`.
    """

    model_dir: str
    _: dataclasses.KW_ONLY
    tf_random_seed: int | None = None
    save_summary_steps: int = 100
    save_checkpoints_steps: int | None = None
    save_checkpoints_secs: float | None = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float | None = None
    log_step_count_steps: int = 100
    steps_per_dispatch: int | None = None
    placement: str | Callable[[VariableSpec], int] = "round_robin"
    session_creation_timeout_secs: float = 600.0
    evaluator_timeout_secs: float = 600.0
    cluster: Cluster = dataclasses.field(default_factory=Cluster.from_env)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_dir", _directory(self.model_dir))
        if self.save_checkpoints_steps and self.save_checkpoints_secs:
            raise ValueError(
                "Only one of `save_checkpoints_steps` and "
                "`save_checkpoints_secs` can be set. Received: "
                f"save_checkpoints_steps={self.save_checkpoints_steps}, "
                f"save_checkpoints_secs={self.save_checkpoints_secs}."
            )
        for name, least in (
            ("save_summary_steps", 0),
            ("save_checkpoints_steps", 1),
            ("save_checkpoints_secs", 1e-9),
            ("keep_checkpoint_max", 0),
            ("keep_checkpoint_every_n_hours", 1e-9),
            ("log_step_count_steps", 1),
            ("steps_per_dispatch", 1),
            ("session_creation_timeout_secs", 0),
            ("evaluator_timeout_secs", 0),
        ):
            check_at_least(name, getattr(self, name), least)
        check_type("cluster", self.cluster, Cluster)

    def replace(self, **changes: Any) -> RunConfig:
        """A copy in which some fields have other values.

        As in TF1, a new `save_checkpoints_steps` drops
        `save_checkpoints_secs`, and the other way round.

        Raises:
            TypeError: there is no such field.
        """
        one, other = "save_checkpoints_steps", "save_checkpoints_secs"
        for given, dropped in ((one, other), (other, one)):
            if changes.get(given) is not None:
                changes.setdefault(dropped, None)
        return dataclasses.replace(self, **changes)

    @property
    def checkpoint_secs(self) -> float | None:
        """Seconds between checkpoints; None where steps decide."""
        if self.save_checkpoints_steps:
            return None
        return self.save_checkpoints_secs or _DEFAULT_SAVE_SECS


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What to train on, as `tf.estimator.TrainSpec`.

    Attributes:
        input_fn: Returns a `tf.data.Dataset` of batches; may have one
            argument without a default, which then gets the
            `tf.distribute.InputContext` that says which part of the data the
            calling worker shall read.
        max_steps: Step at which training ends; None: when the data ends.
        hooks: Run after tfdist's own; those written for TF1 that touch no
            graph run as they are.
        saving_listeners: Told of each checkpoint, before it is evaluated.
    """

    input_fn: InputFn
    max_steps: int | None = None
    hooks: tuple[tf.compat.v1.train.SessionRunHook, ...] = ()
    saving_listeners: tuple[CheckpointSaverListener, ...] = ()

    def __post_init__(self) -> None:
        check_callable("input_fn", self.input_fn)
        check_at_least("max_steps", self.max_steps, 1)
        hooks = tuple(self.hooks)
        for hook in hooks:
            check_type("hooks", hook, tf.compat.v1.train.SessionRunHook)
        object.__setattr__(self, "hooks", hooks)
        listeners = tuple(self.saving_listeners)
        for listener in listeners:
            check_type("saving_listeners", listener, CheckpointSaverListener)
        object.__setattr__(self, "saving_listeners", listeners)


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate on, as `tf.estimator.EvalSpec`.

    Attributes:
        input_fn: Returns a `tf.data.Dataset` of batches.
        steps: Batches per evaluation at most; None: the whole dataset.
        name: Results go to `<model_dir>/eval_<name>`. Default: `eval`.
        exporters: Exporters run after each evaluation.
        start_delay_secs: Seconds an evaluator task waits before it begins.
        throttle_secs: Least seconds between two evaluations; the final one is
            never delayed.
    """

    input_fn: InputFn
    steps: int | None = 100
    name: str | None = None
    exporters: tuple[Exporter, ...] = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        check_callable("input_fn", self.input_fn)
        check_at_least("steps", self.steps, 1)
        check_at_least("start_delay_secs", self.start_delay_secs, 0)
        check_at_least("throttle_secs", self.throttle_secs, 0)
        exporters = self.exporters
        if isinstance(exporters, Exporter):
            exporters = (exporters,)
        object.__setattr__(self, "exporters", _checked(exporters))


def takes_context(input_fn: InputFn) -> bool:
    """Whether an input function has an argument without a default."""
    parameters = inspect.signature(input_fn).parameters.values()
    return any(p.default is p.empty for p in parameters)


def with_context(input_fn: InputFn) -> InputFn:
    """The user's input function, made to take an `InputContext`."""
    return input_fn if takes_context(input_fn) else lambda context: input_fn()


def without_context(input_fn: InputFn) -> Callable[[], tf.data.Dataset]:
    """The user's input function, made to take nothing."""
    if not takes_context(input_fn):
        return input_fn
    return lambda: input_fn(tf.distribute.InputContext())


def _directory(path: str | os.PathLike) -> str:
    """A path to which `/name` can be appended, also on `gs://`.

    There `a//b` is another object than `a/b`, and what Vertex AI sets ends in
    a slash.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            "Argument `model_dir` must be a path. Received: "
            f"model_dir={path!r} of type {type(path).__name__}."
        )
    path = os.fspath(path)
    if not path:
        raise ValueError("Argument `model_dir` must not be empty.")
    return path.rstrip("/") or "/"


def check_at_least(name: str, value: float | None, least: float) -> None:
    """Raises unless `value` is None or a number of at least `least`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"Argument `{name}` must be a number. Received: {name}={value!r} "
            f"of type {type(value).__name__}."
        )
    if not value >= least:
        wanted = f"at least {least}" if least >= 1 else "positive"
        wanted = "not negative" if least == 0 else wanted
        raise ValueError(
            f"Argument `{name}` must be {wanted}. Received: {name}={value}."
        )


def check_type(name: str, value: Any, wanted: type) -> None:
    """Raises `TypeError` unless `value` is a `wanted`."""
    if not isinstance(value, wanted):
        raise TypeError(
            f"Argument `{name}` must be a tfdist.{wanted.__name__}. "
            f"Received: {name}={value!r}."
        )


def check_callable(name: str, value: Any) -> None:
    """Raises `TypeError` unless `value` can be called."""
    if not callable(value):
        raise TypeError(
            f"Argument `{name}` must be callable. Received: {name}={value!r}."
        )


def _checked(exporters: Iterable[Exporter]) -> tuple[Exporter, ...]:
    exporters = tuple(exporters or ())
    for exporter in exporters:
        check_type("exporters", exporter, Exporter)
    names = [exporter.name for exporter in exporters]
    if len(set(names)) != len(names):
        raise ValueError(
            "Argument `exporters` must have unique names. Received: "
            f"names={names}."
        )
    return exporters

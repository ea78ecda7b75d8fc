"""What to train and to evaluate on: `TrainSpec`, `EvalSpec`.

Frozen dataclasses, validated at construction. As in `tf.estimator`, they do not
describe what the model computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist._tf.arguments import check_at_least, check_callable, check_type
from tfdist.data.input_fns import InputFn, takes_context
from tfdist.estimator.exporters import Exporter
from tfdist.hooks.saving_hooks import CheckpointSaverListener
from tfdist.hooks.session_run_hook import check_hooks


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """What to train on, like `tf.estimator.TrainSpec`.

    >>> def input_fn():
    ...     return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat()
    >>> tfdist.TrainSpec(input_fn, max_steps=1000).max_steps
    1000

    Attributes:
        input_fn: Returns a `tf.data.Dataset` of batches. It may take one
            argument without a default, which receives the
            `tf.distribute.InputContext` that tells the worker which part of
            the data to read. With replicas in sync, a function without this
            argument returns global batches, identical in every process
            (tfdist seeds them, but no `map` may have `deterministic=False`);
            a function with it returns per-replica batches
            (`get_per_replica_batch_size`).
        max_steps: Step at which training ends; None: when the data ends.
        hooks: Run after tfdist's own hooks; hooks written for TF1 that do not
            touch the graph run unchanged.
        saving_listeners: Called for each checkpoint, before it is evaluated.

    Raises:
        TypeError: an attribute of the wrong type.
        ValueError: `max_steps` is not positive; `input_fn` has unexpected
            required arguments.
    """

    input_fn: InputFn
    max_steps: int | None = None
    hooks: tuple[tf.compat.v1.train.SessionRunHook, ...] = ()
    saving_listeners: tuple[CheckpointSaverListener, ...] = ()

    def __post_init__(self) -> None:
        takes_context(self.input_fn)
        check_at_least("max_steps", self.max_steps, 1)
        _make_tuple(self, "hooks", tf.compat.v1.train.SessionRunHook)
        _make_tuple(self, "saving_listeners", CheckpointSaverListener)


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """What to evaluate on, like `tf.estimator.EvalSpec`.

    >>> def input_fn():
    ...     return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]]))
    >>> spec = tfdist.EvalSpec(
    ...     input_fn, steps=None, exporters=tfdist.LatestExporter("serving"))
    >>> [exporter.name for exporter in spec.exporters]
    ['serving']

    Attributes:
        input_fn: As for `TrainSpec`; the context is that of a single process.
        steps: Maximum batches per evaluation; None: the whole dataset, which
            must be finite.
        name: Results go to `<model_dir>/eval_<name>`. Default: `eval`.
        hooks: Run during each evaluation; the same objects are reused.
        exporters: An exporter, or several, run after each evaluation.
        start_delay_secs: Seconds an evaluator task waits before it begins.
        throttle_secs: Minimum seconds between two evaluations; the final one
            is never delayed.

    Raises:
        TypeError: an attribute of the wrong type.
        ValueError: a number out of range; exporters with duplicate or missing
            names.
    """

    input_fn: InputFn
    steps: int | None = 100
    name: str | None = None
    hooks: tuple[tf.compat.v1.train.SessionRunHook, ...] = ()
    exporters: tuple[Exporter, ...] = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        takes_context(self.input_fn)
        check_at_least("steps", self.steps, 1)
        check_type("name", self.name, str | None)
        check_at_least("start_delay_secs", self.start_delay_secs, 0, False)
        check_at_least("throttle_secs", self.throttle_secs, 0, False)
        _make_tuple(self, "hooks", tf.compat.v1.train.SessionRunHook)
        if isinstance(self.exporters, Exporter):
            object.__setattr__(self, "exporters", (self.exporters,))
        _make_tuple(self, "exporters", Exporter)
        given = "model", "export_path", "eval_result", "is_the_final_export"
        for exporter in self.exporters:
            check_callable("export", exporter.export, *given)
        names = [getattr(e, "name", None) for e in self.exporters]
        strings = {name for name in names if name and isinstance(name, str)}
        if len(strings) != len(names):
            raise ValueError(
                "Argument `exporters` must have unique names, which are "
                f"non-empty strings. Received: names={names}."
            )


def _make_tuple(spec: Any, name: str, wanted: type) -> None:
    """Converts an attribute to a tuple (None: empty); checks its elements."""
    values = () if (given := getattr(spec, name)) is None else given
    if not isinstance(values, Iterable):
        raise TypeError(
            f"Argument `{name}` must be a sequence of tfdist.{wanted.__name__}."
            f" Received: {name}={values!r}."
        )
    values = tuple(values)
    for value in values:
        check_type(name, value, wanted)
    check_hooks(values)
    object.__setattr__(spec, name, values)

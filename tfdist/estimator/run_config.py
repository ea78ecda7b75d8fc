"""`RunConfig`: the configuration of a job, validated at construction."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.arguments import check_at_least, check_type
from tfdist.cluster import strategies as strategy_lib
from tfdist.cluster.spec import Cluster
from tfdist.hooks import saving_hooks
from tfdist.hooks.saving_hooks import USE_DEFAULT
from tfdist.placement.variables import VariableSpec

_log = logging.getLogger(__name__)

# Fields of TF 2.15's RunConfig that have no effect here, and why.
_IGNORED = {
    "session_config": "there is no session to configure: threads and devices "
    "are set by `tf.config`",
    "eval_distribute": "the cluster decides where evaluations run",
    "experimental_max_worker_delay_secs": "the chief hands out the steps, so "
    "no worker starts before the others",
    "checkpoint_save_graph_def": "a Keras model has no graph to save",
}
# Fields that cannot be ignored without changing the job, and what to use.
_REFUSED = {
    "train_distribute": "Use `strategy`; by default, it is chosen to suit the "
    "cluster",
    "device_fn": "Use `placement`, which assigns each variable to a parameter "
    "server",
    "protocol": "Leave it out: tasks communicate by grpc",
    "experimental_distribute": "Use `strategy` and `cluster`",
}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How a job runs; the model function defines what it computes.

    Like `tf.estimator.RunConfig`, with these differences:

    * `model_dir` must be given, and `TF_CONFIG` cannot give it.
    * `session_creation_timeout_secs` is ten minutes instead of two hours.
    * The task of this process comes from `cluster`, which is read from the
      environment; `tfdist.Cluster` documents the accepted formats. There is no
      `master`, `evaluation_master`, `device_filters`, `service` or
      `global_id_in_cluster`.
    * Ignored fields are neither checked nor stored.

    >>> config = tfdist.RunConfig("job", save_checkpoints_steps=500)
    >>> config.replace(model_dir="another").save_checkpoints_steps
    500

    Attributes:
        model_dir: Directory of checkpoints, summaries and exports, shared by
            all tasks (`gs://` works).
        summary_dir: Directory of the TensorBoard summaries; evaluations write
            to subdirectories such as `eval`. Default: `model_dir`.
        tf_random_seed: Seed for Python, NumPy and the initializers. Default:
            as the program sets it, by `keras.utils.set_random_seed` or not.
        save_summary_steps: Steps between TensorBoard scalars; 0 for none.
        save_checkpoints_steps, save_checkpoints_secs: Steps or seconds between
            checkpoints; not both. Default: 60 s, or longer if saving would
            take more than 1 % of the time. None or 0: no checkpoints.
        keep_checkpoint_max: Recent checkpoints to keep; 0 or None keeps all.
        keep_checkpoint_every_n_hours: Also keeps one checkpoint every n hours.
            None or the default (more than a year): no additional ones.
        log_step_count_steps: Steps between progress lines; None for none.
        steps_per_dispatch: Steps a worker runs per request. Default: the
            `steps_per_execution` of `compile`, if more than 1; else up to ten,
            more from 16 workers on, fewer for models with many variables, and
            one early in a job. On parameter servers, workers read as many
            batches ahead of a dataset of unknown length, to know its end.
        backup_workers: Makes steps on parameter servers synchronous, like TF1's
            `SyncReplicasOptimizer`: each step averages over one batch from
            every worker except this many of the slowest (TF1's
            `total_num_replicas` minus `replicas_to_aggregate`), whose batches
            are dropped; 0 waits for all. Default: asynchronous steps. This
            field and the next two have no effect in a single process.
        max_staleness: The maximum number of updates by other workers between a
            step's read of the parameters and its own update, on parameter
            servers; faster workers wait for slower ones to stay within it
            (stale synchronous parallel). It makes dispatches smaller, unless
            `steps_per_dispatch` is given. Default: no bound; no worker waits.
        read_ahead: On parameter servers, the number of steps of a request whose
            parameters a worker reads while it computes the preceding steps,
            to hide network latency. These reads miss the worker's own updates
            from those steps. Default: none, like 0.
        strategy: How training is distributed: "ps" (parameter servers),
            "multi_worker_mirrored" (all-reduce between processes), "mirrored"
            (across the GPUs of this process or, without any, its logical CPUs),
            "tpu", "one_device"; or a `tf.distribute` strategy whose replicas
            all belong to this process. Default: "auto": the one that fits the
            cluster; in one process "mirrored" if there are several GPUs.
        audit_input: Whether to check, before training on parameter servers,
            whether two workers read the same examples, and to warn if so (see
            `python -m tfdist.audit`); this takes as long as four batches.
            Default: only if the input function takes no `InputContext`.
        check_numerics: Whether training ends with an error, instead of saving
            a checkpoint, once a variable is not finite.
        placement: Which parameter server holds a variable: "round_robin",
            "greedy" or "planned" (see
            `tfdist.placement.scope.placement_by_name`), or a callable from a
            `VariableSpec` to the index of a server.
        session_creation_timeout_secs: Seconds the chief waits for missing
            workers and ps, at the start and after a failure, and an evaluator
            waits for a new chief if a previous one has finished.
        evaluator_timeout_secs: Seconds the chief waits at the end for the
            evaluator's last result.
        cluster: Default: from the environment.
        session_config, eval_distribute, experimental_max_worker_delay_secs,
            checkpoint_save_graph_def: Ignored; a warning says why.
        train_distribute, device_fn, experimental_distribute, protocol: Refused;
            the error names the alternative.

    Raises:
        ValueError: a value out of range, both `save_checkpoints_*`, a refused
            field, a directory that begins with `~` or contains a glob pattern.
        TypeError: a value of the wrong type, or an unknown field.
        RuntimeError: TF1 graph mode, or Keras with a different backend.
    """

    model_dir: str
    _: dataclasses.KW_ONLY
    summary_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int = 100
    save_checkpoints_steps: int | None = USE_DEFAULT
    save_checkpoints_secs: float | None = USE_DEFAULT
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float | None = 10000
    log_step_count_steps: int | None = 100
    steps_per_dispatch: int | None = None
    backup_workers: int | None = None
    max_staleness: int | None = None
    read_ahead: int | None = None
    strategy: str | tf.distribute.Strategy = "auto"
    audit_input: bool | None = None
    check_numerics: bool = True
    placement: str | Callable[[VariableSpec], int] = "round_robin"
    session_creation_timeout_secs: float = 600.0
    evaluator_timeout_secs: float = 600.0
    cluster: Cluster = dataclasses.field(default_factory=Cluster.from_env)
    session_config: dataclasses.InitVar[Any] = None
    eval_distribute: dataclasses.InitVar[Any] = None
    experimental_max_worker_delay_secs: dataclasses.InitVar[Any] = None
    checkpoint_save_graph_def: dataclasses.InitVar[bool] = False
    train_distribute: dataclasses.InitVar[Any] = None
    device_fn: dataclasses.InitVar[Any] = None
    protocol: dataclasses.InitVar[str | None] = None
    experimental_distribute: dataclasses.InitVar[Any] = None

    def __post_init__(self, *without_meaning: Any) -> None:
        names = (*_IGNORED, *_REFUSED)
        _refuse_or_ignore(dict(zip(names, without_meaning, strict=True)))
        _set_directory(self, "model_dir")
        if self.summary_dir is not None:
            _set_directory(self, "summary_dir")
        steps, secs = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is USE_DEFAULT and secs is USE_DEFAULT:
            secs = saving_hooks.DEFAULT_SAVE_SECS
        steps = None if steps is USE_DEFAULT else steps
        secs = None if secs is USE_DEFAULT else secs
        if steps is not None and secs is not None:
            raise ValueError(
                "Only one of `save_checkpoints_steps` and "
                f"`save_checkpoints_secs` can be set. Received: {steps} and "
                f"{secs}."
            )
        object.__setattr__(self, "save_checkpoints_steps", steps)
        object.__setattr__(self, "save_checkpoints_secs", secs)
        check_type("cluster", self.cluster, Cluster)
        check_type("audit_input", self.audit_input, bool | None)
        check_type("check_numerics", self.check_numerics, bool)
        for name, least in (
            ("tf_random_seed", 0),
            ("save_summary_steps", 0),
            ("save_checkpoints_steps", 0),
            ("save_checkpoints_secs", 0),
            ("keep_checkpoint_max", 0),
            ("keep_checkpoint_every_n_hours", 1e-9),
            ("log_step_count_steps", 1),
            ("steps_per_dispatch", 1),
            ("backup_workers", 0),
            ("max_staleness", 0),
            ("read_ahead", 0),
            ("session_creation_timeout_secs", 1e-9),
            ("evaluator_timeout_secs", 0),
        ):
            or_none = "timeout" not in name
            check_at_least(name, getattr(self, name), least, or_none)
        strategy_lib.check(self.strategy, self.cluster)
        self._check_waiting()

    def _check_waiting(self) -> None:
        """Checks the fields that make workers wait, or read ahead."""
        backup, workers = self.backup_workers, self.cluster.num_workers
        names = ("backup_workers", "max_staleness", "read_ahead")
        given = [n for n in names if getattr(self, n) is not None]
        if not given or not self.cluster.is_distributed:
            return
        if not self.cluster.num_ps:
            raise ValueError(
                f"Argument `{given[0]}` is for parameter servers, but this "
                f"cluster has none: {self.cluster.shape}. All-reduce always "
                "waits for every worker: leave it out."
            )
        if backup is None:
            return
        if len(given) > 1:
            raise ValueError(
                "Synchronous steps (`backup_workers`) are never stale: leave "
                f"`{given[1]}` out. Received: {getattr(self, given[1])}."
            )
        if backup >= workers or (self.steps_per_dispatch or 1) > 1:
            raise ValueError(
                "Argument `backup_workers` must leave a worker to wait for, "
                "and requires `steps_per_dispatch=1`. Received: "
                f"backup_workers={backup}, steps_per_dispatch="
                f"{self.steps_per_dispatch}, with {workers} workers."
            )

    def replace(self, **changes: Any) -> RunConfig:
        """Returns a copy with some fields replaced.

        As in TF1, a new `save_checkpoints_steps` clears
        `save_checkpoints_secs`, and vice versa.

        Raises:
            TypeError: an unknown field.
        """
        one, other = "save_checkpoints_steps", "save_checkpoints_secs"
        for given, dropped in ((one, other), (other, one)):
            if changes.get(given) is not None:
                changes.setdefault(dropped, None)
        return dataclasses.replace(self, **changes)

    @property
    def saves_checkpoints(self) -> bool:
        """Whether the job saves checkpoints."""
        return bool(self.save_checkpoints_steps or self.save_checkpoints_secs)

    @property
    def strategy_name(self) -> str:
        """The name of the strategy: "auto" resolved, or an object's class."""
        if isinstance(self.strategy, str):
            return strategy_lib.resolved(self.strategy, self.cluster)
        return type(self.strategy).__name__

    @property
    def cluster_spec(self) -> tf.train.ClusterSpec:
        """The training tasks; empty in a process that does not train."""
        return tf.train.ClusterSpec(self._tasks)

    @property
    def task_type(self) -> str:
        """This process's job; "worker" if there is no cluster."""
        alone = self.cluster.role == "local" and not self._tasks
        return "worker" if alone else self.cluster.task_type

    @property
    def task_id(self) -> int:
        """This process's index in its job.

        Raises `RuntimeError` in an input function of workers, which runs here.
        """
        if self.strategy_name == "ps" and tf.inside_function():
            raise RuntimeError(
                "`RunConfig.task_id` is used in a function that this process "
                "traces for all workers. An input function that takes a "
                "tf.distribute.InputContext finds the worker in its "
                "`input_pipeline_id`."
            )
        return self.cluster.task_index

    @property
    def is_chief(self) -> bool:
        """Whether this process leads; true if there is no cluster."""
        return self.cluster.is_chief

    @property
    def num_ps_replicas(self) -> int:
        """The number of parameter servers; 0 on the evaluator."""
        return len(self._tasks.get("ps", ()))

    @property
    def num_worker_replicas(self) -> int:
        """The number of workers, including the chief; 0 on the evaluator.

        Unlike in TF1, the chief of a job with parameter servers runs no steps;
        `cluster.num_workers` counts the tasks that do.
        """
        if not self._tasks:
            return int(self.cluster.role == "local")
        return sum(len(self._tasks.get(job, ())) for job in ("chief", "worker"))

    @property
    def _tasks(self) -> dict[str, dict[int, str]]:
        """Maps each job to its addresses by index, as visible to this task."""
        return self.cluster.training_spec() if self.cluster.trains else {}


def configured(config: RunConfig | None, model_dir: str | None) -> RunConfig:
    """Returns `config`, or the default one of `model_dir`.

    Raises `ValueError` if neither is given, or if they differ.
    """
    if config is None:
        if model_dir is None:
            raise ValueError("One of `model_dir` and `config` must be given.")
        return RunConfig(model_dir)
    check_type("config", config, RunConfig)
    given = config.replace(model_dir=model_dir or config.model_dir)
    if given.model_dir != config.model_dir:
        raise ValueError(
            "`model_dir` and `config.model_dir` differ: "
            f"{model_dir!r} and {config.model_dir!r}. Give only one."
        )
    return config


def _set_directory(config: RunConfig, name: str) -> None:
    """Checks a directory and normalizes it for `os.path.join`."""
    check_type(name, getattr(config, name), str | os.PathLike)
    path = storage.check_no_pattern(getattr(config, name))
    if not path:
        raise ValueError(f"Argument `{name}` must not be empty.")
    # On `gs://`, `a//b` and `a/b` are different objects, and the paths that
    # Vertex AI sets end in a slash.
    object.__setattr__(config, name, path.rstrip("/") or "/")


def _refuse_or_ignore(fields: dict[str, Any]) -> None:
    """Raises an error or warns for each given field that has no meaning."""
    for name, value in fields.items():
        if value is None or value is False:
            continue
        received = f"Received: {name}={value!r}."
        if name in _IGNORED:
            _log.warning(
                "RunConfig ignores `%s`: %s. %s", name, _IGNORED[name], received
            )
        elif (name, value) != ("protocol", "grpc"):
            raise ValueError(
                f"Argument `{name}` is not supported by tfdist. "
                f"{_REFUSED[name]}. {received}"
            )

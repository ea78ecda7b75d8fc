"""The cluster that this process belongs to, and the process's role in it.

Every task of a distributed job runs the same program. An environment variable
tells them apart: `TF_CONFIG` (Vertex AI, Kubeflow, `python -m tfdist.launch`)
or `CLUSTER_SPEC` (Vertex AI, on every replica). `Cluster.from_env()` turns
either into an immutable value without importing TensorFlow.

`Cluster` replaces the part of TF1's `tf.estimator.RunConfig` that parsed
`TF_CONFIG`. Unlike in TF1, the training cluster includes neither the evaluator
(with which a `ParameterServerStrategy` blocks forever) nor a tf.data service
(`tfdist.data.one_pass`); worker 0 leads if there is no chief (as in
`MultiWorkerMirroredStrategy`); and malformed input raises an error at once.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import json
import os
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tfdist.cluster import tf_config as reading
from tfdist.cluster.tf_config import DATA_JOBS, JOBS, TRAINING_JOBS, as_list

REDUCTION_SERVERS = "TFDIST_REDUCTION_SERVERS"
"""Set to "1" by `tfdist.vertex` on all tasks of a Vertex AI job whose worker
pool 2, which Vertex AI calls parameter servers, holds its reduction servers."""

_ADDRESS = re.compile(r"(\[[^\[\]\s]+\]|[^\s:/@\[\]]+):([0-9]{1,5})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The tasks of a job, and the task that this process runs.

    `Cluster()` is one local process. Use `from_env` in a program, and
    `from_jobs` to spell out a cluster:

    >>> cluster = Cluster.from_jobs(
    ...     {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
    ...     task_type="worker", task_index=1)
    >>> cluster.role, cluster.num_ps, cluster.num_workers, cluster.address
    ('worker', 1, 2, 'c:1')
    >>> print(cluster)
    worker:1 of a cluster of chief, 2 workers, 1 ps

    Attributes:
        jobs: job -> {index: "host:port"} for the jobs "chief", "worker", "ps",
            "evaluator", "dispatcher" and "data_worker" that have tasks. Only
            the indices of workers may have gaps. Default: no cluster.
        task_type: This process's job; "chief" also for "master".
        task_index: This process's index in its job.
        has_evaluator: Whether there is an evaluator task, with or without
            (Vertex AI) a known address, so that the chief need not evaluate.

    Raises:
        ValueError: The tasks are not a valid cluster, or lack this one.
    """

    # A mapping has no hash; equal clusters still hash equal without it.
    jobs: Mapping[str, Mapping[int, str]] = dataclasses.field(
        default_factory=dict, hash=False
    )
    task_type: str = "chief"
    task_index: int = 0
    has_evaluator: bool = False

    def __post_init__(self) -> None:
        given = reading.by_index(self.jobs)
        jobs = {job: given[job] for job in JOBS if job in given}
        object.__setattr__(self, "jobs", jobs)
        if "evaluator" in jobs:
            object.__setattr__(self, "has_evaluator", True)
        _check_jobs(jobs)
        _check_addresses(jobs)
        _check_task(self)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Cluster:
        """Reads `TF_CONFIG` or, if unset, `CLUSTER_SPEC`.

        Without either, or with `TF_CONFIG='{}'`, the cluster is one local
        process. A blank variable counts as unset. The evaluator may be outside
        "cluster" (Vertex AI, even without "cluster") or inside it (Kubeflow).
        `master` may stand for `chief`, a job may be a list or an
        {index: address} object, an index may be a string, and `task` may be
        missing if there is at most one node. Other keys (`job`, `environment`,
        ...) and jobs without tasks are ignored.

        Vertex AI's `TF_CONFIG` never mentions the evaluator, so the chief
        finds it in `CLUSTER_SPEC`, which is set as well. If
        `TFDIST_REDUCTION_SERVERS` is 1, parameter servers are treated as
        reduction servers, which are not part of the cluster.

        >>> Cluster.from_env({}).role
        'local'
        >>> Cluster.from_env({"TF_CONFIG": '''
        ...     {"cluster": {"chief": ["a:1"], "worker": ["b:1"]},
        ...      "task": {"type": "evaluator", "index": 0}}'''}).role
        'evaluator'

        Args:
            environ: The environment. Default: `os.environ`.

        Raises:
            ValueError: A variable is malformed. The message names it, quotes
                the offending part and shows a valid value.
        """
        read = functools.partial(
            cls._read, os.environ if environ is None else environ
        )
        cluster = read("TF_CONFIG") or read("CLUSTER_SPEC") or cls()
        if not cluster.has_evaluator and (pools := read("CLUSTER_SPEC")):
            return dataclasses.replace(
                cluster, has_evaluator=pools.has_evaluator
            )
        return cluster

    @classmethod
    def _read(cls, environ: Mapping[str, str], variable: str) -> Cluster | None:
        """Reads a cluster from one of the two variables; None if blank."""
        text = environ.get(variable, "").strip()
        if not text:
            return None
        try:
            jobs, task_type, task_index = reading.parse(variable, text)
            if environ.get(REDUCTION_SERVERS, "").strip() == "1":
                jobs.pop("ps", None)
            return cls.from_jobs(jobs, task_type, task_index)
        except ValueError as error:
            raise reading.malformed(variable, error) from None

    @classmethod
    def from_jobs(
        cls,
        jobs: Mapping[str, Any],
        task_type: str | None = None,
        task_index: int | str | None = None,
    ) -> Cluster:
        """Creates a cluster from plain lists, as in `TF_CONFIG`.

        Args:
            jobs: job -> ["host:port", ...] or {index: "host:port"}; "chief"
                may be called "master".
            task_type: This process's job; required with more than one task.
            task_index: This process's index in its job; likewise.

        Raises:
            ValueError: As for `from_env`.
        """
        tasks = reading.by_index(jobs)
        job, index = reading.own_task(
            tasks, reading.job_name(task_type), task_index
        )
        return cls(tasks, job, index, has_evaluator=job == "evaluator")

    @property
    def tasks(self) -> Mapping[str, Mapping[int, str]]:
        """The training tasks: those of `jobs` "chief", "worker" and "ps"."""
        tasks = self.training_spec().items()
        return MappingProxyType({job: MappingProxyType(t) for job, t in tasks})

    @property
    def evaluator_address(self) -> str | None:
        """The evaluator's "host:port"; None if not given, as on Vertex AI."""
        return self.jobs.get("evaluator", {}).get(0)

    @property
    def dispatcher(self) -> str | None:
        """The "host:port" of a tf.data service's dispatcher; None if none."""
        return self.jobs.get("dispatcher", {}).get(0)

    @property
    def data_workers(self) -> tuple[str, ...]:
        """The "host:port" of each worker of the tf.data service, by index."""
        return tuple(self.jobs.get("data_worker", {}).values())

    @property
    def role(self) -> str:
        """The role of this process.

        "local" trains alone: there is no cluster, or only one node besides an
        evaluator and a tf.data service. "chief" (see `is_chief`) leads,
        "worker" and "ps" serve, "evaluator" reads checkpoints, "dispatcher"
        and "data_worker" provide examples.
        """
        if self.task_type in ("ps", "evaluator", *DATA_JOBS):
            return self.task_type
        if not self.is_distributed:
            return "local"
        return "chief" if self.is_chief else "worker"

    @property
    def trains(self) -> bool:
        """Whether this process is one of the training tasks."""
        return self.role not in ("evaluator", *DATA_JOBS)

    @property
    def is_chief(self) -> bool:
        """Whether this process leads: writes checkpoints, summaries, exports.

        The chief, worker 0 if there is no chief, or a local process does so.
        """
        if self.task_type == "worker":
            return "chief" not in self.tasks and self.task_index == 0
        return self.task_type == "chief"

    @property
    def is_distributed(self) -> bool:
        """Whether more than one task trains."""
        return sum(map(len, self.tasks.values())) > 1

    @property
    def num_ps(self) -> int:
        """The number of parameter servers."""
        return len(self.tasks.get("ps", ()))

    @property
    def num_workers(self) -> int:
        """The number of tasks of the job "worker", without the chief."""
        return len(self.tasks.get("worker", ()))

    @property
    def task(self) -> str:
        """This process's name, such as "worker:1"."""
        return f"{self.task_type}:{self.task_index}"

    @property
    def address(self) -> str | None:
        """This process's "host:port"; None if the cluster does not give it."""
        return self.jobs.get(self.task_type, {}).get(self.task_index)

    def addresses(self, *jobs: str) -> dict[str, str]:
        """Maps names ("ps:0") to addresses; default: of all training jobs."""
        return {
            f"{job}:{index}": address
            for job in jobs or TRAINING_JOBS
            for index, address in self.jobs.get(job, {}).items()
        }

    def with_first(self, **numbers: int) -> Cluster:
        """This cluster with only the first tasks of a job, as in `worker=3`."""
        jobs = {
            job: dict([*tasks.items()][: numbers.get(job)])
            for job, tasks in self.jobs.items()
        }
        return dataclasses.replace(self, jobs=jobs)

    def training_spec(self) -> dict[str, dict[int, str]]:
        """The argument of `tf.train.ClusterSpec`: the tasks that train."""
        jobs = [job for job in TRAINING_JOBS if job in self.jobs]
        return {job: dict(self.jobs[job]) for job in jobs}

    def tf_config(
        self, task_type: str | None = None, task_index: int | None = None
    ) -> str:
        """The `TF_CONFIG` of a task of this cluster.

        An evaluator with a known address appears in "cluster", as on Kubeflow;
        one without appears only in its own `TF_CONFIG`.

        Args:
            task_type: The task's job. Default: this process's.
            task_index: The task's index. Default: this process's.

        Raises:
            ValueError: The cluster has no such task.
        """
        task = dataclasses.replace(
            self,
            task_type=self.task_type if task_type is None else task_type,
            task_index=self.task_index if task_index is None else task_index,
        )
        own = {"type": task.task_type, "index": task.task_index}
        cluster = {job: as_list(tasks) for job, tasks in self.jobs.items()}
        return json.dumps({"cluster": cluster, "task": own})

    @property
    def shape(self) -> str:
        """A description, such as "chief, 2 workers, 2 ps, evaluator"."""
        workers, others = self.num_workers, len(self.data_workers)
        parts = {
            "chief": "chief" in self.tasks,
            f"{workers} worker{'s' * (workers > 1)}": workers,
            f"{self.num_ps} ps": self.num_ps,
            "evaluator": self.has_evaluator,
            "dispatcher": self.dispatcher,
            f"{others} data worker{'s' * (others > 1)}": others,
        }
        return ", ".join(words for words, present in parts.items() if present)

    def __str__(self) -> str:
        if not self.shape:
            return "one local process, no cluster"
        return f"{self.task} of a cluster of {self.shape}"


def _check_jobs(jobs: reading.Jobs) -> None:
    """Raises ValueError for jobs or indices that cannot work together."""
    have = {job: as_list(tasks) for job, tasks in jobs.items()}
    for job, tasks in have.items():
        single = job in ("chief", "evaluator", "dispatcher")
        if single and [*jobs[job]] != [0]:
            raise reading.wrong(
                f'There can only be one "{job}", with index 0.', {job: tasks}
            )
        if job in ("ps", "data_worker") and isinstance(tasks, dict):
            raise reading.wrong(
                f'The indices of the "{job}" tasks must be 0, 1, 2, ... '
                "without a gap.",
                tasks,
            )
    for job in ("chief", "worker"):
        if "ps" in jobs and job not in jobs:
            raise reading.wrong(
                f'A cluster with a "ps" must also have a "{job}": the chief '
                "coordinates, the workers compute the gradients.",
                have,
            )
    if "chief" not in jobs and 0 not in jobs.get("worker", [0]):
        raise reading.wrong(
            'Without a "chief", worker 0 leads and must be there.', have
        )
    if ("dispatcher" in jobs) != ("data_worker" in jobs):
        raise reading.wrong(
            'A tf.data service needs a "dispatcher" and at least one '
            '"data_worker".',
            have,
        )


def _check_addresses(jobs: reading.Jobs) -> None:
    """Raises ValueError for unusable addresses, or one shared by two tasks."""
    seen: dict[tuple[str, int], str] = {}
    tasks = [(f"{job}:{i}", jobs[job][i]) for job in jobs for i in jobs[job]]
    for task, address in tasks:
        endpoint = _endpoint(address)
        if endpoint is None:
            raise reading.wrong(
                f'The address of {task} must be "host:port": a name or an '
                "address (IPv6 in brackets), a colon, and a port from 1 to "
                "65535, without scheme or blanks.",
                address,
            )
        if endpoint in seen:
            raise reading.wrong(
                f"{seen[endpoint]} and {task} must not share an address.",
                address,
            )
        seen[endpoint] = task


def _endpoint(address: object) -> tuple[str, int] | None:
    """Splits "host:port" into host and port; None if it is malformed."""
    match = isinstance(address, str) and _ADDRESS.fullmatch(address)
    if not match:
        return None
    host, port = match[1].lower(), int(match[2])
    if host.startswith("["):
        try:
            host = str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            return None
    return (host, port) if 1 <= port <= 65535 else None


def _check_task(cluster: Cluster) -> None:
    """Raises ValueError if the cluster lacks the task it assigns."""
    job, index = cluster.task_type, cluster.task_index
    alone = job in ("chief", "worker") and not cluster.tasks
    is_evaluator = job == "evaluator" and cluster.has_evaluator
    known = [0] if alone or is_evaluator else [*cluster.jobs.get(job, ())]
    if not known:
        raise ValueError(
            f'The task "{job}" must be part of the cluster, which has: '
            f"{cluster.shape or 'no tasks'}."
        )
    if index not in known:
        raise reading.wrong(
            f'The task "{job}" must have one of the indices '
            f"{', '.join(map(str, known))}.",
            {"index": index},
        )


_running: list[Cluster] = []


def current_cluster() -> Cluster:
    """The cluster of the running job's `RunConfig`, else `from_env`'s.

    For code inside a user's `model_fn` or `input_fn`, without a `RunConfig`.
    """
    return _running[-1] if _running else Cluster.from_env()


def runs_in_its_cluster(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the cluster of the first argument's `config` the current one."""

    @functools.wraps(function)
    def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(owner, "config", None)
        _running.append(config.cluster if config else current_cluster())
        try:
            return function(owner, *args, **kwargs)
        finally:
            _running.pop()

    return run

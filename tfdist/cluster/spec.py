"""Which cluster this process belongs to, and what it has to do there.

Every task of a distributed job runs the same program. What tells them apart is
an environment variable: `TF_CONFIG` (Vertex AI, Kubeflow, `python -m
tfdist.launch`) or `CLUSTER_SPEC` (Vertex AI, on every replica).
`Cluster.from_env()` turns either into one frozen value, without TensorFlow.

It replaces the half of TF1's `tf.estimator.RunConfig` that parsed `TF_CONFIG`,
and differs from it: the evaluator is never part of the training cluster (a
`ParameterServerStrategy` that finds it there blocks for ever), nor is a tf.data
service (`tfdist.data.one_pass`); workers without a chief are accepted, worker 0
then leads them (`MultiWorkerMirroredStrategy`); and what is malformed is
refused here, not by a hang later.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast

from tfdist.cluster import tf_config as reading
from tfdist.cluster.tf_config import DATA_JOBS, TRAINING_JOBS, as_list, wrong

Role = Literal[
    "local", "chief", "worker", "ps", "evaluator", "dispatcher", "data_worker"
]

REDUCTION_SERVERS = "TFDIST_REDUCTION_SERVERS"
"""Set to "1" (by `tfdist.vertex`) on every task of a job on Vertex AI whose
worker pool 2 holds Google's reduction servers: the service's variables call
them what they call parameter servers."""

_ADDRESS = re.compile(r"(\[[^\[\]\s]+\]|[^\s:/@\[\]]+):([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True)
class Cluster:
    """The tasks of a job, and which of them this process is.

    `Cluster()` is one local process. Use `from_env` inside a program, and
    `from_jobs` to write a cluster down:

    >>> cluster = Cluster.from_jobs(
    ...     {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]},
    ...     task_type="worker", task_index=1)
    >>> cluster.role, cluster.num_ps, cluster.num_workers, cluster.address
    ('worker', 1, 2, 'c:1')
    >>> print(cluster)
    worker:1 of a cluster of chief, 2 workers, 1 ps

    Attributes:
        tasks: read-only, job -> {index: "host:port"} for the jobs "chief",
            "worker" and "ps" that have tasks, none of the others. The
            indices of workers may have gaps; those of ps may not, because
            variables are placed on 0 .. num_ps - 1. Default: no cluster.
        task_type: this process's job: "chief" (also where the environment
            says "master"), "worker", "ps", "evaluator", "dispatcher" or
            "data_worker".
        task_index: this process's index in its job.
        has_evaluator: whether an evaluator task exists anywhere we can see,
            so that the chief need not evaluate.
        evaluator_address: its "host:port" where the cluster names it
            (Kubeflow, tfdist.launch); None elsewhere (Vertex AI).
        dispatcher: "host:port" of the tf.data service's dispatcher; None
            where there is no such service.
        data_workers: "host:port" of its workers, by index.

    Raises:
        ValueError: if the tasks do not make a cluster, or this task is not
            one of them.
    """

    # A mapping has no hash; equal clusters still hash equal without it.
    tasks: Mapping[str, Mapping[int, str]] = field(
        default_factory=dict, hash=False
    )
    task_type: str = "chief"
    task_index: int = 0
    has_evaluator: bool = False
    evaluator_address: str | None = None
    dispatcher: str | None = None
    data_workers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.evaluator_address is not None:
            object.__setattr__(self, "has_evaluator", True)
        object.__setattr__(self, "data_workers", tuple(self.data_workers))
        _check_jobs(self.tasks)
        if (self.dispatcher is None) == bool(self.data_workers):
            raise wrong(
                'A tf.data service needs a "dispatcher" and at least one '
                '"data_worker".',
                self._others,
            )
        _check_addresses({**self.tasks, **self._others})
        _check_task(self)
        frozen = {
            job: MappingProxyType(dict(sorted(self.tasks[job].items())))
            for job in TRAINING_JOBS
            if job in self.tasks
        }
        object.__setattr__(self, "tasks", MappingProxyType(frozen))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled or copied; plain dicts can.
        rest = dataclasses.fields(self)[1:]
        return type(self), (
            self.training_spec(),
            *(getattr(self, entry.name) for entry in rest),
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Cluster:
        """Reads `TF_CONFIG`, else `CLUSTER_SPEC`, else is one local process.

        A blank variable counts as absent; `TF_CONFIG='{}'` is one local
        process. Accepted are: Vertex AI's evaluator outside the cluster (also
        with no cluster at all) and Kubeflow's inside it, `master` for `chief`,
        a job as a list or as an {index: address} object, an index as a string,
        and a missing or empty `task` where there is one node at most. Keys
        that say nothing about the cluster (`job`, `environment`, ...) are
        ignored, and so is a job without tasks.

        Vertex AI's `TF_CONFIG` never mentions the evaluator, so the chief
        learns of it from the `CLUSTER_SPEC` that is set beside it. Where
        `TFDIST_REDUCTION_SERVERS` is 1, parameter servers are taken for
        reduction servers, which are no part of the cluster.

        >>> Cluster.from_env({}).role
        'local'
        >>> Cluster.from_env({"TF_CONFIG": '''
        ...     {"cluster": {"chief": ["a:1"], "worker": ["b:1"]},
        ...      "task": {"type": "evaluator", "index": 0}}'''}).role
        'evaluator'

        Args:
            environ: the environment. Default: `os.environ`.

        Returns:
            The cluster, with this process's place in it.

        Raises:
            ValueError: if a variable is malformed. The message names the
                variable, quotes the offending part and shows a right one.
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
        """What one of the two variables says; None if it is blank."""
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
        """Makes a cluster from plain lists, as `TF_CONFIG` has them.

        Args:
            jobs: job -> ["host:port", ...] or {index: "host:port"}, for the
                jobs "chief" (or "master"), "worker", "ps", "evaluator",
                "dispatcher" and "data_worker".
            task_type: this process's job. May be omitted where `jobs` holds
                one task at most.
            task_index: this process's index in it, likewise.

        Returns:
            The cluster, in whose `tasks` are those that train.

        Raises:
            ValueError: as `from_env`.
        """
        tasks = reading.by_index(jobs)
        task_type, task_index = reading.own_task(
            tasks, reading.job_name(task_type), task_index
        )
        evaluator = reading.pop_one(tasks, "evaluator")
        return cls(
            task_type=task_type,
            task_index=task_index,
            has_evaluator=evaluator is not None or task_type == "evaluator",
            evaluator_address=evaluator,
            dispatcher=reading.pop_one(tasks, "dispatcher"),
            data_workers=tuple(
                reading.without_gap("data_worker", tasks.pop("data_worker", {}))
            ),
            tasks=tasks,
        )

    @property
    def role(self) -> Role:
        """What this process has to do.

        "local" trains alone: no cluster, or a cluster of one node (there may
        be an evaluator or a tf.data service beside it). "chief" leads,
        "worker" and "ps" serve, "evaluator" reads checkpoints, "dispatcher"
        and "data_worker" hand out examples. Worker 0 of a cluster without a
        chief is "chief".
        """
        if self.task_type in ("ps", "evaluator", *DATA_JOBS):
            return cast(Role, self.task_type)
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

        True for the chief, for worker 0 where there is no chief, and for a
        local process.
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
        """The number of tasks of the job "worker"; the chief is not one."""
        return len(self.tasks.get("worker", ()))

    @property
    def address(self) -> str | None:
        """This process's "host:port"; None where the cluster names none."""
        tasks = {**self.tasks, **self._others}.get(self.task_type, {})
        return tasks.get(self.task_index)

    @property
    def _others(self) -> dict[str, dict[int, str]]:
        """The tasks that do not train, as `tasks` has those that do."""
        jobs: dict[str, dict[int, str]] = {}
        if self.evaluator_address is not None:
            jobs["evaluator"] = {0: self.evaluator_address}
        if self.dispatcher is not None:
            jobs["dispatcher"] = {0: self.dispatcher}
        if self.data_workers:
            jobs["data_worker"] = dict(enumerate(self.data_workers))
        return jobs

    def training_spec(self) -> dict[str, dict[int, str]]:
        """The argument of `tf.train.ClusterSpec`: the tasks that train."""
        return {job: dict(tasks) for job, tasks in self.tasks.items()}

    def tf_config(
        self, task_type: str | None = None, task_index: int | None = None
    ) -> str:
        """The `TF_CONFIG` that tells a task its place in this cluster.

        The evaluator is written inside "cluster", as Kubeflow does; where its
        address is not known it is left out, and only the evaluator itself
        still knows of it.

        Args:
            task_type: the task's job. Default: this process's.
            task_index: the task's index. Default: this process's.

        Returns:
            JSON text, from which `from_env` makes this cluster again.

        Raises:
            ValueError: if the cluster has no such task.
        """
        task = dataclasses.replace(
            self,
            task_type=self.task_type if task_type is None else task_type,
            task_index=self.task_index if task_index is None else task_index,
        )
        jobs = {**self.tasks, **self._others}
        own = {"type": task.task_type, "index": task.task_index}
        cluster = {job: as_list(tasks) for job, tasks in jobs.items()}
        return json.dumps({"cluster": cluster, "task": own})

    @property
    def shape(self) -> str:
        """The cluster in words, such as "chief, 2 workers, 2 ps, evaluator"."""
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
        task = f"{self.task_type}:{self.task_index}"
        return f"{task} of a cluster of {self.shape}"


def _check_jobs(tasks: Mapping[str, Mapping[int, str]]) -> None:
    """Refuses jobs and indices that cannot train together."""
    if not all(tasks[job] and job in TRAINING_JOBS for job in tasks):
        raise ValueError(
            "Argument `tasks` must hold only the jobs 'chief', 'worker' and "
            "'ps', each with a task (Cluster.from_jobs takes the others too). "
            f"Received: tasks={tasks!r}."
        )
    have = {job: as_list(tasks[job]) for job in tasks}
    if "chief" in tasks and set(tasks["chief"]) != {0}:
        raise wrong('There must be only one "chief", with index 0.', have)
    for job in ("chief", "worker"):
        if "ps" in tasks and job not in tasks:
            raise wrong(
                f'A cluster with a "ps" must also have a "{job}": the chief '
                "coordinates, the workers compute the gradients.",
                have,
            )
    if "chief" not in tasks and 0 not in tasks.get("worker", [0]):
        raise wrong(
            'Without a "chief", worker 0 leads and must be there.', have
        )
    reading.without_gap("ps", tasks.get("ps", {}))


def _check_addresses(tasks: Mapping[str, Mapping[int, str]]) -> None:
    """Refuses addresses that no client can use, or that two tasks share."""
    seen: dict[tuple[str, int], str] = {}
    for job, addresses in tasks.items():
        for index, address in addresses.items():
            task, endpoint = f"{job}:{index}", _endpoint(address)
            if endpoint is None:
                raise wrong(
                    f'The address of {task} must be "host:port": a name or an '
                    "address (IPv6 in brackets), a colon, and a port from 1 to "
                    "65535, without scheme or blanks.",
                    address,
                )
            if endpoint in seen:
                raise wrong(
                    f"{seen[endpoint]} and {task} must not share an address.",
                    address,
                )
            seen[endpoint] = task


def _endpoint(address: object) -> tuple[str, int] | None:
    """Host and port of "host:port"; None when that is not what it is."""
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
    """Refuses a task that the cluster does not have."""
    job, index = cluster.task_type, cluster.task_index
    tasks = {**cluster.tasks, **cluster._others}
    known: Collection[int] = tasks.get(job, ())
    if job == "evaluator":
        known = [0] if cluster.has_evaluator else []
    elif not cluster.tasks and job in ("chief", "worker"):
        known = [0]
    if not known:
        raise ValueError(
            f'The task "{job}" must be part of the cluster, which has: '
            f"{cluster.shape or 'no tasks'}."
        )
    if index not in known:
        raise wrong(
            f'The task "{job}" must have one of the indices '
            f"{', '.join(map(str, sorted(known)))}.",
            {"index": index},
        )

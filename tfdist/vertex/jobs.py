"""A job on Vertex AI: from the shape of a cluster to the service's job spec.

A `Job` holds the number of workers, parameter servers and so on, and their
machines; `Job.spec()` returns the `CustomJobSpec` as JSON. The worker pool of a
task determines its role: 0 the chief, 1 workers, 2 parameter servers, 3 the
evaluator. Reduction servers are in pool 2 as well, so the variable
`TFDIST_REDUCTION_SERVERS` tells the other tasks what pool 2 is.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.cluster.spec import REDUCTION_SERVERS
from tfdist.launch.processes import PS_ENV, PS_JOB_ENV
from tfdist.vertex.checks import problems_of_job, rules_broken_by

REDUCTION_SERVER_IMAGE = (
    "us-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
)


def flag(default: Any, text: str, **options: Any) -> Any:
    """Returns a dataclass field that is also a command-line flag.

    `text` is the help of the flag. `options` are those of argparse that cannot
    be inferred from the default.
    """
    metadata = {"help": text, **options}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A type of machine.

    The other fields are flags of `python -m tfdist.vertex`, for `--machine`.

    Attributes:
        machine_type: The name of the machine type in Compute Engine.
        accelerator_type: The name in Vertex AI, such as "NVIDIA_TESLA_T4".
            Required also if the machine type includes it. Default: none.
        accelerator_count: Number of accelerators per machine.

    >>> Machine(machine_type="n1-highmem-8").fields()
    {'machineSpec': {'machineType': 'n1-highmem-8'}}
    """

    machine_type: str = "n1-standard-4"
    accelerator_type: str | None = None
    accelerator_count: int = 0
    tpu_topology: str | None = flag(None, "topology of a TPU v5e: 2x2")
    boot_disk_gb: int | None = flag(None, "disk GB of --machine (100)")
    boot_disk_type: str | None = flag(
        None, "disk of --machine: pd-ssd, pd-standard or hyperdisk-balanced"
    )
    reservation: str | None = flag(
        None, "of --machine: any, or projects/P/zones/Z/reservations/NAME"
    )

    def fields(self) -> dict[str, Any]:
        """Returns `machineSpec`, and `diskSpec` if a disk field is set."""
        affinity: dict[str, Any] | None = None
        if self.reservation == "any":
            affinity = {"reservationAffinityType": "ANY_RESERVATION"}
        elif self.reservation is not None:
            affinity = {
                "reservationAffinityType": "SPECIFIC_RESERVATION",
                "key": "compute.googleapis.com/reservation-name",
                "values": [self.reservation],
            }
        spec = {
            "machineType": self.machine_type,
            "acceleratorType": self.accelerator_type,
            "acceleratorCount": self.accelerator_count or None,
            "tpuTopology": self.tpu_topology,
            "reservationAffinity": affinity,
        }
        disk = {
            "bootDiskType": self.boot_disk_type,
            "bootDiskSizeGb": self.boot_disk_gb,
        }
        fields = {"machineSpec": given(spec), "diskSpec": given(disk) or None}
        return given(fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tasks:
    """The part of a job that both services share: tasks and their program."""

    workers: int = flag(0, "number of workers besides the chief")
    ps: int = flag(0, "number of parameter servers")
    evaluator: bool = flag(False, "add an evaluator")
    image: str | None = flag(None, "container image of every task")
    module: str = flag("trainer.task", "module to run: python -m MODULE")
    args: Sequence[str] = ()
    service_account: str | None = flag(None, "account to run tasks as")

    def __post_init__(self) -> None:
        for name in ("args", "packages", "egress"):
            if isinstance(value := getattr(self, name, ()), str):
                raise TypeError(
                    f"Argument `{name}` must be a list. Received: "
                    f"{name}={value!r}."
                )
        if self.ps and not self.workers:
            raise ValueError(
                "Argument `ps` needs `workers`: parameter servers hold the "
                "variables, workers train them. Received: "
                f"ps={self.ps}, workers=0."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Tasks):
    """A job on Vertex AI.

    The fields are flags of `python -m tfdist.vertex`; `--help` describes them.
    Details of some fields:

    Attributes:
        base_output_dir: The service derives AIP_MODEL_DIR and similar variables
            from it, which are the defaults of `trainer.task`'s directories.
        machine: The machine that computes gradients: that of the workers, and
            without parameter servers also that of the chief.
        chief_machine: The machine of a chief that only coordinates, in a job
            with parameter servers.
        args: Flags of the trainer, the same for every task.
        env: Environment variables of every task.
        restart_job_on_worker_restart: Default: True for all-reduce, where the
            other tasks cannot continue, unlike in parameter-server jobs.

    Raises:
        ValueError: Arguments contradict each other.

    >>> job = Job(image="gcr.io/p/trainer:1", base_output_dir="gs://bkt/out",
    ...           workers=4, ps=2, args=["--max_steps=10"])
    >>> job.shape
    'chief, 4 workers, 2 ps'
    >>> [pool["replicaCount"] for pool in job.spec()["workerPoolSpecs"]]
    [1, 4, 2]
    """

    base_output_dir: str = flag(
        dataclasses.MISSING, "gs:// folder of checkpoints, summaries, exports"
    )
    reduction_servers: int = flag(0, "reduction servers, for GPUs' all-reduce")
    machine: Machine = Machine()
    chief_machine: Machine = Machine()
    ps_machine: Machine = Machine()
    evaluator_machine: Machine = Machine()
    reduction_machine: Machine = Machine(machine_type="n1-highcpu-16")
    packages: Sequence[str] = flag(
        (),
        "gs:// sdist or wheel, instead of an image; can be repeated",
        name="package",
    )
    executor_image: str | None = flag(
        None, "image with Python 3.11 or later that installs the packages"
    )
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    spot: bool = flag(
        False, "use cheaper VMs that may be preempted; the job then restarts"
    )
    flex_start: bool = flag(False, "queue until all tasks can get machines")
    max_wait_secs: int | None = flag(
        None, "longest wait in the --flex_start queue: 90m, 12h or 3d (24h)"
    )
    timeout_secs: int | None = flag(None, "longest run: 90m, 12h or 3d (7d)")
    restart_job_on_worker_restart: bool | None = flag(
        None, "restart all tasks if one restarts (default for all-reduce only)"
    )
    disable_retries: bool = flag(False, "do not let the service retry the job")
    network: str | None = flag(None, "projects/NUMBER/global/networks/NAME")
    network_attachment: str | None = flag(None, "for Private Service Connect")
    persistent_resource: str | None = flag(None, "ID of machines to run on")
    web_access: bool = flag(False, "allow a browser shell into each task")
    tensorboard: str | None = flag(
        None, "projects/NUMBER/locations/REGION/tensorboards/ID"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction_servers and (self.ps or not self.workers):
            raise ValueError(
                "Argument `reduction_servers` needs `workers` and excludes "
                "`ps`: they sum the gradients of all-reduce. Received: "
                f"reduction_servers={self.reduction_servers}, "
                f"workers={self.workers}, ps={self.ps}."
            )
        if self.flex_start and self.spot:
            raise ValueError("Set at most one of `flex_start` and `spot`.")
        if bool(self.image) == bool(self.packages):
            raise ValueError(
                "Pass the program to run as exactly one of `image` and "
                f"`packages`. Received: image={self.image!r}, "
                f"packages={list(self.packages)}."
            )
        if bool(self.packages) != bool(self.executor_image):
            raise ValueError(
                "Argument `packages` needs an `executor_image`, with Python "
                "3.11 or later, to install them in. With `image`, omit it."
            )

    @property
    def shape(self) -> str:
        """The tasks in words, such as "chief, 4 workers, 2 ps, evaluator"."""
        tasks = ["chief" if self.workers else "one machine"]
        if count := self.workers:
            tasks.append(f"{count} worker{'s' * (count > 1)}")
        if self.ps:
            tasks.append(f"{self.ps} ps")
        if count := self.reduction_servers:
            tasks.append(f"{count} reduction server{'s' * (count > 1)}")
        return ", ".join(tasks + ["evaluator"] * self.evaluator)

    def spec(self) -> dict[str, Any]:
        """Returns the `CustomJobSpec` as JSON.

        Warns if google-cloud-aiplatform is not installed; only tfdist's own
        rules are checked then.

        Raises:
            ValueError: The service would reject the job; lists all problems.
        """
        return checked(self.unchecked_spec())

    def unchecked_spec(self) -> dict[str, Any]:
        """Returns the `CustomJobSpec` without validation."""
        restart = self.restart_job_on_worker_restart
        if restart is None and self.workers and not self.ps:
            restart = True
        timeout, wait = self.timeout_secs, self.max_wait_secs
        strategy = "SPOT" if self.spot else None
        scheduling = {
            "timeout": None if timeout is None else f"{timeout}s",
            "restartJobOnWorkerRestart": restart,
            "strategy": "FLEX_START" if self.flex_start else strategy,
            "maxWaitDuration": None if wait is None else f"{wait}s",
            "disableRetries": self.disable_retries or None,
        }
        attachment = {"networkAttachment": self.network_attachment}
        spec = {
            "persistentResourceId": self.persistent_resource,
            "workerPoolSpecs": self._pools(),
            "scheduling": given(scheduling) or None,
            "baseOutputDirectory": {"outputUriPrefix": self.base_output_dir},
            "serviceAccount": self.service_account,
            "network": self.network,
            "pscInterfaceConfig": given(attachment) or None,
            "tensorboard": self.tensorboard,
            "enableWebAccess": self.web_access or None,
        }
        return given(spec)

    def _pools(self) -> list[dict[str, Any]]:
        """Returns the worker pools: chief, workers, ps, evaluator."""
        chief_machine = self.chief_machine if self.ps else self.machine
        third = self._pool(self.ps, self.ps_machine, PS_ENV)
        if self.reduction_servers:
            third = {
                **self.reduction_machine.fields(),
                "replicaCount": self.reduction_servers,
                "containerSpec": {"imageUri": REDUCTION_SERVER_IMAGE},
            }
        pools = [
            self._pool(1, chief_machine),
            self._pool(self.workers, self.machine),
            third,
            self._pool(int(self.evaluator), self.evaluator_machine),
        ]
        while not pools[-1]:
            pools.pop()
        return pools

    def _pool(
        self, replicas: int, machine: Machine, env: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        """Returns a worker pool, or {} for a pool without replicas."""
        if not replicas:
            return {}
        all_env = {**(PS_JOB_ENV if self.ps else {}), **env}
        if self.reduction_servers:
            all_env[REDUCTION_SERVERS] = "1"
        listed = as_list({**all_env, **self.env})
        run = given({"args": [*self.args] or None, "env": listed or None})
        pool = {**machine.fields(), "replicaCount": replicas}
        if self.packages:
            pool["pythonPackageSpec"] = {
                "executorImageUri": self.executor_image,
                "packageUris": list(self.packages),
                "pythonModule": self.module,
                **run,
            }
        else:
            pool["containerSpec"] = {
                "imageUri": self.image,
                "command": ["python", "-m", self.module],
                **run,
            }
        return pool


def checked(spec: dict[str, Any]) -> dict[str, Any]:
    """Validates and returns a generated job; warns and raises as `Job.spec`."""
    try:
        problems = problems_of_job(spec)
    except ImportError as e:
        text = f"The names and values of the job's fields were not checked. {e}"
        warnings.warn(text, stacklevel=3)
        problems = rules_broken_by(spec)
    check(problems)
    return spec


def check(problems: Sequence[str]) -> None:
    """Raises a `ValueError` that lists the problems, if there are any."""
    if problems:
        raise ValueError("\n".join(["The job is wrong:", *problems]))


def as_list(env: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns environment variables in the form that both services expect."""
    return [{"name": name, "value": value} for name, value in env.items()]


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that are not None."""
    return {key: value for key, value in fields.items() if value is not None}

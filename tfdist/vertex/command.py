r"""Job files for Vertex AI: `python -m tfdist.vertex > job.yaml`.

    python -m tfdist.vertex --workers=4 --ps=2 --evaluator \
        --image=us-central1-docker.pkg.dev/my-project/tfdist/trainer:1 \
        --base_output_dir=gs://my-bucket/clicks -- --max_steps=100000

prints the YAML that `gcloud ai custom-jobs create --config` takes, and that
command as a comment. What the job is follows from the counts:

* no `--workers`: one machine, with one accelerator or several, or a TPU;
* `--workers` and `--ps`: parameter servers, with a chief beside them;
* `--workers` alone: all-reduce, in which the chief is a worker as well.
  `--reduction_servers` are Google's, for GPUs of several machines. They stand
  where parameter servers would, so the variable `TFDIST_REDUCTION_SERVERS`
  tells the other tasks what they are.

With `--metric` and `--parameter` it is a hyperparameter tuning job. All of it
is checked (`tfdist.vertex.checks`), and `--check=job.yaml` checks a file that
somebody wrote. Neither TensorFlow nor a network is needed.

It replaces the scale tiers of `gcloud ml-engine jobs submit training`, with
which TF1 jobs were submitted.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tfdist.launch.command import count_flag
from tfdist.vertex import machine_types as machines
from tfdist.vertex.checks import problems_of_job, problems_of_tuning_job
from tfdist.vertex.jobs import (
    REDUCTION_SERVER_IMAGE,
    Job,
    Machine,
    Tuning,
    check,
    given,
    parameter,
)

# Flags that are called as the fields of `Job`.
_SAME_NAME = (
    *("workers", "ps", "evaluator", "reduction_servers", "image"),
    *("evaluator_image", "executor_image", "module", "args", "spot"),
    *("restart_job_on_worker_restart", "disable_retries", "service_account"),
    *("network", "tensorboard"),
)


def gcloud_command(
    spec: Mapping[str, Any], *, region: str, name: str, file: str = "job.yaml"
) -> list[str]:
    """The command that submits a job.

    gcloud refuses a `--config` in which a worker pool is left out between two
    others. It takes such pools as flags, which can say less.

    Args:
        spec: A `CustomJobSpec` or `HyperparameterTuningJob`.
        region: Where it runs, such as "us-central1".
        name: Under which the console shows it.
        file: Where the YAML of `spec` is.

    Raises:
        ValueError: the flags cannot say what `spec` does.
    """
    is_tuning = "studySpec" in spec
    command = [
        *["gcloud", "ai", "hp-tuning-jobs" if is_tuning else "custom-jobs"],
        *["create", f"--region={region}", f"--display-name={name}"],
        f"--config={file}",
    ]
    pools = spec.get("workerPoolSpecs", [])
    if all(pools):
        return command
    first = pools[0].get("containerSpec", {})
    for pool in pools:
        command.append(f"--worker-pool-spec={_pool_flag(pool)}")
        if pool.get("containerSpec", first).get("args") != first.get("args"):
            raise ValueError("gcloud gives every worker pool the same args.")
    for flag in ("command", "args"):
        if first.get(flag):
            command.append(f"--{flag}={_list_flag(first[flag])}")
    return command


def _pool_flag(pool: Mapping[str, Any]) -> str:
    """A worker pool as the value of `--worker-pool-spec`."""
    if not pool:
        return ""
    program, machine = pool.get("containerSpec", {}), pool["machineSpec"]
    if "diskSpec" in pool or "env" in program or not program:
        raise ValueError(
            "An evaluator without parameter servers leaves a worker pool out, "
            "and gcloud takes such jobs only as flags, which know neither "
            "disks nor variables nor several packages. Leave those out."
        )
    keys = {
        "machine-type": machine["machineType"],
        "replica-count": pool["replicaCount"],
        "accelerator-type": machine.get("acceleratorType"),
        "accelerator-count": machine.get("acceleratorCount"),
        "container-image-uri": program["imageUri"],
    }
    return ",".join(f"{k}={v}" for k, v in given(keys).items())


def _list_flag(values: Sequence[str]) -> str:
    """A list as gcloud's flags take it, whatever its entries hold.

    >>> _list_flag(["--a=1,2", "--b"])
    '^:^--a=1,2:--b'
    """
    used = "".join(values)
    delimiter = next(c for c in ",:;|!~%@" if c not in used)
    joined = delimiter.join(values)
    return joined if delimiter == "," else f"^{delimiter}^{joined}"


def to_yaml(
    spec: Mapping[str, Any],
    *,
    shape: str,
    made_by: Sequence[str],
    submit: Sequence[str],
) -> str:
    """The job file: comments that say what it is, then the YAML.

    Args:
        spec: A `CustomJobSpec` or `HyperparameterTuningJob`.
        shape: Its tasks in words.
        made_by: The command that made it.
        submit: The command that submits it.
    """
    head = [
        f"# {shape}. Made by:",
        *_comment(made_by),
        "# Submit it with:",
        *_comment(submit),
        *_notes(spec),
    ]
    body = yaml.safe_dump(dict(spec), sort_keys=False, width=10_000)
    return "\n".join(head) + "\n" + body


def _comment(command: Sequence[str]) -> list[str]:
    """A command as lines of a comment, to be pasted without the marks."""
    lines = ["#  "]
    for word in map(_quoted, command):
        if len(lines[-1]) + len(word) > 76 and len(lines[-1]) > 4:
            lines[-1] += " \\"
            lines.append("#    ")
        lines[-1] += f" {word}"
    return lines


def _quoted(word: str) -> str:
    r"""A word as bash reads it, on one line.

    >>> print(_quoted("--a=b"), _quoted("b c"), _quoted("b\nc"))
    --a=b 'b c' $'b\nc'
    """
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.encode("unicode_escape").decode().replace("'", "\\'")
    return f"$'{escaped}'"


def _notes(spec: Mapping[str, Any]) -> list[str]:
    """What the image must hold that our Dockerfile does not install."""
    pools = spec.get("trialJobSpec", spec)["workerPoolSpecs"]
    notes = []
    if machines.is_tpu(pools[0]["machineSpec"]["machineType"]):
        notes.append(
            "# TensorFlow 2.21 has no package for TPUs: the image must bring "
            "one that has."
        )
    if any(_image(pool) == REDUCTION_SERVER_IMAGE for pool in pools):
        notes.append(
            "# The image needs NVIDIA's NCCL and Google's apt package "
            "google-reduction-server."
        )
    return notes


def _image(pool: Mapping[str, Any]) -> str | None:
    return pool.get("containerSpec", {}).get("imageUri")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfdist.vertex",
        usage="%(prog)s [flags] -- [flags of the trainer] > job.yaml",
        description="Prints the YAML of a job on Vertex AI.",
        allow_abbrev=False,
    )
    _add_shape(parser.add_argument_group("the cluster"))
    _add_machines(parser.add_argument_group("its machines"))
    _add_program(parser.add_argument_group("what they run"))
    _add_settings(parser.add_argument_group("the job"))
    _add_tuning(parser.add_argument_group("hyperparameter tuning"))
    return parser


def _add_shape(group: argparse._ArgumentGroup) -> None:
    for flag, what in (
        ("--workers", "workers, beside the chief"),
        ("--ps", "parameter servers"),
        ("--reduction_servers", "reduction servers, for all-reduce of GPUs"),
    ):
        group.add_argument(
            flag, type=count_flag, default=0, metavar="N", help=f"{what} (0)"
        )
    group.add_argument(
        "--evaluator", action="store_true", help="adds an evaluator"
    )


def _add_machines(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, Machine().machine_type
    add(
        "--machine",
        default=default,
        metavar="TYPE",
        help=f"of what computes the gradients ({default})",
    )
    add(
        "--accelerator",
        type=_accelerator,
        default=(None, 0),
        metavar="TYPE[:N]",
        help="on each of those, such as NVIDIA_TESLA_T4:2 or TPU_V3:8",
    )
    add("--tpu_topology", metavar="TOPOLOGY", help="of a TPU v5e, as 2x2")
    add("--boot_disk_gb", type=int, metavar="GB", help="of those (100)")
    for role, what in (
        ("chief", "the chief, where there are parameter servers"),
        ("ps", "parameter servers"),
        ("evaluator", "the evaluator"),
        ("reduction", "reduction servers"),
    ):
        usual = "n1-highcpu-16" if role == "reduction" else default
        add(
            f"--{role}_machine",
            default=usual,
            metavar="TYPE",
            help=f"of {what} ({usual})",
        )
    add(
        "--evaluator_accelerator",
        type=_accelerator,
        default=(None, 0),
        metavar="TYPE[:N]",
        help="on the evaluator",
    )


def _add_program(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--image", metavar="URI", help="container image of every task")
    add("--evaluator_image", metavar="URI", help="another for the evaluator")
    add(
        "--package",
        action="append",
        default=[],
        metavar="URI",
        help="instead of --image: a gs:// sdist or wheel; can be repeated",
    )
    add(
        "--executor_image",
        metavar="URI",
        help="with --package: an image with Python 3.11 or later",
    )
    add("--module", default="trainer.task", help="what is run (trainer.task)")
    add(
        "--env",
        action="append",
        type=_variable,
        default=[],
        metavar="NAME=VALUE",
        help="a variable of every task; can be repeated",
    )
    add("args", nargs="*", help=argparse.SUPPRESS)


def _add_settings(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--base_output_dir",
        metavar="URI",
        help="gs:// folder of checkpoints, summaries and exports",
    )
    add("--name", default="tfdist", help="shown by the console (tfdist)")
    add("--region", default="us-central1", help="(us-central1)")
    add("--spot", action="store_true", help="cheaper VMs that may be taken")
    add(
        "--timeout",
        type=_seconds,
        metavar="TIME",
        help="such as 90m, 12h or 3d (7d)",
    )
    add(
        "--restart_job_on_worker_restart",
        action=argparse.BooleanOptionalAction,
        help="(for all-reduce only)",
    )
    add("--disable_retries", action="store_true", help="of a failed job")
    add("--service_account", metavar="EMAIL", help="whose rights it has")
    add("--network", metavar="NAME", help="projects/NUMBER/global/networks/...")
    add(
        "--tensorboard",
        metavar="NAME",
        help="projects/NUMBER/locations/REGION/tensorboards/ID",
    )
    add(
        "--check",
        metavar="FILE",
        help="only checks the YAML of a job that was written by hand",
    )


def _add_tuning(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--metric", metavar="NAME", help="what the trainer reports")
    add("--goal", choices=("maximize", "minimize"), default="maximize")
    add(
        "--parameter",
        action="append",
        type=_parameter,
        default=[],
        metavar="SPEC",
        help="a flag of the trainer: name=double:MIN:MAX[:log], "
        "name=int:MIN:MAX, name=discrete:1,2,4 or name=categorical:a|b; can "
        "be repeated",
    )
    add("--max_trials", type=count_flag, default=10, metavar="N", help="(10)")
    add(
        "--parallel_trials", type=count_flag, default=2, metavar="N", help="(2)"
    )
    add("--algorithm", choices=("grid", "random"), help="(Bayesian)")


def _accelerator(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"([A-Z][A-Z0-9_]*)(?::([1-9][0-9]*))?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"must be like NVIDIA_TESLA_T4:2. Received: {text!r}"
        )
    return match[1], int(match[2] or 1)


def _seconds(text: str) -> int:
    """The seconds of "90m".

    >>> _seconds("90m"), _seconds("3d")
    (5400, 259200)
    """
    match = re.fullmatch(r"([1-9][0-9]*)([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"must be like 90m, 12h or 3d. Received: {text!r}"
        )
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(
            f"must be NAME=VALUE. Received: {text!r}"
        )
    return name, value


def _parameter(text: str) -> dict[str, Any]:
    try:
        return parameter(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _job(options: argparse.Namespace) -> Job:
    """The job that the flags describe."""
    if not options.base_output_dir:
        raise ValueError(
            "--base_output_dir=gs://bucket/folder is needed: the tasks share "
            "checkpoints there, and what is on a machine goes with it."
        )
    gpu, gpus = options.accelerator
    evaluator_gpu, evaluator_gpus = options.evaluator_accelerator
    return Job(
        base_output_dir=options.base_output_dir,
        machine=Machine(
            machine_type=options.machine,
            accelerator_type=gpu,
            accelerator_count=gpus,
            tpu_topology=options.tpu_topology,
            boot_disk_gb=options.boot_disk_gb,
        ),
        chief_machine=Machine(machine_type=options.chief_machine),
        ps_machine=Machine(machine_type=options.ps_machine),
        evaluator_machine=Machine(
            machine_type=options.evaluator_machine,
            accelerator_type=evaluator_gpu,
            accelerator_count=evaluator_gpus,
        ),
        reduction_machine=Machine(machine_type=options.reduction_machine),
        packages=options.package,
        env=dict(options.env),
        timeout_secs=options.timeout,
        **{name: getattr(options, name) for name in _SAME_NAME},
    )


def _tuning(options: argparse.Namespace) -> Tuning | None:
    """What the flags vary, if anything."""
    if not options.metric and not options.parameter:
        return None
    if not options.metric or not options.parameter:
        raise ValueError(
            "--metric and --parameter belong together. Received: "
            f"metric={options.metric!r}, {len(options.parameter)} parameters."
        )
    algorithm = options.algorithm and f"{options.algorithm}_search".upper()
    return Tuning(
        metric=options.metric,
        parameters=options.parameter,
        goal=options.goal.upper(),
        max_trials=options.max_trials,
        parallel_trials=options.parallel_trials,
        algorithm=algorithm,
    )


def _check_file(path: str) -> None:
    """Checks a job file of either kind.

    Raises:
        OSError: it cannot be read.
        ValueError: it is wrong, with all the reasons.
    """
    with open(path) as file:
        try:
            spec = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is no YAML: {error}") from None
    is_tuning = isinstance(spec, dict) and "studySpec" in spec
    check(problems_of_tuning_job(spec) if is_tuning else problems_of_job(spec))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `python -m tfdist.vertex --help`.

    Args:
        argv: Arguments. Default: those of the process.

    Returns:
        0. A job that is wrong exits with 2 and a message.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.check:
            _check_file(options.check)
            return 0
        job, tuning = _job(options), _tuning(options)
        spec = tuning.job(job, options.name) if tuning else job.spec()
        trials = f"{tuning.max_trials} trials of " if tuning else ""
        text = to_yaml(
            spec,
            shape=f"{trials}{job.shape}",
            made_by=["python", "-m", "tfdist.vertex", *argv],
            submit=gcloud_command(
                spec, region=options.region, name=options.name
            ),
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(text, end="")
    return 0

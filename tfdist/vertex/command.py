r"""Job files for Vertex AI: `python -m tfdist.vertex > job.yaml`.

    python -m tfdist.vertex --workers=4 --ps=2 --evaluator \
        --image=us-central1-docker.pkg.dev/my-project/tfdist/trainer:1 \
        --base_output_dir=gs://my-bucket/clicks -- --max_steps=100000

prints the YAML that `gcloud ai custom-jobs create --config` takes, and that
command as a comment. The counts say what the job is:

* no `--workers`: one machine, with one accelerator or several, or a TPU;
* `--workers` and `--ps`: parameter servers, with a chief beside them;
* `--workers` alone: all-reduce, in which the chief is a worker as well.
  `--reduction_servers` are Google's, for GPUs of several machines.

With `--metric` and `--parameter` it is a hyperparameter tuning job. All of it
is checked (`tfdist.vertex.checks`), and `--check=job.yaml` checks a file that
somebody wrote. Neither TensorFlow nor a network is needed.

It replaces the scale tiers of `gcloud ml-engine jobs submit training`, with
which TF1 jobs were submitted.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from tfdist.launch.command import count_flag
from tfdist.vertex.checks import problems_of_job
from tfdist.vertex.job_file import gcloud_command, to_yaml
from tfdist.vertex.jobs import Job, Machine, check
from tfdist.vertex.tuning import Tuning, parameter


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfdist.vertex",
        usage="%(prog)s [flags] -- [flags of the trainer] > job.yaml",
        description="Prints the YAML of a job on Vertex AI.",
        allow_abbrev=False,
    )
    count: dict[str, Any] = {"type": count_flag, "metavar": "N"}
    machine: dict[str, Any] = {"default": "n1-standard-4", "metavar": "TYPE"}
    accelerator: dict[str, Any] = {"type": _accelerator, "metavar": "TYPE[:N]"}
    many: dict[str, Any] = {"action": "append", "default": []}

    add = parser.add_argument_group("the cluster").add_argument
    add("--workers", default=0, **count, help="workers, beside the chief (0)")
    add("--ps", default=0, **count, help="parameter servers (0)")
    add("--evaluator", action="store_true", help="adds an evaluator")
    text = "reduction servers, for all-reduce of GPUs (0)"
    add("--reduction_servers", default=0, **count, help=text)

    add = parser.add_argument_group("its machines").add_argument
    text = "of what computes the gradients (n1-standard-4)"
    add("--machine", **machine, help=text)
    text = "on each of those, such as NVIDIA_TESLA_T4:2 or TPU_V3:8"
    add("--accelerator", **accelerator, default=(None, 0), help=text)
    add("--tpu_topology", metavar="TOPOLOGY", help="of a TPU v5e, as 2x2")
    add("--boot_disk_gb", type=int, metavar="GB", help="of those (100)")
    text = "of the chief, where there are parameter servers"
    add("--chief_machine", **machine, help=text)
    add("--ps_machine", **machine, help="of parameter servers (n1-standard-4)")
    add("--evaluator_machine", **machine, help="of the evaluator")
    text = "on the evaluator"
    add("--evaluator_accelerator", **accelerator, default=(None, 0), help=text)
    machine["default"] = "n1-highcpu-16"
    text = "of reduction servers (n1-highcpu-16)"
    add("--reduction_machine", **machine, help=text)

    add = parser.add_argument_group("what they run").add_argument
    add("--image", metavar="URI", help="container image of every task")
    add("--evaluator_image", metavar="URI", help="another for the evaluator")
    text = "instead of --image: a gs:// sdist or wheel; can be repeated"
    add("--package", dest="packages", **many, metavar="URI", help=text)
    text = "with --package: an image with Python 3.11 or later"
    add("--executor_image", metavar="URI", help=text)
    add("--module", default="trainer.task", help="what is run (trainer.task)")
    text = "a variable of every task; can be repeated"
    add("--env", **many, type=_variable, metavar="NAME=VALUE", help=text)
    add("args", nargs="*", help=argparse.SUPPRESS)

    add = parser.add_argument_group("the job").add_argument
    text = "gs:// folder of checkpoints, summaries and exports"
    add("--base_output_dir", metavar="URI", help=text)
    add("--name", default="tfdist", help="shown by the console (tfdist)")
    add("--region", default="us-central1", help="(us-central1)")
    add("--spot", action="store_true", help="cheaper VMs that may be taken")
    text = "such as 90m, 12h or 3d (7d)"
    add(
        "--timeout",
        dest="timeout_secs",
        type=_seconds,
        metavar="TIME",
        help=text,
    )
    add(
        "--restart_job_on_worker_restart",
        action=argparse.BooleanOptionalAction,
        help="(for all-reduce only)",
    )
    add("--disable_retries", action="store_true", help="of a failed job")
    add("--service_account", metavar="EMAIL", help="whose rights it has")
    add("--network", metavar="NAME", help="projects/NUMBER/global/networks/...")
    text = "projects/NUMBER/locations/REGION/tensorboards/ID"
    add("--tensorboard", metavar="NAME", help=text)
    text = "only checks the YAML of a job that was written by hand"
    add("--check", metavar="FILE", help=text)

    add = parser.add_argument_group("hyperparameter tuning").add_argument
    add("--metric", metavar="NAME", help="what the trainer reports")
    add("--goal", choices=("maximize", "minimize"), default="maximize")
    text = (
        "a flag of the trainer: name=double:MIN:MAX[:log], name=int:MIN:MAX, "
        "name=discrete:1,2,4 or name=categorical:a|b; can be repeated"
    )
    add("--parameter", **many, type=_parameter, metavar="SPEC", help=text)
    add("--max_trials", **count, default=10, help="(10)")
    add("--parallel_trials", **count, default=2, help="(2)")
    add("--algorithm", choices=("grid", "random"), help="(Bayesian)")
    return parser


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
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _job(options: argparse.Namespace) -> Job:
    """The job that the flags describe, which are called as its fields."""
    if not options.base_output_dir:
        raise ValueError(
            "--base_output_dir=gs://bucket/folder is needed: the tasks share "
            "checkpoints there, and what is on a machine goes with it."
        )
    values = vars(options) | {"env": dict(options.env)}
    for role in ("chief_machine", "ps_machine", "reduction_machine"):
        values[role] = Machine(machine_type=values[role])
    gpu, count = options.evaluator_accelerator
    values["evaluator_machine"] = Machine(
        machine_type=options.evaluator_machine,
        accelerator_type=gpu,
        accelerator_count=count,
    )
    gpu, count = options.accelerator
    values["machine"] = Machine(
        machine_type=options.machine,
        accelerator_type=gpu,
        accelerator_count=count,
        tpu_topology=options.tpu_topology,
        boot_disk_gb=options.boot_disk_gb,
    )
    return Job(**{f.name: values[f.name] for f in dataclasses.fields(Job)})


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
    with open(path) as file:
        try:
            spec = yaml.safe_load(file)
        except yaml.YAMLError as e:
            raise ValueError(f"{path} is no YAML: {e}") from None
    check(problems_of_job(spec))


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
    except (ImportError, OSError, ValueError) as e:
        parser.error(str(e))
    print(text, end="")
    return 0

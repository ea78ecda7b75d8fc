r"""Job files for Vertex AI: `python -m tfdist.vertex > job.yaml`.

    python -m tfdist.vertex --workers=4 --ps=2 --evaluator \
        --image=us-central1-docker.pkg.dev/my-project/tfdist/trainer:1 \
        --base_output_dir=gs://my-bucket/clicks -- --max_steps=100000

prints the YAML that `gcloud ai custom-jobs create --config` takes, and that
command as a comment. The flags determine the type of job:

* no `--workers`: one machine, with one or more accelerators, or a TPU;
* `--workers` and `--ps`: parameter servers, workers and a chief;
* `--workers` alone: all-reduce, in which the chief is a worker as well.
  `--reduction_servers` are Google's, for GPUs on several machines.

`--metric` and `--parameter` make it a hyperparameter tuning job. The job is
validated (`tfdist.vertex.checks`); `--check=job.yaml` validates a file that was
written by hand. Neither TensorFlow nor a network is needed.

The command replaces the scale tiers of `gcloud ml-engine jobs submit training`,
with which TF1 jobs were submitted.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from tfdist.launch.options import count_flag
from tfdist.vertex.checks import problems_of_job
from tfdist.vertex.job_file import gcloud_command, to_yaml
from tfdist.vertex.jobs import Job, Machine, check
from tfdist.vertex.tuning import Tuning, parameter

_MACHINES = {
    "machine": "the tasks that compute gradients",
    "chief_machine": "the chief in a job with parameter servers",
    "ps_machine": "parameter servers",
    "evaluator_machine": "the evaluator",
    "reduction_machine": "reduction servers",
}
# A flag -> the flags that have an effect only together with it.
_NEEDED_BY = {
    "ps": "chief_machine ps_machine",
    "evaluator": "evaluator_machine evaluator_accelerator",
    "reduction_servers": "reduction_machine",
    "metric": "goal max_trials parallel_trials algorithm stopping",
}


def add_flags(parser: argparse.ArgumentParser, described_by: type) -> None:
    """Adds flags for the fields of a dataclass that `jobs.flag` created."""
    for field in dataclasses.fields(described_by):
        options: dict[str, Any] = dict(field.metadata)
        if not options:
            continue
        name, default = options.pop("name", field.name), field.default
        options |= {"dest": field.name, "default": default}
        if default is dataclasses.MISSING:
            options["default"] = None
        elif field.type == "bool | None":
            options["action"] = argparse.BooleanOptionalAction
        elif name.endswith("_secs"):
            name, options["type"] = name.removesuffix("_secs"), _seconds
        elif field.type == "int | None":
            options |= {"type": int, "metavar": "N"}
        elif default is False:
            options["action"] = "store_true"
        elif isinstance(default, int):
            options |= {"type": count_flag, "metavar": "N"}
        elif isinstance(default, tuple):
            options |= {"action": "append", "default": [], "metavar": "VALUE"}
        if options["default"]:
            options["help"] += " (%(default)s)"
        parser.add_argument(f"--{name}", **options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfdist vertex",
        usage="%(prog)s [flags] -- [flags of the trainer] > job.yaml",
        description="Prints the YAML of a job on Vertex AI.",
        allow_abbrev=False,
    )
    add_flags(parser, Job)
    add_flags(parser, Machine)
    add = parser.add_argument
    for name, text in _MACHINES.items():
        default = getattr(Job, name).machine_type
        text = f"machine type of {text} (%(default)s)"
        add(f"--{name}", default=default, metavar="TYPE", help=text)
    accelerator: dict[str, Any] = {"type": _accelerator, "default": {}}
    accelerator["metavar"] = "TYPE[:N]"
    text = "accelerators of each --machine: NVIDIA_TESLA_T4:2, TPU_V3:8, ..."
    add("--accelerator", **accelerator, help=text)
    text = "accelerators of the evaluator"
    add("--evaluator_accelerator", **accelerator, help=text)
    many: dict[str, Any] = {"action": "append", "default": []}
    text = "environment variable of every task; can be repeated"
    add("--env", **many, metavar="NAME=VALUE", help=text)
    add("args", nargs="*", help=argparse.SUPPRESS)
    add("--name", default="tfdist", help="job name in the console (tfdist)")
    add("--region", default="us-central1", help="region (us-central1)")
    text = "only validate this YAML job file; print no job"
    add("--check", metavar="FILE", help=text)
    add_flags(parser, Tuning)
    text = (
        "a flag of the trainer to tune: name=double:MIN:MAX[:log], "
        "name=int:MIN:MAX, name=discrete:1,2,4 or name=categorical:a|b; can be "
        "repeated"
    )
    add("--parameter", dest="parameters", **many, metavar="SPEC", help=text)
    return parser


def _accelerator(text: str) -> dict[str, Any]:
    """Parses "NVIDIA_TESLA_T4:2" into fields of a `Machine`."""
    match = re.fullmatch(r"([A-Z][A-Z0-9_]*)(?::([1-9][0-9]*))?", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"must have the form NVIDIA_TESLA_T4:2. Received: {text!r}"
        )
    count = int(match[2] or 1)
    return {"accelerator_type": match[1], "accelerator_count": count}


def _seconds(text: str) -> int:
    """Parses a duration such as "90m" into seconds.

    >>> _seconds("90m"), _seconds("3d")
    (5400, 259200)
    """
    match = re.fullmatch(r"([1-9][0-9]*)([smhd])", text)
    if not match:
        raise argparse.ArgumentTypeError(
            f"must have the form 90m, 12h or 3d. Received: {text!r}"
        )
    return int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _check_all_count(
    options: argparse.Namespace, default: Callable[[str], Any]
) -> None:
    """Raises a `ValueError` if flags are set that the job has no use for."""
    unused = [
        f"--{flag} requires --{needed}."
        for needed, flags in _NEEDED_BY.items()
        for flag in flags.split()
        if not getattr(options, needed)
        and getattr(options, flag) != default(flag)
    ]
    if unused:
        raise ValueError("\n".join(unused))


def _job(options: argparse.Namespace) -> Job:
    """Returns the job that the flags, named like its fields, describe."""
    if not options.base_output_dir:
        raise ValueError(
            "--base_output_dir=gs://bucket/folder is required: the tasks share "
            "checkpoints there, and local disks are deleted after the job."
        )
    values = vars(options)
    if wrong := [text for text in options.env if "=" not in text]:
        raise ValueError(f"--env must be NAME=VALUE. Received: {wrong[0]!r}")
    values["env"] = dict(text.split("=", 1) for text in options.env)
    fields = dataclasses.fields(Machine)
    given = {f.name: values[f.name] for f in fields if f.metadata}
    further = {
        "machine": {**options.accelerator, **given},
        "evaluator_machine": options.evaluator_accelerator,
    }
    for name in _MACHINES:
        more = further.get(name, {})
        values[name] = Machine(machine_type=values[name], **more)
    return Job(**{f.name: values[f.name] for f in dataclasses.fields(Job)})


def _tuning(options: argparse.Namespace) -> Tuning | None:
    """Returns the tuning that the flags describe, or None."""
    if bool(options.metric) != bool(options.parameters):
        raise ValueError(
            "Pass both of --metric and --parameter, or neither. Received: "
            f"metric={options.metric!r}, {len(options.parameters)} parameters."
        )
    if not options.metric:
        return None
    values = vars(options)
    values["parameters"] = list(map(parameter, options.parameters))
    names = [field.name for field in dataclasses.fields(Tuning)]
    return Tuning(**{name: values[name] for name in names})


def _check_file(path: str) -> None:
    with open(path) as file:
        try:
            spec = yaml.safe_load(file)
        except yaml.YAMLError as e:
            raise ValueError(f"{path} is not valid YAML: {e}") from None
    check(problems_of_job(spec))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; exits with 2 and a message if the job is invalid."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.check:
            _check_file(options.check)
            return 0
        _check_all_count(options, parser.get_default)
        job, tuning = _job(options), _tuning(options)
        spec = tuning.job(job, options.name) if tuning else job.spec()
        trials = f"{tuning.max_trials} trials of " if tuning else ""
        shape = f"{trials}{job.shape}"
        made_by = ["python", "-m", "tfdist.vertex", *argv]
        submit = gcloud_command(spec, region=options.region, name=options.name)
        text = to_yaml(spec, shape=shape, made_by=made_by, submit=submit)
    except (ImportError, OSError, ValueError) as e:
        parser.error(str(e))
    print(text, end="")
    return 0

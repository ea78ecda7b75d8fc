"""The text of a job file for Vertex AI, and the command that submits it."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tfdist.vertex.checks import is_tuning
from tfdist.vertex.jobs import REDUCTION_SERVER_IMAGE, given

# Strings in YAML 1.1 that YAML 1.2 or Go's YAML reads as numbers or booleans.
_OTHER_TYPE = re.compile(
    r"[-+]?(\.?[0-9][0-9_.]*[eE][-+]?[0-9]+|0o?[0-7_]+)|[yYnN]"
)


def gcloud_command(
    spec: Mapping[str, Any], *, region: str, name: str
) -> list[str]:
    """Returns the command that submits the spec of a `Job` or `Tuning`.

    gcloud rejects a `--config` that omits a worker pool between two others, so
    such pools become flags. Raises ValueError if flags cannot express them.
    """
    kind = "hp-tuning-jobs" if is_tuning(spec) else "custom-jobs"
    command = [
        *["gcloud", "ai", kind, "create", f"--region={region}"],
        *[f"--display-name={name}", "--config=job.yaml"],
    ]
    pools = spec.get("workerPoolSpecs", [])
    if all(pools):
        return command
    command += [f"--worker-pool-spec={_pool_flag(pool)}" for pool in pools]
    for flag in ("command", "args"):  # The same in every pool.
        if values := pools[0]["containerSpec"].get(flag):
            command.append(f"--{flag}={_list_flag(values)}")
    return command


def _pool_flag(pool: Mapping[str, Any]) -> str:
    """Returns a worker pool as the value of `--worker-pool-spec`."""
    if not pool:
        return ""
    program, machine = pool.get("containerSpec", {}), pool["machineSpec"]
    further = {"tpuTopology", "reservationAffinity"} & {*machine}
    if "diskSpec" in pool or "env" in program or not program or further:
        raise ValueError(
            "An evaluator without parameter servers leaves a worker pool "
            "empty. gcloud accepts this only in flags, which do not support "
            "disks, variables, reservations, TPU topologies or several "
            "packages. Remove those, or the evaluator."
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
    """Formats a list for a flag of gcloud, whatever characters it contains.

    >>> _list_flag(["--a=1,2", "--b"])
    '^:^--a=1,2:--b'
    """
    used = "".join(values)
    further = map(chr, itertools.count(0xA1))  # Beyond ASCII.
    delimiters = itertools.chain(",:;|!~%@", further)
    delimiter = next(c for c in delimiters if c not in used)
    joined = delimiter.join(values)
    if delimiter == "," and not joined.startswith("^"):
        return joined
    return f"^{delimiter}^{joined}"


class Dumper(yaml.SafeDumper):
    """Also quotes strings that gcloud or kubectl would read as another type.

    >>> print(yaml.dump(["1e-3", "0o17", "y", "a"], Dumper=Dumper), end="")
    - '1e-3'
    - '0o17'
    - 'y'
    - a
    """

    def represent_scalar(
        self, tag: str, value: str, style: str | None = None
    ) -> yaml.ScalarNode:
        """See `yaml.SafeDumper`."""
        if tag.endswith(":str") and _OTHER_TYPE.fullmatch(value):
            style = "'"
        return super().represent_scalar(tag, value, style)


def to_yaml(
    spec: Mapping[str, Any],
    *,
    shape: str,
    made_by: Sequence[str],
    submit: Sequence[str],
) -> str:
    """Returns the job file: explanatory comments, followed by the YAML."""
    lines = [f"# {shape}. Made by:", *_comment(made_by)]
    lines += ["# Submit it with:", *_comment(submit)]
    pools = spec.get("trialJobSpec", spec)["workerPoolSpecs"]
    machine = pools[0]["machineSpec"]
    accelerator = machine.get("acceleratorType", "")
    if "tpuTopology" in machine or accelerator.startswith("TPU"):
        lines.append(
            "# TensorFlow 2.21 has no package for TPUs: the image must bring "
            "one that has."
        )
    images = [pool.get("containerSpec", {}).get("imageUri") for pool in pools]
    if REDUCTION_SERVER_IMAGE in images:
        lines.append(
            "# The image needs NVIDIA's NCCL and Google's apt package "
            "google-reduction-server."
        )
    body = yaml.dump(dict(spec), Dumper=Dumper, sort_keys=False, width=10_000)
    return "\n".join([*lines, body])


def _comment(command: Sequence[str]) -> list[str]:
    """Returns a command as comment lines; paste it without the leading #."""
    lines = ["#  "]
    for word in map(_quoted, command):
        if len(lines[-1]) + len(word) > 76 and len(lines[-1]) > 4:
            lines[-1] += " \\"
            lines.append("#    ")
        lines[-1] += f" {word}"
    return lines


def _quoted(word: str) -> str:
    r"""Quotes a word for bash, on one line.

    >>> print(_quoted("--a=b"), _quoted("b c"), _quoted("b\nc"))
    --a=b 'b c' $'b\x0ac'
    """
    if word.isprintable():
        return shlex.quote(word)
    # Not \u, which bash does not decode unless the locale is UTF-8.
    escaped = (
        c
        if c.isprintable() and c not in "\\'"
        else "".join(rf"\x{byte:02x}" for byte in c.encode())
        for c in word
    )
    return f"$'{''.join(escaped)}'"

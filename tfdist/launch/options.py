"""The flags of `python -m tfdist.launch`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from tfdist.cluster.tf_config import LAST_CALL_SECS


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the flags, or exits; sets `command`, the command of each task."""
    parser = argparse.ArgumentParser(
        prog="tfdist launch",
        usage="%(prog)s [flags] (-m MODULE | SCRIPT) [its arguments]",
        description="Runs a program as every task of a local cluster.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    limits: Any = {"type": range_flag, "metavar": "N|MIN:MAX"}
    number: Any = {"type": count_flag, "metavar": "N"}
    seconds: Any = {"type": float, "metavar": "SECONDS"}
    more = "MIN:MAX starts with MIN, and `tfdist resize` changes it"
    text = f"workers, besides the chief (default 0); {more}"
    add("--workers", **limits, default=(0, 0), help=text)
    text = f"parameter servers (default 0); {more}"
    add("--ps", **limits, default=(0, 0), help=text)
    text = "workers of a tf.data service, besides its dispatcher (default 0)"
    add("--data_workers", **number, default=0, help=text)
    text = "how often a task that fails is restarted (default 3)"
    add("--max_restarts", **number, default=3, help=text)
    text = (
        "with MIN:MAX and without --ps: how long MIN workers wait for one that "
        "is missing (default %(default)g)"
    )
    add("--last_call_timeout", **seconds, default=LAST_CALL_SECS, help=text)
    add("--evaluator", action="store_true", help="adds an evaluator task")
    text = (
        "private (default): unreachable from outside, and without access to "
        "gs:// or any other machine"
    )
    kinds = ("private", "host")
    add("--network", choices=kinds, default="private", help=text)
    text = (
        "time for the other tasks to end by themselves after the chief "
        "succeeded (default 15)"
    )
    add("--grace_secs", **seconds, default=15.0, help=text)
    text = (
        "let each task import TensorFlow by itself, which takes seconds at "
        "each start"
    )
    add("--no_fork", dest="fork", action="store_false", help=text)
    add("-m", dest="module", action="store_true", help="run a module")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    _complete(options, parser)
    return options


def count_flag(text: str) -> int:
    """The type of flags that are counts, from 0 to 1000."""
    if not text.isdecimal() or int(text) > 1000:
        raise argparse.ArgumentTypeError(
            f"must be an integer from 0 to 1000. Received: {text!r}"
        )
    return int(text)


def range_flag(text: str) -> tuple[int, int]:
    """The type of `--workers` and `--ps`: the minimum and the maximum."""
    least, colon, most = text.partition(":")
    limits = count_flag(least), count_flag(most if colon else least)
    if colon and not 1 <= limits[0] < limits[1]:
        raise argparse.ArgumentTypeError(
            f"MIN:MAX must be 1 or more, MIN below MAX. Received: {text!r}"
        )
    return limits


def _complete(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    """Checks what argparse cannot check, and assembles `command`."""
    program = options.program
    if program[:1] == ["--"]:
        program = program[1:]
    if not program or not program[0]:
        parser.error("a program is required: -m MODULE or SCRIPT")
    options.least_workers, options.workers = options.workers
    options.least_ps, options.ps = options.ps
    if options.ps and not options.workers:
        parser.error(
            "--ps needs --workers: parameter servers hold the variables, "
            f"workers train them. Received: --ps={options.ps} --workers=0"
        )
    for flag in ("grace_secs", "last_call_timeout"):
        secs = getattr(options, flag)
        if not 0 <= secs < float("inf"):
            parser.error(
                f"--{flag} must be seconds, 0 or more. Received: {secs}"
            )
    if options.module:
        program = ["-m", *program]
    elif not os.path.exists(program[0]):
        parser.error(
            f"there is no script {program[0]!r} (for a module: -m MODULE)"
        )
    options.command = [sys.executable, *program]

"""Resizes a job while it trains: `python -m tfdist resize N`.

    python -m tfdist resize 3
    python -m tfdist resize 3 --model_dir=gs://bucket/job
    python -m tfdist resize --ps=2

The first command is for a job that `tfdist.launch --workers=MIN:MAX` runs on
this machine, the second for a job elsewhere, whose workers are started by other
means, and the third for parameter servers (`--ps=MIN:MAX`, or elsewhere). Each
writes a file that the chief and the launcher watch (`tfdist.cluster.size`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tfdist.cluster.tf_config import SIZE_FILE, SIZE_VARIABLE, parse_size

_PREFIX = "tfdist-launch-"


@contextlib.contextmanager
def launchers_file(
    limits: Mapping[str, tuple[int, int]], last_call_timeout: float
) -> Iterator[Path | None]:
    """Creates the size file of a launcher; None if the size is fixed."""
    os.environ.pop(SIZE_VARIABLE, None)
    if all(least == most for least, most in limits.values()):
        yield None
        return
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    path = Path(folder, SIZE_FILE)
    try:
        content: dict[str, object] = {"last_call_timeout": last_call_timeout}
        for key, (least, most) in limits.items():
            if most:
                content |= {key: least, f"min_{key}": least, f"max_{key}": most}
        _write(path, content)
        os.environ[SIZE_VARIABLE] = str(path)
        yield path
    finally:
        os.environ.pop(SIZE_VARIABLE, None)
        shutil.rmtree(folder, ignore_errors=True)


def size_in(path: Path, default: dict[str, int]) -> dict[str, int]:
    """The number of tasks per job in a launcher's file, or else `default`."""
    with contextlib.suppress(OSError, ValueError):  # The chief reports it.
        size = parse_size(path.read_text(), str(path))
        asked = {"worker": size.workers, "ps": size.ps}
        return {job: asked[job] or number for job, number in default.items()}
    return default


def _write(path: Path, content: dict[str, object]) -> None:
    """Writes a file atomically, so that no reader sees half of it."""
    temporary = path.with_suffix(".temp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _launchers() -> dict[int, Path]:
    """Maps the ids of running launchers to their files; deletes stale ones."""
    found = {}
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        match = re.match(rf"{_PREFIX}(\d+)-", folder.name)
        if match and folder.stat().st_uid == os.getuid():
            if Path("/proc", match[1]).exists():
                found[int(match[1])] = folder / SIZE_FILE
            else:
                shutil.rmtree(folder, ignore_errors=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tfdist resize",
        description="Changes how many workers and ps a job has.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("workers", type=int, nargs="?", metavar="N", help="workers, 1 or more")
    add("--ps", type=int, metavar="N", help="parameter servers, 1 or more")
    where = parser.add_mutually_exclusive_group()
    text = "directory of a job whose workers are started by other means"
    where.add_argument("--model_dir", help=text)
    text = "process id of the launcher (default: the only one)"
    where.add_argument("--launcher", type=int, metavar="PID", help=text)
    options = parser.parse_args(argv)
    given = {"workers": options.workers, "ps": options.ps}
    asked = {key: n for key, n in given.items() if n is not None}
    if not asked or min(asked.values()) < 1:
        parser.error(f"N must be 1 or more. Received: {asked}")
    if options.model_dir:
        return _resize_in(options.model_dir, asked, parser)
    found = _launchers()
    if options.launcher is not None:
        found = {p: f for p, f in found.items() if p == options.launcher}
    if len(found) != 1:
        parser.error(
            f"several launchers run: --launcher=PID, one of {sorted(found)}"
            if found
            else "there is no such launcher with MIN:MAX; for a job "
            "elsewhere, give --model_dir"
        )
    ((pid, path),) = found.items()
    content = json.loads(path.read_text())
    for key, n in asked.items():
        least, most = content.get(f"min_{key}", 0), content.get(f"max_{key}", 0)
        if not least <= n <= most:
            parser.error(
                f"the launcher has --{key}={least}:{most}. Received: {n}"
            )
    _write(path, {**content, **asked})
    for key, n in asked.items():
        print(f"launcher {pid}: {key}: {content[key]} -> {n}")
    return 0


def _resize_in(
    model_dir: str, asked: dict[str, int], parser: argparse.ArgumentParser
) -> int:
    from tfdist._tf import storage  # The launcher imports no TensorFlow.

    if not storage.is_object_store(model_dir) and not os.path.isdir(model_dir):
        parser.error(f"there is no directory {model_dir!r}")
    path = os.path.join(model_dir, SIZE_FILE)
    text = storage.read_text(path) or "{}"
    try:
        content = {**json.loads(text), **asked}  # Other keys are kept.
    except (TypeError, ValueError):
        parser.error(f"{path} must be a JSON object. Received: {text[:80]!r}")
    storage.write_text(path, json.dumps(content))
    for key, number in asked.items():
        print(f"{path}: {key}: {number}")
    return 0

"""A job gets other workers while it trains: `python -m tfdist resize N`.

    python -m tfdist resize 3
    python -m tfdist resize 3 --model_dir=gs://bucket/job

The first is for what `tfdist.launch --workers=MIN:MAX` runs on this machine,
the second for a job elsewhere, whose workers somebody else starts. Both write a
file that the chief looks at (`tfdist.cluster.size`), and so does the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfdist.cluster.tf_config import SIZE_FILE, SIZE_VARIABLE, parse_size

_PREFIX = "tfdist-launch-"


@contextlib.contextmanager
def launchers_file(
    least: int, most: int, last_call_timeout: float
) -> Iterator[Path | None]:
    """The file of a launcher and its tasks; None if there is one size alone."""
    os.environ.pop(SIZE_VARIABLE, None)
    if least == most:
        yield None
        return
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    path = Path(folder, SIZE_FILE)
    try:
        content = {"workers": least, "min_workers": least, "max_workers": most}
        _write(path, {**content, "last_call_timeout": last_call_timeout})
        os.environ[SIZE_VARIABLE] = str(path)
        yield path
    finally:
        os.environ.pop(SIZE_VARIABLE, None)
        shutil.rmtree(folder)


def workers_in(path: Path, default: int) -> int:
    """How many workers a launcher's file asks for, else `default`."""
    with contextlib.suppress(OSError, ValueError):  # The chief says so.
        return parse_size(path.read_text(), str(path)).workers
    return default


def _write(path: Path, content: dict[str, object]) -> None:
    """Writes a file at once: no reader sees half of it."""
    temporary = path.with_suffix(".temp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def _launchers() -> dict[int, Path]:
    """Process id and file of the launchers that run; of others it goes."""
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
        description="Changes how many workers of a job train.",
        allow_abbrev=False,
    )
    parser.add_argument("workers", type=int, metavar="N", help="of 1 or more")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--model_dir",
        help="of a job whose workers somebody else starts and stops",
    )
    where.add_argument(
        "--launcher",
        type=int,
        metavar="PID",
        help="process id of the launcher (default: the only one)",
    )
    options = parser.parse_args(argv)
    if options.workers < 1:
        parser.error(f"N must be 1 or more. Received: {options.workers}")
    if options.model_dir:
        return _resize_in(options.model_dir, options.workers, parser)
    found = _launchers()
    if options.launcher is not None:
        found = {p: f for p, f in found.items() if p == options.launcher}
    if len(found) != 1:
        parser.error(
            f"several launchers run: --launcher=PID, one of {sorted(found)}"
            if found
            else "there is no such launcher with --workers=MIN:MAX; of a job "
            "elsewhere name the --model_dir"
        )
    ((pid, path),) = found.items()
    content = json.loads(path.read_text())
    least, most = content["min_workers"], content["max_workers"]
    if not least <= options.workers <= most:
        parser.error(
            f"the launcher has --workers={least}:{most}. "
            f"Received: {options.workers}"
        )
    before = content["workers"]
    _write(path, {**content, "workers": options.workers})
    print(f"launcher {pid}: workers: {before} -> {options.workers}")
    return 0


def _resize_in(
    model_dir: str, number: int, parser: argparse.ArgumentParser
) -> int:
    from tfdist._tf import storage  # The launcher imports no TensorFlow.

    if not storage.is_object_store(model_dir) and not os.path.isdir(model_dir):
        parser.error(f"there is no directory {model_dir!r}")
    path = os.path.join(model_dir, SIZE_FILE)
    content = json.loads(storage.read_text(path) or "{}")  # What else it says.
    storage.write_text(path, json.dumps({**content, "workers": number}))
    print(f"{path}: workers: {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs notebooks of the course and stores their outputs.

    python -m notebooks.execute            # all, and their solutions
    python -m notebooks.execute 01 02      # those with these prefixes

Each notebook runs in its own kernel and its own copy of this directory, so that
only its outputs change here. Needs `pip install -e '.[notebooks]'`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from notebooks import alt

FOLDER = Path(__file__).resolve().parent
CELL_SECS = 600

Edit = Callable[[NotebookNode], None]


def paths() -> list[Path]:
    """Returns relative paths of all notebooks, each before its solutions."""
    found = [*FOLDER.glob("[0-9]*.ipynb"), *FOLDER.glob("solutions/*.ipynb")]
    relative = (path.relative_to(FOLDER) for path in found)
    return sorted(relative, key=lambda path: (path.name, len(path.parts)))


def execute(
    path: Path,
    *,
    edit: Edit | None = None,
    allow_errors: bool = False,
    environ: dict[str, str] | None = None,
) -> NotebookNode:
    """Runs a notebook and returns it with its outputs.

    Args:
        path: Path of the notebook, relative to this directory.
        edit: Function that changes the notebook before it runs.
        allow_errors: Whether to continue after a cell that fails.
        environ: Additional environment variables for the kernel.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
        nbclient.exceptions.CellTimeoutError: A cell took over ten minutes.
    """
    notebook = nbformat.read(FOLDER / path, as_version=4)
    if edit:
        edit(notebook)
    with tempfile.TemporaryDirectory(prefix="course-") as directory:
        copy = Path(directory) / FOLDER.name
        ignored = shutil.ignore_patterns(
            "__pycache__", ".ipynb_checkpoints", "runs"
        )
        shutil.copytree(FOLDER, copy, ignore=ignored)
        client = NotebookClient(
            notebook,
            timeout=CELL_SECS,
            kernel_name="python3",
            allow_errors=allow_errors,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(copy / path.parent)}},
        )
        client.create_kernel_manager()
        # Sockets in a private directory instead of ports of this machine.
        client.km.transport = "ipc"
        client.km.ip = os.path.join(directory, "kernel")
        client.execute(env=_environ(directory) | (environ or {}))
    return notebook


def _environ(directory: str) -> dict[str, str]:
    """A kernel's environment: this checkout's tfdist, no user settings."""
    own = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])
        ),
        "IPYTHONDIR": os.path.join(directory, "ipython"),
        "TMPDIR": directory,
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    # Under pytest, ipykernel would not capture C++ code's output to stderr.
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith("PYTEST")
    }
    return inherited | own


def store(path: Path, notebook: NotebookNode) -> None:
    """Writes a notebook and its outputs, without metadata of this machine.

    Each figure gets an alternative text (`alt.describe`).
    """
    alt.describe(notebook)
    notebook.metadata = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        },
        "language_info": {"name": "python"},
    }
    nbformat.write(notebook, FOLDER / path)


def main(prefixes: list[str]) -> None:
    """Executes the notebooks whose names begin with one of `prefixes`."""
    found = paths()
    for prefix in prefixes:
        if not any(path.name.startswith(prefix) for path in found):
            sys.exit(f"There is no notebook whose name begins with: {prefix}")
    for path in found:
        if prefixes and not path.name.startswith(tuple(prefixes)):
            continue
        start = time.monotonic()
        store(path, execute(path))
        print(f"{path}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What the first cell of each notebook does, once it has found this folder.

That cell is the same in all of them, solutions included. Its text is `CELL`;
after a change of it, or of the address in setup.py, run

    python -m notebooks.prepare

from the checkout, which writes it, and the badge above it, into each.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent

CELL = """\
# @title Setup: run this cell first. It finds the course, or fetches it.
import os
import subprocess

url = os.environ.get("TFDIST_URL", "{url}")
os.environ["GIT_TERMINAL_PROMPT"] = "0"
roots = [f"{{root}}/notebooks" for root in ("tfdist", ".", "..", "../..")]
if not any(os.path.exists(f"{{root}}/prepare.py") for root in roots):
    subprocess.check_call(["git", "clone", "-q", "--depth=1", url, "tfdist"])
os.chdir(next(r for r in roots if os.path.exists(f"{{r}}/prepare.py")))
course = __import__("prepare").course()"""

# Packages that a runtime may have loaded before this one was installed.
LOADED = {
    "tensorflow": "tensorflow",
    "keras": "keras",
    "numpy": "numpy",
    "google.protobuf": "protobuf",
    "matplotlib": "matplotlib",
}


def course() -> ModuleType:
    """The module `course`, after tfdist is installed where it was not.

    Raises:
        RuntimeError: The installation failed, or has replaced a package that
            this process had already loaded.
    """
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    if not is_installed():
        install()
    if stale := outdated():
        raise RuntimeError(
            f"This runtime has loaded {', '.join(stale)}, of other versions "
            "than are now installed. Restart it (in Colab: Runtime, Restart "
            "session; in Jupyter: Kernel, Restart) and run this cell again."
        )
    return importlib.import_module("course")


def is_installed() -> bool:
    """Whether tfdist, and what the notebooks use beside it, can be imported."""
    names = ("tfdist", "keras", "matplotlib", "tensorflow")
    return all(importlib.util.find_spec(name) for name in names)


def install() -> None:
    """Installs this checkout, with what its notebooks need."""
    print("Installing tfdist from", ROOT.name, "(a minute or two) ...")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--editable"]
    done = subprocess.run(
        [*command, f"{ROOT}[notebooks]"], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"pip could not install it.\n{done.stderr}")
    sys.path.append(str(ROOT))  # Other processes find it by themselves.
    importlib.invalidate_caches()


def outdated() -> list[str]:
    """Loaded packages that are not of the version that is installed."""
    found = []
    for module, package in LOADED.items():
        loaded = getattr(sys.modules.get(module), "__version__", "")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.version(package)
            if loaded and loaded.replace("-", "") != installed:
                found.append(f"{package} {loaded}")
    return found


# --- Writing it into the notebooks -------------------------------------------


def repository() -> str:
    """The address that setup.py names."""
    text = (ROOT / "setup.py").read_text()
    (url,) = re.findall(r'^    url="(.*)",$', text, re.MULTILINE)
    return url


def badge(path: Path) -> str:
    """A link that opens the notebook at `path`, relative to here, in Colab."""
    owner = repository().removeprefix("https://github.com/")
    site = "https://colab.research.google.com"
    image = f"{site}/assets/colab-badge.svg"
    target = f"{site}/github/{owner}/blob/main/notebooks/{path}"
    return f"[![Open In Colab]({image})]({target})"


def prepared(notebook: dict[str, Any], path: Path) -> dict[str, Any]:
    """The notebook with its badge and its setup cell as they should be.

    Args:
        notebook: as JSON; it is not changed. Its first cell is the title, its
            second the setup.
        path: of the notebook, relative to this folder.
    """
    title, setup, *others = notebook["cells"]
    text = re.sub(r"^\[!\[Open In Colab\].*\n\n", "", "".join(title["source"]))
    title = {**title, "source": _lines(f"{badge(path)}\n\n{text}")}
    setup = {
        **setup,
        "id": "setup",
        "metadata": {"cellView": "form", "jupyter": {"source_hidden": True}},
        "source": _lines(CELL.format(url=repository())),
    }
    return {**notebook, "cells": [title, setup, *others]}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    """Writes badge and setup cell into every notebook."""
    for path in sorted(FOLDER.glob("**/[0-9]*.ipynb")):
        notebook = json.loads(path.read_text())
        made = prepared(notebook, path.relative_to(FOLDER))
        if made != notebook:
            text = json.dumps(
                made, indent=1, sort_keys=True, ensure_ascii=False
            )
            path.write_text(text + "\n")
            print(path.relative_to(FOLDER))


if __name__ == "__main__":
    main()

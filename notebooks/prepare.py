"""The setup code that the first cell of each notebook runs.

The first cell is the same in all notebooks and solutions; its text is `CELL`.
After changing the text, or the address in setup.py, run

    python -m notebooks.prepare

in the checkout, which writes the cell, and the badge above it, into each.
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

# Packages that a runtime may have loaded before tfdist was installed.
LOADED = {
    "tensorflow": "tensorflow",
    "keras": "keras",
    "numpy": "numpy",
    "google.protobuf": "protobuf",
    "matplotlib": "matplotlib",
}


def course() -> ModuleType:
    """Installs tfdist if necessary, and returns the module `course`.

    Raises:
        RuntimeError: The installation failed, or replaced a package that this
            process had already loaded.
    """
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    if not is_installed():
        install()
    if stale := outdated():
        raise RuntimeError(
            f"This runtime has loaded {', '.join(stale)}, but other versions "
            "are now installed. Restart it (in Colab: Runtime, Restart "
            "session; in Jupyter: Kernel, Restart) and run this cell again."
        )
    return importlib.import_module("course")


def is_installed() -> bool:
    """Whether tfdist and the notebooks' other packages can be imported."""
    names = ("tfdist", "keras", "matplotlib", "tensorflow")
    return all(importlib.util.find_spec(name) for name in names)


def install() -> None:
    """Installs this checkout and the packages that its notebooks need."""
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
    """Returns loaded packages whose version differs from the installed one."""
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
    """Returns the repository's address from setup.py."""
    text = (ROOT / "setup.py").read_text()
    (url,) = re.findall(r'^    url="(.*)",$', text, re.MULTILINE)
    return url


def badge(path: Path) -> str:
    """Returns a link that opens the notebook at `path` in Colab."""
    owner = repository().removeprefix("https://github.com/")
    site = "https://colab.research.google.com"
    image = f"{site}/assets/colab-badge.svg"
    target = f"{site}/github/{owner}/blob/main/notebooks/{path}"
    return f"[![Open In Colab]({image})]({target})"


def prepared(notebook: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the notebook with the current badge and setup cell.

    Args:
        notebook: The notebook's JSON, which is not changed. Its first cell is
            the title, its second the setup.
        path: Path of the notebook, relative to this directory.
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
    """Writes the badge and the setup cell into every notebook."""
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

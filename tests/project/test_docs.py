"""The documentation: its build, and each how-to run as it stands.

A block of a how-to is fenced with what it is: `python` and `sh` run, in order,
in one folder that is empty at first; `python NAME` is a file of that name; what
cannot run here is `sh elsewhere` or `python elsewhere`. A `text` after a block
that ran is what it prints (`...` stands for anything).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_api import WINGS

import tfdist

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
HOWTOS = sorted(path.stem for path in (DOCS / "howto").glob("*.md"))
FENCE = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(howto):
    """Language, its second word and body of each fenced block."""
    return FENCE.findall((DOCS / "howto" / f"{howto}.md").read_text())


@pytest.mark.parametrize("howto", HOWTOS)
def test_form_of_a_howto(howto):
    text = (DOCS / "howto" / f"{howto}.md").read_text()
    assert f"howto/{howto}\n" in (DOCS / "index.md").read_text()
    assert not [x for x in text.splitlines() if len(x) > 80 and x[0] != "|"]
    for language, word, _ in blocks(howto):
        assert language in ("python", "sh", "text", "yaml", "json"), language
        assert word in ("", "elsewhere") or word.endswith(".py")


@pytest.mark.slow
@pytest.mark.parametrize("howto", HOWTOS)
def test_howto(howto, tmp_path):
    folder, programs = tmp_path / "empty", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    # Where tfdist is not installed, but read from the checkout: with -P it
    # starts as an installed command does, without the folder in `sys.path`.
    (programs / "tfdist").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -P -m tfdist "$@"\n'
    )
    (programs / "tfdist").chmod(0o755)
    paths = Path(sys.executable).parent, os.environ["PATH"], programs
    environment = {
        **os.environ,
        "PATH": ":".join(map(str, paths)),
        "PYTHONPATH": str(ROOT),
    }
    for name in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL"):
        environment.pop(name, None)
    said = ""
    for language, word, body in blocks(howto):
        command = {"sh": ["bash", "-euo", "pipefail"], "python": ["python"]}
        if language == "text":
            parts = map(re.escape, body.strip().split("..."))
            assert re.search(".*?".join(parts), said, re.DOTALL), said
        elif word.endswith(".py"):
            (folder / word).write_text(body)
        elif word != "elsewhere" and language in command:
            done = subprocess.run(
                command[language],
                input=body,
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
            )
            said = done.stdout
            assert done.returncode == 0, f"{body}\n{said}"


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(tmp_path):
    """Under the one name that users type; warnings are errors."""
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-qW", "docs", tmp_path / "built"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    told = _ids(tmp_path / "built" / "reference")
    wanted = {
        f"tfdist.{name}"
        if name in tfdist.__all__
        else f"tfdist.{wing}.{name}": wing
        for wing in WINGS
        for name in getattr(tfdist, wing).__all__
    }
    assert {name: told.get(name) for name in wanted} == wanted
    pages = {path.stem for path in (tmp_path / "built/reference").iterdir()}
    assert pages == {*WINGS, "index", "commands"}


def _ids(folder):
    """What is told (not: of what it is a member) -> the page."""
    signature = re.compile(r'<dt class="sig [^>]* id="(tfdist\.[\w.]+)"')
    found = {}
    for path in folder.glob("*.html"):
        for name in signature.findall(path.read_text()):
            assert name not in found, f"{name} is told twice"
            found[name] = path.stem
    return found

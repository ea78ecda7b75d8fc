import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfdist

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """What setuptools makes of setup.py alone, with one package beside it."""
    alone = tmp_path_factory.mktemp("alone")
    shutil.copy(ROOT / "setup.py", alone)
    for package in ("tfdist", "trainer", "tests"):
        (alone / package).mkdir()
        (alone / package / "__init__.py").touch()
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info"], cwd=alone, check=True
    )
    return alone / "tfdist.egg-info"


def test_metadata_without_any_other_file(metadata):
    text = (metadata / "PKG-INFO").read_text()
    assert "Name: tfdist\n" in text
    assert "License: Apache-2.0\n" in text
    assert f"Version: {tfdist.__version__}\n" in text


def test_only_our_packages_are_found(metadata):
    assert (metadata / "top_level.txt").read_text().split() == ["tfdist"]


def test_requirements(metadata):
    text = (metadata / "requires.txt").read_text()
    assert "tensorflow<2.22,>=2.21" in text
    assert "[test]" in text
    assert "[notebooks]" in text


def test_setup_reads_no_file():
    tree = ast.parse((ROOT / "setup.py").read_text())
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    assert calls == {"setup", "find_packages"}


def test_readme_has_the_two_commands_of_ci():
    blocks = (ROOT / "README.md").read_text().split("```sh ci\n")[1:]
    commands = [block.partition("\n```")[0] for block in blocks]
    assert [c.splitlines()[0] for c in commands] == [
        "python -m pip install -e '.[tfds]' && python -m trainer.task",
        "python -m pip install -e '.[test]' && python -m pytest",
    ]

import ast
import os
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
    assert "tensorflow<2.22,>=2.18" in text
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


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An empty folder, into which the wheel is installed, without network."""
    source = tmp_path_factory.mktemp("source")
    shutil.copy(ROOT / "setup.py", source)
    for package in ("tfdist", "trainer"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input"]
    alone = ["--no-deps", "--no-index"]
    wheel = [*pip, "wheel", ".", *alone, "--no-build-isolation"]
    subprocess.run([*wheel, "--wheel-dir=dist"], cwd=source, check=True)
    [path] = (source / "dist").iterdir()
    folder = tmp_path_factory.mktemp("installed")
    install = [*pip, "install", *alone, f"--target={folder}", path]
    subprocess.run(install, check=True)
    return folder


@pytest.mark.slow
def test_wheel_holds_tfdist_alone(installed):
    folders = {path.name for path in installed.iterdir()}
    assert folders == {
        "tfdist",
        f"tfdist-{tfdist.__version__}.dist-info",
        "bin",
    }
    for name in ("__init__.pyi", "py.typed", "README.md"):
        assert (installed / "tfdist" / name).exists()


@pytest.mark.slow
def test_readme_begins_with_a_program_that_runs(installed, tmp_path):
    """Copied into an empty folder, with what is installed, not the checkout."""
    block = (ROOT / "README.md").read_text().split("```python\n")[1]
    program = tmp_path / "program.py"
    program.write_text(block.partition("```")[0] + "print(tfdist.__file__)\n")
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    *_, printed, path = done.stdout.splitlines()
    assert path == str(installed / "tfdist" / "__init__.py")
    history = ast.literal_eval(printed)
    assert history.keys() == {"loss", "auc", "val_loss", "val_auc"}
    assert history["val_auc"][-1] > 0.9

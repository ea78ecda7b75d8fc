"""The command `tfdist`, and what the programs print beside their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_program_has_its_own_name(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: tfdist {name} [")


def test_lists_the_programs(capsys):
    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in COMMANDS)
    assert main(["lunch"]) == 2
    assert "there is no command 'lunch'" in capsys.readouterr().err


def test_without_a_stderr():
    command = f"exec {sys.executable} -m tfdist advice --dense_bytes=1e6 2>&-"
    done = subprocess.run(
        [command], shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "tfdist plan --help",
        "tfdist.placement --help",
        "tfdist.audit --help",
        "tfdist advice --dense_bytes=1e6 --machines=3",
        "trainer.task --max_steps=20 --model_dir={model_dir}",
    ],
)
def test_nothing_but_its_own_lines(command, tmp_path, monkeypatch):
    """No line of TensorFlow's C++, and no warning of Python's."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    words = command.format(model_dir=tmp_path / "model").split()
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    noise = ("I0000", "E0000", "WARNING", "Warning", "To enable")
    assert not any(word in done.stdout for word in noise), done.stdout

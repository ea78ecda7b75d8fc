"""The interpreters of contenders that need other packages than tfdist.

Each has a virtual environment, which is created on first use and kept. A
contender whose packages cannot be installed is reported as missing.
"""

from __future__ import annotations

import pathlib
import shutil
import sys
import sysconfig

from benchmarks import commands

HERE = "here"  # This interpreter.

# Name to what is installed. "beside" says that it is installed beside the
# packages that this interpreter has, so that TensorFlow is the same.
_PACKAGES = {
    "tf_keras": {"requirements": ["tf_keras==2.21.*"], "beside": True},
    "tf_2_15": {"requirements": ["tensorflow==2.15.1"], "beside": False},
}
# Those that TensorFlow 2.15 was built for.
_OLD_PYTHONS = ("python3.11", "python3.10", "python3.9")
_INSTALL_SECS = 1200


class MissingError(Exception):
    """A contender cannot run here."""


class Environments:
    """Virtual environments in one directory.

    Args:
        directory: The directory of the environments.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory.absolute()
        self._missing: dict[str, MissingError] = {}

    def python(self, name: str) -> str:
        """Returns the interpreter of an environment; creates it if necessary.

        Raises:
            MissingError: it cannot be made; says why.
        """
        if name == HERE:
            return sys.executable
        if name in self._missing:
            raise self._missing[name]
        home = self._directory / name
        done = home / "complete"
        if not done.exists():
            print(f"Installing {_PACKAGES[name]['requirements']} ...")
            shutil.rmtree(home, ignore_errors=True)
            try:
                _make(home, **_PACKAGES[name])
            except MissingError as error:
                shutil.rmtree(home, ignore_errors=True)
                self._missing[name] = error
                raise
            done.touch()
        return str(home / "bin" / "python")

    def versions(self, name: str) -> dict[str, str]:
        """Of the packages that matter, in an environment that is there."""
        program = (
            "import importlib.metadata as m, json, platform\n"
            "found = {'python': platform.python_version()}\n"
            "for name in ('tensorflow', 'keras', 'tf_keras', 'numpy'):\n"
            "    try: found[name] = m.version(name)\n"
            "    except m.PackageNotFoundError: pass\n"
            "print(*(f'{k}={v}' for k, v in found.items()))"
        )
        output = _run([self.python(name), "-c", program])
        return dict(pair.split("=") for pair in output.split())

    def made(self) -> list[str]:
        """Names of the environments that are there."""
        found = self._directory.glob("*/complete")
        return sorted(path.parent.name for path in found)


def _make(home: pathlib.Path, requirements: list[str], beside: bool) -> None:
    python = sys.executable if beside else _old_python()
    _run([python, "-m", "venv", str(home)])
    options = []
    if beside:
        [site] = home.glob("lib/python*/site-packages")
        parent = sysconfig.get_path("purelib")
        (site / "beside.pth").write_text(parent + "\n")
        options = ["--no-deps"]
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    _run([*pip, "--no-input", *options, *requirements])


def _old_python() -> str:
    if sys.version_info[:2] <= (3, 11):
        return sys.executable
    for name in _OLD_PYTHONS:
        if path := shutil.which(name):
            return path
    raise MissingError(f"None of {', '.join(_OLD_PYTHONS)} is installed.")


def _run(command: list[str]) -> str:
    try:
        return commands.run(command, _INSTALL_SECS)
    except commands.RunError as error:
        last = str(error).strip().splitlines()[-1]
        told = " ".join(command[1:4])
        raise MissingError(f"{told} failed: {last}") from error

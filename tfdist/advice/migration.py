"""Finds the removed symbols in a program for TF 1 or `tf.estimator`.

    tfdist migrate trainer/ other.py

lists, by file and line, each symbol that TF 2.21 does not have under its name,
or that does not work with tfdist, and what `tfdist/MIGRATION.md` says about it.
No code is executed. Aliases such as `import ... as` and `y = tf.layers` are
resolved; methods of arguments and objects are listed if their name is telling.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

PAGE = Path(__file__).parents[1] / "MIGRATION.md"
# A row of the table with four columns, except for its header.
_ROW = re.compile(r"^\| (?!TF 1)(.*)\|(.*)\|(.*)\|(.*)\|$", re.MULTILINE)


class Row(NamedTuple):
    """A row of the table in `tfdist/MIGRATION.md`, one field per cell."""

    symbols: str
    remains: str  # In TF 2.21: "yes", "v1" (`tf.compat.v1.`), "no", "other".
    replacement: str
    differs: str


def read_table() -> list[Row]:
    """Returns the rows of `tfdist/MIGRATION.md` in order."""
    rows = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [Row(*map(str.strip, cells)) for cells in rows]


class _Names(ast.NodeVisitor):
    """Collects TensorFlow's full names in code, and `.method` for the rest."""

    def __init__(self) -> None:
        self.uses: list[tuple[int, str]] = []  # Line numbers and names.
        self._aliases: dict[str, str] = {}
        self._starred: dict[str, str] = {}

    def _full(self, node: ast.AST) -> str:
        """Returns the full name of a chain of attributes, or ""."""
        if isinstance(node, ast.Attribute):
            value = self._full(node.value)
            return value and f"{value}.{node.attr}"
        name = getattr(node, "id", "")
        return self._aliases.get(name, self._starred.get(name, ""))

    def visit_Import(self, node: Any, module: str = "") -> None:
        """`import tensorflow.x as y` binds y; without `as`, tensorflow."""
        for alias in node.names:
            full = module + alias.name
            root = full.partition(".")[0]
            name = alias.asname or (alias.name if module else root)
            self._aliases[name] = ""
            if root not in ("tensorflow", "tensorflow_estimator"):
                continue
            if alias.name == "*":
                self.uses.append((node.lineno, module[:-1]))
                self._starred.update(_all_of(module[:-1]))
            else:
                self._aliases[name] = full if alias.asname or module else root
                self.uses.append((node.lineno, full))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """`from tensorflow.x import y`."""
        self.visit_Import(node, "." if node.level else f"{node.module}.")

    def visit_Name(self, node: ast.Name) -> None:
        """A name that `from tensorflow.x import *` has imported."""
        is_read = isinstance(node.ctx, ast.Load)
        if is_read and node.id in self._starred.keys() - self._aliases.keys():
            self.uses.append((node.lineno, self._starred[node.id]))

    def visit_Assign(self, node: ast.Assign) -> None:
        """`y = tf.x` makes y an alias; `y = other` removes the alias."""
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._aliases[target.id] = self._full(node.value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """The longest chain of attributes that starts at a known name."""
        full = self._full(node)
        self.uses.append((node.lineno, full or f".{node.attr}"))
        if not full:
            self.visit(node.value)


def uses_in(path: Path) -> list[tuple[int, str]]:
    """Returns the line and full name of each use or import in a file."""
    if path.suffix == ".ipynb":
        raise ValueError("first run `jupyter nbconvert --to script` on it.")
    names = _Names()
    with warnings.catch_warnings(action="ignore"):
        names.visit(ast.parse(path.read_bytes(), path.name))
    return sorted(names.uses)


def look_up(full: str, rows: Mapping[str, Row]) -> tuple[str, Row | None]:
    """Returns a removed symbol and its row or None, else `("", None)`."""
    if full.startswith("."):
        return (full if full in rows else ""), rows.get(full)
    symbol = re.sub(r"^tensorflow(_estimator)?(\.compat\.v1)?", "tf", full)
    symbol = re.sub(r"^(tf\.contrib\.\w+)\.python\.\w+", r"\1", symbol)
    stays = _value(full) is not None
    # In a private module, such as `tf.python.training.x.SessionRunHook`.
    parts = symbol.removeprefix("tf.python.").split(".")[::-1]
    wings = ("estimator", "train") if symbol.startswith("tf.python.") else ()
    of_same_name = (f"tf.{wing}.{part}" for part in parts for wing in wings)
    name = next((n for n in of_same_name if n in rows), symbol)
    while name and name not in rows:
        name = name.rpartition(".")[0]
    other = name and rows[name].remains == "other"
    if name and (".compat.v1." in full or not stays or other):
        return name, rows[name]
    if stays or any(row.startswith(f"{symbol}.") for row in rows):
        return "", None
    v1 = symbol.replace("tf", "tensorflow.compat.v1", 1)
    new = Row(symbol, "v1", f"`tf.compat.v1.{symbol.removeprefix('tf.')}`", "")
    return symbol, None if _value(v1) is None else new


def _value(full: str) -> Any:
    """Returns the object with a full name in TF 2.21, or None."""
    value: Any = tf
    for name in full.split(".")[1:]:
        value = getattr(value, name, None)
    return value


def _all_of(module: str) -> dict[str, str]:
    """Returns the names that `import *` of a module binds, now or in TF 1."""
    old = module.replace("tensorflow", "tf", 1) + "."
    v1 = _value(module.replace("tensorflow", "tensorflow.compat.v1", 1))
    gone = [name for name in _gone_rows() if name.startswith(old)]
    gone = [name.removeprefix(old).split(".")[0] for name in gone]
    names = {*dir(_value(module)), *dir(v1), *gone}
    return {n: f"{module}.{n}" for n in names if not n.startswith("_")}


@functools.cache
def _gone_rows() -> dict[str, Row]:
    """Returns the row of each symbol that is not unchanged in TF 2.21."""
    found: dict[str, Row] = {}
    for row in read_table():
        for name in re.findall(r"`([^`]+)`", row.symbols):
            if row.remains != "yes":
                # TF 2.15 also had the hooks of `tf.train` in `tf.estimator`.
                found.setdefault(name.replace("tf.train", "tf.estimator"), row)
                found[name] = row
    return found


def _programs(path: Path) -> list[Path]:
    """Returns the Python files and notebooks of a folder, or the file."""
    inside = (f for f in path.rglob("*") if f.suffix in (".py", ".ipynb"))
    return sorted(inside) or [path]


def _advice(row: Row | None) -> str:
    if row is None:
        return "unknown"
    what = row.replacement.removeprefix("none: ")
    return f"{'use' if what == row.replacement else 'by hand:'} {what}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if nothing needs to change, else 1."""
    parser = argparse.ArgumentParser(
        "tfdist migrate",
        description="Lists what to change in a TF 1 or tf.estimator program. "
        "Reads only Python 3; convert Python 2 with `2to3 -w` first.",
    )
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders")
    paths = parser.parse_args(argv).paths
    rows, told, unread = _gone_rows(), {""}, 0
    gone: dict[str, Row | None] = {}
    for file in dict.fromkeys(f for path in paths for f in _programs(path)):
        try:
            uses = uses_in(file)
        except (OSError, SyntaxError, ValueError) as e:
            print(f"{file}: not read: {e}")
            unread += 1
            continue
        found = [(line, *look_up(full, rows)) for line, full in uses]
        for line, symbol, row in dict.fromkeys(found):
            if symbol:
                gone[symbol] = row
                print(f"{file}:{line}: {symbol}: {_advice(row)}")
                if row and row.differs not in told:
                    told.add(row.differs)
                    print(f"    {row.differs}")
    known = sum(row is not None for row in gone.values())
    print(f"{len(gone)} symbols are gone; known of these: {known}.")
    return 1 if gone or unread else 0

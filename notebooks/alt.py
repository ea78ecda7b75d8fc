"""Alternative texts of figures, for readers who cannot see them.

The text consists of the figure's headline and labels, which are in the cell
that draws it, unless the cell's metadata contain a text under "alt". It is
stored where IPython stores the `alt` of an `IPython.display.Image`: in the
output's metadata for "image/png".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

_HEADLINES = ("Sketch", "headline", "set_title", "suptitle")
_AXES = {
    "xlabel": "Horizontal axis: ",
    "ylabel": "Vertical axis: ",
    "label": "Series: ",
}


def describe(notebook: Any) -> None:
    """Stores an alternative text for each figure of a notebook.

    Args:
        notebook: The notebook; the metadata of its outputs are changed.
    """
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                source = "".join(cell["source"])
                if text := cell["metadata"].get("alt") or of(source):
                    output["metadata"]["image/png"] = {"alt": text}


def of(source: str) -> str:
    """Extracts a description of a figure from the code that draws it.

    Args:
        source: Source code of the cell.

    Returns:
        The headline and the labels of axes, series and boxes, if they are
        literals. Empty if there are none.
    """
    kinds = ("headline", *_AXES, "box")
    found: dict[str, list[str]] = {kind: [] for kind in kinds}
    for kind, text in _texts(ast.parse(source)):
        if text and text not in found[kind]:
            found[kind].append(text)
    sentences = ["; ".join(found["headline"])]
    if found["box"]:
        sentences.append("A drawing of: " + "; ".join(found["box"]))
    for kind, start in _AXES.items():
        if found[kind]:
            sentences.append(start + "; ".join(found[kind]))
    return ". ".join(sentence for sentence in sentences if sentence)


def _texts(tree: ast.Module) -> Iterator[tuple[str, str]]:
    named: dict[str, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                named.setdefault(target.id, node.value)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        values = [
            named.get(a.id, a) if isinstance(a, ast.Name) else a
            for a in call.args
        ]
        texts = [text for text in map(_literal, values) if text]
        if name in _HEADLINES and texts:
            yield "headline", texts[0]
        elif name in ("set_xlabel", "set_ylabel") and texts:
            yield name.removeprefix("set_"), texts[0]
        elif name == "bars" and len(values) > 3:
            yield "ylabel", _literal(values[3])
            if isinstance(values[2], ast.Dict):
                for key in values[2].keys:
                    yield "label", _literal(key)
        elif name in ("box", "arrow") and texts:
            yield "box", texts[0]
        for keyword in call.keywords:
            if keyword.arg in _AXES:
                yield keyword.arg, _literal(keyword.value)


def _literal(node: ast.AST | None) -> str:
    """A string literal in one line, with dots for an f-string's expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [getattr(part, "value", "...") for part in node.values]
        texts = [part if isinstance(part, str) else "..." for part in parts]
        return " ".join("".join(texts).split())
    return ""

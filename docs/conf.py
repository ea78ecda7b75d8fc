"""Sphinx configuration of these pages, and the reference it generates.

`docs/README.md` explains how to build the pages, and the choice of Sphinx.
"""

import contextlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

import tfdist
import tfdist.__main__ as commands
from tfdist.launch import without_banner

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with without_banner():
    import tensorflow  # noqa: F401
ROOT = Path(__file__).parents[1]

project = "tfdist"
author = "The tfdist authors"
copyright = author
version = release = tfdist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "README.md"]
html_theme = "furo"
html_title = f"tfdist {version}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = html_show_sphinx = html_copy_source = False

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Keras' docstrings are not reST.
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True

napoleon_custom_sections = [
    ("Call arguments", "params_style"),
    "Entered as a scope",
]

# Files of the repository -> pages that include them.
PAGES = {
    "notebooks/glossary.md": "glossary",
    "tfdist/DIFFERS_FROM_FIT.md": "differs_from_fit",
    "tfdist/MIGRATION.md": "migration",
    "tfdist/hooks/CALLBACKS.md": "callbacks",
}
# Descriptions of constants, which cannot have docstrings.
CONSTANTS = {
    "MAX_STALENESS": "Updates of this staleness or more are counted together"
    " (``tfdist.hooks.StalenessHook``).",
    "PERCENTILES": "Percentiles of the updates' staleness in TensorBoard"
    " (``tfdist.hooks.StalenessHook``).",
}
WINGS = [
    name
    for name in tfdist.__all__
    if hasattr(getattr(tfdist, name), "__path__")
]


def _links() -> dict[str, str]:
    """The spellings of a public name in text -> its documented full name."""
    links = {}
    for wing in WINGS:
        for name in getattr(tfdist, wing).__all__:
            full = _told(wing, name)
            links |= {f"tfdist.{name}": full, f"tfdist.{wing}.{name}": full}
            if name != name.lower() or "_" in name:
                links[name] = full  # `fit` and `plan` are ambiguous.
    return links | {f"tfdist.{wing}": f"tfdist.{wing}" for wing in WINGS}


def _told(wing: str, name: str) -> str:
    at_the_top = name in tfdist.__all__
    return f"tfdist.{name}" if at_the_top else f"tfdist.{wing}.{name}"


LINKS = _links()


def make_reference(app: Sphinx) -> None:
    """Writes a page for each wing, the index and the page of commands."""
    pages = {wing: _wing(wing) for wing in WINGS}
    pages |= {"index": _index(), "commands": _commands()}
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    for name, lines in pages.items():
        path, text = folder / f"{name}.rst", "\n".join(lines) + "\n"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _wing(wing: str) -> list[str]:
    module = getattr(tfdist, wing)
    lines = [*_title(f"tfdist.{wing}"), f".. automodule:: tfdist.{wing}", ""]
    for name in sorted(module.__all__, key=str.lower):
        lines += _object(_told(wing, name), getattr(module, name))
    return lines


def _title(text: str, underline: str = "=") -> list[str]:
    return [text, underline * len(text), ""]


def _object(full: str, value: Any) -> list[str]:
    """The directive that documents a name."""
    module, _, name = full.rpartition(".")
    where = f"   :module: {module}"
    if name in CONSTANTS:
        head = [f".. py:data:: {name}", where, f"   :value: {value}"]
        return [*head, "", f"   {CONSTANTS[name]}", ""]
    if not value.__module__.startswith("tfdist."):
        return [f".. py:class:: {name}", where, "", f"   {_summary(value)}", ""]
    if inspect.isclass(value):
        return [f".. autoclass:: {full}", "   :members:", ""]
    return [f".. autofunction:: {full}", ""]


def _summary(value: Any) -> str:
    """The first line of a docstring."""
    if not value.__module__.startswith("tfdist."):
        return f"TensorFlow's own ``tf.compat.v1.train.{value.__name__}``."
    return _as_rest((inspect.getdoc(value) or "").partition("\n")[0])


def _as_rest(text: str) -> str:
    """Converts Markdown's code spans to reST, also in a plural (`Example`s)."""
    return re.sub(
        r"(?<!`)`([^`]+)`(\w?)",
        lambda found: f"``{found[1]}``" + (found[2] and f"\\ {found[2]}"),
        text,
    )


def _index() -> list[str]:
    """Links to all pages, and every public name with its summary line."""
    lines = [
        *_title("Reference"),
        ".. py:module:: tfdist",
        "",
        "The names most familiar from TF1 and Keras are exported at the top "
        "level, such as ``tfdist.Estimator``. Each package's page documents "
        "them and its other names, such as ``tfdist.hooks.ProgressHook``. The "
        "examples assume ``import keras, tfdist``, ``import numpy as np`` and "
        "``import tensorflow as tf``.",
        "",
        ".. toctree::",
        "   :hidden:",
        "",
        *[f"   {page}" for page in [*WINGS, "commands"]],
        "",
    ]
    for wing in WINGS:
        module = getattr(tfdist, wing)
        lines += _title(f":doc:`tfdist.{wing} <{wing}>`", "-")
        lines += [_as_rest(module.__doc__.partition("\n")[0]), ""]
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            text = CONSTANTS.get(name) or _summary(value)
            lines += [f"* ``{_told(wing, name)}``: {text}"]
        lines += [""]
    return lines


def _commands() -> list[str]:
    """The `--help` text of each command."""
    os.environ["COLUMNS"] = "80"
    lines = [
        *_title("Commands"),
        "``tfdist COMMAND``, or ``python -m tfdist COMMAND``.",
        "",
    ]
    for name, (_, what) in commands.COMMANDS.items():
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            commands.main([name, "--help"])
        said = [f"   {line}" for line in said.getvalue().splitlines()]
        lines += [*_title(f"tfdist {name}", "-"), f"It {what}.", ""]
        lines += [".. code-block:: text", "", *said, ""]
    return lines


def tidy_docstring(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list
) -> None:
    """Converts a docstring to reST; drops the reading order of a wing's."""
    text = _as_rest("\n".join(lines))
    text = re.sub(r"(?m)^Example:\n(?=>>>)", "", text)
    # Sphinx would take the text before a colon for a type.
    text = re.sub(r"(?m)^((?:Returns|Yields):\n +)(?=\S)", r"\1: ", text)
    if what != "module":
        lines[:] = text.splitlines()
        return
    kept = []
    for paragraph in text.split("\n\n"):
        if re.match("Read in this order|Details of ", paragraph):
            continue
        if re.search(r"^ +\S", paragraph, re.MULTILINE):
            paragraph = re.sub(r"(?m)^(?=\S)", "* ", paragraph)
        kept += [*paragraph.splitlines(), ""]
    lines[:] = kept


def follow_links(
    app: Sphinx, path: Path, parent: str, content: list[str]
) -> None:
    """Makes the relative links of an included file relative to the page."""

    def moved(match: re.Match) -> str:
        target = (Path(app.srcdir) / path).parent / match[1]
        of_root = os.path.relpath(target, ROOT)
        page = PAGES.get(of_root)
        return f"](/{page}.md)" if page else f"](/../{of_root})"

    content[0] = re.sub(r"\]\((?!\w+:|#)([^)\s]+)\)", moved, content[0])


def link_names(app: Sphinx, doctree: nodes.document) -> None:
    """Turns code that is a public name, or a member of one, into a link.

    Also corrects Sphinx' title for attributes.
    """
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext().partition("(")[0]
        holder, _, member = name.rpartition(".")
        target = LINKS.get(name) or f"{LINKS.get(holder)}.{member}"
        if target.startswith("None") or isinstance(
            literal.parent,
            nodes.title | nodes.reference | addnodes.pending_xref,
        ):
            continue
        link = addnodes.pending_xref(
            "",
            literal.deepcopy(),
            refdomain="py",
            reftype="obj",
            reftarget=target,
            refdoc=app.env.docname,
        )
        literal.replace_self(link)
    for name in doctree.findall(nodes.field_name):
        if name.astext() == "Variables":  # Sphinx' title for attributes.
            name[:] = [nodes.Text("Attributes")]


def link_types(
    app: Sphinx, env: Any, node: addnodes.pending_xref, text: nodes.Element
) -> nodes.Element | None:
    """Resolves a type that an annotation names by its defining module."""
    target = node["reftarget"]
    full = LINKS.get(target.rpartition(".")[2])
    if node["refdomain"] != "py" or not full or not target.startswith("tfdist"):
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(
        env, node["refdoc"], app.builder, "obj", full, node, text
    )


def setup(app: Sphinx) -> None:
    """Connects the functions above to Sphinx' events."""
    app.connect("builder-inited", make_reference)
    app.connect("autodoc-process-docstring", tidy_docstring, priority=1)
    app.connect("include-read", follow_links)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", link_types)

"""Helpers for all notebooks of the course: figure style, checks, a quiet log.

Import this module before TensorFlow, whose C++ code reads its log level only
once, when it is loaded. Nothing of tfdist is repeated here.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import matplotlib.pyplot as plt
from cycler import cycler
from IPython.display import display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

import exercises

# Okabe and Ito's palette, distinguishable with every kind of colour vision. In
# greyscale, the lightness and a hatch, or a marker and a dash, differ.
COLOURS = ("#0072B2", "#E69F00", "#000000", "#009E73", "#CC79A7")
HATCHES = ("", "///", "...", "xxx", "\\\\\\")
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", "--", ":", "-.", (0, (1, 3)))
_INK = "#333333"
_FILLS = {
    "worker": "#D6E9F5",
    "ps": "#FBE7BE",
    "chief": "#D9D9D9",
    "plain": "#FFFFFF",
}

plt.rcParams.update(
    {
        "axes.prop_cycle": cycler(color=COLOURS)
        + cycler(marker=MARKERS)
        + cycler(linestyle=DASHES),
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.edgecolor": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "figure.constrained_layout.use": True,
        "figure.dpi": 90,
        "figure.figsize": (7.0, 3.2),
        "font.size": 10,
        "grid.color": "#DDDDDD",
        "hatch.linewidth": 0.8,
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "savefig.bbox": "tight",
    }
)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# While loading, TensorFlow 2.21 logs that it found no GPU, and more, before it
# reads its log level (tensorflow/tensorflow#100442).
with _without_stderr():
    importlib.import_module("tensorflow")


_wrong = collections.Counter[str]()  # Answers, by exercise.


def check(name: str, answer: Any, **given: Any) -> None:
    """Prints whether the answer to an exercise is right, or else a hint.

    The first wrong answer gets the first hint, the second one the second hint;
    later ones also get the path of the solution. Never raises, so that a
    notebook runs from top to bottom before its exercises are done.

    Args:
        name: Name of the exercise: "4.2" is the second of notebook 4.
        answer: The user's answer, or `...` if there is none.
        given: Values from the notebook, for `Exercise.is_right`.
    """
    if answer is ...:
        print(f"Exercise {name}: not answered yet.")
        return
    try:
        exercise = exercises.find(name)
    except LookupError as error:
        print(f"Exercise {name}: {error}")
        return
    try:
        right, why = exercises.judge(name, answer, **given), ""
    except Exception as error:
        right, why = False, f" ({type(error).__name__}: {error})"
    if right:
        print(f"Exercise {name}: {_praise(exercise, name)}")
        return
    _wrong[name] += 1
    number = min(_wrong[name], 2)
    print(f"Exercise {name}: not right yet{why}.")
    print(f"Hint {number}: {exercise.hints[number - 1]}")
    if _wrong[name] > 2:
        print(f"The solution is in {_solution(name)}.")


def _praise(exercise: exercises.Exercise, name: str) -> str:
    if exercise.is_open:
        return f"compare it with the model answer in {_solution(name)}."
    return "right."


def _solution(name: str) -> str:
    folder = Path(__file__).parent
    lesson = f"{int(name.partition('.')[0]):02}"
    found = sorted(folder.glob(f"solutions/{lesson}_*.ipynb"))
    return str(found[0].relative_to(folder)) if found else "solutions/"


def measured(*claims: bool) -> None:
    """Warns if measured times or rates contradict the text.

    Exact claims are asserted instead.
    """
    if not all(claims):
        print(
            "This run does not show what the text says: something else kept "
            "this machine busy. Run it again while nothing else runs.",
            file=sys.stderr,
        )


def show(path: str) -> None:
    """Shows a program that a notebook runs in separate processes."""
    text = Path(path).read_text().rstrip()
    coloured = f"```python\n{text}\n```"
    display({"text/markdown": coloured, "text/plain": text}, raw=True)


def records(output: str) -> list[dict[str, Any]]:
    """Returns the JSON objects among the lines of a task's output."""
    lines = (line.strip() for line in output.splitlines())
    return [json.loads(line) for line in lines if line.startswith('{"')]


def bars(
    axes: Axes,
    groups: Sequence[str],
    series: dict[str, Sequence[float]],
    unit: str,
    number: str = "{:,.0f}",
) -> None:
    """Draws bars side by side, labeled with their values.

    Args:
        axes: The axes to draw on.
        groups: Labels along the x axis.
        series: Names of series, and their values for each group.
        unit: Label of the y axis.
        number: Format of a value.
    """
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [
            g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))
        ]
        drawn = axes.bar(
            places,
            values,
            width * 0.92,
            label=name,
            color=COLOURS[i],
            hatch=HATCHES[i],
            edgecolor="white" if i != 2 else "#888888",
        )
        texts = [number.format(value) for value in values]
        axes.bar_label(drawn, texts, padding=2, fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.15)
    if len(series) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def headline(figure: Figure, text: str) -> None:
    """Titles a figure with several axes, left-aligned as a single one's."""
    figure.suptitle(text, x=0.01, ha="left", size=11, weight="bold")


class Sketch:
    """A drawing of boxes and arrows.

    Args:
        title: Title of the drawing.
        width: Width of the canvas; a box is about one unit.
        height: Height of the canvas, in the same unit.
    """

    def __init__(self, title: str, width: float, height: float) -> None:
        _, axes = plt.subplots(figsize=(7.0, 7.0 * height / width + 0.3))
        axes.set(xlim=(0, width), ylim=(0, height), title=title)
        axes.set_aspect("equal")
        axes.axis("off")
        self.axes: Axes = axes

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        kind: str = "plain",
        *,
        at_top: bool = False,
        size: float = 9,
    ) -> None:
        """Draws a box with its lower left corner at `(x, y)`.

        Args:
            x: Horizontal position of the corner.
            y: Vertical position of the corner.
            width: Width of the box.
            height: Height of the box.
            text: Text in the box.
            kind: Kind of its fill: "chief", "worker", "ps" or "plain".
            at_top: Whether the text is at the top, above other boxes.
            size: Size of the text, in points.
        """
        shape = "round,pad=0,rounding_size=0.08"
        patch = FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle=shape,
            facecolor=_FILLS[kind],
            edgecolor=_INK,
        )
        self.axes.add_patch(patch)
        self.axes.text(
            x + width / 2,
            y + height - 0.08 if at_top else y + height / 2,
            text,
            ha="center",
            va="top" if at_top else "center",
            fontsize=size,
        )

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        text: str = "",
        *,
        offset: tuple[float, float] = (0.0, 0.0),
        dashed: bool = False,
    ) -> None:
        """Draws an arrow, with a text next to its middle."""
        patch = FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=12,
            shrinkA=0,
            shrinkB=0,
            linewidth=1.3,
            linestyle="--" if dashed else "-",
            color=_INK,
        )
        self.axes.add_patch(patch)
        self.text(
            (start[0] + end[0]) / 2 + offset[0],
            (start[1] + end[1]) / 2 + offset[1],
            text,
        )

    def text(self, x: float, y: float, text: str, size: float = 8.5) -> None:
        """Writes a text centered at `(x, y)`."""
        self.axes.text(x, y, text, ha="center", va="center", fontsize=size)


def draw_strategies() -> None:
    """Draws where the variables are under each of TensorFlow's strategies."""
    title = "Three strategies copy the variables, one keeps them on servers"
    sketch = Sketch(title, 12, 6.6)
    sketch.text(2.9, 6.3, "MirroredStrategy: one process", size=10)
    sketch.box(0.2, 4.0, 5.4, 2.0)
    sketch.text(9.1, 6.3, "MultiWorkerMirroredStrategy", size=10)
    for i, x in enumerate((0.5, 3.6)):
        sketch.box(x, 4.4, 1.7, 1.2, f"device {i}\nall variables", "worker")
    for i, x in enumerate((6.3, 9.8)):
        sketch.box(x, 4.0, 2.0, 2.0, f"worker {i}", at_top=True)
        sketch.box(x + 0.15, 4.4, 1.7, 1.0, "all variables", "worker")
    for x, y in ((2.2, 3.6), (8.15, 9.95)):
        sketch.arrow((x, 5.15), (y, 5.15), "all-reduce", offset=(0, 0.25))
        sketch.arrow((y, 4.8), (x, 4.8))
    sketch.text(2.9, 3.4, "ParameterServerStrategy", size=10)
    sketch.box(0.2, 1.2, 1.4, 1.0, "chief", "chief")
    for i, y in enumerate((2.0, 0.4)):
        sketch.box(2.3, y, 1.3, 0.9, f"worker {i}", "worker")
        sketch.box(4.3, y, 1.3, 0.9, f"ps {i}\nits share", "ps")
        sketch.arrow((1.6, 1.7), (2.3, y + 0.45), dashed=True)
        for end in 2.55, 0.75:
            sketch.arrow((3.6, y + 0.45), (4.3, end))
    sketch.text(0.9, 2.5, "schedules")
    sketch.text(9.1, 3.4, "TPUStrategy (not run here)", size=10)
    sketch.box(6.3, 0.4, 5.5, 2.6)
    for i, x in enumerate((6.6, 9.4)):
        for j, y in enumerate((1.85, 0.6)):
            text = f"core {2 * j + i}\nall variables"
            sketch.box(x, y, 2.1, 0.9, text, "worker")
    sketch.arrow((8.7, 2.3), (9.4, 2.3))
    sketch.arrow((10.45, 1.85), (10.45, 1.5))
    sketch.arrow((9.4, 1.05), (8.7, 1.05))
    sketch.arrow((7.65, 1.5), (7.65, 1.85))


def steps_and_losses(output: str) -> tuple[list[int], list[float]]:
    """Returns steps and losses of the progress lines in a chief's output."""
    rows = (_step_and_loss(line) for line in output.splitlines())
    pairs = [row for row in rows if row]
    return [step for step, _ in pairs], [loss for _, loss in pairs]


def _step_and_loss(line: str) -> tuple[int, float] | None:
    words = line.replace(",", " ").split()
    if words[:1] != ["step"] or "loss" not in words:
        return None
    return int(words[1]), float(words[words.index("loss") + 1])


def megabytes(values: Iterable[float]) -> list[float]:
    """Converts bytes to MB (10^6 bytes)."""
    return [value / 1e6 for value in values]

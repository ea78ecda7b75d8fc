"""Writes the report of `python -m benchmarks.run` from its results."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bars import BARS, Bar, Results
from benchmarks.environments import HERE, Environments

# Blue for tfdist, grey for limits, vermilion for the others (Okabe and Ito).
_OWN, _LIMIT, _OTHER = "#0072B2", "#999999", "#D55E00"


def machine(environments: Environments) -> dict[str, str]:
    """Returns the machine, commit and package versions of this run."""
    info = pathlib.Path("/proc/cpuinfo").read_text()
    models = [x.partition(":")[2] for x in info.splitlines() if "model n" in x]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {
        "processor": models[0].strip() if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
    }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if commit.returncode == 0:
        found["commit"] = commit.stdout.strip()
    for name in (HERE, *environments.made()):
        versions = environments.versions(name).items()
        found[f"versions, {name}"] = ", ".join(f"{k} {v}" for k, v in versions)
    return found


def write(
    directory: pathlib.Path, about: Mapping[str, str], results: Results
) -> pathlib.Path:
    """Writes `report.md` and, where matplotlib is installed, its plots.

    Args:
        directory: Folder for the report and its plots.
        about: Result of `machine`.
        results: `Result`s as dictionaries, by scenario. The additional key
            "about" holds when and how the scenario was measured.

    Returns:
        The path of the report.
    """
    parts = ["# Benchmarks", _table(["", ""], [list(x) for x in about.items()])]
    parts.append(
        "Figures are medians over the rounds, with the range in brackets. The "
        "contenders took turns (A B A B)."
    )
    rows = [row for bar in BARS if (row := _bar_row(bar, results))]
    if rows:
        header = ["no.", "ratio", "measured", "required", ""]
        parts += ["## Ratios", _table(header, rows)]
    for name, result in results.items():
        parts += _scenario(directory, name, result)
    path = directory / "report.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


def _bar_row(bar: Bar, results: Results) -> list[str] | None:
    """Returns a table row; None if the bar's scenario was not measured."""
    if bar.figure.scenario not in results:
        return None
    value = bar.value(results)
    if value is None:
        told, verdict = "not measured", ""
    else:
        told = bar.told(value)
        verdict = "met" if bar.is_met(value) else "**missed**"
    return [str(bar.number), bar.text, told, bar.asked(), verdict]


def _scenario(
    directory: pathlib.Path, name: str, result: Mapping[str, Any]
) -> list[str]:
    told = ", ".join(f"{k} {v}" for k, v in result["about"].items())
    parts = [f"## {result['title']}", result["setting"], f"({told})"]
    for case in dict.fromkeys(f["case"] for f in result["figures"]):
        figures = [f for f in result["figures"] if f["case"] == case]
        parts += [
            _measures(f"{case}{title}", chosen)
            for title, chosen in _by_table(figures).items()
        ]
    if picture := _plot(directory, name, result):
        parts.append(f"![{result['title']}]({picture})")
    for contender, reason in result["missing"].items():
        last = (reason.strip().splitlines() or [""])[-1]
        parts.append(f"Missing: {contender}. {last}")
    return parts


def _by_table(
    figures: Sequence[Mapping[str, Any]],
) -> dict[str, list[dict[str, Any]]]:
    """Splits figures into tables: each measure given by task gets its own.

    Returns:
        A dict from suffixes of the tables' titles to the tables' figures.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for figure in figures:
        whole, comma, task = figure["measure"].partition(", ")
        title = f": {whole}" if comma else ""
        measure = task if comma else whole
        tables.setdefault(title, []).append({**figure, "measure": measure})
    return tables


def _measures(title: str, figures: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table with a row per contender and a column per measure."""
    measures = list(dict.fromkeys(f["measure"] for f in figures))
    rows: dict[str, dict[str, str]] = {}
    for figure in figures:
        row = rows.setdefault(figure["contender"], {})
        row[figure["measure"]] = _spread(figure["values"])
    return _table(
        [title, *measures],
        [
            [contender, *(row.get(measure, "") for measure in measures)]
            for contender, row in rows.items()
        ],
    )


def _spread(values: Sequence[float]) -> str:
    """Formats the median and, for several values, the range."""
    median = _number(statistics.median(values))
    if len(values) == 1:
        return median
    return f"{median} ({_number(min(values))}-{_number(max(values))})"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.4f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plot(
    directory: pathlib.Path, name: str, result: Mapping[str, Any]
) -> str | None:
    """Draws a picture and returns its name; None without matplotlib."""
    if not result["figures"] or not importlib.util.find_spec("matplotlib"):
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw = _curves if result["curve"] else _all_bars
    figure = draw(pyplot, result)
    figure.savefig(directory / f"{name}.png", dpi=110)
    pyplot.close(figure)
    return f"{name}.png"


def _curves(pyplot: Any, result: Mapping[str, Any]) -> Any:
    """Plots a curve for each contender, along a measure and over the cases."""
    along, drawn = result["curve"]
    figure, (left, right) = pyplot.subplots(
        1, 2, sharey=True, figsize=(9, 3.5), layout="constrained"
    )
    for contender in dict.fromkeys(f["contender"] for f in result["figures"]):
        medians = {
            (f["case"], f["measure"]): statistics.median(f["values"])
            for f in result["figures"]
            if f["contender"] == contender
        }
        cases = [case for case, measure in medians if measure == drawn]
        heights = [medians[case, drawn] for case in cases]
        xs = [medians[case, along] for case in cases]
        left.plot(xs, heights, marker="o", label=contender)
        right.plot(cases, heights, marker="o")
    left.set(xlabel=along, ylabel=drawn)
    left.legend()
    right.tick_params(axis="x", rotation=20)
    return figure


def _all_bars(pyplot: Any, result: Mapping[str, Any]) -> Any:
    """Plots the first measure of each case."""
    groups = []
    for case in dict.fromkeys(f["case"] for f in result["figures"]):
        figures = [f for f in result["figures"] if f["case"] == case]
        measure = figures[0]["measure"]
        groups.append([f for f in figures if f["measure"] == measure])
    bars = sum(len(group) for group in groups)
    figure, axes = pyplot.subplots(
        len(groups),
        squeeze=False,
        figsize=(8, 0.7 * len(groups) + 0.3 * bars),
        layout="constrained",
    )
    for axis, group in zip(axes[:, 0], groups, strict=True):
        _bars(axis, group)
    return figure


def _bars(axis: Any, figures: Sequence[Mapping[str, Any]]) -> None:
    """Draws a bar for each contender, with its range; limits may be cut off."""
    medians = [statistics.median(f["values"]) for f in figures]
    pairs = list(zip(medians, figures, strict=True))
    axis.barh(
        [f"{f['contender']}  {_number(m)}" for m, f in pairs],
        medians,
        xerr=[
            [m - min(f["values"]) for m, f in pairs],
            [max(f["values"]) - m for m, f in pairs],
        ],
        color=[_color(f["contender"]) for f in figures],
    )
    rivals = [m for m, f in pairs if not f["contender"].startswith("limit")]
    if rivals and max(rivals) > 0:
        axis.set_xlim(0, 1.2 * max(rivals))
    axis.invert_yaxis()
    title = f"{figures[0]['case']}: {figures[0]['measure']}"
    axis.set_title(title, fontsize="medium", loc="left")
    axis.spines[["top", "right"]].set_visible(False)


def _color(contender: str) -> str:
    if contender.startswith("limit"):
        return _LIMIT
    return _OWN if contender.startswith("tfdist") else _OTHER

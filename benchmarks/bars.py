"""The performance targets of tfdist, as ratios of medians from one run."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

# A scenario's name to its `Result`, as dictionaries.
Results = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Identifies a measured figure.

    Attributes:
        scenario: Its name.
        case: One of the scenario.
        contender: One, or how the names of several variants begin.
        measure: What is measured. Of several variants the most counts where
            it is "... second", else the least.
    """

    scenario: str
    case: str
    contender: str
    measure: str

    def median(self, results: Results) -> float | None:
        """Returns the median of the rounds, or None if it was not measured."""
        medians = [
            statistics.median(figure["values"])
            for figure in results.get(self.scenario, {}).get("figures", ())
            if figure["case"] == self.case
            and figure["contender"].startswith(self.contender)
            and figure["measure"] == self.measure
        ]
        if not medians:
            return None
        best = max if self.measure.endswith("second") else min
        return best(medians)


@dataclasses.dataclass(frozen=True)
class Bar:
    """A ratio of two figures, and its required bounds.

    Attributes:
        number: Of the list that the bars come from.
        text: What is compared with what.
        figure: The numerator.
        over: The denominator.
        least: The least that is asked, or None.
        most: The most that is asked, or None.
        is_difference: Whether to subtract instead.
    """

    number: int
    text: str
    figure: Figure
    over: Figure
    least: float | None = None
    most: float | None = None
    is_difference: bool = False

    def value(self, results: Results) -> float | None:
        """Returns the ratio, or None if either figure was not measured."""
        a, b = self.figure.median(results), self.over.median(results)
        if a is None or b is None:
            return None
        return a - b if self.is_difference else a / b

    def is_met(self, value: float) -> bool:
        """Whether `value` is within the bounds."""
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def asked(self) -> str:
        """Describes the bounds in words."""
        unit = "" if self.is_difference else " x"
        if self.least is None:
            return f"at most {self.most:g}{unit}"
        if self.most is None:
            return f"at least {self.least:g}{unit}"
        return f"{self.least:g} to {self.most:g}{unit}"

    def told(self, value: float) -> str:
        """Formats a value for the report."""
        return f"{value:+.4f}" if self.is_difference else f"{value:.2f} x"


def _wide_and_deep(rows: str) -> list[Bar]:
    rate, cpu = "examples per second", "CPU ms per step"
    estimator = "TF 2.15.1 Estimator"

    def at(contender: str, measure: str) -> Figure:
        return Figure("wide_and_deep", rows, contender, measure)

    def bar(number: int, other: str, measure: str, **asked: float) -> Bar:
        words = f"wide and deep, {rows}: {measure}, over {other}"
        figures = at("tfdist", measure), at(other, measure)
        return Bar(number, words, *figures, **asked)

    return [
        bar(1, estimator, rate, least=2),
        bar(1, estimator, cpu, most=0.5),
        bar(1, "Keras 3, ClusterCoordinator", rate, least=15),
        bar(1, "tf_keras fit", rate, least=1.5),
        Bar(
            1,
            f"wide and deep, {rows}: AUC, less {estimator}'s",
            at("tfdist", "AUC"),
            at(estimator, "AUC"),
            least=0.0,
            is_difference=True,
        ),
        bar(4, "limit: tfdist, one process", cpu, most=2),
        Bar(
            4,
            f"wide and deep, {rows}: {rate} of one process, over by hand",
            at("limit: tfdist, one process", rate),
            at("limit: one process, by hand", rate),
            least=1 / 1.2,
        ),
    ]


def _null_step(case: str, other: str, least: float) -> Bar:
    rate = "steps per second"
    return Bar(
        2,
        f"{case}: {rate}, over {other}",
        Figure("null_step", case, "tfdist", rate),
        Figure("null_step", case, other, rate),
        least=least,
    )


def _flat() -> Bar:
    def at(rows: int) -> Figure:
        case = f"32 of {rows:,} rows, Adagrad"
        return Figure("null_step", case, "tfdist", "ms per step")

    return Bar(
        3,
        "step time at 10,000,000 rows, over that at 10,000",
        at(10_000_000),
        at(10_000),
        least=0.8,
        most=1.2,
    )


def _checkpoint() -> Bar:
    case, rate = "640 MB", "saved MB per second"
    return Bar(
        5,
        f"checkpoint of {case}: {rate}, over one process",
        Figure("checkpoints", case, "tfdist, 2 ps", rate),
        Figure("checkpoints", case, "limit: one process", rate),
        least=0.8,
    )


def _chief_memory() -> Bar:
    case, memory = "640 MB", "chief's peak MB"
    return Bar(
        5,
        f"checkpoint of {case}: {memory}, over that of 10 MB",
        Figure("checkpoints", case, "tfdist, 2 ps", memory),
        Figure("checkpoints", "10 MB", "tfdist, 2 ps", memory),
        most=1.1,
    )


COORDINATOR = "Keras 3, ClusterCoordinator"
TF1 = "TF1 clients"

BARS = [
    *_wide_and_deep("100,000 buckets"),
    *_wide_and_deep("1,000,000 buckets"),
    _null_step("scalar", COORDINATOR, 3),
    _null_step("32 of 1,000,000 rows, Adagrad", TF1, 1.5),
    _null_step("100 small variables", TF1, 2),
    _null_step("dense, 100 MB", COORDINATOR, 1),
    _flat(),
    _checkpoint(),
    _chief_memory(),
    Bar(
        6,
        "first step after `python -m tfdist.launch`, over `import tensorflow`",
        Figure("start_up", "2 ps, 2 workers", "tfdist", "seconds"),
        Figure("start_up", "2 ps, 2 workers", "import tensorflow", "seconds"),
        most=4,
    ),
]

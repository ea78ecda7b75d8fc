"""What tfdist must show, as ratios of medians that one run measured."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

# A scenario's name to its `Result`, as dictionaries.
Results = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Where a number stands.

    Attributes:
        scenario: Its name.
        case: One of the scenario.
        contender: One, or how the names of several variants begin.
        measure: What is measured. Of several variants that with the most
            counts where it is "... second", else that with the least.
    """

    scenario: str
    case: str
    contender: str
    measure: str

    def values(self, results: Results) -> list[float]:
        """One of each round; empty where it was not measured."""
        variants = [
            figure["values"]
            for figure in results.get(self.scenario, {}).get("figures", ())
            if figure["case"] == self.case
            and figure["contender"].startswith(self.contender)
            and figure["measure"] == self.measure
        ]
        best = max if self.measure.endswith("second") else min
        return best(variants, key=statistics.median, default=[])


@dataclasses.dataclass(frozen=True)
class Bar:
    """One ratio, and what is asked of it.

    Attributes:
        number: Of the list that the bars come from.
        text: What is compared with what.
        figure: The numerator.
        over: The denominator.
        least: The least that is asked, or None.
        most: The most that is asked, or None.
        is_difference: Whether to subtract instead. Such a bar is met within
            two standard errors: rounds differ by their seeds alone, and two
            that are alike would else fail every other time.
    """

    number: int
    text: str
    figure: Figure
    over: Figure
    least: float | None = None
    most: float | None = None
    is_difference: bool = False

    def value(self, results: Results) -> float | None:
        """The ratio of medians; None where one of the two was not measured."""
        both = [f.values(results) for f in (self.figure, self.over)]
        if not all(both):
            return None
        a, b = map(statistics.median, both)
        return a - b if self.is_difference else a / b

    def doubt(self, results: Results) -> float:
        """Two standard errors of a difference; 0 for a ratio, or one round."""
        both = [f.values(results) for f in (self.figure, self.over)]
        if not self.is_difference or min(map(len, both)) < 2:
            return 0.0
        return 2 * math.sqrt(sum(statistics.variance(v) / len(v) for v in both))

    def is_met(self, value: float, doubt: float = 0.0) -> bool:
        """Whether `value` is what is asked, give or take `doubt`."""
        return (self.least is None or value >= self.least - doubt) and (
            self.most is None or value <= self.most + doubt
        )

    def asked(self) -> str:
        """The bar in words."""
        unit = "" if self.is_difference else " x"
        if self.least is None:
            return f"at most {self.most:g}{unit}"
        if self.most is None:
            return f"at least {self.least:g}{unit}"
        return f"{self.least:g} to {self.most:g}{unit}"

    def told(self, value: float, doubt: float = 0.0) -> str:
        """A value in words."""
        if self.is_difference:
            return f"{value:+.4f} (two standard errors: {doubt:.4f})"
        return f"{value:.2f} x"


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

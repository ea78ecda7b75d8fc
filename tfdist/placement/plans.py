"""A plan as a value: where every variable will live, and how good that is."""

import collections
import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.placement.strategies import PlacementStrategy, byte_size_load_fn
from tfdist.placement.variables import VariableSpec, variable_spec


@dataclasses.dataclass(frozen=True, order=True)
class Piece:
    """A run of a variable's rows on one parameter server.

    Attributes:
        offset: First row.
        rows: Number of rows; a scalar counts as one row.
        task: Index of the parameter server.

    Example:
    >>> from tfdist.placement import plan
    >>> plan([VariableSpec("v", (3, 2))], 1).assignments["v"]
    (Piece(offset=0, rows=3, task=0),)
    """

    offset: int
    rows: int
    task: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where every variable will live, as `tfdist.placement.plan` decides.

    Attributes:
        variables: The variables, in order of creation.
        num_ps: Number of parameter servers.
        assignments: By variable name, its pieces in order of rows. One that is
            not split has one piece.
        loads: Load of each task, by the load function of the plan.
        byte_loads: Bytes each task holds, slots included.
        traffic_loads: Bytes a step of one worker moves from and to each task.
        lower_bound: No placement, with the same permission to split, has a
            largest load below this.
        largest_indivisible: The largest load that cannot be split.

    Example:
    >>> from tfdist.placement import plan
    >>> whole = plan([VariableSpec("a", (300,)), VariableSpec("b", (200,))], 2)
    >>> whole.byte_loads, round(whole.imbalance, 2), whole.distance
    ((1200.0, 800.0), 1.2, 0.0)
    """

    variables: tuple[VariableSpec, ...]
    num_ps: int
    assignments: Mapping[str, tuple[Piece, ...]]
    loads: tuple[float, ...]
    byte_loads: tuple[float, ...]
    traffic_loads: tuple[float, ...]
    lower_bound: float
    largest_indivisible: float

    @property
    def imbalance(self) -> float:
        """Largest load over mean load: 1 is perfect balance."""
        total = sum(self.loads)
        return max(self.loads) * self.num_ps / total if total else 1.0

    @property
    def distance(self) -> float:
        """How far the largest load is above the lower bound: 0.01 is 1 %."""
        if not self.lower_bound:
            return 0.0
        return max(0.0, max(self.loads) / self.lower_bound - 1)

    def as_strategy(self) -> PlacementStrategy:
        """Returns a placement strategy that places as planned.

        A variable is found by its name; else by the last part of its name, its
        shape and its dtype, in order of creation, since Keras numbers the
        layers of a second model on (`dense_3`) and a variable creator is told
        `kernel` alone. A piece of a split variable is found as
        `<name>_part_<i>`, as `PartitionedEmbedding` names it, else by its shape
        and dtype. What was not planned, such as a counter, goes to the task
        that holds the fewest bytes, with a warning if it is no scalar.

        Returns:
            Callable from a variable to its task; use a new one for each model
            that is built. It raises `ValueError` for a whole variable that the
            plan splits.

        Example:
        >>> from tfdist.placement import plan
        >>> table = VariableSpec("table", (1000, 100))
        >>> strategy = plan([table], 2, split=True).as_strategy()
        >>> strategy(VariableSpec("table_part_1", (500, 100)))
        1
        """
        return _PlannedStrategy(self)

    def table(self) -> str:
        """Returns bytes and traffic of each task as text, and the balance."""
        pieces = collections.Counter(
            piece.task for run in self.assignments.values() for piece in run
        )
        lines = [f"{'task':>7} {'pieces':>7} {'bytes':>19} {'bytes/step':>19}"]
        for task in range(self.num_ps):
            lines.append(
                f"{f'ps {task}':>7} {pieces[task]:>7,}"
                f" {self.byte_loads[task]:>19,.0f}"
                f" {self.traffic_loads[task]:>19,.0f}"
            )
        mean = sum(self.loads) / self.num_ps or 1.0
        lines += [
            f"largest load over mean load  {self.imbalance:.4f}",
            f"lower bound over mean load   {self.lower_bound / mean:.4f}",
            f"distance from the bound      {self.distance:.2%}",
        ]
        if self.lower_bound == self.largest_indivisible > mean:
            lines.append("the bound is the largest variable left whole")
        for name, run in self.assignments.items():
            if len(run) > 1:
                parts = ", ".join(f"{p.rows:,} on ps {p.task}" for p in run)
                lines.append(f"split {name}: {parts}")
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike) -> None:
        """Draws bytes and traffic of each task into a picture.

        Args:
            path: File to write; its ending decides the format.

        Raises:
            ImportError: If matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as e:
            raise ImportError(
                "`Plan.plot` draws with matplotlib: pip install matplotlib. "
                "`Plan.table` needs nothing."
            ) from e
        figure = Figure(figsize=(8, 3.5), layout="constrained")
        held, moved = figure.subplots(1, 2)
        _bars(held, self.byte_loads, "MB held")
        _bars(moved, self.traffic_loads, "MB moved in a step")
        figure.savefig(path)


def _bars(axes: Any, loads: Sequence[float], title: str) -> None:
    megabytes = np.array(loads) / 1e6
    axes.bar(range(megabytes.size), megabytes)
    axes.axhline(megabytes.mean(), color="black", linestyle="--", label="mean")
    axes.set(title=title, xlabel="parameter server")
    axes.legend()


class _PlannedStrategy:
    def __init__(self, plan: Plan) -> None:
        self._split: dict[tuple, str] = {}
        # What was not created yet, in order: name, (shape, dtype), task.
        self._left: list[tuple[str, tuple, int]] = []
        self._pieces: set[str] = set()
        self._held = np.array(plan.byte_loads)
        for spec in plan.variables:
            run = plan.assignments[spec.name]
            if len(run) == 1:
                kind = (spec.shape, spec.dtype)
                self._left.append((spec.name, kind, run[0].task))
                continue
            assert spec.shape, "only what has rows is split"
            self._split[_last(spec.name), spec.shape, spec.dtype] = spec.name
            for i, piece in enumerate(run):
                name = f"{spec.name}_part_{i}"
                kind = ((piece.rows, *spec.shape[1:]), spec.dtype)
                self._left.append((name, kind, piece.task))
                self._pieces.add(name)

    def __call__(self, variable: Any) -> int:
        spec = variable_spec(variable)
        kind = spec.shape, spec.dtype
        for is_it in (
            lambda name: name == spec.name,
            lambda name: _last(name) == _last(spec.name),
            lambda name: name in self._pieces,
        ):
            for entry in self._left:
                if entry[1] == kind and is_it(entry[0]):
                    self._left.remove(entry)
                    return entry[2]
        name = self._split.get((_last(spec.name), *kind))
        if name is not None:
            raise ValueError(
                f"The plan splits variable {name!r} by rows, but it was "
                f"created whole, with shape={spec.shape}. Create its pieces, "
                f"`plan.assignments[{name!r}]`, or plan with `split=False`."
            )
        if spec.shape != ():
            warnings.warn(
                f"Variable {spec.name!r} with shape={spec.shape} and "
                f"dtype={spec.dtype} is not in the plan. It goes to the "
                "parameter server that holds the fewest bytes. Was the plan "
                "made for another model?",
                stacklevel=2,
            )
        task = int(np.argmin(self._held))
        self._held[task] += byte_size_load_fn(spec, bytes_per_string=16)
        return task


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]

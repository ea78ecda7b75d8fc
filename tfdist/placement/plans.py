"""`Plan`: the server of every variable, and measures of the balance."""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.placement import strategies
from tfdist.placement.strategies import LoadFn, byte_size_load_fn
from tfdist.placement.variables import VariableSpec, kind_of, variable_spec


@dataclasses.dataclass(frozen=True, order=True)
class Piece:
    """Consecutive rows of a variable on one parameter server.

    Attributes:
        offset: First row.
        rows: Number of rows; a scalar counts as one row.
        task: Index of the parameter server.

    >>> from tfdist.placement import plan
    >>> plan([VariableSpec("v", (3, 2))], 1).assignments["v"]
    (Piece(offset=0, rows=3, task=0),)
    """

    offset: int
    rows: int
    task: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """The placement of every variable, as returned by `tfdist.placement.plan`.

    Attributes:
        variables: The variables, in order of creation.
        num_ps: Number of parameter servers.
        assignments: Maps a variable's name to its pieces, ordered by offset.
        load_fn: The load that the plan balances.
        lower_bound: Bound on the largest load, given which variables may split.
        largest_indivisible: The largest load that cannot be split.

    >>> from tfdist.placement import plan
    >>> whole = plan([VariableSpec("a", (300,)), VariableSpec("b", (200,))], 2)
    >>> whole.byte_loads, round(whole.imbalance, 2), whole.distance
    ((1200.0, 800.0), 1.2, 0.0)
    """

    variables: tuple[VariableSpec, ...]
    num_ps: int
    assignments: Mapping[str, tuple[Piece, ...]]
    load_fn: LoadFn
    lower_bound: float
    largest_indivisible: float

    @functools.cached_property
    def loads(self) -> tuple[float, ...]:
        """Load of each task, as measured by `load_fn`."""
        return self._loads(self.load_fn)

    @functools.cached_property
    def byte_loads(self) -> tuple[float, ...]:
        """Bytes that each task holds, including slot variables."""
        return self._loads(byte_size_load_fn)

    @functools.cached_property
    def traffic_loads(self) -> tuple[float, ...]:
        """Bytes that one worker's step transfers from and to each task."""
        return self._loads(strategies.traffic_load_fn)

    def _loads(self, load_fn: LoadFn) -> tuple[float, ...]:
        loads = [0.0] * self.num_ps
        for spec in self.variables:
            load = strategies.load_of(spec, load_fn) / max(1, spec.num_rows)
            for piece in self.assignments[spec.name]:
                loads[piece.task] += load * piece.rows
        return tuple(loads)

    @property
    def imbalance(self) -> float:
        """Ratio of the largest load to the mean: 1 is perfect balance."""
        total = sum(self.loads)
        return max(self.loads) * self.num_ps / total if total else 1.0

    @property
    def distance(self) -> float:
        """Relative excess of the largest load over the bound: 0.01 is 1 %."""
        if not self.lower_bound:
            return 0.0
        return max(0.0, max(self.loads) / self.lower_bound - 1)

    def as_strategy(self) -> strategies.PlacementStrategy:
        """Returns a placement strategy that follows this plan.

        Among planned variables with the same last part of the name, shape and
        dtype, an exact name match comes first, then order of creation: Keras
        continues its numbering of layers in a second model (`dense_3`), and a
        variable creator receives only `kernel`. Pieces of a split variable are
        named `<name>_part_<i>`, as in `PartitionedEmbedding`. A variable not in
        the plan, such as a counter, is placed on the task with the fewest
        bytes, with a warning unless it is a scalar.

        Returns:
            Callable that maps a variable to its task, for one model. It raises
            `ValueError` for an unsplit variable that the plan splits.

        >>> from tfdist.placement import plan
        >>> table = VariableSpec("table", (1000, 100))
        >>> strategy = plan([table], 2, split=True).as_strategy()
        >>> strategy(VariableSpec("table_part_1", (500, 100)))
        1
        """
        held = np.array(self.byte_loads)
        left: list[tuple[VariableSpec, int | None]] = []  # None: split.
        for spec in self.variables:
            run = self.assignments[spec.name]
            is_split = len(run) > 1
            left.append((spec, None if is_split else run[0].task))
            for i, piece in enumerate(run if is_split else ()):
                shape = (piece.rows, *(spec.shape or ())[1:])
                name = f"{spec.name}_part_{i}"
                left.append((VariableSpec(name, shape, spec.dtype), piece.task))

        def place(variable: Any) -> int:
            spec = variable_spec(variable)
            alike = [e for e in left if kind_of(e[0]) == kind_of(spec)]
            # An exact name match comes first, a variable to be split last.
            alike.sort(key=lambda e: (e[0].name != spec.name, e[1] is None))
            for planned, task in alike[:1]:
                if task is None:
                    raise ValueError(
                        f"The plan splits variable {planned.name!r} by rows, "
                        f"but it was created whole, with shape={spec.shape}. "
                        "Create its pieces, "
                        f"`plan.assignments[{planned.name!r}]`, or plan with "
                        "`split=False`."
                    )
                left.remove((planned, task))
                return task
            if spec.shape != ():
                warnings.warn(
                    f"Variable {spec.name!r} with shape={spec.shape} and "
                    f"dtype={spec.dtype} is not in the plan. It goes to the "
                    "parameter server that holds the fewest bytes. Was the "
                    "plan made for another model?",
                    stacklevel=2,
                )
            lightest = int(np.argmin(held))
            held[lightest] += byte_size_load_fn(spec)
            return lightest

        return place

    def table(self) -> str:
        """Returns the load of each task and the balance as a text table."""
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

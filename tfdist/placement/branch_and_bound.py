"""Exact packing of few items, by branch and bound.

The largest item left goes to each bin in turn, the emptiest first. A branch is
cut when its bins cannot take what is left below the best packing known, or when
the same loads in another order were reached before.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

_TOLERANCE = 1e-9


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        bins: The bin of each item in the best packing, or `None` if no packing
            below `upper` was found.
        upper: The largest load of that packing, or the one to beat.
        complete: Whether the search came to its end: no packing is below
            `upper`.
    """

    bins: tuple[int, ...] | None
    upper: float
    complete: bool


def search(
    loads: Sequence[float],
    num_bins: int,
    *,
    upper: float = np.inf,
    lower: float = np.inf,
    sizes: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
    max_nodes: int = 20_000,
) -> Found:
    """Looks for the packing with the smallest largest load.

    Args:
        loads: Load of each item.
        num_bins: Number of bins.
        upper: Only packings with a largest load below this count. Defaults to
            infinity.
        lower: The search ends at a packing with a largest load no larger than
            this. Defaults to infinity: the first packing will do.
        sizes: Size of each item. Defaults to the loads.
        limits: Largest sum of sizes of each bin. Defaults to no limit.
        max_nodes: Nodes to visit. Defaults to 20,000, about a second.

    Returns:
        A `Found`.

    Example:
    >>> search([5, 5, 4, 4, 3, 3, 3], 3, lower=9).upper
    9.0
    """
    loads = np.asarray(loads, float)
    sizes = loads if sizes is None else np.asarray(sizes, float)
    limits = np.full(num_bins, np.inf) if limits is None else limits
    tree = _Tree(loads, sizes, np.asarray(limits, float), upper, lower)
    tree.nodes = max_nodes
    tree.visit(0)
    return Found(tree.best, float(tree.upper), tree.nodes > 0)


class _Tree:
    def __init__(
        self,
        loads: np.ndarray,
        sizes: np.ndarray,
        limits: np.ndarray,
        upper: float,
        lower: float,
    ) -> None:
        self.upper = upper
        self.best: tuple[int, ...] | None = None
        self._enough = lower * (1 + _TOLERANCE)
        self._order = np.argsort(-loads, kind="stable")
        self._loads = loads[self._order].tolist()
        self._sizes = sizes[self._order].tolist()
        self._left = np.cumsum(self._loads[::-1])[::-1].tolist()
        self._limits = limits.tolist()
        self._totals = [0.0] * limits.size
        self._used = [0.0] * limits.size
        self._path = np.zeros(loads.size, int)
        self._seen: set = set()

    def visit(self, depth: int) -> None:
        """Tries every bin for the item at this depth, and all that follow."""
        if self.nodes <= 0 or self._done():
            return
        self.nodes -= 1
        if depth == len(self._loads):
            self.upper = max(self._totals)
            best = np.empty_like(self._path)
            best[self._order] = self._path
            self.best = tuple(best.tolist())
            return
        if self._hopeless(depth):
            return
        for to in self._choices(depth):
            old = self._totals[to], self._used[to]
            # Other branches may have lowered `upper` since the choice.
            if not self._below(old[0] + self._loads[depth]):
                continue
            self._totals[to] += self._loads[depth]
            self._used[to] += self._sizes[depth]
            self._path[depth] = to
            self.visit(depth + 1)
            self._totals[to], self._used[to] = old

    def _choices(self, depth: int) -> list[int]:
        """Bins that take the item, one of each kind, the emptiest first."""
        size = self._sizes[depth]
        kinds = {}
        for to, state in enumerate(self._states()):
            if self._used[to] + size <= self._limits[to]:
                kinds.setdefault(state, to)
        return [kinds[state] for state in sorted(kinds)]

    def _states(self) -> zip:
        return zip(self._totals, self._used, self._limits, strict=True)

    def _below(self, load: float) -> bool:
        return load < self.upper * (1 - _TOLERANCE)

    def _done(self) -> bool:
        return self.best is not None and self.upper <= self._enough

    def _hopeless(self, depth: int) -> bool:
        """True if no better packing begins so, or one alike was tried."""
        if np.isfinite(self.upper):
            smallest = self._loads[-1]
            room = sum(
                self.upper - total
                for total in self._totals
                if self._below(total + smallest)
            )
            if room < self._left[depth]:
                return True
        key = (depth, *sorted(self._states()))
        if key in self._seen:
            return True
        self._seen.add(key)
        return False

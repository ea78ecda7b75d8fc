"""Large variables cut into runs of rows that fill parameter servers up.

What stays whole is packed first. Then the largest of the rest goes where it
fits below the level, and else runs, like water, into the lowest gaps. The
level is the lower bound, so servers end up even but for crumbs.
"""

import math
from collections.abc import Sequence

import numpy as np

from tfdist.placement import packing

# A piece with a smaller share of the level than this is not cut off.
_CRUMB = 0.01


def fill(
    loads: Sequence[float],
    sizes: Sequence[float],
    rows: Sequence[int],
    cut: Sequence[bool],
    limits: Sequence[float],
    bound: float,
) -> list[dict[int, int]]:
    """Places variables of which some may be cut by rows.

    Args:
        loads: Load of each variable.
        sizes: Bytes of each variable.
        rows: Rows of each variable, at least 1.
        cut: Whether each variable may be cut.
        limits: Most bytes of each server.
        bound: A lower bound of the largest load, the level to fill to.

    Returns:
        For each variable, its number of rows by server.

    Raises:
        packing.InfeasibleError: If the limits cannot be kept.

    Example:
    >>> fill([90, 30], [90, 30], [9, 3], [True, True], [np.inf] * 3, 40)
    [{0: 4, 1: 4, 2: 1}, {2: 3}]
    """
    servers = _Servers(
        np.asarray(loads, float),
        np.asarray(sizes, float),
        np.asarray(rows, int),
        np.asarray(limits, float),
    )
    return servers.fill(np.asarray(cut, bool), bound)


class _Servers:
    """Servers being filled with whole variables, then with runs of rows."""

    def __init__(
        self,
        loads: np.ndarray,
        sizes: np.ndarray,
        rows: np.ndarray,
        limits: np.ndarray,
    ) -> None:
        self._loads, self._sizes, self._rows = loads, sizes, rows
        self._limits = limits
        self._totals, self._used = np.zeros(limits.size), np.zeros(limits.size)
        self._pieces: list[tuple[int, int, int]] = []  # variable, task, rows

    def fill(self, cut: np.ndarray, bound: float) -> list[dict[int, int]]:
        """Puts what stays whole first, then lets the rest run into the gaps."""
        whole = np.flatnonzero(~cut)
        packed = packing.pack(
            self._loads[whole],
            self._limits.size,
            sizes=self._sizes[whole],
            limits=self._limits,
        )
        for i, task in zip(whole, packed.bins, strict=True):
            self._put(i, task, self._rows[i])
        level = max(bound, max(packed.loads))
        for i in np.flatnonzero(cut)[np.argsort(-self._loads[cut])]:
            fits = self._used + self._sizes[i] <= self._limits
            fits &= self._totals + self._loads[i] <= level * (1 + 1e-9)
            if fits.any():
                totals = np.where(fits, self._totals, np.inf)
                self._put(i, int(np.argmin(totals)), self._rows[i])
            else:
                self._pour(i, level)
        return self._improved()

    def _put(self, i: int, task: int, rows: int) -> None:
        self._totals[task] += self._loads[i] * rows / self._rows[i]
        self._used[task] += self._sizes[i] * rows / self._rows[i]
        self._pieces.append((int(i), task, int(rows)))

    def _pour(self, i: int, level: float) -> None:
        """Runs rows of variable `i` into the gaps below `level`."""
        row_load = self._loads[i] / self._rows[i]
        row_size = self._sizes[i] / self._rows[i]
        crumb = 1
        if row_load:
            crumb = math.ceil(min(self._rows[i], _CRUMB * level / row_load))
        left = int(self._rows[i])
        # What no gap took, for want of memory there or by rounding, goes above
        # the level: a share to each server, then as much as there is room for.
        for goes in ("into a gap", "to all", "anywhere"):
            order = np.argsort(self._totals, kind="stable").tolist()
            share = math.ceil(left / len(order))
            for task in order:
                take = share if goes == "to all" else left
                if goes == "into a gap" and row_load:
                    take = int((level - self._totals[task]) / row_load)
                take = max(take, crumb)
                if left - take < crumb:
                    take = left
                room = self._limits[task] - self._used[task]
                if math.isfinite(room):
                    take = min(take, int(room / row_size + 1e-9))
                if take > 0:
                    self._put(i, task, take)
                    left -= take
                if not left:
                    return
        raise packing.InfeasibleError(f"{left:,} rows find no room.")

    def _improved(self) -> list[dict[int, int]]:
        variable, task, rows = np.array(self._pieces, int).reshape(-1, 3).T
        share = rows / self._rows[variable]
        task = packing.improve(
            self._loads[variable] * share,
            task,
            self._limits.size,
            sizes=self._sizes[variable] * share,
            limits=self._limits,
        )
        runs: list[dict[int, int]] = [{} for _ in self._loads]
        for i, t, n in zip(variable, task, rows.tolist(), strict=True):
            runs[i][t] = runs[i].get(t, 0) + n
        return runs

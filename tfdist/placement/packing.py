"""Numbers into bins: the arithmetic of `tfdist.placement.planner`.

Items with a load go to bins so that the largest bin is as small as possible
(makespan on identical machines). Largest first is within 4/3 of the best
(Graham 1969); moves, swaps and re-dealing two bins remove most of the rest; for
few items, or few large ones, a search proves the best. Every result comes with
a lower bound that no packing can beat, so its distance from the best is known.

Items may also have a size, and bins a limit on the sum of sizes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfdist.placement.branch_and_bound import search

# Loads that differ by less than this, relatively, count as equal: sums of
# floats must not be "improved" by their rounding.
_TOLERANCE = 1e-9

# Local improvement is content this close to the lower bound.
_CONTENT = 1e-4

# An exact search is tried on at most so many items.
_MAX_SEARCHED = 64

# Most swaps weighed at once; beyond, candidates are thinned out evenly.
_MAX_SWAPS = 1 << 20

# Two bins are re-dealt by subset sums at this resolution.
_RESOLUTION = 50_000


class InfeasibleError(ValueError):
    """No packing keeps the limits, or none was found."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """Items in bins.

    Attributes:
        bins: The bin of each item.
        loads: The load of each bin.
        lower_bound: No packing has a largest load below this.
    """

    bins: tuple[int, ...]
    loads: tuple[float, ...]
    lower_bound: float


def pack(
    loads: Sequence[float],
    num_bins: int,
    *,
    sizes: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
    max_nodes: int = 20_000,
) -> Packing:
    """Packs items so that the largest load is small, and bounds the best.

    Args:
        loads: Load of each item, not negative.
        num_bins: Number of bins, at least 1.
        sizes: Size of each item. Defaults to the loads.
        limits: Largest sum of sizes of each bin. Defaults to no limit.
        max_nodes: Nodes an exact search may visit. Defaults to 20,000, which
            is about a second; 0 means no search.

    Returns:
        A `Packing`.

    Raises:
        InfeasibleError: If no packing keeps the limits, or none was found.

    Example:
    >>> packing = pack([5, 5, 4, 4, 3, 3, 3], 3)
    >>> max(packing.loads), packing.lower_bound
    (9.0, 9.0)
    """
    bins = _Bins(loads, num_bins, sizes, limits)
    bound = lower_bound(bins.item_loads, num_bins)
    _fill(bins, max_nodes)
    bins.improve(bound * (1 + _CONTENT))
    if max_nodes and bins.totals.max() > bound * (1 + _TOLERANCE):
        bound = max(bound, _search(bins, bound, max_nodes))
    return Packing(
        tuple(bins.bin_of.tolist()), tuple(bins.totals.tolist()), bound
    )


def improve(
    loads: Sequence[float],
    bin_of: Sequence[int],
    num_bins: int,
    *,
    sizes: Sequence[float] | None = None,
    limits: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Lowers the largest load of a given packing by local changes.

    Args:
        loads: Load of each item.
        bin_of: Bin of each item; the packing must keep the limits.
        num_bins: Number of bins.
        sizes: Size of each item. Defaults to the loads.
        limits: Largest sum of sizes of each bin. Defaults to no limit.

    Returns:
        The new bin of each item.

    Example:
    >>> improve([3, 3, 2, 2, 2], [0, 1, 0, 1, 0], 2)
    (1, 1, 0, 0, 0)
    """
    bins = _Bins(loads, num_bins, sizes, limits)
    bins.put_all(bin_of)
    bins.improve(lower_bound(bins.item_loads, num_bins) * (1 + _CONTENT))
    return tuple(bins.bin_of.tolist())


def lower_bound(loads: Sequence[float], num_bins: int) -> float:
    """Returns a load that the largest bin of every packing reaches.

    The largest of: the mean; the largest item; and, for every k, the k + 1
    smallest of the k * num_bins + 1 largest items, since some bin must hold
    k + 1 of those.

    Args:
        loads: Load of each item.
        num_bins: Number of bins, at least 1.

    Returns:
        The bound; 0 without items.

    Example:
    >>> lower_bound([4.0, 4.0, 4.0], 2)
    8.0
    """
    ordered = np.sort(np.asarray(loads, float))[::-1]
    if not ordered.size:
        return 0.0
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    k = np.arange((ordered.size - 1) // num_bins + 1)
    last = k * num_bins + 1
    crowded = np.max(total[last] - total[last - k - 1])
    return float(max(total[-1] / num_bins, ordered[0], crowded))


class _Bins:
    """The packing being worked on."""

    def __init__(
        self,
        loads: Sequence[float],
        num_bins: int,
        sizes: Sequence[float] | None = None,
        limits: Sequence[float] | None = None,
    ) -> None:
        self.item_loads = np.asarray(loads, float)
        self.sizes = (
            self.item_loads if sizes is None else np.asarray(sizes, float)
        )
        self.limits = (
            np.full(num_bins, np.inf)
            if limits is None
            else np.asarray(limits, float)
        )
        self.num_bins = num_bins
        self.clear()

    def clear(self) -> None:
        self.bin_of = np.full(self.item_loads.size, -1)
        self.totals = np.zeros(self.num_bins)
        self.used = np.zeros(self.num_bins)

    def put(self, item: int, to: int) -> None:
        """Puts an item into a bin, out of the one that held it."""
        old = self.bin_of[item]
        for bin_, sign in ((old, -1), (to, 1)):
            if bin_ >= 0:
                self.totals[bin_] += sign * self.item_loads[item]
                self.used[bin_] += sign * self.sizes[item]
        self.bin_of[item] = to

    def put_all(self, bin_of: Sequence[int]) -> None:
        for item, to in enumerate(bin_of):
            self.put(item, to)

    def improve(self, target: float) -> None:
        """Empties the fullest bin a little, again and again.

        Each round makes the change, with one other bin, that leaves the fuller
        of the two least full. It ends at the target, or when none helps.
        """
        for _ in range(1000 + 20 * self.num_bins):
            full = int(np.argmax(self.totals))
            if self.totals[full] <= target:
                return
            order = np.argsort(self.totals, kind="stable")
            others = order[order != full]
            # The lightest bins have most to offer: try those first.
            near, far = others[:8], others[8:]
            if not (
                self._swap(full, near)
                or self._redeal(full, near)
                or self._swap(full, far)
                or self._redeal(full, far)
            ):
                return

    def _swap(self, full: int, others: np.ndarray) -> bool:
        """Moves one item out of `full`, or swaps it for a smaller one."""
        mine = self._distinct(np.flatnonzero(self.bin_of == full))
        theirs = self._distinct(np.flatnonzero(np.isin(self.bin_of, others)))
        thin = int(np.ceil(mine.size * (theirs.size + 1) / _MAX_SWAPS))
        theirs = theirs[:: max(1, thin)]
        # A move is a swap for an item that is not there (-1), of no load.
        back = np.concatenate([theirs, np.full(others.size, -1)])
        to = np.concatenate([self.bin_of[theirs], others]).astype(int)
        load = np.append(self.item_loads, 0.0)
        size = np.append(self.sizes, 0.0)
        less = load[mine][:, None] - load[back][None, :]
        smaller = size[mine][:, None] - size[back][None, :]
        fuller = np.maximum(self.totals[full] - less, self.totals[to] + less)
        fits = (self.used[to] + smaller <= self.limits[to]) & (
            self.used[full] - smaller <= self.limits[full]
        )
        fuller[~fits] = np.inf
        if not fuller.size:
            return False
        i, j = np.unravel_index(np.argmin(fuller), fuller.shape)
        if fuller[i, j] >= self.totals[full] * (1 - _TOLERANCE):
            return False
        self.put(mine[i], to[j])
        if back[j] >= 0:
            self.put(back[j], full)
        return True

    def _distinct(self, items: np.ndarray) -> np.ndarray:
        """Keeps one of the items that are alike and in the same bin."""
        keys = np.stack(
            [self.item_loads[items], self.sizes[items], self.bin_of[items]]
        )
        return items[np.unique(keys, axis=1, return_index=True)[1]]

    def _redeal(self, full: int, others: np.ndarray) -> bool:
        """Deals the items of `full` and another bin anew between the two."""
        for other in others:
            items = np.flatnonzero(np.isin(self.bin_of, [full, other]))
            if items.size > 400:
                continue  # Swaps are fine enough among so many.
            half = items[_half(self.item_loads[items])]
            rest = np.setdiff1d(items, half)
            for first, second in ((half, rest), (rest, half)):
                fuller = max(
                    self.item_loads[first].sum(), self.item_loads[second].sum()
                )
                if (
                    fuller < self.totals[full] * (1 - _TOLERANCE)
                    and self.sizes[first].sum() <= self.limits[full]
                    and self.sizes[second].sum() <= self.limits[other]
                ):
                    for item in first:
                        self.put(item, full)
                    for item in second:
                        self.put(item, other)
                    return True
        return False


def _half(loads: np.ndarray) -> np.ndarray:
    """Returns which items sum to nearly half of all.

    Bit s of `sums[i]` says that some of the first i items sum to s.
    """
    scale = _RESOLUTION / max(loads.sum(), 1e-300)
    units = np.rint(loads * scale).astype(int).tolist()
    sums = [1]
    for unit in units:
        sums.append(sums[-1] | sums[-1] << unit)
    goal = (sums[-1] & ((1 << (sum(units) // 2 + 1)) - 1)).bit_length() - 1
    chosen = np.zeros(loads.size, bool)
    for i in range(len(units), 0, -1):
        if not sums[i - 1] >> goal & 1:
            chosen[i - 1] = True
            goal -= units[i - 1]
    return chosen


def _fill(bins: _Bins, max_nodes: int) -> None:
    """Packs for the first time, and finds out whether the limits can be met."""
    _check_limits(bins)
    if _longest_first(bins) or _best_fit(bins):
        return
    complete = False
    if max_nodes and bins.sizes.size <= _MAX_SEARCHED:
        found = search(
            bins.sizes, bins.num_bins, limits=bins.limits, max_nodes=max_nodes
        )
        complete = found.complete
        if found.bins is not None:
            bins.clear()
            bins.put_all(found.bins)
            return
    raise InfeasibleError(
        f"{'No' if complete else 'Found no'} packing of {bins.sizes.size} "
        f"items of sizes up to {bins.sizes.max():,.0f}, "
        f"{bins.sizes.sum():,.0f} in all, into bins of {_few(bins.limits)}"
        f"{' exists' if complete else ''}."
    )


def _check_limits(bins: _Bins) -> None:
    need, room = bins.sizes.sum(), bins.limits.sum()
    if need > room:
        raise InfeasibleError(
            f"All items need {need:,.0f}, and the bins hold {room:,.0f} "
            f"together: {_few(bins.limits)}."
        )
    if bins.sizes.size and bins.sizes.max() > bins.limits.max():
        raise InfeasibleError(
            f"The largest item needs {bins.sizes.max():,.0f}, and the largest "
            f"bin holds {bins.limits.max():,.0f}."
        )


def _few(limits: np.ndarray) -> str:
    values = [f"{limit:,.0f}" for limit in limits[:8]]
    return ", ".join(values + ["..."] * (limits.size > 8))


def _longest_first(bins: _Bins) -> bool:
    for item in np.argsort(-bins.item_loads, kind="stable"):
        fits = bins.used + bins.sizes[item] <= bins.limits
        if not fits.any():
            return False
        bins.put(item, int(np.argmin(np.where(fits, bins.totals, np.inf))))
    return True


def _best_fit(bins: _Bins) -> bool:
    """Largest size first, into the bin where least room remains."""
    bins.clear()
    for item in np.argsort(-bins.sizes, kind="stable"):
        room = bins.limits - bins.used - bins.sizes[item]
        if room.max() < 0:
            return False
        bins.put(item, int(np.argmin(np.where(room >= 0, room, np.inf))))
    return True


def _search(bins: _Bins, bound: float, max_nodes: int) -> float:
    """Improves `bins` or proves a bound, by exact search; returns the bound."""
    if bins.item_loads.size <= _MAX_SEARCHED:
        found = search(
            bins.item_loads,
            bins.num_bins,
            upper=bins.totals.max(),
            lower=bound,
            sizes=bins.sizes,
            limits=bins.limits,
            max_nodes=max_nodes,
        )
        bins.put_all(found.bins or ())
        if found.complete:
            return float(bins.totals.max())
    # The best packing of the large items alone is a bound for all of them.
    mean = bins.item_loads.sum() / bins.num_bins
    large = np.sort(bins.item_loads[bins.item_loads > 0.05 * mean])
    alone = _Bins(large[::-1][:_MAX_SEARCHED], bins.num_bins)
    _longest_first(alone)
    alone.improve(bound * (1 + _CONTENT))
    if alone.totals.max() <= bound * (1 + _TOLERANCE):
        return bound
    found = search(
        alone.item_loads,
        bins.num_bins,
        upper=alone.totals.max(),
        lower=bound,
        max_nodes=max_nodes,
    )
    return float(found.upper) if found.complete else bound

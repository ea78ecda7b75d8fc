"""Items into bins, so that the fullest bin is as light as can be.

Longest processing time first (Graham, 1969), then moves and swaps out of the
fullest bin. A lower bound tells how far the result can be from the best one.
Items may also have a size, and bins a limit on the sum of sizes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# Sums of floats must not be "improved" by their rounding.
_TOLERANCE = 1e-9

# The search for moves ends this close to the lower bound.
_CLOSE_ENOUGH = 1e-4

# Of a bin's items, so many of the largest are moved or swapped alone, and so
# many two at a time.
_MAX_SINGLE, _MAX_PAIRED = 300, 20


class InfeasibleError(ValueError):
    """No packing that keeps the limits was found."""


def pack(
    loads: ArrayLike,
    num_bins: int,
    *,
    sizes: ArrayLike | None = None,
    limits: ArrayLike | None = None,
) -> np.ndarray:
    """Packs items so that the largest load of a bin is small.

    Args:
        loads: Load of each item, not negative.
        num_bins: Number of bins, at least 1.
        sizes: Size of each item. Default: the loads.
        limits: Largest sum of sizes of each bin. Default: no limit.

    Returns:
        The bin of each item.

    Raises:
        InfeasibleError: If no packing that keeps the limits was found.

    Example:
    >>> pack([5, 5, 4, 4, 3, 3, 3], 3).tolist()
    [2, 1, 1, 2, 0, 0, 0]
    """
    loads = np.asarray(loads, float)
    sizes = loads if sizes is None else np.asarray(sizes, float)
    limits = np.full(num_bins, np.inf) if limits is None else limits
    limits = np.asarray(limits, float)
    for largest_of, rank in (
        (loads, lambda bins, room: bins.totals),  # The lightest bin.
        (sizes, lambda bins, room: room),  # The tightest.
        (sizes, lambda bins, room: -room),  # The roomiest.
    ):
        bins = _Bins(loads, sizes, limits)
        if bins.fill(largest_of, rank):
            bins.improve(lower_bound(loads, num_bins) * (1 + _CLOSE_ENOUGH))
            return bins.bin_of
    raise InfeasibleError(_why_infeasible(sizes, limits))


def lower_bound(loads: ArrayLike, num_bins: int) -> float:
    """Returns a load that the fullest bin of every packing reaches.

    Either the k largest items are in bins of their own, and the others in the
    remaining bins; or one of the k shares its bin.

    Example:
    >>> lower_bound([4.0, 4.0, 4.0], 2)
    8.0
    """
    ordered = np.sort(np.asarray(loads, float))[::-1]
    if not ordered.size:
        return 0.0
    bound = _simple_bound(ordered, num_bins)
    large = ordered[ordered > 0.05 * ordered.sum() / num_bins]
    for k in range(1, min(num_bins, large.size)):
        shared = large[k - 1] + large[-1]
        bound = max(bound, min(shared, _simple_bound(large[k:], num_bins - k)))
    return float(bound)


def _simple_bound(ordered: np.ndarray, num_bins: int) -> float:
    """The largest of the mean, the largest item, and crowds of items.

    Of the k * num_bins + 1 largest items, some bin has k + 1: at least the
    k + 1 smallest of them.
    """
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    k = np.arange((ordered.size - 1) // num_bins + 1)
    last = k * num_bins + 1
    crowded = np.max(total[last] - total[last - k - 1])
    return max(total[-1] / num_bins, ordered[0], crowded)


class _Bins:
    """A packing that is being made."""

    def __init__(
        self, loads: np.ndarray, sizes: np.ndarray, limits: np.ndarray
    ) -> None:
        self.loads, self.sizes, self.limits = loads, sizes, limits
        self.bin_of = np.full(loads.size, -1)
        self.totals, self.used = np.zeros(limits.size), np.zeros(limits.size)
        self._order = np.argsort(-loads, kind="stable")

    def fill(self, largest_of: np.ndarray, rank: Callable) -> bool:
        """Packs the largest first; False if there is no room for an item."""
        for item in np.argsort(-largest_of, kind="stable"):
            room = self.limits - self.used - self.sizes[item]
            if room.max() < 0:
                return False
            ranks = np.where(room < 0, np.inf, rank(self, room))
            self._put(item, int(np.argmin(ranks)))
        return True

    def improve(self, target: float) -> None:
        """Moves or swaps items of the fullest bin until nothing helps."""
        for _ in range(self.loads.size):
            full, *others = np.argsort(-self.totals, kind="stable").tolist()
            if self.totals[full] <= target or not any(
                self._exchange(full, other) for other in reversed(others)
            ):
                return

    def _put(self, item: int, to: int) -> None:
        for bin_, sign in ((self.bin_of[item], -1), (to, 1)):
            if bin_ >= 0:
                self.totals[bin_] += sign * self.loads[item]
                self.used[bin_] += sign * self.sizes[item]
        self.bin_of[item] = to

    def _exchange(self, full: int, other: int) -> bool:
        """Moves or swaps up to two items, if that lowers the fuller bin."""
        mine, theirs = self._groups(full), self._groups(other)
        load = mine.loads[:, None] - theirs.loads
        size = mine.sizes[:, None] - theirs.sizes
        fuller = np.maximum(self.totals[full] - load, self.totals[other] + load)
        fits = (self.used[other] + size <= self.limits[other]) & (
            self.used[full] - size <= self.limits[full]
        )
        fuller[~fits] = np.inf
        i, j = np.unravel_index(np.argmin(fuller), fuller.shape)
        if fuller[i, j] >= self.totals[full] * (1 - _TOLERANCE):
            return False
        for items, to in (
            (mine.items[:, i], other),
            (theirs.items[:, j], full),
        ):
            for item in items[items >= 0]:
                self._put(item, to)
        return True

    def _groups(self, bin_: int) -> "_Groups":
        own = self._order[self.bin_of[self._order] == bin_][:_MAX_SINGLE]
        one, two = np.triu_indices(min(own.size, _MAX_PAIRED), 1)
        none = np.full(1 + own.size, -1)
        first = np.concatenate([[-1], own, own[one]])
        items = np.stack([first, np.concatenate([none, own[two]])])
        # An item of -1, the last one, has no load and no size.
        return _Groups(
            items,
            np.append(self.loads, 0.0)[items].sum(axis=0),
            np.append(self.sizes, 0.0)[items].sum(axis=0),
        )


class _Groups(NamedTuple):
    """What may leave a bin at once: nothing, one item, or two large ones."""

    items: np.ndarray
    loads: np.ndarray
    sizes: np.ndarray


def _why_infeasible(sizes: np.ndarray, limits: np.ndarray) -> str:
    if sizes.sum() > limits.sum():
        return (
            f"All items need {sizes.sum():,.0f}, and the bins hold "
            f"{limits.sum():,.0f} together: {_few(limits)}."
        )
    if sizes.max() > limits.max():
        return (
            f"The largest item needs {sizes.max():,.0f}, and the largest bin "
            f"holds {limits.max():,.0f}."
        )
    return (
        f"Found no packing of {sizes.size} items of sizes up to "
        f"{sizes.max():,.0f}, {sizes.sum():,.0f} in all, into bins of "
        f"{_few(limits)}."
    )


def _few(limits: np.ndarray) -> str:
    values = [f"{limit:,.0f}" for limit in limits[:8]]
    return ", ".join(values + ["..."] * (limits.size > 8))

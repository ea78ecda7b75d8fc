"""Packs items into bins, keeping the load of the fullest bin small.

The algorithm is longest processing time first (Graham, 1969), followed by moves
and swaps out of the fullest bin. Bins may limit the total size of their items.
"""

import numpy as np
from numpy.typing import ArrayLike

# The search for moves ends this close to the lower bound.
_CLOSE_ENOUGH = 1 + 1e-4
# A smaller decrease of a sum of floats may be only a rounding error.
_LESS = 1 - 1e-9
# How many of a bin's largest items are tried alone, and in pairs.
_MAX_SINGLE, _MAX_PAIRED = 300, 20


class InfeasibleError(ValueError):
    """Raised if no packing within the limits was found."""


def pack(
    loads: ArrayLike, num_bins: int, sizes: ArrayLike, limits: ArrayLike
) -> np.ndarray:
    """Returns the bin of each item, so that the largest load is small.

    >>> pack([5, 5, 4, 4, 3, 3, 3], 3, np.zeros(7), np.ones(3)).tolist()
    [2, 1, 1, 2, 0, 0, 0]
    """
    loads, sizes = np.asarray(loads, float), np.asarray(sizes, float)
    limits = np.asarray(limits, float)
    weights = np.stack([loads, sizes])
    for largest, roomiest in ((loads, False), (sizes, True)):
        bin_of = np.full(loads.size, -1)
        used = np.zeros([2, num_bins])
        for item in np.argsort(-largest, kind="stable"):
            room = limits - used[1] - sizes[item]
            # First try the lightest bin; if that fails, the roomiest.
            rank = -room if roomiest else used[0]
            bin_of[item] = to = np.argmin(np.where(room < 0, np.inf, rank))
            if room[to] < 0:
                break
            used[:, to] += weights[:, item]
        else:
            _improve(bin_of, weights, used, limits)
            return bin_of
    raise InfeasibleError(_why_infeasible(sizes, limits))


def _improve(
    bin_of: np.ndarray,
    weights: np.ndarray,
    used: np.ndarray,
    limits: np.ndarray,
) -> None:
    """Moves or swaps items of the fullest bin until no change helps."""
    order = np.argsort(-weights[0], kind="stable")
    target = lower_bound(weights[0], limits.size) * _CLOSE_ENOUGH
    for _ in order:
        full, *others = np.argsort(-used[0], kind="stable")
        if used[0, full] <= target:
            return
        mine = _groups(order[bin_of[order] == full])
        leaving = _sums(weights, mine)[..., None]
        for other in reversed(others):
            theirs = _groups(order[bin_of[order] == other])
            moved = leaving - _sums(weights, theirs)[:, None]
            one = used[:, full, None, None] - moved
            two = used[:, other, None, None] + moved
            fuller = np.maximum(one[0], two[0])
            fuller[(one[1] > limits[full]) | (two[1] > limits[other])] = np.inf
            i, j = np.unravel_index(np.argmin(fuller), fuller.shape)
            if fuller[i, j] < used[0, full] * _LESS:
                break
        else:
            return
        used[:, full] -= moved[:, i, j]
        used[:, other] += moved[:, i, j]
        for items, to in (mine[:, i], other), (theirs[:, j], full):
            bin_of[items[items >= 0]] = to


def _groups(items: np.ndarray) -> np.ndarray:
    """Returns the sets of 0 to 2 items that may leave a bin; -1: no item."""
    items = items[:_MAX_SINGLE]
    one, two = np.triu_indices(min(items.size, _MAX_PAIRED), 1)
    none = np.full(1 + items.size, -1)
    first = np.concatenate([[-1], items, items[one]])
    return np.stack([first, np.concatenate([none, items[two]])])


def _sums(weights: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return np.where(groups < 0, 0.0, weights[:, groups]).sum(axis=1)


def lower_bound(loads: ArrayLike, num_bins: int) -> float:
    """Returns a lower bound on the load of the fullest bin in any packing.

    For each k, either the k largest items have a bin each, and all others share
    the remaining bins, or one of the k items shares its bin with another.

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
    """Returns the maximum of the mean, the largest item and a crowding bound.

    Some bin holds at least k + 1 of the k * num_bins + 1 largest items.
    """
    total = np.concatenate([[0.0], np.cumsum(ordered)])
    k = np.arange((ordered.size - 1) // num_bins + 1)
    last = k * num_bins + 1
    crowded = np.max(total[last] - total[last - k - 1])
    return max(total[-1] / num_bins, ordered[0], crowded)


def _why_infeasible(sizes: np.ndarray, limits: np.ndarray) -> str:
    few = ", ".join([f"{limit:,.0f}" for limit in limits[:8]])
    few += ", ..." * (limits.size > 8)
    if sizes.sum() > limits.sum():
        return (
            f"All items need {sizes.sum():,.0f}, and the bins hold "
            f"{limits.sum():,.0f} together: {few}."
        )
    if sizes.max() > limits.max():
        return (
            f"The largest item needs {sizes.max():,.0f}, and the largest bin "
            f"holds {limits.max():,.0f}."
        )
    return (
        f"Found no packing of {sizes.size} items of sizes up to "
        f"{sizes.max():,.0f}, {sizes.sum():,.0f} in all, into bins of {few}."
    )

"""Packing, against all packings there are."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tfdist.placement.branch_and_bound import search
from tfdist.placement.packing import InfeasibleError, improve, lower_bound, pack
from tfdist.placement.splitting import fill

loads_of_few = st.lists(st.integers(0, 20), max_size=7)
few_bins = st.integers(1, 3)


def totals(loads, bins, num_bins):
    return np.bincount(np.array(bins, int), weights=loads, minlength=num_bins)


def all_packings(num_items, num_bins):
    return itertools.product(range(num_bins), repeat=num_items)


@given(loads=loads_of_few, num_bins=few_bins)
@settings(max_examples=100, deadline=None)
def test_few_items_are_packed_best_and_proven(loads, num_bins):
    packing = pack(loads, num_bins)
    best = min(
        max(totals(loads, bins, num_bins))
        for bins in all_packings(len(loads), num_bins)
    )
    assert max(packing.loads) == best == pytest.approx(packing.lower_bound)
    assert list(packing.loads) == list(totals(loads, packing.bins, num_bins))
    assert lower_bound(loads, num_bins) <= best + 1e-9


@given(loads=loads_of_few, num_bins=few_bins, data=st.data())
@settings(max_examples=100, deadline=None)
def test_limits_are_kept_or_proven_impossible(loads, num_bins, data):
    limits = data.draw(
        st.lists(st.integers(1, 40), min_size=num_bins, max_size=num_bins)
    )
    sizes = data.draw(
        st.lists(st.integers(0, 20), min_size=len(loads), max_size=len(loads))
    )
    feasible = [
        max(totals(loads, bins, num_bins))
        for bins in all_packings(len(loads), num_bins)
        if (totals(sizes, bins, num_bins) <= limits).all()
    ]
    if not feasible:
        with pytest.raises(InfeasibleError):
            pack(loads, num_bins, sizes=sizes, limits=limits)
        return
    packing = pack(loads, num_bins, sizes=sizes, limits=limits)
    assert (totals(sizes, packing.bins, num_bins) <= limits).all()
    assert max(packing.loads) == min(feasible)


@pytest.mark.parametrize(("num_items", "num_bins"), [(3000, 50), (300, 7)])
def test_many_items_come_within_a_thousandth(num_items, num_bins):
    loads = np.random.default_rng(0).uniform(1, 100, num_items)
    packing = pack(loads, num_bins)
    assert max(packing.loads) <= packing.lower_bound * 1.001


def test_the_bound_uses_large_items_alone():
    # 19 large items on 3 bins cannot be even, whatever the 200 small ones do.
    loads = [131.0] * 3 + [33.5] * 16 + [0.01] * 200
    packing = pack(loads, 3)
    assert packing.lower_bound > 1.02 * sum(loads) / 3
    assert max(packing.loads) <= packing.lower_bound * 1.01


def test_improve_never_worsens():
    rng = np.random.default_rng(1)
    loads, bins = rng.uniform(1, 9, 40), rng.integers(0, 4, 40)
    better = totals(loads, improve(loads, bins, 4), 4)
    assert better.max() < totals(loads, bins, 4).max()
    assert better.sum() == pytest.approx(loads.sum())


def test_a_search_gives_up_at_its_nodes():
    loads = np.random.default_rng(2).uniform(1, 100, 40)
    found = search(loads, 6, upper=loads.sum() / 6 * 1.0000001, max_nodes=50)
    assert (found.bins, found.complete) == (None, False)


@pytest.mark.parametrize(
    ("limits", "match"),
    [
        ([4, 4], "All items need 12, and the bins hold 8 together: 4, 4"),
        ([9, 4], "The largest item needs 10, and the largest bin holds 9"),
    ],
)
def test_the_message_names_the_numbers(limits, match):
    with pytest.raises(InfeasibleError, match=match):
        pack([10, 2], 2, limits=limits)


@given(
    rows=st.lists(st.integers(1, 500), min_size=1, max_size=8),
    num_bins=st.integers(1, 6),
)
@example(rows=[341], num_bins=6)
@settings(max_examples=50, deadline=None)
def test_runs_of_rows_fill_bins_evenly(rows, num_bins):
    row_loads = np.arange(1, len(rows) + 1)
    loads = row_loads * rows
    mean = loads.sum() / num_bins
    cut = [True] * len(rows)
    runs = fill(loads, loads, rows, cut, [np.inf] * num_bins, mean)
    assert [sum(run.values()) for run in runs] == rows
    filled = np.zeros(num_bins)
    for row_load, run in zip(row_loads, runs, strict=True):
        for task, n in run.items():
            filled[task] += row_load * n
    assert filled.max() <= 1.03 * mean + 2 * row_loads.max()

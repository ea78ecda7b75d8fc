"""Packing, against all packings there are."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.placement import packing
from tfdist.placement.packing import InfeasibleError, lower_bound

loads_of_few = st.lists(st.integers(0, 20), max_size=7)
few_bins = st.integers(1, 3)


def pack(loads, num_bins, sizes=None, limits=None):
    sizes = loads if sizes is None else sizes
    limits = [np.inf] * num_bins if limits is None else limits
    return packing.pack(loads, num_bins, sizes, limits)


def totals(loads, bins, num_bins):
    return np.bincount(np.array(bins, int), weights=loads, minlength=num_bins)


def all_packings(num_items, num_bins):
    return itertools.product(range(num_bins), repeat=num_items)


@given(loads=loads_of_few, num_bins=few_bins)
@settings(max_examples=100, deadline=None)
def test_few_items_are_packed_well_and_the_bound_is_one(loads, num_bins):
    largest = max(totals(loads, pack(loads, num_bins), num_bins))
    best = min(
        max(totals(loads, bins, num_bins))
        for bins in all_packings(len(loads), num_bins)
    )
    assert lower_bound(loads, num_bins) <= best + 1e-9
    # Graham's bound for the longest first.
    assert best <= largest <= best * (4 / 3 - 1 / (3 * num_bins)) + 1e-9


@given(loads=loads_of_few, num_bins=few_bins, data=st.data())
@settings(max_examples=100, deadline=None)
def test_limits_are_kept(loads, num_bins, data):
    limits = data.draw(
        st.lists(st.integers(1, 40), min_size=num_bins, max_size=num_bins)
    )
    sizes = data.draw(
        st.lists(st.integers(0, 20), min_size=len(loads), max_size=len(loads))
    )
    try:
        bins = pack(loads, num_bins, sizes=sizes, limits=limits)
    except InfeasibleError:
        # With some room to spare there is always a packing.
        assert sum(sizes) + num_bins * max(sizes) > sum(limits)
        return
    assert (totals(sizes, bins, num_bins) <= limits).all()


@pytest.mark.parametrize(("num_items", "num_bins"), [(3000, 50), (300, 7)])
def test_many_items_come_within_a_thousandth(num_items, num_bins):
    loads = np.random.default_rng(0).uniform(1, 100, num_items)
    largest = max(totals(loads, pack(loads, num_bins), num_bins))
    assert largest <= lower_bound(loads, num_bins) * 1.001


def test_swaps_improve_on_longest_first():
    loads = [3, 3, 2, 2, 2]  # Longest first ends with 7 and 5.
    assert sorted(totals(loads, pack(loads, 2), 2)) == [6, 6]


def test_the_bound_knows_that_large_items_stay_alone():
    # Two of 9 leave two bins for five of 4; with one of these, 9 are 13.
    loads = [9, 9, 4, 4, 4, 4, 4]
    assert lower_bound(loads, 4) == 12 > max(sum(loads) / 4, 8)
    assert max(totals(loads, pack(loads, 4), 4)) == 12


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

"""Partitioners, against `tf.compat.v1`."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.placement.partitioners import (
    apply_partitioner,
    fixed_size_partitioner,
    min_max_variable_partitioner,
    row_runs,
    row_slices,
    variable_axis_size_partitioner,
)

v1 = tf.compat.v1

shapes = st.lists(st.integers(1, 200), min_size=1, max_size=4)
dtypes = st.sampled_from([tf.float32, tf.float64, tf.bfloat16, tf.string])
positive = st.integers(1, 1 << 12)
TABLE = tf.TensorShape([4, 6])


@given(shape=shapes, dtype=dtypes, data=st.data())
@settings(max_examples=150, deadline=None)
def test_no_difference_from_tf1(shape, dtype, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    shards, size, string = (data.draw(positive) for _ in range(3))
    most = data.draw(st.none() | st.integers(1, 20))
    call = {"shape": tf.TensorShape(shape), "dtype": dtype}
    for ours, theirs, arguments in (
        (fixed_size_partitioner, v1.fixed_size_partitioner, (shards, axis)),
        (
            variable_axis_size_partitioner,
            v1.variable_axis_size_partitioner,
            (size, axis, string, most),
        ),
        (
            min_max_variable_partitioner,
            v1.min_max_variable_partitioner,
            (shards, axis, size, string),
        ),
    ):
        assert ours(*arguments)(**call) == theirs(*arguments)(**call)


@given(num_rows=st.integers(1, 60), data=st.data())
@settings(max_examples=30, deadline=None)
def test_slices_are_those_of_get_variable(num_rows, data):
    num_shards = data.draw(st.integers(1, num_rows))
    with tf.Graph().as_default():
        parts = v1.get_variable(
            "v",
            [num_rows, 2],
            partitioner=v1.fixed_size_partitioner(num_shards),
            use_resource=True,
        )
        infos = [part._get_save_slice_info() for part in parts]
    expected = tuple((i.var_offset[0], i.var_shape[0]) for i in infos)
    assert row_slices(num_rows, num_shards) == expected


def test_row_slices():
    assert [size for _, size in row_slices(43, 5)] == [9, 9, 9, 8, 8]


@given(shape=shapes, num_shards=st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_applied_shards_fit(shape, num_shards):
    partitioner = fixed_size_partitioner(num_shards)
    shards = apply_partitioner(partitioner, tf.TensorShape(shape))
    assert shards == min(num_shards, shape[0])
    assert sum(size for _, size in row_slices(shape[0], shards)) == shape[0]


@pytest.mark.parametrize("bad", [0, -1, None, 1.5, True])
@pytest.mark.parametrize(
    "make",
    [
        fixed_size_partitioner,
        lambda n: min_max_variable_partitioner(max_partitions=n),
        lambda n: row_slices(n, 1),
        lambda n: row_slices(1, n),
    ],
)
def test_counts_must_be_positive(make, bad):
    with pytest.raises(ValueError, match="must be a positive integer"):
        make(bad)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_shard_bytes": 0},
        {"max_shard_bytes": 8, "bytes_per_string_element": 0},
        {"max_shard_bytes": 8, "max_shards": 0},
    ],
)
def test_sizes_must_be_positive(arguments):
    with pytest.raises(ValueError, match="must be a positive"):
        variable_axis_size_partitioner(**arguments)


def test_slice_size_must_be_positive():
    with pytest.raises(ValueError, match="`min_slice_size` must be a positive"):
        min_max_variable_partitioner(2, min_slice_size=0)


def test_more_shards_than_rows():
    with pytest.raises(ValueError, match="num_shards=4, num_rows=3"):
        row_slices(3, 4)


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        ([1, 2], ValueError, "only axis 0 can be split"),
        ([5, 1], ValueError, "more parts than rows"),
        ([0, 1], ValueError, "no part along some axis"),
        ([2], ValueError, "which has 1 axes"),
        (2, TypeError, "not a sequence of integers"),
        ([2.0, 1], TypeError, "not a sequence of integers"),
    ],
)
def test_answers_that_do_not_fit(answer, error, match):
    with pytest.raises(error, match=match):
        apply_partitioner(lambda shape, dtype: answer, TABLE)


def test_a_partitioner_of_axis_1():
    with pytest.raises(ValueError, match="only axis 0 can be split"):
        apply_partitioner(fixed_size_partitioner(2, axis=1), TABLE)


def test_a_partitioner_that_is_none():
    with pytest.raises(TypeError, match="`partitioner` must be callable"):
        apply_partitioner(2, TABLE)


# --- Runs of rows ------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["div", "balanced"])
@given(st.integers(1, 3000), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_every_row_is_in_one_run(strategy, num_rows, num_shards):
    num_shards = min(num_shards, num_rows)
    runs = row_runs(num_rows, num_shards, strategy)
    row, held = 0, [0] * num_shards
    for run in runs:
        assert run.row == row
        assert run.position == held[run.shard]
        row += run.size
        held[run.shard] += run.size
    assert row == num_rows
    assert held == [size for _, size in row_slices(num_rows, num_shards)]


def expected_load(runs, num_rows, batch, exponent):
    """Rows of each shard in a batch of ids by Zipf's law, each once."""
    share = np.arange(1, num_rows + 1.0) ** -exponent
    once = 1 - (1 - share / share.sum()) ** batch
    held = np.zeros(1 + max(run.shard for run in runs))
    for run in runs:
        held[run.shard] += once[run.row : run.row + run.size].sum()
    return held.max() / held.mean()


@pytest.mark.parametrize(("num_shards", "div"), [(2, 1.8), (4, 3.2), (8, 5.5)])
def test_balanced_runs_share_the_frequent_rows(num_shards, div):
    arguments = 100_000, 4096, 1.05
    before = expected_load(row_runs(100_000, num_shards, "div"), *arguments)
    after = expected_load(row_runs(100_000, num_shards), *arguments)
    assert after < 1.02 < div < before


@pytest.mark.parametrize("exponent", [0.6, 0.8, 1.05, 1.3])
@pytest.mark.parametrize("batch", [256, 65536])
@pytest.mark.parametrize("num_rows", [3_000, 1_000_000])
def test_balanced_by_any_power_law(num_rows, batch, exponent):
    runs = row_runs(num_rows, 8)
    assert expected_load(runs, num_rows, batch, exponent) < 1.05
    assert len(runs) < 25 * 8  # Each is restored by itself.
    # Those beyond the first ones begin where TensorFlow copies no slice.
    assert not any(run.position % 16 for run in runs if run.position >= 80)

"""Strategies and load functions, against what contrib did."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.placement.strategies import (
    GreedyLoadBalancingStrategy,
    RandomStrategy,
    RoundRobinStrategy,
    byte_size_load_fn,
    check_task,
    load_of,
    traffic_load_fn,
)
from tfdist.placement.variables import VariableSpec

V = VariableSpec("v", (2, 2))


def specs(*shapes):
    return [VariableSpec(f"v{i}", shape) for i, shape in enumerate(shapes)]


def test_round_robin():
    strategy = RoundRobinStrategy(3)
    assert [strategy(V) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize(
    ("shapes", "num_tasks", "tasks", "loads"),
    [
        ([(2, 2), (2, 1), (2, 2), (1, 3)], 2, [0, 1, 1, 0], (28, 24)),
        (
            [(n,) for n in range(9, 0, -1)],
            2,
            [0, 1, 1, 0, 0, 1, 1, 0, 0],
            (92, 88),
        ),
        ([(n,) for n in range(1, 10)], 2, [0, 1, 0, 1, 0, 1, 0, 1, 0], None),
        (
            [(n,) for n in range(9, 0, -1)],
            3,
            [0, 1, 2, 2, 1, 0, 0, 1, 2],
            None,
        ),
        ([(4, 4), (3, 4), (3, 4), (4,)], 2, [0, 1, 1, 0], (80, 96)),
    ],
)
def test_greedy_matches_the_recorded_lists(shapes, num_tasks, tasks, loads):
    strategy = GreedyLoadBalancingStrategy(num_tasks, byte_size_load_fn)
    assert [strategy(spec) for spec in specs(*shapes)] == tasks
    assert loads is None or strategy.loads == loads


@given(
    sizes=st.lists(st.integers(0, 50), max_size=30),
    num_tasks=st.integers(1, 6),
)
@settings(max_examples=50, deadline=None)
def test_greedy_is_contribs_rule(sizes, num_tasks):
    strategy = GreedyLoadBalancingStrategy(num_tasks, byte_size_load_fn)
    loads = np.zeros(num_tasks)
    for spec in specs(*[(size,) for size in sizes]):
        task = np.argmin(loads)
        loads[task] += 4 * spec.shape[0]
        assert strategy(spec) == task


@pytest.mark.parametrize("use_resource", [False, True])
def test_greedy_counts_the_bytes_of_tf1_ops(use_resource):
    strategy = GreedyLoadBalancingStrategy(2, byte_size_load_fn)
    setter = tf.compat.v1.train.replica_device_setter(2, ps_strategy=strategy)
    shapes = [(2, 2), (2, 1), (2, 2), (1, 3), ()]
    with tf.Graph().as_default(), tf.compat.v1.device(setter):
        variables = [
            tf.compat.v1.get_variable(
                f"v{i}",
                shape,
                initializer=tf.compat.v1.zeros_initializer(),
                use_resource=use_resource,
            )
            for i, shape in enumerate(shapes)
        ]
    tasks = [tf.DeviceSpec.from_string(v.device).task for v in variables]
    assert tasks == [0, 1, 1, 0, 1]
    assert strategy.loads == (28, 28)


def test_random_is_the_hash_of_name_and_seed():
    # The name and the result are upstream's own test of unicode names.
    name = "A unicode \u018e string \xf1"
    assert RandomStrategy(2)(VariableSpec(name, ())) == 1
    tasks = [RandomStrategy(5, seed=s)(V) for s in range(40)]
    assert set(tasks) == set(range(5))
    assert tasks[0] == RandomStrategy(5)(VariableSpec("v", (9,)))


def test_random_takes_variables_for_what_they_are_called():
    """And not all kernels for one."""
    layers = [keras.layers.Dense(1, name=f"layer{i}") for i in range(9)]
    kernels = keras.Sequential([keras.Input([1]), *layers]).weights[::2]
    own = [tf.Variable(0.0, name=v.path) for v in kernels]
    strategy = RandomStrategy(5)
    tasks = [strategy(VariableSpec(v.path, ())) for v in kernels]
    assert len({*tasks}) > 2
    assert [*map(strategy, kernels)] == [*map(strategy, own)] == tasks


def test_bytes_count_slots_and_what_they_add():
    spec = VariableSpec("v", (10, 4), "float16", num_slots=2, extra_bytes=7)
    assert byte_size_load_fn(spec) == 3 * 80 + 7
    assert byte_size_load_fn(VariableSpec("v", ())) == 4
    assert byte_size_load_fn(VariableSpec("v", (0, 4))) == 0
    assert byte_size_load_fn(tf.Variable(tf.zeros([3], tf.int64))) == 24


def test_strings_have_no_bytes():
    spec = VariableSpec("words", (3,), "string")
    with pytest.raises(ValueError, match=r"dtype=string for variable 'words'"):
        byte_size_load_fn(spec)
    strategy = GreedyLoadBalancingStrategy(2, lambda v: 16 * v.num_elements)
    assert [strategy(spec), strategy.loads] == [0, (48, 0)]


@pytest.mark.parametrize("shape", [None, (None, 4)])
def test_an_unknown_shape_has_no_bytes(shape):
    with pytest.raises(ValueError, match=r"known only if its shape is.*'v'"):
        byte_size_load_fn(VariableSpec("v", shape))


def test_a_table_op_has_no_bytes():
    with tf.Graph().as_default():
        op = tf.raw_ops.MutableHashTableV2(
            key_dtype=tf.string, value_dtype=tf.int64
        ).op
    with pytest.raises(TypeError, match="MutableHashTableV2"):
        byte_size_load_fn(op)


def test_traffic():
    assert traffic_load_fn(VariableSpec("v", (100, 10), num_slots=2)) == 8000
    frozen = VariableSpec("v", (100, 10), trainable=False)
    assert traffic_load_fn(frozen) == 4000
    table = VariableSpec("v", (100, 10), rows_per_step=5)
    assert traffic_load_fn(table) == 2 * 5 * (40 + 8)
    small = VariableSpec("v", (3, 10), rows_per_step=5)
    assert traffic_load_fn(small) == 2 * 3 * (40 + 8)


@pytest.mark.parametrize("load", [float("nan"), float("inf"), -1])
def test_a_load_that_is_none(load):
    strategy = GreedyLoadBalancingStrategy(2, lambda variable: load)
    with pytest.raises(ValueError, match=r"`load_fn` must return.*'v'"):
        strategy(V)


@pytest.mark.parametrize("load", ["1", None, True])
def test_a_load_that_is_no_number(load):
    with pytest.raises(TypeError, match="must return a finite number"):
        load_of(V, lambda variable: load)


@pytest.mark.parametrize("num_tasks", [0, -1, 1.5, None])
@pytest.mark.parametrize(
    "make",
    [
        RoundRobinStrategy,
        RandomStrategy,
        lambda n: GreedyLoadBalancingStrategy(n, byte_size_load_fn),
    ],
)
def test_no_tasks(make, num_tasks):
    with pytest.raises(ValueError, match="must be a positive integer"):
        make(num_tasks)


def test_bad_arguments():
    with pytest.raises(TypeError, match="`load_fn` must be callable"):
        GreedyLoadBalancingStrategy(2, 3)
    with pytest.raises(TypeError, match="`seed` must be an int"):
        RandomStrategy(2, seed="a")


def test_check_task():
    assert check_task(np.int64(1), 2, V, len) == 1
    for task in (2, -1):
        with pytest.raises(ValueError, match=rf"0 to 1.*{task}.*'v'"):
            check_task(task, 2, V, RoundRobinStrategy(2))
    for task in (0.0, None, True):
        with pytest.raises(TypeError, match="must return an integer"):
            check_task(task, 2, V, RoundRobinStrategy(2))

"""Which strategy: the answers of the field, what they rest on, the command."""

import dataclasses
import math
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import tfdist
from tests.small_models import logistic, unbuilt
from tfdist import PartitionedEmbedding
from tfdist.advice import cost_formulas as formulas
from tfdist.advice.chooser import SECS, choose_strategy, in_units
from tfdist.advice.command import main
from tfdist.advice.estimate import estimates, replica_bytes
from tfdist.advice.machines import Machines
from tfdist.advice.workload import Workload, measure

DAY = 86400.0
GBIT = 1e9 / 8
SYNCHRONOUS = {"one_device", "mirrored", "tpu", "multi_worker_mirrored"}

# Must show 7: situations with the answer of
# - "2017": Distributed TensorFlow, TensorFlow Dev Summit 2017;
# - "2018": Distributed TensorFlow training, Google I/O 2018, minutes 6 to 13;
# - "course": Production Machine Learning Systems, the same with its limits;
# - "guide", "ps", "mwms", "tpu": TensorFlow's guide "Distributed training" and
#   its tutorials on parameter servers, multi-worker training and TPUs;
# - "tfdist": it has no TPUEmbedding.

RESNET = Workload(
    batch_size=64,
    dense_bytes=102e6,
    slot_bytes=102e6,
    largest_bytes=9.4e6,
    activation_bytes=5e9,
    boundary_bytes=50e6,
    flops=64 * 25e9,
)
# A step is short, its bytes are many.
VGG = dataclasses.replace(
    RESNET, dense_bytes=553e6, slot_bytes=553e6, largest_bytes=411e6
)
MNIST = Workload(batch_size=64, dense_bytes=318e3, slot_bytes=636e3)
WIDE_AND_DEEP = Workload(
    batch_size=256,
    dense_bytes=1e6,
    table_bytes=64e6,
    rows_bytes=131072,
    slot_bytes=65e6,
    compute_secs=0.002,
)
# The slide's table of 1,000,000,000 x 20, with Adagrad.
BILLION_ROWS = dataclasses.replace(
    WIDE_AND_DEEP, table_bytes=80e9, slot_bytes=80e9
)
TRANSLATOR = Workload(
    batch_size=128,
    dense_bytes=14e9,
    slot_bytes=28e9,
    largest_bytes=1e9,
    boundary_bytes=32e6,
    compute_secs=2.0,
)
TRANSFORMER = Workload(
    batch_size=16,
    dense_bytes=1.3e9,
    slot_bytes=2.6e9,
    largest_bytes=2e8,
    compute_secs=0.5,
)
JPEGS = dataclasses.replace(RESNET, input_secs=0.5)
CSV = dataclasses.replace(WIDE_AND_DEEP, input_secs=0.05)

GPU = dict(kind="gpu")
FAST = dict(kind="gpu", devices=8, bandwidth=100 * GBIT, latency=2e-5)

SITUATIONS = {
    # Devices of one machine.
    "guide: a laptop's CPU": (MNIST, {}, "one_device", "One device"),
    "guide: one GPU": (RESNET, GPU, "one_device", "One device"),
    "2018: several GPUs on one machine": (
        RESNET,
        dict(kind="gpu", devices=4),
        "mirrored",
        "Strong links: all-reduce takes",
    ),
    "guide: eight GPUs of one machine": (
        TRANSFORMER,
        dict(kind="gpu", devices=8),
        "mirrored",
        "copy of the model",
    ),
    "guide: more GPUs, the global batch grows": (
        RESNET,
        dict(kind="gpu", devices=8),
        "mirrored",
        "8 x 64 = 512",
    ),
    "guide: a tiny step on several GPUs": (
        MNIST,
        dict(kind="gpu", devices=8),
        "one_device",
        "larger batch",
    ),
    "guide: the cores of a TPU": (
        RESNET,
        dict(kind="tpu", devices=8),
        "tpu",
        "Strong links",
    ),
    "2018: a pod of TPUs": (
        TRANSFORMER,
        dict(kind="tpu", devices=8, count=16),
        "tpu",
        "all-reduce",
    ),
    # Several machines, synchronously.
    "guide: several machines of GPUs": (
        RESNET,
        FAST | dict(count=4),
        "multi_worker_mirrored",
        "Strong links: all-reduce takes",
    ),
    "mwms: two machines with a GPU each": (
        RESNET,
        dict(kind="gpu", count=2, bandwidth=100 * GBIT),
        "multi_worker_mirrored",
        "Synchronous: the global batch is 2 x 64",
    ),
    "2018: a small number of machines": (
        dataclasses.replace(RESNET, compute_secs=2.0),
        dict(count=3, spread=0.02),
        "multi_worker_mirrored",
        "Strong links",
    ),
    "course: constrained by compute power": (
        TRANSFORMER,
        FAST | dict(count=32),
        "multi_worker_mirrored",
        "Compute-bound: more or faster devices",
    ),
    "mwms: preemptible, but few and saved often": (
        RESNET,
        FAST | dict(count=2, secs_between_failures=DAY),
        "multi_worker_mirrored",
        "Strong links",
    ),
    # Weak links.
    "2018: weak links between machines of GPUs": (
        VGG,
        dict(kind="gpu", devices=4, count=2, bandwidth=GBIT),
        "mirrored",
        "Weak links between machines",
    ),
    "2018: weak links between single GPUs": (
        VGG,
        dict(kind="gpu", count=2, bandwidth=GBIT),
        "one_device",
        "links are too weak",
    ),
    # Parameter servers.
    "2018: a large cluster of CPUs": (
        dataclasses.replace(RESNET, compute_secs=5.0),
        dict(count=100),
        "ps",
        "Many weak machines",
    ),
    "ps: a thousand workers": (
        WIDE_AND_DEEP,
        dict(count=1000),
        "ps",
        "Weak links",
    ),
    "2018: workers preempted by production jobs": (
        dataclasses.replace(RESNET, compute_secs=5.0),
        dict(count=200, spread=0.05, secs_between_failures=DAY),
        "ps",
        "Unreliable machines",
    ),
    "2018: machines go down for maintenance": (
        dataclasses.replace(RESNET, compute_secs=5.0),
        dict(count=500, spread=0.05, secs_between_failures=3 * DAY),
        "ps",
        "back to the last checkpoint",
    ),
    "2018: asymmetry between the workers": (
        dataclasses.replace(RESNET, compute_secs=5.0),
        dict(count=20, spread=0.5),
        "ps",
        "unequal pace",
    ),
    "2018: workers get out of sync": (
        dataclasses.replace(RESNET, compute_secs=5.0),
        dict(count=100),
        "ps",
        "stale gradients can delay convergence",
    ),
    "course: many machines constrained by I/O": (
        CSV,
        dict(count=50),
        "ps",
        "Input-bound",
    ),
    "ps: few rows of large tables": (
        WIDE_AND_DEEP,
        dict(count=16, spread=0.0),
        "ps",
        "Weak links",
    ),
    # Too large.
    "2017: a table of a billion rows": (
        BILLION_ROWS,
        dict(count=20),
        "ps",
        "too large for a device",
    ),
    "ps: tables too large for GPUs": (
        BILLION_ROWS,
        dict(kind="gpu", count=8),
        "ps",
        "Partition it over 3 parameter servers",
    ),
    "2017: the deep LSTM on the GPUs of a machine": (
        TRANSLATOR,
        dict(kind="gpu", devices=8),
        "model_parallel",
        "layers on different devices",
    ),
    "2018: too large for the GPUs of a machine": (
        dataclasses.replace(TRANSLATOR, dense_bytes=56e9, slot_bytes=112e9),
        FAST | dict(count=4, devices=2),
        "model_parallel",
        "too large for a device",
    ),
    "tfdist: a table too large for the GPUs of a machine": (
        BILLION_ROWS,
        dict(kind="gpu", devices=8),
        None,
        "tables over parameter servers",
    ),
    "tfdist: a table too large for TPUs": (
        BILLION_ROWS,
        dict(kind="tpu", devices=8),
        None,
        "parameter servers",
    ),
    # Input.
    "course: input-bound on one machine": (
        JPEGS,
        dict(kind="gpu", devices=8),
        "one_device",
        "Input-bound",
    ),
    "course: input-bound, more machines": (
        JPEGS,
        FAST | dict(count=4),
        "multi_worker_mirrored",
        "more machines that each prepare a share",
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_situation(situation):
    step, machines, strategy, words = SITUATIONS[situation]
    advice = choose_strategy(step, Machines(**machines))
    assert advice.strategy == strategy, advice.table()
    assert words in " ".join(advice.reasons), advice.table()


def test_a_pipeline_is_no_longer_than_needed():
    """Over a machine or all; no more micro-batches than examples."""
    there = Machines(kind="gpu", devices=4, count=2, spread=0.0)
    for size, machines, turns in ((20e9, 1, 16 + 3), (100e9, 2, 32 + 7)):
        step = Workload(batch_size=64, dense_bytes=size, compute_secs=1.0)
        made = by_name(step, there)["model_parallel"]
        parts = 4 * machines
        assert made.machines == machines
        assert made.compute_secs == pytest.approx(turns / parts / 4 / parts)
    step = dataclasses.replace(step, batch_size=2)
    made = by_name(step, there)["model_parallel"]
    assert made.compute_secs == pytest.approx((2 + 7) / 8 / 2)


def test_workers_share_the_link_of_their_machine():
    step = Workload(batch_size=1, dense_bytes=1e6, compute_secs=0.0)
    there = Machines(count=2, devices=4, bandwidth=1e9, latency=0.001)
    made = by_name(step, there)["ps"]
    assert (made.replicas, made.num_ps) == (4, 1)
    assert made.wire_secs == pytest.approx(2 * 4 * 0.001 + 4 * 0.001)


def test_the_largest_weight_has_one_server():
    """VGG's, 411 of 553 MB: more servers do not help the busiest."""
    step = dataclasses.replace(VGG, largest_bytes=0.0)
    there = Machines(count=32, bandwidth=GBIT, spread=0.0)
    split, whole = (by_name(s, there)["ps"] for s in (step, VGG))
    assert split.num_ps > whole.num_ps
    assert split.examples_per_sec > whole.examples_per_sec


def test_all_reduce_gathers_the_rows_of_all():
    step = dataclasses.replace(WIDE_AND_DEEP, dense_bytes=0.0)
    there = Machines(count=8, bandwidth=1e9, latency=0.001)
    made = by_name(step, there)["multi_worker_mirrored"]
    assert made.wire_secs == pytest.approx(7 * (131072 / 1e9 + 0.001))


def test_a_model_that_fits_is_not_partitioned():
    """Not even where a pipeline would do more than copies."""
    step = Workload(batch_size=64, dense_bytes=10e9, compute_secs=1.0)
    there = Machines(kind="gpu", devices=8, device_bandwidth=1e9)
    made = by_name(step, there)
    fastest = max(made.values(), key=lambda e: e.examples_per_sec)
    assert fastest.strategy == "model_parallel"
    assert choose_strategy(step, there).strategy == "one_device"


def test_lost_servers_cost_more_than_lost_workers():
    there = Machines(count=10, secs_between_failures=3600.0)
    kept = by_name(dataclasses.replace(RESNET, compute_secs=5.0), there)["ps"]
    assert kept.num_ps == 1
    one_server = formulas.goodput(1 / 3600, 600, 30)
    assert kept.goodput == pytest.approx(one_server * 3600 / 3630)
    alone = by_name(RESNET, there)["one_device"]
    assert alone.goodput == pytest.approx(one_server)


def test_servers_answer_to_the_load():
    """More workers than one server can feed: the advice has more servers."""
    step = dataclasses.replace(WIDE_AND_DEEP, dense_bytes=20e6)
    few, many = (
        choose_strategy(step, Machines(count=n)).estimates[4].num_ps
        for n in (4, 64)
    )
    assert few == 1
    assert many > 8


# Properties.

counts = st.integers(1, 40)
megabytes = st.floats(0.001, 1e5)


@st.composite
def workloads(draw):
    maybe = st.one_of(st.just(0.0), megabytes)
    dense, table = draw(maybe) * 1e6, draw(maybe) * 1e6
    share = st.floats(0, 1)
    return Workload(
        batch_size=draw(st.integers(1, 4096)),
        dense_bytes=dense,
        table_bytes=table,
        rows_bytes=table * draw(share),
        slot_bytes=(dense + table) * draw(st.integers(0, 2)),
        largest_bytes=dense * draw(share),
        activation_bytes=draw(megabytes) * 1e6,
        boundary_bytes=draw(megabytes) * 1e5,
        compute_secs=draw(st.floats(0, 100)),
        input_secs=draw(st.floats(0, 10)),
    )


@st.composite
def machines(draw):
    return Machines(
        count=draw(counts),
        devices=draw(st.integers(1, 8)),
        kind=draw(st.sampled_from(["cpu", "gpu", "tpu"])),
        spread=draw(st.floats(0, 1)),
        bandwidth=draw(st.floats(1e6, 1e11)),
        latency=draw(st.floats(0, 0.1)),
        secs_between_failures=draw(
            st.one_of(st.just(math.inf), st.floats(0.1, 1e9))
        ),
    )


def by_name(step, there):
    return {e.strategy: e for e in estimates(step, there)}


@settings(deadline=None)
@given(workloads(), machines())
def test_the_advised_one_is_nearly_the_best(step, there):
    advice = choose_strategy(step, there)
    possible = [e for e in advice.estimates if e.feasible]
    copies = [e for e in possible if e.strategy != "model_parallel"]
    if not possible:
        assert advice.strategy is None
        assert advice.estimate is None
        return
    best = max(e.examples_per_sec for e in copies or possible)
    assert advice.estimate in possible
    assert advice.estimate.examples_per_sec >= 0.9 * best
    assert (advice.strategy == "model_parallel") == (not copies)


shares = st.floats(0.01, 0.99)


@settings(deadline=None)
@given(workloads(), machines(), shares)
def test_what_fits_on_no_device_is_never_copied(step, there, share):
    memory = share * replica_bytes(step)
    there = dataclasses.replace(there, device_memory=memory)
    assert choose_strategy(step, there).strategy not in SYNCHRONOUS
    made = by_name(step, there)
    assert not any(made[strategy].feasible for strategy in SYNCHRONOUS)


@settings(deadline=None)
@given(workloads(), machines(), shares)
def test_what_fits_on_no_servers_is_never_served(step, there, share):
    assume(step.state_bytes > 0)
    memory = share * step.state_bytes / there.count
    there = dataclasses.replace(there, host_memory=memory)
    assert choose_strategy(step, there).strategy != "ps"
    assert not by_name(step, there)["ps"].feasible


@settings(deadline=None)
@given(workloads(), machines(), st.floats(1, 100))
def test_what_is_better_never_makes_worse(step, there, factor):
    better = {
        "bandwidth": there.bandwidth * factor,
        "device_bandwidth": there.device_bandwidth * factor,
        "latency": there.latency / factor,
        "spread": there.spread / factor,
        "device_memory": there.device_memory * factor,
        "host_memory": there.host_memory * factor,
        "restart_secs": there.restart_secs / factor,
    }
    old = by_name(step, there)
    for name, value in better.items():
        new = by_name(step, dataclasses.replace(there, **{name: value}))
        for strategy, estimate in old.items():
            if strategy == "model_parallel" and "memory" in name:
                continue  # It then uses fewer devices.
            rate = new[strategy].examples_per_sec
            assert rate >= estimate.examples_per_sec * (1 - 1e-9), name


@settings(deadline=None)
@given(workloads(), machines(), st.floats(1, 100))
def test_rarer_failures_keep_more(step, there, factor):
    between = there.secs_between_failures
    rarer = dataclasses.replace(there, secs_between_failures=between * factor)
    for old, new in zip(
        estimates(step, there), estimates(step, rarer), strict=True
    ):
        assert new.examples_per_sec >= old.examples_per_sec * (1 - 1e-9)


@settings(deadline=None)
@given(workloads(), machines(), st.floats(0.01, 100))
def test_units_do_not_matter(step, there, factor):
    """As many times the bytes, memory and bandwidth: the same seconds."""
    sizes = [f.name for f in dataclasses.fields(step) if "bytes" in f.name]
    rates = ["device_memory", "host_memory", "bandwidth", "device_bandwidth"]
    old = estimates(step, there)
    new = estimates(
        dataclasses.replace(
            step, **{name: getattr(step, name) * factor for name in sizes}
        ),
        dataclasses.replace(
            there, **{name: getattr(there, name) * factor for name in rates}
        ),
    )
    for a, b in zip(old, new, strict=True):
        assert a.examples_per_sec == pytest.approx(b.examples_per_sec, rel=1e-6)


@settings(deadline=None)
@given(workloads(), machines())
def test_a_step_does_not_grow_with_its_tables(step, there):
    """Decision D2, where the servers' memory allows."""
    there = dataclasses.replace(there, host_memory=1e15)
    larger = dataclasses.replace(step, table_bytes=10 * step.table_bytes)
    assert (
        by_name(step, there)["ps"].secs_per_step
        == by_name(larger, there)["ps"].secs_per_step
    )


@settings(deadline=None)
@given(workloads(), machines())
def test_the_table_fits_a_terminal(step, there):
    table = choose_strategy(step, there).table()
    assert max(map(len, table.splitlines())) < 80
    for estimate in estimates(step, there):
        assert f" {estimate.strategy} " in table


def test_the_table_marks_the_advised_row():
    lines = choose_strategy(RESNET, Machines(kind="gpu", devices=8)).table()
    (row,) = [line for line in lines.splitlines() if line.startswith("> ")]
    assert row.split()[1:3] == ["mirrored", "8"]


@pytest.mark.parametrize(
    ("compute_secs", "shown"),
    [(1e-9, "6.4e+10"), (0.00037, "170,000"), (0.5, "130"), (100.0, "0.64")],
)
def test_the_table_shows_two_digits_of_examples_a_second(compute_secs, shown):
    step = dataclasses.replace(RESNET, compute_secs=compute_secs)
    table = choose_strategy(step, Machines()).table()
    (row,) = [line for line in table.splitlines() if line.startswith("> ")]
    assert row.split()[-1] == shown


# The formulas, against simulations.


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_a_ring_sends_what_the_formula_says(n):
    values = np.random.default_rng(n).normal(size=[n, n])  # replica, chunk
    held, messages = values.copy(), 0
    for turn in range(2 * (n - 1)):
        sent = [(i - turn) % n for i in range(n)]
        chunks = [held[i, c] for i, c in enumerate(sent)]
        for i, (c, value) in enumerate(zip(sent, chunks, strict=True)):
            receiver = held[(i + 1) % n]
            receiver[c] = value + (receiver[c] if turn < n - 1 else 0)
        messages += 1
    np.testing.assert_allclose(held, np.tile(values.sum(axis=0), [n, 1]))
    secs = messages * (1e6 / n / 1e9 + 1e-4)
    assert formulas.all_reduce_secs(1e6, n, 1e9, 1e-4) == pytest.approx(secs)


@pytest.mark.parametrize("n", [1, 2, 8, 100])
def test_the_slowest_of_some_machines(n):
    steps = np.random.default_rng(0).normal(1, 0.2, size=[20_000, n])
    assert formulas.pace(n, 0.2) == pytest.approx(
        steps.max(axis=1).mean(), abs=0.01
    )


@pytest.mark.parametrize(
    ("parts", "micro_batches"), [(2, 1), (2, 8), (4, 16), (4, 3)]
)
def test_a_pipeline_takes_the_turns_of_its_schedule(parts, micro_batches):
    done = np.zeros([parts + 1, micro_batches + 1])
    for part in range(1, parts + 1):
        for batch in range(1, micro_batches + 1):
            free, given = done[part, batch - 1], done[part - 1, batch]
            done[part, batch] = max(free, given) + 1
    step = Workload(batch_size=micro_batches, dense_bytes=1, compute_secs=1.0)
    made = by_name(step, Machines(devices=parts))["model_parallel"]
    assert made.compute_secs == pytest.approx(
        done[-1, -1] / parts / micro_batches
    )


@pytest.mark.parametrize("between", [300.0, 3600.0, 1e6])
def test_what_failures_leave(between):
    rng = np.random.default_rng(0)
    spent, num_saved = 0.0, 2000
    for _ in range(num_saved):
        while (until := rng.exponential(between)) < 600:
            spent += until + 30
            while (until := rng.exponential(between)) < 30:
                spent += until
        spent += 600
    assert formulas.goodput(1 / between, 600, 30) == pytest.approx(
        num_saved * 600 / spent, rel=0.1
    )


def test_a_pull_and_push_as_once_measured():
    """facts.md: 100 MB over TCP 26 ms; pulled and pushed 62 to 93 ms."""
    own, server = formulas.ps_secs(
        100e6, 100e6, 1, 1, bandwidth=100e6 / 0.026, latency=0.0
    )
    assert 0.05 < own < 0.093
    assert server < own


# A workload of a model.


def tables():
    """Three tables, two of one kind, under a nested and an outer model."""
    words = keras.Input([8], dtype="int32", name="words")
    one = keras.Input([], dtype="int64", name="one")
    inner = keras.Sequential(
        [
            keras.Input([8], dtype="int32"),
            keras.layers.Embedding(1000, 16, name="inner"),
            keras.layers.Flatten(),
        ]
    )
    joined = keras.layers.Concatenate()(
        [
            inner(words),
            PartitionedEmbedding(1001, 16, 2, name="parts")(one),
            PartitionedEmbedding(50, 4, combiner="sum", name="few")(words),
        ]
    )
    model = keras.Model([words, one], keras.layers.Dense(3)(joined))
    model.compile(keras.optimizers.Adagrad(), "mse")
    return model


def test_tables_and_dense_weights_are_told_apart():
    step = Workload.of(tables, 32)
    weights = (128 + 16 + 4) * 3 + 3
    assert step.dense_bytes == 4 * weights
    assert step.largest_bytes == 4 * (weights - 3)
    assert step.table_bytes == 4 * (1000 * 16 + 1001 * 16 + 50 * 4)
    assert step.slot_bytes == step.dense_bytes + step.table_bytes
    # 8 ids an example, 1 id an example, all rows.
    rows = 8 * 32 * 16 + 32 * 16 + 50 * 4
    assert step.rows_bytes == pytest.approx(4 * rows)
    assert step.flops == 6 * 32 * weights


def test_the_positions_of_a_table_cost_no_arithmetic():
    def model_fn():
        return keras.Sequential(
            [keras.Input([8], dtype="int32"), PartitionedEmbedding(1000, 16, 2)]
        )

    assert Workload.of(model_fn, 32).flops == 0


def test_a_billion_rows_need_no_memory():
    def model_fn():
        model = keras.Sequential(
            [keras.Input([1]), keras.layers.Embedding(1_000_000_000, 20)]
        )
        model.compile(keras.optimizers.Adagrad())
        return model

    start = time.monotonic()
    step = Workload.of(model_fn, 64)
    assert time.monotonic() - start < 10
    assert (step.table_bytes, step.slot_bytes) == (80e9, 80e9)
    assert step.rows_bytes == 64 * 80
    assert choose_strategy(step, Machines(count=20)).strategy == "ps"


def test_a_layer_is_applied_at_every_position():
    def model_fn():
        return keras.Sequential(
            [
                keras.Input([10, 10, 3]),
                keras.layers.Conv2D(4, 3, use_bias=False),  # 8 x 8 positions
                keras.layers.Reshape([64, 4]),
                keras.layers.LSTM(5, use_bias=False),  # 64 positions
                keras.layers.Dense(1, use_bias=False),
            ]
        )

    conv, lstm, dense = 27 * 4 * 64, 20 * (4 + 5) * 64, 5
    step = Workload.of(model_fn, 2)
    assert step.flops == 6 * 2 * (conv + lstm + dense)
    assert step.activation_bytes == 4 * 2 * (256 + 256 + 5 + 1)
    assert step.boundary_bytes == step.activation_bytes / 4


def test_fixed_weights_are_held_and_not_exchanged():
    def model_fn():
        frozen = keras.layers.Dense(7, use_bias=False, trainable=False)
        layers = [keras.Input([3]), frozen, keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    step = Workload.of(model_fn, 1)
    trained, fixed = 7 + 7 + 7 + 1, 21 + 7 + 7
    assert step.dense_bytes == 4 * trained
    assert step.slot_bytes == 4 * (2 * trained + fixed)
    assert step.flops == 6 * (trained + fixed)


def test_vgg16():
    """15.5 G multiplications an example, forward (Simonyan, Zisserman)."""
    step = Workload.of(lambda: keras.applications.VGG16(weights=None), 1)
    assert step.dense_bytes == 4 * 138_357_544
    assert step.flops == pytest.approx(6 * 15.5e9, rel=0.02)


def test_a_subclassed_model_tells_its_weights():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(100, 4)
            self.out = keras.layers.Dense(1)

        def build(self, input_shape):
            self.table.build(input_shape)
            self.out.build((*input_shape, 4))

        def call(self, ids):
            return self.out(self.table(ids))

    def model_fn():
        model = Two()
        model.build([None, 3])
        return model

    step = Workload.of(model_fn, 8)
    assert (step.table_bytes, step.dense_bytes) == (1600, 20)
    assert step.rows_bytes == pytest.approx(8 * 16)  # One id an example.


@pytest.mark.parametrize("model_fn", [5, None, unbuilt, lambda: 3])
def test_no_model(model_fn):
    with pytest.raises((TypeError, ValueError), match="`model_fn`"):
        Workload.of(model_fn, 8)


# Measured on the spot.


class Slow(keras.layers.Layer):
    def call(self, x):
        def sleep(x):
            time.sleep(0.03)
            return x

        y = tf.numpy_function(sleep, [x], x.dtype, stateful=True)
        y.set_shape(x.shape)
        return y


def test_measures_a_step():
    secs = measure(lambda: logistic(hidden=[Slow()]), 16)
    assert 0.03 <= secs < 3


# Bad input.


@pytest.mark.parametrize("value", [-1, float("nan"), math.inf, "3", True])
@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(Workload)]
)
def test_bad_number_of_a_workload(field, value):
    numbers = {"batch_size": 1, "dense_bytes": 1} | {field: value}
    with pytest.raises((TypeError, ValueError), match=f"`{field}`"):
        Workload(**numbers)


@pytest.mark.parametrize("value", [-1, float("nan"), "3", True])
@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(Machines)]
)
def test_bad_number_of_machines(field, value):
    with pytest.raises((TypeError, ValueError), match=f"`{field}`"):
        Machines(**{field: value})


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"count": 0}, "`count` must be a positive integer"),
        ({"devices": 0}, "`devices` must be a positive integer"),
        ({"count": 1.5}, "`count` must be a positive integer"),
        ({"device_memory": 0}, "`device_memory` must be positive"),
        ({"bandwidth": 0}, "`bandwidth` must be positive"),
        ({"bandwidth": math.inf}, "`bandwidth` must be finite"),
        ({"kind": "npu"}, "one of .*'cpu', 'gpu', 'tpu'.*Received: kind='npu'"),
    ],
)
def test_no_machines(numbers, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Machines(**numbers)


@pytest.mark.parametrize(
    ("part", "whole"),
    [("rows_bytes", "table_bytes"), ("largest_bytes", "dense_bytes")],
)
def test_a_part_is_not_larger_than_the_whole(part, whole):
    with pytest.raises(ValueError, match=f"`{part}` is a part of `{whole}`"):
        Workload(batch_size=1, **({"dense_bytes": 1, whole: 1} | {part: 2}))


def test_a_batch_is_needed():
    with pytest.raises(ValueError, match="`batch_size` must be positive"):
        Workload(batch_size=0, dense_bytes=1)


# The command.

MODEL = "--model=tests.advice.test_chooser:tables"


def test_prints_the_advice_for_a_model(capsys):
    flags = ["--machines=100", "--secs_between_failures=86400"]
    assert main([MODEL, *flags, "--compute_secs=1"]) == 0
    printed = capsys.readouterr().out
    assert "100 x 1 cpu of 16 GB, 10 Gbit/s" in printed
    assert "Advice: ps\n- Unreliable machines" in printed
    assert max(map(len, printed.splitlines())) < 80


def test_works_with_nothing_but_numbers(capsys):
    flags = "--dense_bytes=1e8 --kind=gpu --devices=4"
    assert main([*flags.split(), "--compute_secs=0.1"]) == 0
    assert "Advice: mirrored" in capsys.readouterr().out
    flags = "--dense_bytes=1e6 --table_bytes=8e10 --slot_bytes=8e10"
    assert main([*flags.split(), "--machines=20"]) == 0
    assert "Advice: ps" in capsys.readouterr().out


def growing():
    ids = keras.Input([2], dtype="int64")
    rows = tfdist.DynamicEmbedding(4, 4096)(ids)
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile("adagrad", "mse")
    return model


def test_measures_on_demand(capsys):
    assert main(["--model=tests.small_models:logistic", "--measure"]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    secs = first.removeprefix("Measured here: a step ").removesuffix(".")
    (row,) = [line for line in table if line.startswith("> one_device")]
    assert secs in row


def test_numbers_replace_what_the_model_tells(capsys):
    assert main([MODEL, "--rows_bytes=1000"]) == 0
    assert "1 kB of rows a step" in capsys.readouterr().out


def test_nothing_is_possible(capsys):
    flags = ["--dense_bytes=9e10", "--kind=gpu", "--device_memory=16e9"]
    assert main(flags) == 1
    assert "Advice: none is possible" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Pass --model, or --dense_bytes"),
        (["--rows_bytes=1"], "Pass --model, or --dense_bytes"),
        (["--dense_bytes=1", "--measure"], "no --measure"),
        ([MODEL, "--measure", "--compute_secs=1"], "pass only one"),
        (["--model=no.such:thing"], "No module named 'no'"),
        (
            ["--model=tests.advice.test_chooser:nothing"],
            "no attribute 'nothing'",
        ),
        (["--model=tests.advice.test_chooser"], "package.module:function"),
        (["--model=tests.advice.test_chooser:DAY"], "must be callable"),
        (
            ["--model=tests.advice.test_chooser:growing", "--measure"],
            "Train with tfdist.fit",
        ),
        (["--model=tests.small_models:unbuilt"], "must return a built model"),
        ([MODEL, "--machines=0"], "`count` must be a positive integer"),
        ([MODEL, "--bandwidth=-1"], "`bandwidth` must be positive"),
        ([MODEL, "--bandwidth=nan"], "`bandwidth` must be positive"),
        ([MODEL, "--bandwidth=fast"], "invalid float value"),
        ([MODEL, "--batch_size=0"], "`batch_size` must be a positive integer"),
        ([MODEL, "--input_secs=-1"], "`input_secs` must not be negative"),
        ([MODEL, "--kind=npu"], "`kind` must be one of"),
        ([MODEL, "--device=gpu"], "unrecognized arguments: --device=gpu"),
        (["--dense_bytes=-1"], "`dense_bytes` must not be negative"),
        (["--dense_bytes=1", "--rows_bytes=2"], "a part of `table_bytes`"),
    ],
)
def test_bad_flags(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_itself():
    command = [sys.executable, "-m", "tfdist.advice"]
    flags = ["--model=trainer.model:nothing"]
    bad = subprocess.run(command + flags, capture_output=True, timeout=120)
    assert bad.returncode == 2
    assert b"--model=trainer.model:nothing" in bad.stderr
    flags = ["--dense_bytes=1e6", "--machines=2"]
    good = subprocess.run(command + flags, capture_output=True, timeout=120)
    assert good.returncode == 0
    assert b"Advice: " in good.stdout


# Text.


@given(st.floats(0, 8e7))
@example(2.43e-10)
@example(1.23e-11)
def test_seconds_are_short(secs):
    assert len(in_units(secs, SECS)) <= 7
    number, _, unit = in_units(secs, SECS).partition(" ")
    units = {"d": 86400, "h": 3600, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    size = units.get(unit, 0)
    assert float(number) * size == pytest.approx(secs, rel=0.006, abs=1e-9)

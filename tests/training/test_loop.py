import contextlib
import itertools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from pace import slow, slow_but
from small_models import batches, local_loop, logistic

from tfdist._tf import private, private_workers
from tfdist._tf.private_keras import nadam_product
from tfdist.training.coordinated_loop import (
    CoordinatedLoop,
    _Dispatch,
    _WorkerState,
)
from tfdist.training.loop import (
    EndOfInput,
    automatic_steps_per_dispatch,
    dispatch,
    dispatch_sizes,
)
from tfdist.training.staleness import StalenessBound
from tfdist.training.step import ModelStep


@pytest.mark.parametrize("steps_per_dispatch", [1, 2, 7, *slow(33)])
def test_number_of_steps_is_exact(steps_per_dispatch):
    model = logistic()
    loop, global_step = local_loop(
        model, batches().repeat(), steps_per_dispatch
    )
    total = 0
    for num_steps in (1, 2, 6, 7, 8, 14, 15, 40):
        loop.run(num_steps)
        total += num_steps
        assert int(global_step.numpy()) == total
        assert int(model.optimizer.iterations.numpy()) == total


def test_a_step_without_a_batch_counts_for_nothing():
    model, data = logistic(keras.optimizers.Nadam()), batches()
    loop, global_step = local_loop(model, data)
    run = tf.function(dispatch(loop._steps, 1), autograph=False)
    iterator, product = iter(data), nadam_product(model.optimizer)
    for _ in data:
        run(iterator, tf.constant(0, tf.int64))
    state = global_step, model.optimizer.iterations, product
    before = [v.numpy() for v in state]
    with pytest.raises(tf.errors.OutOfRangeError):
        run(iterator, tf.constant(0, tf.int64))
    assert [v.numpy() for v in state] == before


@given(*3 * [st.integers(0, 60)])
def test_full_dispatches_begin_at_multiples(full, num_steps, first_step):
    sizes = dispatch_sizes(num_steps, full + 1, first_step)
    assert sum(sizes) == num_steps
    starts = itertools.accumulate(sizes, initial=first_step)
    for start, size in zip(starts, sizes, strict=False):
        assert size == 1 or (size == full + 1 and start % size == 0)


def test_a_young_job_runs_steps_one_by_one():
    """Until they have taken as long as tracing ten of them will."""
    loop, global_step = local_loop(logistic(), batches().repeat())
    sizes, functions = [], loop._functions

    def spied(size):
        def run(*args):
            sizes.append(size)
            return functions[size](*args)

        return run

    loop._functions = {size: spied(size) for size in functions}
    loop.run(30)
    assert sizes == [1] * 30
    first_step = loop._secs_alone
    assert first_step > 0
    loop.run(30)
    assert 0 < loop._secs_alone < first_step
    loop._secs_alone = 1e-6
    loop.run(1)
    loop.run(25)
    assert sizes[61:] == [10, 10, 1, 1, 1, 1, 1]
    assert int(global_step) == 86


@pytest.mark.parametrize("steps_per_dispatch", [0, -1])
def test_bad_steps_per_dispatch(steps_per_dispatch):
    with pytest.raises(ValueError, match="`steps_per_dispatch` must be a pos"):
        local_loop(logistic(), batches().repeat(), steps_per_dispatch)


def test_bad_steps_per_execution():
    model = logistic()
    model.compile("sgd", "mse", steps_per_execution="auto")
    with pytest.raises(TypeError, match="`steps_per_execution` must be an int"):
        local_loop(model, batches().repeat())
    model.compile("sgd", "mse", steps_per_execution=np.int64(2))
    local_loop(model, batches().repeat())


@pytest.mark.parametrize("num_variables", [0, 1, 50, 51, 500, 10_000])
@pytest.mark.parametrize(("num_workers", "times"), [(1, 1), (15, 1), (90, 11)])
def test_automatic_steps_per_dispatch(num_variables, num_workers, times):
    steps = automatic_steps_per_dispatch(num_variables, num_workers)
    assert 1 <= steps <= min(10 * times, 50)
    assert steps == 1 or steps * num_variables <= 500 * times
    assert 100 % steps == 0


@pytest.mark.parametrize(
    "unknown_length", [False, True], ids=["finite", "unknown"]
)
def test_end_of_input_is_exact(unknown_length):
    dataset = batches(40, 8)
    if unknown_length:
        dataset = dataset.filter(lambda x, y: True)
    loop, global_step = local_loop(logistic(), dataset, steps_per_dispatch=3)
    first = loop.run(3)
    with pytest.raises(EndOfInput) as raised:
        loop.run(10)
    assert int(global_step.numpy()) == 5
    assert set(raised.value.logs) == set(first) == {"loss"}
    with pytest.raises(EndOfInput) as raised:
        loop.run(1)
    assert raised.value.logs == {}


def recorded(loop):
    """The sizes of the dispatches that run from now on."""
    sizes = []

    def recording(size, function):
        def call(*args):
            sizes.append(size)
            return function(*args)

        return call

    functions = loop._functions
    functions.update({n: recording(n, f) for n, f in functions.items()})
    return sizes


def of_a_generator():
    spec = [tf.TensorSpec([None, n]) for n in (4, 1)]
    return tf.data.Dataset.from_generator(
        lambda: iter(batches(83)), output_signature=tuple(spec)
    )


@pytest.mark.parametrize(
    ("make", "asked", "compiled", "sizes"),
    [
        *slow((lambda: batches(83), 4, 1, [4, 4, 1, 1, 1])),
        (lambda: batches(83), None, 4, [4, 4, 1, 1, 1]),
        *slow((lambda: batches(83), 1, 4, [1] * 11)),
        *slow((of_a_generator, 10, 1, [10, 1])),
        (of_a_generator, 5, 4, [5, 5, 1]),
    ],
)
def test_data_that_end_are_dispatched_as_asked(make, asked, compiled, sizes):
    """And weights and logs are those of `fit`; the last batch is smaller."""
    data = make()

    def made():
        model = logistic("adam", metrics=["accuracy"])
        model.steps_per_execution = compiled
        return model

    theirs, ours = made(), made()
    history = theirs.fit(data, verbose=0).history
    loop, global_step = local_loop(ours, data, asked)
    seen = recorded(loop)
    with pytest.raises(EndOfInput) as raised:
        loop.run(30)
    assert seen == sizes
    assert int(global_step.numpy()) == 11
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)
    expected = {metric: values[0] for metric, values in history.items()}
    assert raised.value.logs == pytest.approx(expected, rel=1e-5)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adam_clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
    "ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.7)
    ),
}


@pytest.mark.parametrize("name", slow_but(["ftrl", "schedule"], OPTIMIZERS))
def test_trains_as_fit_does(name):
    """In full dispatches and in single steps."""

    def make():
        return logistic(
            OPTIMIZERS[name](),
            metrics=["accuracy"],
            hidden=[keras.layers.Dense(5, "tanh")],
        )

    dataset = batches(80, 8)
    theirs = make()
    history = theirs.fit(dataset, verbose=0, shuffle=False).history
    ours = make()
    loop, _ = local_loop(ours, dataset.repeat(), steps_per_dispatch=4)
    logs = loop.run(10)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
    expected = {metric: values[0] for metric, values in history.items()}
    assert logs == pytest.approx(expected, rel=1e-4)


class Smallest(keras.layers.Layer):
    """Keeps the smallest number that it has seen."""

    def __init__(self, first, kept):
        super().__init__()
        self._first, self._kept = first, kept

    def build(self, input_shape):
        first = keras.initializers.Constant(self._first)
        self.smallest = self.add_weight(
            shape=(), initializer=first, trainable=False
        )

    def call(self, x):
        known = keras.ops.isfinite(self.smallest)
        before = keras.ops.where(known, self.smallest, self._kept)
        self.smallest.assign(keras.ops.minimum(before, keras.ops.min(x)))
        return x


@pytest.mark.parametrize("first", [float("inf"), float("nan"), 3e38, 1e9])
def test_a_weight_that_begins_far_from_where_it_goes(first):
    """A difference to it would say nothing."""

    def make():
        return logistic(hidden=[Smallest(first, 1e9)])

    dataset = batches(32, 8)
    theirs = make()
    theirs.fit(dataset, verbose=0, shuffle=False)
    ours = make()
    loop, _ = local_loop(ours, dataset.repeat())
    loop.run(4)
    np.testing.assert_array_equal(
        ours.layers[0].smallest, theirs.layers[0].smallest
    )
    assert np.isfinite(ours.layers[0].smallest)


@pytest.mark.parametrize("first", [float("inf"), float("nan")])
def test_a_weight_that_workers_cannot_change_from_where_it_begins(first):
    model, spec = (
        logistic(hidden=[Smallest(first, 1e9)]),
        batches().element_spec,
    )
    step = tf.Variable(0, dtype=tf.int64)
    with pytest.raises(ValueError, match="initial value is not finite"):
        ModelStep(model, spec, global_step=step, remote=True)


def test_logs_are_those_of_the_steps_just_run():
    dataset = batches(32, 8).repeat()
    loop, _ = local_loop(logistic(keras.optimizers.SGD(0.0)), dataset, 2)
    one_pass = loop.run(4)
    assert loop.run(4) == pytest.approx(one_pass, rel=1e-6)
    assert loop.run(0) == {}


def test_reads_every_batch_once_in_order():
    seen = []

    def remember(x):
        seen.append(int(x))
        return np.float32(x)

    dataset = tf.data.Dataset.range(20).map(
        lambda i: (
            tf.ensure_shape(
                tf.ones([2, 4]) * tf.numpy_function(remember, [i], tf.float32),
                [2, 4],
            ),
            tf.ones([2, 1]),
        )
    )
    loop, _ = local_loop(logistic(), dataset)
    loop.run(20)
    assert seen == list(range(20))


def test_a_new_worker_begins_with_single_steps(monkeypatch):
    """Their function is compiled there in a tenth of the time."""
    loop, ran = CoordinatedLoop.__new__(CoordinatedLoop), []
    loop._bound, loop._is_counted = None, False
    loop._workers = SimpleNamespace(coordinator=None, num_workers=1)
    loop._begin()
    loop._generations = SimpleNamespace(current=3)

    def traced(size):
        def run(iterator, first_step, generation):
            ran.append((size, int(first_step), int(generation)))
            return tf.constant([1.0, 2.0]) * size

        return run

    loop._traced = {size: traced(size) for size in (1, 4)}
    monkeypatch.setattr(private, "current_worker", lambda: 0)
    for first_step in (8, 12):
        begun = _Dispatch(first_step, size=4, generation=3)
        loop._run_on_worker(begun, None)
        assert begun.packed.tolist() == [4.0, 8.0]
    assert ran == [*((1, 8 + i, 3) for i in range(4)), (4, 12, 3)]
    late = _Dispatch(16, size=4, generation=2)
    loop._run_on_worker(late, None)
    assert not late.done
    assert len(ran) == 5


def test_a_pass_that_is_shorter_than_it_was_leaves_steps_uncertain(monkeypatch):
    """Only `global_step` knows how many steps of a dispatch were applied."""
    loop = CoordinatedLoop.__new__(CoordinatedLoop)
    loop._bound, loop._is_counted = None, True
    loop._workers = SimpleNamespace(coordinator=None, num_workers=1)
    loop._begin()
    loop._generations = SimpleNamespace(current=0)
    left = [3, 2]  # Batches, as known to the chief.

    def traced(iterator, first_step, generation):
        if not left:
            raise tf.errors.OutOfRangeError(None, None, "end")
        return tf.constant([1.0, 2.0, left.pop(0)])

    loop._traced = {1: traced, 4: traced}
    monkeypatch.setattr(private, "current_worker", lambda: 0)
    begun = _Dispatch(0, size=4, generation=0)
    loop._run_on_worker(begun, None)  # As single steps.
    assert (begun.done, begun.packed.tolist()) == (2, [2.0, 4.0])
    assert not begun.is_lost
    assert loop._all_exhausted()
    loop._states[0].remaining = 4
    begun = _Dispatch(2, size=4, generation=0)
    loop._states[0].is_exhausted = False
    loop._run_on_worker(begun, None)
    assert (begun.done, begun.is_lost) == (0, True)


def test_a_worker_that_left_is_new_when_it_comes_back(monkeypatch, caplog):
    loop = CoordinatedLoop.__new__(CoordinatedLoop)
    loop._bound, loop._iterator = StalenessBound(12), None
    loop._largest, loop._traced, loop._is_dealt = 16, {}, False
    loop._asked, loop._read_ahead = False, 1
    loop._workers = SimpleNamespace(
        coordinator=None, num_workers=3, resize=lambda cluster: None
    )
    loop._begin()
    free = contextlib.nullcontext(True)
    monkeypatch.setattr(private_workers, "locked_workers", lambda _: free)
    for state in loop._states:
        state.warm.add(1)
    loop._states[2].is_exhausted = True
    assert loop.resize(SimpleNamespace(num_workers=2))
    assert [state.warm for state in loop._states] == [{1}, {1}]
    loop._workers.num_workers = 2
    assert loop.resize(SimpleNamespace(num_workers=3))
    assert loop._states[2] == _WorkerState()
    loop._workers.num_workers = 3
    assert loop.resize(SimpleNamespace(num_workers=2))
    # A dispatch ends while the other worker's one ends and another begins.
    assert loop._full == 6
    assert not caplog.records
    loop._bound = StalenessBound(1)
    assert loop.resize(SimpleNamespace(num_workers=2))
    assert "Nothing is read ahead" in caplog.text

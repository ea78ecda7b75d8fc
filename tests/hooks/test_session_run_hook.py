import importlib
import inspect
import itertools
import time
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tfdist
from tfdist.hooks.session_run_hook import (
    SecondOrStepTimer,
    SessionRunHook,
    begin_all,
    wants_every_step,
)

TF1Hook = tf.compat.v1.train.SessionRunHook
STEPS = st.lists(st.integers(0, 7), min_size=1, max_size=30)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_hook_is_one_of_tf1s():
    theirs = tf.compat.v1.train.SessionRunHook
    assert issubclass(SessionRunHook, theirs)
    own = {name for name, _ in inspect.getmembers(SessionRunHook)}
    assert own - set(dir(theirs)) == {
        "on_preemption",
        "sets_variables",
        "single_steps",
        "steps_until_next",
        "wants_none_under_way",
    }


# --- SecondOrStepTimer -------------------------------------------------------


@given(increments=STEPS, every=st.integers(1, 10))
def test_step_timer_triggers_as_tf1(increments, every):
    ours = SecondOrStepTimer(every_steps=every)
    theirs = tf.compat.v1.train.SecondOrStepTimer(every_steps=every)
    for step in itertools.accumulate(increments):
        due = theirs.should_trigger_for_step(step)
        assert ours.should_trigger_for_step(step) == due
        if due:
            _, steps = ours.update_last_triggered_step(step)
            assert steps == theirs.update_last_triggered_step(step)[1]


@given(
    passed=st.lists(st.floats(0, 5), min_size=1, max_size=20),
    every=st.floats(0.5, 6),
)
def test_second_timer_triggers_as_tf1(passed, every):
    clock = Clock()
    ours = SecondOrStepTimer(every_secs=every)
    theirs = tf.compat.v1.train.SecondOrStepTimer(every_secs=every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", clock)  # Theirs.
        patch.setattr("time.monotonic", clock)
        for step, secs in enumerate(passed):
            clock.now += secs
            due = theirs.should_trigger_for_step(step)
            assert ours.should_trigger_for_step(step) == due
            if due:
                assert ours.update_last_triggered_step(
                    step
                ) == theirs.update_last_triggered_step(step)


@given(every=st.integers(1, 10), total=st.integers(1, 60))
def test_steps_until_next_hits_every_trigger(every, total):
    timer = SecondOrStepTimer(every_steps=every)
    step, triggered = 0, []
    while step < total:
        step += timer.steps_until_next(step)
        assert timer.should_trigger_for_step(step)
        timer.update_last_triggered_step(step)
        triggered.append(step)
    assert triggered == list(range(1, step + 1, every))


def test_seconds_leave_the_number_of_steps_open():
    timer = SecondOrStepTimer(every_secs=1)
    assert timer.steps_until_next(0) == 1
    timer.update_last_triggered_step(1)
    assert timer.steps_until_next(1) is None


@given(
    every=st.integers(1, 10), first=st.integers(0, 50), back=st.integers(0, 50)
)
def test_goes_back_to_the_triggers_of_an_undisturbed_run(every, first, back):
    timer = SecondOrStepTimer(every_steps=every)
    undisturbed = range(first, first + 200, every)
    last = undisturbed[7]
    timer.update_last_triggered_step(last)
    timer.go_back_to(last - back)
    triggers = [s for s in undisturbed if s > last - back]
    if last - back >= first:
        until = timer.steps_until_next(last - back)
        assert last - back + until == triggers[0]


def test_seconds_start_anew_after_going_back():
    timer = SecondOrStepTimer(every_secs=1000)
    timer.go_back_to(3)
    assert timer.last_triggered_step() is None
    timer.update_last_triggered_step(10)
    timer.go_back_to(20)
    assert timer.last_triggered_step() == 10
    timer.go_back_to(4)
    assert timer.last_triggered_step() == 4
    assert not timer.should_trigger_for_step(5)


@pytest.mark.parametrize("by", [-3600, 3600])
def test_a_clock_that_is_set_changes_no_seconds(monkeypatch, by):
    timer, real = SecondOrStepTimer(every_secs=0.2), time.time
    timer.update_last_triggered_step(0)
    monkeypatch.setattr("time.time", lambda: real() + by)
    assert not timer.should_trigger_for_step(1)
    time.sleep(0.2)
    assert timer.should_trigger_for_step(1)
    secs, steps = timer.update_last_triggered_step(1)
    assert 0.2 <= secs < 60
    assert steps == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "Exactly one of `every_secs` and `every_steps`"),
        (
            {"every_secs": 1, "every_steps": 2},
            "Received: every_secs=1, every_steps=2",
        ),
        ({"every_steps": 0}, "must be positive"),
        ({"every_secs": -1}, "must be positive"),
        ({"every_steps": 1e3}, "`every_steps` must be an integer"),
        ({"every_secs": "5"}, "`every_secs` must be a number"),
    ],
)
def test_bad_timer(kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SecondOrStepTimer(**kwargs)


@pytest.mark.parametrize("wrong", [keras.callbacks.History(), TF1Hook, 1])
def test_what_is_no_hook(wrong):
    with pytest.raises(TypeError, match="Hooks must be tfdist"):
        begin_all([wrong])


# --- Which hooks are called after every step ---------------------------------


def every_hook_of_tfdist():
    for path in Path(tfdist.__file__).parent.glob("*/*.py"):
        if path.parent.name not in ("hooks", "estimator"):
            continue
        module = importlib.import_module(
            f"tfdist.{path.parent.name}.{path.stem}"
        )
        for kind in vars(module).values():
            if inspect.isclass(kind) and issubclass(kind, SessionRunHook):
                yield kind


def test_all_hooks_of_tfdist_say_how_many_steps_may_pass():
    kinds = set(every_hook_of_tfdist())
    assert len(kinds) > 12
    assert not [k for k in kinds if wants_every_step(k.__new__(k))]


@pytest.mark.parametrize("base", [TF1Hook, SessionRunHook])
@pytest.mark.parametrize("method", ["before_run", "after_run"])
def test_who_acts_at_steps_and_says_nothing(base, method):
    hook = base()
    assert not wants_every_step(hook)
    setattr(hook, method, lambda *args: None)
    assert wants_every_step(hook)
    hook.steps_until_next = lambda step: None
    assert not wants_every_step(hook)
    one = type("One", (base,), {method: lambda *args: None})
    assert wants_every_step(one())
    seldom = type("Seldom", (one,), {"steps_until_next": lambda *args: 9})
    assert not wants_every_step(seldom())

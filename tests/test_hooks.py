import io
import itertools
from types import SimpleNamespace

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist import hooks

STEPS = st.lists(st.integers(0, 7), min_size=1, max_size=30)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def session(step, max_steps=None, secs=0.0, stop=False):
    """What a hook sees of a session."""
    return SimpleNamespace(
        step=step,
        max_steps=max_steps,
        secs_in_steps=secs,
        restored=False,
        should_stop=lambda: stop or step == max_steps,
    )


# --- SecondOrStepTimer -------------------------------------------------------


@given(increments=STEPS, every=st.integers(1, 10))
def test_step_timer_triggers_as_tf1(increments, every):
    ours = hooks.SecondOrStepTimer(every_steps=every)
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
    ours = hooks.SecondOrStepTimer(every_secs=every, clock=clock)
    theirs = tf.compat.v1.train.SecondOrStepTimer(every_secs=every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", clock)
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
    timer = hooks.SecondOrStepTimer(every_steps=every)
    timer.update_last_triggered_step(0)
    step, triggered = 0, []
    while step < total:
        step += timer.steps_until_next(step)
        assert timer.should_trigger_for_step(step)
        timer.update_last_triggered_step(step)
        triggered.append(step)
    assert triggered == list(range(every, step + 1, every))


def test_seconds_leave_the_number_of_steps_open():
    timer = hooks.SecondOrStepTimer(every_secs=1)
    timer.update_last_triggered_step(0)
    assert timer.steps_until_next(0) is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"every_secs": 1, "every_steps": 1},
        {"every_steps": 0},
        {"every_secs": -1},
    ],
)
def test_bad_timer(kwargs):
    with pytest.raises(ValueError, match="Received: every_secs="):
        hooks.SecondOrStepTimer(**kwargs)


# --- Progress ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ((5, None, 2.0, {}), "step 5, 2.00 steps/s"),
        (
            (5, 10, 2.0, {"auc": 0.25}),
            "step  5 of 10 ( 50 %), 2.00 steps/s, auc 0.2500, 0:02 left",
        ),
        (
            (100, 100_000, 400.0, {}),
            "step    100 of 100000 (  0 %),  400 steps/s, 4:10 left",
        ),
        ((10, 10, 3.0, {}, False), "step 10 of 10 (100 %), 3.00 steps/s"),
    ],
)
def test_progress_line(args, line):
    assert hooks.progress_line(*args) == line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream):
    hook = hooks.ProgressHook(10, stream)
    hook.after_create_session(session(0, 30))
    for step in (5, 10, 20, 30):
        hook.after_run(session(step, 30, secs=step / 5), {"loss": 0.5})
    return stream.getvalue()


def test_progress_in_a_log():
    assert shown(io.StringIO()).splitlines() == [
        "step 10 of 30 ( 33 %), 5.00 steps/s, loss 0.5000",
        "step 20 of 30 ( 66 %), 5.00 steps/s, loss 0.5000, 0:02 left",
        "step 30 of 30 (100 %), 5.00 steps/s, loss 0.5000",
    ]


def test_progress_in_a_terminal_is_one_line():
    text = shown(Terminal())
    assert text.count("\n") == 1
    assert text.endswith("loss 0.5000\n")
    assert text.count("\x1b[K") == 3


def test_progress_says_the_last_step_of_a_finite_input():
    stream = io.StringIO()
    hook = hooks.ProgressHook(10, stream)
    hook.after_create_session(session(0))
    hook.after_run(session(3, secs=1.0, stop=True), {})
    assert stream.getvalue() == "step 3, 3.00 steps/s\n"


# --- Checkpoints and summaries -----------------------------------------------


class Listener(hooks.CheckpointSaverListener):
    def __init__(self):
        self.paths = []

    def after_save(self, session, path):
        self.paths.append(path)


class Saves:
    """Stands where `Checkpoints` would be; only the steps matter here."""

    def __init__(self):
        self.steps = []

    def save(self, step):
        self.steps.append(step)
        return f"model.ckpt-{step}"


def run_saver(every, last, restored_at=None):
    saves, listener = Saves(), Listener()
    hook = hooks.CheckpointSaverHook(
        saves, hooks.SecondOrStepTimer(every_steps=every), [listener]
    )
    start = session(restored_at or 0, last)
    start.restored = restored_at is not None
    hook.after_create_session(start)
    step = start.step
    while step < last:
        step = min(step + hook.steps_until_next(step), last)
        hook.after_run(session(step, last), {})
    hook.end(session(step, last))
    return saves.steps, listener.paths


def test_saves_as_tf1_recorded():
    # contract/tf1.md: save_steps=3, stop at 7.
    steps, paths = run_saver(3, 7)
    assert steps == [0, 3, 6, 7]
    assert paths == [f"model.ckpt-{step}" for step in (3, 6, 7)]


def test_saves_no_step_twice():
    assert run_saver(3, 6)[0] == [0, 3, 6]
    assert run_saver(3, 6, restored_at=3)[0] == [6]
    assert run_saver(3, 6, restored_at=6)[0] == []


def test_summaries(tmp_path):
    hook = hooks.SummarySaverHook(str(tmp_path), 10)
    hook.after_create_session(session(0, 25))
    for step in (10, 20, 25):
        hook.after_run(session(step, 25), {"loss": step / 100})
    hook.end(session(25, 25))
    assert scalars(tmp_path)["loss"] == pytest.approx(
        {10: 0.1, 20: 0.2, 25: 0.25}
    )
    assert set(scalars(tmp_path)["global_step/sec"]) == {10, 20, 25}


def scalars(directory):
    """Tag -> {step: value} of the event files in a directory."""
    values = {}
    for path in directory.glob("events.*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                tag = values.setdefault(value.tag, {})
                tag[event.step] = float(tf.make_ndarray(value.tensor))
    return values

import itertools
import logging
import threading

import pytest
import tensorflow as tf
from both_sessions import Scripted, checkpoint_steps
from counting import count, counting_session

from tfdist.checkpoint import checkpoints
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.hooks.basic import SessionRunHook, StopAtStepHook
from tfdist.hooks.saving_hooks import (
    AutomaticSecs,
    CheckpointSaverHook,
    CheckpointSaverListener,
)
from tfdist.session import recoverable
from tfdist.training.finite import NonFiniteVariablesError


class Listener(CheckpointSaverListener):
    """Records its calls; requests a stop after step `stop_at`."""

    def __init__(self, log, directory=None, stop_at=None):
        self.log, self.directory, self.stop_at = log, directory, stop_at

    def begin(self):
        self.log.append("begin")

    def before_save(self, session, global_step_value):
        self.log.append(("before", global_step_value))

    def after_save(self, session, global_step_value):
        assert session.step == global_step_value
        path = self.directory and tf.train.latest_checkpoint(self.directory)
        self.log.append(("after", path or global_step_value))
        return global_step_value == self.stop_at

    def end(self, session, global_step_value):
        self.log.append(("end", global_step_value))


def save(directory, last_step, every=3, **kwargs):
    return count(
        [CheckpointSaverHook(directory, save_steps=every)],
        last_step,
        checkpoint_dir=directory,
        **kwargs,
    )


def test_saves_as_tf1_recorded_whatever_the_runs(tmp_path):
    # contract/session.json: save_steps=3, stop at 7.
    assert save(str(tmp_path), 7) == [3, 6, 7]
    assert checkpoint_steps(tmp_path) == [0, 3, 6, 7]


def test_saves_no_step_twice(tmp_path, caplog):
    directory = str(tmp_path)
    caplog.set_level(logging.INFO, "tfdist.checkpoint.checkpoints")
    for last_step in (6, 6, 9, 10):
        save(directory, last_step)
    saved = [
        int(record.message.rstrip(".").split("-")[-1])
        for record in caplog.records
        if record.name == "tfdist.checkpoint.checkpoints"
    ]
    assert saved == [0, 3, 6, 9, 10]


def test_a_job_that_goes_on_saves_at_multiples(tmp_path):
    for last_step in (4, 10):
        save(str(tmp_path), last_step)
    assert checkpoint_steps(tmp_path)[-4:] == [4, 6, 9, 10]


def test_an_evaluator_task_sees_the_last_step_as_it_stays(tmp_path, caplog):
    class Sets(SessionRunHook):
        sets_variables = True

        def end(self, session):
            session.unsaved = True

    saver = CheckpointSaverHook(str(tmp_path), save_steps=3)
    with caplog.at_level(logging.INFO, "tfdist.checkpoint.checkpoints"):
        count([StopAtStepHook(last_step=6), saver, Sets()], 9)
    assert caplog.text.count("model.ckpt-6") == 1


def test_each_saver_saves_what_was_set_at_the_end(tmp_path):
    class Sets(SessionRunHook):
        sets_variables = True

        def end(self, session):
            session.variables["w"].assign(7.0)
            session.unsaved = True

    directories = [str(tmp_path / name) for name in ("job", "copies")]
    savers = [CheckpointSaverHook(d, save_steps=3) for d in directories]
    with counting_session([*savers, Sets()]) as session:
        while session.step < 3:
            session.run()
    for directory in directories:
        path = checkpoints.latest(directory)
        assert checkpoints.step_of(path) == 3
        assert checkpoints.load_variable(path, "w") == 7.0


def test_saves_what_was_restored_from_elsewhere(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    save(str(first), 4)
    hook = CheckpointSaverHook(str(second), save_steps=100)
    count([hook], 5, checkpoint_dir=str(first))
    assert checkpoint_steps(second) == [4, 5]
    assert hook.last_path == str(second / "model.ckpt-5")


def test_takes_the_place_of_the_sessions_own(tmp_path, caplog):
    """Two savers would each delete checkpoints that the other one lists."""
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2)
    options = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 3}
    count([hook], 7, **options)
    listed = tf.train.get_checkpoint_state(tmp_path).all_model_checkpoint_paths
    assert [int(path.rpartition("-")[2]) for path in listed] == [0, 2, 4, 6, 7]
    assert checkpoint_steps(tmp_path) == [0, 2, 4, 6, 7]
    assert caplog.text.count("save_checkpoint_steps are not used") == 1


def test_saves_each_second(tmp_path, monkeypatch):
    seconds = itertools.count(1000, 0.5)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    hook = CheckpointSaverHook(str(tmp_path), save_secs=1, max_to_keep=None)
    every_step = SessionRunHook()
    every_step.steps_until_next = lambda step: 1
    count([hook, every_step], 6)
    steps = checkpoint_steps(tmp_path)
    assert steps[0] == 0
    assert steps[-1] == 6
    assert len(steps) > 2


@pytest.mark.parametrize(("max_to_keep", "kept"), [(1, 1), (0, 6), (None, 6)])
def test_keeps(tmp_path, max_to_keep, kept):
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=1, max_to_keep=max_to_keep
    )
    count([hook], 5)
    assert len(checkpoint_steps(tmp_path)) == kept


@pytest.mark.parametrize(("given", "kept"), [({}, 5), ({"max_to_keep": 2}, 2)])
def test_keeps_what_the_session_says_unless_told(tmp_path, given, kept):
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1)
    directory = str(tmp_path) if given else None
    count([hook], 7, checkpoint_dir=directory, **given)
    assert len(checkpoint_steps(tmp_path)) == kept


def test_listeners(tmp_path):
    log, directory = [], str(tmp_path)
    hook = CheckpointSaverHook(
        directory, save_steps=4, listeners=[Listener(log, directory)]
    )
    count([hook], 6)
    assert log == [
        "begin",
        ("before", 0),
        ("after", f"{directory}/model.ckpt-0"),
        ("before", 4),
        ("after", f"{directory}/model.ckpt-4"),
        ("before", 6),
        ("after", f"{directory}/model.ckpt-6"),
        ("end", 6),
    ]


@pytest.mark.parametrize(
    ("stop_at", "last_step"), [(0, 6), (4, 4), (6, 6), (None, 6)]
)
def test_a_listener_stops_training(tmp_path, stop_at, last_step):
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=2, listeners=[Listener([], stop_at=stop_at)]
    )
    assert count([hook], 6)[-1] == last_step


def test_a_recovery_goes_on_with_the_cadence(tmp_path):
    log = []
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=3, listeners=[Listener(log)]
    )
    count([hook], 10, checkpoint_dir=str(tmp_path), fail_at=[8])
    assert [entry[1] for entry in log if entry[0] == "after"] == [
        0,
        3,
        6,
        9,
        10,
    ]
    assert log.count("begin") == 1


def test_preemption_saves_without_listeners(tmp_path):
    log = []
    hook = CheckpointSaverHook(
        str(tmp_path), save_steps=4, listeners=[Listener(log)]
    )
    every_step = SessionRunHook()
    every_step.steps_until_next = lambda step: 1
    with counting_session([hook, every_step]) as session:
        hook.on_preemption(session)  # Step 0 is saved already.
        session.run()
        before = list(log)
        hook.on_preemption(session)
        assert checkpoint_steps(tmp_path) == [0, 1]
        assert log == before


# --- Written while steps continue ---------------------------------------------


class Writing(SessionRunHook):
    """Checkpoints are complete only after the run that reaches a step.

    The checkpoints of step 0 and of the last step complete at once.
    """

    def __init__(self, monkeypatch, until, last_step):
        self._until, self._complete = until, threading.Event()
        write = Checkpoints._write

        def late(saved, step):
            if step not in (0, last_step):
                assert self._complete.wait(30)
            return write(saved, step)

        monkeypatch.setattr(Checkpoints, "_write", late)

    def steps_until_next(self, step):
        return 1

    def after_run(self, run_context, run_values):
        if run_context.session.step >= self._until:
            self._complete.set()


class ToldLater(CheckpointSaverListener):
    told_later = True

    def __init__(self, log, directory):
        self.log, self.directory = log, directory

    def before_save(self, session, global_step_value):
        self.log.append(("before", global_step_value))

    def after_save(self, session, global_step_value):
        latest = tf.train.latest_checkpoint(self.directory)
        assert latest.endswith(f"-{global_step_value}")
        self.log.append(("after", global_step_value, session.step))


def test_listeners_are_told_when_it_is_complete(tmp_path, monkeypatch):
    directory, log = str(tmp_path), []
    listener = ToldLater(log, directory)
    hook = CheckpointSaverHook(directory, save_steps=4, listeners=[listener])
    writing = Writing(monkeypatch, 6, last_step=7)
    steps = count([writing, hook], 7)
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    (first,) = (entry for entry in log if entry[:2] == ("after", 4))
    assert first[2] in (6, 7)
    assert [entry[:2] for entry in log] == [
        ("before", 0),
        ("after", 0),
        ("before", 4),
        ("after", 4),
        ("before", 7),
        ("after", 7),
    ]
    assert hook.last_path == f"{directory}/model.ckpt-7"


def test_one_listener_that_wants_the_step_is_enough(tmp_path):
    directory, log = str(tmp_path), []
    both = [ToldLater(log, directory), Listener([], directory)]
    hook = CheckpointSaverHook(directory, save_steps=2, listeners=both)
    count([hook], 5)
    told = [entry[1:] for entry in log if entry[0] == "after"]
    assert told == [(0, 0), (2, 2), (4, 4), (5, 5)]


def test_by_steps_the_next_one_waits(tmp_path, monkeypatch):
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2)
    threading.Timer(0.5, lambda: writing._complete.set()).start()
    writing = Writing(monkeypatch, 100, last_step=7)
    count([hook, writing], 7)
    assert checkpoint_steps(tmp_path) == [0, 2, 4, 6, 7]


def test_by_seconds_the_next_one_follows(tmp_path, monkeypatch):
    seconds = itertools.count(1000, 0.5)  # Each step should be saved.
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    hook = CheckpointSaverHook(str(tmp_path), save_secs=0.1, max_to_keep=None)
    count([hook, Writing(monkeypatch, 5, last_step=8)], 8)
    steps = checkpoint_steps(tmp_path)
    assert steps[:2] == [0, 1]
    assert not {2, 3, 4, 5} & {*steps}
    assert steps[-1] == 8


def test_it_is_waited_for_before_a_recovery(tmp_path, monkeypatch):
    hook = CheckpointSaverHook(str(tmp_path), save_steps=3)
    threading.Timer(0.5, lambda: writing._complete.set()).start()
    writing = Writing(monkeypatch, 100, last_step=5)
    steps = count([hook, writing], 5, checkpoint_dir=str(tmp_path), fail_at=[4])
    assert steps == [1, 2, 3, 4, 5]
    assert checkpoint_steps(tmp_path) == [0, 3, 5]


def test_it_is_waited_for_after_sigterm(tmp_path, monkeypatch):
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1)
    writing = Writing(monkeypatch, 100, last_step=2)
    with counting_session([hook, writing]) as session:
        session.run()
        assert checkpoint_steps(tmp_path) == [0]
        threading.Timer(0.2, writing._complete.set).start()
        hook.on_preemption(session)
        assert checkpoint_steps(tmp_path) == [0, 1]


def test_storage_that_never_answers(tmp_path, monkeypatch, caplog):
    """After a failure the process restarts, as a thread cannot be killed."""

    def restart(reason):
        raise SystemExit(reason)

    monkeypatch.setenv("TFDIST_FAILURES", "0 0 ")
    monkeypatch.setattr(recoverable, "restart_process", restart)
    monkeypatch.setattr(recoverable, "_WRITE_SECS", 0.1)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=1)
    writing = Writing(monkeypatch, 100, last_step=99)
    session = counting_session([hook, writing])
    session.run()
    session._cluster = "some cluster"
    with pytest.raises(SystemExit, match="gone"):
        session._drop(tf.errors.UnavailableError(None, None, "gone"))
    writing._complete.set()
    session._release()
    assert caplog.text.count("too long and is abandoned") == 1


def test_its_error_ends_training(tmp_path, monkeypatch):
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2)
    writing = Writing(monkeypatch, 3, last_step=99)

    class Breaks(SessionRunHook):
        def after_run(self, run_context, run_values):
            session = run_context.session
            if session.step == 1:
                session.variables["w"].assign(float("nan"))
            steps.append(session.step)

    steps = []
    with pytest.raises(NonFiniteVariablesError, match="At step 2 1 of 2"):
        count([Breaks(), hook, writing], 99)
    assert steps[-1] >= 3
    assert checkpoint_steps(tmp_path) == [0]


@pytest.mark.parametrize("end", ["close", "preemption"])
def test_what_could_not_be_written_is_saved_at_the_end(
    tmp_path, monkeypatch, caplog, end
):
    write, noticed = Checkpoints._write, threading.Event()

    def fails(saved, step):
        if step == 2 and not noticed.is_set():
            assert noticed.wait(30)
            raise tf.errors.UnavailableError(None, None, "no storage")
        return write(saved, step)

    monkeypatch.setattr(Checkpoints, "_write", fails)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2)
    with counting_session([hook]) as session:
        session.run()
        assert session.step == 2
        threading.Timer(0.2, noticed.set).start()
        if end == "preemption":
            hook.on_preemption(session)
            assert checkpoint_steps(tmp_path) == [0, 2]
    assert checkpoint_steps(tmp_path) == [0, 2]
    assert caplog.text.count("Failed to save step 2: no storage") == 1


def test_what_can_never_be_written_is_raised(tmp_path, monkeypatch):
    """It is raised the third time, at whichever step it is noticed."""
    write, tried = Checkpoints._write, []

    def fails(saved, step):
        if step == 0:
            return write(saved, step)
        tried.append(step)
        raise tf.errors.UnavailableError(None, None, "no storage")

    monkeypatch.setattr(Checkpoints, "_write", fails)
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2)
    with pytest.raises(tf.errors.UnavailableError, match="no storage"):
        count([hook], 9, checkpoint_dir=str(tmp_path))
    assert tried == [2, 2, 2]


def test_what_costs_more_is_done_less_often(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_COST_BEHIND", 1e9)
    seconds = itertools.count(1000, 0.5)
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    every_step = SessionRunHook()
    every_step.steps_until_next = lambda step: 1
    for save_secs in (1.0, AutomaticSecs(1.0)):
        directory = tmp_path / type(save_secs).__name__
        hook = CheckpointSaverHook(str(directory), save_secs=save_secs)
        count([hook, every_step], 9)
    assert len(checkpoint_steps(tmp_path / "float")) > 2
    steps = checkpoint_steps(directory)
    assert len(steps) == 3  # What the first one costs does not count.
    assert (steps[0], steps[-1]) == (0, 9)


def test_an_error_leaves_the_last_checkpoint(tmp_path):
    hook = CheckpointSaverHook(str(tmp_path), save_steps=2)
    broken = Scripted("h", [], {("after_run", 3): ValueError("broken")})
    with pytest.raises(ValueError, match="broken"):
        count([broken, hook], 10)
    assert checkpoint_steps(tmp_path) == [0, 2]


@pytest.mark.parametrize(
    "kwargs", [{}, {"save_secs": 1, "save_steps": 1}, {"save_steps": 0}]
)
def test_bad_cadence(kwargs):
    with pytest.raises(ValueError, match="Received: save_secs="):
        CheckpointSaverHook("unused", **kwargs)

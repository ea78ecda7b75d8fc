import itertools
import logging

import pytest
import tensorflow as tf
from both_sessions import Scripted, checkpoint_steps
from counting import count, counting_session

from tfdist.hooks.basic import SessionRunHook
from tfdist.hooks.saving_hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
)


class Listener(CheckpointSaverListener):
    """Writes down what it is told; asks to stop after step `stop_at`."""

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
    caplog.set_level(logging.INFO, "tfdist.hooks.saving_hooks")
    for last_step in (6, 6, 9, 10):
        save(directory, last_step)
    saved = [
        int(record.message.rstrip(".").split("-")[-1])
        for record in caplog.records
        if record.name == "tfdist.hooks.saving_hooks"
    ]
    assert saved == [0, 3, 6, 9, 10]


def test_saves_what_was_restored_from_elsewhere(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    save(str(first), 4)
    hook = CheckpointSaverHook(str(second), save_steps=100)
    count([hook], 5, checkpoint_dir=str(first))
    assert checkpoint_steps(second) == [4, 5]
    assert hook.last_path == str(second / "model.ckpt-5")


def test_saves_each_second(tmp_path, monkeypatch):
    seconds = itertools.count(1000, 0.5)
    monkeypatch.setattr("time.time", lambda: next(seconds))
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

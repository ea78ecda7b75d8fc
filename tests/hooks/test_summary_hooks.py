import itertools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from both_sessions import Scripted, summaries
from counting import count, counting_session

import tfdist
from tfdist.hooks.basic import SessionRunHook, StopAtStepHook
from tfdist.hooks.events import read_scalars
from tfdist.hooks.summary_hooks import (
    ProfilerHook,
    StalenessHook,
    StepCounterHook,
    SummarySaverHook,
)
from tfdist.session.monitored_session import MonitoredTrainingSession, Trainable

# --- SummarySaverHook --------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "steps"),
    [({}, [1, 8, 15]), ({"at_first_step": False}, [7, 14])],
)
def test_summaries(tmp_path, kwargs, steps):
    hook = SummarySaverHook(7, output_dir=str(tmp_path), **kwargs)
    runs = count([hook], 20)
    assert summaries(tmp_path) == {"start": [1], "loss": steps}
    assert runs == [*steps, 20]
    assert read_scalars(str(tmp_path))[steps[-1]]["loss"] == pytest.approx(
        1 / steps[-1]
    )


def test_multiples_stay_so_when_a_job_goes_on_between_two(tmp_path):
    hook = SummarySaverHook(4, output_dir=str(tmp_path), at_first_step=False)
    assert count([hook], 14, start=6) == [8, 12, 14]


def test_summaries_of_redone_steps(tmp_path):
    hook = SummarySaverHook(4, output_dir=str(tmp_path / "summaries"))
    count(
        [hook],
        14,
        fail_at=[12],
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=6,
    )
    assert summaries(tmp_path / "summaries") == {
        "start": [1, 7],
        "loss": [1, 5, 9, 9, 13],
    }
    assert len(list((tmp_path / "summaries").iterdir())) == 1


def test_a_hook_may_serve_a_second_session(tmp_path):
    hook = SummarySaverHook(10, output_dir=str(tmp_path))
    for start in (0, 4):
        count([hook], start + 3, start=start)
    assert summaries(tmp_path) == {"start": [1, 5], "loss": [1, 5]}


def test_summaries_each_second(tmp_path):
    hook = SummarySaverHook(save_secs=1000, output_dir=str(tmp_path))
    count([hook], 5)
    assert summaries(tmp_path)["loss"] == [1]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"save_steps": 1}, "`output_dir` must be"),
        ({"output_dir": "d"}, "`save_secs` and `save_steps`"),
    ],
)
def test_bad_summaries(kwargs, message):
    with pytest.raises(ValueError, match=message):
        SummarySaverHook(**kwargs)


# --- StepCounterHook ---------------------------------------------------------


class Clock:
    """A clock that advances two seconds with each reading."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        self.now += 2.0
        return self.now


def test_steps_per_second(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tfdist.hooks.summary_hooks")
    count([StepCounterHook(5, output_dir=str(tmp_path))], 12)
    steps = [6, 11]
    assert summaries(tmp_path) == {
        "global_step/sec": steps,
        "input_wait": steps,
    }
    rates = [r["global_step/sec"] for r in read_scalars(str(tmp_path)).values()]
    lines = [r.message.split("global_step/sec: ") for r in caplog.records]
    assert [begin for begin, _ in lines] == ["", ""]
    # An event file holds a float32.
    assert [float(rate) for _, rate in lines] == pytest.approx(rates, rel=1e-5)


def test_the_rate_is_that_of_the_clock(tmp_path, monkeypatch):
    hook = StepCounterHook(5, output_dir=str(tmp_path), at_first_step=False)
    monkeypatch.setattr("time.monotonic", Clock())
    count([hook], 10)
    rates = [r["global_step/sec"] for r in read_scalars(str(tmp_path)).values()]
    assert len(rates) == 2
    assert all(0.1 < rate <= 2.5 for rate in rates)


def test_a_clock_that_is_set_does_not_spoil_the_rate(tmp_path, monkeypatch):
    back = itertools.count(2e9, -3600)
    monkeypatch.setattr("time.time", lambda: next(back))
    count([StepCounterHook(2, output_dir=str(tmp_path))], 9)
    rates = [r["global_step/sec"] for r in read_scalars(str(tmp_path)).values()]
    assert len(rates) == 4
    assert all(0 < rate < 1e6 for rate in rates)


def test_a_recovery_does_not_spoil_the_rate(tmp_path):
    hook = StepCounterHook(4, output_dir=str(tmp_path / "summaries"))
    count(
        [hook],
        14,
        fail_at=[12],
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=6,
    )
    steps = [5, 9, 9, 13]
    assert summaries(tmp_path / "summaries") == {
        "global_step/sec": steps,
        "input_wait": steps,
    }
    rates = read_scalars(str(tmp_path / "summaries")).values()
    assert all(rate["global_step/sec"] > 0 for rate in rates)
    assert all(rate["input_wait"] == 0.25 for rate in rates)


def test_logs_without_a_directory(caplog):
    caplog.set_level(logging.INFO, "tfdist.hooks.summary_hooks")
    count([StepCounterHook(every_n_steps=3)], 5)
    assert caplog.text.count("global_step/sec: ") == 1


def test_warns_when_the_step_stands_still(caplog):
    def build():
        return Trainable(lambda: {}, tf.Variable(0, dtype=tf.int64), {})

    with MonitoredTrainingSession(build, hooks=[StepCounterHook(1)]) as session:
        for _ in range(10):
            session.run()
    assert caplog.text.count("did not advance: it is still 0") == 5


# --- StalenessHook -----------------------------------------------------------


class Stale(SessionRunHook):
    """Sets the staleness that the session's loop returns."""

    def __init__(self, counts):
        self.counts = counts

    def after_create_session(self, session, coord):
        session._loop.staleness = lambda: self.counts


def test_staleness(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tfdist.hooks.summary_hooks")
    counts = np.zeros([128], np.int64)
    counts[:4] = [60, 30, 9, 1]
    hook = StalenessHook(str(tmp_path), every_n_steps=10)
    count([Stale(counts), hook], 25)
    figures = {"p50": 0, "p90": 1, "p99": 2, "max": 3}
    expected = {f"staleness/{name}": v for name, v in figures.items()}
    assert read_scalars(str(tmp_path)) == {10: expected, 20: expected}
    assert summaries(tmp_path)["staleness"] == [10, 20]
    assert "staleness of 100 updates" in caplog.text


@pytest.mark.parametrize("counts", [None, np.zeros([128], np.int64)])
def test_no_staleness(tmp_path, counts):
    count([Stale(counts), StalenessHook(str(tmp_path), 2)], 5)
    assert list(tmp_path.iterdir()) == []


# --- DynamicEmbeddingHook ----------------------------------------------------


@pytest.mark.parametrize("own_saver", [False, True])
def test_how_full_growing_tables_are(tmp_path, own_saver):
    """An Estimator writes as often as it saves; each step has two new ids."""

    def model_fn():
        ids = keras.Input([2], dtype="int64")
        rows = tfdist.DynamicEmbedding(2, 8192, num_shards=2, name="table")(ids)
        model = keras.Model(ids, keras.layers.Flatten()(rows))
        model.compile("sgd", "mse")
        return model

    def input_fn():
        ids = np.arange(10).reshape([-1, 2])
        data = tf.data.Dataset.from_tensor_slices((ids, np.zeros([5, 4])))
        return data.batch(1)

    config = tfdist.RunConfig(
        tmp_path,
        save_checkpoints_steps=100 if own_saver else 2,
        cluster=tfdist.Cluster(),
    )
    saver = tfdist.CheckpointSaverHook(str(tmp_path), save_steps=2)
    hooks = [saver] if own_saver else []
    tfdist.Estimator(model_fn, config).train(input_fn, hooks)
    every = read_scalars(str(tmp_path))
    for step in (2, 4, 5):
        assert every[step]["table/num_ids"] == 2 * step
        assert every[step]["table/admitted_ids"] == 2 * step
        for never in ("dropped_gradients", "refused", "not_admitted"):
            assert every[step][f"table/{never}"] == 0
        assert every[step]["table/evicted_ids"] == 0
        fullest = 4096 * every[step]["table/fullest_segment"]
        assert step <= fullest <= 2 * step


# --- ProfilerHook ------------------------------------------------------------


def profiled(directory):
    return sorted(
        int(path.name.split("-")[1]) for path in directory.glob("profile-*")
    )


def test_profiles_single_steps(tmp_path):
    hook = ProfilerHook(save_steps=4, output_dir=str(tmp_path))
    assert count([hook], 10) == [3, 4, 7, 8, 10]
    assert profiled(tmp_path) == [4, 8]
    for step in (4, 8):
        assert list(tmp_path.glob(f"profile-{step}/**/*.xplane.pb"))


def test_profiles_each_step_but_the_first(tmp_path):
    count([ProfilerHook(1, output_dir=str(tmp_path))], 3)
    assert profiled(tmp_path) == [2, 3]


def test_a_failed_run_ends_its_profile(tmp_path):
    directory = tmp_path / "profiles"
    hook = ProfilerHook(save_steps=4, output_dir=str(directory))
    broken = Scripted(
        "h", [], {("before_run", 3): tf.errors.AbortedError(None, None, "a")}
    )
    count(
        [hook, broken],
        9,
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=3,
    )
    assert profiled(directory) == [4, 8]


def test_profiles_each_second(tmp_path):
    hook = ProfilerHook(save_secs=1000, output_dir=str(tmp_path))
    with counting_session([hook, StopAtStepHook(4)]) as session:
        while not session.should_stop():
            session.run()
    assert profiled(tmp_path) == []

import logging
import math

import keras
import pytest
import tensorflow as tf
from both_sessions import Training, ours, tf1
from counting import count, counting_session
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist._tf.private_checkpoints import ShardedVariable
from tfdist.hooks import basic
from tfdist.hooks.session_run_hook import resolve

# --- StopAtStepHook ----------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(
    start=st.integers(0, 20),
    steps=st.integers(1, 12),
    argument=st.sampled_from(["num_steps", "last_step"]),
)
def test_stops_where_tf1_stops(start, steps, argument):
    stop = {argument: steps if argument == "num_steps" else start + steps}
    training = Training(
        lambda library, _: [library.StopAtStepHook(**stop)], start=start
    )
    assert ours(training) == tf1(training)


@pytest.mark.parametrize("last_step", [1, 7, 150, 333])
def test_many_steps_at_once_stop_exactly(last_step):
    steps = count([], last_step)
    assert steps[-1] == last_step
    assert len(steps) < max(2, last_step / 50)


@pytest.mark.parametrize("start", [5, 9])
def test_a_finished_job_runs_no_step(start, caplog):
    assert count([], 5, start=start) == []
    assert f"No step is run: the job is at step {start}" in caplog.text
    assert caplog.text.endswith("stops it at step 5.\n")


def test_a_hook_that_has_counted_its_steps(caplog):
    """As in TF1 it counts once; a notebook cell run again creates another."""
    hook = basic.StopAtStepHook(num_steps=2)
    with counting_session([hook], start=3) as session:
        while not session.should_stop():
            session.run()
    assert session.step == 5
    assert not caplog.records
    with counting_session([hook], start=5) as session:
        assert session.should_stop()
    assert "at step 5. This hook counted `num_steps` from its" in caplog.text


def test_num_steps_survives_a_recovery(tmp_path):
    hook = basic.StopAtStepHook(num_steps=10)
    with counting_session(
        [hook],
        start=3,
        fail_at=[9],
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=4,
    ) as session:
        while not session.should_stop():
            session.run()
    assert session.restored_from.endswith("-8")
    assert session.step == 13


# --- LoggingTensorHook -------------------------------------------------------


def logged(caplog, hook, last_step=10, **kwargs):
    with caplog.at_level(logging.INFO, "tfdist.hooks.basic"):
        count([hook], last_step, **kwargs)
    return [r.message for r in caplog.records if r.name == "tfdist.hooks.basic"]


def without_secs(line):
    return line.split(" (")[0]


def test_logs_names_and_variables(caplog):
    lines = logged(caplog, basic.LoggingTensorHook(["w", "loss"], 4), w=2.0)
    assert lines[0] == "w = 2.0, loss = 1.0"
    assert lines[1].startswith("w = 2.0, loss = 0.2 (0.")
    assert lines[1].endswith(" sec)")
    assert len(lines) == 3


def test_variables_of_keras_are_called_by_their_paths(caplog):
    layers = [keras.layers.Dense(1, name=name) for name in "ab"]
    for layer in layers:
        layer.build([2])
    hook = basic.LoggingTensorHook([layer.bias for layer in layers], 9)
    (line,) = logged(caplog, hook, 1)
    assert line == "a/bias = [0.], b/bias = [0.]"


def test_tags_are_sorted_and_values_not_in_scientific_notation(caplog):
    hook = basic.LoggingTensorHook({"b": "loss", "a": "w"}, at_end=True)
    small = {"loss": lambda step: 1e-4}
    assert logged(caplog, hook, 5, **small) == ["a = 0.0, b = 0.0001"]


def test_logs_at_the_end_as_well(caplog):
    hook = basic.LoggingTensorHook(["global_step"], 4, at_end=True)
    lines = [without_secs(line) for line in logged(caplog, hook)]
    assert lines == [f"global_step = {step}" for step in (1, 5, 9, 10)]


def test_logs_through_a_formatter(caplog):
    hook = basic.LoggingTensorHook(["loss"], 5, formatter=str)
    assert logged(caplog, hook, 1) == ["{'loss': 1.0}"]


def test_logs_what_an_undisturbed_run_would(caplog, tmp_path):
    hook = basic.LoggingTensorHook(["global_step"], 3)
    lines = logged(
        caplog,
        hook,
        fail_at=[9],
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=5,
    )
    steps = [int(without_secs(line).split()[-1]) for line in lines]
    assert steps == [1, 4, 7, 7, 10]


def test_an_unknown_name(caplog):
    hook = basic.LoggingTensorHook(["lost"], 1)
    with pytest.raises(ValueError, match=r"called 'lost'.*'loss'.*'w'"):
        count([hook], 1)


def test_fetches_a_table_in_shards():
    shards = [tf.Variable([[1.0], [2.0]]), tf.Variable([[3.0]])]
    table = ShardedVariable(shards)
    assert resolve(["t"], {}, {"t": table})[0].tolist() == [[1], [2], [3]]


# --- NanTensorHook -----------------------------------------------------------


def nan_at(step):
    return lambda now: math.nan if now >= step else 1.0


def test_nan_raises_before_it_is_saved(tmp_path, caplog):
    with pytest.raises(basic.NanLossDuringTrainingError):
        count(
            [basic.NanTensorHook()],
            20,
            loss=nan_at(12),
            checkpoint_dir=str(tmp_path),
            save_checkpoint_steps=4,
        )
    assert tf.train.latest_checkpoint(tmp_path).endswith("-8")
    assert "NaN at step 12" in caplog.text


def test_nan_stops():
    hook = basic.NanTensorHook("loss", fail_on_nan_loss=False)
    timer = basic.LoggingTensorHook(["loss"], 4)
    assert count([hook, timer], 100, loss=nan_at(9))[-1] == 9


def test_an_infinite_loss_is_no_nan():
    assert count([basic.NanTensorHook()], 3, loss=lambda _: math.inf)[-1] == 3


def test_a_variable_may_be_watched():
    assert count([basic.NanTensorHook("w")], 3)[-1] == 3
    with pytest.raises(basic.NanLossDuringTrainingError):
        count([basic.NanTensorHook("w")], 3, w=math.nan)


# --- FinalOpsHook ------------------------------------------------------------


@pytest.mark.parametrize(
    ("final_ops", "values"),
    [
        ("w", 0.5),
        ({"a": ["global_step"]}, {"a": [5]}),
        (lambda session: session.step + 1, 6),
    ],
)
def test_final_ops(final_ops, values):
    hook = basic.FinalOpsHook(final_ops)
    assert hook.final_ops_values is None
    count([hook], 5, w=0.5)
    assert hook.final_ops_values == values

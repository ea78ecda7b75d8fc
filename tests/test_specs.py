from pathlib import Path

import pytest
import tensorflow as tf

import tfdist
from tfdist.cluster import Cluster


def input_fn():
    return tf.data.Dataset.range(3)


def config(**kwargs):
    return tfdist.RunConfig("dir", cluster=Cluster(), **kwargs)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ("dir", "dir"),
        ("dir/", "dir"),
        ("gs://bucket/job/", "gs://bucket/job"),
        (Path("a/b"), "a/b"),
        ("/", "/"),
    ],
)
def test_model_dir(received, expected):
    made = tfdist.RunConfig(received, cluster=Cluster())
    assert made.model_dir == expected


@pytest.mark.parametrize(
    ("model_dir", "error"), [("", ValueError), (None, TypeError)]
)
def test_bad_model_dir(model_dir, error):
    with pytest.raises(error, match="`model_dir`"):
        tfdist.RunConfig(model_dir, cluster=Cluster())


@pytest.mark.parametrize(
    ("kwargs", "trigger"),
    [
        ({}, (600, None)),
        ({"save_checkpoints_secs": 5}, (5, None)),
        ({"save_checkpoints_steps": 7}, (None, 7)),
    ],
)
def test_when_to_save(kwargs, trigger):
    made = config(**kwargs)
    assert (made.checkpoint_secs, made.save_checkpoints_steps) == trigger


def test_replace():
    made = config(save_checkpoints_steps=5, log_step_count_steps=7)
    by_time = made.replace(save_checkpoints_secs=9)
    assert (by_time.save_checkpoints_steps, by_time.checkpoint_secs) == (
        None,
        9,
    )
    assert by_time.log_step_count_steps == 7
    assert made.replace(model_dir="b/").model_dir == "b"
    with pytest.raises(ValueError, match="keep_checkpoint_max"):
        made.replace(keep_checkpoint_max=-1)
    with pytest.raises(TypeError, match="nothing"):
        made.replace(nothing=1)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"save_checkpoints_steps": 1, "save_checkpoints_secs": 1}, ValueError),
        ({"save_summary_steps": -1}, ValueError),
        ({"save_checkpoints_steps": 0}, ValueError),
        ({"save_checkpoints_secs": 0}, ValueError),
        ({"keep_checkpoint_max": -1}, ValueError),
        ({"keep_checkpoint_every_n_hours": 0}, ValueError),
        ({"log_step_count_steps": 0}, ValueError),
        ({"steps_per_dispatch": 0}, ValueError),
        ({"session_creation_timeout_secs": -1}, ValueError),
        ({"evaluator_timeout_secs": float("nan")}, ValueError),
        ({"log_step_count_steps": "100"}, TypeError),
        ({"log_step_count_steps": True}, TypeError),
    ],
)
def test_bad_run_config(kwargs, error):
    with pytest.raises(error, match=next(iter(kwargs))):
        config(**kwargs)


def test_run_config_wants_a_cluster():
    with pytest.raises(TypeError, match=r"tfdist\.Cluster"):
        tfdist.RunConfig("dir", cluster={"ps": []})


def test_run_config_reads_the_environment(monkeypatch):
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"chief": ["c:1"], "ps": ["p:1"], "worker": ["w:1"]},'
        ' "task": {"type": "ps", "index": 0}}',
    )
    assert tfdist.RunConfig("dir").cluster.role == "ps"


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"input_fn": 3}, TypeError, "`input_fn` must be callable"),
        ({"max_steps": 0}, ValueError, "`max_steps` must be at least 1"),
        ({"max_steps": -5}, ValueError, "max_steps=-5"),
        ({"hooks": ["no hook"]}, TypeError, r"tfdist\.SessionRunHook"),
    ],
)
def test_bad_train_spec(kwargs, error, message):
    with pytest.raises(error, match=message):
        tfdist.TrainSpec(**{"input_fn": input_fn, **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"input_fn": None}, TypeError, "`input_fn` must be callable"),
        ({"steps": 0}, ValueError, "`steps` must be at least 1"),
        ({"start_delay_secs": -1}, ValueError, "must be not negative"),
        ({"throttle_secs": -1}, ValueError, "must be not negative"),
        ({"exporters": ["a"]}, TypeError, r"tfdist\.Exporter"),
        (
            {"exporters": [tfdist.FinalExporter("a")] * 2},
            ValueError,
            "unique names",
        ),
    ],
)
def test_bad_eval_spec(kwargs, error, message):
    with pytest.raises(error, match=message):
        tfdist.EvalSpec(**{"input_fn": input_fn, **kwargs})


def test_sequences_become_tuples():
    exporter, hook = tfdist.FinalExporter("a"), tfdist.SessionRunHook()
    assert tfdist.EvalSpec(input_fn, exporters=exporter).exporters == (
        exporter,
    )
    assert tfdist.TrainSpec(input_fn, hooks=[hook]).hooks == (hook,)


def test_defaults_are_those_of_tf1():
    spec = tfdist.EvalSpec(input_fn)
    assert (spec.steps, spec.start_delay_secs, spec.throttle_secs) == (
        100,
        120,
        600,
    )
    run = config()
    assert (run.save_summary_steps, run.log_step_count_steps) == (100, 100)
    assert run.keep_checkpoint_max == 5

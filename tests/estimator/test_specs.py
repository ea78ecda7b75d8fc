import logging
from pathlib import Path

import pytest
import tensorflow as tf

import tfdist
from tfdist.cluster.spec import Cluster


def input_fn():
    return tf.data.Dataset.range(3)


def config(**kwargs):
    return tfdist.RunConfig("dir", cluster=Cluster(), **kwargs)


class OfTF1(tfdist.Exporter):
    """Its `export` has the arguments of TF 1's."""

    def export(self, estimator, export_path, checkpoint_path, result, final):
        raise NotImplementedError


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
        ({}, (60, None)),
        ({"save_checkpoints_secs": 5}, (5, None)),
        ({"save_checkpoints_steps": 7}, (None, 7)),
        ({"save_checkpoints_steps": 0}, (None, 0)),
        ({"save_checkpoints_secs": None}, (None, None)),
    ],
)
def test_when_to_save(kwargs, trigger):
    made = config(**kwargs)
    assert (made.save_checkpoints_secs, made.save_checkpoints_steps) == trigger


@pytest.mark.parametrize(
    ("kwargs", "saves"),
    [
        ({}, True),
        ({"save_checkpoints_steps": 7}, True),
        ({"save_checkpoints_steps": 0}, False),
        ({"save_checkpoints_secs": None}, False),
    ],
)
def test_whether_to_save(kwargs, saves):
    assert config(**kwargs).saves_checkpoints == saves


def test_summary_dir():
    assert tfdist.RunConfig("job").summary_dir is None
    # As Vertex AI writes it.
    given = tfdist.RunConfig("job", summary_dir="gs://bucket/logs/")
    assert given.replace(model_dir="other").summary_dir == "gs://bucket/logs"
    with pytest.raises(ValueError, match="`summary_dir` must not be empty"):
        tfdist.RunConfig("job", summary_dir="")


def test_replace():
    made = config(save_checkpoints_steps=5, log_step_count_steps=7)
    by_time = made.replace(save_checkpoints_secs=9)
    assert by_time.save_checkpoints_steps is None
    assert by_time.save_checkpoints_secs == 9
    assert by_time.log_step_count_steps == 7
    assert made.replace(model_dir="b/").model_dir == "b"
    with pytest.raises(ValueError, match="keep_checkpoint_max"):
        made.replace(keep_checkpoint_max=-1)
    with pytest.raises(TypeError, match="nothing"):
        made.replace(nothing=1)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"backup_workers": -1}, ValueError),
        ({"max_staleness": -1}, ValueError),
        ({"read_ahead": -1}, ValueError),
        ({"read_ahead": True}, TypeError),
        ({"read_ahead": 1.5}, TypeError),
        ({"max_staleness": 1.5}, TypeError),
        ({"keep_checkpoint_max": 2.5}, TypeError),
        ({"save_checkpoints_steps": 1, "save_checkpoints_secs": 1}, ValueError),
        ({"save_summary_steps": -1}, ValueError),
        ({"save_checkpoints_steps": -1}, ValueError),
        ({"save_checkpoints_secs": -0.5}, ValueError),
        ({"keep_checkpoint_max": -1}, ValueError),
        ({"keep_checkpoint_every_n_hours": 0}, ValueError),
        ({"log_step_count_steps": 0}, ValueError),
        ({"steps_per_dispatch": 0}, ValueError),
        ({"session_creation_timeout_secs": 0}, ValueError),
        ({"session_creation_timeout_secs": None}, TypeError),
        ({"evaluator_timeout_secs": None}, TypeError),
        ({"evaluator_timeout_secs": float("nan")}, ValueError),
        ({"log_step_count_steps": "100"}, TypeError),
        ({"log_step_count_steps": True}, TypeError),
        ({"save_checkpoints_steps": 1e3}, TypeError),
        ({"tf_random_seed": "1"}, TypeError),
        ({"tf_random_seed": -1}, ValueError),
        ({"audit_input": "yes"}, TypeError),
        ({"train_distribute": "a strategy"}, ValueError),
        ({"experimental_distribute": "both"}, ValueError),
        ({"device_fn": lambda op: "/cpu:0"}, ValueError),
        ({"protocol": "grpc+verbs"}, ValueError),
    ],
)
def test_bad_run_config(kwargs, error):
    with pytest.raises(error, match=next(iter(kwargs))):
        config(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"session_config": tf.compat.v1.ConfigProto()}, "by `tf.config`"),
        ({"eval_distribute": "a strategy"}, "where evaluations run"),
        ({"experimental_max_worker_delay_secs": 9}, "hands out the steps"),
        ({"checkpoint_save_graph_def": True}, "no graph to save"),
    ],
)
def test_ignored_once_with_the_reason(kwargs, reason, caplog):
    with caplog.at_level(logging.WARNING, "tfdist"):
        config(**kwargs).replace(tf_random_seed=1)
    (record,) = caplog.records
    assert f"RunConfig ignores `{next(iter(kwargs))}`" in record.message
    assert reason in record.message


def test_nothing_to_say(caplog):
    with caplog.at_level(logging.WARNING, "tfdist"):
        config(protocol="grpc", checkpoint_save_graph_def=False)
    assert not caplog.records


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
        ({"max_steps": 1e5}, TypeError, "`max_steps` must be an integer"),
        ({"hooks": ["no hook"]}, TypeError, r"tfdist\.SessionRunHook"),
        ({"hooks": 1}, TypeError, "`hooks` must be a sequence"),
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
        ({"steps": 1e2}, TypeError, "`steps` must be an integer"),
        ({"start_delay_secs": -1}, ValueError, "must not be negative"),
        ({"throttle_secs": -1}, ValueError, "must not be negative"),
        ({"throttle_secs": None}, TypeError, "must be a number"),
        ({"start_delay_secs": None}, TypeError, "must be a number"),
        ({"name": 3}, TypeError, "`name` must be a str"),
        ({"hooks": ["no hook"]}, TypeError, r"tfdist\.SessionRunHook"),
        ({"exporters": ["a"]}, TypeError, r"tfdist\.Exporter"),
        ({"exporters": [OfTF1("a")]}, TypeError, "`export` is called with mod"),
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


def test_the_task_of_a_worker_is_not_known_where_its_input_is_traced():
    jobs = {"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]}
    config = tfdist.RunConfig(
        "job", cluster=Cluster.from_jobs(jobs, "chief", 0)
    )
    assert config.task_id == 0
    traced = tf.function(lambda: tf.constant(config.task_id), autograph=False)
    with pytest.raises(
        RuntimeError, match=r"takes a tf\.distribute\.InputCont"
    ):
        traced()


def test_sequences_become_tuples():
    exporter, hook = tfdist.FinalExporter("a"), tfdist.SessionRunHook()
    spec = tfdist.EvalSpec(input_fn, hooks=[hook], exporters=exporter)
    assert (spec.hooks, spec.exporters) == ((hook,), (exporter,))
    assert tfdist.TrainSpec(input_fn, hooks=[hook]).hooks == (hook,)


def test_none_is_no_hook_listener_or_exporter():
    train = tfdist.TrainSpec(input_fn, hooks=None, saving_listeners=None)
    evaluation = tfdist.EvalSpec(input_fn, hooks=None, exporters=None)
    assert train.hooks == train.saving_listeners == ()
    assert evaluation.hooks == evaluation.exporters == ()


@pytest.mark.parametrize("value", [None, 1, "no"])
def test_check_numerics_is_a_bool(value):
    with pytest.raises(TypeError, match=f"check_numerics={value!r}"):
        tfdist.RunConfig("d", check_numerics=value)


@pytest.mark.parametrize("kind", [tfdist.TrainSpec, tfdist.EvalSpec])
def test_a_hook_of_a_graph(kind):
    hook = tf.compat.v1.train.LoggingTensorHook(["loss"], every_n_iter=1)
    with pytest.raises(TypeError, match=r"Use tfdist's LoggingTensorHook"):
        kind(input_fn, hooks=[hook])


@pytest.mark.parametrize(
    ("jobs", "kwargs", "match"),
    [
        ("ps", {"backup_workers": 0, "max_staleness": 1}, "are never stale"),
        ("ps", {"backup_workers": 0, "read_ahead": 1}, "leave `read_ahead`"),
        ("ps", {"backup_workers": 2}, "must leave a worker"),
        ("worker", {"max_staleness": 1}, "`max_staleness` is for parameter"),
        ("worker", {"read_ahead": 1}, "`read_ahead` is for parameter"),
        ("worker", {"backup_workers": 0}, "`backup_workers` is for parameter"),
    ],
)
def test_waiting_that_has_no_meaning(jobs, kwargs, match):
    tasks = {"worker": ["b:1", "b:2"]}
    if jobs == "ps":
        tasks |= {"chief": ["a:1"], "ps": ["c:1"]}
    cluster = tfdist.Cluster.from_jobs(tasks, [*tasks][-1], 0)
    with pytest.raises(ValueError, match=match):
        tfdist.RunConfig("a", cluster=cluster, **kwargs)

"""tfdist beside `tf.estimator` of TF 2.15.1, which was recorded.

`estimator_contract.json` holds what it did in each scenario. Here tfdist does
the same, and must do it in the same order with the same results, but for the
differences that are written down beside the scenarios; each of them is told in
the docstring of what differs.
"""

import ast
import json
import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.cluster.spec import Cluster

pytestmark = pytest.mark.slow

RECORDED = json.loads(
    (Path(__file__).parents[1] / "estimator_contract.json").read_text()
)


def every(section):
    """Parameterises a test by the entries of a section."""
    return pytest.mark.parametrize("name", RECORDED[section])


def outcome(function):
    """What it returns, or `{"error": class}`."""
    try:
        return function()
    except Exception as error:
        return {"error": type(error).__name__}


# --- RunConfig ---------------------------------------------------------------

# There is no session that they configured, nor one that asks for the id.
ABSENT = {
    "master",
    "evaluation_master",
    "device_filters",
    "service",
    "global_id_in_cluster",
}

# What differs in every configuration: what was recorded, and what tfdist has.
EVERYWHERE = {
    "model_dir": (None, "dir"),  # It must be given.
    "session_creation_timeout_secs": (7200, 600),  # Nobody waits two hours.
    "save_checkpoints_secs": (600, 60),  # Steps go on meanwhile.
    "checkpoint_save_graph_def": (True, False),  # There is no graph.
    "experimental_max_worker_delay_secs": (-1, None),  # Ignored, so not kept.
}

CHIEF_AND_OTHERS = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
CLUSTER = {
    "chief": ["h0:0"],
    "worker": ["h3:3", "h4:4", "h5:5"],
    "ps": ["h1:1", "h2:2"],
}
VALUE_ERROR = {"error": "ValueError"}

# name: (why, the name of the recorded configuration that tfdist then has, what
# differs in it, or the error that it raises)
TF_CONFIG_DIFFERENCES = {
    "empty string": ("a blank TF_CONFIG is none", "none"),
    "local chief": ("a task without a cluster is a local one", "none"),
    "local evaluator": ("Vertex AI names no evaluator's cluster", "evaluator0"),
    "evaluator5": ("there can only be one evaluator", VALUE_ERROR),
    "master": (
        "`master` is called `chief`",
        {"task_type": "chief", "cluster_spec": CHIEF_AND_OTHERS},
    ),
    "master + evaluator task": (
        "an evaluator may stand beside a master",
        "evaluator0",
    ),
    "service str": ("`service` is not read", "none"),
    "model_dir in TF_CONFIG": ("`model_dir` is not read", "none"),
    "model_dir empty in TF_CONFIG": ("`model_dir` is not read", "none"),
    "extra types": ("other jobs are refused", VALUE_ERROR),
    "chief while evaluator in cluster": (
        "the evaluator is never part of the cluster",
        {"cluster_spec": CLUSTER},
    ),
    "worker while evaluator in cluster": (
        "the evaluator is never part of the cluster",
        {"cluster_spec": CLUSTER},
    ),
}

WRONG_TYPE = {"error": "TypeError"}
KWARGS = {
    "both ckpt": {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1},
    "none ckpt": {
        "save_checkpoints_steps": None,
        "save_checkpoints_secs": None,
    },
    "steps": {"save_checkpoints_steps": 7},
    "secs": {"save_checkpoints_secs": 7},
    "steps None only": {"save_checkpoints_steps": None},
    "secs None only": {"save_checkpoints_secs": None},
    "steps 0": {"save_checkpoints_steps": 0},
    "model_dir empty": {"model_dir": ""},
    "summary -1": {"save_summary_steps": -1},
    "steps -1": {"save_checkpoints_steps": -1},
    "secs -1": {"save_checkpoints_secs": -1},
    "keep -1": {"keep_checkpoint_max": -1},
    "keep 0": {"keep_checkpoint_max": 0},
    "keep None": {"keep_checkpoint_max": None},
    "hours 0": {"keep_checkpoint_every_n_hours": 0},
    "log 0": {"log_step_count_steps": 0},
    "log None": {"log_step_count_steps": None},
    "seed float": {"tf_random_seed": 1.5},
    "device_fn wrong arg": {"device_fn": lambda x: "/cpu:0"},
    "device_fn ok": {"device_fn": lambda op: "/cpu:0"},
    "protocol bad": {"protocol": "x"},
    "delay str": {"experimental_max_worker_delay_secs": "x"},
    "delay -1": {"experimental_max_worker_delay_secs": -1},
    "timeout 0": {"session_creation_timeout_secs": 0},
    "session_config dict": {"session_config": {}},
}
KWARGS_DIFFERENCES = {
    "seed float": ("a wrong type is a TypeError", WRONG_TYPE),
    "device_fn ok": ("it is refused: `placement` says it", VALUE_ERROR),
    "delay str": ("what is ignored is not checked", "delay -1"),
    "session_config dict": ("what is ignored is not checked", "delay -1"),
}

REPLACE = {
    "steps": {"save_checkpoints_steps": 3},
    "secs": {"save_checkpoints_secs": 3},
    "both": {"save_checkpoints_steps": 3, "save_checkpoints_secs": 3},
    "both None": {
        "save_checkpoints_steps": None,
        "save_checkpoints_secs": None,
    },
    "master": {"master": "x"},
    "model_dir": {"model_dir": "/d"},
}
REPLACE_DIFFERENCES = {
    "master": ("an unknown field is a TypeError", WRONG_TYPE),
}


def expected(results, name, differences):
    """What tfdist shall have, from what was recorded and what differs."""
    _, difference = differences.get(name, ("", {}))
    if isinstance(difference, str):
        name, difference = difference, {}
    result = results[name]
    if "error" in result or "error" in difference:
        error = (result | difference)["error"]
        # JSON's error is a ValueError.
        return {"error": error.replace("JSONDecodeError", "ValueError")}
    kept = {key: result[key] for key in result if key not in ABSENT}
    for key, (recorded, ours) in EVERYWHERE.items():
        if key in kept and kept[key] == recorded:
            kept[key] = ours
    return kept | difference


def read(config, keys):
    """The attributes of a configuration, as they were recorded."""
    values = {key: getattr(config, key) for key in keys}
    if "cluster_spec" in values:
        values["cluster_spec"] = values["cluster_spec"].as_dict()
    return values


ATTRIBUTES = [
    key
    for key in RECORDED["run_config_tf_config"]["none"]["result"]
    if key not in ABSENT
]


@every("run_config_tf_config")
def test_run_config_from_the_environment(name, monkeypatch):
    entries = RECORDED["run_config_tf_config"]
    text = entries[name]["TF_CONFIG"]
    monkeypatch.delenv("CLUSTER_SPEC", raising=False)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if text is not None:
        text = text if isinstance(text, str) else json.dumps(text)
        # The recorded ports go from 0; one that a task listens on does not.
        monkeypatch.setenv("TF_CONFIG", text.replace("h0:0", "h0:9"))
    results = {key: entries[key]["result"] for key in entries}
    wanted = json.dumps(expected(results, name, TF_CONFIG_DIFFERENCES))
    actual = outcome(lambda: read(tfdist.RunConfig("dir"), ATTRIBUTES))
    assert actual == json.loads(wanted.replace("h0:0", "h0:9"))


@every("run_config_kwargs")
def test_run_config_arguments(name):
    entries = RECORDED["run_config_kwargs"]
    kwargs = {"model_dir": "dir", "cluster": Cluster(), **KWARGS[name]}
    actual = outcome(lambda: read(tfdist.RunConfig(**kwargs), ATTRIBUTES))
    assert actual == expected(entries, name, KWARGS_DIFFERENCES)


@every("run_config_replace")
def test_run_config_replace(name):
    entries = RECORDED["run_config_replace"]
    config = tfdist.RunConfig("dir", cluster=Cluster())
    keys = entries["steps"]
    actual = outcome(lambda: read(config.replace(**REPLACE[name]), keys))
    assert actual == expected(entries, name, REPLACE_DIFFERENCES)


# --- train_and_evaluate ------------------------------------------------------


def model_fn():
    """As was recorded: w becomes 2 at the rate of 0.98, the loss (w - 2)^2."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input([1]), layer])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def data(batches):
    """An input function of so many batches, or of ever more."""
    dataset = tf.data.Dataset.from_tensors(([[1.0]], [[2.0]]))
    return lambda: dataset.repeat(batches)


class Hook(tfdist.SessionRunHook):
    """Writes down its calls; asks for each step, as TF1's hooks had to."""

    def __init__(self, name, log):
        self.name, self.log, self.runs = name, log, 0

    def steps_until_next(self, step):
        return 1

    def begin(self):
        self.log.append(f"{self.name}.begin")

    def after_create_session(self, session, coord):
        self.log.append(f"{self.name}.after_create_session")

    def after_run(self, run_context, run_values):
        self.runs += 1

    def end(self, session):
        self.log.append(f"{self.name}.end after {self.runs} runs")


class Listener(tfdist.CheckpointSaverListener):
    """Writes down its calls, and may ask for a stop."""

    def __init__(self, log, stop_at=None):
        self.log, self.stop_at = log, stop_at

    def begin(self):
        self.log.append("listener.begin")

    def before_save(self, session, global_step_value):
        self.log.append(f"listener.before_save {global_step_value}")

    def after_save(self, session, global_step_value):
        self.log.append(f"listener.after_save {global_step_value}")
        return global_step_value == self.stop_at

    def end(self, session, global_step_value):
        self.log.append(f"listener.end {global_step_value}")


class Exporter(tfdist.Exporter):
    """Writes down its calls; returns the number of the line."""

    def __init__(self, log):
        super().__init__("ex")
        self.log = log

    def export(self, model, export_path, eval_result, is_the_final_export):
        self.log.append(
            f"export step={eval_result['global_step']} "
            f"final={is_the_final_export} path={export_path}"
        )
        return f"R{len(self.log)}"


# name: what differs from a job of 22 steps, a checkpoint each ten.
SCENARIOS = {
    "max 22 save 10 throttle 0": {},
    "max 22 save 10 throttle 600": {"throttle_secs": 600},
    "max 20 save 10 throttle 0 (exact multiple)": {"max_steps": 20},
    "max_steps None, 15 batches": {"max_steps": None, "batches": 15},
    "max 22 but input ends at 15": {"batches": 15},
    "empty train input": {"batches": 0},
    "listener stops at 10": {"stop_at": 10},
    "eval name": {"name": "foo"},
    "already trained to 22": {"trained_to": 22},
    "resume from 10": {"trained_to": 10},
    "default save 600 secs": {"save": {}},
    "no checkpoints": {
        "save": {"save_checkpoints_steps": None, "save_checkpoints_secs": None}
    },
    "eval steps larger than data": {"eval_steps": 100, "eval_batches": 3},
}


def play(
    directory,
    max_steps=22,
    batches=None,
    save=None,
    throttle_secs=0,
    stop_at=None,
    name=None,
    trained_to=None,
    eval_steps=3,
    eval_batches=None,
):
    """Runs a job; returns the log of what happened."""
    log = []
    save = {"save_checkpoints_steps": 10} if save is None else save
    config = tfdist.RunConfig(directory, cluster=Cluster(), **save)
    estimator = tfdist.Estimator(model_fn, config)
    if trained_to:
        estimator.train(data(None), max_steps=trained_to)
    try:
        metrics, exports = tfdist.train_and_evaluate(
            estimator,
            tfdist.TrainSpec(
                data(batches),
                max_steps=max_steps,
                hooks=[Hook("train", log)],
                saving_listeners=[Listener(log, stop_at)],
            ),
            tfdist.EvalSpec(
                data(eval_batches),
                steps=eval_steps,
                name=name,
                hooks=[Hook("eval", log)],
                exporters=[Exporter(log)],
                throttle_secs=throttle_secs,
            ),
        )
    except ValueError as error:
        log.append(f"raised ValueError: {error}")
    else:
        rounded = {key: round(value, 3) for key, value in metrics.items()}
        log.append(f"returned ({rounded}, {exports})")
    return [line.replace(str(directory), "MODEL_DIR") for line in log]


def normalized(log):
    """Without the checkpoint that TF's exporters got; exports by their step."""
    log = [re.sub(r" ckpt=\S+", "", line) for line in log]
    log = [re.sub(r"input function .*? has", "F has", line) for line in log]
    return [
        re.sub(r"\['R(\d+)'\]", lambda m: log[int(m[1]) - 1].split()[1], line)
        for line in log
    ]


def exported(step, final):
    return f"export step={step} final={final} path=MODEL_DIR/export/ex"


def the_last_is_final(step):
    """Whatever ends the training; so that a FinalExporter always exports."""
    return {exported(step, False): [exported(step, True)]}


# name: (why, recorded lines to what happens instead)
LOG_DIFFERENCES = {
    "max_steps None, 15 batches": (
        "the last export is the final one",
        the_last_is_final(15),
    ),
    "max 22 but input ends at 15": (
        "the last export is the final one",
        the_last_is_final(15),
    ),
    "empty train input": (
        "it is an error, and nothing is evaluated or exported",
        {
            "listener.end 0": [
                "raised ValueError: The dataset of F has no batch: no step was "
                "run, and nothing is exported. Are its files empty, or smaller "
                "than one batch with drop_remainder=True?"
            ],
            "eval.begin": [],
            "eval.after_create_session": [],
            "eval.end after 3 runs": [],
            exported(0, False): [],
            "train.end after 0 runs": [],
            "returned ({'loss': 4.0, 'global_step': 0}, step=0)": [],
        },
    ),
    "listener stops at 10": (
        "the last export is the final one, though there was one of this step",
        {"listener.end 10": ["listener.end 10", exported(10, True)]},
    ),
    "resume from 10": (
        "what was restored is not saved again, but evaluated if it was not",
        {
            "listener.before_save 10": [],
            "listener.after_save 10": [],
            "train.after_create_session": [
                "eval.begin",
                "eval.after_create_session",
                "eval.end after 3 runs",
                exported(10, False),
                "train.after_create_session",
            ],
            "eval.end after 3 runs": ["eval.end after 6 runs"],
            "eval.end after 6 runs": ["eval.end after 9 runs"],
        },
    ),
    "already trained to 22": (
        "a finished job is evaluated and exported",
        {
            "returned (None, None)": [
                "listener.begin",
                "train.begin",
                "train.after_create_session",
                "listener.end 22",
                "eval.begin",
                "eval.after_create_session",
                "eval.end after 3 runs",
                exported(22, True),
                "train.end after 0 runs",
                "returned ({'loss': 1.644, 'global_step': 22}, step=22)",
            ]
        },
    ),
    "no checkpoints": (
        "the message is another",
        {
            "raised ValueError: There should be a CheckpointSaverHook to use "
            "saving_listeners. Please set one of the RunConfig."
            "save_checkpoints_steps or RunConfig.save_checkpoints_secs.": [
                "raised ValueError: `train_and_evaluate` evaluates "
                "checkpoints, and there are none. Set "
                "`save_checkpoints_steps` or `save_checkpoints_secs` of the "
                "RunConfig. Received: None or 0 for both."
            ]
        },
    ),
}


def expected_log(name):
    lines = normalized(RECORDED["train_and_evaluate_local"][name]["log"])
    _, changes = LOG_DIFFERENCES.get(name, ("", {}))
    assert changes.keys() <= set(lines)
    return [new for line in lines for new in changes.get(line, [line])]


def expected_files(name, evaluated):
    """What was recorded, with named differences."""
    recorded = RECORDED["train_and_evaluate_local"][name]["dirs"]
    # There is no graph.
    kept = {p for p in recorded if not p.endswith(("graph.pbtxt", ".meta"))}
    if name == "empty train input":
        # They had held the graph alone; nothing is evaluated.
        kept -= {"events", "eval", "eval/events"}
    if evaluated:
        # A job that is over says so, and leaves its result, in files.
        directory = f"eval_{SCENARIOS[name].get('name', '')}".rstrip("_")
        kept |= {directory, f"{directory}/events", f"{directory}/latest.json"}
        kept.add("training_done.json")
    return {shard_free(path) for path in kept}


def shard_free(path):
    """A path without what depends on the number of shards, or on the time."""
    path = re.sub(r"\.data-\d+-of-\d+", ".data", path)
    return re.sub(r"events\.out\..*", "events", path)


def files(directory):
    """Relative paths, without exports."""
    return {
        shard_free(str(path.relative_to(directory)))
        for path in directory.rglob("*")
        if "export" not in path.parts
    }


@every("train_and_evaluate_local")
def test_train_and_evaluate(name, tmp_path):
    log = normalized(play(tmp_path / "job", **SCENARIOS[name]))
    assert log == expected_log(name)
    evaluated = any(line.startswith("eval.end") for line in log)
    assert files(tmp_path / "job") == expected_files(name, evaluated)


def test_a_path_is_not_lost_where_the_final_export_finds_nothing_new(tmp_path):
    """A BestExporter has exported step 10 before that was the last."""
    config = tfdist.RunConfig(
        tmp_path, cluster=Cluster(), save_checkpoints_steps=10
    )
    _, exports = tfdist.train_and_evaluate(
        tfdist.Estimator(model_fn, config),
        tfdist.TrainSpec(data(None), saving_listeners=[Listener([], 10)]),
        tfdist.EvalSpec(data(3), exporters=tfdist.BestExporter("best")),
    )
    paths = (tmp_path / "export" / "best").glob("[0-9]*")
    assert exports == [str(path) for path in paths]
    assert len(exports) == 1


# --- Exporters ---------------------------------------------------------------


def never(best_eval_result, current_eval_result):
    return False


# name: (exporter, name of the evaluation), in a job of five evaluations.
EXPORTERS = {
    "final": (tfdist.FinalExporter("final"), None),
    "latest keep 2": (tfdist.LatestExporter("latest", exports_to_keep=2), None),
    "latest keep None": (
        tfdist.LatestExporter("latest", exports_to_keep=None),
        None,
    ),
    "best (loss decreasing)": (tfdist.BestExporter("best"), None),
    "best never better": (tfdist.BestExporter("best", compare_fn=never), None),
    "best with eval name, default pattern": (
        tfdist.BestExporter("best"),
        "foo",
    ),
}
# What TensorFlow's own writer adds: TF 2.21, without an Estimator.
LAYOUT_DIFFERENCES = {"assets", "fingerprint.pb"}


@every("exporters")
def test_exports(name, tmp_path):
    exporter, eval_name = EXPORTERS[name]
    config = tfdist.RunConfig(
        tmp_path, cluster=Cluster(), save_checkpoints_steps=1
    )
    _, exports = tfdist.train_and_evaluate(
        tfdist.Estimator(model_fn, config),
        tfdist.TrainSpec(data(None), max_steps=5),
        tfdist.EvalSpec(
            data(3), name=eval_name, exporters=exporter, throttle_secs=0
        ),
    )
    base = tmp_path / "export" / exporter.name
    found = sorted(path for path in base.iterdir() if path.is_dir())
    layout = {str(path.relative_to(found[-1])) for path in found[-1].rglob("*")}
    assert exports == [None if name == "best never better" else str(found[-1])]
    assert RECORDED["exporters"][name] == {
        exporter.name: len(found),
        "layout": sorted({".", *layout} - LAYOUT_DIFFERENCES),
        "name_is_10_digits": all(
            re.fullmatch(r"\d{10}", path.name) for path in found
        ),
    }


# name: (what raises, the argument that both messages name)
EXPORTER_ERRORS = {
    "latest keep 0": (
        lambda: tfdist.LatestExporter("a", exports_to_keep=0),
        "exports_to_keep",
    ),
    "best keep -1": (
        lambda: tfdist.BestExporter(exports_to_keep=-1),
        "exports_to_keep",
    ),
    "best compare None": (
        lambda: tfdist.BestExporter(compare_fn=None),
        "compare_fn",
    ),
    "best compare wrong arg": (
        lambda: tfdist.BestExporter(compare_fn=lambda a, b: True),
        "best_eval_result",
    ),
    "best compare missing one": (
        lambda: tfdist.BestExporter(compare_fn=lambda best_eval_result: True),
        "current_eval_result",
    ),
    "best compare extra": (
        lambda: tfdist.BestExporter(
            compare_fn=lambda best_eval_result, current_eval_result, z: True
        ),
        "'z'",
    ),
}


@every("exporter_errors")
def test_exporter_errors(name):
    check_same_error(*EXPORTER_ERRORS[name], RECORDED["exporter_errors"][name])


def check_same_error(function, argument, recorded):
    """Raises what TF raised; both messages name the argument."""
    assert argument in recorded["message"]
    with pytest.raises(Exception, match=re.escape(argument)) as caught:
        function()
    assert type(caught.value).__name__ == recorded["error"]


# --- Specs -------------------------------------------------------------------


def input_fn():
    return tf.data.Dataset.range(3)


class Named(tfdist.Exporter):
    """An exporter that tfdist did not check when it was made."""

    def __init__(self, name):
        self.name = name


def train_spec(**kwargs):
    return lambda: tfdist.TrainSpec(**{"input_fn": input_fn, **kwargs})


def eval_spec(**kwargs):
    return lambda: tfdist.EvalSpec(**{"input_fn": input_fn, **kwargs})


# name: (what makes the spec, the argument that both messages name)
SPECS = {
    "Train input_fn": (train_spec(input_fn="x"), "input_fn"),
    "Train max_steps 0": (train_spec(max_steps=0), "max_steps"),
    "Train hooks": (train_spec(hooks=[1]), "hooks"),
    "Train listeners": (train_spec(saving_listeners=[1]), "saving_listeners"),
    "Train ok": (train_spec(), None),
    "Eval ok": (eval_spec(), None),
    "Eval steps 0": (eval_spec(steps=0), "steps"),
    "Eval name": (eval_spec(name=1), "name"),
    "Eval hooks": (eval_spec(hooks=[1]), "hooks"),
    "Eval delay": (eval_spec(start_delay_secs=-1), "start_delay_secs"),
    "Eval throttle": (eval_spec(throttle_secs=-1), "throttle_secs"),
    "Eval exporters": (eval_spec(exporters=1), "exporters"),
    "Eval exporters list": (eval_spec(exporters=[1]), "exporters"),
    "Eval dup names": (
        eval_spec(exporters=[tfdist.FinalExporter("a")] * 2),
        "['a', 'a']",
    ),
    "Eval None name": (eval_spec(exporters=[Named(None)]), "[None]"),
    "Eval int name": (eval_spec(exporters=[Named(3)]), "string"),
}


@every("specs")
def test_specs(name):
    make, argument = SPECS[name]
    text = re.sub(
        r"<function <lambda> .*?>", "'input_fn'", RECORDED["specs"][name]
    )
    recorded = ast.literal_eval(text)
    if argument:
        check_same_error(make, argument, recorded)
    else:
        assert vars(make()) == {**recorded, "input_fn": input_fn}

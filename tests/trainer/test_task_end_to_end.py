"""The example job as a user runs it: real commands, real processes."""

import concurrent.futures
import csv
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import tensorflow as tf
from absl.testing import flagsaver

import tfdist
from tests.cluster.test_cluster import MALFORMED_TF_CONFIGS
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.hooks.events import read_scalars
from tfdist.launch import network
from trainer import task as trainer_task
from trainer.click_log import auc

ROOT = Path(__file__).parents[2]
MAX_STEPS = 120


def write_csv(path, rows, seed):
    """Examples whose label depends on a number and on a word."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "colour", "noise", "label"])
        for _ in range(rows):
            size, colour = rng.normal(), rng.choice(["red", "green", "blue"])
            logit = 2 * size + {"red": 1.5, "green": 0, "blue": -1.5}[colour]
            label = "yes" if rng.random() < 1 / (1 + np.exp(-logit)) else "no"
            writer.writerow([f"{size:.4f}", colour, rng.integers(9), label])


def run(*command, directory, timeout=240, **environment):
    """Exit code and output of `python -m <command>`."""
    output = directory / f"{os.urandom(4).hex()}.log"
    with output.open("w") as log:
        code = subprocess.run(
            [sys.executable, "-m", *map(str, command)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        ).returncode
    return code, output.read_text()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("job")
    write_csv(path / "train.csv", 2000, seed=0)
    write_csv(path / "eval.csv", 500, seed=1)
    return path


def data_flags(directory):
    return [
        f"--train_files={directory / 'train.csv'}",
        f"--eval_files={directory / 'eval.csv'}",
        "--label=label",
    ]


@pytest.fixture(scope="module")
def cluster_job(directory):
    """Exit code, output and model_dir of a job on a cluster of five tasks."""
    model_dir = directory / "model"
    code, output = run(
        *["tfdist.launch", "--ps=1", "--workers=2", "--evaluator"],
        *["-m", "trainer.task", *data_flags(directory)],
        *[f"--max_steps={MAX_STEPS}", f"--model_dir={model_dir}/"],
        *["--save_checkpoints_steps=50", "--log_steps=40"],
        directory=directory,
    )
    return code, output, model_dir


# --- A cluster job -----------------------------------------------------------


@pytest.mark.slow
def test_exit_code(cluster_job):
    code, output, _ = cluster_job
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["chief:0", "worker:0", "worker:1", "ps:0", "evaluator:0"]
)
def test_summary_tells_the_end_of_each_task(cluster_job, task):
    assert re.search(
        rf"\[launch\] {task} +exit code 0 +restarts: 0 ", cluster_job[1]
    )


@pytest.mark.slow
def test_no_process_is_left(cluster_job):
    pids = re.findall(r"pid (\d+)", cluster_job[1])
    assert len(pids) == 5
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


@pytest.mark.slow
def test_steps_are_exact(cluster_job):
    path = tf.train.latest_checkpoint(cluster_job[2])
    assert checkpoints.step_of(path) == MAX_STEPS
    assert path == f"{cluster_job[2]}/model.ckpt-{MAX_STEPS}"
    saved = tf.train.load_checkpoint(path)
    counters = [
        saved.get_tensor(name)
        for name in saved.get_variable_to_shape_map()
        if "iteration" in name
    ]
    assert set(counters) == {MAX_STEPS}


@pytest.mark.slow
def test_metrics_are_those_of_the_exported_model(cluster_job, directory):
    _, output, _ = cluster_job
    (export,) = set(re.findall(r"Exported model: (\S+)", output))
    with (directory / "eval.csv").open() as file:
        rows = list(csv.DictReader(file))
    serve = tf.saved_model.load(export).signatures["serving_default"]
    predictions = serve(
        size=tf.constant([float(row["size"]) for row in rows]),
        colour=tf.constant([row["colour"] for row in rows]),
        noise=tf.constant([float(row["noise"]) for row in rows]),
    )["probabilities"].numpy()[:, 0]
    labels = np.array([row["label"] == "yes" for row in rows])
    reported = dict(re.findall(r"\[chief:0\]   (\w+) +(\d\.\d+)", output))
    accuracy = ((predictions > 0.5) == labels).mean()
    assert float(reported["accuracy"]) == pytest.approx(accuracy, abs=1e-4)
    # Keras' AUC interpolates between 200 thresholds.
    exact = auc(labels.astype(int), predictions)
    assert float(reported["auc"]) == pytest.approx(exact, abs=5e-3)
    assert exact > 0.8


@pytest.mark.slow
def test_output_says_what_happens(cluster_job):
    _, output, model_dir = cluster_job
    for expected in (
        "[launch] A private network",
        "[ps:0] Task ps:0 serves on grpc://127.0.0.1:",
        "[chief:0] ps:0 holds ",
        "[chief:0] Training starts from newly initialized variables.",
        f"[chief:0] step  40 of {MAX_STEPS} ( 33 %),",
        f"[chief:0] Saved {model_dir}/model.ckpt-50.",
        f"[evaluator:0] Evaluation of step {MAX_STEPS}: loss ",
        f"[chief:0] Evaluation after {MAX_STEPS} steps:",
        f"[chief:0] Checkpoints: {model_dir}",
    ):
        assert expected in output


@pytest.mark.slow
def test_output_is_free_of_noise(cluster_job):
    noise = [
        line
        for line in cluster_job[1].splitlines()
        if re.search(r"[IWE]0000|absl::|Traceback|global_step  ", line)
    ]
    assert noise == []
    assert len(cluster_job[1].splitlines()) < 60


@pytest.mark.slow
def test_summaries(cluster_job):
    train = read_scalars(str(cluster_job[2]))
    assert train[100].keys() == {"loss", "auc", "accuracy"}
    tags = set().union(*train.values())
    assert tags >= {"global_step/sec", "staleness/p50", "staleness/max"}
    evaluation = read_scalars(str(cluster_job[2] / "eval"))
    assert set(evaluation[MAX_STEPS]) == {"loss", "auc", "accuracy"}


# --- One process -------------------------------------------------------------


@pytest.mark.slow
def test_ctrl_c(directory):
    """Ends at once, says how to go on, and the job does go on."""
    flags = [*data_flags(directory), "--model_dir=interrupted"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.task", *flags, "--max_steps=1000000"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell has its background jobs ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        for line in process.stdout:
            if line.startswith("Saved ") and "ckpt-0" not in line:
                process.send_signal(signal.SIGINT)
                break
        output = process.stdout.read()
    assert process.returncode == 130
    assert "Interrupted. To resume from" in output
    assert "Traceback" not in output
    path = tf.train.latest_checkpoint(directory / "interrupted")
    step = checkpoints.step_of(path)
    code, output = run(
        *["trainer.task", *flags, f"--max_steps={step + 5}"],
        directory=directory,
    )
    assert code == 0, output
    assert f"Training continues at step {step} from " in output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("no such column"), 1),
        (FileNotFoundError("no such file"), 1),
        (tf.errors.InvalidArgumentError(None, None, "shape"), 1),
        (TimeoutError("a task is missing"), 134),
        (ConnectionResetError("while a data set was fetched"), 134),
        (tf.errors.UnavailableError(None, None, "gone"), 134),
        (tf.errors.AbortedError(None, None, "storage"), 134),
    ],
)
def test_exit_code_says_whether_another_try_may_help(error, code):
    assert trainer_task._exit_code(error) == code


@pytest.fixture
def global_batch():
    trainer_task.FLAGS(["task"])
    with flagsaver.flagsaver(global_batch_size=240):
        yield


@pytest.mark.usefixtures("global_batch")
def test_a_global_batch_is_shared_out():
    context = tf.distribute.InputContext(3, 1, num_replicas_in_sync=3)
    assert trainer_task.batch_size(context) == 80


@pytest.mark.usefixtures("global_batch")
def test_a_global_batch_is_for_steps_in_common(tmp_path):
    jobs = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}
    cluster = Cluster.from_jobs(jobs, "chief", 0)
    config = tfdist.RunConfig(str(tmp_path), cluster=cluster)
    with pytest.raises(ValueError, match="Pass --batch_size"):
        trainer_task.train_and_evaluate(None, config)


# --- Bad input ---------------------------------------------------------------


def bad_files(directory):
    for name, text in {
        "short_row.csv": "size,label\n1,yes\n2\n",
        "three_labels.csv": "size,label\n1,yes\n2,no\n3,maybe\n",
        "number_labels.csv": "size,label\n1,1\n2,2\n",
        "empty.csv": "",
    }.items():
        (directory / name).write_text(text)
    (directory / "file").touch()


def train_on(name, label="label"):
    return [f"--train_files={name}", f"--eval_files={name}", f"--label={label}"]


# name: (flags, what the message says)
BAD_INPUT = {
    "missing file": (train_on("nowhere.csv"), "No file matches 'nowhere.csv'"),
    "no label column": (
        train_on("train.csv", "income"),
        "`label` must name a column of train.csv: 'size', 'colour'",
    ),
    "too few fields": (
        train_on("short_row.csv"),
        "short_row.csv, line 3: expected 2 fields",
    ),
    "three labels": (
        train_on("three_labels.csv"),
        "must hold 0 and 1, or exactly two strings",
    ),
    "labels 1 and 2": (
        train_on("number_labels.csv"),
        "must hold 0 and 1, or exactly two strings",
    ),
    "empty file": (train_on("empty.csv"), "empty.csv, line 1: expected a head"),
    "no label flag": (["--train_files=train.csv"], "Missing: --eval_files"),
    "two sources": (
        ["--tfds=titanic", *train_on("train.csv")],
        "Pass --tfds or --train_files",
    ),
    "columns of no file": (
        ["--label=income", "--numeric_columns=age"],
        "--numeric_columns, --label: only for CSV data, but --train_files",
    ),
    "no steps": (["--max_steps=0"], "flag --max_steps=0"),
    "no units": (
        ["--hidden_units=64,x"],
        "--hidden_units must be integers of at least 1",
    ),
    "unknown flag": (["--max_step=5"], "Unknown command line flag 'max_step'"),
    "argument": (["max_steps=5"], "Unexpected arguments: max_steps=5"),
    "unwritable model_dir": (
        [*train_on("train.csv"), "--model_dir=file/model"],
        "model_dir 'file/model' cannot be written",
    ),
    "unwritable export_dir": (
        [*train_on("train.csv"), "--export_dir=file/model"],
        "export_dir 'file/model' cannot be written",
    ),
}


@pytest.fixture(scope="module")
def bad_input(directory):
    """Name -> exit code and output of each bad command."""
    bad_files(directory)
    every = len(MALFORMED_TF_CONFIGS) // 3
    configs = {row[0]: row[1] for row in MALFORMED_TF_CONFIGS[::every]}
    commands = {name: (flags, {}) for name, (flags, _) in BAD_INPUT.items()}
    commands |= {
        f"TF_CONFIG {name}": ([], {"TF_CONFIG": text})
        for name, text in configs.items()
    }

    def task(name):
        flags, environment = commands[name]
        return run("trainer.task", *flags, directory=directory, **environment)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(commands, pool.map(task, commands), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_explained(bad_input, name):
    code, output = bad_input[name]
    assert code == 1, output
    assert BAD_INPUT[name][1] in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_malformed_tf_config_is_explained(bad_input):
    """A few of those of test_cluster.py, through the command line."""
    assert len(MALFORMED_TF_CONFIGS) >= 25
    results = {n: r for n, r in bad_input.items() if n.startswith("TF_CONFIG")}
    assert len(results) >= 3
    for code, output in results.values():
        assert code == 1
        assert "error: TF_CONFIG is malformed." in output
        assert "A right one: TF_CONFIG='{" in output
        assert "Traceback" not in output


@pytest.mark.slow
def test_a_worker_that_never_comes_up_is_named(directory):
    holders = network.reserve_ports(3)
    ports = [holder.getsockname()[1] for holder in holders]
    for holder in holders:
        holder.close()
    chief, worker, ps = (f'["127.0.0.1:{port}"]' for port in ports)
    code, output = run(
        *["trainer.task", "--session_creation_timeout_secs=3"],
        *data_flags(directory),
        "--model_dir=never",
        directory=directory,
        TF_CONFIG=f'{{"cluster": {{"chief": {chief}, "worker": {worker}, '
        f'"ps": {ps}}}, "task": {{"type": "chief", "index": 0}}}}',
    )
    assert code == 134, output  # Another try may help.
    assert "2 task(s) of the cluster did not come up within 3 s" in output
    assert f"worker:0 at 127.0.0.1:{ports[1]} (not up)" in output
    assert "Traceback" not in output

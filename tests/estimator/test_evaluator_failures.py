"""What `estimator/evaluator.py` says of failures: real processes and signals.

`-s` shows how long each took.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.session.test_recovery import (
    CHIEF,
    Stopwatch,
    found,
    wait_for_exit,
)
from tfdist.checkpoint import checkpoints
from tfdist.estimator import results
from tfdist.estimator.saved_models import list_exports
from tfdist.launch.testing import LocalCluster, assert_nothing_left

# Faults at times of their own, which a busy machine would shift.
pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
EVALUATOR = "evaluator:0"
EVALUATED = r"Evaluation of step (\d+): .*"


def start(model_dir, *flags, **cluster):
    command = [sys.executable, "-m", "tests.evaluator_job"]
    return LocalCluster(
        [*command, f"--model_dir={model_dir}", *flags],
        **{"evaluator": True, "cwd": ROOT, **cluster},
    )


def batch(number, step=r"(\d+)"):
    return rf"^Batch {number} of the evaluation of {step}\."


def read(model_dir, name):
    return json.loads((model_dir / "eval" / name).read_text())


def newest(model_dir):
    return tf.train.latest_checkpoint(model_dir)


def assert_is_served(export):
    serve = tf.saved_model.load(export).signatures["serving_default"]
    x, ids = np.ones([2, 4], "float32"), np.ones([2, 3], "int32")
    (outputs,) = serve(x=tf.constant(x), ids=tf.constant(ids)).values()
    assert outputs.shape == (2, 1)


# --- One job, and what happens to its evaluator ------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("job")


@pytest.fixture(scope="module")
def job(model_dir):
    """A job that trains until it is told to stop; an evaluation takes 3 s."""
    slow = "--eval_batch_secs=0.2"
    with start(model_dir, slow, ps=1, workers=1, restart_secs=1.0) as job:
        job.wait_until_step(50, timeout_secs=120)
        yield job
    assert_nothing_left(job)


@pytest.mark.slow
def test_killed_in_mid_evaluation(job, model_dir):
    begun = len(found(job, batch(3), EVALUATOR))
    step = int(job.wait_for_line(EVALUATOR, batch(3), count=begun + 1)[1])
    watch = Stopwatch("evaluator killed")
    injection = job.kill(EVALUATOR)
    assert injection.effect == "SIGKILL"
    assert f"Batch 16 of the evaluation of {step}." not in job.output(EVALUATOR)
    done = len(found(job, EVALUATED, EVALUATOR))
    line = job.wait_for_line(
        EVALUATOR, EVALUATED, count=done + 1, timeout_secs=90
    )
    watch.say(line[0])
    assert int(line[1]) >= step
    assert job.exit_codes()[EVALUATOR] == [-9]
    assert job.pid(EVALUATOR) != injection.pid
    steps = found(job, EVALUATED, EVALUATOR)
    assert len(steps) == len(set(steps))


@pytest.mark.slow
def test_newest_checkpoint_damaged(job, model_dir):
    """Evaluator and chief stand still while it is, so that it is the newest."""
    job.freeze(EVALUATOR)
    saved = len(found(job, "^INFO Saved "))
    job.wait_for_line(CHIEF, "^INFO Saved ", count=saved + 2)
    job.freeze(CHIEF)
    state = tf.train.get_checkpoint_state(model_dir)
    before, path = state.all_model_checkpoint_paths[-2:]
    for data in model_dir.glob(f"{Path(path).name}.data*"):
        data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    watch = Stopwatch("newest checkpoint damaged")
    job.resume(EVALUATOR)
    warning = rf"^WARNING Checkpoint {path} is damaged .* It is skipped\."
    job.wait_for_line(EVALUATOR, warning)
    watch.say("it is skipped")
    step = before.rpartition("-")[2]
    job.wait_for_line(EVALUATOR, rf"Evaluation of step {step}:")
    watch.say("the one before is evaluated")
    job.resume(CHIEF)
    steps = found(job, EVALUATED, EVALUATOR)
    line = job.wait_for_line(EVALUATOR, EVALUATED, count=len(steps) + 1)
    watch.say("a newer one is evaluated")
    damaged = path.rpartition("-")[2]
    assert damaged not in steps
    assert int(line[1]) > int(damaged)
    assert len(found(job, warning, EVALUATOR)) == 1
    assert job.exit_codes()[EVALUATOR] == [-9]


@pytest.mark.slow
def test_the_chief_is_done_while_the_evaluator_works(job, model_dir):
    watch = Stopwatch("training ended")
    (model_dir / "stop").touch()
    deadline = time.monotonic() + 60
    while not Path(results.done_path(str(model_dir))).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    watch.say("the chief is done")
    last_step = checkpoints.step_of(newest(model_dir))
    assert f"Batch 16 of the evaluation of {last_step}." not in job.output(
        EVALUATOR
    )
    assert job.wait(timeout_secs=60) == 0
    watch.say("the chief has left")
    result = read(model_dir, results.RESULT_FILE)
    assert result["final"]
    assert result["metrics"]["global_step"] == last_step
    assert str((result["metrics"], result["exports"])) in job.output(CHIEF)
    (export,) = list_exports(str(model_dir / "export" / "final"))
    assert result["exports"] == [export]
    assert_is_served(export)
    tasks = (CHIEF, EVALUATOR, "ps:0", "worker:0")
    assert [wait_for_exit(job, task) for task in tasks] == [0] * 4
    watch.say("everybody has left")
    assert not (model_dir / "eval" / results.FAILURE_FILE).exists()


# --- An evaluator that is of no use ------------------------------------------


@pytest.mark.slow
def test_never_starts(tmp_path):
    with start(
        tmp_path,
        *["--max_steps=20", "--evaluator_timeout_secs=3", "--step_secs=0"],
        absent=[EVALUATOR],
    ) as job:
        watch = Stopwatch("no evaluator")
        job.wait_for_line(CHIEF, "^INFO Saved .*-20")
        watch.say("training has ended")
        before = watch.secs()
        warning = "without the evaluator's result of step 20 .* after 3 s"
        job.wait_for_line(CHIEF, warning)
        watch.say("the chief has given up")
        assert 2.5 < watch.secs() - before < 20
        assert job.wait(timeout_secs=30) == 0
        watch.say("the chief has left")
        output = job.output(CHIEF)
        assert "\nReturned (None, [])." in output
        assert job.exit_codes()[EVALUATOR] == []
    assert_nothing_left(job)


@pytest.mark.slow
def test_fails_each_time(tmp_path):
    """An empty evaluation set; the chief would wait 90 s."""
    flags = ["--max_steps=20", "--step_secs=0", "--eval_batches=0"]
    with start(tmp_path, *flags, restart_secs=0.5) as job:
        job.wait_for_line(CHIEF, "^INFO Saved .*-20")
        watch = Stopwatch("training has ended, the evaluator fails")
        assert job.wait(timeout_secs=80) == 0
        watch.say("the chief has left")
        output = job.output(CHIEF)
        assert 1 <= output.count("may be started again") <= 3
        assert "The evaluator failed: ValueError: There is no batch" in output
        assert "\nReturned (None, [])." in output
        # The last has told the chief why it fails, and may yet have to exit.
        wait_for_exit(job, EVALUATOR)
        codes = job.exit_codes()[EVALUATOR]
        assert len(codes) >= 3
        assert set(codes) == {1}
        assert "the `input_fn` of the EvalSpec" in output
    assert_nothing_left(job)

import json
import os
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, local_loop, logistic

from tfdist import evaluation, optimizers
from tfdist.checkpoint import Checkpoints, named_variables
from tfdist.evaluation import Evaluator
from tfdist.events import read_scalars
from tfdist.exporters import Exporter

DEADLINE = 60.0


def model_fn():
    return logistic(metrics=["accuracy", keras.metrics.AUC(name="auc")])


def input_fn():
    return batches(50, 16, seed=5)


class Recorder(Exporter):
    """Writes down what it is called with."""

    def __init__(self):
        super().__init__("recorder")
        self.calls = []

    def export(self, model, export_path, eval_result, is_the_final_export):
        self.calls.append((eval_result["global_step"], is_the_final_export))
        return f"{export_path}/{len(self.calls)}"


class Job:
    """Checkpoints of a model in training, made one step at a time."""

    def __init__(self, directory):
        self.dir = str(directory)
        self.model = model_fn()
        optimizers.build(self.model.optimizer, self.model.trainable_variables)
        self.loop, step = local_loop(self.model, batches().repeat())
        self._checkpoints = Checkpoints(
            self.dir, named_variables(self.model, step), max_to_keep=2
        )
        self.step = 0

    def save_after(self, steps):
        self.loop.run(steps)
        self.step += steps
        return self._checkpoints.save(self.step)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def evaluator_of(job, **kwargs):
    return Evaluator(model_fn, input_fn, job.dir, **kwargs)


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Background(threading.Thread):
    """A function in a thread, whose error is not lost."""

    def __init__(self, function, *args):
        super().__init__(daemon=True)
        self._call, self.error = (function, args), None
        self.start()

    def run(self):
        function, args = self._call
        try:
            self.result = function(*args)
        except BaseException as error:
            self.error = error

    def get(self):
        self.join(DEADLINE)
        assert not self.is_alive()
        if self.error:
            raise self.error
        return self.result


# --- One evaluation ----------------------------------------------------------


def test_metrics_are_those_of_keras(job):
    path = job.save_after(5)
    expected = job.model.evaluate(input_fn(), verbose=0, return_dict=True)
    got = evaluator_of(job).evaluate(path)
    assert got.pop("global_step") == 5
    assert got == pytest.approx(expected, rel=1e-5)


def test_metrics_equal_a_recomputation_from_predictions(job):
    path = job.save_after(5)
    got = evaluator_of(job).evaluate(path)
    x, y = map(
        np.concatenate, zip(*input_fn().as_numpy_iterator(), strict=True)
    )
    predictions = job.model.predict(x, verbose=0)
    accuracy = ((predictions > 0.5) == (y > 0.5)).mean()
    assert got["accuracy"] == pytest.approx(accuracy, rel=1e-6)


def test_steps_limit_the_batches(job):
    path = job.save_after(2)
    x, y = next(iter(input_fn()))
    expected = job.model.evaluate(x, y, verbose=0, return_dict=True)
    got = evaluator_of(job, steps=1).evaluate(path)
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_empty_input(job):
    path = job.save_after(1)
    evaluator = Evaluator(model_fn, lambda: input_fn().take(0), job.dir)
    with pytest.raises(ValueError, match="evaluation input has no batch"):
        evaluator.evaluate(path)


@pytest.mark.parametrize(
    ("name", "directory"), [(None, "eval"), ("test", "eval_test")]
)
def test_summaries(job, name, directory):
    evaluator = evaluator_of(job, name=name)
    losses = {}
    for _ in range(2):
        metrics = evaluator.evaluate(job.save_after(3))
        losses[metrics["global_step"]] = pytest.approx(metrics["loss"])
    scalars = read_scalars(str(Path(job.dir) / directory))
    assert set(scalars[6]) == {"loss", "accuracy", "auc"}
    assert {step: scalars[step]["loss"] for step in scalars} == losses
    assert set(losses) == {3, 6}


# --- The evaluator task ------------------------------------------------------


def test_evaluates_the_last_checkpoint_of_a_finished_job(job):
    job.save_after(4)
    recorder = Recorder()
    evaluator = evaluator_of(job, exporters=[recorder])
    evaluator.run_continuously(4, start_delay_secs=1e6, throttle_secs=1e6)
    assert recorder.calls == [(4, True)]
    result = json.loads(Path(job.dir, "eval", "latest.json").read_text())
    assert result["metrics"]["global_step"] == 4
    assert result["exports"] == [f"{job.dir}/export/recorder/1"]


def test_follows_the_checkpoints(job):
    recorder = Recorder()
    evaluator = evaluator_of(job, exporters=[recorder])
    thread = Background(evaluator.run_continuously, 9, 0.0, 0.0)
    for _ in range(3):
        job.save_after(3)
        wait_for(lambda: len(recorder.calls) == job.step // 3)
    thread.get()
    assert recorder.calls == [(3, False), (6, False), (9, True)]


def test_throttle_delays_all_but_the_last(job):
    recorder = Recorder()
    evaluator = evaluator_of(job, exporters=[recorder])
    thread = Background(evaluator.run_continuously, 9, 0.0, 1e6)
    for _ in range(3):
        job.save_after(3)
        if job.step == 3:
            wait_for(lambda: recorder.calls)
    thread.get()
    assert recorder.calls == [(3, False), (9, True)]


def test_ends_when_the_chief_says_so(job):
    job.save_after(3)
    evaluation.announce_end(job.dir, 3)  # Of an earlier run of this job.
    recorder = Recorder()
    evaluator = evaluator_of(job, exporters=[recorder])
    thread = Background(evaluator.run_continuously, None, 0.0, 0.0)
    wait_for(lambda: recorder.calls == [(3, False)])
    assert thread.is_alive()
    job.save_after(2)
    evaluation.announce_end(job.dir, 5)
    thread.get()
    assert recorder.calls[-1] == (5, True) or recorder.calls[-1] == (5, False)
    assert evaluator.metrics["global_step"] == 5


def test_an_evaluator_that_starts_after_the_end_is_reminded(job, monkeypatch):
    monkeypatch.setattr(evaluation, "_REMIND_SECS", 0.2)
    job.save_after(3)
    evaluation.announce_end(job.dir, 3)
    evaluator = evaluator_of(job)
    thread = Background(evaluator.run_continuously, None, 0.0, 0.0)
    result = evaluation.wait_for_result(job.dir, None, 3, DEADLINE)
    assert result["metrics"]["global_step"] == 3
    thread.get()


def test_a_checkpoint_deleted_meanwhile_is_skipped(job, caplog):
    old = job.save_after(1)
    evaluator = evaluator_of(job)
    job.save_after(1)
    for name in os.listdir(job.dir):
        if name.startswith("model.ckpt-1."):
            os.remove(os.path.join(job.dir, name))
    assert not evaluator._take(old, None, at_once=True)
    assert "was deleted before it was evaluated" in caplog.text


def test_a_broken_newest_checkpoint_is_an_error(job):
    path = job.save_after(1)
    for name in os.listdir(job.dir):
        if name.startswith("model.ckpt-1.data"):
            os.remove(os.path.join(job.dir, name))
    with pytest.raises(tf.errors.OpError):
        evaluator_of(job)._take(path, None, at_once=True)


def test_waiting_for_a_result_ends(tmp_path, caplog):
    result = evaluation.wait_for_result(str(tmp_path), "test", 5, 0.1)
    assert result is None
    assert "evaluator_timeout_secs" in caplog.text


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "deep" / "result.json"
    evaluation.write_json(str(path), {"a": 1})
    evaluation.write_json(str(path), {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(path.parent.iterdir()) == [path]

import faulthandler
import json
import logging
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, logistic

import tfdist
from tfdist.checkpoint.checkpoints import Checkpoints, named_variables
from tfdist.estimator import evaluation, results
from tfdist.estimator.evaluator import Evaluator
from tfdist.estimator.exporters import Exporter, FinalExporter
from tfdist.estimator.results import DamagedCheckpointError
from tfdist.hooks import basic
from tfdist.hooks.events import read_scalars
from tfdist.hooks.session_run_hook import SessionRunArgs, SessionRunHook
from tfdist.hooks.summary_hooks import StepCounterHook
from tfdist.training import optimizers

DEADLINE = 180.0  # A stall of the whole machine is no failure.


def model_fn():
    return logistic(metrics=["accuracy", keras.metrics.AUC(name="auc")])


def input_fn():
    return batches(50, 16, seed=5)


class Recorder(Exporter):
    """Writes down what it is called with; returns a path object."""

    def __init__(self, name="recorder", fail_at=None):
        super().__init__(name)
        self.calls = []
        self._fail_at = fail_at

    def export(self, model, export_path, eval_result, is_the_final_export):
        self.calls.append((eval_result["global_step"], is_the_final_export))
        if eval_result["global_step"] == self._fail_at:
            raise RuntimeError("as a user's exporter may")
        return Path(export_path, str(len(self.calls)))


class Job:
    """Checkpoints of a model, as of a job that trains it."""

    def __init__(self, directory, seed=0):
        self.dir = str(directory)
        self.model = model_fn()
        optimizers.build(self.model.optimizer, self.model.trainable_variables)
        self._random = np.random.default_rng(seed)
        self._counter = tf.Variable(0, dtype=tf.int64)
        self._checkpoints = Checkpoints(
            self.dir,
            named_variables(self.model, self._counter),
            max_to_keep=2,
        )

    @property
    def step(self):
        return int(self._counter)

    def save_after(self, steps):
        """To train would take half a second, and change weights, too."""
        for weight in self.model.trainable_variables:
            change = self._random.normal(size=weight.shape)
            weight.assign_add(change.astype("float32"))
        self._counter.assign_add(steps)
        return self._checkpoints.save(self.step)

    def published(self):
        return json.loads(Path(self.dir, "eval", "latest.json").read_text())

    def failure(self):
        path = Path(self.dir, "eval", "failure.json")
        return json.loads(path.read_text())["error"] if path.exists() else None


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def evaluator_of(job, input_fn=input_fn, model_fn=model_fn, **kwargs):
    spec = {"steps": None, "start_delay_secs": 0, "throttle_secs": 0, **kwargs}
    config = tfdist.RunConfig(job.dir)
    return Evaluator(model_fn, config, tfdist.EvalSpec(input_fn, **spec))


def evaluator_task(job, max_steps, **kwargs):
    """A whole life of the evaluator task; returns the evaluator."""
    evaluator = evaluator_of(job, **kwargs)
    evaluator.run_continuously(max_steps)
    return evaluator


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Background(threading.Thread):
    """A function in a thread, whose error is not lost."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self._call, self.error = (function, args, kwargs), None
        self.start()

    def run(self):
        function, args, kwargs = self._call
        try:
            self.result = function(*args, **kwargs)
        except BaseException as error:
            self.error = error

    def get(self):
        self.join(DEADLINE)
        if self.is_alive():
            faulthandler.dump_traceback()  # Says where it hangs.
            raise TimeoutError(f"It did not end within {DEADLINE} s.")
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


def test_without_a_checkpoint_the_initial_model_is_evaluated(job):
    expected = job.model.evaluate(input_fn(), verbose=0, return_dict=True)
    got = evaluator_of(job).evaluate(None)
    assert got == pytest.approx({**expected, "global_step": 0}, rel=1e-5)


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


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("compile", "loss"),
        ("weighted", "loss"),
        ("attribute", "loss"),
        ("compile", "global_step"),
    ],
)
def test_a_metric_with_a_reserved_name(job, where, name):
    metric = keras.metrics.MeanAbsoluteError(name=name)

    def reserved():
        model = logistic(metrics=[metric] if where == "compile" else [])
        if where == "weighted":
            model.compile("sgd", "mse", weighted_metrics=[metric])
        if where == "attribute":
            model.mine = metric
        return model

    evaluator = evaluator_of(job, model_fn=reserved)
    with pytest.raises(ValueError, match=f"has a metric called '{name}'"):
        evaluator.evaluate(None)


def test_metrics_with_almost_reserved_names(job):
    def two_losses():
        names = ["my_loss", "Loss", "global_steps"]
        return logistic(metrics=[keras.metrics.AUC(name=n) for n in names])

    got = evaluator_of(job, model_fn=two_losses).evaluate(None)
    assert set(got) == {
        "loss",
        "my_loss",
        "Loss",
        "global_steps",
        "global_step",
    }


def test_a_tracker_in_the_place_of_keras_own(job):
    """As in Keras' guide to `compute_loss`: each batch counts as much."""

    class Tracks(keras.Model):
        @property
        def metrics(self):
            return [self.tracker]

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.tracker.update_state(loss)
            return loss

    def tracks():
        base = logistic()
        model = Tracks(base.inputs[0], base.outputs[0])
        model.tracker = keras.metrics.Mean(name="loss")
        model.compile("sgd", "binary_crossentropy")
        return model

    expected = tracks().evaluate(input_fn(), verbose=0)
    got = evaluator_of(job, model_fn=tracks).evaluate(None)
    assert got == {"loss": pytest.approx(expected), "global_step": 0}


def empty():
    return input_fn().take(0)


def dropped():
    return batches(5).unbatch().batch(8, drop_remainder=True)


@pytest.mark.parametrize("input_fn", [empty, dropped])
def test_no_batch(job, input_fn):
    evaluator = evaluator_of(job, input_fn, name="test")
    message = r"no batch to evaluate: the `input_fn` of the EvalSpec .*/eval_t"
    with pytest.raises(ValueError, match=message):
        evaluator.evaluate(job.save_after(1))


def endless():
    return input_fn().repeat()


def test_a_dataset_that_never_ends(job, tmp_path):
    """Refused before anything is trained, by whoever would evaluate."""
    path, message = job.save_after(1), "never ends, and `steps` is None"
    with pytest.raises(ValueError, match=message):
        evaluator_of(job, endless).evaluate(path)
    with pytest.raises(ValueError, match=message):
        evaluator_task(job, 1, input_fn=endless)
    assert job.failure().startswith("ValueError: The `input_fn`")
    estimator = tfdist.Estimator(model_fn, tfdist.RunConfig(tmp_path / "new"))
    with pytest.raises(ValueError, match=message):
        tfdist.train_and_evaluate(
            estimator,
            tfdist.TrainSpec(input_fn),
            tfdist.EvalSpec(endless, steps=None),
        )
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(ValueError, match=message):
        estimator.evaluate(endless)


def test_what_steps_or_a_hook_ends_may_be_endless(job):
    path = job.save_after(1)
    stopped = evaluator_of(job, endless, hooks=[Calls(stop_after=2)])
    limited = evaluator_of(job, endless, steps=2)
    assert stopped.evaluate(path) == limited.evaluate(path)


# --- Hooks -------------------------------------------------------------------


class Calls(SessionRunHook):
    """Writes down its calls; may ask to stop after some batches."""

    def __init__(self, stop_after=None, error=None):
        self.calls, self.results = [], []
        self._stop_after, self._error = stop_after, error
        self._runs = 0

    def begin(self):
        self.calls.append("begin")
        self._runs = 0

    def after_create_session(self, session, coord):
        self.calls.append("after_create_session")
        self.session = session

    def before_run(self, run_context):
        self.calls.append("before_run")

    def after_run(self, run_context, run_values):
        self.calls.append("after_run")
        self.results.append(run_values.results)
        self._runs += 1
        if self._runs == self._stop_after:
            run_context.request_stop()
            if self._error:
                raise self._error

    def end(self, session):
        self.calls.append("end")


def tf1_calls(**kwargs):
    """What TF1's session, in which Estimator evaluated, calls."""
    hook = Calls(**kwargs)
    with tf.Graph().as_default():
        iterator = tf.compat.v1.data.make_one_shot_iterator(input_fn())
        batch = iterator.get_next()
        with tf.compat.v1.train.MonitoredSession(hooks=[hook]) as session:
            while not session.should_stop():
                session.run(batch)
    return hook.calls


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"stop_after": 2},
        {"stop_after": 2, "error": StopIteration()},
        {
            "stop_after": 2,
            "error": tf.errors.OutOfRangeError(None, None, "as in TF1"),
        },
    ],
    ids=["input ends", "request", "StopIteration", "OutOfRangeError"],
)
def test_hooks_are_called_as_in_tf1(job, kwargs):
    hook = Calls(**kwargs)
    evaluator = evaluator_of(job, hooks=[hook])
    evaluator.evaluate(job.save_after(1))
    expected = tf1_calls(**kwargs)
    assert hook.calls == expected
    evaluator.evaluate(job.save_after(1))
    assert hook.calls == 2 * expected


def test_steps_stop_before_another_run(job):
    """As Estimator's own hook did, which came after the user's."""
    hook = Calls()
    evaluator_of(job, hooks=[hook], steps=2).evaluate(job.save_after(1))
    assert hook.calls[2:] == 2 * ["before_run", "after_run"] + ["end"]


def test_hooks_are_not_ended_after_an_error(job):
    hook = Calls(stop_after=1, error=LookupError("a mistake"))
    with pytest.raises(LookupError):
        evaluator_of(job, hooks=[hook]).evaluate(job.save_after(1))
    assert "end" not in hook.calls


def test_a_stop_cuts_the_evaluation_short(job):
    path = job.save_after(1)
    cut = evaluator_of(job, hooks=[Calls(stop_after=2)]).evaluate(path)
    assert cut == evaluator_of(job, steps=2).evaluate(path)
    assert cut != evaluator_of(job).evaluate(path)


def test_a_stop_before_the_first_batch(job):
    class Stop(SessionRunHook):
        def after_create_session(self, session, coord):
            coord.request_stop()

    with pytest.raises(ValueError, match="or a hook stopped before the first"):
        evaluator_of(job, hooks=[Stop()]).evaluate(job.save_after(1))


def test_what_hooks_see(job):
    hook = Calls()
    path = job.save_after(3)
    metrics = evaluator_of(job, hooks=[hook]).evaluate(path)
    session = hook.session
    assert session.step == 4
    assert int(session.global_step) == 3
    assert session.restored_from == path
    assert session.model.name == job.model.name
    kernel = session.variables["sequential/dense/kernel"]
    np.testing.assert_array_equal(kernel, job.model.weights[0])
    last = {**hook.results[-1], "global_step": 3}
    assert last == metrics
    first = evaluator_of(job, steps=1).evaluate(path)
    assert {**hook.results[0], "global_step": 3} == first


def test_hooks_fetch_by_name(job):
    class Fetch(Calls):
        def before_run(self, run_context):
            return SessionRunArgs({"a": "loss", "b": ["global_step"]})

    hook = Fetch()
    metrics = evaluator_of(job, hooks=[hook]).evaluate(job.save_after(2))
    assert hook.results[-1] == {"a": metrics["loss"], "b": [2]}


def test_hooks_of_training_that_only_look(job, caplog):
    final = basic.FinalOpsHook(["sequential/dense/bias", "global_step"])
    nan = basic.NanTensorHook()
    line = basic.LoggingTensorHook(["accuracy"], every_n_iter=3)
    with caplog.at_level(logging.INFO, "tfdist.hooks.basic"):
        evaluator = evaluator_of(job, hooks=[final, nan, line])
        evaluator.evaluate(job.save_after(2))
    bias, step = final.final_ops_values
    assert bias == job.model.weights[1].numpy()
    assert step == 2
    lines = [r for r in caplog.records if r.name == "tfdist.hooks.basic"]
    assert len(lines) == 2  # Of batches 1 and 4.


def test_a_hook_that_measures_training_is_told_where_it_belongs(job):
    hook = StepCounterHook(every_n_steps=2)
    with pytest.raises(AttributeError, match=r"'input_secs'.*TrainSpec\(hooks"):
        evaluator_of(job, hooks=[hook]).evaluate(job.save_after(1))


def test_threads_of_hooks_are_joined(job):
    class Thread(SessionRunHook):
        def after_create_session(self, session, coord):
            self.thread = threading.Thread(target=coord.wait_for_stop)
            coord.register_thread(self.thread)
            self.thread.start()

    hook = Thread()
    evaluator_of(job, hooks=[hook]).evaluate(job.save_after(1))
    assert not hook.thread.is_alive()


def test_a_thread_of_a_hook_that_stays_is_left_alone(job, monkeypatch):
    """As in TF1, and as when training ends."""
    monkeypatch.setattr(evaluation, "_GRACE_SECS", 0.1)
    released = threading.Event()

    class Thread(SessionRunHook):
        def after_create_session(self, session, coord):
            thread = threading.Thread(target=released.wait, daemon=True)
            coord.register_thread(thread)
            thread.start()

    evaluator_of(job, hooks=[Thread()]).evaluate(job.save_after(1))
    released.set()


# --- The evaluator task ------------------------------------------------------


def test_evaluates_the_last_checkpoint_of_a_finished_job(job):
    path = job.save_after(4)
    recorder = Recorder()
    evaluator = evaluator_task(
        job,
        4,
        start_delay_secs=1e6,
        throttle_secs=1e6,
        exporters=[recorder],
    )
    assert recorder.calls == [(4, True)]
    assert evaluator.evaluated == path
    result = job.published()
    assert result["metrics"] == evaluator.result["metrics"]
    assert result["metrics"]["global_step"] == 4
    assert result["exports"] == [f"{job.dir}/export/recorder/1"]


def test_a_killed_export_of_this_job_is_removed(job):
    job.save_after(2)
    export = Path(job.dir, "export")
    of_another = export / "another" / f"temp-{int(time.time()) - 2}-ab"
    ours = export / "served" / of_another.name
    for path in (of_another, ours):
        path.mkdir(parents=True)
    evaluator_task(job, 2, exporters=[FinalExporter("served")])
    assert of_another.exists()
    assert [p.name.isdecimal() for p in ours.parent.iterdir()] == [True]


def test_follows_the_checkpoints(job):
    recorder = Recorder()
    thread = Background(evaluator_task, job, 9, exporters=[recorder])
    for _ in range(3):
        job.save_after(3)
        wait_for(lambda: len(recorder.calls) == job.step // 3)
    thread.get()
    assert recorder.calls == [(3, False), (6, False), (9, True)]


def test_throttle_delays_all_but_the_last(job):
    recorder = Recorder()
    thread = Background(
        evaluator_task, job, 9, throttle_secs=1e6, exporters=[recorder]
    )
    for _ in range(3):
        job.save_after(3)
        if job.step == 3:
            wait_for(lambda: recorder.calls)
    thread.get()
    assert recorder.calls == [(3, False), (9, True)]


def test_ends_when_the_chief_says_so(job):
    """The last checkpoint was not known to be the last when it came."""
    job.save_after(3)
    results.announce_end(job.dir, 3)  # Of an earlier run of this job.
    recorder, batches_seen = Recorder(), Calls()
    thread = Background(
        evaluator_task, job, None, exporters=[recorder], hooks=[batches_seen]
    )
    wait_for(lambda: recorder.calls == [(3, False)])
    job.save_after(2)
    wait_for(lambda: job.published()["metrics"]["global_step"] == 5)
    assert thread.is_alive()
    assert not job.published()["final"]
    results.announce_end(job.dir, 5)
    thread.get()
    assert recorder.calls == [(3, False), (5, False), (5, True)]
    assert batches_seen.calls.count("end") == 2
    assert job.published()["final"]


def test_an_evaluator_that_starts_after_the_end_is_told_again(job):
    job.save_after(3)
    results.announce_end(job.dir, 3)
    thread = Background(evaluator_task, job, None)
    result = results.wait_for_result(job.dir, None, 3, DEADLINE)
    assert result["metrics"]["global_step"] == 3
    thread.get()


# --- An evaluator that is started again --------------------------------------


@pytest.mark.parametrize("published", [True, False])
def test_it_ends_though_the_chief_has_gone(job, published):
    """And makes the final export, if its predecessor did not."""
    job.save_after(3)
    if published:
        evaluator_task(job, 3, exporters=[Recorder()])
    results.announce_end(job.dir, 3)
    recorder = Recorder()
    evaluator = evaluator_of(job, start_delay_secs=1e6, exporters=[recorder])
    start = time.monotonic()
    thread = Background(evaluator.run_continuously, None, 1.0)
    thread.get()
    assert 1.0 <= time.monotonic() - start < 20
    assert recorder.calls == ([] if published else [(3, True)])
    assert job.published()["final"]


@pytest.mark.parametrize(
    ("directory", "secs"), [("gs://bucket/job", 5.0), ("/tmp/job", 0.5)]
)
def test_an_object_store_is_asked_less_often(directory, secs):
    assert results.poll_secs(directory) == secs


@pytest.mark.slow
def test_it_follows_a_chief_that_comes_back_with_more_data(job):
    job.save_after(3)
    evaluator_task(job, 3)
    results.announce_end(job.dir, 3)
    recorder = Recorder()
    evaluator = evaluator_of(job, exporters=[recorder])
    thread = Background(evaluator.run_continuously, None, 1.5)
    results.retract_end(job.dir)
    time.sleep(2.5)
    assert thread.is_alive()
    job.save_after(2)
    results.announce_end(job.dir, 5)
    thread.get()
    assert recorder.calls[-1] == (5, True)


@pytest.mark.slow
def test_a_chief_takes_back_the_end_of_an_earlier_one(tmp_path):
    config = tfdist.RunConfig(tmp_path, save_checkpoints_steps=2)
    seen = []

    def train_input_fn():
        seen.append(results.read_json(results.done_path(str(tmp_path))))
        return batches(40, 8)

    for _ in range(2):
        tfdist.train_and_evaluate(
            tfdist.Estimator(model_fn, config),
            tfdist.TrainSpec(train_input_fn),
            tfdist.EvalSpec(input_fn),
        )
    assert seen == [None, None]
    done = results.read_json(results.done_path(str(tmp_path)))
    assert done["global_step"] == 10


def test_nothing_is_evaluated_twice(job):
    job.save_after(3)
    first = evaluator_task(job, 3, exporters=[Recorder()])
    recorder, batches_seen = Recorder(), Calls()
    again = evaluator_task(job, 3, exporters=[recorder], hooks=[batches_seen])
    assert again.result == first.result
    assert recorder.calls == batches_seen.calls == []


def test_a_missing_final_export_is_made(job):
    """Of an evaluator that died before it knew that training had ended."""
    path = job.save_after(3)
    dead = evaluator_of(job, exporters=[FinalExporter("final")])
    metrics = dead.evaluate(path)
    dead.export(is_the_final_export=False)
    assert dead.result["exports"] == [None]
    batches_seen = Calls()
    again = evaluator_task(
        job, 3, exporters=[FinalExporter("final")], hooks=[batches_seen]
    )
    assert batches_seen.calls == []
    assert again.result["metrics"] == metrics
    (export,) = again.result["exports"]
    serve = tf.saved_model.load(export).signatures["serving_default"]
    x, _ = next(iter(input_fn()))
    (outputs,) = serve(x).values()
    np.testing.assert_allclose(outputs, job.model(x), rtol=1e-5)
    assert job.published()["exports"] == [export]


def test_what_another_exporter_made_is_kept(job):
    class Once(Recorder):
        def export(self, *args):
            path = super().export(*args)
            return path if len(self.calls) == 1 else None

    once, final = Once("once"), Recorder("final")
    evaluator = evaluator_of(job, exporters=[once, final])
    evaluator.evaluate(job.save_after(3))
    evaluator.export(is_the_final_export=False)
    evaluator.run_continuously(3)
    assert once.calls == final.calls == [(3, False), (3, True)]
    assert evaluator.result["exports"] == [
        f"{job.dir}/export/once/1",
        f"{job.dir}/export/final/2",
    ]


def test_a_new_exporter_exports(job):
    job.save_after(3)
    evaluator_task(job, 3, exporters=[Recorder("a")])
    recorders = [Recorder("a"), Recorder("b")]
    evaluator_task(job, 3, exporters=recorders)
    assert [r.calls for r in recorders] == 2 * [[(3, True)]]


@pytest.mark.slow
def test_another_job_in_the_directory_is_evaluated(tmp_path):
    """Its checkpoints were deleted, its evaluation was not."""
    old = Job(tmp_path)
    old.save_after(3)
    before = evaluator_task(old, 3).result["metrics"]
    for path in tmp_path.glob("*"):
        if path.is_file():
            path.unlink()
    new = Job(tmp_path, seed=7)
    new.save_after(3)
    assert results.wait_for_result(new.dir, None, 3, 0.1) is None
    assert evaluator_task(new, 3).result["metrics"]["loss"] != before["loss"]
    assert results.wait_for_result(new.dir, None, 3, 0.1)


def test_a_chief_that_waits_for_an_evaluator_says_so(
    tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO", "tfdist")
    monkeypatch.setattr(results, "_SAY_SECS", 0.2)
    assert results.wait_for_result(str(tmp_path), None, 3, 1.5) is None
    assert "1 of at most 1.5 s. Is the evaluator running?" in caplog.text


# --- Damaged checkpoints -----------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "no data": ("data*", Path.unlink),
    "half the data": ("data*", cut),
    "no index": ("index", Path.unlink),
    "half the index": ("index", cut),
    "another index": ("index", lambda path: path.write_bytes(b"x" * 999)),
}


def damage(path, how):
    pattern, act = DAMAGES[how]
    for file in Path(path).parent.glob(f"{Path(path).name}.{pattern}"):
        act(file)


@pytest.mark.parametrize(
    "how",
    [
        "half the data",
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in DAMAGES
            if how != "half the data"
        ),
    ],
)
def test_the_newest_is_damaged(job, caplog, how):
    job.save_after(1)
    path = job.save_after(1)
    damage(path, how)
    recorder = Recorder()
    thread = Background(evaluator_task, job, 5, exporters=[recorder])
    wait_for(lambda: recorder.calls == [(1, False)])
    job.save_after(3)
    thread.get()
    assert recorder.calls == [(1, False), (5, True)]
    assert caplog.text.count(f"{path} is damaged or missing.") == 1
    assert job.failure() is None


@pytest.mark.parametrize("how", ["half the data", "no index"])
def test_the_last_is_damaged(job, how):
    job.save_after(1)
    damage(job.save_after(1), how)
    recorder = Recorder()
    with pytest.raises(
        DamagedCheckpointError, match=r"ckpt-2 is damaged .* last checkpoint"
    ):
        evaluator_task(job, 2, exporters=[recorder])
    assert recorder.calls == []
    assert "DamagedCheckpointError: " in job.failure()


def test_the_newest_is_damaged_and_turns_out_to_be_the_last(job, caplog):
    job.save_after(1)
    damage(job.save_after(1), "half the data")
    thread = Background(evaluator_task, job, None)
    wait_for(lambda: "It is skipped" in caplog.text)
    results.announce_end(job.dir, 2)
    with pytest.raises(DamagedCheckpointError, match="last checkpoint"):
        thread.get()


def test_a_checkpoint_deleted_meanwhile_is_skipped(job, caplog):
    """While the model is built, the first time."""
    job.save_after(1)

    def slow_model_fn():
        if job.step == 1:
            job.save_after(1)
            job.save_after(1)
        return model_fn()

    recorder = Recorder()
    evaluator_task(job, 3, model_fn=slow_model_fn, exporters=[recorder])
    assert recorder.calls == [(3, True)]
    assert "was deleted before it was evaluated" in caplog.text
    assert "damaged" not in caplog.text


def test_a_checkpoint_of_another_model_is_not_called_damaged(job):
    job.save_after(1)

    def wider():
        return logistic(hidden=[keras.layers.Dense(3, name="wide")])

    with pytest.raises(ValueError, match="does not fit the model"):
        evaluator_task(job, 1, model_fn=wider)
    assert job.failure().startswith("ValueError: Checkpoint ")


# --- Errors, and the chief that waits ----------------------------------------


@pytest.mark.slow
def test_an_exporter_that_raises(job):
    """The error is there until the evaluator is; then it starts over."""
    job.save_after(3)
    with pytest.raises(RuntimeError, match="as a user's exporter may"):
        evaluator_task(job, 3, exporters=[Recorder(fail_at=3)])
    assert job.failure() == "RuntimeError: as a user's exporter may"
    assert not Path(job.dir, "eval", "latest.json").exists()
    recorder = Recorder()
    evaluator_task(job, 3, exporters=[recorder])
    assert recorder.calls == [(3, True)]
    assert job.failure() is None


def failing_evaluator(job, times):
    """Dies so many times, as if it were started again each time."""
    for _ in range(times):
        with pytest.raises(ValueError, match="no batch"):
            evaluator_task(job, 3, input_fn=empty)
        time.sleep(2 * results.POLL_SECS)
    return evaluator_task(job, 3)


@pytest.mark.slow
def test_a_chief_does_not_give_up_at_the_first_failure(job, caplog):
    job.save_after(3)
    thread = Background(failing_evaluator, job, 2)
    result = results.wait_for_result(job.dir, None, 3, DEADLINE)
    evaluator = thread.get()
    assert result["metrics"] == evaluator.result["metrics"]
    assert caplog.text.count("may be started again: ValueError: There") >= 1


@pytest.mark.slow
def test_a_chief_gives_up_at_the_third_failure(job, caplog):
    job.save_after(3)
    thread = Background(failing_evaluator, job, 3)
    start = time.monotonic()
    assert results.wait_for_result(job.dir, None, 3, DEADLINE) is None
    assert time.monotonic() - start < DEADLINE / 2
    assert "The evaluator failed: ValueError: There is no batch" in caplog.text
    thread.get()


def test_a_chief_gives_up_an_evaluator_that_does_not_come_back(
    job, monkeypatch, caplog
):
    monkeypatch.setattr(results, "_COME_BACK_SECS", 1.0)
    job.save_after(3)
    with pytest.raises(ValueError, match="no batch"):
        evaluator_task(job, 3, input_fn=empty)
    start = time.monotonic()
    assert results.wait_for_result(job.dir, None, 3, DEADLINE) is None
    assert 1 <= time.monotonic() - start < DEADLINE / 2
    assert caplog.text.count("may be started again") == 1


def test_a_result_that_is_not_the_last_is_waited_for(job):
    path = job.save_after(3)
    evaluator = evaluator_of(job, exporters=[Recorder()])
    evaluator.evaluate(path)
    for final in (False, True):
        evaluator.export(final)
        result = results.wait_for_result(job.dir, None, 3, 0.1)
        assert (result is not None) == final


def test_waiting_for_a_result_ends(tmp_path, caplog):
    result = results.wait_for_result(str(tmp_path), "test", 5, 0.1)
    assert result is None
    assert "evaluator_timeout_secs" in caplog.text


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "deep" / "result.json"
    results.write_json(str(path), {"a": 1})
    results.write_json(str(path), {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_losses_of_outputs_are_those_of_keras(tmp_path, kind):
    """Batches of other sizes, whose size is known from no dense feature."""
    combined = {"ragged": tf.RaggedTensor.from_tensor}.get(
        kind, tf.sparse.from_dense
    )

    def model_fn():
        ids = keras.Input([2], dtype="int64", **{kind: True})
        table = tfdist.PartitionedEmbedding(9, 2, combiner="sum")
        outputs = [keras.layers.Dense(1, name=n)(table(ids)) for n in "ab"]
        model = keras.Model(ids, outputs)
        model.compile("sgd", ["mse", "mae"])
        return model

    def input_fn():
        ids = tf.reshape(tf.range(1, 17, dtype=tf.int64) % 9, [8, 2])
        y = tf.reshape(tf.range(8.0), [8, 1])
        data = tf.data.Dataset.from_tensor_slices((ids, y)).batch(5)
        return data.map(lambda ids, y: (combined(ids), (y, y)))

    run = tfdist.RunConfig(str(tmp_path))
    estimator = tfdist.Estimator(model_fn, run)
    estimator.train(input_fn)
    model = estimator.restored_model()
    wanted = model.evaluate(input_fn(), verbose=0, return_dict=True)
    found = estimator.evaluate(input_fn)
    assert {"a_loss", "b_loss"} < wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)

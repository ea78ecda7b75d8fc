import contextlib
import csv
import functools
import itertools
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from counting import counting_session
from pace import slow_but
from small_models import batches, local_loop, logistic

import tfdist
from tests.cases import EachStep, Job, all_cases, outcome
from tfdist._tf import versions
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.hooks.basic import LoggingTensorHook, StopAtStepHook
from tfdist.hooks.callbacks import KerasCallbackHook
from tfdist.hooks.events import EventFile, read_scalars
from tfdist.hooks.saving_hooks import CheckpointSaverHook
from tfdist.hooks.session_run_hook import steps_allowed
from tfdist.launch.testing import LocalCluster
from tfdist.session.monitored_session import MonitoredTrainingSession, Trainable
from tfdist.training.multi_optimizer import MultiOptimizer

callbacks = keras.callbacks
HERE = Path(__file__).parent
STEPS = 8  # Of an epoch.


def train(
    hooks, last_step, fail_at=(), optimizer=None, metrics=("mse",), **kwargs
):
    """Trains a model; returns it and the final step."""
    failures, made = list(fail_at), []

    def build():
        model = logistic(optimizer and optimizer(), metrics=metrics)
        made.append(model)
        loop, global_step = local_loop(model, batches().repeat())
        run = loop.run

        def failing(num_steps, watch=lambda: None, ahead=0):
            if failures and int(global_step.numpy()) >= failures[0]:
                del failures[0]
                raise tf.errors.UnavailableError(None, None, "gone")
            return run(num_steps, watch, ahead)

        loop.run = failing
        variables = checkpoints.named_variables(model)
        return Trainable(loop, global_step, variables, model=model)

    hooks = [*hooks, StopAtStepHook(last_step=last_step)]
    kwargs = {
        "save_summaries_steps": None,
        "log_step_count_steps": None,
        **kwargs,
    }
    with MonitoredTrainingSession(build, hooks=hooks, **kwargs) as session:
        while not session.should_stop():
            session.run()
    return made[-1], session.step


def fit(these, epochs):
    model = logistic(metrics=["mse"])
    model.fit(
        batches().repeat(),
        steps_per_epoch=STEPS,
        epochs=epochs,
        callbacks=these,
        verbose=0,
    )
    return model


class Recorder(callbacks.Callback):
    """Records all calls of supported methods, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs):
        assert logs == {}
        self.calls.append("train begins")

    def on_epoch_begin(self, epoch, logs):
        assert logs == {}
        self.calls.append(f"epoch {epoch} begins")

    def on_train_batch_begin(self, batch, logs):
        assert logs == {}

    def on_train_batch_end(self, batch, logs):
        assert logs.keys() == {"loss", "mse"}
        self.calls.append(batch)

    def on_epoch_end(self, epoch, logs):
        self.calls.append(f"epoch {epoch} ends")

    def on_train_end(self, logs):
        self.calls.append("train ends")


def rows(path):
    with open(path) as file:
        return [
            {k: float(v) for k, v in row.items() if v != "NA"}
            for row in csv.DictReader(file)
        ]


# --- As under fit ------------------------------------------------------------


def test_logs_are_those_of_fit(tmp_path):
    fit([callbacks.CSVLogger(str(tmp_path / "fit.csv"))], 3)
    hook = KerasCallbackHook(
        [callbacks.CSVLogger(str(tmp_path / "ours.csv"))], STEPS
    )
    # Other hooks cut an epoch into several runs.
    train([hook, LoggingTensorHook(["loss"], 3)], 3 * STEPS)
    expected = rows(tmp_path / "fit.csv")
    assert len(expected) == 3
    for ours, theirs in zip(rows(tmp_path / "ours.csv"), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("name", ["a metric that is", "metrics of a train"])
def test_what_a_callback_evaluates_is_not_in_the_logs(name, tmp_path):
    (case,) = (c for c in all_cases() if c.name.startswith(name))
    outcome(case, Job("one process", tmp_path))


class Most(keras.metrics.Metric):
    """The largest prediction, which does not add up over steps."""

    def __init__(self):
        super().__init__(name="most")
        self.most = self.add_variable((), "zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(
            keras.ops.maximum(self.most, keras.ops.max(y_pred)),
        )

    def result(self):
        return self.most


def test_metrics_that_do_not_add_up_have_one_epoch():
    def hooks(*epochs):
        return [KerasCallbackHook([], steps) for steps in epochs]

    with pytest.raises(ValueError, match=r"steps_per_epoch=\[6, 8\]"):
        train(hooks(8, 6), STEPS, metrics=[Most()])
    train(hooks(8, 8), STEPS, metrics=[Most()])
    train(hooks(8, 6), STEPS)  # Sums work with any epochs.


def learning_rates(these, make):
    """The learning rate at the end of each epoch, recorded by a callback."""
    seen = []
    look = callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(
            float(look.model.optimizer.learning_rate)
        )
    )
    make([*these, look])
    return seen


@pytest.mark.parametrize(
    "make",
    [
        lambda: callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        lambda: callbacks.ReduceLROnPlateau(
            "loss", patience=1, min_delta=10.0, factor=0.5
        ),
    ],
)
def test_the_learning_rate_is_that_of_fit(make):
    expected = learning_rates([make()], lambda these: fit(these, 4))
    actual = learning_rates(
        [make()],
        lambda these: train([KerasCallbackHook(these, STEPS)], 4 * STEPS),
    )
    assert actual == pytest.approx(expected)
    assert len({*actual}) > 1


def test_the_learning_rate_reaches_the_training():
    stop = callbacks.LearningRateScheduler(lambda epoch: 0.0)
    trained, _ = train([KerasCallbackHook([stop], STEPS)], 2 * STEPS)
    untrained = logistic()
    for a, b in zip(
        trained.get_weights(), untrained.get_weights(), strict=True
    ):
        assert a == pytest.approx(b)


def test_early_stopping_stops_where_fit_stops():
    def early():
        return callbacks.EarlyStopping("loss", patience=2, min_delta=10.0)

    theirs = early()
    fit([theirs], 10)
    ours = early()
    _, step = train([KerasCallbackHook([ours], STEPS)], 10 * STEPS)
    assert ours.stopped_epoch == theirs.stopped_epoch > 0
    assert step == (ours.stopped_epoch + 1) * STEPS


def test_tensorboard(tmp_path):
    board = callbacks.TensorBoard(str(tmp_path))
    train([KerasCallbackHook([board], STEPS)], 2 * STEPS)
    scalars = read_scalars(str(tmp_path / "train"))
    assert list(scalars) == [0, 1]
    assert scalars[1].keys() == {
        "epoch_loss",
        "epoch_mse",
        "epoch_learning_rate",
    }


# --- The order of calls ------------------------------------------------------


def test_a_callback_that_counts_batches_sees_those_of_fit(caplog):
    theirs, ours = Recorder(), Recorder()
    fit([theirs], 2)
    train([KerasCallbackHook([ours], STEPS)], 2 * STEPS)
    assert ours.calls == theirs.calls
    assert (
        "Recorder.on_train_batch_begin is called after every step"
        in caplog.text
    )


def test_calls():
    recorder = Recorder()
    train([KerasCallbackHook([recorder], 4)], 10)
    assert recorder.calls == [
        "train begins",
        "epoch 0 begins",
        *range(4),
        "epoch 0 ends",
        "epoch 1 begins",
        *range(4),
        "epoch 1 ends",
        "epoch 2 begins",
        *range(2),
        "epoch 2 ends",
        "train ends",
    ]
    assert recorder.params["steps"] == 4


def test_a_restarted_job_goes_on_in_its_epoch(tmp_path):
    train([], 6, checkpoint_dir=str(tmp_path))
    recorder = Recorder()
    train([KerasCallbackHook([recorder], 4)], 8, checkpoint_dir=str(tmp_path))
    assert recorder.calls == [
        "train begins",
        "epoch 1 begins",
        *(2, 3),
        "epoch 1 ends",
        "train ends",
    ]


def test_a_restarted_job_keeps_the_rows_of_its_log(tmp_path):
    for last_step in (4, 10, 12):
        log = callbacks.CSVLogger(str(tmp_path / "log.csv"))
        job = {"checkpoint_dir": str(tmp_path / "job")}
        train([KerasCallbackHook([log], 4)], last_step, **job)
    found = [row["epoch"] for row in rows(tmp_path / "log.csv")]
    assert found == [0, 1, 2, 2]  # The third call ended in an epoch.


def test_a_recovery_ends_no_epoch_twice(tmp_path):
    recorder = Recorder()
    model, step = train(
        [KerasCallbackHook([recorder], 4)],
        12,
        fail_at=[8],
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=6,
    )
    assert step == 12
    assert recorder.model is model
    assert recorder.calls.count("train begins") == 1
    assert [call for call in recorder.calls if "epoch" in str(call)] == [
        "epoch 0 begins",
        "epoch 0 ends",
        "epoch 1 begins",
        "epoch 1 ends",
        *["epoch 2 begins"] * 2,
        "epoch 2 ends",
    ]


@pytest.mark.parametrize("stops_at", [-1, 1])
def test_a_recovery_where_an_epoch_ends_ends_it(stops_at, tmp_path):
    """As if a ps died while the epoch's checkpoint was evaluated."""

    class Stops(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == stops_at

    class Gone(tfdist.hooks.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            if global_step_value == 8 and failures:
                raise failures.pop()

    found = []
    for failures in ([], [tf.errors.UnavailableError(None, None, "gone")]):
        directory, history = tmp_path / f"{len(failures)}", callbacks.History()
        saver = CheckpointSaverHook(directory, save_steps=4, listeners=[Gone()])
        hook = KerasCallbackHook([history, Stops()], 4)
        _, step = train([saver, hook], 12, checkpoint_dir=directory)
        found.append([step, *history.epoch, *history.history["loss"]])
    assert found[0] == pytest.approx(found[1])
    assert found[0][0] == (8 if stops_at == 1 else 12)


@pytest.mark.parametrize("saves", [3, 4])
@pytest.mark.parametrize("fails_at", [1, 2])
@pytest.mark.parametrize("in_callback", [True, False])
def test_a_recovery_while_callbacks_end_an_epoch(
    fails_at, in_callback, saves, tmp_path
):
    """As if a ps died while one of them reads weights, or a later hook does."""

    class Fails(callbacks.Callback):
        ends = 0

        def on_epoch_end(self, epoch, logs=None):
            self.ends += 1
            if epoch == fails_at and in_callback and failures:
                raise failures.pop()

    class FailsLater(EachStep):
        def after_run(self, run_context, run_values):
            at_end = run_context.session.step == 4 * fails_at + 4
            if at_end and not in_callback and failures:
                raise failures.pop()

    found = []
    for failures in ([], [tf.errors.UnavailableError(None, None, "gone")]):
        these = [
            callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=10.0),
            callbacks.EarlyStopping("loss", patience=2, min_delta=10.0),
            Fails(),
            callbacks.History(),
        ]
        model, step = train(
            [KerasCallbackHook(these, 4), FailsLater()],
            20,
            checkpoint_dir=str(tmp_path / str(len(failures))),
            save_checkpoint_steps=saves,
        )
        *_, fails, history = these
        rate = float(model.optimizer.learning_rate)
        found.append([step, rate, fails.ends, *history.epoch])
        found[-1] += history.history["loss"] + history.history["learning_rate"]
    assert found[0] == pytest.approx(found[1])
    assert found[0][0] == 12


class Setting(callbacks.Callback):
    """Sets learning rates at the start and end of an epoch, and weights."""

    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate *= 0.5

    def on_epoch_end(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        self.model.optimizer.learning_rate = rate + 0.1 * epoch
        if self.shift:
            shifted = [weight + epoch for weight in self.model.get_weights()]
            self.model.set_weights(shifted)


@pytest.mark.parametrize(
    ("saves", "fail_at"),
    slow_but([(3, 8), (4, 5)], itertools.product([3, 4], [5, 7, 8, 9])),
)
def test_a_recovery_loses_and_repeats_nothing_set(saves, fail_at, tmp_path):
    """With checkpoints at the end of an epoch only, or also within it."""
    found = []
    ends_again = saves == 3 and fail_at in (7, 8)
    for failures in ([], [fail_at]):
        model, _ = train(
            [KerasCallbackHook([Setting(shift=not ends_again)], 4)],
            16,
            failures,
            lambda: keras.optimizers.SGD(0.5),
            checkpoint_dir=str(tmp_path / str(len(failures))),
            save_checkpoint_steps=saves,
        )
        rate = float(model.optimizer.learning_rate)
        found.append([rate, *map(np.ravel, model.get_weights())])
    np.testing.assert_allclose(*map(np.hstack, found), rtol=1e-6)


def test_weights_that_are_not_set_again(tmp_path, caplog):
    train(
        [KerasCallbackHook([Setting(shift=True)], 4)],
        9,
        [8],
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=3,
    )
    assert caplog.text.count("is not set again") == 2


def test_training_that_stops_where_an_epoch_begins():
    """It stops after one batch, as in `fit`."""

    class Stops(callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    steps = [
        train([KerasCallbackHook([Stops()], STEPS)], 99)[1],
        int(fit([Stops()], epochs=3).optimizer.iterations),
    ]
    assert steps == [STEPS + 1] * 2


def test_evaluations_are_val_logs(tmp_path):
    seen = {}

    class Evaluator(callbacks.Callback):
        """As if an evaluation ended during epochs 0 and 2."""

        def on_train_batch_end(self, batch, logs=None):
            epoch = len(seen)
            if epoch != 1:
                file = EventFile(str(tmp_path))
                file.write(epoch * STEPS, {"auc": epoch / 10})

        def on_epoch_end(self, epoch, logs=None):
            seen[epoch] = logs.get("val_auc")

    # What a job has left that went on to there, before it went back.
    EventFile(str(tmp_path)).write(1000, {"auc": 0.9})
    hook = KerasCallbackHook([Evaluator()], STEPS, eval_dir=str(tmp_path))
    train([hook], 3 * STEPS)
    assert seen == pytest.approx({0: 0.0, 1: None, 2: 0.2})


def test_batches_between_checkpoints_are_counted_through_interruptions(
    tmp_path,
):
    """A recovery at step 10 returns to 8; a new process starts at 11."""

    def hook():
        path = str(tmp_path / "{epoch}-{batch}.weights.h5")
        own = callbacks.ModelCheckpoint(
            path, save_weights_only=True, save_freq=3
        )
        return KerasCallbackHook([own], STEPS)

    job = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 4}
    train([hook(), EachStep()], 11, fail_at=[10], **job)
    train([hook(), EachStep()], 18, **job)
    found = {path.name.partition(".")[0] for path in tmp_path.glob("*.h5")}
    assert found == {"1-3", "1-6", "2-1", "2-4", "2-7", "3-2"}


def test_a_callback_of_ones_own_may_keep_the_best_of_what_it_likes():
    class KeepsBest(Recorder):
        restore_best_weights = True

    recorder = KeepsBest()
    train([KerasCallbackHook([recorder], 4)], 4)
    assert recorder.calls[-2:] == ["epoch 0 ends", "train ends"]


def test_a_hook_may_serve_a_second_session():
    recorder = Recorder()
    hook = KerasCallbackHook([recorder], 4)
    for _ in range(2):
        train([hook], 4)
    half = len(recorder.calls) // 2
    assert recorder.calls[:half] == recorder.calls[half:]
    assert "epoch 0 ends" in recorder.calls


def test_a_step_function_of_ones_own():
    """Its logs are those of the last step, as with a `train_step` in `fit`."""
    losses = [4.0, 3.0, 2.0, 5.0, 6.0, float("nan")]

    def build():
        model, global_step = logistic(), tf.Variable(0, dtype=tf.int64)

        def step():
            global_step.assign_add(1)
            return {"loss": losses[int(global_step) - 1]}

        variables = checkpoints.named_variables(model)
        return Trainable(step, global_step, variables, model=model)

    class Epochs(callbacks.Callback):
        def on_train_batch_end(self, batch, logs):
            batches.append((batch, logs["loss"]))

    batches, history = [], callbacks.History()
    hook = KerasCallbackHook([Epochs(), history], 2)
    stop = StopAtStepHook(last_step=5)
    with MonitoredTrainingSession(build, hooks=[hook, stop]) as session:
        while not session.should_stop():
            session.run()
    assert batches == [(0, 4.0), (1, 3.0), (0, 2.0), (1, 5.0), (0, 6.0)]
    assert history.history == {"loss": [3.0, 5.0, 6.0]}
    hook = KerasCallbackHook([callbacks.TerminateOnNaN()], 9)
    with MonitoredTrainingSession(build, hooks=[hook]) as session:
        while not session.should_stop():
            session.run()
    assert session.step == 6


def test_a_checkpoint_callback_of_ones_own_may_set_what_is_saved_last():
    class BestAtEnd(callbacks.ModelCheckpoint):
        pass

    assert KerasCallbackHook([BestAtEnd("best.keras")], 1).sets_variables
    plain = callbacks.ModelCheckpoint("best.keras")
    assert not KerasCallbackHook([plain], 1).sets_variables


def test_logging_that_replaces_fit_is_warned_of(monkeypatch, caplog, tmp_path):
    """As the autologging of MLflow and Comet does, which wraps `fit`."""
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    estimator = tfdist.Estimator(logistic, config)
    estimator.train(lambda: batches().repeat(), max_steps=1)
    assert "keras.Model.fit" not in caplog.text
    own, logged = keras.Model.fit, []

    @functools.wraps(own)
    def wrapped(*args, **kwargs):
        logged.append(own(*args, **kwargs))

    monkeypatch.setattr(keras.Model, "fit", wrapped)
    estimator.train(lambda: batches().repeat(), max_steps=2)
    assert not logged
    package = __name__.partition(".")[0]
    assert f"'{package}' has replaced keras.Model.fit" in caplog.text


def test_terminate_on_nan():
    """The callback sees the NaN in the logs of a dispatch."""
    hook = KerasCallbackHook([callbacks.TerminateOnNaN()], STEPS)
    _, step = train(
        [hook, LoggingTensorHook(["loss"], 2)],
        4 * STEPS,
        optimizer=lambda: keras.optimizers.SGD(float("nan")),
    )
    assert step < STEPS


def test_no_step_is_under_way_when_an_epoch_ends():
    saves = callbacks.ModelCheckpoint("m.keras", save_freq=3)
    hook = KerasCallbackHook([saves], STEPS)
    assert [hook.steps_until_next(n) for n in (0, 2, 3, 6, 8)] == [
        3,
        1,
        3,
        2,
        1,
    ]
    assert steps_allowed([hook], 0, 100) == (3, 0)
    by_batch = KerasCallbackHook([Recorder()], STEPS)
    assert steps_allowed([by_batch], 5, 100) == (1, 2)


def test_what_was_not_evaluated_is_not_kept(tmp_path, caplog):
    """Epoch 0 was evaluated; in epoch 1 the weights are different."""
    best = callbacks.ModelCheckpoint(
        str(tmp_path / "{epoch}.keras"), save_best_only=True
    )
    writer = EventFile(str(tmp_path))

    def write(epoch, logs=None):
        writer.write(STEPS, {"loss": 0.5})

    hook = KerasCallbackHook(
        [callbacks.LambdaCallback(on_epoch_begin=write), best],
        STEPS,
        eval_dir=str(tmp_path),
    )
    train([hook], 2 * STEPS)
    assert [path.name for path in tmp_path.glob("*.keras")] == ["1.keras"]
    assert "ModelCheckpoint skips epoch 1" in caplog.text


def test_a_callback_that_sets_the_number_of_updates():
    """Steps would go on with the numbers from before."""

    class Restarts(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.iterations.assign(0)

    with pytest.raises(ValueError, match="`iterations` of an optimizer"):
        train([KerasCallbackHook([Restarts()], STEPS)], 99)


def test_what_a_callback_sets_last_is_saved_evaluated_and_exported(tmp_path):
    """The callback sets it at `max_steps`, after saving and evaluating."""

    def zero(logs):
        zeros = [0 * w for w in callback.model.get_weights()]
        callback.model.set_weights(zeros)

    callback = callbacks.LambdaCallback(on_train_end=zero)
    config = tfdist.RunConfig(
        tmp_path, cluster=Cluster(), save_checkpoints_steps=STEPS
    )
    estimator = tfdist.Estimator(logistic, config)
    seen = []

    class Exporter(tfdist.Exporter):
        def export(self, model, directory, metrics, is_the_final_export):
            zeros = not any(w.any() for w in model.get_weights())
            seen.append((zeros, is_the_final_export))

    metrics, _ = tfdist.train_and_evaluate(
        estimator,
        tfdist.TrainSpec(
            lambda: batches().repeat(),
            max_steps=STEPS,
            hooks=[KerasCallbackHook([callback], STEPS)],
        ),
        tfdist.EvalSpec(
            batches, exporters=[Exporter("noting")], throttle_secs=0
        ),
    )
    assert seen[-1] == (True, True)
    assert metrics["loss"] == pytest.approx(np.log(2), rel=1e-4)
    (kernel,) = (n for n in estimator.get_variable_names() if "/kernel" in n)
    assert not estimator.get_variable_value(kernel).any()


# --- What is refused ---------------------------------------------------------


class TestBatches(callbacks.Callback):
    __test__ = False

    def on_test_batch_end(self, batch, logs=None):
        pass


def orbax():
    """Creates a callback without the package that its constructor requires."""
    kind = versions.OrbaxCheckpoint
    if not issubclass(kind, callbacks.Callback):  # Keras 3.12 has none.
        kind = type(kind.__name__, (kind, callbacks.Callback), {})
    return object.__new__(kind)


REFUSED = {
    "ProgressHook": callbacks.ProgbarLogger,
    "Evaluations read checkpoints": callbacks.SwapEMAWeights,
    "one by one": lambda: callbacks.CallbackList([]),
    "'val_loss': pass `eval_dir`": callbacks.EarlyStopping,
    "'val_auc': pass `eval_dir`": lambda: callbacks.ModelCheckpoint(
        "best.keras", "val_auc", save_best_only=True
    ),
    "update_freq=1. Set": lambda: callbacks.TensorBoard(update_freq="batch"),
    "TestBatches.*on_test_batch_end.*EvalSpec": TestBatches,
}


@pytest.mark.parametrize("message", REFUSED)
def test_callbacks_without_a_meaning(message):
    with pytest.raises(ValueError, match=message):
        KerasCallbackHook([REFUSED[message]()], STEPS)


@pytest.mark.parametrize("base", [TestBatches, Recorder])
def test_a_callback_of_others_does_without_methods(base, caplog):
    """As the message advises for trackers, which always override them."""
    try:
        KerasCallbackHook([base()], STEPS)
        told = caplog.text
    except ValueError as error:
        told = str(error)
    name, body = re.search(r"a subclass of (\w+) with `(.+?)`", told).groups()
    code = f"class Without({name}):\n    {body}\n"
    names = {"keras": keras, name: base}
    exec(code, names)
    caplog.clear()
    hook = KerasCallbackHook([names["Without"]()], STEPS)
    assert not hook.single_steps
    assert not caplog.text


def test_orbax_is_refused():
    with pytest.raises(ValueError, match="ModelCheckpoint to save Keras files"):
        KerasCallbackHook([orbax()], STEPS)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (([], 0), ValueError, "steps_per_epoch=0"),
        ((["loss"], 5), TypeError, "Received: 'loss'"),
    ],
)
def test_bad_arguments(args, error, message):
    with pytest.raises(error, match=message):
        KerasCallbackHook(*args)


def test_a_session_without_a_model():
    with pytest.raises(ValueError, match="plain step function"):
        counting_session([KerasCallbackHook([Recorder()], 4)])


class Writes(callbacks.Callback):
    """If `early`, like TensorBoard's callback for hyperparameters."""

    def __init__(self, folder, early):
        super().__init__()
        self.folder = folder
        self.writer = tf.summary.create_file_writer(folder) if early else None

    def set_model(self, model):
        super().set_model(model)
        self.writer = self.writer or tf.summary.create_file_writer(self.folder)

    def on_epoch_end(self, epoch, logs=None):
        with self.writer.as_default():
            tf.summary.scalar("seen", logs["loss"], epoch)


def writing_job(folder, early):
    """The program of each task in the next test."""
    cluster = Cluster.from_env()
    written = [Writes(f"{folder}/seen", early)] if cluster.is_chief else []
    x = np.ones([8, 4], "float32")
    tfdist.fit(
        logistic,
        (x, x[:, :1]),
        callbacks=written,
        model_dir=f"{folder}/job",
    )


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_a_summary_writer_of_before_the_cluster(early, tmp_path):
    code = (
        f"import sys; sys.path.append({str(HERE.parent)!r}); "
        "from tests.hooks.test_callbacks import writing_job; "
        f"writing_job({str(tmp_path)!r}, {early})"
    )
    command = [sys.executable, "-c", code]
    with LocalCluster(command, ps=1, workers=1, cwd=HERE.parents[1]) as job:
        assert job.wait(timeout_secs=120) == early, job.output("chief:0")
        output = job.output("chief:0")
    told = "Writes has a summary writer, `writer`, created before"
    assert (told in output) == early
    seen = read_scalars(str(tmp_path / "seen"))
    assert [list(scalars) for scalars in seen.values()] == [["seen"]][early:]


def test_one_learning_rate_for_several_optimizers():
    schedule = callbacks.LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(ValueError, match="LearningRateScheduler sets one"):
        train(
            [KerasCallbackHook([schedule], STEPS)],
            1,
            optimizer=lambda: MultiOptimizer([("", keras.optimizers.SGD(0.1))]),
        )


# --- The page ----------------------------------------------------------------

PAGE = (Path(tfdist.__file__).parent / "hooks/CALLBACKS.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]
MAKE = {
    "BackupAndRestore": lambda: callbacks.BackupAndRestore("d"),
    "CSVLogger": lambda: callbacks.CSVLogger("log.csv"),
    "CallbackList": lambda: callbacks.CallbackList([]),
    "LearningRateScheduler": lambda: callbacks.LearningRateScheduler(abs),
    "ModelCheckpoint": lambda: callbacks.ModelCheckpoint("m.keras"),
    "OrbaxCheckpoint": orbax,
}


def test_the_page_names_each_callback_of_keras():
    here = {
        name
        for name, kind in vars(callbacks).items()
        if isinstance(kind, type) and issubclass(kind, callbacks.Callback)
    }
    # Keras 3.12 has no OrbaxCheckpoint.
    here.add("OrbaxCheckpoint")
    assert {name.strip("`") for name, _, _ in ROWS} == here


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_page_is_true(row):
    """Callbacks listed as refused are; the named cases and tests exist."""
    name, what, shown = row
    name = name.strip("`")
    made = (MAKE.get(name) or getattr(callbacks, name))()
    refused = what.startswith("refused")
    error = pytest.raises(ValueError, match="cannot run in tfdist's training")
    with error if refused else contextlib.nullcontext():
        KerasCallbackHook([made], STEPS, eval_dir="eval")
    known = {case.name for case in all_cases() if case.area == "callbacks"}
    for test in re.findall("`(.+?)`", shown):
        assert test in known or callable(globals()[test])

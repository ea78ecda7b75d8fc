import csv

import keras
import pytest
import tensorflow as tf
from counting import counting_session
from small_models import batches, local_loop, logistic

from tfdist.checkpoint import checkpoints
from tfdist.hooks.basic import LoggingTensorHook, StopAtStepHook
from tfdist.hooks.callbacks import KerasCallbackHook
from tfdist.hooks.events import EventFile, read_scalars
from tfdist.session.monitored_session import MonitoredTrainingSession, Trainable
from tfdist.training.multi_optimizer import MultiOptimizer

callbacks = keras.callbacks
STEPS = 8  # Of an epoch.


def train(hooks, last_step, fail_at=(), optimizer=None, **kwargs):
    """Trains a model; returns it, and the step at the end."""
    failures, made = list(fail_at), []

    def build():
        model = logistic(optimizer and optimizer(), metrics=["mse"])
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
    """Writes down all calls that it may expect."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_begin(self, logs=None):
        self.calls.append("train begins")

    def on_epoch_begin(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch} begins")

    def on_train_batch_end(self, batch, logs=None):
        assert logs.keys() == {"loss", "mse"}
        self.calls.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(f"epoch {epoch} ends")

    def on_train_end(self, logs=None):
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


def learning_rates(these, make):
    """Learning rate of each epoch, by a callback that looks at its end."""
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
        "Recorder.on_train_batch_end is called after every step" in caplog.text
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
        "epoch 2 begins",
        "epoch 1 begins",
        "epoch 2 begins",
        "epoch 2 ends",
    ]


def test_evaluations_are_val_logs(tmp_path):
    seen = {}

    class Evaluator(callbacks.Callback):
        """As if an evaluation ended during epochs 0 and 2."""

        def on_train_batch_end(self, batch, logs=None):
            epoch = len(seen)
            if epoch != 1:
                file = EventFile(str(tmp_path))
                file.write_scalars({"auc": epoch / 10}, epoch * STEPS)
                file.flush()

        def on_epoch_end(self, epoch, logs=None):
            seen[epoch] = logs.get("val_auc")

    hook = KerasCallbackHook([Evaluator()], STEPS, eval_dir=str(tmp_path))
    train([hook], 3 * STEPS)
    assert seen == pytest.approx({0: 0.0, 1: None, 2: 0.2})


def test_a_hook_may_serve_a_second_session():
    recorder = Recorder()
    hook = KerasCallbackHook([recorder], 4)
    for _ in range(2):
        train([hook], 4)
    half = len(recorder.calls) // 2
    assert recorder.calls[:half] == recorder.calls[half:]
    assert "epoch 0 ends" in recorder.calls


# --- What is refused ---------------------------------------------------------


class BatchBegin(callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        pass


class TestEnd(callbacks.Callback):
    __test__ = False

    def on_test_end(self, logs=None):
        pass


REFUSED = {
    "ModelCheckpoint": lambda: callbacks.ModelCheckpoint("m.keras"),
    "restores from its last|goes on from its last": (
        lambda: callbacks.BackupAndRestore("d")
    ),
    "NanTensorHook": callbacks.TerminateOnNaN,
    "ProgressHook": callbacks.ProgbarLogger,
    "another machine": lambda: callbacks.SwapEMAWeights(1),
    "one by one": lambda: callbacks.CallbackList([]),
    "BestExporter keeps": lambda: callbacks.EarlyStopping(
        "loss", restore_best_weights=True
    ),
    "'val_loss': pass `eval_dir`": callbacks.EarlyStopping,
    "update_freq=1 counts": lambda: callbacks.TensorBoard(update_freq="batch"),
    "BatchBegin.*on_train_batch_begin": BatchBegin,
    "TestEnd.*on_test_end": TestEnd,
    "LambdaCallback.*on_predict_begin": lambda: callbacks.LambdaCallback(
        on_predict_begin=lambda logs: None
    ),
    "on_batch_begin": lambda: callbacks.LambdaCallback(
        on_batch_begin=lambda batch, logs: None
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_callbacks_without_a_meaning(message):
    with pytest.raises(ValueError, match=message):
        KerasCallbackHook([REFUSED[message]()], STEPS)


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


def test_one_learning_rate_for_several_optimizers():
    schedule = callbacks.LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(ValueError, match="LearningRateScheduler sets one"):
        train(
            [KerasCallbackHook([schedule], STEPS)],
            1,
            optimizer=lambda: MultiOptimizer([("", keras.optimizers.SGD(0.1))]),
        )

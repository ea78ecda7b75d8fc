import contextlib
import logging
import os
import shutil
import signal
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, examples, logistic

import tfdist
from tests.cluster.test_servers import free_addresses
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.estimator import building, results
from tfdist.estimator.fit_history import EpochHistory
from tfdist.hooks.callbacks import KerasCallbackHook
from tfdist.hooks.events import read_scalars


def model_fn():
    return logistic(metrics=[keras.metrics.AUC(name="auc")])


def endless():
    return batches().repeat()


class Recorder(tfdist.Exporter):
    """Writes down what it is called with."""

    def __init__(self, name="recorder"):
        super().__init__(name)
        self.calls = []

    def export(self, model, export_path, eval_result, is_the_final_export):
        self.calls.append((eval_result["global_step"], is_the_final_export))
        return f"{export_path}/{len(self.calls)}"


def job(tmp_path, max_steps, input_fn=endless, throttle_secs=0, **config):
    """Runs a whole local job; returns its result and the exporter's calls."""
    recorder = Recorder()
    run_config = tfdist.RunConfig(
        tmp_path,
        **{"save_checkpoints_steps": 10, "cluster": Cluster(), **config},
    )
    result = tfdist.train_and_evaluate(
        tfdist.Estimator(model_fn, run_config),
        tfdist.TrainSpec(input_fn, max_steps=max_steps),
        tfdist.EvalSpec(
            batches, throttle_secs=throttle_secs, exporters=recorder
        ),
    )
    return result, recorder.calls


# --- The order of things, as TF 2.15 had it (contract/tf1.md, 4.3) -----------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_steps", "throttle_secs", "expected"),
    [
        (22, 0, [(10, False), (20, False), (22, True)]),
        (22, 600, [(10, False), (22, True)]),
        (20, 0, [(10, False), (20, True)]),
        (3, 0, [(3, True)]),
    ],
)
def test_order(tmp_path, max_steps, throttle_secs, expected):
    (metrics, exports), calls = job(
        tmp_path, max_steps, throttle_secs=throttle_secs
    )
    assert calls == expected
    assert metrics["global_step"] == max_steps
    assert exports == [f"{tmp_path}/export/recorder/{len(calls)}"]


@pytest.mark.slow
def test_checkpoints(tmp_path):
    job(tmp_path, 22, keep_checkpoint_max=0)
    steps = {p.stem for p in tmp_path.glob("model.ckpt-*.index")}
    assert steps == {f"model.ckpt-{step}" for step in (0, 10, 20, 22)}


@pytest.mark.slow
def test_resumes(tmp_path):
    job(tmp_path, 10)
    (metrics, _), calls = job(tmp_path, 22)
    assert calls == [(20, False), (22, True)]
    assert metrics["global_step"] == 22
    path = tf.train.latest_checkpoint(tmp_path)
    assert checkpoints.step_of(path) == 22
    saved = tf.train.load_checkpoint(path)
    key = next(k for k in saved.get_variable_to_shape_map() if "iterat" in k)
    assert saved.get_tensor(key) == 22


@pytest.mark.slow
def test_resuming_changes_nothing(tmp_path):
    """Two jobs of 10 and 20 steps make the model that one of 20 makes."""
    for directory, stops in (("once", [20]), ("twice", [10, 20])):
        for stop in stops:
            job(tmp_path / directory, stop)
    once, twice = (
        tf.train.load_checkpoint(str(tmp_path / d / "model.ckpt-20"))
        for d in ("once", "twice")
    )
    for key in once.get_variable_to_shape_map():
        if key.startswith("variables/"):
            assert once.get_tensor(key) == pytest.approx(
                twice.get_tensor(key), rel=1e-6
            )


@pytest.mark.slow
def test_already_finished(tmp_path, caplog):
    (first, _), _ = job(tmp_path, 10)
    with caplog.at_level(logging.WARNING, "tfdist"):
        (second, _), calls = job(tmp_path, 10)
    assert "This job is already finished" in caplog.text
    assert "max_steps is 10" in caplog.text
    assert second == pytest.approx(first)
    assert calls == [(10, True)]


@pytest.mark.parametrize(
    ("error", "lives", "throttle_secs"),
    [
        (RuntimeError("as when it is killed"), 2, 1000),
        (tf.errors.UnavailableError(None, None, "as when a ps is lost"), 1, 0),
    ],
)
def test_an_evaluation_cut_short_is_made_up_for(
    tmp_path, error, lives, throttle_secs
):
    """The best checkpoint would be lost, had it been that one."""
    evaluated, errors = [], [error]

    class Once(tfdist.Exporter):
        def export(self, model, export_path, result, is_the_final_export):
            if result["global_step"] == 2 and errors:
                raise errors.pop()
            evaluated.append((result["global_step"], is_the_final_export))

    def train():
        config = tfdist.RunConfig(
            tmp_path, save_checkpoints_steps=2, cluster=Cluster()
        )
        tfdist.train_and_evaluate(
            tfdist.Estimator(model_fn, config),
            tfdist.TrainSpec(endless, max_steps=6),
            tfdist.EvalSpec(
                batches, throttle_secs=throttle_secs, exporters=Once("once")
            ),
        )

    if lives == 2:
        with pytest.raises(RuntimeError, match="killed"):
            train()
    train()
    between = [] if throttle_secs else [(4, False)]
    assert evaluated == [(2, False), *between, (6, True)]


def test_what_sigterm_saved_is_not_evaluated(tmp_path):
    """Nor is a checkpoint again that was evaluated: as if undisturbed."""

    class Preempted(tfdist.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.session.step == 3:
                signal.raise_signal(signal.SIGTERM)

    evaluated = []
    for hooks in ([Preempted()], []):
        recorder = Recorder()
        config = tfdist.RunConfig(
            tmp_path, save_checkpoints_steps=2, cluster=Cluster()
        )
        with contextlib.suppress(SystemExit):
            tfdist.train_and_evaluate(
                tfdist.Estimator(model_fn, config),
                tfdist.TrainSpec(endless, max_steps=6, hooks=hooks),
                tfdist.EvalSpec(batches, throttle_secs=0, exporters=recorder),
            )
        evaluated.append([step for step, _ in recorder.calls])
    assert evaluated == [[2], [4, 6]]


def test_end_of_input(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "tfdist"):
        (metrics, _), calls = job(
            tmp_path, None, input_fn=lambda: batches(15 * 8, 8)
        )
    assert calls == [(10, False), (15, True)]
    assert metrics["global_step"] == 15
    assert "The training input ended at step 15" in caplog.text


def test_checkpoints_by_time(tmp_path):
    job(tmp_path, 5, save_checkpoints_steps=None, save_checkpoints_secs=1e6)
    steps = sorted(p.stem for p in tmp_path.glob("model.ckpt-*.index"))
    assert steps == ["model.ckpt-0", "model.ckpt-5"]


@pytest.mark.slow
def test_train_summaries(tmp_path):
    job(tmp_path, 25, save_summary_steps=10)
    scalars = read_scalars(str(tmp_path))
    assert list(scalars) == [10, 20]
    assert all(set(scalars[step]) == {"loss", "auc"} for step in scalars)
    evaluated = read_scalars(str(tmp_path / "eval"))
    assert set(evaluated[25]) == {"loss", "auc"}


def test_summaries_elsewhere(tmp_path):
    """Also the early stopping of `fit` finds them."""
    x, y = np.zeros([8, 4], "float32"), np.zeros([8, 1], "float32")
    stop = keras.callbacks.EarlyStopping("val_loss", min_delta=9.0, patience=1)
    _, history = tfdist.fit(
        model_fn,
        (x, y),
        validation_data=(x, y),
        epochs=5,
        batch_size=4,
        callbacks=stop,
        hooks=None,
        model_dir=str(tmp_path / "job"),
        summary_dir=tmp_path / "logs",
        log_step_count_steps=1,
    )
    assert len(history.history["val_loss"]) == 2
    events = {path.parent for path in tmp_path.rglob("*tfevents*")}
    assert events == {tmp_path / "logs", tmp_path / "logs" / "eval"}
    assert (tmp_path / "job" / "model.ckpt-4.index").exists()


@pytest.mark.parametrize(
    ("epochs", "every", "evaluated"), [(2, 10, [10]), (3, 7, [7, 14, 15])]
)
def test_each_evaluation_is_in_the_history_once(
    tmp_path, epochs, every, evaluated
):
    data = np.ones([40, 4], "float32"), np.ones([40, 1], "float32")
    _, history = tfdist.fit(
        model_fn,
        data,
        validation_data=data,
        epochs=epochs,
        batch_size=8,
        model_dir=tmp_path,
        save_checkpoints_steps=every,
    )
    scalars = read_scalars(str(tmp_path / "eval"))
    expected = [scalars[step]["loss"] for step in evaluated]
    assert history.history["val_loss"] == pytest.approx(expected)


class StopsAtBatch(keras.callbacks.Callback):
    """Stops in an epoch, and logs what is no number of Python."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        logs["scale"] = np.float32(0.5)


@pytest.mark.parametrize(
    ("stop", "epochs"),
    [
        (
            lambda: keras.callbacks.EarlyStopping(
                min_delta=9.0, patience=2, restore_best_weights=True
            ),
            [0, 1, 2],
        ),
        (StopsAtBatch, [0]),
        (keras.callbacks.Callback, [0, 1, 2, 3]),
    ],
)
def test_fit_that_has_ended_stays_ended(stop, epochs, tmp_path):
    """Also if a callback stopped it, which a new process would not know."""
    x, y = examples(16)
    log = tmp_path / "log.csv"

    def run(epochs=4):
        model, history = tfdist.fit(
            model_fn,
            (x, y),
            validation_data=(x, y),
            epochs=epochs,
            batch_size=4,
            callbacks=[stop(), keras.callbacks.CSVLogger(log)],
            model_dir=str(tmp_path / "job"),
        )
        return model.get_weights(), history

    weights, history = run()
    assert history.epoch == epochs
    logged = log.read_text()
    for _ in range(2):
        again, same = run()
        assert same.epoch == epochs
        assert same.history == history.history
        for one, two in zip(again, weights, strict=True):
            np.testing.assert_array_equal(one, two)
        assert log.read_text() == logged  # No callback was called.
    step = int(tfdist.checkpoint.latest(tmp_path / "job").rpartition("-")[2])
    _, longer = run(epochs=5)
    assert longer.epoch[0] == step // 4


class Dies(keras.callbacks.Callback):
    def __init__(self, epoch=None):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise SystemExit

    def on_train_end(self, logs=None):
        if self.epoch is None:
            raise SystemExit


def test_fit_that_dies_before_the_best_weights_are_saved_trains_on(
    tmp_path, caplog
):
    stop = {"min_delta": 9.0, "patience": 1, "restore_best_weights": True}

    def run(*others):
        return tfdist.fit(
            model_fn,
            examples(8),
            epochs=4,
            batch_size=4,
            callbacks=[keras.callbacks.EarlyStopping("loss", **stop), *others],
            model_dir=str(tmp_path),
        )

    with pytest.raises(SystemExit):
        run(Dies())
    step = tfdist.checkpoint.latest(tmp_path).rpartition("-")[2]
    assert step == "4"
    assert "starts over" not in caplog.text
    _, history = run()
    assert history.epoch == [0, 1, 2, 3]
    assert "EarlyStopping starts over: the best weights of the 2 epoc" in (
        caplog.text
    )


def test_callbacks_go_on_after_a_death(tmp_path):
    """They compare with the best value of the job, not of the process."""

    def run(name, dies_at):
        kept = tmp_path / f"{name}.weights.h5"
        callbacks = [
            # The first epoch is the best.
            keras.callbacks.ModelCheckpoint(
                kept, "loss", 0, True, save_weights_only=True, mode="max"
            ),
            keras.callbacks.ReduceLROnPlateau(
                "loss", 0.5, patience=2, min_delta=9.0, cooldown=1
            ),
            keras.callbacks.EarlyStopping("loss", min_delta=9.0, patience=6),
            Dies(dies_at),
        ]
        _, history = tfdist.fit(
            model_fn,
            examples(8),
            epochs=20,
            batch_size=4,
            shuffle=False,
            callbacks=callbacks,
            model_dir=str(tmp_path / name),
        )
        return history.history, kept.read_bytes()

    expected, kept = run("undisturbed", dies_at=99)
    assert len(expected["loss"]) == 7
    assert len({*expected["learning_rate"]}) == 3
    for epoch in 1, 2, 3, 5, 6:
        with pytest.raises(SystemExit):
            run("dies", epoch)
        if epoch == 5:
            [newest] = (tmp_path / "dies").glob("model.ckpt-10.data*")
            newest.write_bytes(b"damaged")
    found, also_kept = run("dies", dies_at=99)
    assert found == expected
    assert also_kept == kept


class Fails(keras.callbacks.Callback):
    """Ends an epoch with an error, once, from which the session recovers."""

    def __init__(self, epoch):
        super().__init__()
        self.epochs = [epoch]

    def on_epoch_end(self, epoch, logs=None):
        if epoch in self.epochs:
            self.epochs.clear()
            raise tf.errors.UnavailableError(None, None, "as of a lost ps")


def test_callbacks_count_an_epoch_once_in_a_recovery_after_a_death(tmp_path):
    stop = {"min_delta": 9.0, "patience": 4}

    def run(*others):
        return tfdist.fit(
            model_fn,
            examples(8),
            epochs=20,
            batch_size=4,
            callbacks=[keras.callbacks.EarlyStopping("loss", **stop), *others],
            model_dir=str(tmp_path),
        )

    with pytest.raises(SystemExit):
        run(Dies(2))
    _, history = run(Fails(2))
    assert history.epoch == [0, 1, 2, 3, 4]


def test_a_best_model_that_was_deleted_is_saved_again(tmp_path):
    best = tmp_path / "best.weights.h5"

    def run(dies_at):
        save = keras.callbacks.ModelCheckpoint(
            best, "loss", 0, True, save_weights_only=True, mode="max"
        )
        tfdist.fit(
            model_fn,
            examples(8),
            epochs=3,
            batch_size=4,
            callbacks=[save, Dies(dies_at)],
            model_dir=str(tmp_path / "job"),
        )

    with pytest.raises(SystemExit):
        run(dies_at=2)
    best.unlink()
    run(dies_at=99)
    assert best.exists()


@pytest.mark.parametrize("every", [1, 2])
def test_the_history_has_the_epochs_before_a_death(every, tmp_path):
    """Those that run again, as the last checkpoint is older, are there once."""

    def run(*deaths, epochs=4):
        for death in deaths:
            with pytest.raises(SystemExit):
                run_once(epochs, [death])
        return run_once(epochs)

    def run_once(epochs, these=()):
        _, history = tfdist.fit(
            model_fn,
            examples(8),
            validation_data=examples(8),
            epochs=epochs,
            batch_size=4,
            callbacks=these,
            model_dir=str(tmp_path / f"{len(dead)}"),
            save_checkpoints_steps=2 * every,
            shuffle=False,
        )
        return history

    found = []
    for dead in ([], [Dies(1), Dies(3), Dies()]):
        found.append(run(*dead))
    whole, together = found
    assert together.epoch == whole.epoch == [0, 1, 2, 3]
    assert together.history.keys() == whole.history.keys()
    for name, values in whole.history.items():
        assert together.history[name] == pytest.approx(values)
    assert run(epochs=6).epoch == [4, 5]


def test_the_history_sets_no_variables():
    """Or each job would save its last checkpoint twice."""
    assert not KerasCallbackHook([EpochHistory()], 4).sets_variables


def test_fit_goes_on_in_the_order_of_its_arrays(tmp_path, monkeypatch):
    """Though nobody has set a seed: each example comes once an epoch."""
    monkeypatch.setattr(tf.compat.v1, "get_seed", lambda _: (None, None))
    weights = []
    for stops in ([3, 99], [99]):
        for last_step in stops:
            model, _ = tfdist.fit(
                model_fn,
                examples(24),
                epochs=2,
                batch_size=4,
                hooks=[tfdist.StopAtStepHook(last_step=last_step)],
                model_dir=str(tmp_path / "job"),
            )
        weights.append(np.concatenate([*map(np.ravel, model.get_weights())]))
        shutil.rmtree(tmp_path / "job")
    assert np.array_equal(*weights)


@pytest.mark.parametrize("limit", [4, 100])
def test_fit_keeps_to_the_limits_that_keras_is_configured_with(limit, caplog):
    """As `KERAS_MAX_EPOCHS` and `KERAS_MAX_STEPS_PER_EPOCH` set them."""

    def model_fn():
        model = keras.Sequential(
            [keras.Input([1]), keras.layers.Dense(1, kernel_initializer="ones")]
        )
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    x = np.arange(24.0).reshape(24, 1) / 24
    batches = tf.data.Dataset.from_tensor_slices((x, 2 * x)).batch(2)
    data = {"validation_data": batches, "epochs": 4}
    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(limit)
    try:
        expected = model_fn().fit(batches, verbose=0, **data).history
        _, history = tfdist.fit(model_fn, batches, **data)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    assert expected.keys() == history.history.keys()
    for name, values in expected.items():
        assert history.history[name] == pytest.approx(values, rel=1e-5)
    told = "Limiting `steps_per_epoch` to 4" in caplog.text
    assert told == (limit == 4)


def test_steps_per_second(tmp_path):
    job(tmp_path, 12, save_summary_steps=0, log_step_count_steps=5)
    rates = read_scalars(str(tmp_path))
    assert list(rates) == [5, 10]
    assert all(rates[step]["global_step/sec"] > 0 for step in rates)


class Listener(tfdist.CheckpointSaverListener):
    """Writes down of which steps it is told."""

    steps = ()

    def after_save(self, session, global_step_value):
        self.steps += (global_step_value,)


def test_hooks_and_listeners(tmp_path):
    class Stop(tfdist.SessionRunHook):
        def steps_until_next(self, step):
            return 1

        def after_run(self, run_context, run_values):
            if run_context.session.step == 4:
                run_context.request_stop()

    listener = Listener()
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made = tfdist.Estimator(model_fn, config).train(
        endless, hooks=[Stop()], saving_listeners=[listener]
    )
    assert checkpoints.step_of(made.latest_checkpoint()) == 4
    assert listener.steps == (0, 4)


def test_steps_on_data_that_were_read_to_their_end(tmp_path, caplog):
    ids = tf.data.Dataset.range(6).map(lambda i: ([[i]], [[i]]))

    def summing():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        metric = keras.metrics.MeanMetricWrapper(lambda y, _: y, name="y")
        model.compile("sgd", "mse", metrics=[metric])
        return model

    class Read(tfdist.SessionRunHook):
        ids = ()

        def after_run(self, run_context, run_values):
            self.ids += (run_values.results["y"],)

    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made, read = tfdist.Estimator(summing, config), Read()
    for _ in range(5):
        made.train(lambda: ids, [read], steps=3)
    assert read.ids == (*range(6), *range(6), 0, 1, 2)
    for _ in range(2):
        made.train(lambda: ids, [read], max_steps=18)
    made.train(lambda: ids, [read], max_steps=20)
    made.train(lambda: ids, [read])
    assert read.ids[15:] == (3, 4, 5, *range(6))
    assert "No step was run" not in caplog.text
    made.train(lambda: ids, [read], steps=6)
    again = tfdist.Estimator(summing, config)  # As a job started again.
    again.train(lambda: ids, [read], max_steps=99)
    assert len(read.ids) == 30
    assert "No step was run" in caplog.text


def test_a_saver_of_the_user_takes_the_place_of_the_estimators(tmp_path):
    own, others = Listener(), [Listener(), Listener()]
    model_dir = str(tmp_path / "job")
    hooks = [
        tfdist.CheckpointSaverHook(str(tmp_path / "copies"), save_steps=7),
        tfdist.CheckpointSaverHook(
            os.path.relpath(model_dir),
            save_steps=4,
            listeners=[own],
            max_to_keep=None,
        ),
    ]
    config = tfdist.RunConfig(
        model_dir, cluster=Cluster(), keep_checkpoint_max=1
    )
    made = tfdist.Estimator(model_fn, config)
    for listener in others:
        made.train(endless, hooks, steps=6, saving_listeners=[listener])
    assert own.steps == (0, 4, 6, 8, 12)
    assert [other.steps for other in others] == [(0, 4, 6), (8, 12)]
    paths = checkpoints.listed(model_dir)
    assert [*map(checkpoints.step_of, paths)] == [12, 8, 6, 4, 0]
    assert all(tf.io.gfile.exists(f"{path}.index") for path in paths)
    copies = checkpoints.latest(str(tmp_path / "copies"))
    assert checkpoints.step_of(copies) == 12


def test_a_saver_of_the_user_keeps_what_the_configuration_says(tmp_path):
    config = tfdist.RunConfig(
        tmp_path, cluster=Cluster(), keep_checkpoint_max=1
    )
    saver = tfdist.CheckpointSaverHook(tmp_path, save_steps=1)
    tfdist.Estimator(model_fn, config).train(endless, [saver], max_steps=4)
    (path,) = checkpoints.listed(str(tmp_path))
    assert checkpoints.step_of(path) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"hooks": [keras.callbacks.EarlyStopping("loss")]},
        {"hooks": tfdist.StopAtStepHook(last_step=1)},
        {"saving_listeners": [tfdist.StopAtStepHook(last_step=1)]},
    ],
)
def test_what_is_no_hook(tmp_path, arguments):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    (name,) = arguments
    estimator = tfdist.Estimator(model_fn, config)
    with pytest.raises(TypeError, match=f"Argument `{name}`"):
        estimator.train(endless, **arguments)
    if name == "hooks":
        with pytest.raises(TypeError, match="Argument `hooks`"):
            estimator.evaluate(endless, **arguments)


def test_a_directory_instead_of_a_configuration(tmp_path):
    estimator = tfdist.Estimator(model_fn, model_dir=tmp_path)
    assert estimator.config == tfdist.RunConfig(tmp_path)
    same = tfdist.Estimator(model_fn, estimator.config, model_dir=tmp_path)
    assert same.model_dir == str(tmp_path)
    with pytest.raises(ValueError, match="One of `model_dir` and `config`"):
        tfdist.Estimator(model_fn)
    with pytest.raises(ValueError, match=r"`config\.model_dir` differ"):
        tfdist.Estimator(model_fn, estimator.config, model_dir="another")


def test_input_fn_may_take_a_context(tmp_path):
    seen = []

    def input_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id))
        return endless()

    job(tmp_path, 2, input_fn=input_fn)
    assert seen == [(1, 0)]


@pytest.mark.slow
def test_seed_makes_the_weights(tmp_path):
    def unseeded():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    weights = []
    for run in ("a", "b"):
        config = tfdist.RunConfig(
            tmp_path / run, cluster=Cluster(), tf_random_seed=np.int64(3)
        )
        tfdist.Estimator(unseeded, config).train(endless, max_steps=1)
        saved = tf.train.load_checkpoint(str(tmp_path / run / "model.ckpt-1"))
        weights.append(
            saved.get_tensor(
                "variables/sequential.Sdense.Skernel/.ATTRIBUTES/VARIABLE_VALUE"
            )
        )
    assert weights[0] == pytest.approx(weights[1])


# --- One method at a time ----------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An estimator after 12 steps, in two calls."""
    path = tmp_path_factory.mktemp("trained")
    made = tfdist.Estimator(model_fn, tfdist.RunConfig(path, cluster=Cluster()))
    return made.train(endless, steps=5).train(endless, steps=7)


@pytest.mark.parametrize("others", [("ps", "worker"), ("worker",)])
def test_a_chief_that_is_started_after_the_others_ended(
    tmp_path, trained, caplog, others
):
    """It died after training; its scheduler started it again."""
    directory = shutil.copytree(trained.model_dir, tmp_path / "job")
    jobs = ("chief", *others)
    addresses = [[address] for address in free_addresses(len(jobs))]
    jobs = dict(zip(jobs, addresses, strict=True))
    cluster = Cluster.from_jobs(jobs, "chief", 0)
    config = tfdist.RunConfig(
        directory, cluster=cluster, session_creation_timeout_secs=2.0
    )
    made = tfdist.Estimator(model_fn, config)

    def run(max_steps):
        return tfdist.train_and_evaluate(
            made,
            tfdist.TrainSpec(endless, max_steps),
            tfdist.EvalSpec(batches, exporters=tfdist.FinalExporter("last")),
        )

    with pytest.raises(TimeoutError, match=r"did not come up|worker:0"):
        run(13)
    metrics, (export,) = run(12)
    assert metrics == trained.evaluate(batches)
    assert tf.io.gfile.exists(export)
    assert "Nothing is trained after step 12." in caplog.text


def test_fit_that_is_started_after_the_others_ended(tmp_path):
    def run(cluster, epochs=2):
        return tfdist.fit(
            model_fn,
            batches,
            batches,
            epochs=epochs,
            model_dir=str(tmp_path),
            cluster=cluster,
            session_creation_timeout_secs=2.0,
        )

    trained, _ = run(Cluster())
    jobs = {"worker": free_addresses(2)}
    cluster = Cluster.from_jobs(jobs, "worker", 0)
    model, _ = run(cluster)
    for found, wanted in zip(model.weights, trained.weights, strict=True):
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(TimeoutError, match="worker:1"):
        run(cluster, epochs=3)


def test_a_damaged_checkpoint_is_named(trained, tmp_path):
    directory = shutil.copytree(trained.model_dir, tmp_path / "job")
    made = tfdist.Estimator(model_fn, tfdist.RunConfig(directory))
    path = made.latest_checkpoint()
    with open(f"{path}.index", "wb") as file:
        file.write(b"damaged")
    other = tfdist.RunConfig(tmp_path / "other", cluster=Cluster())
    warm = tfdist.Estimator(model_fn, other, warm_start_from=path)
    for call in (
        lambda: next(made.predict(batches)),
        lambda: made.restored_model(path),
        lambda: warm.train(batches, steps=1),
    ):
        with pytest.raises(ValueError, match=rf"{path} is damaged or missing"):
            call()


def test_a_damaged_result_is_named(trained, tmp_path):
    directory = shutil.copytree(trained.model_dir, tmp_path / "job")
    path = directory / "training_done.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=f"File {path} is damaged: .* Delete"):
        results.read_json(str(path))


def test_steps_add_up(trained):
    assert checkpoints.step_of(trained.latest_checkpoint()) == 12


@pytest.mark.slow
def test_data_that_ends_begins_anew(tmp_path):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made = tfdist.Estimator(model_fn, config)
    for step in (8, 16):
        made.train(batches)
        assert checkpoints.step_of(made.latest_checkpoint()) == step


def test_evaluate_and_predict_agree(trained):
    metrics = trained.evaluate(batches)
    assert metrics["global_step"] == 12
    examples = batches().unbatch()
    labels = np.array([y for _, y in examples.as_numpy_iterator()])
    predicted = np.array(list(trained.predict(batches)))
    assert predicted.shape == labels.shape == (64, 1)
    losses = keras.losses.binary_crossentropy(labels, predicted)
    assert np.mean(losses) == pytest.approx(metrics["loss"], rel=1e-5)
    whole = list(trained.predict(batches, yield_single_examples=False))
    assert np.array_equal(np.concatenate(whole), predicted)
    assert trained.evaluate(batches, steps=1)["loss"] != metrics["loss"]


def test_without_a_checkpoint_the_initial_model_is_used(tmp_path):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made = tfdist.Estimator(model_fn, config)
    assert made.evaluate(batches)["global_step"] == 0
    assert len(list(made.predict(batches))) == 64
    with pytest.raises(ValueError, match="no checkpoint"):
        made.export_saved_model(str(tmp_path / "export"))
    with pytest.raises(ValueError, match="no checkpoint"):
        made.get_variable_names()


def test_a_directory_that_is_no_longer_there_is_said(
    tmp_path, monkeypatch, caplog
):
    """In a notebook a relative `model_dir` means another after `%cd`."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    config = tfdist.RunConfig("job", cluster=Cluster())
    made = tfdist.Estimator(model_fn, config).train(endless, max_steps=3)
    assert made.evaluate(batches)["global_step"] == 3
    assert not caplog.records
    monkeypatch.chdir("other")
    warnings = []
    for act in (
        lambda: made.evaluate(batches),
        lambda: next(made.predict(batches)),
        lambda: made.train(endless, max_steps=2),
    ):
        act()
        warnings.append(caplog.text)
        caplog.clear()
    *untrained, lost = warnings
    directory = repr(str(tmp_path / "other" / "job"))
    for text in untrained:
        assert f"no checkpoint in {directory}: the model is untrained" in text
    assert "trained to step 3, but now starts at step 0" in lost
    assert directory in lost


def test_a_model_that_its_function_gives_weights_is_not_untrained(
    tmp_path, caplog
):
    """As one that reads those of TF 2.15's Estimator."""

    def with_weights():
        model = model_fn()
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
        return model

    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made = tfdist.Estimator(with_weights, config)
    next(made.predict(batches))
    assert made.evaluate(batches)["global_step"] == 0
    assert not caplog.records


@pytest.mark.parametrize("later", ["not adapted", "adapted to other data"])
def test_statistics_are_those_of_the_checkpoint(tmp_path, later):
    """`Normalization` keeps constants beside its weights; Keras' file sets."""
    x = examples(8)[0]

    def made(directory, data=None, **arguments):
        def model_fn():
            layer = keras.layers.Normalization()
            layer.build([None, 4])
            if data is not None:
                layer.adapt(data)
            return logistic(hidden=[layer])

        config = tfdist.RunConfig(tmp_path / directory, cluster=Cluster())
        return tfdist.Estimator(model_fn, config, **arguments)

    first = made("job", x + 5).train(endless, max_steps=2)
    wanted = [*first.predict(batches)]
    other = None if later == "not adapted" else 3 * x
    second = made("job", other)
    np.testing.assert_array_equal([*second.predict(batches)], wanted)
    assert second.evaluate(batches) == first.evaluate(batches)
    second.restored_model().save_weights(tmp_path / "all.weights.h5")
    keras_model = second.model_fn()
    keras_model.load_weights(tmp_path / "all.weights.h5")
    found = keras_model.predict(batches(), verbose=0)
    np.testing.assert_allclose(found, wanted, 1e-5)
    warm = made("warm", other, warm_start_from=first.model_dir)
    np.testing.assert_array_equal([*warm.predict(batches)], wanted)
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    for each, directory in ((x + 5, "job"), (other, "copy")):
        made(directory, each).train(endless, max_steps=4)
    np.testing.assert_array_equal(
        [*made("copy", other).predict(batches)], [*first.predict(batches)]
    )


def test_a_model_that_was_there_before_is_said(tmp_path, caplog):
    """A second job would begin with the weights of the first."""
    body = keras.layers.Dense(3, "relu", name="body")
    fixed = keras.layers.Normalization()
    fixed.adapt(examples(8)[0])

    def train(name, *hidden):
        config = tfdist.RunConfig(tmp_path / name, cluster=Cluster())
        made = tfdist.Estimator(lambda: logistic(hidden=hidden), config)
        caplog.clear()
        made.train(endless, max_steps=2)
        return caplog.text

    assert train("adapted", fixed) == ""
    assert train("first", body) == ""  # This builds it.
    assert "2 trainable variables that it did not create" in train("next", body)
    model = model_fn()
    config = tfdist.RunConfig(tmp_path / "whole", cluster=Cluster())
    tfdist.Estimator(lambda: model, config).train(endless, max_steps=2)
    assert "sequential/dense/kernel" in caplog.text


@pytest.mark.parametrize("error", [NameError, KeyboardInterrupt])
def test_a_model_that_could_not_be_made_spoils_no_other(tmp_path, error):
    """In a notebook the cell is mended, or not interrupted, and run again."""

    def initializer(shape, dtype=None):
        if error:
            raise error("while variables are made")
        return tf.zeros(shape, dtype)

    def unbuilt():
        layers = [keras.layers.Dense(3), keras.layers.Dense(1, "sigmoid")]
        layers[-1].kernel_initializer = initializer
        model = keras.Sequential(layers)
        model.compile("sgd", "binary_crossentropy")
        return model

    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made = tfdist.Estimator(unbuilt, config)
    with pytest.raises(error, match="while variables are made"):
        made.train(endless, max_steps=1)
    with pytest.raises(error, match="while variables are made"):
        made.evaluate(batches)
    error = None
    made.train(endless, max_steps=1)
    assert made.evaluate(batches)["global_step"] == 1


def test_variables_of_a_checkpoint(trained):
    names = trained.get_variable_names()
    assert "global_step" in names
    assert trained.get_variable_value("global_step") == 12
    kernel = trained.get_variable_value("sequential/dense/kernel")
    assert kernel.shape == (4, 1)
    with pytest.raises(ValueError, match="no variable 'nothing'"):
        trained.get_variable_value("nothing")


def test_export(trained, tmp_path):
    path = trained.export_saved_model(str(tmp_path))
    served = tf.saved_model.load(path)
    x, _ = next(iter(batches()))
    ours = next(trained.predict(batches, yield_single_examples=False))
    outputs = served.signatures["serving_default"](x)
    np.testing.assert_allclose(*outputs.values(), ours, rtol=1e-6)


def test_predict_keys(trained):
    with pytest.raises(ValueError, match="the model has one tensor"):
        list(trained.predict(batches, predict_keys=["a"]))


def test_outputs_that_are_not_of_examples(tmp_path):
    """Attention by layer, a scale: examples would be lost, or share them."""

    def model_fn():
        x = keras.Input([4])
        by_layer = keras.ops.stack([x, x])
        outputs = {"by_layer": by_layer, "y": keras.layers.Dense(1)(x)}
        model = keras.Model(x, outputs)
        model.compile("sgd", {"y": "mse"})
        return model

    made = tfdist.Estimator(model_fn, tfdist.RunConfig(tmp_path))
    with pytest.raises(ValueError, match=r"'by_layer': \(2, 8, 4\).*keys"):
        list(made.predict(batches))
    assert len(list(made.predict(batches, "y"))) == 64
    whole = next(made.predict(batches, yield_single_examples=False))
    assert whole["by_layer"].shape == (2, 8, 4)


def test_one_predict_key(tmp_path):
    """As TF 1's programs have it: a name, which is no list of letters."""

    def model_fn():
        x = keras.Input([4])
        outputs = {"prob": keras.layers.Dense(1)(x), "p": x}
        model = keras.Model(x, outputs)
        model.compile("sgd", {"prob": "mse", "p": None})
        return model

    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made = tfdist.Estimator(model_fn, config)
    made.train(lambda: batches().map(lambda x, y: (x, {"prob": y})), steps=1)
    for keys in ("prob", ["prob"]):
        assert list(next(made.predict(batches, keys))) == ["prob"]


@pytest.mark.parametrize(
    "steps", [{"steps": 1, "max_steps": 2}, {"steps": 0}, {"max_steps": -1}]
)
def test_bad_steps(trained, steps):
    with pytest.raises(ValueError, match="steps"):
        trained.train(endless, **steps)


@pytest.mark.parametrize("word", ["two", "three"])
def test_first_batches_are_compared_by_value(caplog, word):
    told = []
    peers = SimpleNamespace(
        name="worker:0",
        leads=True,
        announce=lambda key, value: told.append(value),
        wait_for_others=lambda key: {"worker:1": told[0]},
        failing_together=contextlib.nullcontext,
    )
    for words in (["one", "two"], ["one", word]):
        dataset = tf.data.Dataset.from_tensors(({"a": words}, [1.0, 2.0]))
        building._warn_of_other_batches(peers, dataset)
    assert ("first global batch" in caplog.text) == (word == "three")


def test_no_cache_is_filled_beforehand():
    rows = tf.data.Dataset.range(3)
    assert building._may_be_read(rows.shuffle(3).batch(2))
    inner = rows.flat_map(lambda i: tf.data.Dataset.from_tensors(i).cache())
    for cached in (rows.cache(), rows.cache().repeat().batch(2), inner):
        assert not building._may_be_read(cached)


# --- What is refused ---------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 2])
def test_wrong_types(tmp_path, position):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    args = [
        tfdist.Estimator(model_fn, config),
        tfdist.TrainSpec(endless, max_steps=1),
        tfdist.EvalSpec(batches),
    ]
    args[position] = "wrong"
    name = ("estimator", "train_spec", "eval_spec")[position]
    with pytest.raises(TypeError, match=f"`{name}` must be a tfdist"):
        tfdist.train_and_evaluate(*args)


def test_a_function_for_fit_that_returns_no_dataset():
    with pytest.raises(TypeError, match=r"must return a tf\.data\.Dataset"):
        tfdist.fit(model_fn, lambda: iter([1]), steps_per_epoch=2)


def test_a_checkpoint_that_is_not_there(trained, tmp_path):
    path = str(tmp_path / "nowhere")
    for call in (
        lambda: next(trained.predict(batches, checkpoint_path=path)),
        lambda: trained.evaluate(batches, checkpoint_path=path),
    ):
        with pytest.raises(ValueError, match="is damaged or missing"):
            call()


def test_a_misspelled_argument_of_fit():
    with pytest.raises(TypeError, match=r"`epoch` is not .*mean `epochs`\?"):
        tfdist.fit(model_fn, examples(8), epoch=3)
    with pytest.raises(TypeError, match=r"`model_directory`.*`model_dir`\?"):
        tfdist.fit(model_fn, examples(8), model_directory="job")
    for name in "zzz", "config":
        with pytest.raises(TypeError, match=rf"`{name}` .* RunConfig\."):
            tfdist.fit(model_fn, examples(8), **{name: 1})


def test_a_directory_that_only_a_shell_knows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "~", "~/job", "~somebody/job":
        with pytest.raises(ValueError, match=r"begins with ~.*expanduser"):
            tfdist.RunConfig(name)
    assert tfdist.RunConfig("a~b").model_dir == "a~b"
    assert not list(tmp_path.iterdir())


def test_model_fn_must_be_callable(tmp_path):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    for wrong in ("model", model_fn(), lambda features, labels, mode: None):
        with pytest.raises(TypeError, match="`model_fn` must be"):
            tfdist.Estimator(wrong, config)
    with pytest.raises(TypeError, match="`config` must be a"):
        tfdist.Estimator(model_fn, {"model_dir": "x"})


def test_unwritable_model_dir(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file/dir' cannot be written"):
        job(tmp_path / "file" / "dir", 2)


def test_another_model_in_the_same_dir(tmp_path):
    job(tmp_path, 2)
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    wider = tfdist.Estimator(
        lambda: logistic(hidden=[keras.layers.Dense(7, name="more")]), config
    )
    with pytest.raises(ValueError, match="does not fit the model"):
        wider.train(endless, max_steps=4)

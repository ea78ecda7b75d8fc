"""Keras' callbacks, and some from its guides, compared with `fit`."""

import csv
import functools
import glob
import http.server
import os
import threading
import unittest.mock

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import (
    STEPS,
    assert_weights_are_those_of,
    case,
    compiled,
    examples,
    seeded,
)
from tfdist.cluster import servers

EPOCHS = 3
callbacks = keras.callbacks
Callback = keras.callbacks.Callback


class OneByOne(tfdist.SessionRunHook):
    """No two steps are under way, so that each has the weights of the last."""

    wants_none_under_way = True

    def steps_until_next(self, step):
        return 1


def dense(**arguments):
    arguments = {"optimizer": keras.optimizers.SGD(0.1), **arguments}
    return compiled(keras.layers.Dense(1), metrics=["mae"], **arguments)


def diverging(momentum=0.9):
    """Its loss goes up and down."""
    return dense(optimizer=keras.optimizers.SGD(0.5, momentum=momentum))


def trained(job, make, model_fn=dense, hook=None, epochs=EPOCHS):
    """Trains with callbacks; on the chief by Keras' `fit`, too.

    Args:
        job: The job.
        make: From a folder to callbacks; called for each.
        model_fn: Makes the model.
        hook: From callbacks to the hook.
        epochs: Of four steps; each is evaluated.

    Returns:
        (estimator, our callbacks, Keras' model, its callbacks); the last two
        are None where this is not the chief.
    """

    def input_fn():
        return tf.data.Dataset.from_tensors(examples()).repeat()

    def eval_fn():
        return tf.data.Dataset.from_tensors(examples(seed=1))

    folders = [os.path.join(job.model_dir, who) for who in ("ours", "theirs")]
    for folder in folders:
        os.makedirs(folder, exist_ok=True)
    estimator = job.estimator(model_fn, save_checkpoints_steps=STEPS)
    ours, theirs, model = make(folders[0]), None, None
    hook = hook or functools.partial(
        tfdist.KerasCallbackHook,
        steps_per_epoch=STEPS,
        eval_dir=os.path.join(job.model_dir, "eval"),
        epochs=epochs,
    )
    # The servers are there for the other cases, too.
    with unittest.mock.patch.object(servers, "release"):
        tfdist.train_and_evaluate(
            estimator,
            tfdist.TrainSpec(
                input_fn,
                max_steps=epochs * STEPS,
                hooks=[OneByOne(), hook(ours)],
            ),
            tfdist.EvalSpec(eval_fn, start_delay_secs=0, throttle_secs=0),
        )
    if job.is_chief:
        model, theirs = seeded(model_fn), make(folders[1])
        model.fit(
            input_fn(),
            steps_per_epoch=STEPS,
            epochs=epochs,
            validation_data=eval_fn(),
            callbacks=theirs,
            verbose=0,
        )
    return estimator, ours, model, theirs


def learns_as_fit(job, make, model_fn=dense, **kwargs):
    """Returns our callbacks, and Keras' or None."""
    estimator, ours, model, theirs = trained(job, make, model_fn, **kwargs)
    if job.is_chief:
        assert_weights_are_those_of(estimator, model)
    return ours, theirs


def files(job, who, pattern="*"):
    found = sorted(glob.glob(os.path.join(job.model_dir, who, pattern)))
    assert found, pattern
    return found


def assert_same_files(job, load, pattern="*"):
    """The files have the same names, and load as the same arrays."""
    if not job.is_chief:
        return
    pairs = [files(job, who, pattern) for who in ("ours", "theirs")]
    for ours, theirs in zip(*pairs, strict=True):
        assert os.path.basename(ours) == os.path.basename(theirs)
        for a, b in zip(load(ours), load(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def weights_in(path, model_fn=dense):
    model = model_fn()
    model.load_weights(path)
    return model.get_weights()


def whole(path):
    model = keras.saving.load_model(path)
    variables = [*model.weights, *model.optimizer.variables]
    return [np.array(v) for v in variables]


def assert_same_logs(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(
            ours[name], values, rtol=1e-3, atol=1e-5, err_msg=name
        )


# --- What is written ---------------------------------------------------------


@case("CSVLogger")
def _(job):
    learns_as_fit(job, lambda d: [callbacks.CSVLogger(f"{d}/log.csv")])

    def table(path):
        with open(path) as file:
            rows = list(csv.DictReader(file))
        return [[float(row[k]) for k in sorted(row)] for row in rows]

    assert_same_files(job, table)


@case("History")
def _(job):
    ours, theirs = learns_as_fit(job, lambda d: [callbacks.History()])
    if job.is_chief:
        assert ours[0].epoch == theirs[0].epoch
        assert_same_logs(ours[0].history, theirs[0].history)


@case("weights and a rate set at the end of an epoch")
def _(job):
    class Sets(Callback):
        def on_epoch_end(self, epoch, logs=None):
            weights = [np.clip(w, -0.1, 0.1) for w in self.model.get_weights()]
            self.model.set_weights(weights)
            self.model.optimizer.learning_rate *= 0.5

    learns_as_fit(job, lambda _: [Sets()])


@case("RemoteMonitor")
def _(job):
    posts = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            posts.setdefault(self.path, []).append(self.rfile.read(size))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("localhost", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://localhost:{server.server_port}"
    learns_as_fit(
        job,
        lambda d: [
            callbacks.RemoteMonitor(
                root, f"/{os.path.basename(d)}", send_as_json=True
            )
        ],
    )
    server.shutdown()
    server.server_close()
    if job.is_chief:
        assert len(posts["/ours"]) == len(posts["/theirs"]) == EPOCHS
    else:
        assert not posts


@case("TensorBoard")
def _(job):
    learns_as_fit(job, lambda d: [callbacks.TensorBoard(d)])
    if job.is_chief:
        for kind in ("train", "validation"):
            ours, theirs = (
                tfdist.hooks.read_scalars(f"{job.model_dir}/{who}/{kind}")
                for who in ("ours", "theirs")
            )
            assert ours.keys() == theirs.keys()
            for step in ours:
                assert_same_logs(ours[step], theirs[step])


@case(
    "TensorBoard(histogram_freq=1)",
    refused={"ps": "would pull whole tables from the parameter servers"},
)
def _(job):
    learns_as_fit(job, lambda d: [callbacks.TensorBoard(d, histogram_freq=1)])


@case("TensorBoard(update_freq='batch')", refused="with SummarySaverHook")
def _(job):
    trained(job, lambda d: [callbacks.TensorBoard(d, update_freq="batch")])


@case("TensorBoard(profile_batch=2)", refused="ProfilerHook")
def _(job):
    trained(job, lambda d: [callbacks.TensorBoard(d, profile_batch=2)])


# --- ModelCheckpoint ---------------------------------------------------------


@case("ModelCheckpoint, weights")
def _(job):
    path = "{epoch}-{val_loss:.2f}.weights.h5"
    learns_as_fit(
        job,
        lambda d: [
            callbacks.ModelCheckpoint(f"{d}/{path}", save_weights_only=True)
        ],
    )
    assert_same_files(job, weights_in)


@case("ModelCheckpoint, whole model")
def _(job):
    learns_as_fit(
        job,
        lambda d: [callbacks.ModelCheckpoint(f"{d}/model.keras")],
        lambda: dense(optimizer=keras.optimizers.Adam(0.1)),
    )
    assert_same_files(job, whole)


@case("ModelCheckpoint, save_best_only")
def _(job):
    learns_as_fit(
        job,
        lambda d: [
            callbacks.ModelCheckpoint(
                f"{d}/{{epoch}}.keras", save_best_only=True
            )
        ],
        diverging,
        epochs=5,
    )
    assert_same_files(job, whole)


@case("ModelCheckpoint, best of val_accuracy")
def _(job):
    learns_as_fit(
        job,
        lambda d: [
            callbacks.ModelCheckpoint(
                f"{d}/best.keras", "val_accuracy", save_best_only=True
            )
        ],
        lambda: compiled(
            keras.layers.Dense(1, "sigmoid"),
            loss="binary_crossentropy",
            metrics=["accuracy"],
        ),
    )
    assert_same_files(job, whole)


@case("ModelCheckpoint, save_freq")
def _(job):
    """Its logs are of the epoch so far, though every step is a run here."""
    path = "{epoch}-{batch}-{loss:.3f}.weights.h5"
    learns_as_fit(
        job,
        lambda d: [
            callbacks.ModelCheckpoint(
                f"{d}/{path}", save_weights_only=True, save_freq=3
            )
        ],
    )
    assert_same_files(job, weights_in)


def normalized():
    return compiled(keras.layers.BatchNormalization(), keras.layers.Dense(1))


@case("ModelCheckpoint, moving averages")
def _(job):
    """Replicas normalize by their own shares, and average what they saw."""
    estimator, _, model, _ = trained(
        job,
        lambda d: [
            callbacks.ModelCheckpoint(
                f"{d}/last.weights.h5", save_weights_only=True
            )
        ],
        normalized,
    )
    if job.is_chief:
        (path,) = files(job, "ours")
        model.load_weights(path)
        assert_weights_are_those_of(estimator, model)


def table():
    numbers = keras.Input([4])
    rows = tfdist.PartitionedEmbedding(2, 3)(
        keras.ops.cast(numbers > 0, "int64")
    )
    outputs = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    model = keras.Model(numbers, outputs)
    model.compile("sgd", "mse")
    return model


@case("ModelCheckpoint, PartitionedEmbedding")
def _(job):
    learns_as_fit(
        job,
        lambda d: [
            callbacks.ModelCheckpoint(
                f"{d}/last.weights.h5", save_weights_only=True
            )
        ],
        table,
    )
    assert_same_files(job, lambda p: weights_in(p, table))


# --- What changes the training -----------------------------------------------


@case("LearningRateScheduler")
def _(job):
    def halved(epoch, rate):
        return rate / 2

    ours, theirs = learns_as_fit(
        job,
        lambda d: [
            callbacks.LearningRateScheduler(halved),
            callbacks.History(),
        ],
    )
    if job.is_chief:
        assert_same_logs(ours[1].history, theirs[1].history)


@case("LearningRateScheduler, MultiOptimizer", refused="sets one learning rate")
def _(job):
    trained(
        job,
        lambda d: [callbacks.LearningRateScheduler(lambda epoch: 0.1)],
        lambda: dense(
            optimizer=tfdist.MultiOptimizer([("", keras.optimizers.SGD())])
        ),
    )


def _add_plateau(monitor):
    @case(f"ReduceLROnPlateau, {monitor}")
    def _(job):
        learns_as_fit(
            job,
            lambda d: [
                callbacks.ReduceLROnPlateau(monitor, 0.5, 1, min_delta=10.0)
            ],
        )


_add_plateau("loss")
_add_plateau("val_loss")


@case("EarlyStopping")
def _(job):
    ours, theirs = learns_as_fit(
        job,
        lambda d: [callbacks.EarlyStopping(min_delta=10.0, patience=2)],
        epochs=6,
    )
    if job.is_chief:
        assert ours[0].stopped_epoch == theirs[0].stopped_epoch == 2


@case("EarlyStopping, restore_best_weights")
def _(job):
    ours, theirs = learns_as_fit(
        job,
        lambda d: [
            callbacks.EarlyStopping(patience=2, restore_best_weights=True)
        ],
        diverging,
        epochs=8,
    )
    if job.is_chief:
        assert ours[0].best_epoch == theirs[0].best_epoch
        assert ours[0].stopped_epoch == theirs[0].stopped_epoch > 0


@case("EarlyStopping without evaluations", refused="pass `eval_dir`")
def _(job):
    def hook(these):
        return tfdist.KerasCallbackHook(these, STEPS)

    trained(job, lambda d: [callbacks.EarlyStopping()], hook=hook)


@case("TerminateOnNaN")
def _(job):
    """Where there is none; else an Estimator ends whatever its callbacks."""
    learns_as_fit(job, lambda d: [callbacks.TerminateOnNaN()])


@case("BackupAndRestore")
def _(job):
    def make(folder):
        return [callbacks.BackupAndRestore(f"{folder}/backup")]

    learns_as_fit(job, make)
    assert not os.path.exists(f"{job.model_dir}/ours/backup")


@case("SwapEMAWeights", refused="Evaluations read checkpoints")
def _(job):
    trained(job, lambda d: [callbacks.SwapEMAWeights()])


@case("ProgbarLogger", refused="Use ProgressHook to show")
def _(job):
    trained(job, lambda d: [callbacks.ProgbarLogger()])


@case("CallbackList", refused="Pass its callbacks one by one")
def _(job):
    trained(job, lambda d: [callbacks.CallbackList([callbacks.History()])])


# --- Callbacks of one's own, as in Keras' guides -----------------------------


@case("Calls, with LambdaCallback")
def _(job):
    names = [
        f"on_{what}_{when}"
        for what in ("train", "epoch", "train_batch", "test", "predict")
        for when in ("begin", "end")
    ]

    def make(folder):
        calls = []

        def noting(name):
            def note(*args, **logs):
                numbers = [a for a in args if isinstance(a, int)]
                given = [a for a in (*args, *logs.values()) if a]
                names = [sorted(a) for a in given if isinstance(a, dict)]
                calls.append((name, *numbers, *names))

            return note

        callback = callbacks.LambdaCallback(**{n: noting(n) for n in names})
        callback.calls = calls
        return [callback]

    ours, theirs = learns_as_fit(job, make)
    if job.is_chief:
        assert ours[0].calls == theirs[0].calls
        assert ours[0].params == {**theirs[0].params, "verbose": 0}


class EarlyStoppingAtMinLoss(Callback):
    """From the guide "Writing your own callbacks"."""

    def __init__(self, patience=0):
        super().__init__()
        self.patience = patience
        self.best_weights = None

    def on_train_begin(self, logs=None):
        self.wait = 0
        self.stopped_epoch = 0
        self.best = np.inf

    def on_epoch_end(self, epoch, logs=None):
        current = logs.get("loss")
        if np.less(current, self.best):
            self.best = current
            self.wait = 0
            self.best_weights = self.model.get_weights()
        else:
            self.wait += 1
            if self.wait >= self.patience:
                self.stopped_epoch = epoch
                self.model.stop_training = True
                self.model.set_weights(self.best_weights)


@case("EarlyStoppingAtMinLoss")
def _(job):
    ours, theirs = learns_as_fit(
        job,
        lambda d: [EarlyStoppingAtMinLoss()],
        lambda: diverging(0.95),
        epochs=8,
    )
    if job.is_chief:
        assert ours[0].stopped_epoch == theirs[0].stopped_epoch > 0


class CustomLearningRateScheduler(Callback):
    """From the same guide."""

    def on_epoch_begin(self, epoch, logs=None):
        rate = float(
            keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)
        )
        self.model.optimizer.learning_rate = rate * [1.0, 0.5, 2.0][epoch]


@case("CustomLearningRateScheduler")
def _(job):
    learns_as_fit(job, lambda d: [CustomLearningRateScheduler()])


class LossAndErrorPrintingCallback(Callback):
    """From the same guide."""

    def on_train_batch_end(self, batch, logs=None):
        print(f"Up to batch {batch}, the loss is {logs['loss']:7.2f}.")

    def on_test_batch_end(self, batch, logs=None):
        print(f"Up to batch {batch}, the loss is {logs['loss']:7.2f}.")


@case(
    "LossAndErrorPrintingCallback",
    refused=r"on_test_batch_end.*EvalSpec\(hooks=...\)",
)
def _(job):
    trained(job, lambda d: [LossAndErrorPrintingCallback()])


class CyclicalRate(Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + batch)


@case("Learning rate by batch")
def _(job):
    learns_as_fit(job, lambda d: [CyclicalRate()])


class StopsInBatch(Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.model.stop_training = True


@case("stop_training in a batch")
def _(job):
    learns_as_fit(job, lambda d: [StopsInBatch()])


class Snapshots(Callback):
    def __init__(self):
        super().__init__()
        self.snapshots = []

    def on_epoch_end(self, epoch, logs=None):
        self.snapshots.append(self.model.get_weights())


@case("Weights at the end of an epoch")
def _(job):
    ours, theirs = learns_as_fit(job, lambda d: [Snapshots()])
    if job.is_chief:
        pairs = zip(ours[0].snapshots, theirs[0].snapshots, strict=True)
        for mine, other in pairs:
            for a, b in zip(mine, other, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Averaged(Snapshots):
    """Stochastic weight averaging."""

    def on_train_end(self, logs=None):
        means = [np.mean(w, axis=0) for w in zip(*self.snapshots, strict=True)]
        self.model.set_weights(means)


@case("Weights at the end of training")
def _(job):
    learns_as_fit(job, lambda d: [Averaged()])


class TestResults(Callback):
    """What an evaluation has found, without `val_`."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_test_end(self, logs=None):
        self.losses.append(logs["loss"])


@case("Results in on_test_end")
def _(job):
    ours, theirs = learns_as_fit(job, lambda d: [TestResults()])
    if job.is_chief:
        np.testing.assert_allclose(ours[0].losses, theirs[0].losses, rtol=1e-4)


@case("Own ModelCheckpoint and EarlyStopping together")
def _(job):
    class Best(callbacks.ModelCheckpoint):
        """A subclass is what it derives from."""

    def make(folder):
        return [
            Best(f"{folder}/best.keras", save_best_only=True),
            callbacks.EarlyStopping(patience=1, restore_best_weights=True),
            callbacks.CSVLogger(f"{folder}/log.csv"),
        ]

    learns_as_fit(job, make, diverging, epochs=8)
    assert_same_files(job, whole, "*.keras")


class TwoModels(keras.Model):
    """A model in a model, as a GAN has its generator."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])

    def call(self, x):
        return self.inner(x)


class Uses(Callback):
    """Predicts and evaluates at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        model, (x, y) = self.model, examples(seed=2)
        self.found += [
            model.predict(x, batch_size=5, verbose=0),
            model.predict_on_batch(x),
            model.inner.predict(x, verbose=0),
            model.evaluate(x, y, verbose=0),
            model.test_on_batch(x, y),
        ]


@case("predict and evaluate in a callback")
def _(job):
    def model_fn():
        model = TwoModels()
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        return model

    _, ours, _, theirs = trained(job, lambda _: [Uses()], model_fn)
    if theirs:
        (ours,), (theirs,) = ours, theirs
        for mine, other in zip(ours.found, theirs.found, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


class Reads(callbacks.CSVLogger):
    """Reads the model's metrics, on the chief alone: it writes a file."""

    def __init__(self, path):
        super().__init__(path)
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        results = self.model.get_metrics_result()
        self.found.append([float(results[name]) for name in ("loss", "mae")])

    def on_test_begin(self, logs=None):
        """Where `fit` has not yet begun to evaluate with the same metrics."""
        self.on_train_batch_end(-1)


@case("Metrics that a callback reads")
def _(job):
    ours, theirs = learns_as_fit(job, lambda d: [Reads(f"{d}/log.csv")])
    if job.is_chief:
        np.testing.assert_allclose(ours[0].found, theirs[0].found, rtol=1e-4)

"""`tfdist.fit`: the arguments and results of Keras' `fit`."""

import keras
import numpy as np
import pandas as pd
import tensorflow as tf

import tfdist
from tests.cases import EachStep, case, compiled, examples, seeded

SIZE, BATCH, EPOCHS = 20, 6, 3  # The last of four batches is smaller.


def model_fn():
    return compiled(
        keras.layers.Dense(3, "relu"),
        keras.layers.Dense(1, "sigmoid"),
        optimizer="adam",
        loss="binary_crossentropy",
        metrics=["accuracy", "auc", "mae"],
    )


def plain():
    """Without an optimizer whose operations tfdist fuses."""
    return compiled(
        keras.layers.Dense(3, "relu"), keras.layers.Dense(1), metrics=["mae"]
    )


def data():
    return tf.data.Dataset.from_tensor_slices(examples(SIZE)).batch(BATCH)


def held_out():
    return tf.data.Dataset.from_tensor_slices(examples(15, seed=1)).batch(4)


def fit(job, train=data, make=model_fn, **arguments):
    """`tfdist.fit` by the strategy of the job."""
    on_mirrored = job.strategy == "mirrored"
    return tfdist.fit(
        lambda: seeded(make),
        train,
        hooks=[EachStep()],
        strategy="mirrored" if on_mirrored else "auto",
        **{"epochs": EPOCHS, "model_dir": job.model_dir, **arguments},
    )


def keras_fit(train=data, make=model_fn, **arguments):
    """A model and its history, by Keras."""
    model = seeded(make)
    train = train if isinstance(train, tuple) else (train(),)
    arguments = {"epochs": EPOCHS, "verbose": 0, **arguments}
    return model, model.fit(*train, **arguments)


def assert_same(found, wanted, exact=False):
    """Weights, and a history of the same keys and values."""
    (model, history), (other, keras_history) = found, wanted
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    for one, two in zip(model.weights, other.weights, strict=True):
        if exact:
            np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, two, **tolerance)
    assert history.epoch == keras_history.epoch
    assert history.history.keys() == keras_history.history.keys()
    for name, values in keras_history.history.items():
        np.testing.assert_allclose(
            history.history[name], values, **tolerance, err_msg=name
        )


def is_one(job):
    return job.strategy == "one process"


def is_in_order(job):
    """Whether steps come in the order of the batches: on ps all race."""
    return job.strategy != "ps"


def whole():
    """One batch, so that all workers of a cluster read the same."""
    return tf.data.Dataset.from_tensors(examples())


@case()
def a_function_of_a_dataset(job):
    train = data if is_in_order(job) else whole
    found, wanted = fit(job, train, plain), keras_fit(train, plain)
    assert_same(found, wanted, exact=is_one(job))


@case()
def validation_data(job):
    train = data if is_in_order(job) else whole
    found = fit(job, train, validation_data=held_out)
    assert_same(found, keras_fit(train, validation_data=held_out()))


@case()
def endless_data_by_steps(job):
    arguments = {"steps_per_epoch": 3, "validation_steps": 2}

    def train():
        return (data if is_in_order(job) else whole)().repeat()

    found = fit(job, train, validation_data=held_out, **arguments)
    wanted = keras_fit(train, validation_data=held_out(), **arguments)
    assert_same(found, wanted)


@case()
def data_of_unknown_length(job):
    """They are counted. (Keras 3.15 runs a step more in each epoch.)"""
    rows = data if is_in_order(job) else whole
    found = fit(job, lambda: rows().filter(lambda x, y: True))
    assert_same(found, keras_fit(rows))


@case()
def arrays(job):
    """On parameter servers the batches of an epoch come in any order."""
    train = examples(SIZE if is_in_order(job) else BATCH)
    arguments = {"batch_size": BATCH, "shuffle": False, "make": plain}
    found, wanted = fit(job, train, **arguments), keras_fit(train, **arguments)
    assert_same(found, wanted, exact=is_one(job))


@case()
def arrays_with_weights_and_validation(job):
    x, y = examples(BATCH)
    weights = np.linspace(0, 1, len(x)).astype("float32")
    arguments = {"batch_size": BATCH, "validation_data": examples(9, seed=1)}
    found = fit(job, (x, y, weights), **arguments)
    model, history = seeded(model_fn), None
    history = model.fit(
        x, y, sample_weight=weights, epochs=EPOCHS, verbose=0, **arguments
    )
    assert_same(found, (model, history))


def counting():
    """A table of one row per example counts how often each one came."""
    ids = keras.Input([], dtype="int64")
    table = keras.layers.Embedding(SIZE, 1, embeddings_initializer="zeros")
    model = keras.Model(ids, table(ids))
    # Its gradient is -1 for the row of each example.
    model.compile("sgd", lambda y, y_pred: -keras.ops.sum(y_pred, -1))
    return model


@case()
def shuffled_arrays_come_once_each_epoch(job):
    x = np.arange(SIZE)
    model, _ = fit(job, (x, np.zeros(SIZE)), counting, batch_size=5, epochs=2)
    times = np.asarray(model.weights[0]) * 5 / 0.01
    np.testing.assert_allclose(times.sum(), 2 * SIZE, rtol=1e-5)
    # A faster worker begins its next pass before the other has ended its own.
    if job.strategy != "ps":
        np.testing.assert_allclose(times, 2, rtol=1e-5)


@case(refused={"all-reduce": "`backup_workers` is for parameter servers"})
def synchronous_steps_read_the_data_once_an_epoch(job):
    """A step averages the gradients of a batch from each worker."""
    x = np.arange(SIZE)
    arguments = {"batch_size": 5, "epochs": 2, "backup_workers": 0}
    model, _ = fit(job, (x, np.zeros(SIZE)), counting, **arguments)
    workers = 2 if job.strategy == "ps" else 1
    assert model.optimizer.iterations == 2 * SIZE / 5 / workers
    times = np.asarray(model.weights[0]) * 5 / 0.01 * workers
    np.testing.assert_allclose(times.sum(), 2 * SIZE, rtol=1e-5)


@case(
    refused={
        "all-reduce": "`backup_workers` is for parameter servers",
        "ps": "do not support layers with `synchronized=True`",
    }
)
def synchronous_steps_of_synchronized_layers(job):
    def make():
        layer = keras.layers.BatchNormalization(synchronized=True)
        return compiled(layer, keras.layers.Dense(1))

    fit(job, examples(), make, backup_workers=0)


@case()
def a_dictionary_of_arrays(job):
    def named():
        one = keras.Input([2], name="one")
        two = keras.Input([2], name="two")
        both = keras.layers.Concatenate()([one, two])
        model = keras.Model([one, two], keras.layers.Dense(1)(both))
        model.compile("sgd", "mse")
        return model

    x, y = examples(BATCH)
    train = {"one": x[:, :2], "two": x[:, 2:]}, y
    assert_same(fit(job, train, named), keras_fit(train, named))


@case()
def several_inputs_in_a_list(job):
    def listed():
        inputs = [keras.Input([2]), keras.Input([2])]
        both = keras.layers.Concatenate()(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(both))
        model.compile("sgd", "mse")
        return model

    x, y = examples(BATCH)
    train = [x[:, :2], x[:, 2:]], y
    assert_same(fit(job, train, listed), keras_fit(train, listed))


@case()
def data_frames(job):
    x, y = examples(BATCH)
    train = pd.DataFrame(x.astype("float64")), pd.Series(y[:, 0])
    assert_same(fit(job, train), keras_fit(train))


@case()
def a_data_frame_of_dummies(job):
    """`get_dummies` makes columns of bools, beside those of numbers."""
    x, y = examples(BATCH)
    frame = pd.DataFrame(x[:, :2].astype("float64"))
    frame["job"] = list("ab" * (BATCH // 2))
    train = pd.get_dummies(frame), pd.Series(y[:, 0])
    assert_same(fit(job, train), keras_fit(train))


class Reconstructing(keras.Model):
    """Its `train_step` gets what `fit` is given, as an autoencoder's does."""

    def __init__(self):
        super().__init__()
        self.decode = keras.layers.Dense(4)

    def call(self, inputs):
        return self.decode(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(data - self(data)))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"reconstruction": loss}


@case()
def an_array_without_targets(job):
    def make():
        model = Reconstructing()
        model.compile("sgd")
        model.build([None, 4])
        return model

    x, _ = examples(BATCH)
    assert_same(fit(job, x, make), keras_fit((x,), make))


class Squared(keras.losses.Loss):
    """As guides write one: it squares (batch, batch) if targets are flat."""

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


@case()
def a_series_of_targets_is_a_column(job):
    def of_rows():
        return compiled(keras.layers.Dense(1), loss=Squared())

    x, y = examples(BATCH)
    train = pd.DataFrame(x), pd.Series(y[:, 0])
    assert_same(fit(job, train, of_rows), keras_fit(train, of_rows))


@case()
def a_data_frame_by_columns(job):
    """Numbers and strings, as `dict(frame)`."""

    def of_columns():
        inputs = {
            "age": keras.Input([1], name="age"),
            "job": keras.Input([1], name="job", dtype="string"),
        }
        lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
        table = keras.layers.Embedding(3, 2)(lookup(inputs["job"]))
        parts = [inputs["age"], keras.layers.Flatten()(table)]
        output = keras.layers.Dense(1)(keras.layers.Concatenate()(parts))
        model = keras.Model(inputs, output)
        model.compile("sgd", "mse")
        return model

    frame = pd.DataFrame({"age": [0.1, 0.2, 0.3, 0.4], "job": list("abab")})
    _, history = fit(job, (dict(frame), np.ones(4, "float32")), of_columns)
    assert history.history["loss"][-1] < history.history["loss"][0]


@case(refused="dict\\(frame\\)")
def a_data_frame_of_mixed_columns(job):
    frame = pd.DataFrame({"age": [0.1, 0.2], "job": list("ab")})
    fit(job, (frame, np.ones(2)))


@case(refused="must have one length")
def arrays_of_different_lengths(job):
    x, y = examples()
    fit(job, (x, y[:-1]))


class Batches(keras.utils.PyDataset):
    """Those of `data`, which count their epochs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.epochs = 0

    def __len__(self):
        return -(-SIZE // BATCH)

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return tuple(part[rows] for part in examples(SIZE))

    def on_epoch_end(self):
        self.epochs += 1


@case(refused={"ps": "is a Batches in this process"})
def a_py_dataset(job):
    batches = Batches()
    found = fit(job, batches, shuffle=False, validation_data=Batches())
    wanted = keras_fit(
        lambda: Batches(), shuffle=False, validation_data=Batches()
    )
    assert_same(found, wanted)
    assert batches.epochs >= EPOCHS - 1


@case(refused={"ps": "is a Batches in this process"})
def a_py_dataset_of_several_workers(job):
    batches = Batches(workers=2)
    found = fit(job, batches, shuffle=False)
    assert_same(found, keras_fit(lambda: Batches(), shuffle=False))


@case()
def validation_data_of_a_py_dataset(job):
    train = data if is_in_order(job) else whole
    found = fit(job, train, validation_data=Batches())
    assert_same(found, keras_fit(train, validation_data=Batches()))


@case(refused={"ps": "`validation_data` is a _BatchDataset in this process"})
def validation_data_of_a_dataset(job):
    train = data if is_in_order(job) else whole
    if job.strategy == "all-reduce":
        job.estimator(plain)  # Joins the job.
    found = fit(job, train, validation_data=held_out())
    assert_same(found, keras_fit(train, validation_data=held_out()))


@case(refused={"ps": "Dataset in this process"})
def a_dataset(job):
    """In all-reduce it is made after the job was joined."""
    if job.strategy == "all-reduce":
        fit(job, whole, epochs=1, model_dir=f"{job.model_dir}/joined")
    assert_same(fit(job, data()), keras_fit())


@case(refused="`steps_per_epoch` must be given, because")
def endless_data_without_steps(job):
    fit(job, lambda: whole().repeat())


@case(refused="`validation_steps` must be given, because")
def endless_validation_data(job):
    fit(job, whole, validation_data=lambda: whole().repeat())


@case(refused="`train` has no batch")
def empty_data(job):
    fit(job, lambda: whole().take(0))


@case(refused="`steps_per_epoch` must be given, since `train` takes")
def a_function_of_a_context_without_steps(job):
    fit(job, lambda context: whole())


@case(refused="`epochs` must be at least 1")
def no_epochs(job):
    fit(job, epochs=0)


@case(refused="`batch_size` is for arrays")
def a_batch_size_for_a_dataset(job):
    fit(job, batch_size=3)


@case(refused="`class_weight` .*: pass a weight for each example, as in")
def an_argument_of_keras(job):
    fit(job, class_weight={0: 1.0})


class StopsAtBatch(keras.callbacks.Callback):
    """Stops in an epoch that has `batches` of them behind it."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        self.model.stop_training = not self.left


@case()
def a_stop_within_an_epoch(job):
    """What was found of it is in the history; not on other processes."""
    for batches in (6, 2):
        train = data if is_in_order(job) else whole
        found = fit(
            job,
            train,
            validation_data=held_out,
            callbacks=[StopsAtBatch(batches)],
            steps_per_epoch=4,
            model_dir=f"{job.model_dir}/{batches}",
        )
        if job.is_chief:
            wanted = keras_fit(
                lambda: train().repeat(),  # noqa: B023
                validation_data=held_out(),
                callbacks=[StopsAtBatch(batches)],
                steps_per_epoch=4,
            )
            assert_same(found, wanted)


@case()
def early_stopping(job):
    """And the history ends there."""

    def stop():
        return keras.callbacks.EarlyStopping("val_loss", patience=1)

    train = data if is_in_order(job) else whole
    arguments = {
        "epochs": 6,
        "make": lambda: compiled(
            keras.layers.Dense(1), optimizer=keras.optimizers.SGD(1.2)
        ),
    }
    found = fit(
        job, train, validation_data=held_out, callbacks=[stop()], **arguments
    )
    wanted = keras_fit(
        train, validation_data=held_out(), callbacks=[stop()], **arguments
    )
    assert len(found[1].epoch) < 6
    assert_same(found, wanted)


class Sum(keras.metrics.Metric):
    """Of all predictions, and one."""

    def __init__(self, name="one_and_all"):
        super().__init__(name=name)
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        self.most.assign_add(keras.ops.sum(y_pred))

    def result(self):
        return self.most + 1.0


class Maximum(Sum):
    def update_state(self, y, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))


class TwoTasks(keras.Model):
    """As Keras Recommenders' guide: it finds what is best when it evaluates."""

    def __init__(self):
        super().__init__()
        self.score = keras.layers.Dense(1)
        self.error = keras.metrics.RootMeanSquaredError(name="error")
        self.top = keras.metrics.MeanMetricWrapper(self._found, name="top")

    @staticmethod
    def _found(y, best):
        return keras.ops.cast(keras.ops.equal(y, best), "float32")

    def call(self, inputs, training=False):
        results = {"score": self.score(inputs)}
        if not training:
            best = keras.ops.greater(results["score"], 0.5)
            results["best"] = keras.ops.cast(best, "float32")
        return results

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y - y_pred["score"]))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.error.update_state(y, y_pred["score"], sample_weight)
        if "best" in y_pred:
            self.top.update_state(y, y_pred["best"], sample_weight)
            return self.get_metrics_result()
        results = self.get_metrics_result()
        del results["top"]
        return {**results, "trained": 2 * self.error.result()}


@case()
def metrics_of_evaluations_alone(job):
    def make():
        model = TwoTasks()
        model.compile("sgd")
        return model

    train = data if is_in_order(job) else whole
    found = fit(job, train, make, validation_data=held_out)
    assert_same(found, keras_fit(train, make, validation_data=held_out()))


class OwnStep(keras.Sequential):
    """As in Keras' guide to a custom `train_step`."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.metrics[0].update_state(loss, sample_weight=tf.shape(x)[0])
        return self.compute_metrics(x, y, y_pred)


class Evaluating(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        self.model.evaluate(held_out(), verbose=0)


def _logs_are_of_the_epoch(job, kind, metric):
    """Though each of its steps is a run by itself, and a callback evaluates."""

    def make():
        layers = [keras.Input([4]), keras.layers.Dense(1, "sigmoid")]
        model = kind(layers)
        model.compile("sgd", "mse", metrics=[metric(), "auc"])
        return model

    train = data if is_in_order(job) else whole
    is_alone = job.strategy in ("one process", "mirrored")
    given = {"callbacks": [Evaluating()]} if is_alone else {}
    assert_same(fit(job, train, make, **given), keras_fit(train, make, **given))


NO_SUM = "other than by addition"


@case()
def a_metric_of_sums(job):
    _logs_are_of_the_epoch(job, keras.Sequential, Sum)


@case(refused=dict.fromkeys(("mirrored", "all-reduce", "ps"), NO_SUM))
def a_metric_that_is_no_sum(job):
    _logs_are_of_the_epoch(job, keras.Sequential, Maximum)


@case()
def metrics_of_a_train_step_of_its_own(job):
    _logs_are_of_the_epoch(job, OwnStep, Sum)


class OlderLoss(keras.Sequential):
    """As in Keras' guides of before, and with a metric called as Keras'."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.tracker = keras.metrics.Mean(name="loss")

    def compute_loss(self, x, y, y_pred, sample_weight, allow_empty=False):
        error = keras.ops.mean(keras.ops.square(y - y_pred))
        self.tracker.update_state(error)
        return error + 10.0

    @property
    def metrics(self):
        return [self.tracker]


@case()
def a_loss_without_training_and_a_metric_called_loss(job):
    def make():
        model = OlderLoss([keras.Input([4]), keras.layers.Dense(1)])
        model.compile("sgd")
        return model

    train = data if is_one(job) else whole
    found = fit(job, train, make, validation_data=whole)
    assert_same(found, keras_fit(train, make, validation_data=whole()))


@case()
def an_optimizer_made_beforehand(job):
    """Each model that the function makes gets one like it."""
    optimizers = iter([keras.optimizers.Adam(0.01) for _ in range(2)])

    def make_with(optimizer):
        def make():
            layers = [keras.Input([4]), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile(optimizer, "mse")
            return model

        return make

    train = data if is_in_order(job) else whole
    found = fit(job, train, make_with(next(optimizers)), epochs=2)
    assert_same(found, keras_fit(train, make_with(next(optimizers)), epochs=2))


@case()
def a_second_call_goes_on(job):
    train = data if is_in_order(job) else whole
    fit(job, train, epochs=2)
    model, history = fit(job, train, epochs=3)
    wanted, keras_history = keras_fit(train)
    assert history.epoch == [2]
    for name, values in keras_history.history.items():
        found = history.history[name]
        np.testing.assert_allclose(found, values[2:], rtol=1e-4, err_msg=name)
    assert_same((model, keras_history), (wanted, keras_history))


@case()
def a_finished_job_gives_its_model_back(job):
    train = data if is_in_order(job) else whole
    fit(job, train)
    assert_same(fit(job, train), keras_fit(train))


@case()
def the_model_trains_on_with_keras(job):
    train = data if is_in_order(job) else whole
    model, _ = fit(job, train)
    other, _ = keras_fit(train)
    histories = [m.fit(whole(), verbose=0) for m in (model, other)]
    assert_same((model, histories[0]), (other, histories[1]))


@case(refused={s: "`model_dir` must name" for s in ("ps", "all-reduce")})
def a_temporary_directory(job):
    model, history = fit(job, model_dir=None)
    assert_same((model, history), keras_fit())


class Average(keras.metrics.Mean):
    """Of the outputs; of no example it is no number."""

    def update_state(self, y, y_pred, sample_weight=None):
        size = keras.ops.shape(y_pred)[0]
        super().update_state(keras.ops.mean(y_pred), size)


@case()
def a_share_without_examples(job):
    """The last batch has one, so one of two devices has none."""

    def make():
        return compiled(keras.layers.Dense(1), metrics=[Average(name="mean")])

    def train():
        return data().unbatch().take(BATCH + 1).batch(BATCH)

    found = fit(job, train, make)
    if job.is_chief and is_in_order(job):
        assert_same(found, keras_fit(train, make))

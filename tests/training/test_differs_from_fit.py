"""The page "Where tfdist differs from `fit`, and why": each line, run."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, examples, local_loop, logistic

import tfdist
from tfdist.cluster.spec import Cluster
from tfdist.hooks.basic import NanLossDuringTrainingError, StopAtStepHook
from tfdist.session.monitored_session import MonitoredTrainingSession
from tfdist.training.loop import EndOfInput

ROOT = Path(tfdist.__file__).parent.parent
PAGE = (ROOT / "tfdist/DIFFERS_FROM_FIT.md").read_text()
REFERENCES = re.findall(r"`(?:(test_\w+)\.py::)?(test_\w+)`", PAGE)


def test_each_line_names_a_test_and_each_test_has_a_line():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(lines) > 10
    for line in lines:
        assert re.search(r"`(test_\w+\.py::)?test_\w+`[^`|]*\|$", line), line
    for module, name in REFERENCES:
        (path,) = (ROOT / "tests").rglob(f"{module or Path(__file__).stem}.py")
        assert f"\ndef {name}(" in path.read_text(), (module, name)
    here = {name for name in globals() if name.startswith("test_")}
    on_page = {name for module, name in REFERENCES if not module}
    assert here - on_page == {
        "test_each_line_names_a_test_and_each_test_has_a_line"
    }


def fitted(model, data, **kwargs):
    model.fit(data, verbose=0, **kwargs)
    return model


def trained(model, data):
    """The same by tfdist."""
    loop, _ = local_loop(model, data)
    with pytest.raises(EndOfInput):
        loop.run(1000)
    return model


def ids_of(*steps):
    """One batch of ids a step, whose rows are to become 1."""
    data = tf.data.Dataset.from_tensor_slices(tf.constant(steps))
    return data.map(lambda ids: (ids, tf.ones_like(ids, tf.float32)))


def table_model(table, optimizer):
    """Predicts the sum of a row; rows begin alike."""
    ids = keras.Input([], dtype="int64")
    model = keras.Model(ids, keras.ops.sum(table(ids), axis=-1))
    model.compile(optimizer, "mse")
    return model


def partitioned(optimizer, rows=3):
    table = tfdist.PartitionedEmbedding(rows, 2, embeddings_initializer="ones")
    return table_model(table, optimizer)


def embedding(optimizer, rows=3):
    table = keras.layers.Embedding(rows, 2, embeddings_initializer="ones")
    return table_model(table, optimizer)


def rows_of(model):
    return np.array(model.weights[0])


# --- Tables ------------------------------------------------------------------

LAZY = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5),
    "weight_decay": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.5),
}


@pytest.mark.parametrize("name", LAZY)
def test_a_row_changes_only_in_steps_that_look_it_up(name):
    once, twice = ids_of([0, 1]), ids_of([0, 1], [1, 2])
    for train, make, stays in (
        (trained, partitioned, True),
        (fitted, embedding, False),
    ):
        first = rows_of(train(make(LAZY[name]()), once))[0]
        then = rows_of(train(make(LAZY[name]()), twice))[0]
        assert np.array_equal(first, then) == stays


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.RMSprop(0.1),
        lambda: keras.optimizers.SGD(0.1, clipnorm=0.5),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Ftrl(0.1),
    ],
)
def test_the_gradient_of_a_repeated_id_is_one_sum(optimizer):
    """As a dense gradient is: of a matrix that one-hot ids multiply."""
    data = ids_of(*[[0, 0, 0, 1]] * 3)
    ids = keras.Input([], dtype="int64")
    matrix = keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")
    output = keras.ops.sum(matrix(keras.ops.one_hot(ids, 2)), axis=-1)
    model = keras.Model(ids, output)
    model.compile(optimizer(), "mse")
    dense = rows_of(fitted(model, data))
    ours = rows_of(trained(partitioned(optimizer(), 2), data))
    theirs = rows_of(fitted(embedding(optimizer(), 2), data))
    np.testing.assert_allclose(ours, dense, rtol=1e-5)
    assert abs(theirs - dense).max() > 0.01


# --- Optimizers --------------------------------------------------------------


@pytest.mark.parametrize("every", [5, 100])
def test_weights_are_their_averages_once_training_ends(tmp_path, every):
    """Also where the last step was saved before it was known to be that."""

    def made():
        return logistic(keras.optimizers.SGD(0.5, use_ema=True))

    config = tfdist.RunConfig(tmp_path, save_checkpoints_steps=every)
    ours = tfdist.Estimator(made, config)
    ours.train(lambda: batches().take(5))
    theirs = fitted(made(), batches().take(5))
    plain = fitted(logistic(keras.optimizers.SGD(0.5)), batches().take(5))
    for other, raw in zip(theirs.weights, plain.weights, strict=True):
        mine = ours.get_variable_value(other.path)
        np.testing.assert_allclose(mine, other, rtol=1e-5)
        assert abs(mine - np.array(raw)).max() > 0.01


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="Keras 3.12"
)
def test_schedule_free_starts_at_the_weights():
    def made():
        return logistic(keras.optimizers.ScheduleFreeAdamW(1e-4))

    start = made().weights[0].numpy()
    ours = trained(made(), batches().take(1)).weights[0]
    theirs = fitted(made(), batches().take(1)).weights[0]
    np.testing.assert_allclose(ours, start, atol=2e-4)
    assert abs(theirs.numpy() - start).max() > 0.01


# --- Randomness --------------------------------------------------------------


def test_random_layers_draw_by_the_number_of_the_step():
    """A seed's state is where it began; `fit` counts in it."""

    def made():
        return logistic(hidden=[keras.layers.Dropout(0.5, seed=3)])

    def state(model):
        (seed,) = model.non_trainable_variables
        return np.array(seed)

    before = state(made())
    np.testing.assert_array_equal(state(trained(made(), batches())), before)
    assert (state(fitted(made(), batches())) != before).any()


def test_data_are_read_in_the_order_of_the_dataset():
    """`fit` shuffles arrays; tfdist takes datasets alone."""
    x, y = examples(64)
    shuffled = logistic()
    shuffled.fit(x, y, batch_size=8, verbose=0)
    in_order = fitted(logistic(), batches())
    ours = trained(logistic(), batches())
    for mine, other, third in zip(
        ours.weights, in_order.weights, shuffled.weights, strict=True
    ):
        np.testing.assert_allclose(mine, other, rtol=1e-5)
        assert (np.array(mine) != np.array(third)).any()


def test_the_end_of_the_data_is_no_step():
    data = batches(size=32, batch_size=8)
    of_unknown_size = data.filter(lambda *_: True)
    for dataset, theirs in ((data, 4), (of_unknown_size, 5)):
        model = fitted(logistic("adam"), dataset)
        assert int(model.optimizer.iterations) == theirs
        model = trained(logistic("adam"), dataset)
        assert int(model.optimizer.iterations) == 4


def test_orders_of_shuffling_are_those_of_the_dataset(tmp_path):
    """`fit` begins one iterator more, before the second epoch."""

    def shuffled():
        return tf.data.Dataset.from_tensor_slices(examples(24)).shuffle(24, 3)

    def passes(dataset, *numbers):
        model, batched = logistic("sgd"), dataset.batch(8)
        read = [[*batched] for _ in range(max(numbers) + 1)]
        for batch in (batch for number in numbers for batch in read[number]):
            model.train_on_batch(*batch)
        return model

    theirs = fitted(logistic("sgd"), shuffled().batch(8), epochs=2)
    ours, _ = tfdist.fit(
        lambda: logistic("sgd"),
        lambda: shuffled().batch(8),
        epochs=2,
        steps_per_epoch=3,
        model_dir=tmp_path,
    )
    for model, numbers in ((ours, (0, 1)), (theirs, (0, 2))):
        expected = passes(shuffled(), *numbers)
        for mine, wanted in zip(model.weights, expected.weights, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-5)


# --- Logs, metrics, callbacks ------------------------------------------------


def test_logs_are_of_the_steps_just_run():
    """Those of `fit` are running means over the epoch so far."""
    model = logistic(keras.optimizers.SGD(0.0), metrics=["accuracy"])
    loop, _ = local_loop(model, batches(32, 8))
    runs = [loop.run(2), loop.run(2)]
    theirs = logistic(keras.optimizers.SGD(0.0), metrics=["accuracy"])
    epoch = theirs.fit(batches(32, 8), verbose=0).history
    for name in ("loss", "accuracy"):
        assert runs[0][name] != runs[1][name]
        mean = (runs[0][name] + runs[1][name]) / 2
        assert mean == pytest.approx(epoch[name][0], rel=1e-5)


def test_batch_callbacks_get_the_logs_of_their_step():
    ours, theirs = [], []

    def noting(seen):
        return keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda i, logs: seen.append((i, logs["loss"]))
        )

    def build():
        model = logistic()
        loop, global_step = local_loop(model, batches().repeat())
        return tfdist.Trainable(loop, global_step, {}, model=model)

    hook = tfdist.KerasCallbackHook([noting(ours)], steps_per_epoch=8)
    stop = StopAtStepHook(last_step=8)
    with MonitoredTrainingSession(build, hooks=[hook, stop]) as session:
        while not session.should_stop():
            session.run()
    logistic().fit(batches(), verbose=0, callbacks=[noting(theirs)])
    assert [i for i, _ in ours] == [i for i, _ in theirs] == [*range(8)]
    losses = np.array([loss for _, loss in ours])
    means = np.cumsum(losses) / np.arange(1, 9)
    np.testing.assert_allclose(means, [loss for _, loss in theirs], rtol=1e-5)
    assert abs(losses - means)[1:].min() > 1e-4


def test_class_weights_are_weights_of_the_examples():
    """`fit(class_weight=...)` is the third element of a batch."""
    weights = {0: 0.2, 1: 3.0}

    def weighted(x, y):
        weight = tf.where(y[:, 0] > 0, weights[1], weights[0])
        return x, y, weight

    ours = trained(logistic(), batches().map(weighted))
    theirs = fitted(logistic(), batches(), class_weight=weights)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5)


# --- Jobs --------------------------------------------------------------------


def estimator(tmp_path, model_fn=logistic):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    return tfdist.Estimator(model_fn, config)


class Calls(keras.layers.Layer):
    """Counts its calls, in training or not, and answers with the count."""

    def build(self, _):
        self.count = self.add_weight((), "zeros", trainable=False)
        self.scale = self.add_weight((), "ones")

    def call(self, x):
        self.count.assign_add(1)
        return keras.ops.ones_like(x) * self.count * self.scale


def test_evaluations_start_each_batch_from_the_checkpoint(tmp_path):
    def model_fn():
        model = keras.Sequential([keras.Input([1]), Calls()])
        model.compile(keras.optimizers.SGD(0.0), "mae")
        return model

    def three_batches():
        x = tf.zeros([3, 1])
        return tf.data.Dataset.from_tensor_slices((x, x)).batch(1)

    estimator = tfdist.Estimator(model_fn, tfdist.RunConfig(str(tmp_path)))
    estimator.train(three_batches)  # The loss is the count.
    assert estimator.evaluate(three_batches)["loss"] == 4
    model = fitted(model_fn(), three_batches())
    assert model.evaluate(three_batches(), verbose=0) == (4 + 5 + 6) / 3


def test_a_loss_that_is_no_number_ends_training(tmp_path):
    def input_fn():
        return batches().map(lambda x, y: (x / 0.0, y))

    fitted(logistic(), input_fn())
    with pytest.raises(NanLossDuringTrainingError):
        estimator(tmp_path).train(input_fn)


def test_training_goes_on_from_the_last_checkpoint(tmp_path):
    for steps in (3, 5):
        estimator(tmp_path).train(lambda: batches().repeat(), max_steps=steps)
    made = estimator(tmp_path)
    (kernel,) = (n for n in made.get_variable_names() if "/kernel" in n)
    ours = made.get_variable_value(kernel)
    theirs = fitted(logistic(), batches().take(5))
    np.testing.assert_allclose(ours, theirs.weights[0], rtol=1e-5)


def test_workers_that_read_at_once_add_what_each_found(monkeypatch):
    """Two steps that both read before either writes."""

    def made():
        return logistic(hidden=[keras.layers.BatchNormalization()])

    def changes(*data):
        """Of each weight, by steps that read at once."""
        model, updates = made(), []
        step = local_loop(model, batches().repeat())[0]._step
        update = step.update
        monkeypatch.setattr(step, "update", lambda *a: updates.append(a))
        monkeypatch.setattr(step._layout, "assigns", False)  # As on servers.

        @tf.function(autograph=False)
        def together():
            for i, batch in enumerate(data):
                number = tf.constant(i, tf.int64)
                step.train(batch, number, step.zero_states())
            for found in updates:
                update(*found)

        before = [np.array(v) for v in model.weights]
        together()
        return [
            np.array(v) - b for v, b in zip(model.weights, before, strict=True)
        ]

    one, other = batches().take(2)
    both = changes(one, other)
    for total, *parts in zip(both, changes(one), changes(other), strict=True):
        np.testing.assert_allclose(total, sum(parts), rtol=1e-4, atol=1e-6)
    theirs = fitted(made(), batches().take(2))
    after = [
        np.array(v) - np.array(b)
        for v, b in zip(theirs.weights, made().weights, strict=True)
    ]
    pairs = zip(after, both, strict=True)
    assert max(abs(a - b).max() for a, b in pairs) > 1e-3

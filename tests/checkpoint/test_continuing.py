"""A job goes on where its last checkpoint is."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, logistic

import tfdist
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import Cluster

pytestmark = pytest.mark.slow

STEP = "global_step"
ITERATIONS = "adam/iteration"


def model_fn():
    return logistic(keras.optimizers.Adam(0.01))


def other_model():
    return logistic(
        keras.optimizers.Adam(0.01), hidden=[keras.layers.Dense(7, name="more")]
    )


def estimator(model_dir, model_fn=model_fn):
    return tfdist.Estimator(
        model_fn, tfdist.RunConfig(model_dir, cluster=Cluster())
    )


def endless():
    return batches().repeat()


def counters(made):
    return [int(made.get_variable_value(n)) for n in (STEP, ITERATIONS)]


def all_values(made):
    return {n: made.get_variable_value(n) for n in made.get_variable_names()}


def assert_equal(some, others):
    assert set(some) == set(others)
    for name in some:
        np.testing.assert_allclose(
            some[name], others[name], rtol=1e-6, atol=1e-8, err_msg=name
        )


# --- The same model ----------------------------------------------------------


def test_steps_add_up_exactly(tmp_path):
    made = estimator(tmp_path)
    for total in (100, 200):
        made.train(endless, steps=100)
        assert counters(made) == [total, total]
    once = estimator(tmp_path / "once").train(endless, steps=200)
    assert_equal(all_values(made), all_values(once))


def test_max_steps_is_of_the_job(tmp_path):
    made = estimator(tmp_path).train(endless, max_steps=100)
    made.train(endless, max_steps=150)
    assert counters(made) == [150, 150]


@pytest.mark.parametrize("max_steps", [20, 7])
def test_max_steps_reached_already(tmp_path, caplog, max_steps):
    made = estimator(tmp_path).train(endless, max_steps=20)
    before, files = all_values(made), sorted(tmp_path.glob("model.ckpt-*"))

    class Counter(tfdist.SessionRunHook):
        runs = 0

        def after_run(self, run_context, run_values):
            self.runs += 1

    counter = Counter()
    with caplog.at_level(logging.WARNING, "tfdist"):
        made.train(endless, hooks=[counter], max_steps=max_steps)
    assert counter.runs == 0
    # TensorFlow itself may warn of functions that other tests have traced.
    ours = [r for r in caplog.records if r.name.startswith("tfdist")]
    (line,) = [r.getMessage() for r in ours]
    assert "This job is already finished" in line
    assert f"is at step 20, and max_steps is {max_steps}. No step is" in line
    assert sorted(tmp_path.glob("model.ckpt-*")) == files
    assert_equal(all_values(made), before)


def test_new_data_after_the_end(tmp_path):
    """The result is that of one job on the old data and then the new."""
    made = estimator(tmp_path)
    old, new = batches(40, 8, seed=0), batches(56, 8, seed=1)
    for dataset, total in ((old, 5), (new, 12)):
        made.train(lambda dataset=dataset: dataset)
        assert counters(made) == [total, total]
    once = estimator(tmp_path / "once").train(lambda: old.concatenate(new))
    assert_equal(all_values(made), all_values(once))


def test_no_new_data(tmp_path):
    made = estimator(tmp_path).train(batches)
    before = all_values(made)
    with pytest.raises(ValueError, match="has no batch: no step was run"):
        made.train(lambda: batches().take(0))
    assert_equal(all_values(made), before)


def test_data_that_had_been_read_to_their_end(tmp_path, caplog):
    """Saved behind the last batch, by a process that then was killed."""
    made = estimator(tmp_path).train(batches, max_steps=8)
    before = all_values(made)
    with caplog.at_level(logging.WARNING, "tfdist"):
        estimator(tmp_path).train(batches, max_steps=9)
    assert "read to its end when" in caplog.text
    assert_equal(all_values(made), before)


# --- Another model -----------------------------------------------------------

LINES = {
    # What the directory holds, and what is trained in it.
    "more": (
        (model_fn, other_model),
        [
            r"sequential/more/kernel: shape \(4, 7\) in the model, missing in",
            r"sequential/dense/kernel: shape \(7, 1\) in the model, \(4, 1\)",
        ],
    ),
    "fewer": (
        (other_model, model_fn),
        [
            r"sequential/more/bias: missing in the model, shape \(7,\) in the",
            r"sequential/dense/kernel: shape \(4, 1\) in the model, \(7, 1\)",
        ],
    ),
    "optimizer": (
        (model_fn, lambda: logistic(keras.optimizers.Adagrad(0.01))),
        [
            r"kernel/adagrad/accumulator: shape \(4, 1\) in the model, missing",
            r"kernel/adam/momentum: missing in the model, shape \(4, 1\) in",
        ],
    ),
    "subset": (
        (model_fn, lambda: logistic(keras.optimizers.Adam(0.01, amsgrad=True))),
        [r"kernel/adam/velocity_hat: shape \(4, 1\) in the model, missing in"],
    ),
    "superset": (
        (lambda: logistic(keras.optimizers.Adam(0.01, amsgrad=True)), model_fn),
        [r"kernel/adam/velocity_hat: missing in the model, shape \(4, 1\) in"],
    ),
}


@pytest.mark.parametrize("change", LINES)
def test_every_difference_is_listed(tmp_path, change):
    (first, second), lines = LINES[change]
    made = estimator(tmp_path, first).train(endless, steps=2)
    before = all_values(made)
    with pytest.raises(ValueError, match="does not fit the model") as raised:
        estimator(tmp_path, second).train(endless, steps=2)
    for line in lines:
        assert raised.match(line)
    assert "choose another model_dir" in str(raised.value)
    assert_equal(all_values(made), before)


@pytest.mark.parametrize("rate", [0.01, 0.5])
def test_another_learning_rate_is_told(tmp_path, caplog, rate):
    """As with Keras, that of the checkpoint goes on, which may have changed."""
    for value in (0.01, rate):
        made = estimator(
            tmp_path, lambda rate=value: logistic(keras.optimizers.SGD(rate))
        )
        made.train(endless, steps=2)
    saved = made.get_variable_value("sgd/learning_rate")
    assert saved == pytest.approx(0.01)
    assert ("Using the learning rates of" in caplog.text) == (rate != 0.01)


@pytest.mark.parametrize("first", ["rate", "schedule"])
def test_a_schedule_in_the_place_of_a_learning_rate(tmp_path, first):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 4, 0.1)
    rates = [0.01, schedule] if first == "rate" else [schedule, 0.01]
    for rate in rates:
        made = estimator(
            tmp_path, lambda rate=rate: logistic(keras.optimizers.SGD(rate))
        )
        made.train(endless, steps=2)
    assert made.get_variable_value("sgd/iteration") == 4
    saved = made.get_variable_names()
    assert ("sgd/learning_rate" in saved) == (first == "schedule")


def growing(admit_after):
    def model_fn():
        table = tfdist.embeddings.DynamicEmbedding(
            2, 4096, admit_after=admit_after, name="table"
        )
        ids = keras.Input([1], dtype="int64")
        output = keras.layers.Dense(1)(keras.layers.Flatten()(table(ids)))
        model = keras.Model(ids, output)
        model.compile("adam", "mse")
        return model

    return model_fn


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_ids_are_admitted_otherwise_from_now_on(tmp_path, before, warm):
    def batches_of(key):
        batch = np.array([[key]]), np.ones([1, 1])
        return lambda: tf.data.Dataset.from_tensors(batch).repeat()

    def live(made):
        keys = made.get_variable_value("table/keys")
        return np.count_nonzero(keys)

    first = estimator(tmp_path / "first", growing(before))
    first.train(batches_of(5), steps=before)
    assert live(first) == 1
    after = growing(4 - before)
    settings = tfdist.WarmStartSettings(str(tmp_path / "first"), [".*"])
    config = tfdist.RunConfig(
        tmp_path / ("other" if warm else "first"), cluster=Cluster()
    )
    made = tfdist.Estimator(
        after, config, warm_start_from=settings if warm else None
    )
    if not warm:
        evaluated = [
            each.evaluate(batches_of(5), steps=1) for each in (first, made)
        ]
        assert evaluated[0] == evaluated[1]
    made.train(batches_of(7), steps=1)
    assert live(made) == (1 if before == 1 else 2)
    made.train(batches_of(7), steps=2)
    assert live(made) == 2


def test_weights_alone_may_be_fewer(tmp_path):
    """To evaluate and to predict take no more than they need."""
    made = estimator(tmp_path).train(endless, steps=2)
    other = estimator(tmp_path, lambda: logistic(keras.optimizers.SGD(1.0)))
    assert other.evaluate(batches)[STEP] == 2
    assert len(list(other.predict(batches))) == 64
    assert checkpoints.step_of(made.latest_checkpoint()) == 2


@pytest.mark.parametrize("both", [True, False])
def test_weights_that_a_model_has_not_are_said(tmp_path, caplog, both):
    """An evaluation, prediction or export of another model than was trained."""

    def two_towers(both=True):
        inputs = keras.Input([4])
        towers = [keras.layers.Dense(1, name=n)(inputs) for n in "ab"]
        noise = keras.layers.Dropout(0.1)(keras.layers.Add()(towers))
        model = keras.Model(inputs, noise if both else towers[0])
        adam = keras.optimizers.Adam(use_ema=True)
        model.compile(keras.optimizers.LossScaleOptimizer(adam), "mse")
        return model

    estimator(tmp_path, two_towers).train(endless, steps=2)
    made = estimator(tmp_path, lambda: two_towers(both))
    uses = (
        lambda: made.evaluate(batches),
        lambda: next(made.predict(batches)),
        lambda: made.export_saved_model(str(tmp_path / "exports")),
        made.restored_model,
    )
    for use in uses:
        caplog.clear()
        use()
        assert both != ("lacks variables b/bias, b/kernel of" in caplog.text)
        assert both != ("it is not the model that was" in caplog.text)

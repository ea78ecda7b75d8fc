"""Models with a `train_step` of their own, against `fit` and `evaluate`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from pace import slow
from small_models import batches

import tfdist
from tfdist._tf.private_keras import reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.training import optimizers
from tfdist.training.keras_step import KerasStep
from tfdist.training.loop import EndOfInput, LocalLoop
from tfdist.training.step import ModelStep


class Guide(keras.Model):
    """As in Keras' guide to custom steps: its own loss, its own trackers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.auc = keras.metrics.AUC(name="auc", num_thresholds=20)

    @property
    def metrics(self):
        return [self.loss_tracker, self.auc]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.ops.mean(keras.losses.binary_crossentropy(y, y_pred))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return self.logged(y, y_pred, loss)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        loss = keras.ops.mean(keras.losses.binary_crossentropy(y, y_pred))
        return self.logged(y, y_pred, loss)

    def logged(self, y, y_pred, loss):
        self.loss_tracker.update_state(loss)
        self.auc.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


class Adversarial(keras.Model):
    """Two networks, two optimizers, no `call`, and no log called "loss"."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input([3]), keras.layers.Dense(4)], name="generator"
        )
        self.discriminator = keras.Sequential(
            [keras.Input([4]), keras.layers.Dense(1)], name="discriminator"
        )
        self.seeds = keras.random.SeedGenerator(7)
        self.generated = tf.Variable(0, trainable=False)

    def compile(self, rate=0.01, **kwargs):
        super().compile(**kwargs)
        self.generator_optimizer = keras.optimizers.Adam(rate)
        self.discriminator_optimizer = keras.optimizers.Adam(rate)

    def losses_of(self, real):
        noise = keras.random.normal([8, 3], seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.discriminator(self.generator(noise))
            margin = self.discriminator(real)
            by_discriminator = keras.ops.mean(
                keras.ops.softplus(-margin)
            ) + keras.ops.mean(keras.ops.softplus(fake))
            by_generator = keras.ops.mean(keras.ops.softplus(-fake))
        return tape, by_discriminator, by_generator

    def train_step(self, data):
        # Depends on no batch: must not run when there is none.
        self.generated.assign_add(8)
        tape, d_loss, g_loss = self.losses_of(data[0])
        for loss, network, optimizer in (
            (d_loss, self.discriminator, self.discriminator_optimizer),
            (g_loss, self.generator, self.generator_optimizer),
        ):
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def test_step(self, data):
        _, d_loss, g_loss = self.losses_of(data[0])
        return {"both": d_loss + g_loss}


def guide():
    reset_object_names()
    keras.utils.set_random_seed(1)
    x = keras.Input([4])
    hidden = keras.layers.Dense(6, "relu")(x)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.4, seed=5)(hidden)
    model = Guide(x, keras.layers.Dense(1, "sigmoid")(hidden), name="guide")
    # With options that a parameter server does not support.
    model.compile(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))
    return model


def adversarial(**kwargs):
    reset_object_names()
    keras.utils.set_random_seed(1)
    model = Adversarial()
    model.compile(**kwargs)
    return model


MODELS = {"guide": guide, "adversarial": adversarial}
BATCHES = 12


def dataset():
    return batches(BATCHES * 8, 8)


def estimator(model_fn, model_dir, **kwargs):
    config = tfdist.RunConfig(
        model_dir, cluster=Cluster(), steps_per_dispatch=2, **kwargs
    )
    return tfdist.Estimator(model_fn, config)


def loop(model, data, steps_per_dispatch=None):
    global_step = tf.Variable(0, dtype=tf.int64)
    optimizers.build(model.optimizer, model.trainable_variables)
    step = KerasStep(model, data.element_spec, global_step=global_step)
    return LocalLoop(step, global_step, data, steps_per_dispatch)


def saved(path):
    """Every variable of a checkpoint, by name."""
    names = checkpoints.saved_shapes(path)
    return {name: checkpoints.load_variable(path, name) for name in names}


# --- Training ----------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_estimator_trains_as_fit_does(name, tmp_path):
    theirs = MODELS[name]()
    theirs.fit(dataset(), verbose=0, shuffle=False)
    made = estimator(MODELS[name], tmp_path).train(
        lambda: dataset().repeat(), max_steps=BATCHES
    )
    ours = saved(made.latest_checkpoint())
    assert ours["global_step"] == BATCHES
    for variable in theirs.weights:
        np.testing.assert_allclose(
            ours[variable.path], variable.numpy(), rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("steps_per_dispatch", [*slow(1), 5])
@pytest.mark.parametrize("name", MODELS)
def test_logs_of_a_run_are_those_of_an_epoch(name, steps_per_dispatch):
    """Also where a run is several dispatches; the next run begins anew."""
    history = (
        MODELS[name]()
        .fit(dataset(), verbose=0, epochs=2, shuffle=False)
        .history
    )
    ours = loop(MODELS[name](), dataset().repeat(), steps_per_dispatch)
    for epoch in range(2):
        expected = {log: values[epoch] for log, values in history.items()}
        assert ours.run(BATCHES) == pytest.approx(expected, rel=1e-5)
        assert ours.step == BATCHES * (epoch + 1)
    assert ours.run(0) == {}


def test_end_of_input_is_exact():
    model = adversarial()
    ours = loop(model, dataset().take(5))
    with pytest.raises(EndOfInput) as raised:
        ours.run(10)
    assert set(raised.value.logs) == {"d_loss", "g_loss"}
    assert ours.step == 5
    assert int(model.generated.numpy()) == 5 * 8
    assert int(model.seeds.state.numpy()[1]) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_resuming_changes_nothing(name, tmp_path):
    """All is saved: slots of every optimizer, seeds, counters."""
    for directory, stops in (("once", [8]), ("twice", [3, 8])):
        for stop in stops:
            estimator(MODELS[name], tmp_path / directory).train(
                lambda: dataset().repeat(), max_steps=stop
            )
    once, twice = (
        saved(str(tmp_path / directory / "model.ckpt-8"))
        for directory in ("once", "twice")
    )
    assert set(once) == set(twice)
    for variable in once:
        np.testing.assert_allclose(
            once[variable], twice[variable], rtol=1e-6, atol=1e-8
        )


def test_a_checkpoint_has_what_the_model_does_not_name(tmp_path):
    made = estimator(adversarial, tmp_path).train(dataset, steps=3)
    ours = saved(made.latest_checkpoint())
    others = {k: v for k, v in ours.items() if k.startswith("train_step/")}
    counters = {k: v for k, v in others.items() if "iteration" in k}
    assert [int(v) for v in counters.values()] == [3, 3]
    slots = [name for name in others if "momentum" in name]
    assert len(slots) == 4
    assert all(np.any(others[name]) for name in slots)
    assert 3 * 8 in [int(v) for v in others.values() if not np.ndim(v)]


def test_nan_in_any_log_ends_training(tmp_path):
    made = estimator(
        lambda: adversarial(rate=float("nan")), tmp_path, check_numerics=False
    )
    with pytest.raises(tfdist.NanLossDuringTrainingError):
        made.train(dataset)
    assert checkpoints.step_of(made.latest_checkpoint()) == 0


# --- Evaluation --------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_evaluates_as_keras_does(name, tmp_path):
    theirs = MODELS[name]()
    expected = theirs.evaluate(dataset(), verbose=0, return_dict=True)
    made = estimator(MODELS[name], tmp_path)
    got = made.evaluate(dataset)
    assert got.pop("global_step") == 0
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_every_evaluation_begins_anew(tmp_path):
    rates = {"save_checkpoints_steps": 4, "keep_checkpoint_max": None}
    made = estimator(guide, tmp_path, **rates)
    metrics, _ = tfdist.train_and_evaluate(
        made,
        tfdist.TrainSpec(lambda: dataset().repeat(), max_steps=8),
        tfdist.EvalSpec(dataset, steps=None, throttle_secs=0),
    )
    assert metrics["global_step"] == 8
    assert metrics == pytest.approx(made.evaluate(dataset), rel=1e-6)


# --- What is refused ---------------------------------------------------------


def test_refused_where_it_cannot_run():
    spec = dataset().element_spec
    step = tf.Variable(0, dtype=tf.int64)
    message = (
        "The `train_step` of Adversarial applies gradients 2 times .*parameter "
        "servers. Override `compute_loss` instead, or train by all-reduce, mi"
    )
    with pytest.raises(ValueError, match=message):
        ModelStep(adversarial(), spec, global_step=step, remote=True)
    evaluating = ModelStep(compiled_guide(), spec)
    batch = next(iter(dataset()))
    with pytest.raises(ValueError, match="Guide overrides `test_step`"):
        evaluating.evaluate(batch, evaluating.zero_states())


def compiled_guide():
    model = guide()
    model.compile("sgd", "binary_crossentropy")
    return model


def test_a_method_of_one_instance_counts_too():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.train_step = lambda data: {"seen": tf.constant(3.0)}
    assert loop(model, dataset()).run(1) == {"seen": 3.0}


@pytest.mark.parametrize(
    ("logs", "error", "message"),
    [
        (lambda x: [x], TypeError, "must return a dictionary of logs. Rec"),
        (lambda x: {"global_step": x}, ValueError, "a log called 'global_"),
        (lambda x: {"x": x}, ValueError, r"'x' of shape \(None, 4\). Use"),
    ],
)
def test_bad_logs(logs, error, message):
    model = guide()
    model.train_step = lambda data: logs(data[0])
    with pytest.raises(error, match=message):
        loop(model, dataset())


def test_no_variables_yet():
    model = Adversarial()
    model.extra = keras.layers.Dense(4)
    model.compile()
    train = model.train_step
    model.train_step = lambda data: train((model.extra(data[0]), data[1]))
    with pytest.raises(ValueError, match=r"first step .* creates variables"):
        loop(model, dataset())

"""tfdist/pipeline and the translator.

What needs no second device runs here with all stages on one; what does is in
`pipeline_checks.py`, which a process with several devices runs.
"""

import doctest
import itertools
import json
import re

import keras
import numpy as np
import pipeline_checks
import pytest
import tensorflow as tf
from pace import slow, slow_but

from tfdist.pipeline import model_parallel
from tfdist.pipeline.model_parallel import Pipeline, bubble
from tfdist.pipeline.stages import op_devices, resolve_devices
from tfdist.training.multi_optimizer import MultiOptimizer
from trainer import translator

HERE = "/job:localhost/replica:0/task:0/device:CPU:0"
ONE_ROW, TWO_ROWS = ["CPU:0"] * 2, [["CPU:0"] * 2] * 2


def dense(units, **arguments):
    return keras.layers.Dense(units, **arguments)


def two_stages():
    return [dense(5, activation="tanh"), dense(1)]


def examples(size=24):
    rng = np.random.default_rng(0)
    x = rng.normal(size=[size, 3]).astype("float32")
    return x, (x.sum(axis=1, keepdims=True) > 0).astype("float32")


def trained(stages, fit=None, inputs=None, **arguments):
    """A pipeline after some steps, and its logs."""
    keras.utils.set_random_seed(1)
    model = Pipeline(
        keras.Input([3]) if inputs is None else inputs, stages(), **arguments
    )
    return pipeline_checks.fitted(model, **(fit or {}))


def on_one_device(stages, fit=None, inputs=None):
    """The same layers in a Keras model, trained by Keras."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input([3]) if inputs is None else inputs
    outputs = inputs
    for stage in stages():
        for layer in stage if isinstance(stage, list) else [stage]:
            outputs = layer(outputs)
    model = pipeline_checks.OneDevice(inputs, outputs)
    return pipeline_checks.fitted(model, **(fit or {}))


def floats(logs):
    """Keras 3.12 logs arrays."""
    return {name: float(value) for name, value in logs.items()}


def assert_same(ours, theirs):
    for mine, other in zip(ours[0].weights, theirs[0].weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
    assert ours[1] == pytest.approx(floats(theirs[1]), rel=1e-4)


# ----------------------------------------- equality with one device, in process

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(
        0.1, global_clipnorm=0.01, loss_scale_factor=8.0
    ),
    "average": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.7),
        momentum=0.9,
        weight_decay=0.01,
    ),
}


@pytest.mark.parametrize("name", slow_but(["clipnorm"], OPTIMIZERS))
def test_trains_as_one_device_does(name):
    theirs = on_one_device(two_stages, {"optimizer": OPTIMIZERS[name]()})
    for devices, num in [(ONE_ROW, 1), (ONE_ROW, 4), (TWO_ROWS, 2)]:
        ours = trained(
            two_stages,
            {"optimizer": OPTIMIZERS[name]()},
            devices=devices,
            num_micro_batches=num,
        )
        assert_same(ours, theirs)
        assert int(ours[0].optimizer.iterations) == pipeline_checks.STEPS


# Keras 3.12 adds this up over a batch, so it counts less in a part of one.
ACTIVITY = None if keras.__version__.startswith("3.12.") else "l1"


def regularized():
    return [
        dense(4, kernel_regularizer="l2", activity_regularizer=ACTIVITY),
        dense(1, bias_regularizer="l1"),
    ]


def frozen():
    first = dense(4)
    first.trainable = False
    return [first, dense(1)]


def embedded():
    return [
        [keras.layers.Rescaling(2.0), keras.layers.Embedding(6, 4)],
        [keras.layers.Flatten(), dense(1)],
    ]


def masked():
    """The second stage and the loss are told what the first one masks."""
    return [
        [keras.layers.Reshape([3, 1]), keras.layers.Masking(0.5)],
        [keras.layers.SimpleRNN(4, return_sequences=True), dense(1)],
    ]


class TwoOutputs(keras.layers.Layer):
    """Passes an integer on, and leaves an output without a gradient."""

    def __init__(self):
        super().__init__(name="two")
        self.a = dense(2, name="a")

    def build(self, shape):
        self.a.build(shape)

    def call(self, x):
        return {"a": self.a(x), "sign": tf.cast(x > 0, tf.int32), "b": 2.0 * x}


class UsesOne(keras.layers.Layer):
    def call(self, inputs):
        sign = tf.reduce_sum(inputs["sign"], axis=-1, keepdims=True)
        return inputs["a"][:, :1] * tf.cast(sign, tf.float32)


class Recomputed(keras.layers.Layer):
    """A layer whose activations are computed again for the gradient."""

    def __init__(self):
        super().__init__()
        self.dense = dense(4, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return keras.remat(self.dense)(x)


WEIGHTS = np.arange(24.0) / 12
FEATURES = {
    "regularizers": (regularized, {}),
    "frozen layer": (frozen, {}),
    "sample weights": (two_stages, {"weights": WEIGHTS}),
    "sum of losses": (
        two_stages,
        {
            "loss": keras.losses.MeanSquaredError(reduction="sum"),
            "optimizer": "adam",
        },
    ),
    "mean with weights": (
        two_stages,
        {
            "loss": keras.losses.MeanSquaredError("mean_with_sample_weight"),
            "weights": WEIGHTS,
        },
    ),
    "ids": (embedded, {"x": np.arange(72).reshape(24, 3) % 3}),
    "mask": (
        masked,
        {
            "x": np.where(np.arange(72).reshape(24, 3) % 5, 1.5, 0.5),
            "y": np.ones([24, 3, 1]),
        },
    ),
    "keras.remat": (lambda: [Recomputed(), [Recomputed(), dense(1)]], {}),
    "structures": (lambda: [TwoOutputs(), [UsesOne(), dense(1)]], {}),
    "bfloat16": (
        lambda: [dense(4, dtype="mixed_bfloat16"), dense(1)],
        {"rtol": 1e-2},
    ),
}


@pytest.mark.parametrize(
    "name", slow_but(("mask", "keras.remat", "structures"), FEATURES)
)
@pytest.mark.parametrize("devices", [*slow(ONE_ROW), TWO_ROWS])
def test_features_are_those_of_one_device(name, devices):
    stages, fit = FEATURES[name]
    fit = dict(fit)
    rtol = fit.pop("rtol", 1e-4)
    ours = trained(stages, fit, devices=devices, num_micro_batches=2)
    theirs = on_one_device(stages, fit)
    for mine, other in zip(ours[0].weights, theirs[0].weights, strict=True):
        np.testing.assert_allclose(mine, other, rtol=rtol, atol=rtol / 100)
    assert ours[1] == pytest.approx(floats(theirs[1]), rel=rtol)


def test_several_inputs_and_outputs():
    def inputs():
        return {name: keras.Input([3], name=name) for name in ("left", "right")}

    def stages():
        left, right = inputs().values()
        with tf.device("CPU:0"):
            first = keras.Model(
                {"left": left, "right": right},
                {"sum": dense(3)(left) + dense(3)(right), "raw": right},
            )
            total = keras.Input([3], name="sum")
            raw = keras.Input([3], name="raw")
            second = keras.Model(
                {"sum": total, "raw": raw},
                {"p": dense(1)(total), "q": dense(1)(raw)},
            )
        return [first, second]

    x, y = examples()
    fit = {
        "x": {"left": x, "right": -x},
        "y": {"p": y, "q": 1 - y},
        "loss": {"p": "mse", "q": "mae"},
        "loss_weights": {"p": 1.0, "q": 0.5},
    }
    ours = trained(stages, fit, inputs(), devices=TWO_ROWS, num_micro_batches=3)
    theirs = on_one_device(stages, fit, inputs())
    assert {"p_loss", "q_loss"} <= ours[1].keys()
    assert_same(ours, theirs)


def test_without_a_graph():
    fit = {"run_eagerly": True}
    assert_same(
        trained(two_stages, fit, devices=TWO_ROWS, num_micro_batches=2),
        on_one_device(two_stages, fit),
    )


def test_evaluates_and_predicts_as_one_device_does():
    ours, theirs = (
        trained(two_stages, devices=ONE_ROW)[0],
        on_one_device(two_stages)[0],
    )
    x, y = examples(10)  # Of any size.
    assert ours.evaluate(x, y, verbose=0) == pytest.approx(
        theirs.evaluate(x, y, verbose=0), rel=1e-4
    )
    np.testing.assert_allclose(
        ours.predict(x, verbose=0), theirs.predict(x, verbose=0), atol=1e-6
    )


# -------------------------------------------------- where a micro-batch matters


def test_batch_norm_sees_micro_batches():
    def stages():
        norm = keras.layers.BatchNormalization(momentum=0.9, center=False)
        return [norm, dense(1)]

    x, _ = examples(24)
    fit = {"x": x, "steps": 1, "optimizer": keras.optimizers.SGD(0.0)}
    model, _ = trained(stages, fit, devices=TWO_ROWS, num_micro_batches=2)
    of_replicas = []
    for share in np.split(x, 2):
        moving = np.zeros(3)
        for part in np.split(share, 2):
            moving = 0.9 * moving + 0.1 * part.mean(axis=0)
        of_replicas.append(moving)
    norm = model.stages[0].layers[0]
    np.testing.assert_allclose(
        norm.moving_mean, np.mean(of_replicas, axis=0), atol=1e-6
    )


def test_dropout_draws_for_each_micro_batch():
    """A row of the kernel moves where its example was not dropped."""

    def stages():
        weights = dense(4, use_bias=False, kernel_initializer="zeros")
        return [keras.layers.Dropout(0.5), weights]

    fit = {
        "x": np.tile(np.eye(16, dtype="float32"), [4, 1]),
        "y": np.repeat(np.eye(4, dtype="float32"), 16, axis=0),
        "loss": lambda y, y_pred: -y * y_pred,
        "steps": 1,
    }
    model, _ = trained(
        stages, fit, keras.Input([16]), devices=TWO_ROWS, num_micro_batches=2
    )
    kernel = model.stages[1].weights[0].numpy()
    for a, b in itertools.combinations(kernel.T != 0, 2):
        assert 0 < np.sum(a) < 16
        assert np.any(a != b)


# ------------------------------------------------------------- names and errors


@pytest.mark.parametrize(
    "name", ["CPU:0", "cpu:0", "/cpu:0", "/device:CPU:0", "/task:0/cpu:0", HERE]
)
def test_names_of_a_device(name):
    assert resolve_devices([name], 1) == ((HERE,),)


def test_default_devices_are_shared_when_there_are_too_few():
    assert len(tf.config.list_logical_devices()) == 1
    assert resolve_devices(None, 3) == ((HERE,) * 3,)


@pytest.mark.parametrize(
    "devices",
    [["CPU:0"], ["CPU:0"] * 3, [["CPU:0"] * 2, ["CPU:0"]], [], "CPU:0"],
)
def test_another_number_of_devices(devices):
    with pytest.raises(ValueError, match="device for each of the 2 stages"):
        Pipeline(keras.Input([3]), two_stages(), devices)


@pytest.mark.parametrize(
    "name", ["CPU:7", "GPU:0", "CPU", "nonsense", "/job:worker/task:0/cpu:0"]
)
def test_a_device_that_does_not_exist(name):
    message = rf"names '{name}', which does not exist. Devices: {HERE}"
    with pytest.raises(ValueError, match=message):
        Pipeline(keras.Input([3]), two_stages(), ["CPU:0", name])


@pytest.mark.parametrize("stage", [len, "dense", keras.layers.Dense, None])
def test_a_stage_that_is_no_layer(stage):
    for stages in ([dense(1), stage], [dense(1), [dense(1), stage]]):
        with pytest.raises(TypeError, match=r"must hold Keras layers.*stage 1"):
            Pipeline(keras.Input([3]), stages, ONE_ROW)


@pytest.mark.parametrize("stages", [[], [dense(1), []]])
def test_no_stage(stages):
    with pytest.raises(ValueError, match="Argument `stages` must h"):
        Pipeline(keras.Input([3]), stages)


def test_a_layer_in_two_stages():
    shared = dense(3, name="shared")
    both = [shared, [keras.layers.ReLU(), shared]]
    with pytest.raises(ValueError, match="'shared/kernel' in stages 0 and 1"):
        Pipeline(keras.Input([3]), both, ONE_ROW)


@pytest.mark.parametrize("num", [0, -1])
def test_too_few_micro_batches(num):
    with pytest.raises(ValueError, match="`num_micro_batches` must be a pos"):
        Pipeline(keras.Input([3]), two_stages(), num_micro_batches=num)


def test_in_the_scope_of_a_strategy():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope(), pytest.raises(ValueError, match="scope of a strat"):
        Pipeline(keras.Input([3]), two_stages())


@pytest.mark.parametrize("known", [True, False])
def test_a_batch_that_does_not_divide(known):
    arrays = examples(10)
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    dataset = dataset.batch(10, drop_remainder=known)
    assert dataset.element_spec[0].shape[0] == (10 if known else None)
    model = Pipeline(keras.Input([3]), two_stages(), TWO_ROWS)
    model.compile("sgd", "mse")
    message = "into 8 parts: 2 replicas x 4 micro"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        model.fit(dataset, verbose=0)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            "SGD with gradient_accumulation_steps=2",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "LossScaleOptimizer with",
        ),
        (
            lambda: MultiOptimizer(
                [
                    ("kernel", keras.optimizers.SGD()),
                    (
                        ".*",
                        keras.optimizers.Adam(gradient_accumulation_steps=3),
                    ),
                ]
            ),
            r"'adam(_\d+)?' skips some.*MultiOptimizer with .*_steps=3",
        ),
    ],
)
def test_optimizers_that_a_pipeline_does_not_apply(optimizer, message):
    with pytest.raises(ValueError, match=message):
        trained(two_stages, {"optimizer": optimizer()}, devices=ONE_ROW)


def test_every_op_asks_for_its_device():
    model, _ = trained(two_stages, {"steps": 1}, devices=ONE_ROW)
    x, y = examples()
    step = tf.function(model.train_step, autograph=False)
    function = step.get_concrete_function((tf.constant(x), tf.constant(y)))
    named = op_devices(function)
    assert any("dense" in name for name in named)
    assert {d for n, d in named.items() if "dense" in n} == {HERE}


def test_sentences_of_the_translator():
    batches = translator.batches(4, vocabulary=6, length=3)
    (x, y), (other, _) = batches.take(2)
    assert x["source"].dtype == y.dtype == tf.int32
    assert set(np.unique(x["source"])) <= {1, 2, 3, 4, 5}
    np.testing.assert_array_equal(y, x["source"][:, ::-1])
    np.testing.assert_array_equal(x["target"][:, 1:], y[:, :-1])
    assert np.all(x["target"][:, 0] == translator.START)
    assert np.any(other["source"] != x["source"])


def test_doctests():
    assert doctest.testmod(model_parallel).failed == 0


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_bubble(stages):
    """What a schedule of equal works leaves idle, counted."""
    for num in (1, 3, 8):
        busy = {(s, s + k) for s in range(stages) for k in range(num)}
        ticks = stages + num - 1
        assert max(t for _, t in busy) == ticks - 1
        idle = 1 - len(busy) / (stages * ticks)
        assert bubble(stages, num) == pytest.approx(idle)


# --------------------------------------------------------- on several devices


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """What a process with four devices found."""
    path = tmp_path_factory.mktemp("local") / "found.json"
    log = pipeline_checks.run_local(path)
    return json.loads(path.read_text()) | {"log": log}


@pytest.mark.slow
def test_variables_and_slots_are_on_the_device_of_their_stage(local):
    placed = local["variables"]
    assert len(placed) == 3 * local["num_weights"] + 2  # Adam: two slots.
    for path, device in placed.items():
        if path in ("adam/iteration", "adam/learning_rate"):
            assert device == pipeline_checks.name(0)
        else:
            stage = 1 + ("second" in path)
            assert ("first" in path) != ("second" in path)
            assert device == pipeline_checks.name(stage), path


@pytest.mark.slow
def test_ops_ask_for_the_device_of_their_stage(local):
    assert_devices_of_stages(local["ops"])


@pytest.mark.slow
def test_ops_run_on_the_device_of_their_stage(local):
    """As TensorFlow's placer says, for all that it has run."""
    ran = pipeline_checks.placements(local["log"])
    assert_devices_of_stages(ran)
    assert any("gradient_tape" in op and "while" in op for op, _ in ran)


def assert_devices_of_stages(placed):
    counts = {"first": 0, "second": 0}
    for op, device in placed:
        for i, layer in enumerate(counts):
            if re.search(rf"(^|/){layer}(_\w+)?/", op):
                assert device == pipeline_checks.name(i + 1), op
                counts[layer] += 1
    assert min(counts.values()) > 50


@pytest.mark.slow
def test_updates_are_on_the_device_of_their_variable(local):
    for ops in local["updates"]:
        assert ops == {pipeline_checks.name(1): 3, pipeline_checks.name(2): 5}


@pytest.mark.slow
def test_devices_work_at_the_same_time(local):
    """The first stage has the next micro-batch, forward and back."""
    work = local["timeline"]
    assert len(work) == 2 * 2 * 4
    for forward in (True, False):
        first, second = (
            [w for w in work if w["stage"] == i and w["forward"] == forward]
            for i in (0, 1)
        )
        assert any(
            a["micro_batch"] != b["micro_batch"]
            and min(a["end"], b["end"]) - max(a["start"], b["start"]) > 0.002
            for a in first
            for b in second
        )


@pytest.mark.slow
def test_a_device_does_one_work_after_the_other_in_order(local):
    for stage in (0, 1):
        own = [w for w in local["timeline"] if w["stage"] == stage]
        assert [(w["forward"], w["micro_batch"]) for w in own] == [
            (forward, k) for forward in (True, False) for k in range(4)
        ]
        for before, after in itertools.pairwise(own):
            assert before["end"] <= after["start"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["SGD, 2 x 2 devices", "Adam, 2 devices"])
def test_the_translator_trains_as_on_one_device(local, case):
    """Weights after ten steps differ by what float32 rounds."""
    assert local["differences"][case] < 1e-5


@pytest.mark.slow
def test_the_translator_translates(local):
    assert local["translated"] > 0.9


@pytest.mark.slow
def test_a_job_resumes_on_other_devices(local):
    assert local["steps"] == [4, 8]
    assert local["resumed_difference"] < 1e-5


@pytest.mark.slow
def test_an_export_needs_none_of_the_devices(local):
    found = pipeline_checks.served_elsewhere(
        local["export"], np.array(local["served"]["x"], "float32")
    )
    np.testing.assert_allclose(found, local["served"]["y"], atol=1e-5)


@pytest.mark.slow
def test_variables_on_another_device_than_their_stage(local):
    assert "Stage 1 must have its variables on" in local["misplaced"]
    assert "with tf.device" in local["misplaced"]


# --------------------------------------------------------- on several machines


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """What the chief of a cluster found, with a stage on each worker."""
    path = tmp_path_factory.mktemp("remote") / "found.json"
    pipeline_checks.run_cluster(path)
    return json.loads(path.read_text())


@pytest.mark.slow
def test_stages_on_other_machines(remote):
    places = {f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in range(2)}
    layers = {p: d for p, d in remote["variables"].items() if "dense" in p}
    assert set(layers.values()) == places
    assert remote["difference"] < 1e-5
    assert {work["device"] for work in remote["timeline"]} == places


@pytest.mark.slow
def test_a_checkpoint_of_other_machines(remote):
    assert remote["restored_difference"] == 0.0

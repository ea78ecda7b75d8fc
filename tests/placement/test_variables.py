"""Descriptions of variables that do not exist."""

import random
import resource

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist._tf.private_keras import settings, use_settings
from tfdist.placement.variables import (
    VariableSpec,
    creation_spec,
    describe,
    variable_spec,
)

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(),
    "momentum": lambda: keras.optimizers.SGD(momentum=0.9),
    "ema": lambda: keras.optimizers.SGD(use_ema=True),
    "adagrad": lambda: keras.optimizers.Adagrad(),
    "adadelta": lambda: keras.optimizers.Adadelta(),
    "adam": lambda: keras.optimizers.Adam(),
    "amsgrad": lambda: keras.optimizers.Adam(amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(),
    "adamax": lambda: keras.optimizers.Adamax(),
    "nadam": lambda: keras.optimizers.Nadam(),
    "ftrl": lambda: keras.optimizers.Ftrl(),
    "rmsprop": lambda: keras.optimizers.RMSprop(),
    "centered": lambda: keras.optimizers.RMSprop(centered=True, momentum=0.9),
    "lion": lambda: keras.optimizers.Lion(),
    "lamb": lambda: keras.optimizers.Lamb(),
    "muon": lambda: keras.optimizers.Muon(),
    "adafactor": lambda: keras.optimizers.Adafactor(),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    ),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam()
    ),
    "accumulation": lambda: keras.optimizers.Adam(
        gradient_accumulation_steps=2
    ),
}
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # Keras 3.12 lacks it.
    OPTIMIZERS["schedule free"] = keras.optimizers.ScheduleFreeAdamW


def small_model(optimizer=None, units=40):
    model = keras.Sequential(
        [
            keras.Input([3]),
            keras.layers.Dense(units),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2, trainable=False),
        ]
    )
    if optimizer is not None:
        model.compile(optimizer, loss="mse", metrics=["mae"])
    return model


def huge_model():
    ids = keras.Input([8], dtype="int64")
    words = keras.Input([1], dtype="string")
    table = keras.layers.Embedding(1_000_000_000, 20)
    x = keras.layers.Flatten()(table(ids))
    lookup = keras.layers.StringLookup(
        vocabulary=["a", "b"], output_mode="multi_hot"
    )
    normalization = keras.layers.Normalization()
    normalization.adapt(np.arange(12.0).reshape(4, 3))
    numbers = keras.Input([3])
    x = keras.layers.Concatenate()([x, lookup(words), normalization(numbers)])
    x = keras.layers.Dense(64, kernel_initializer="orthogonal")(x)
    x = keras.layers.Dense(1, activation="sigmoid")(x)
    model = keras.Model([ids, words, numbers], x)
    model.compile(keras.optimizers.Adagrad(), "binary_crossentropy", ["auc"])
    return model


def test_a_table_of_80_gb_is_described_without_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    specs = {spec.name: spec for spec in describe(huge_model)}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 300_000  # kB, most of it Keras' own modules
    table = specs["embedding/embeddings"]
    assert (table.shape, table.num_slots) == ((1_000_000_000, 20), 1)
    assert "normalization/mean" in specs
    assert not any("auc" in name or "adagrad" in name for name in specs)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_slots_are_those_of_the_built_optimizer(name):
    units = 400  # The kernel gets no memory.
    specs = describe(lambda: small_model(OPTIMIZERS[name](), units))
    model = small_model(OPTIMIZERS[name](), units)
    model.optimizer.build(model.trainable_variables)
    real = sum(
        np.prod(v.shape) * 4 for v in model.optimizer.variables if v.shape.rank
    )
    slots = sum(
        spec.num_slots * spec.num_elements * 4 + spec.extra_bytes
        for spec in specs
    )
    # Adafactor keeps two scalars instead of factors for a vector.
    assert real <= slots <= real + 2 * 8 * len(specs)
    frozen = [spec for spec in specs if not spec.trainable]
    assert all(not spec.num_slots for spec in frozen)


class Own(keras.optimizers.schedules.LearningRateSchedule):
    """One that Keras cannot copy."""

    def __call__(self, step):
        return 0.1 / (1 + step)


@pytest.mark.parametrize("rate", [Own(), lambda: 0.1])
def test_slots_whatever_the_schedule(rate):
    inner = keras.optimizers.Adam(rate)
    optimizer = keras.optimizers.LossScaleOptimizer(inner)
    specs = describe(lambda: small_model(optimizer))
    assert {spec.num_slots for spec in specs if spec.trainable} == {2}


def test_an_optimizer_that_cannot_be_copied():
    class Incomplete(keras.optimizers.SGD):
        def __init__(self, rate):
            super().__init__(learning_rate=rate)

    with pytest.raises(TypeError, match=r"Incomplete .* `get_config` return"):
        describe(lambda: small_model(Incomplete(0.1)))


def test_slots_of_nadam_in_float64():
    """The number that it keeps beside them is of their dtype."""

    def model_fn():
        layer = keras.layers.Dense(2, dtype="float64")
        model = keras.Sequential([keras.Input([3], dtype="float64"), layer])
        model.compile("nadam", "mse")
        return model

    found = [(v.num_slots, v.extra_bytes) for v in describe(model_fn)]
    assert found == [(2, 0), (2, 0)]


def test_names_shapes_and_order_are_the_models():
    specs = describe(lambda: small_model(keras.optimizers.SGD()))
    assert [(spec.name, spec.shape) for spec in specs] == [
        # A seed state is made with its layer, weights when that is built.
        ("seed_generator/seed_generator_state", (2,)),
        ("sequential/dense/kernel", (3, 40)),
        ("sequential/dense/bias", (40,)),
        ("sequential/batch_normalization/gamma", (40,)),
        ("sequential/batch_normalization/beta", (40,)),
        ("sequential/batch_normalization/moving_mean", (40,)),
        ("sequential/batch_normalization/moving_variance", (40,)),
        ("sequential/dense_1/kernel", (40, 2)),
        ("sequential/dense_1/bias", (2,)),
    ]


def test_describing_leaves_no_trace():
    keras.utils.set_random_seed(1)
    expected = random.random(), np.random.rand()
    keras.utils.set_random_seed(1)
    number = keras.backend.get_uid("dense")
    describe(lambda: small_model(keras.optimizers.Adam()))
    assert keras.backend.get_uid("dense") == number + 1
    assert (random.random(), np.random.rand()) == expected


def test_the_callers_dtype_policy_is_used():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float16")
    try:
        specs = describe(lambda: small_model(keras.optimizers.SGD()))
    finally:
        keras.config.set_dtype_policy(before)
    assert specs[1].dtype == "float16"


def test_the_caller_says_what_may_be_loaded():
    class Own(keras.layers.Dense):
        pass

    layers = [keras.Input([2]), Own(3), keras.layers.Lambda(lambda x: x)]
    config = keras.Sequential(layers).to_json()
    before = settings()
    with keras.saving.custom_object_scope({"Own": Own}):
        keras.config.enable_unsafe_deserialization()
        try:
            specs = describe(lambda: keras.models.model_from_json(config))
        finally:
            use_settings(before)
    assert [spec.shape for spec in specs] == [(2, 3), (3,)]


def test_rows_per_step():
    specs = describe(huge_model, rows_per_step={"embedding/embeddings": 7})
    assert [s.rows_per_step for s in specs if s.rows_per_step] == [7]
    with pytest.raises(ValueError, match=r"Received: \['table'\]; the model"):
        describe(huge_model, rows_per_step={"table": 7})


def unbuilt_model():
    return keras.Sequential([keras.layers.Dense(2)])


def model_that_reads(rows=100_000_000):
    model = keras.Sequential([keras.layers.Embedding(rows, 20)])
    model(tf.zeros([1, 1], tf.int32))
    return model


def test_what_a_model_function_reads_gets_values():
    def model_fn():
        model = model_that_reads(rows=100)
        (table,) = model.get_weights()
        assert table.shape == (100, 20)
        assert table.std() > 0
        model.set_weights([table * 2])
        np.testing.assert_array_equal(model.weights[0], table * 2)
        np.testing.assert_array_equal(
            model(np.array([[7]]))[0, 0], table[7] * 2
        )
        return model

    (spec,) = describe(model_fn)
    assert spec.shape == (100, 20)


def test_a_model_function_may_predict():
    def model_fn():
        table = keras.layers.Embedding(100, 20)
        model = keras.Sequential([keras.Input([1], dtype="int32"), table])
        model.predict(np.array([[7]]), verbose=0)
        return model

    (spec,) = describe(model_fn)
    assert (spec.name, spec.shape) == (
        "sequential/embedding/embeddings",
        (100, 20),
    )


@pytest.mark.parametrize(
    ("model_fn", "error", "match"),
    [
        (unbuilt_model, ValueError, r"keras.Input.*call the model on one"),
        (model_that_reads, ValueError, "reads the value of a variable"),
        (lambda: 3, TypeError, "must return a `keras.Model`"),
        (3, TypeError, "must be callable"),
    ],
)
def test_bad_model_functions(model_fn, error, match):
    with pytest.raises(error, match=match):
        describe(model_fn)


def test_creation_spec_executes_nothing():
    def initial_value():
        assert not tf.executing_eagerly()
        return tf.zeros([1_000_000_000, 20])

    spec = creation_spec(name="table:0", initial_value=initial_value)
    assert spec == VariableSpec("table", (1_000_000_000, 20), "float32")
    assert creation_spec(initial_value=[1, 2]).dtype == "int32"
    assert creation_spec(initial_value=1, dtype=tf.int64).shape == ()
    assert not creation_spec(initial_value=1.0, trainable=False).trainable


def test_variable_spec():
    kernel = small_model().layers[0].kernel
    assert variable_spec(kernel).shape == (3, 40)
    assert variable_spec(kernel).name == kernel.path
    spec = VariableSpec("v", [2, None], tf.float64)
    assert variable_spec(spec) is spec
    assert (spec.shape, spec.dtype) == ((2, None), "float64")
    with pytest.raises(TypeError, match="Received: variable=3"):
        variable_spec(3)


@pytest.mark.parametrize(
    "arguments", [{"num_slots": -1}, {"extra_bytes": -1}, {"rows_per_step": -1}]
)
def test_negative_counts(arguments):
    with pytest.raises(ValueError, match="must not be negative"):
        VariableSpec("v", (2,), **arguments)


def test_a_name_is_a_string():
    with pytest.raises(TypeError, match="`name` must be a str"):
        VariableSpec(3, (2,))

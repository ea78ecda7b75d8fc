"""What can be known of TPUs without one: XLA compiles the whole step."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from strategy_checks import dense, dense_data

import tfdist
from tfdist.cluster.strategies import check_tpu
from tfdist.training import optimizers
from tfdist.training.step import ModelStep


def keras_table():
    ids = keras.Input([3], dtype="int32")
    rows = keras.layers.Flatten()(keras.layers.Embedding(50, 8)(ids))
    model = keras.Model(ids, keras.layers.Dense(1, "sigmoid")(rows))
    model.compile("adagrad", "binary_crossentropy", metrics=["auc"])
    return model


def accumulating():
    model = dense()
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model.compile(optimizer, "binary_crossentropy")
    return model


def in_bfloat16():
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    model = dense()
    keras.mixed_precision.set_dtype_policy("float32")
    return model


def ids_data():
    ids = tf.random.uniform([64, 3], 0, 50, tf.int32, seed=1)
    data = (ids, tf.cast(ids[:, :1] % 2, tf.float32))
    return tf.data.Dataset.from_tensor_slices(data).batch(16)


PROGRAMS = {
    "dense": (dense, dense_data),
    "batch_norm": (
        functools.partial(dense, keras.layers.BatchNormalization),
        dense_data,
    ),
    "dropout": (
        functools.partial(dense, lambda: keras.layers.Dropout(0.5)),
        dense_data,
    ),
    "accumulation": (accumulating, dense_data),
    "bfloat16": (in_bfloat16, dense_data),
    "table": (keras_table, ids_data),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_xla_compiles_the_whole_step(name):
    """And it learns what it learns without, but for other random masks."""
    model_fn, data = PROGRAMS[name]
    losses = [trained(model_fn, data, compiled) for compiled in (True, False)]
    assert np.isfinite(losses).all()
    if name != "dropout":
        rtol = 1e-2 if name == "bfloat16" else 1e-4
        np.testing.assert_allclose(*losses, rtol=rtol)


def trained(model_fn, data, compiled):
    """The packed metrics of each of three steps."""
    keras.utils.set_random_seed(1)
    model = model_fn()
    optimizers.build(model.optimizer, model.trainable_variables)
    global_step = tf.Variable(0, dtype=tf.int64)
    batches = list(data().take(3))
    spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, batches[0])
    check_tpu(spec, [])
    step = ModelStep(model, spec, global_step=global_step)

    @tf.function(jit_compile=compiled, autograph=False)
    def train(batch, number):
        return step.pack(step.train(batch, number, step.zero_states()))[0]

    return [
        train(batch, tf.constant(i, tf.int64)).numpy()
        for i, batch in enumerate(batches)
    ]


def test_what_xla_cannot_compile_is_refused():
    table = tfdist.PartitionedEmbedding(50, 8, name="users")
    table.build([None])
    spec = {
        "name": tf.TensorSpec([8], tf.string),
        "x": tf.TensorSpec([None, 3], tf.float32),
    }
    with pytest.raises(ValueError, match="on a TPU:") as raised:
        check_tpu(spec, [table])
    said = str(raised.value)
    assert "Its table 'users' looks up each row once" in said
    assert "Its batches have strings." in said
    assert "not fixed: TensorSpec(shape=(None, 3)" in said
    assert "drop_remainder=True" in said

"""Steps whose parameters are read ahead, beside Keras with late weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from pace import slow

from tfdist import PartitionedEmbedding
from tfdist.training import optimizers
from tfdist.training.loop import run_steps_ahead
from tfdist.training.step import ModelStep

STEPS, RATE = 7, 0.5


def model_of(make_table):
    keras.utils.set_random_seed(1)
    ids = keras.Input([3], dtype="int32")
    rows = keras.layers.Flatten()(make_table()(ids))
    model = keras.Model(ids, keras.layers.Dense(1, "tanh")(rows))
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def weights_of(model):
    """Those of its table, whole, then the others."""
    return [*model.layers[1].get_weights(), *model.get_weights()[-2:]]


def batches():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 5, (STEPS, 8, 3)).astype("int32")
    return x, (x[:, :, :1] % 2).astype("float32")


@pytest.mark.parametrize("read_ahead", [*slow(0, 1), 2, *slow(9)])
def test_a_step_reads_what_was_left_so_many_steps_before(read_ahead):
    x, y = batches()
    model = model_of(lambda: PartitionedEmbedding(5, 2, num_shards=2))
    optimizers.build(model.optimizer, model.trainable_variables)
    theirs = model_of(lambda: keras.layers.Embedding(5, 2))
    theirs.set_weights(weights_of(model))
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    step = ModelStep(
        model,
        dataset.element_spec,
        global_step=tf.Variable(0, dtype=tf.int64),
        remote=True,
    )

    @tf.function(autograph=False)
    def dispatch(iterator):
        first = tf.constant(0, tf.int64)
        return run_steps_ahead(
            step, STEPS, iterator, first, None, read_ahead=read_ahead
        )

    dispatch(iter(dataset))
    left = [theirs.get_weights()]  # By each step.
    for i in range(STEPS):
        theirs.set_weights(left[max(0, i - read_ahead)])
        with tf.GradientTape() as tape:
            loss = theirs.compute_loss(x[i], y[i], theirs(x[i]))
        gradients = tape.gradient(loss, theirs.trainable_variables)
        pairs = zip(left[-1], map(tf.convert_to_tensor, gradients), strict=True)
        left.append([w - RATE * g.numpy() for w, g in pairs])
    for one, other in zip(weights_of(model), left[-1], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    # Each step counts as stale what it has missed of its own.
    missed = [min(i, read_ahead) for i in range(STEPS)]
    counts = step.staleness.histogram()[: STEPS + 1].tolist()
    assert counts == np.bincount(missed, minlength=STEPS + 1).tolist()

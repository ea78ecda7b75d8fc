from collections import defaultdict

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.canned import estimators
from tfdist.checkpoint.estimator_checkpoint import (
    estimator_name,
    read_estimator_checkpoint,
)
from tfdist.embeddings.layer import logical_path

fc = tf.feature_column


def model(hidden=(3,), partitioner=None):
    word = fc.categorical_column_with_vocabulary_list("f", ["a", "b", "c"])
    number = fc.numeric_column("x")
    estimator = estimators.DNNLinearCombinedRegressor(
        "m",
        linear_feature_columns=[number, word],
        dnn_feature_columns=[number, fc.embedding_column(word, 2)],
        dnn_hidden_units=hidden,
        dnn_dropout=0.5,
        batch_norm=True,
        input_layer_partitioner=partitioner,
    )
    return estimator.model_fn()


# As TF 2.15 wrote them, with the global step and slots.
SHAPES = {
    "dnn/hiddenlayer_0/batchnorm_0/beta": [3],
    "dnn/hiddenlayer_0/batchnorm_0/gamma": [3],
    "dnn/hiddenlayer_0/batchnorm_0/moving_mean": [3],
    "dnn/hiddenlayer_0/batchnorm_0/moving_variance": [3],
    "dnn/hiddenlayer_0/bias": [3],
    "dnn/hiddenlayer_0/kernel": [3, 3],
    "dnn/input_from_feature_columns/input_layer/f_embedding/"
    "embedding_weights": [3, 2],
    "dnn/logits/bias": [1],
    "dnn/logits/kernel": [3, 1],
    "linear/linear_model/bias_weights": [1],
    "linear/linear_model/f/weights": [3, 1],
    "linear/linear_model/x/weights": [1, 1],
}
OTHERS = {
    "global_step": [],
    "training/Ftrl/linear/linear_model/x/weights/linear": [1, 1],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of TF1's saver, and its values."""
    rng = np.random.default_rng(0)
    values = {
        name: rng.normal(size=shape).astype("float32")
        for name, shape in {**SHAPES, **OTHERS}.items()
    }
    path = str(tmp_path_factory.mktemp("estimator") / "model.ckpt")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = {
            name: tf.compat.v1.Variable(value) for name, value in values.items()
        }
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver(variables)
        return saver.save(session, path, global_step=7), values


@pytest.mark.parametrize("num_shards", [None, 2])
def test_every_weight_is_read(checkpoint, num_shards):
    path, values = checkpoint
    partitioner = None
    if num_shards:
        partitioner = tf.compat.v1.fixed_size_partitioner(num_shards)
    made = model(partitioner=partitioner)
    assert read_estimator_checkpoint(made, path) == sorted(SHAPES)
    parts = defaultdict(list)
    for variable in made.variables:
        parts[estimator_name(logical_path(variable))].append(variable.numpy())
    for name in SHAPES:
        table = "/f" in name
        assert len(parts[name]) == (num_shards if table and num_shards else 1)
        np.testing.assert_array_equal(np.concatenate(parts[name]), values[name])


def written(directory, saved):
    keys, values = zip(*saved.items(), strict=True)
    tf.raw_ops.SaveV2(
        prefix=(path := str(directory / "model.ckpt")),
        tensor_names=keys,
        shape_and_slices=[""] * len(keys),
        tensors=values,
    )
    return path


INPUTS = "dnn/input_from_feature_columns/input_layer"
IDS = [fc.categorical_column_with_identity(key, 3) for key in ("f", "g", "a/b")]


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        # As shared_embeddings and shared_embedding_columns had it.
        (tfdist.canned.shared_embeddings(IDS[:2], 2), "f_g_shared_embedding"),
        (
            tfdist.canned.shared_embeddings(IDS[:2], 2),
            f"{INPUTS}/f_g_shared_embedding/embedding_weights",
        ),
        (
            [fc.embedding_column(IDS[2], 2)],
            f"{INPUTS}/a/b_embedding/embedding_weights",
        ),
    ],
)
def test_names_that_have_a_scope_more_or_less(tmp_path, columns, name):
    made = estimators.DNNRegressor([3], columns, "m").model_fn()
    saved = {
        name: np.arange(6, dtype="float32").reshape(3, 2),
        "dnn/hiddenlayer_0/kernel": np.ones([2 * len(columns), 3], "float32"),
        "dnn/hiddenlayer_0/bias": np.zeros(3, "float32"),
        "dnn/logits/kernel": np.ones([3, 1], "float32"),
        "dnn/logits/bias": np.zeros(1, "float32"),
    }
    path = written(tmp_path, saved)
    assert read_estimator_checkpoint(made, path) == sorted(saved)
    [table] = [v for v in made.variables if "embeddings" in v.path]
    np.testing.assert_array_equal(table, saved[name])


def test_the_latest_of_a_directory(checkpoint):
    path, _ = checkpoint
    directory = path.rpartition("/")[0]
    assert read_estimator_checkpoint(model(), directory) == sorted(SHAPES)


def test_model_of_another_shape_is_told_and_left_alone(checkpoint):
    path, _ = checkpoint
    made = model(hidden=(4,))
    before = [v.numpy() for v in made.variables]
    message = r"dnn/logits/kernel: \[4, 1\], saved \[3, 1\]"
    with pytest.raises(ValueError, match=message):
        read_estimator_checkpoint(made, path)
    for variable, value in zip(made.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)


def test_variable_that_is_not_there(checkpoint):
    path, _ = checkpoint
    with pytest.raises(ValueError, match=r"hiddenlayer_1/bias: .* None"):
        read_estimator_checkpoint(model(hidden=(3, 3)), path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="Couldn't find"):
        read_estimator_checkpoint(model(), str(tmp_path))


# --- By a warm start ----------------------------------------------------------


def examples():
    x = {"x": np.float32([[1], [-2], [3]]), "f": np.int64([0, 2, 0])}
    return tf.data.Dataset.from_tensors((x, np.float32([[1], [0], [2]])))


def trained_by_tf1(optimizer, directory):
    """Variables of a linear regression when saved, and three steps later."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        with v1.variable_scope("linear/linear_model"):
            zeros = v1.zeros_initializer
            bias = v1.get_variable("bias_weights", [1], initializer=zeros)
            rate = v1.get_variable("x/weights", [1, 1], initializer=zeros)
            table = v1.get_variable("f/weights", [3, 1], initializer=zeros)
        x, y = v1.data.make_one_shot_iterator(examples().repeat()).get_next()
        logits = bias + x["x"] @ rate + tf.gather(table, x["f"])
        loss = tf.reduce_mean((logits - y) ** 2)
        step = v1.train.get_or_create_global_step()
        train = optimizer.minimize(loss, step)
        session.run(v1.global_variables_initializer())
        variables = {v.op.name: v for v in v1.global_variables()}
        for saves in (False, False, False, True, False, False):
            if saves:
                v1.train.Saver().save(session, f"{directory}/model.ckpt", step)
                saved = session.run(variables)
            session.run(train)
        return saved, session.run(variables)


KERAS_2 = {
    "Adagrad": "Adagrad/{}/accumulator",
    "Adam": "Adam/{}/m",
    "Adam_1": "Adam/{}/v",
    "Ftrl": "Ftrl/{}/accumulator",
    "Ftrl_1": "Ftrl/{}/linear",
    "RMSProp": "RMSprop/{}/rms",
}


@pytest.mark.parametrize("of_keras_2", [False, True])
@pytest.mark.parametrize(
    ("before", "optimizer"),
    [
        (lambda o: o.FtrlOptimizer(0.2), lambda o: o.Ftrl(0.2)),
        (lambda o: o.AdagradOptimizer(0.1), lambda o: o.Adagrad(0.1)),
        (lambda o: o.AdamOptimizer(0.1), lambda o: o.Adam(0.1)),
        (
            lambda o: o.RMSPropOptimizer(0.1),
            lambda o: o.RMSprop(0.1, epsilon=1e-10),
        ),
    ],
)
def test_a_warm_start_takes_slots_of_the_same_rule(
    tmp_path, before, optimizer, of_keras_2
):
    """TF1 and tfdist compute the same three steps from there."""
    old = tmp_path / "old"
    saved, expected = trained_by_tf1(before(tf.compat.v1.train), old)
    if of_keras_2:
        for name in [*saved]:
            weight, _, slot = name.rpartition("/")
            if slot in KERAS_2:
                there = f"training/{KERAS_2[slot].format(weight)}"
                saved[there] = saved.pop(name)
        written(old, saved)
        (old / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"')
    made = tfdist.LinearRegressor(
        [fc.numeric_column("x"), IDS[0]],
        str(tmp_path / "new"),
        optimizer=lambda: optimizer(keras.optimizers),
        partitioner=tf.compat.v1.fixed_size_partitioner(2),
        warm_start_from=tfdist.WarmStartSettings(old, [".*"]),
    )
    made.train(examples().repeat, max_steps=3)
    for name in ("bias_weights", "x/kernel", "f/embeddings"):
        np.testing.assert_allclose(
            made.get_variable_value(f"linear/{name}"),
            expected[estimator_name(f"linear/{name}")],
            rtol=1e-5,
            atol=1e-6,
            err_msg=name,
        )
    assert made.restored_model().optimizer.iterations == 6


def test_a_warm_start_of_other_models_renames(tmp_path):
    """As TF's; ids of rows of a growing table are given."""
    table = np.arange(6, dtype="float32").reshape(3, 2)
    path = written(tmp_path, {"scope/table": table, "w": np.ones([2, 1])})

    def model_fn():
        ids = keras.Input([], dtype="int64")
        rows = tfdist.DynamicEmbedding(2, capacity=512, name="table")(ids)
        output = keras.layers.Dense(1, use_bias=False, name="out")(rows)
        model = keras.Model(ids, output)
        model.compile("adagrad", "mse")
        return model

    names = {"table/embeddings": "scope/table", "out/kernel": "w"}
    settings = tfdist.WarmStartSettings(
        path,
        "out",
        var_name_to_prev_var_name=names,
        var_name_to_ids={"table/embeddings": [7, 8, 9]},
    )
    config = tfdist.RunConfig(tmp_path / "new")
    made = tfdist.Estimator(model_fn, config, warm_start_from=settings)
    ids = tf.data.Dataset.from_tensors(np.int64([9, 7]))
    outputs = [float(value[0]) for value in made.predict(lambda: ids)]
    assert outputs == [9.0, 1.0]


def test_slots_of_another_rule_are_told(tmp_path):
    old = tmp_path / "old"
    momentum = tf.compat.v1.train.MomentumOptimizer(0.1, 0.9)
    trained_by_tf1(momentum, old)
    made = tfdist.LinearRegressor(
        [fc.numeric_column("x"), IDS[0]],
        str(tmp_path / "new"),
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        warm_start_from=tfdist.WarmStartSettings(old, [".*"]),
    )
    with pytest.raises(ValueError, match=r"has no \['linear/linear_model/bias"):
        made.train(examples().repeat, max_steps=3)

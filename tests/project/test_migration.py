"""The page says what is so: names, arguments, snippets."""

import ast
import importlib
import inspect
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.advice import migration
from tfdist.checkpoint import checkpoints
from tfdist.estimator import saved_models

PAGE = migration.PAGE.read_text()
ROWS = migration.read_table()
BLOCKS = re.findall(r"^```(.*)\n([\s\S]*?)^```$", PAGE, re.M)


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def has(root, path):
    """Whether `root` has the attribute that `path` names, part by part."""
    for name in path.split("."):
        if not hasattr(root, name):
            return False
        root = getattr(root, name)
    return True


def looked_up(path):
    """The object with a full name, in a module or a class."""
    names = path.split(".")
    module, rest = importlib.import_module(names[0]), names[1:]
    while rest:
        name, *rest = rest
        if not hasattr(module, name) and inspect.ismodule(module):
            module = importlib.import_module(f"{module.__name__}.{name}")
        elif name in getattr(module, "__dataclass_fields__", ()):
            return module.__dataclass_fields__[name]
        else:
            module = getattr(module, name)
    return module


def calls(text):
    """`(name, arguments by position, arguments by name)` of what is quoted."""
    for code in quoted(text):
        if not re.match(r"tfdist\.\w", code):
            continue
        node = ast.parse(code, mode="eval").body
        args, keywords = [], {}
        if isinstance(node, ast.Call):
            args = [ast.unparse(argument) for argument in node.args]
            keywords = {k.arg: ... for k in node.keywords}
            node = node.func
        yield ast.unparse(node), args, keywords


def listed(text, label):
    """The arguments that a row lists after `label`, up to the full stop."""
    _, _, rest = text.partition(label)
    return quoted(re.sub(r"\(.*?\)", "", re.split(r"\.( |$)", rest)[0]))


def symbol(row):
    return row[0].split(",")[0].strip("` ")


def test_the_table_is_read():
    assert len(ROWS) > 40
    names = [name for row in ROWS for name in quoted(row.symbols)]
    assert len(set(names)) == len(names)


def test_a_method_that_is_listed_by_its_name_is_gone():
    methods = [n for row in ROWS for n in quoted(row.symbols) if n[0] == "."]
    assert methods
    for kind in (tf.data.Dataset, tfdist.Estimator, tfdist.SessionRunHook):
        for method in methods:
            assert not hasattr(kind, method[1:]), method


def test_what_tensorflow_still_has():
    names = [(row, name) for row in ROWS for name in quoted(row[0])]
    for row, name in names:
        if not name.startswith("tf."):
            continue
        name = name.removeprefix("tf.")
        found = "v1" if has(tf.compat.v1, name) else "no"
        found = "yes" if has(tf, name) else found
        assert row[1] == found or (row[1], found) == ("other", "yes"), name


def test_tfdist_has_it_and_takes_these_arguments():
    found = [call for row in ROWS for call in calls(row[2] + row[3])]
    for name, args, keywords in found:
        target = looked_up(name)
        if args or keywords:
            signature = inspect.signature(target)
            bound = signature.bind_partial(*args, **keywords)
            wrong = [n for n, a in bound.arguments.items() if a not in (..., n)]
            assert not wrong, f"{name}: by position, but of another name"


def test_arguments_that_are_new_and_that_are_gone():
    for row in ROWS:
        labels = "New: ", "Not taken: "
        new, gone = (listed(row[3], label) for label in labels)
        if new or gone:
            taken = {
                argument
                for name, _, _ in calls(row[2])
                for argument in inspect.signature(looked_up(name)).parameters
            }
            assert taken >= {*new}, symbol(row)
            assert not taken & {*gone}, symbol(row)


def test_arguments_that_are_gone_are_answered_with_what_to_do_instead():
    gone = [
        (looked_up(name), argument)
        for row in ROWS
        for argument in listed(row[3], "Not taken: ")
        for name, *_ in calls(row[2])
        if name != "tfdist.canned.LinearModel"  # Keras reads its signature.
    ]
    assert len(gone) > 20
    for target, argument in gone:
        told = f"Argument `{argument}` of TF 1 is not taken: ."
        with pytest.raises(TypeError, match=told):
            target(**{argument: None})


def test_a_name_of_tf1_that_is_gone():
    with pytest.raises(AttributeError, match=r"'ModeKeys'.* migrate` names"):
        _ = tfdist.ModeKeys


def test_arguments_that_are_ignored_and_refused(caplog):
    [text] = [row[3] for row in ROWS if symbol(row) == "tf.estimator.RunConfig"]
    ignored = listed(text, "Ignored, with a warning: ")
    refused = listed(text, "Refused: ")
    assert len(ignored) + len(refused) == 8
    for argument in ignored:
        caplog.clear()
        tfdist.RunConfig("m", **{argument: True})
        assert argument in caplog.text
    for argument in refused:
        with pytest.raises(ValueError, match=argument):
            tfdist.RunConfig("m", **{argument: "any"})


def test_the_rest_names_what_exists():
    for code in (x for row in ROWS for x in quoted(row[2] + row[3])):
        if code.startswith("tf."):
            assert has(tf, code.removeprefix("tf.")), code
        if code.startswith("keras."):
            assert has(keras, code.removeprefix("keras.")), code
        if code.startswith("python -m "):
            assert importlib.util.find_spec(code.split()[2]), code


NAMES = [n for n in tfdist.__all__ if not n.islower() or "_" in n]


def test_every_public_name_is_on_the_page():
    on_page = {n.split(".")[1] for n, _, _ in calls(PAGE.replace("```", ""))}
    assert not set(NAMES) - on_page


def test_what_reproduces_a_symbol_is_in_the_table():
    counterparts = {n for row in ROWS for n, _, _ in calls(row[2])}
    for name in NAMES:
        documentation = getattr(tfdist, name).__doc__ or ""
        if re.search(r"tf\.(estimator|contrib|compat\.v1)\.", documentation):
            assert f"tfdist.{name}" in counterparts


# --- What the rows say of numbers: TF 1 (`tf.compat.v1`) and its counterpart --

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, [8, 1]).astype("float32")
LOGITS = RNG.normal(size=[8, 1]).astype("float32")
MASK = np.float32([1, 0, 0, 1, 1, 0, 0, 1])[:, None]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            lambda: tf.compat.v1.losses.mean_squared_error(
                LABELS, LOGITS, MASK
            ),
            lambda **k: keras.losses.MeanSquaredError(**k),
        ),
        (
            lambda: tf.compat.v1.losses.sigmoid_cross_entropy(
                LABELS, LOGITS, MASK
            ),
            lambda **k: keras.losses.BinaryCrossentropy(from_logits=True, **k),
        ),
    ],
)
def test_a_masked_loss(old, new):
    masked = new(reduction="mean_with_sample_weight")
    wanted = pytest.approx(float(old()), rel=1e-6)
    assert float(masked(LABELS, LOGITS, MASK)) == wanted
    assert 2 * float(new()(LABELS, LOGITS, MASK)) == wanted


def test_a_regularizer_that_halves():
    halved = float(keras.regularizers.L2(0.3 / 2)(LOGITS))
    old = 0.3 * float(tf.nn.l2_loss(LOGITS))
    assert halved == pytest.approx(old, rel=1e-6)


def test_dropout_takes_the_part_to_drop():
    ones = tf.ones([1000])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        kept = session.run(tf.compat.v1.nn.dropout(ones.numpy(), 0.9))
    assert np.mean(kept == 0) < 0.2
    assert np.mean(tf.nn.dropout(ones, 0.9) == 0) > 0.8


def test_defaults_of_initializers():
    drawn = {
        name: [
            getattr(v, f"random_{name}_initializer")().get_config()
            for v in (tf.compat.v1, tf)
        ]
        for name in ("normal", "uniform")
    }
    assert [c["stddev"] for c in drawn["normal"]] == [1, 0.05]
    assert [c["minval"] for c in drawn["uniform"]] == [0, -0.05]
    assert keras.initializers.RandomNormal().stddev == 0.05
    assert keras.initializers.RandomUniform().minval == -0.05
    table = tfdist.PartitionedEmbedding(9, 2)
    assert table.embeddings_initializer.maxval == 0.05


@pytest.mark.parametrize("gradient", [1e-4, 1.0])
def test_adagrad_without_an_epsilon(gradient):
    value = keras.Variable([1.0])
    new = keras.optimizers.Adagrad(0.1, 1e-8, epsilon=0)
    new.apply([tf.constant([gradient])], [value])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        old = tf.compat.v1.Variable([1.0])
        rule = tf.compat.v1.train.AdagradOptimizer(0.1, 1e-8)
        update = rule.apply_gradients([(tf.constant([gradient]), old)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(update)
        wanted = session.run(old)
    np.testing.assert_allclose(value.numpy(), wanted, rtol=1e-6)


def test_a_natural_decay():
    old = tf.compat.v1.train.natural_exp_decay(0.1, 7, 3, 0.5)()
    new = keras.optimizers.schedules.ExponentialDecay(0.1, 3, np.exp(-0.5))
    assert float(new(7)) == pytest.approx(float(old), rel=1e-6)


def test_the_old_snippet_uses_what_the_table_explains():
    [before] = [code for kind, code in BLOCKS if kind == "python tf2.15"]
    used = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(before))
        if isinstance(node, ast.Attribute)
    }
    old = {name for name in used if re.match(r"tf\.estimator\.\w+$", name)}
    assert old
    assert old <= {name for row in ROWS for name in quoted(row[0])}


def examples():
    rng = np.random.default_rng(0)
    size = rng.normal(size=[64, 1]).astype("float32")
    features = {"item": rng.integers(0, 9, 64), "size": size}
    labels = (size > 0).astype("float32")
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(8)


def old_checkpoint(directory):
    """What TF 2.15's `LinearRegressor` of one number leaves behind."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.train.create_global_step()
        for name, value in (("size/weights", [[3.0]]), ("bias_weights", [1.0])):
            name = f"linear/linear_model/{name}"
            tf.compat.v1.Variable(value, name=name)
            slot = f"training/Ftrl/{name}"
            many = np.full_like(value, 1000)
            tf.compat.v1.Variable(many, name=f"{slot}/accumulator")
            total = -np.sqrt(many) / 0.2 * value
            tf.compat.v1.Variable(total, name=f"{slot}/linear")
        session.run(tf.compat.v1.global_variables_initializer())
        path = str(directory / "model.ckpt")
        tf.compat.v1.train.Saver().save(session, path, global_step=500)


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    old_checkpoint(tmp_path)
    names = {
        "model_dir": str(tmp_path / "a"),
        "new_model_dir": str(tmp_path / "b"),
        "old_model_dir": str(tmp_path),
        "train_input_fn": examples,
        "eval_input_fn": examples,
    }
    for kind, code in BLOCKS:
        if kind == "python":
            exec(compile(code, "MIGRATION.md", "exec"), names)
    assert saved_models.list_exports(str(tmp_path / "a/export/serving"))
    for directory in "ab":
        path = tf.train.latest_checkpoint(str(tmp_path / directory))
        assert checkpoints.step_of(path) == 8  # Then the data ends.
    trained = names["estimator"]
    for name in ("linear/size/kernel", "linear/bias_weights"):
        value = trained.get_variable_value(name)
        assert 0.5 < value / {"size": 3.0}.get(name.split("/")[1], 1.0) < 1.5

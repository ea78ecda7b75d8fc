import re

import pytest

from tfdist.advice import migration

PROGRAM = """\
import tensorflow as tf
from tensorflow import estimator as est
from tensorflow.contrib.learn.python.learn import learn_runner
layers = tf.layers


def model_fn(features, labels, mode):
    net = layers.dense(features["x"], 3)
    return est.EstimatorSpec(mode, predictions=layers.flatten(net))


iterator = tf.data.Dataset.range(3).make_one_shot_iterator()
learn_runner.run(tf.contrib.unheard.of)
layers = []
layers.append(tf.reduce_sum(tf.log([2.0])))
hook = est.StopAtStepHook(3)
"""


def run(tmp_path, capsys, name, text):
    (tmp_path / name).write_text(text)
    code = migration.main([str(tmp_path / name)])
    out = capsys.readouterr().out.replace(f"{tmp_path}/", "")
    return code, [line for line in out.splitlines() if line[:1] != " "]


def symbols(lines):
    """Of each line but the last, the number and the symbol."""
    found = (re.match(r"a.py:(\d+): ([\w.]+):", line) for line in lines[:-1])
    return [match.groups() for match in found]


def test_what_is_gone_is_listed_with_what_replaces_it(tmp_path, capsys):
    code, lines = run(tmp_path, capsys, "a.py", PROGRAM)
    assert code == 1
    assert symbols(lines) == [
        ("3", "tf.contrib.learn"),
        ("4", "tf.layers"),
        ("8", "tf.layers"),
        ("9", "tf.estimator.EstimatorSpec"),
        ("9", "tf.layers"),
        ("12", ".make_one_shot_iterator"),
        ("13", "tf.contrib.learn.learn_runner.run"),
        ("13", "tf.contrib.unheard.of"),
        ("15", "tf.log"),
        ("16", "tf.estimator.StopAtStepHook"),
    ]
    text = "\n".join(lines)
    assert "a.py:8: tf.layers: by hand: `keras.layers`" in text
    assert "tf.log: use `tf.compat.v1.log`" in text
    assert "a.py:13: tf.contrib.unheard.of: unknown" in text
    assert "use `tfdist.StopAtStepHook(" in text
    assert "reduce_sum" not in text
    assert "append" not in text
    assert lines[-1] == "8 symbols are gone; known of these: 7."


STARS = """\
from tensorflow import *
from tensorflow.keras.layers import *
from tensorflow.contrib.layers import *
from tensorflow.estimator import *
from keras.optimizers import *

net = DenseFeatures([Dense(3), Adam(), relu])
with Session() as session:
    net = log(fully_connected(net))
session = StopAtStepHook
log = print
log(net)
"""


def test_names_of_an_import_of_all(tmp_path, capsys):
    code, lines = run(tmp_path, capsys, "a.py", STARS)
    assert code == 1
    assert symbols(lines) == [
        ("3", "tf.contrib.layers"),
        ("7", "tf.keras.layers.DenseFeatures"),
        ("8", "tf.Session"),
        ("9", "tf.log"),
        ("10", "tf.estimator.StopAtStepHook"),
    ]


def test_every_note_is_told_once(tmp_path, capsys):
    (tmp_path / "a.py").write_text(PROGRAM)
    (tmp_path / "b.py").write_text(PROGRAM)
    migration.main([str(tmp_path)])
    assert capsys.readouterr().out.count("`training_hooks`") == 1


@pytest.mark.parametrize(
    ("program", "listed"),
    [
        ("import tensorflow.compat.v1 as tf\ntf.train.Scaffold()", True),
        ("import tensorflow.compat.v1 as tf\ntf.log(1.0)", False),
        ("import tensorflow as tf\ntf.compat.v1.log(1.0)", False),
        ("import tensorflow as tf\ntf.nn.embedding_lookup(1, 2)", False),
        ("import tensorflow as tf\ntf.summary.scalar('a', 1)", True),
        (
            "import tensorflow as tf\ntf.feature_column.numeric_column('x')",
            False,
        ),
        ("import tensorflow.contrib.slim as slim\nslim.conv2d(1)", True),
        ("import tensorflow_estimator as tfe\ntfe.estimator.RunConfig()", True),
        ("import layers\nlayers.dense(1)", False),
        ("from . import tensorflow as tf\ntf.Session()", False),
        ("grads = optimizer.compute_gradients(loss)", True),
    ],
)
def test_aliases_and_what_stays(tmp_path, capsys, program, listed):
    code, lines = run(tmp_path, capsys, "a.py", program)
    assert code == listed
    assert lines[-1].startswith(f"{listed:d} symbols are gone")


def test_what_cannot_be_read_is_said_and_the_rest_read(tmp_path, capsys):
    (tmp_path / "old.py").write_text("import os\nprint 'hello'\n")
    (tmp_path / "b.py").write_text("import tensorflow as tf\ntf.Session()\n")
    for name in ("a.ipynb", "b.ipynb"):
        (tmp_path / name).write_text("{}")
    paths = [tmp_path, tmp_path / "none.py", tmp_path / "a.ipynb"]
    assert migration.main([*map(str, paths)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"old.py: not read: .*print.* \(old.py, line 2\)", out)
    assert "b.py:2: tf.Session" in out
    assert re.search(r"none.py: not read: .*No such file", out)
    assert "a.ipynb: not read: first run `jupyter nbconvert" in out
    assert out.count("a.ipynb: not read") == out.count("b.ipynb: not read") == 1


def test_members_of_private_modules(tmp_path, capsys):
    program = (
        "from tensorflow.python.estimator.model_fn import ModeKeys as Modes\n"
        "print(Modes.TRAIN)\n"
    )
    _, lines = run(tmp_path, capsys, "a.py", program)
    assert lines[-1] == "1 symbols are gone; known of these: 1."


@pytest.mark.parametrize(
    "symbol",
    [
        "tf.estimator.add_metrics",
        "tf.estimator.BinaryClassHead",
        "tf.estimator.VocabInfo",
        "tf.contrib.estimator.forward_features",
        "tf.contrib.estimator.stop_if_no_decrease_hook",
        "tf.contrib.predictor.from_saved_model",
        "tf.contrib.opt.LazyAdamOptimizer",
        "tf.losses.mean_squared_error",
        "tf.train.piecewise_constant_decay",
        "tf.nn.dynamic_rnn",
        "tf.nn.dropout",
        "tf.random_normal_initializer",
        "tf.contrib.training.train",
        "tf.contrib.slim.learning.train",
        "tf.train.batch_join",
        "tf.train.global_step",
        "tf.train.ExponentialMovingAverage",
        "tf.python.estimator.model_fn.ModeKeys",
        "tf.python.training.sync_replicas_optimizer.SyncReplicasOptimizer",
        "tf.python.training.basic_session_run_hooks",
        "tf.keras.optimizers.legacy.Adagrad",
        "tf.feature_column.shared_embeddings",
        "tf.distribute.experimental.ParameterServerStrategy",
        "tf.distribute.coordinator.ClusterCoordinator",
        "tf.create_partitioned_variables",
        "tf.train.basic_train_loop",
        "tf.RunMetadata",
        "tf.gradients",
    ],
)
def test_what_estimator_programs_use_has_an_answer(tmp_path, capsys, symbol):
    program = f"import tensorflow as tf\n{symbol}()"
    _, lines = run(tmp_path, capsys, "a.py", program)
    assert "unknown" not in lines[0]
    assert "tf.compat.v1" not in lines[0]

import os
import resource
import subprocess
import sys
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import batches, local_loop, logistic

import tfdist
from tfdist._tf.private_keras import reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.checkpoint.checkpoints import Checkpoints, named_variables, restore
from tfdist.checkpoint.names import changed_slots
from tfdist.training import optimizers


def model(optimizer="adagrad", units=3, dropout=True):
    reset_object_names()  # Also before the layers, whatever ran before.
    layers = [keras.layers.Dense(units, name="hidden")]
    if dropout:
        layers.append(keras.layers.Dropout(0.5))
    made = logistic(optimizer, metrics=["auc"], hidden=layers)
    optimizers.build(made.optimizer, made.trainable_variables)
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model trained for three steps, its names and its checkpoint."""
    made = model()
    loop, global_step = local_loop(made, batches())
    loop.run(3)
    variables = named_variables(made, global_step)
    directory = str(tmp_path_factory.mktemp("model"))
    path = Checkpoints(directory, variables).save(3)
    return made, variables, path


def test_names(trained):
    made, variables, path = trained
    weights = ["hidden/kernel", "hidden/bias", "dense/kernel", "dense/bias"]
    name = made.name
    assert set(variables) >= {
        *(v.path for v in made.trainable_variables),
        *(f"{v.path}/adagrad/accumulator" for v in made.trainable_variables),
        "adagrad/iteration",
        "global_step",
    }
    assert all(f"{name}/{weight}" in variables for weight in weights)
    assert not any("auc" in variable for variable in variables)
    saved = checkpoints.saved_shapes(path)
    assert {n: list(v.shape) for n, v in variables.items()} == saved


def test_basename_and_step(trained):
    assert trained[2].endswith("/model.ckpt-3")
    assert checkpoints.step_of(trained[2]) == 3


def test_restores_into_another_instance(trained):
    _, variables, path = trained
    other = model()
    step = tf.Variable(0, dtype=tf.int64)
    restored = named_variables(other, step)
    restore(path, restored)
    assert int(step.numpy()) == 3
    assert list(restored) == list(variables)
    for name, variable in variables.items():
        np.testing.assert_array_equal(variable, restored[name])


@pytest.mark.parametrize("lists_all", [True, False])
def test_an_edited_list_goes_back_to_an_earlier_one(tmp_path, lists_all):
    """As with TF: the first line of the file `checkpoint` is what counts."""
    step = tf.Variable(0, dtype=tf.int64)
    saved = Checkpoints(str(tmp_path), {"global_step": step})
    for number in (1, 2, 3):
        step.assign(number)
        saved.save(number)
    path = tmp_path / "checkpoint"
    first, *rest = path.read_text().splitlines()
    assert first == 'model_checkpoint_path: "model.ckpt-3"'
    lines = [first.replace("-3", "-2"), *(rest if lists_all else [])]
    path.write_text("\n".join(lines))
    again = Checkpoints(str(tmp_path), {"global_step": step})
    earlier = [str(tmp_path / f"model.ckpt-{i}") for i in (2, 1)]
    assert again.restore() == earlier[0]
    assert int(step.numpy()) == 2
    wanted = earlier if lists_all else earlier[:1]
    assert checkpoints.listed(str(tmp_path)) == wanted


def test_restores_the_model_without_its_optimizer(trained):
    made, _, path = trained
    other = model(optimizer="adam")
    restore(path, named_variables(other, optimizer=False))
    for mine, theirs in zip(other.weights, made.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_all_mismatches_are_listed(trained):
    other = model(optimizer="adam", units=5)
    with pytest.raises(ValueError, match="does not fit the model") as raised:
        restore(trained[2], named_variables(other))
    message = str(raised.value)
    assert "hidden/kernel: shape (4, 5) in the model, (4, 3)" in message
    assert "missing in the checkpoint" in message
    assert "another model_dir" in message


def test_a_checkpoint_of_tf1_is_named_as_such(tmp_path):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.train.get_or_create_global_step()
        session.run(tf.compat.v1.global_variables_initializer())
        saver = tf.compat.v1.train.Saver()
        saver.save(session, str(tmp_path / "model.ckpt"), global_step=5)
    made = tfdist.Estimator(model, tfdist.RunConfig(str(tmp_path)))
    for call in (
        lambda: made.train(batches, steps=1),
        lambda: made.train(batches, max_steps=9),
        lambda: made.evaluate(batches),
        made.get_variable_names,
    ):
        with pytest.raises(ValueError, match=r"written by tfdist.*MIGRATION"):
            call()


def test_nothing_is_assigned_when_something_is_wrong(trained):
    other = model(units=5)
    before = [v.numpy() for v in other.weights]
    with pytest.raises(ValueError, match="does not fit"):
        restore(trained[2], named_variables(other))
    for old, variable in zip(before, other.weights, strict=True):
        np.testing.assert_array_equal(old, variable.numpy())


def test_another_dtype_is_no_damage(tmp_path):
    Checkpoints(str(tmp_path), {"w": tf.Variable([1, 2])}).save(1)
    other = Checkpoints(str(tmp_path), {"w": tf.Variable([0.0, 0.0])})
    message = r"not fit the model:\n  w: float32 in the model, int32 saved"
    with pytest.raises(ValueError, match=message):
        other.restore()


@pytest.mark.parametrize("shape", [[None], tf.TensorShape(None)], ids=str)
def test_a_variable_whose_shape_changes(tmp_path, shape):
    def build():
        step = tf.Variable(np.int64(0))
        seen = tf.Variable([0.0], shape=shape)

        def run():
            seen.assign(tf.range(float(step.assign_add(1))))
            return {}

        return tfdist.Trainable(run, step, {"seen": seen})

    for last_step in (3, 5):
        stop = tfdist.StopAtStepHook(last_step=last_step)
        with tfdist.MonitoredTrainingSession(
            build, checkpoint_dir=str(tmp_path), hooks=[stop]
        ) as session:
            before = session.variables["seen"].numpy().tolist()
            while not session.should_stop():
                session.run()
    assert before == [0, 1, 2]
    assert session.variables["seen"].numpy().tolist() == [0, 1, 2, 3, 4]


def test_variables_of_keras(tmp_path):
    saved, empty = keras.Variable([1.0, 2.0]), keras.Variable([0.0, 0.0])
    path = Checkpoints(str(tmp_path), {"w": saved}).save(1)
    assert restore(path, {"w": empty})
    assert empty.numpy().tolist() == [1, 2]


class Twice(keras.layers.Layer):
    """Keras lets a layer have two variables of one name."""

    def build(self, shape):
        self.one = self.add_weight(shape=[], name="w")
        self.two = self.add_weight(shape=[], name="w")

    def call(self, x):
        return x * self.one + self.two


def test_two_variables_of_one_name():
    made = keras.Sequential([keras.Input([2]), Twice(name="twice")])
    made.compile("sgd", "mse")
    optimizers.build(made.optimizer, made.trainable_variables)
    with pytest.raises(ValueError, match=r"are both called '.*twice/w"):
        named_variables(made)


class TwoTables(keras.Model):
    """Two layers of one name, which Keras allows."""

    def __init__(self, in_list):
        super().__init__()
        one = tfdist.PartitionedEmbedding(10, 2, 2, name="table")
        two = tfdist.PartitionedEmbedding(10, 2, 3, name="table")
        if in_list:
            self.tables = [one, two]
        else:
            self.one, self.two = one, two

    def call(self, ids):
        one, two = self.tables if "tables" in vars(self) else self.layers
        return one(ids) + two(ids)


def test_two_tables_of_one_name():
    """The shards of both look like those of one."""
    made = TwoTables(in_list=True)
    made(tf.constant([1, 9]))
    with pytest.raises(ValueError, match=r"both called '.*table/embeddings"):
        named_variables(made)


def test_two_tables_of_one_name_are_called_after_their_attributes():
    made = TwoTables(in_list=False)
    made(tf.constant([1, 9]))
    found = named_variables(made)
    assert {name: v.shape for name, v in found.items()} == {
        "one/embeddings": [10, 2],
        "two/embeddings": [10, 2],
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_tables_of_other_dtypes(tmp_path, dtype):
    """TensorFlow cannot read what it writes of a table of float16."""

    def named(num_shards):
        table = tfdist.PartitionedEmbedding(
            40, 2, num_shards=num_shards, dtype=dtype, name="table"
        )
        made = keras.Sequential([keras.Input([3], dtype="int64"), table])
        name, variable = named_variables(made).popitem()
        return {name.rpartition("/")[-1]: variable}

    if dtype == "float16":
        with pytest.raises(ValueError, match="float16 in 2 shards"):
            named(2)
        return
    saved, other = named(2), named(3)
    restore(Checkpoints(str(tmp_path), saved).save(1), other, exact=True)
    assert (saved["embeddings"].numpy() == other["embeddings"].numpy()).all()


def test_keeps_the_newest(tmp_path):
    variable = {"v": tf.Variable(1.0)}
    checkpoints = Checkpoints(str(tmp_path), variable, max_to_keep=2)
    assert checkpoints.latest is None
    assert checkpoints.restore() is None
    for step in (1, 2, 3):
        variable["v"].assign(float(step))
        assert checkpoints.save(step) == checkpoints.latest
    kept = sorted(path.stem for path in tmp_path.glob("*.index"))
    assert kept == ["model.ckpt-2", "model.ckpt-3"]
    variable["v"].assign(0.0)
    assert checkpoints.restore() == str(tmp_path / "model.ckpt-3")
    assert float(variable["v"]) == 3.0


@pytest.mark.parametrize("max_to_keep", [None, 0])
def test_keeps_all(tmp_path, max_to_keep):
    variable = {"v": tf.Variable(1.0)}
    checkpoints = Checkpoints(str(tmp_path), variable, max_to_keep)
    for step in range(7):
        checkpoints.save(step)
    assert len(list(tmp_path.glob("*.index"))) == 7


def test_a_new_process_still_deletes_what_an_old_one_wrote(tmp_path):
    for step in range(4):
        variable = {"v": tf.Variable(1.0)}
        Checkpoints(str(tmp_path), variable, max_to_keep=2).save(step)
    assert len(list(tmp_path.glob("*.index"))) == 2


names = st.text("aS./_-", min_size=1, max_size=8)


@given(st.sets(names | st.text(min_size=1, max_size=4), min_size=1, max_size=9))
@settings(deadline=None)
def test_names_are_read_as_tensorflow_writes_them(names):
    with tempfile.TemporaryDirectory() as directory:
        variables = {name: tf.Variable(1.0) for name in names}
        path = tf.train.Checkpoint(variables=variables).write(f"{directory}/c")
        assert checkpoints.saved_shapes(path) == {name: [] for name in names}
        assert {checkpoints.load_variable(path, n).item() for n in names} == {1}


def test_a_layer_of_any_name_restores(tmp_path):
    made = logistic(hidden=[keras.layers.Dense(2, name="encoder.Self")])
    variables = named_variables(made, optimizer=False)
    assert any(".S" in name for name in variables)
    restore(Checkpoints(str(tmp_path), variables).save(1), variables, True)


def test_an_optimizer_that_is_not_built():
    made = logistic("adagrad")
    assert not made.optimizer.built
    assert any(n.endswith("/accumulator") for n in named_variables(made))


class Counting(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.global_step = keras.Variable(0.0, name="global_step")

    def call(self, x):
        return x


def test_a_layer_that_has_a_global_step():
    made = logistic(hidden=[Counting()])
    assert "global_step" in named_variables(made)
    with pytest.raises(ValueError, match="'global_step' like the job's step"):
        named_variables(made, tf.Variable(np.int64(0)))


@pytest.mark.parametrize("name", ["a/b", "a.b", "a.b/c.d", "a_b"])
def test_any_name_survives(tmp_path, name):
    path = Checkpoints(str(tmp_path), {name: tf.Variable(2.0)}).save(0)
    assert checkpoints.saved_shapes(path) == {name: []}
    other = {name: tf.Variable(0.0)}
    restore(path, other)
    assert float(other[name]) == 2.0


# --- What is there, and cannot be read ---------------------------------------


def saved_until(directory, last):
    """Checkpoints of steps 0 to `last`."""
    step = tf.Variable(0, dtype=tf.int64)
    checkpoints = Checkpoints(str(directory), {"global_step": step})
    for number in range(last + 1):
        step.assign(number)
        checkpoints.save(number)


def test_too_many_open_files_are_no_damage(tmp_path):
    variable = tf.Variable(0.0)
    saved = Checkpoints(str(tmp_path), {"variable": variable})
    for step in (1, 2):
        variable.assign(step)
        saved.save(step)
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))
    try:
        with pytest.raises(tf.errors.OpError, match="Too many open files"):
            saved.restore()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert saved.restore() == str(tmp_path / "model.ckpt-2")


def test_a_list_that_is_missing(tmp_path):
    """A job would begin anew, and overwrite what is there."""
    saved_until(tmp_path, 3)
    (tmp_path / "checkpoint").unlink()
    files = sorted(tmp_path.iterdir())
    step = tf.Variable(0, dtype=tf.int64)
    job = Checkpoints(str(tmp_path), {"global_step": step})
    message = r"checkpoint', the list.* is missing.*model\.ckpt-3\.index'\]"
    for act in (job.restore, lambda: checkpoints.latest(str(tmp_path))):
        with pytest.raises(ValueError, match=message):
            act()
    assert sorted(tmp_path.iterdir()) == files
    # The two ways out of which the message tells.
    line = 'model_checkpoint_path: "model.ckpt-2"'
    (tmp_path / "checkpoint").write_text(line)
    job = Checkpoints(str(tmp_path), {"global_step": step})
    assert job.restore() == str(tmp_path / "model.ckpt-2")
    assert step.numpy() == 2
    for path in tmp_path.iterdir():
        path.unlink()
    assert Checkpoints(str(tmp_path), {"global_step": step}).restore() is None


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00\x80", b"no list", b"a: \x00", b""]
)
def test_a_list_of_garbage(tmp_path, content):
    saved_until(tmp_path, 1)
    (tmp_path / "checkpoint").write_bytes(content)
    step = {"global_step": tf.Variable(0, dtype=tf.int64)}
    for act in (
        lambda: Checkpoints(str(tmp_path), step).restore(),
        lambda: checkpoints.latest(str(tmp_path)),
    ):
        with pytest.raises(
            ValueError, match=r"damaged.*To continue, write"
        ) as raised:
            act()
        assert type(raised.value) is ValueError
        assert str(tmp_path / "checkpoint") in str(raised.value)


def test_a_list_that_is_emptied_while_a_job_runs(tmp_path):
    step = {"global_step": tf.Variable(0, dtype=tf.int64)}
    job = Checkpoints(str(tmp_path), step)
    job.save(1)
    (tmp_path / "checkpoint").write_bytes(b"")  # As after a power failure.
    with pytest.raises(ValueError, match=r"damaged.*To continue, write"):
        job.save(2)


KILLED = """
import os, signal, sys
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint_management
from tensorflow.python.ops import gen_io_ops
from tfdist.checkpoint.checkpoints import Checkpoints

def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "while the files are written":
    gen_io_ops.merge_v2_checkpoints = lambda *_, **__: tf.py_function(
        kill, [], []
    )
else:
    checkpoint_management.update_checkpoint_state_internal = kill
step = tf.Variable(0, dtype=tf.int64)
Checkpoints(sys.argv[1], {"global_step": step}).save(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "when", ["while the files are written", "before they are listed"]
)
def test_a_job_killed_in_its_first_save(tmp_path, when):
    """It left files and no list, and begins again."""
    command = [sys.executable, "-c", KILLED, str(tmp_path), when]
    assert subprocess.run(command, timeout=120).returncode == -9
    left = {path.name for path in tmp_path.iterdir()}
    assert left
    assert "checkpoint" not in left
    assert ("model.ckpt-0.index" in left) == (when == "before they are listed")
    step = tf.Variable(0, dtype=tf.int64)
    job = Checkpoints(str(tmp_path), {"global_step": step})
    assert job.restore() is None
    job.save(0)
    assert job.restore() == str(tmp_path / "model.ckpt-0")


@pytest.mark.parametrize("name", ["job[1]", "job*", "job?", "a\\b"])
def test_a_directory_in_whose_name_tensorflow_sees_a_pattern(tmp_path, name):
    for path in (str(tmp_path / name), f"gs://bucket/{name}"):
        with pytest.raises(ValueError, match="takes for a pattern"):
            tfdist.RunConfig(path)
        with pytest.raises(ValueError, match="takes for a pattern"):
            tfdist.MonitoredTrainingSession(lambda: None, checkpoint_dir=path)
        with pytest.raises(ValueError, match="takes for a pattern"):
            tfdist.CheckpointSaverHook(path, save_steps=1)
    assert not list(tmp_path.iterdir())


def test_tensorflow_deletes_the_checkpoints_of_others(tmp_path):
    """Why such a name is refused."""
    saved_until(tmp_path / "job2", 0)
    (tmp_path / "job*").mkdir()
    step = {"global_step": tf.Variable(0, dtype=tf.int64)}
    theirs = Checkpoints(str(tmp_path / "job*"), step, max_to_keep=1)
    theirs.save(0)
    theirs.save(1)
    assert not list((tmp_path / "job2").glob("*.index"))


@pytest.mark.parametrize("layer", ["a", "a/b"])
def test_a_weight_that_is_called_as_an_optimizer_s_counter_is(layer):
    """Its layer is no optimizer: what is saved of it is restored."""
    weights = [f"{layer}/iteration", f"{layer}/more", "d/kernel"]
    shared = ["adam/iteration", "sgd/iteration", "sgd/learning_rate"]
    slots = [f"{layer}/iteration/adam/momentum", "d/kernel/adam/momentum"]
    saved, names = [*weights, *shared, *slots], [*weights, *shared, slots[0]]
    assert changed_slots(saved, names) == {*shared, *slots}


def test_another_job_saves_in_the_same_directory(tmp_path):
    """As where a job is started twice, or a chief that was cut off is back."""
    directory, variables = str(tmp_path), {"v": tf.Variable(1.0)}
    saved = Checkpoints(directory, variables)
    # Two of one process do not mind each other.
    Checkpoints(directory, variables).save(2)
    assert saved.save(3) == f"{directory}/model.ckpt-3"
    other = tf.train.CheckpointManager(
        tf.train.Checkpoint(variables=variables),
        directory,
        5,
        None,
        "model.ckpt",
    )
    path = other.save(checkpoint_number=5)
    with pytest.raises(RuntimeError, match=r"Another job saves.*model\.ckpt-5"):
        saved.save(6)
    assert checkpoints.latest(directory) == path
    assert not [*tmp_path.glob("model.ckpt-6*")]
    # Whoever begins now goes on from there, and lets the other end.
    begun = Checkpoints(directory, variables)
    assert begun.restore() == path
    assert begun.save(6) == f"{directory}/model.ckpt-6"


@pytest.mark.parametrize("end", ["", "/"])
def test_a_directory_may_be_relative_or_end_in_a_slash(
    tmp_path, monkeypatch, end
):
    monkeypatch.chdir(tmp_path)
    saved = Checkpoints(f"job{end}", {"v": tf.Variable(1.0)})
    for step in (1, 2):
        saved.save(step)
    Checkpoints(f"job{end}", {"v": tf.Variable(1.0)}).save(3)
    saved.save(4)
    assert checkpoints.latest("job").endswith("-4")

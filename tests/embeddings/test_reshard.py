import os
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import table_checks
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pace import slow_but

from tfdist import MultiOptimizer, PartitionedEmbedding
from tfdist._tf.private_checkpoints import ShardedVariable
from tfdist._tf.private_keras import reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.checkpoint.checkpoints import Checkpoints, named_variables
from tfdist.training import optimizers

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(),
    "adagrad ema": lambda: keras.optimizers.Adagrad(use_ema=True),
    "nadam": lambda: keras.optimizers.Nadam(),
    "multi": lambda: MultiOptimizer(
        [("wide", keras.optimizers.Ftrl()), ("", keras.optimizers.RMSprop())]
    ),
    "same name": lambda: MultiOptimizer(
        [
            ("wide", keras.optimizers.Adam(0.1, name="adam")),
            ("", keras.optimizers.Adam(0.2, name="adam")),
        ]
    ),
}


def built(shards, optimizer="adam", rows=20, strategy="balanced"):
    """A model of tables in so many shards, with its slots."""
    reset_object_names()
    model = table_checks.table_model(
        shards, rows, OPTIMIZERS[optimizer](), strategy
    )
    optimizers.build(model.optimizer, model.trainable_variables)
    return model


def variables_of(model, step=0):
    return named_variables(model, tf.Variable(step, dtype=tf.int64))


def saved(directory, shards, **kwargs):
    """Path of a checkpoint of random values, and these."""
    variables = variables_of(built(shards, **kwargs))
    table_checks.randomize(variables)
    path = Checkpoints(str(directory), variables).save(3)
    return path, table_checks.whole(variables)


def assert_same(got, expected):
    """Bit by bit."""
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert got[name].tobytes() == value.tobytes(), name


# --- In one process ----------------------------------------------------------


@pytest.mark.slow
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_shards_into_any_others(tmp_path, data):
    rows = data.draw(st.integers(1, 50))
    number = st.integers(1, min(rows, 9))
    strategies = st.sampled_from(["balanced", "div"])

    def drawn():
        shards = data.draw(number), data.draw(number)
        return {"shards": shards, "strategy": data.draw(strategies)}

    path, expected = saved(tmp_path, **drawn(), rows=rows)
    variables = variables_of(built(**drawn(), rows=rows))
    checkpoints.restore(path, variables)
    assert_same(table_checks.whole(variables), expected)


@pytest.mark.parametrize("optimizer", slow_but(["same name"], OPTIMIZERS))
def test_slots_of_every_kind(tmp_path, optimizer):
    path, expected = saved(tmp_path, (3, 2), optimizer=optimizer)
    variables = variables_of(built((1, 4), optimizer))
    checkpoints.restore(path, variables)
    assert_same(table_checks.whole(variables), expected)


def test_slices_that_tensorflow_wrote(tmp_path):
    """By its own class for shards, as versions before this one."""
    table = np.arange(90.0, dtype="float32").reshape([30, 3])
    parts = [table[:10], table[10:20], table[20:]]
    whole = ShardedVariable([tf.Variable(part) for part in parts])
    old = Checkpoints(str(tmp_path), {"t/embeddings": whole})
    layer = PartitionedEmbedding(30, 3, num_shards=4, name="t")
    layer.build()
    new = named_variables(keras.Sequential([layer]))
    assert len(layer.runs) > layer.num_shards
    checkpoints.restore(old.save(1), new)
    np.testing.assert_array_equal(layer.get_weights()[0], table)
    # And the other way.
    layer.set_weights([table + 1])
    path = Checkpoints(str(tmp_path), new).save(2)
    checkpoints.restore(path, {"t/embeddings": whole})
    np.testing.assert_array_equal(whole.numpy(), table + 1)
    assert checkpoints.load_variable(path, "t/embeddings")[29].tolist() == [
        *[88.0, 89.0, 90.0]
    ]


def test_names_are_those_of_the_table_in_one_piece(tmp_path):
    path, _ = saved(tmp_path, (3, 2))
    shapes = checkpoints.saved_shapes(path)
    assert shapes["deep/embeddings"] == [20, 4]
    assert shapes["deep/embeddings/adam/velocity"] == [20, 4]
    assert not any("part" in name for name in shapes)
    assert shapes == {
        name: list(v.shape) for name, v in variables_of(built((1, 1))).items()
    }


def test_restore_without_optimizer(tmp_path):
    path, expected = saved(tmp_path, (3, 2))
    model = table_checks.table_model((1, 1))
    variables = named_variables(model, optimizer=False)
    checkpoints.restore(path, variables)
    assert len(variables) == 3 + 4 + 4
    assert_same(
        table_checks.whole(variables), {n: expected[n] for n in variables}
    )


def test_what_does_not_fit_is_listed(tmp_path):
    path, _ = saved(tmp_path, (3, 2))
    variables = variables_of(built((2, 2), rows=21))
    variables["new/kernel"] = tf.Variable([1.0, 2.0])
    before = table_checks.whole(variables)
    with pytest.raises(ValueError, match="does not fit the model") as error:
        checkpoints.restore(path, variables)
    lines = [each for each in str(error.value).splitlines() if "shape" in each]
    assert "  new/kernel: shape (2,) in the model, missing in the chec" in str(
        error.value
    )
    assert (
        "  deep/embeddings: shape (21, 4) in the model, (20, 4) in the checkp"
        in str(error.value)
    )
    assert len(lines) == 1 + 3 * 3  # Three tables with two slots each.
    assert_same(table_checks.whole(variables), before)


# --- On clusters -------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster_checkpoint(tmp_path_factory):
    """Saved from 3 shards, and 2, by 3 parameter servers."""
    directory = tmp_path_factory.mktemp("reshard")
    table_checks.launched("save", directory, 3, 2, ps=3)
    return directory


@pytest.mark.slow
def test_three_servers_write_in_parallel(cluster_checkpoint):
    names = {path.name for path in cluster_checkpoint.glob("model.ckpt-7.*")}
    # One data file for each task that holds variables, besides the chief's.
    assert len(names) >= 1 + 3, names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shards", "ps"),
    [((2, 2), 2), ((5, 1), 1)],
)
def test_other_clusters_read_it(cluster_checkpoint, shards, ps):
    table_checks.launched("restore", cluster_checkpoint, *shards, ps=ps)
    got = np.load(cluster_checkpoint / f"restored-{ps}-{shards[0]}.npz")
    assert_same(got, np.load(cluster_checkpoint / "saved.npz"))


@pytest.mark.slow
def test_a_plain_process_reads_it(cluster_checkpoint):
    variables = variables_of(built((1, 1)))
    restored = Checkpoints(str(cluster_checkpoint), variables).restore()
    assert restored.endswith("model.ckpt-7")
    got = table_checks.whole(variables)
    assert_same(got, np.load(cluster_checkpoint / "saved.npz"))


@pytest.mark.slow
def test_killing_the_chief_in_a_save_leaves_the_checkpoint_before(tmp_path):
    for rows in (500_000, 2_000_000, 8_000_000):
        directory = tmp_path / str(rows)
        directory.mkdir()
        if kill_in_a_save(directory, rows):
            break
    # The kill hit: files of a checkpoint are there that is not complete.
    assert half_written(directory)
    begun = int((directory / "begun").read_text())
    latest = tf.train.latest_checkpoint(str(directory))
    assert checkpoints.step_of(latest) == begun - 1
    variables = variables_of(built((1, 1), rows=rows))
    saver = Checkpoints(str(directory), variables)
    assert saver.restore() == saver.latest == latest
    got = table_checks.whole(variables)
    for name, value in np.load(directory / "saved.npz").items():
        for _ in range(begun - 2):
            value = value + np.ones_like(value)
        np.testing.assert_array_equal(got[name], value, err_msg=name)
    # A restarted chief comes to the same step again.
    path = saver.save(begun)
    assert tf.train.latest_checkpoint(str(directory)) == path


def kill_in_a_save(directory, rows):
    """Kills the chief in the middle of a save; returns whether that hit."""
    log = directory / "kill.log"
    with log.open("w") as file:
        launcher = subprocess.Popen(
            [
                *[sys.executable, "-m", "tfdist.launch"],
                *["--ps=2", "--workers=1", "--max_restarts=0"],
                *[table_checks.__file__, "save_forever"],
                *[str(directory), str(rows)],
            ],
            env=table_checks.environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 240
        begun = directory / "begun"
        while not (begun.exists() and half_written(directory)):
            assert launcher.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.005)
        os.kill(int((directory / "pid").read_text()), signal.SIGKILL)
        launcher.wait(60)
        return bool(half_written(directory))
    finally:
        launcher.terminate()
        launcher.wait(60)


def half_written(directory):
    """Files of checkpoints whose index is not there yet."""
    files = list(directory.glob("model.ckpt-*"))
    done = {path.stem for path in files if path.suffix == ".index"}
    return [
        path
        for path in files
        if path.suffix != ".index" and path.name.split(".data")[0] not in done
    ]

import os
import re

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.embeddings.test_dynamic import data, dynamic, model_of, rows_of
from tfdist.__main__ import main
from tfdist.checkpoint import checkpoints
from tfdist.checkpoint import rehash as rehashing
from tfdist.cluster.spec import Cluster
from tfdist.embeddings.filling import place
from tfdist.embeddings.index import SEGMENT, mixed

OPTIMIZER = "adam ema"  # Moments, and averages of rows.
IDS = 400


def input_fn():
    return data(20, IDS)


def model_fn(segments, num_shards=1, **kwargs):
    table = dynamic(
        num_shards,
        segments * SEGMENT,
        admit_after=2,
        evict_after_steps=1_000,
        **kwargs,
    )
    return model_of(table, OPTIMIZER)


def job(path, *args, **kwargs):
    config = tfdist.RunConfig(path, cluster=Cluster(), steps_per_dispatch=1)
    return tfdist.Estimator(lambda: model_fn(*args, **kwargs), config)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    path = tmp_path_factory.mktemp("jobs") / "old"
    return job(path, 2, 2).train(input_fn, max_steps=12)


def rehash(old, output, capacity):
    """As a user types it."""
    flags = f"--checkpoint={old.model_dir}", f"--output={output}"
    return main(["rehash", *flags, f"--capacity=table={capacity}"])


def by_id(path):
    """Of each variable of the table, the rows by ids; and all the others."""
    shapes = checkpoints.saved_shapes(path)
    values = {name: checkpoints.load_variable(path, name) for name in shapes}
    keys = values.pop("table/keys").ravel()
    key = mixed(tf.range(IDS, dtype=tf.int64)).numpy()
    slot = {k: i for i, k in enumerate(key)}
    live = np.flatnonzero(keys)
    order = live[np.argsort([slot[key] for key in keys[live]])]
    rows = {
        name: values.pop(name)[order]
        for name in shapes
        if name == "table/seen" or name.startswith("table/embeddings")
    }
    return keys[order], rows, values


@pytest.mark.slow
@pytest.mark.parametrize(("segments", "num_shards"), [(4, 3), (1, 1), (3, 1)])
def test_ids_keep_what_they_have(old, tmp_path, segments, num_shards, capsys):
    assert rehash(old, tmp_path, segments * SEGMENT - 5) == 0
    assert f"{tmp_path}/model.ckpt-12" in capsys.readouterr().out
    assert {*os.listdir(tmp_path)} >= {"checkpoint", "model.ckpt-12.index"}
    path = checkpoints.latest(str(tmp_path))
    before, after = by_id(old.latest_checkpoint()), by_id(path)
    np.testing.assert_array_equal(after[0], before[0])
    assert 100 < len(before[0]) < IDS
    names = {
        f"table/embeddings/adam/{slot}" for slot in ("momentum", "average")
    }
    assert {"table/embeddings", "table/seen", *names} < before[1].keys()
    for name, rows in before[1].items():
        assert rows.any(), name
        assert after[1][name].tobytes() == rows.tobytes(), name
    sums = [
        each[2].pop("table/counters").sum(axis=0) for each in (before, after)
    ]
    assert sums[0].tolist() == sums[1].tolist()
    assert sums[0][1] > 100
    sketches = [each[2].pop("table/sketch") for each in (before, after)]
    assert sketches[1].shape[0] == segments
    assert before[2].keys() == after[2].keys() >= {"out/kernel", "global_step"}
    for name, value in before[2].items():
        assert after[2][name].tobytes() == value.tobytes(), name
    # It goes on as the other does: also where the input was.
    first = job(tmp_path, segments, num_shards).train(input_fn, max_steps=20)
    copy = tmp_path / "same"
    rehash(old, copy, 2 * SEGMENT)
    other = job(copy, 2, 2).train(input_fn, max_steps=20)
    tables = [
        each.restored_model().get_layer("table") for each in (first, other)
    ]
    learned = [rows_of(table, np.arange(IDS)) for table in tables]
    np.testing.assert_allclose(*learned, rtol=1e-5, atol=1e-6)
    changed = np.any(
        learned[0]
        != rows_of(old.restored_model().get_layer("table"), np.arange(IDS)),
        axis=1,
    )
    assert changed.sum() > 100


def test_a_changed_capacity_names_the_command(old):
    other = job(old.model_dir, 3)
    with pytest.raises(ValueError, match="tfdist rehash") as error:
        other.train(input_fn, max_steps=20)
    wanted = (
        f"tfdist rehash --checkpoint={old.latest_checkpoint()} "
        "--capacity=TABLE=ROWS --output=NEW_MODEL_DIR"
    )
    assert wanted in str(error.value)


def once():
    """Each id in one step, and there once."""
    batch = np.arange(300).reshape([-1, 3]), np.ones([100, 1])
    return tf.data.Dataset.from_tensors(batch).repeat()


@pytest.mark.slow
def test_ids_without_a_row_keep_their_counts(tmp_path):
    """The next sight of each is its second one, in every capacity."""
    first = job(tmp_path / "first", 2).train(once, max_steps=1)
    for segments in (1, 3, 4):
        rehash(first, tmp_path / str(segments), segments * SEGMENT)
        other = job(tmp_path / str(segments), segments)
        assert other.restored_model().get_layer("table").num_ids() == 0
        other.train(once, max_steps=2)
        assert other.restored_model().get_layer("table").num_ids() == 300


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        ("table=0", "`capacity` must be a positive"),
        (
            "tables=5",
            r"has the growing tables \['table'\]. Received: \['tables'",
        ),
        ("table", "invalid"),
    ],
)
def test_bad_flags(old, tmp_path, capacity, message, capsys):
    flags = f"--checkpoint={old.model_dir}", f"--output={tmp_path}/new"
    with pytest.raises(SystemExit) as ended:
        main(["rehash", *flags, f"--capacity={capacity}"])
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "new").exists()


def test_other_checkpoints_are_not_overwritten(old, capsys):
    with pytest.raises(SystemExit):
        rehash(old, old.model_dir, 3 * SEGMENT)
    assert "has checkpoints. Use another" in capsys.readouterr().err


def test_the_last_variable_is_a_large_one(old, tmp_path, monkeypatch):
    monkeypatch.setattr(rehashing, "_BYTES", -1)  # All are.
    assert rehash(old, tmp_path, 3 * SEGMENT) == 0
    before = checkpoints.saved_shapes(old.latest_checkpoint())
    after = checkpoints.saved_shapes(checkpoints.latest(str(tmp_path)))
    assert after.keys() == before.keys()
    assert after["table/embeddings"][0] == 3 * SEGMENT


def test_the_output_may_be_moved(old, tmp_path):
    rehash(old, tmp_path / "made", 3 * SEGMENT)
    (tmp_path / "made").rename(tmp_path / "moved")
    wanted = [str(tmp_path / "moved/model.ckpt-12")]
    assert checkpoints.listed(str(tmp_path / "moved")) == wanted
    state = tf.train.get_checkpoint_state(str(tmp_path / "moved"))
    assert [*state.all_model_checkpoint_paths] == wanted


def test_no_room():
    keys = mixed(tf.range(SEGMENT + 100, dtype=tf.int64)).numpy()
    with pytest.raises(ValueError, match="'table' do not fit in a capacity of"):
        place(keys, 1, "table")
    held, slots = place(keys, 2, "table")
    np.testing.assert_array_equal(held.ravel()[slots], keys)
    assert np.count_nonzero(held) == len(keys) == len({*slots})

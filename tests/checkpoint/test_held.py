"""Checkpoints that are written while steps go on."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tfdist._tf.private_checkpoints import PartitionedVariable
from tfdist.checkpoint import checkpoints, held
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.checkpoint.held import HeldValues


def variables():
    dense = tf.Variable(tf.range(6.0))
    shards = [tf.Variable(tf.fill([n, 2], float(n))) for n in (3, 5)]
    table = PartitionedVariable(shards, [[(0, 3)], [(3, 5)]])
    count = tf.Variable(7, dtype=tf.int64)
    return {"dense": dense, "a/table": table, "global_step": count}


def change(named):
    """As steps do: dense, sparse, scalar."""
    named["dense"].assign_add(tf.ones([6]))
    for shard in named["a/table"].variables:
        rows = tf.IndexedSlices(tf.ones([1, 2]), [1])
        shard.scatter_add(rows)
    named["global_step"].assign_add(1)


def values(named):
    return {n: tf.convert_to_tensor(v).numpy() for n, v in named.items()}


class Gate:
    """Lets no checkpoint be written before it is opened."""

    def __init__(self, saved, monkeypatch):
        self._open, self.reached = threading.Event(), threading.Event()
        save = saved._manager.save
        monkeypatch.setattr(saved._manager, "save", self._held(save))
        self.open = self._open.set

    def _held(self, save):
        def held(**kwargs):
            self.reached.set()
            assert self._open.wait(30)
            return save(**kwargs)

        return held


@pytest.fixture
def named():
    made = variables()
    change(made)  # Tables are then as updates of rows leave them.
    return made


def test_what_is_written_is_of_the_step(named, tmp_path, monkeypatch):
    saved = Checkpoints(str(tmp_path), named)
    gate = Gate(saved, monkeypatch)
    before = values(named)
    written = saved.save_behind(8)
    assert gate.reached.wait(30)
    for _ in range(3):
        change(named)
    after = values(named)
    assert not written.done()
    assert saved.latest is None
    assert not saved.wait(0.01)
    gate.open()
    path = written.result(30)
    assert saved.wait()
    assert path == saved.latest == str(tmp_path / "model.ckpt-8")
    other = variables()
    assert checkpoints.restore(path, other, exact=True)
    for name, value in values(other).items():
        np.testing.assert_array_equal(value, before[name])
        assert not np.array_equal(value, after[name])
    for name, value in values(named).items():
        np.testing.assert_array_equal(value, after[name])


def test_the_next_save_waits(named, tmp_path, monkeypatch):
    saved = Checkpoints(str(tmp_path), named)
    gate = Gate(saved, monkeypatch)
    first = saved.save_behind(1)
    assert gate.reached.wait(30)
    threading.Timer(0.2, gate.open).start()
    path = saved.save(2)
    assert first.done()
    assert [p[-1] for p in checkpoints.listed(str(tmp_path))] == ["2", "1"]
    assert path.endswith("-2")


def test_an_error_is_for_whoever_asks(named, tmp_path):
    named["dense"].assign([0, 0, float("nan"), 0, 0, 0])
    saved = Checkpoints(str(tmp_path), named)
    written = saved.save_behind(1)
    named["dense"].assign(tf.zeros([6]))
    with pytest.raises(Exception, match="At step 1 1 of 3 variables hold NaN"):
        written.result(30)
    assert saved.save(2).endswith("-2")


def test_without_the_memory_steps_wait(named, tmp_path, monkeypatch, caplog):
    """Nothing writes the variables then, so that nothing is copied."""
    values, free = HeldValues(named), {"here": 2 * 96 + 1}
    monkeypatch.setattr(held, "free_bytes_on", lambda _: free.copy().popitem())
    assert values.bytes == {tf.constant(0).device: 96}
    assert values.fit()
    free["here"] = 96 + 1  # Where a process keeps what it has freed.
    assert values.fit()
    assert not caplog.text
    free["here"] = 2 * 96
    saved = Checkpoints(str(tmp_path), named)
    assert saved.save_behind(1).done()
    assert saved.latest.endswith("-1")
    assert "Steps wait" in caplog.text
    assert "'here'" in caplog.text


def test_servers_of_one_host_share_its_memory(named, monkeypatch):
    values = HeldValues(named)
    values.bytes = {"/job:ps/task:0": 60, "/job:ps/task:1": 60}
    monkeypatch.setattr(held, "free_bytes_on", lambda device: (device, 121))
    assert values.fit()
    values = HeldValues(named)
    values.bytes = {"/job:ps/task:0": 60, "/job:ps/task:1": 60}
    monkeypatch.setattr(held, "free_bytes_on", lambda device: ("one", 121))
    assert not values.fit()


def test_copies_of_replicas_are_not_held(tmp_path):
    """Steps wait: as in all-reduce, whose processes save their positions."""
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        weight = tf.Variable(1.0)
    done = []
    saved = Checkpoints(str(tmp_path), {"w": weight}, before_save=done.append)
    assert saved.save_behind(1).done()
    assert done == [1]


def test_what_is_held_is_released(named):
    values = HeldValues(named)
    values.hold()
    dense = values.variables["dense"]
    np.testing.assert_array_equal(dense, named["dense"])
    values.release()
    assert dense.read_value().numpy().size == 0
    values.hold()
    np.testing.assert_array_equal(dense, named["dense"])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_compiled_steps_leave_it_alone(jit_compile):
    weight = tf.Variable(tf.zeros([1000]))

    @tf.function(jit_compile=jit_compile)
    def step():
        weight.assign_add(tf.ones([1000]))

    values = HeldValues({"weight": weight})
    step()
    values.hold()
    step()
    np.testing.assert_array_equal(values.variables["weight"], tf.ones([1000]))
    np.testing.assert_array_equal(weight, tf.fill([1000], 2.0))


def test_the_position_is_of_the_step(tmp_path, monkeypatch):
    dataset = tf.data.Dataset.range(100).shuffle(10, seed=1)
    iterator = iter(dataset)
    step = tf.Variable(0, dtype=tf.int64)
    named = {"global_step": step}
    saved = Checkpoints(str(tmp_path), named, iterator_fn=lambda: iterator)
    saved.prepare()
    gate = Gate(saved, monkeypatch)
    before = [int(next(iterator)) for _ in range(5)]
    written = saved.save_behind(5)
    later = [int(next(iterator)) for _ in range(5)]
    gate.open()
    written.result(30)
    again = iter(dataset)
    restored = Checkpoints(str(tmp_path), named, iterator_fn=lambda: again)
    restored.restore()
    assert restored.position_restored
    assert [int(next(again)) for _ in range(5)] == later != before

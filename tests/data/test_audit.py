"""tfdist/data/audit.py."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from small_models import logistic

import tfdist
from tfdist.data import audit

SIZE, BATCH = 48, 4


def numbers():
    return tf.data.Dataset.range(SIZE)


def batches(dataset):
    return dataset.batch(BATCH).map(lambda x: ({"x": x, "zero": 0 * x}, x % 2))


def in_order():
    return batches(numbers())


def unsharded(context):
    """Every worker the same, and RunConfig's seed shuffles them alike."""
    return batches(numbers().shuffle(SIZE).repeat())


def sharded(context):
    mine = numbers().shard(
        context.num_input_pipelines, context.input_pipeline_id
    )
    return batches(mine.shuffle(SIZE).repeat())


def one_pass_over_a_shard(context):
    num, index = context.num_input_pipelines, context.input_pipeline_id
    return batches(numbers().shard(num, index).shuffle(SIZE))


def own_seed(context):
    """All of the data, in an order of its own: shares nothing by the step."""
    seed = tf.cast(context.input_pipeline_id, tf.int64)
    return batches(numbers().shuffle(SIZE, seed=seed).repeat())


def not_shuffled(context):
    return batches(
        numbers().shard(context.num_input_pipelines, context.input_pipeline_id)
    )


def forgets_some(context):
    return sharded(context).map(lambda f, y: (f, y)).take(5)


@pytest.mark.parametrize("index_as_tensor", [False, True])
@pytest.mark.parametrize("workers", [2, 4])
def test_the_mistake_is_shown(workers, index_as_tensor):
    found = audit.audit(
        unsharded, workers, seed=1, index_as_tensor=index_as_tensor
    )
    np.testing.assert_array_equal(found.at_the_same_step, 1.0)
    np.testing.assert_array_equal(found.in_all, 1.0)
    (problem,) = found.problems()
    assert "Workers 0 and 1 read the same examples" in problem
    assert f"`unsharded` ({__file__}:" in problem
    assert problem == audit.check_workers_differ(
        unsharded, workers, seed=1, index_as_tensor=index_as_tensor
    )


@pytest.mark.parametrize("index_as_tensor", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_shards_differ(workers, index_as_tensor):
    found = audit.audit(
        sharded,
        workers,
        in_order=in_order,
        seed=1,
        index_as_tensor=index_as_tensor,
    )
    np.testing.assert_array_equal(found.at_the_same_step, np.eye(workers))
    np.testing.assert_array_equal(found.in_all, np.eye(workers))
    assert not len(found.unread)
    assert not found.problems()
    assert min(found.spread) > 0.5
    for read in found.batches:
        assert len(set(np.ravel(read))) == SIZE // workers
    assert audit.check_workers_differ(sharded, workers, seed=1) is None


@pytest.mark.parametrize(
    ("num_files", "index_as_tensor"), [(1, False), (6, True)]
)
def test_dealt_again_in_each_pass(tmp_path, num_files, index_as_tensor):
    for i in range(num_files):
        lines = range(i, SIZE, num_files)
        (tmp_path / f"{i}.txt").write_text("".join(f"{n}\n" for n in lines))

    def dealt(context):
        return tfdist.read_text(
            str(tmp_path / "*.txt"), BATCH, context=context, seed=1
        )

    found = audit.audit(dealt, 3, index_as_tensor=index_as_tensor)
    assert found.repeated == 0
    assert found.alone == [1.0, 1.0, 1.0]
    assert not found.problems()
    assert "in the end: 100%, 100%, 100%" in found.table()
    # Shards of the user's own are of a worker for good.
    own = audit.audit(sharded, 3, index_as_tensor=index_as_tensor)
    assert own.repeated == 0
    assert own.alone == pytest.approx([1 / 3] * 3)
    assert audit.audit(unsharded, 3, seed=1).repeated == SIZE // 3 * 2


def test_a_seed_of_its_own():
    found = audit.audit(own_seed, 2, seed=1)
    assert found.in_all[0, 1] == 1.0
    assert found.at_the_same_step[0, 1] < 0.5
    assert not found.problems()
    assert audit.check_workers_differ(own_seed, 2) is None


def test_without_a_seed_in_this_process():
    """The seed stays what it was: none, so chance makes the workers differ."""
    tf.random.set_seed(None)  # Another file may have set one.
    audit.audit(unsharded, 2, num_batches=1, seed=1)
    assert tf.compat.v1.get_seed(None)[0] is None
    assert audit.audit(unsharded, 2).at_the_same_step[0, 1] < 0.9


def test_not_shuffled():
    found = audit.audit(not_shuffled, 2, in_order=in_order)
    assert max(found.spread) < 0.2
    (problem,) = found.problems()
    assert "Worker 0, 1 reads in the order of the files" in problem
    assert np.isnan(audit.audit(not_shuffled, 2).spread).all()


def test_what_nobody_reads():
    found = audit.audit(forgets_some, 2, in_order=in_order)
    assert len(found.unread) == SIZE - 2 * 5 * BATCH
    read = {*np.ravel(found.batches), *found.known[found.unread]}
    assert read == {*found.known}
    assert f"Nobody reads 8 of {SIZE} examples." in found.problems()[0]


def test_all_of_a_long_dataset_is_read(monkeypatch):
    monkeypatch.setattr(audit, "_MOST_BATCHES", 3)
    assert not audit.audit(one_pass_over_a_shard, 2).problems()


def test_table():
    found = audit.audit(unsharded, 3, 5, seed=1)
    table = found.table()
    assert "3 workers of input function `unsharded`" in table
    assert "     1   100%      -   100%" in table
    assert "problem: Workers 0 and 1" in table
    assert f"of {SIZE}\n" in table


def test_composite_tensors():
    ragged = tf.ragged.constant([[1], [1, 2], [1]])
    sparse = tf.sparse.from_dense([[0, 1], [0, 0], [0, 1]])
    strings = tf.constant([["a", "bc"], ["ab", "c"], ["a", "bc"]])
    for tensor in (ragged, sparse, strings, tf.constant([0.5, 1.5, 0.5])):
        one, two, three = audit.fingerprints(tensor)
        assert one == three != two
        batch = {"t": tensor, "n": tf.constant([1, 2, 3])}
        assert len({*audit.fingerprints(batch)}) == 3
    # Whatever the longest row of their batch is.
    wide = audit.fingerprints(tf.sparse.from_dense([[0, 1, 0], [0, 0, 2]]))
    assert wide[0] == audit.fingerprints(sparse)[0]


def no_batches():
    return numbers()


def of_two_sizes():
    return tf.data.Dataset.from_tensors((tf.ones([3]), tf.ones([2])))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (functools.partial(audit.audit, sharded, 0), "`num_workers` must be"),
        (functools.partial(audit.audit, sharded, 1, 0), "`num_batches` must"),
        (functools.partial(audit.audit, no_batches, 1), "must give batches"),
        (functools.partial(audit.audit, of_two_sizes, 1), "the same for all"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_check_says_nothing_about_what_tells_nothing():
    def constant():
        return tf.data.Dataset.from_tensors(tf.ones([4])).repeat()

    assert audit.check_workers_differ(constant, 2) is None
    assert audit.check_workers_differ(unsharded, 1, seed=1) is None
    empty = functools.partial(lambda: numbers().batch(4).take(0))
    assert audit.check_workers_differ(empty, 2) is None


def ignores_its_context(context):
    return in_order()


@pytest.mark.parametrize(
    ("input_fn", "audit_input", "warns"),
    [
        (in_order, None, True),
        (in_order, False, False),
        (ignores_its_context, None, False),
        (ignores_its_context, True, True),
        (sharded, True, False),
    ],
)
def test_training_on_ps_warns(tmp_path, caplog, input_fn, audit_input, warns):
    """Before it looks for the cluster, which here is not there."""
    jobs = {job: [f"127.0.0.1:{i}"] for i, job in enumerate(("chief", "ps"), 1)}
    jobs["worker"] = ["127.0.0.1:3", "127.0.0.1:4"]
    config = tfdist.RunConfig(
        str(tmp_path),
        cluster=tfdist.Cluster.from_jobs(jobs, "chief", 0),
        session_creation_timeout_secs=0.1,
        audit_input=audit_input,
    )
    with pytest.raises(TimeoutError):
        tfdist.Estimator(logistic, config).train(input_fn, max_steps=1)
    assert ("Workers 0 and 1 read the same" in caplog.text) == warns


def test_command_line(capsys):
    flags = ["--workers=2", "--seed=1", "--batches=3"]
    assert audit.main([f"--input={__name__}:unsharded", *flags]) == 1
    assert "problem: Workers 0 and 1" in capsys.readouterr().out
    assert audit.main([f"--input={__name__}:sharded", "--workers=2"]) == 0
    for bad in ("nobody", "no.such:f", f"{__name__}:no"):
        with pytest.raises(SystemExit, match="2"):
            audit.main([f"--input={bad}"])
        assert f"Received: --input={bad}" in capsys.readouterr().err


@pytest.mark.slow
def test_program():
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.audit", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "without a cluster" in done.stdout

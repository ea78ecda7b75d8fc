import collections
import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import table_checks
import tensorflow as tf

from tfdist.checkpoint import checkpoints
from tfdist.training import optimizers
from tfdist.training.loop import LocalLoop
from tfdist.training.messages import send
from tfdist.training.step import ModelStep


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(
    st.lists(st.integers(-(2**63), 2**63 - 1)),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1),
)
def test_ids_are_the_same_after_a_journey_as_floats(ids, floats):
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def sent(ids):
        words = tf.reshape(tf.bitcast(ids, tf.float32), [-1])
        whole = [tf.constant(floats, tf.float32), words]
        first, second = send(whole, [[len(floats)], [-1]], None, None)
        return first, tf.bitcast(tf.reshape(second, [-1, 2]), tf.int64)

    # Also those that are tiny or no numbers as floats.
    ids += [0, 1, 2**23 - 1, 0x7F800001, 0xFF800001, 0x7F80000100000001]
    first, second = sent(tf.constant(ids, tf.int64))
    np.testing.assert_array_equal(first, np.float32(floats))
    assert second.numpy().tolist() == ids


def trained_in_one_process(steps_per_dispatch):
    model = table_checks.table_model()
    optimizers.build(model.optimizer, model.trainable_variables)
    global_step = tf.Variable(0, dtype=tf.int64)
    dataset = table_checks.batches()
    step = ModelStep(model, dataset.element_spec, global_step=global_step)
    loop = LocalLoop(step, global_step, dataset, steps_per_dispatch)
    loop.run(table_checks.STEPS)
    return table_checks.whole(checkpoints.named_variables(model, global_step))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the chief of 2 ps and 1 worker found."""
    directory = tmp_path_factory.mktemp("exchange")
    table_checks.launched("exchange", directory, ps=2)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "read_ahead"), [(1, 0), (3, 0), (3, 1)])
def test_one_message_each_way(found, num_steps, read_ahead):
    path = found / f"messages_{num_steps}_{read_ahead}.json"
    messages = json.loads(path.read_text())
    kinds = collections.Counter(
        (source, target, dtype)
        for source, target, dtype, _ in messages
        if dtype != "control"
    )
    expected = {}
    for server in ("ps:0", "ps:1"):
        # Ids of the first steps; those of others travel with gradients.
        expected["worker", server, "int64"] = 1 + read_ahead
        expected[server, "worker", "float32"] = num_steps
        expected["worker", server, "float32"] = num_steps
    assert kinds == expected
    # The worker waits for the servers' updates; nothing else waits.
    waits = {(s, t) for s, t, dtype, _ in messages if dtype == "control"}
    assert {target for _, target in waits} == {"worker"}


@pytest.mark.slow
def test_tables_and_dense_variables_are_on_both_servers(found):
    tasks = json.loads((found / "tasks.json").read_text())
    for path in ("deep/embeddings", "more/embeddings", "wide/embeddings"):
        assert set(tasks[path]) == {0, 1}
    assert {tasks["dense/kernel"][0], tasks["dense/bias"][0]} == {0, 1}


@pytest.mark.slow
def test_cluster_of_one_worker_computes_what_one_process_does(found):
    expected = trained_in_one_process(steps_per_dispatch=2)
    got = np.load(found / "trained.npz")
    assert set(got) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            got[name], value, rtol=1e-6, atol=1e-6, err_msg=name
        )


@pytest.mark.slow
def test_counters_are_exact_with_three_workers(tmp_path):
    table_checks.launched("counters", tmp_path, ps=2, workers=3)
    counts = json.loads((tmp_path / "counters.json").read_text())
    assert counts == [[7, 7], [8, 8], [60, 60]]

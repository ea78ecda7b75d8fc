"""What a pool of workers computes, against one process; how its calls end."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import table_checks
import tensorflow as tf

from tfdist.checkpoint import checkpoints
from tfdist.launch.testing import LocalCluster, assert_nothing_left
from tfdist.training.step import ModelStep


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the chief of 2 ps and 2 workers found."""
    directory = tmp_path_factory.mktemp("workers")
    table_checks.launched("inference", directory, ps=2, workers=2)
    return directory


@pytest.fixture(scope="module")
def model(found):
    """The model in this process, with the same weights."""
    model = table_checks.table_model()
    checkpoints.restore(
        tf.train.latest_checkpoint(found),
        checkpoints.named_variables(model, optimizer=False),
    )
    return model


@pytest.mark.slow
def test_metrics_are_exact(found, model):
    batches = table_checks.uneven_batches()
    step = ModelStep(model, batches.element_spec)
    states = step.zero_states()
    for batch in batches:
        states = step.evaluate(batch, states)
    expected = step.result(step.pack(states).numpy())
    metrics = json.loads((found / "metrics.json").read_text())
    assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_predictions_are_in_order(found, model):
    expected = model.predict(table_checks.uneven_batches(), verbose=0)
    assert len(expected) == 8 * table_checks.BATCH + 3
    np.testing.assert_allclose(
        np.load(found / "outputs.npy"), expected, rtol=1e-5
    )


@pytest.mark.slow
def test_steps_that_fail_return(tmp_path):
    """And the input of the next one has neither failed nor ended."""
    found, failures = tmp_path / "found.json", 100
    job = [sys.executable, "-m", "tests.failing_job", str(failures), str(found)]
    root = Path(__file__).parents[2]
    with LocalCluster(job, ps=1, workers=1, cwd=root) as cluster:
        assert cluster.wait(timeout_secs=180) == 0, cluster.output("chief:0")
    assert_nothing_left(cluster)
    ended = json.loads(found.read_text())
    assert ended.pop("done") > 10
    assert ended == {"InvalidArgumentError": failures}

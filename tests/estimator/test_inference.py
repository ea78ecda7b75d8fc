"""`Estimator.evaluate` and `predict` on a cluster, against one process."""

import json
import sys
from pathlib import Path

import inference_job
import numpy as np
import pytest
import recovery_job

from tfdist.launch.testing import LocalCluster, assert_nothing_left

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHIEF = "chief:0"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Where a job has been that lost a worker while it predicted."""
    directory = tmp_path_factory.mktemp("inference")
    begun = inference_job.estimator(str(directory))
    begun.train(inference_job.train_input_fn, max_steps=20)
    command = [
        *[sys.executable, "-m", "tests.inference_job"],
        f"--model_dir={directory}",
    ]
    with LocalCluster(
        command, ps=2, workers=2, cwd=ROOT, log_dir=f"{directory}-logs"
    ) as job:
        job.wait_for_line(CHIEF, "Predicted batch 5", timeout_secs=120)
        pid = job.pid("worker:1")
        assert job.kill("worker:1").pid == pid
        assert job.wait(timeout_secs=120) == 0
        assert f"Predicted batch {inference_job.BATCHES}." in job.output(CHIEF)
        assert job.exit_codes()["worker:1"] == [-9]
    assert_nothing_left(job)
    return directory


def test_metrics_are_exact(model_dir):
    job = inference_job.estimator(str(model_dir))
    found = json.loads((model_dir / "found.json").read_text())
    for metrics, step in zip(found, (20, 40, 40), strict=True):
        expected = job.evaluate(
            recovery_job.eval_input_fn,
            steps=5,
            checkpoint_path=f"{model_dir}/model.ckpt-{step}",
        )
        assert metrics["global_step"] == step
        assert metrics == pytest.approx(expected, rel=1e-5)


def test_predictions_are_whole_and_in_order(model_dir):
    job = inference_job.estimator(str(model_dir))
    expected = list(job.predict(lambda: inference_job.features(0.0)))
    found = np.load(model_dir / "found.npy")
    assert len(found) == inference_job.BATCHES * 16 - 5
    np.testing.assert_allclose(found, expected, rtol=1e-5)

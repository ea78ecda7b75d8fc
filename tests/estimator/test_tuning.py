import glob
import json
import re
from pathlib import Path
from types import SimpleNamespace

import keras
import keras_tuner
import pytest
import tensorflow as tf
from small_models import batches, logistic

import tfdist
from tfdist.cluster.spec import Cluster

PAGE = (Path(__file__).parents[2] / "vertex/README.md").read_text()


def test_each_evaluation_is_reported_while_it_trains(tmp_path):
    """So a tuner can stop a trial; `report_metrics` alone came at the end."""
    path = tmp_path / "output.metrics"
    seen = []

    class Look(tfdist.SessionRunHook):
        def steps_until_next(self, step):
            return None

        def after_run(self, run_context, run_values):
            if path.exists():
                lines = map(json.loads, path.read_text().splitlines())
                steps = {line["global_step"] for line in lines}
                seen.append((run_context.session.step, max(steps)))

    report = tfdist.estimator.ReportMetricsHook(
        str(tmp_path / "eval"), str(path), "3", every_secs=1e-9
    )
    config = tfdist.RunConfig(
        tmp_path, cluster=Cluster(), save_checkpoints_steps=4
    )
    tfdist.train_and_evaluate(
        tfdist.Estimator(logistic, config),
        tfdist.TrainSpec(
            lambda: batches().repeat(), max_steps=8, hooks=[report, Look()]
        ),
        tfdist.EvalSpec(batches, throttle_secs=0),
    )
    assert (4, "4") in seen
    assert seen[-1] == (8, "8")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["global_step"] for line in lines] == ["4", "8"]
    assert {line["trial"] for line in lines} == {"3"}


def test_a_metric_that_no_evaluation_has(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        tf.summary.scalar("accuracy", 0.5, step=7)
    session = SimpleNamespace(is_chief=True)
    path = str(tmp_path / "metrics")
    report = tfdist.estimator.ReportMetricsHook(str(tmp_path), path, tag="auc")
    with pytest.raises(ValueError, match=r"tag='auc' .* \['accuracy'\]"):
        report.end(session)
    tfdist.estimator.ReportMetricsHook(str(tmp_path), path, tag="accuracy").end(
        session
    )
    with open(path) as file:
        assert json.loads(file.read())["accuracy"] == "0.5"


@pytest.mark.slow
def test_keras_tuner(tmp_path, monkeypatch):
    """The example of vertex/README.md, as it stands there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)

    class Model(keras_tuner.HyperModel):
        def build(self, hp):
            rate = hp.Choice("rate", [0.5, 1e-6])
            return logistic(keras.optimizers.SGD(rate), metrics=["AUC"])

    names = {
        "keras_tuner": keras_tuner,
        "tfdist": tfdist,
        "hypermodel": Model(),
        "train_fn": lambda: batches().repeat(),
        "eval_fn": batches,
    }
    (code,) = re.findall(r"```python\n(class Search.*?)```", PAGE, re.DOTALL)
    code = code.replace("1000", "20").replace('"auc", "max"', '"loss", "min"')
    exec(code, names)
    assert names["best"] == {"rate": 0.5}
    assert len(names["tuner"].oracle.trials) == 2
    assert len(glob.glob("untitled_project/job_*")) == 2

import json
import logging
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, logistic

import tfdist
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.estimator import exporters, serving
from tfdist.estimator.exporters import (
    BestExporter,
    Exporter,
    FinalExporter,
    LatestExporter,
)
from tfdist.estimator.saved_models import list_exports


@pytest.fixture(scope="module")
def model():
    return logistic()


# When to export, and what to keep.


@pytest.mark.usefixtures("light")
def test_final_exporter_waits_for_the_end(model, tmp_path):
    exporter = FinalExporter("f")
    assert exporter.export(model, str(tmp_path), {}, False) is None
    assert list(tmp_path.iterdir()) == []
    path = exporter.export(model, str(tmp_path), {}, True)
    assert list_exports(str(tmp_path)) == [path]


@pytest.fixture
def light(monkeypatch):
    """Writes of a file instead of a model: when, not what, is tested."""

    def write(serving, path):
        with open(os.path.join(path, "saved_model.pb"), "w"):
            pass

    monkeypatch.setattr(serving, "write", write)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(("keep", "left"), [(1, 1), (2, 2), (None, 3)])
def test_latest_exporter_keeps_the_newest(model, tmp_path, keep, left):
    exporter = LatestExporter("latest", exports_to_keep=keep)
    paths = [exporter.export(model, str(tmp_path), {}, False) for _ in range(3)]
    assert len(set(paths)) == 3
    assert list_exports(str(tmp_path)) == paths[-left:]


def exported(exporter, model, path, results):
    return [
        exporter.export(model, str(path), result, False) is not None
        for result in results
    ]


@pytest.mark.usefixtures("light")
def test_best_exporter_takes_what_is_strictly_better(model, tmp_path):
    losses = [0.5, 0.5, 0.6, 0.4, 0.45, 0.3]
    results = [
        {"loss": loss, "global_step": i} for i, loss in enumerate(losses)
    ]
    done = exported(BestExporter(exports_to_keep=2), model, tmp_path, results)
    assert done == [True, False, False, True, False, True]
    assert len(list_exports(str(tmp_path))) == 2


@pytest.mark.usefixtures("light")
def test_best_exporter_remembers_across_restarts(model, tmp_path):
    assert exported(BestExporter(), model, tmp_path, [{"loss": 0.4}]) == [True]
    # TF's forgot: it exported the worse model.
    assert exported(
        BestExporter(), model, tmp_path, [{"loss": 0.5}, {"loss": 0.4}]
    ) == [False, False]
    assert exported(BestExporter(), model, tmp_path, [{"loss": 0.3}]) == [True]


@pytest.mark.usefixtures("light")
def test_best_exporter_dies_between_export_and_note(
    model, tmp_path, monkeypatch
):
    exporter = BestExporter()
    assert exported(exporter, model, tmp_path, [{"loss": 0.5}]) == [True]
    with monkeypatch.context() as patch:
        patch.setattr(exporters.results, "write_json", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            exporter.export(model, str(tmp_path), {"loss": 0.4}, False)
    again = [{"loss": 0.5}, {"loss": 0.4}, {"loss": 0.4}]
    assert exported(BestExporter(), model, tmp_path, again) == [
        False,
        True,
        False,
    ]


@pytest.mark.usefixtures("light")
def test_best_exporter_without_its_exports_begins_anew(model, tmp_path):
    exported(BestExporter(), model, tmp_path, [{"loss": 0.1}])
    for path in list_exports(str(tmp_path)):
        tf.io.gfile.rmtree(path)
    assert exported(BestExporter(), model, tmp_path, [{"loss": 0.9}]) == [True]


@pytest.mark.usefixtures("light")
def test_best_exporter_of_several_metrics(model, tmp_path):
    def better(best_eval_result, current_eval_result):
        key = "auc", "recall"
        return [current_eval_result[k] for k in key] > [
            best_eval_result[k] for k in key
        ]

    results = [
        {"auc": np.float32(auc), "recall": recall}
        for auc, recall in [(0.5, 0.5), (0.5, 0.6), (0.4, 0.9), (0.6, 0.1)]
    ]
    exporter = BestExporter("best_auc", compare_fn=better)
    done = exported(exporter, model, tmp_path, results)
    assert done == [True, True, False, True]
    noted = json.loads((tmp_path / "best.json").read_text())
    assert noted["best_eval_result"] == {
        "auc": pytest.approx(0.6),
        "recall": 0.1,
    }


@pytest.mark.usefixtures("light")
def test_best_exporter_says_with_what_it_compares(model, tmp_path, caplog):
    """It may be the result of another loss, metric or day."""
    first = {"loss": 0.1, "global_step": 7}
    assert exported(BestExporter(), model, tmp_path, [first]) == [True]
    with caplog.at_level(logging.INFO, "tfdist"):
        exported(BestExporter(), model, tmp_path, [{"loss": 0.5}])
    assert "model of step 7 was as good or better, {'loss': 0.1" in caplog.text

    def better(best_eval_result, current_eval_result):
        return current_eval_result["auc"] > best_eval_result["auc"]

    exporter = BestExporter(compare_fn=better)
    with pytest.raises(KeyError) as raised:
        exporter.export(model, str(tmp_path), {"auc": 1.0}, False)
    (note,) = raised.value.__notes__
    assert "has the metrics {'loss': 0.1, 'global_step': 7.0}, this one" in note
    assert "delete that directory to start over" in note


@pytest.mark.usefixtures("light")
def test_best_exporter_returns_what_a_dead_process_exported(model, tmp_path):
    result = {"loss": 0.1, "global_step": 7}
    first = BestExporter().export(model, str(tmp_path), result, False)
    again = BestExporter().export(model, str(tmp_path), result, True)
    assert again == first
    later = {**result, "global_step": 8}
    assert BestExporter().export(model, str(tmp_path), later, True) is None
    assert list_exports(str(tmp_path)) == [first]


@pytest.mark.usefixtures("light")
def test_a_loss_that_is_no_number_is_never_the_best_for_long(model, tmp_path):
    losses = [{"loss": float("nan")}, {"loss": 9.0}, {"loss": float("nan")}]
    done = exported(BestExporter(), model, tmp_path, losses)
    assert done == [True, True, False]


@pytest.mark.usefixtures("light")
def test_best_exporter_without_a_loss(model, tmp_path):
    exporter = BestExporter()
    exporter.export(model, str(tmp_path), {"auc": 1.0}, False)
    with pytest.raises(ValueError, match="must have a "):
        exporter.export(model, str(tmp_path), {"loss": 1.0}, False)


# What raises.


@pytest.fixture
def unservable():
    """A model that can be trained and not exported."""

    class Broken(keras.layers.Layer):
        exporting = False

        def call(self, x):
            if self.exporting:
                raise RuntimeError("as a user's layer may")
            return x

    broken = Broken()
    yield logistic(hidden=[broken]), broken
    broken.exporting = False


@pytest.mark.parametrize(
    "exporter",
    [LatestExporter("e"), FinalExporter("e"), BestExporter("e")],
    ids=["latest", "final", "best"],
)
def test_a_failed_export_leaves_earlier_ones(unservable, exporter, tmp_path):
    model, broken = unservable
    first = exporter.export(model, str(tmp_path), {"loss": 0.5}, True)
    before = sorted(tmp_path.rglob("*"))
    broken.exporting = True
    with pytest.raises(RuntimeError, match="as a user's layer may"):
        exporter.export(model, str(tmp_path), {"loss": 0.4}, True)
    assert sorted(tmp_path.rglob("*")) == before
    assert list_exports(str(tmp_path)) == [first]
    broken.exporting = False
    second = exporter.export(model, str(tmp_path), {"loss": 0.4}, True)
    assert list_exports(str(tmp_path)) == [first, second]


def test_a_model_that_no_file_of_keras_holds(tmp_path):
    """Told at the first evaluation: the final export comes after days."""
    age = tf.feature_column.numeric_column("age")
    model = tfdist.LinearRegressor([age], "job").model_fn()
    exporter = FinalExporter("e", format="keras")
    with pytest.raises(ValueError, match=r"CannedModel .* format='weights'"):
        exporter.export(model, str(tmp_path), {"loss": 0.5}, False)
    given = FinalExporter("e", lambda model: logistic(), format="keras")
    assert given.export(model, str(tmp_path), {"loss": 0.5}, True)


def train(model_dir, max_steps, exporter):
    return tfdist.train_and_evaluate(
        tfdist.Estimator(
            logistic,
            tfdist.RunConfig(
                model_dir, save_checkpoints_steps=10, cluster=Cluster()
            ),
        ),
        tfdist.TrainSpec(lambda: batches().repeat(), max_steps=max_steps),
        tfdist.EvalSpec(batches, throttle_secs=0, exporters=exporter),
    )


@pytest.mark.slow
def test_training_ends_with_the_error_of_an_exporter(tmp_path):
    """Where the chief evaluates; it goes on from the last checkpoint."""

    def fail(model):
        raise LookupError("as a user's function may")

    with pytest.raises(LookupError, match="as a user's function may"):
        train(tmp_path, 30, LatestExporter("latest", serving_model_fn=fail))
    assert checkpoints.step_of(tf.train.latest_checkpoint(tmp_path)) == 10
    assert list_exports(str(tmp_path / "export" / "latest")) == []
    metrics, (path,) = train(tmp_path, 30, LatestExporter("latest"))
    assert metrics["global_step"] == 30
    exports = list_exports(str(tmp_path / "export" / "latest"))
    assert exports[-1] == path
    assert len(exports) == 3  # That of step 10 was made up for.


# Arguments.


@pytest.mark.parametrize("name", ["", None, "a/b", "a b", "..", 3])
def test_bad_name(name):
    with pytest.raises(ValueError, match="`name` must be a directory name"):
        FinalExporter(name)


@pytest.mark.parametrize("keep", [0, -1])
@pytest.mark.parametrize("kind", [LatestExporter, BestExporter])
def test_bad_exports_to_keep(kind, keep):
    with pytest.raises(
        ValueError, match="`exports_to_keep` must be at least 1"
    ):
        kind("a", exports_to_keep=keep)


def test_bad_serving_model_fn():
    with pytest.raises(TypeError, match="`serving_model_fn` must be callable"):
        FinalExporter("a", serving_model_fn=3)


def test_a_serving_model_fn_of_other_arguments_is_refused_before_training():
    with pytest.raises(TypeError, match=r"is called with the trained model"):
        FinalExporter("a", lambda: 3)


@pytest.mark.parametrize(
    ("compare_fn", "error", "message"),
    [
        (None, ValueError, "must not be None"),
        (3, TypeError, "must be callable"),
        (
            lambda current_eval_result: True,
            ValueError,
            r"Missing: \['best_eval_result'\]",
        ),
        (
            lambda best_eval_result, current_eval_result, z: True,
            ValueError,
            r"not expected: \['z'\]",
        ),
    ],
)
def test_bad_compare_fn(compare_fn, error, message):
    with pytest.raises(error, match=message):
        BestExporter(compare_fn=compare_fn)


def test_base_class_is_abstract(model):
    with pytest.raises(NotImplementedError):
        Exporter("a").export(model, "", {}, True)


@pytest.mark.parametrize("destination", ["/a", "../a", "b/../../a", "."])
def test_bad_destination(destination):
    with pytest.raises(ValueError, match=r"inside of `assets\.extra`"):
        FinalExporter("a", assets_extra={destination: "b"})


def test_bad_assets_extra():
    with pytest.raises(TypeError, match="`assets_extra` must be a dictionary"):
        FinalExporter("a", assets_extra=["b"])

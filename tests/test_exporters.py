import json
import os
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from serving_checks import example, serve
from small_models import examples, logistic

import tfdist
from tfdist import exporters
from tfdist.exporters import (
    BestExporter,
    Exporter,
    FinalExporter,
    LatestExporter,
    export_saved_model,
    list_exports,
)
from tfdist.serving import Serving


@pytest.fixture(scope="module")
def model():
    return logistic()


def with_names(trained):
    inputs = keras.Input([4], name="features")
    return keras.Model(inputs, {"probabilities": trained(inputs)})


# What is exported.


def test_a_keras_model_is_served_from_tensors_and_examples(model, tmp_path):
    exporter = LatestExporter("serving", with_names)
    path = exporter.export(model, str(tmp_path / "serving"), {}, False)
    x, _ = examples(5)
    strings = [example(features=row.tolist()) for row in x]
    served = serve(
        path,
        ("serve", {"features": x}),
        ("serving_default", {"features": x}),
        ("predict", {"examples": strings}),
    )
    expected = model.predict(x, verbose=0)
    for method, outputs in served:
        assert method == "tensorflow/serving/predict"
        assert list(outputs) == ["probabilities"]
        np.testing.assert_allclose(
            outputs["probabilities"], expected, rtol=1e-5
        )


def two_towers():
    inputs = {
        "user": keras.Input([], dtype="int32", name="user"),
        "words": keras.Input([2], dtype="string", name="words"),
        "size": keras.Input([1], name="size"),
    }
    table = tfdist.PartitionedEmbedding(7, 3, num_shards=2)
    words = keras.layers.Hashing(4, output_mode="multi_hot")(inputs["words"])
    parts = [table(inputs["user"]), words, inputs["size"]]
    output = keras.layers.Dense(2, "softmax")(keras.ops.hstack(parts))
    return keras.Model(inputs, {"p": output})


def classifying(trained):
    # As a user writes one: the names of the classes are no part of the model.
    plain = Serving.of(trained)

    def predict(tensors):
        outputs = dict(plain.predict(tensors))
        names = tf.tile([["no", "yes"]], [tf.shape(outputs["p"])[0], 1])
        return {**outputs, "names": names, "yes": outputs["p"][:, 1:]}

    return Serving.of(
        trained,
        predict=predict,
        classification=("names", "p"),
        regression="yes",
    )


def test_tables_strings_and_the_classify_and_regress_apis(tmp_path):
    keras.utils.set_random_seed(1)
    model = two_towers()
    path = export_saved_model(model, str(tmp_path), classifying)
    tensors = {
        "user": np.array([6, 0], "int32"),
        "words": np.array([["a", "b"], ["c", ""]], object),
        "size": np.array([[0.5], [2.0]], "float32"),
    }
    strings = [
        example(user=[6], words=["a", "b"], size=[0.5]),
        example(user=[0], words=["c", ""], size=[2.0]),
    ]
    expected = model({k: tf.constant(v) for k, v in tensors.items()})["p"]
    classify, default, regress, predict, plain = serve(
        path,
        ("classification", {"inputs": strings}),
        ("serving_default", {"inputs": strings}),
        ("regression", {"inputs": strings}),
        ("predict", {"examples": strings}),
        ("serve", tensors),
    )
    assert classify[0] == default[0] == "tensorflow/serving/classify"
    assert set(classify[1]) == {"classes", "scores"}
    assert classify[1]["classes"].tolist() == [[b"no", b"yes"]] * 2
    np.testing.assert_allclose(classify[1]["scores"], expected, rtol=1e-5)
    np.testing.assert_array_equal(classify[1]["scores"], default[1]["scores"])
    assert regress[0] == "tensorflow/serving/regress"
    assert set(regress[1]) == {"outputs"}
    np.testing.assert_allclose(
        regress[1]["outputs"], expected[:, 1:], rtol=1e-5
    )
    for method, outputs in (predict, plain):
        assert method == "tensorflow/serving/predict"
        assert set(outputs) == {"p", "names", "yes"}
        np.testing.assert_allclose(outputs["p"], expected, rtol=1e-5)


def test_serving_of_the_model_is_the_default(model, tmp_path):
    class Knows(keras.Model):
        def serving(self):
            return Serving.of(with_names(model))

    knows = Knows(model.inputs, model.outputs)
    path = export_saved_model(knows, str(tmp_path))
    signature = tf.saved_model.load(path).signatures["serve"]
    assert list(signature.structured_outputs) == ["probabilities"]


def test_inputs_that_no_example_holds(tmp_path, caplog):
    inputs = keras.Input([None, None, 3], name="image")
    output = keras.layers.GlobalMaxPooling2D()(inputs)
    path = export_saved_model(keras.Model(inputs, output), str(tmp_path))
    names = set(tf.saved_model.load(path).signatures)
    assert names == {"serve", "serving_default"}
    assert "gets no signature for tf.Examples" in caplog.text


def test_classification_needs_examples():
    image = keras.Input([None, None, 3], name="image")
    with pytest.raises(ValueError, match="need `examples`"):
        Serving.of(keras.Model(image, {"s": image}), regression="s")


def test_model_that_does_not_say_its_inputs(tmp_path):
    class Own(keras.Model):
        def call(self, x):
            return x

    own = Own()
    own(tf.zeros([1, 2]))
    with pytest.raises(ValueError, match="neither functional nor sequential"):
        export_saved_model(own, str(tmp_path))


def test_serving_model_fn_that_returns_something_else(model, tmp_path):
    with pytest.raises(TypeError, match=r"must return a keras\.Model"):
        export_saved_model(model, str(tmp_path), lambda model: None)
    assert list(tmp_path.iterdir()) == []


# Directories.


def test_path_is_a_version_of_tensorflow_serving(model, tmp_path):
    base = str(tmp_path / "export")
    path = FinalExporter("final").export(model, base, {}, True)
    assert re.fullmatch(re.escape(base) + r"/\d{10}", path)
    assert list_exports(base) == [path]
    assert [p.name for p in (tmp_path / "export").iterdir()] == [path[-10:]]


def test_half_written_exports_are_not_counted(tmp_path):
    for name in ("temp-1700000000", "1700000000", "notes", "170"):
        (tmp_path / name).mkdir()
    assert list_exports(str(tmp_path)) == [str(tmp_path / "1700000000")]
    assert list_exports(str(tmp_path / "absent")) == []


def test_number_is_greater_than_any_other(model, tmp_path):
    later = int(time.time()) + 5000
    (tmp_path / str(later)).mkdir()
    path = export_saved_model(model, str(tmp_path))
    assert os.path.basename(path) == str(later + 1)


def test_number_that_another_process_takes_meanwhile(
    model, tmp_path, monkeypatch
):
    write = exporters.serving.write

    def slow_write(serving, path):
        write(serving, path)
        taken = tmp_path / str(int(time.time()) + 5000)
        taken.mkdir()
        (taken / "saved_model.pb").touch()

    monkeypatch.setattr(exporters.serving, "write", slow_write)
    path = export_saved_model(model, str(tmp_path))
    assert list_exports(str(tmp_path))[-1] == path
    assert os.path.exists(os.path.join(path, "variables"))


def test_failed_export_leaves_nothing(tmp_path):
    class Broken(keras.layers.Layer):
        def call(self, x):
            return x

    inputs = keras.Input([4], name="x")
    broken = Broken()
    model = keras.Model(inputs, broken(inputs))

    def fail(x):
        raise RuntimeError("as a user's layer may")

    broken.call = fail
    with pytest.raises(RuntimeError, match="as a user's layer may"):
        export_saved_model(model, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_dead_processes_go_after_an_hour(model, tmp_path):
    recent = f"temp-{int(time.time()) - 600:010d}"
    for name in ("temp-1700000000", recent, "temp-mine"):
        (tmp_path / name).mkdir()
    path = export_saved_model(model, str(tmp_path))
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {recent, "temp-mine", os.path.basename(path)}


def test_object_store_gets_the_graph_last(model, monkeypatch):
    moved = []
    rename = tf.io.gfile.rename
    monkeypatch.setattr(
        tf.io.gfile, "rename", lambda a, b: (moved.append(b), rename(a, b))
    )
    path = export_saved_model(model, "ram://bucket/export")
    assert len(moved) > 2
    assert moved[-1] == f"{path}/saved_model.pb"
    assert list_exports("ram://bucket/export") == [path]
    assert tf.io.gfile.listdir("ram://bucket/export") == [path[-10:]]
    assert "serve" in tf.saved_model.load(path).signatures


def test_assets_extra(model, tmp_path):
    source = tmp_path / "warmup"
    source.write_text("requests")
    exporter = FinalExporter(
        "f", assets_extra={"tf_serving/requests": str(source)}
    )
    path = exporter.export(model, str(tmp_path / "export"), {}, True)
    copy = os.path.join(path, "assets.extra", "tf_serving", "requests")
    with open(copy) as file:
        assert file.read() == "requests"


def test_assets_extra_that_does_not_exist(model, tmp_path):
    exporter = FinalExporter("f", assets_extra={"a": str(tmp_path / "b")})
    with pytest.raises(FileNotFoundError, match="`assets_extra`"):
        exporter.export(model, str(tmp_path), {}, True)
    assert list(tmp_path.iterdir()) == []


# When to export, and what to keep.


def test_final_exporter_waits_for_the_end(model, tmp_path):
    assert FinalExporter("f").export(model, str(tmp_path), {}, False) is None
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def light(monkeypatch):
    """Writes of a file instead of a model: when, not what, is tested."""

    def write(serving, path):
        with open(os.path.join(path, "saved_model.pb"), "w"):
            pass

    monkeypatch.setattr(exporters.serving, "write", write)


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
        patch.setattr(exporters, "_write_best", lambda *_: 1 / 0)
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
def test_a_loss_that_is_no_number_is_never_the_best_for_long(model, tmp_path):
    losses = [{"loss": float("nan")}, {"loss": 9.0}, {"loss": float("nan")}]
    done = exported(BestExporter(), model, tmp_path, losses)
    assert done == [True, True, False]


@pytest.mark.usefixtures("light")
def test_best_exporter_without_a_loss(model, tmp_path):
    exporter = BestExporter()
    exporter.export(model, str(tmp_path), {"auc": 1.0}, False)
    with pytest.raises(ValueError, match="no loss is found in it"):
        exporter.export(model, str(tmp_path), {"loss": 1.0}, False)


# Arguments.


@pytest.mark.parametrize("name", ["", None, "a/b", "a b", 3])
def test_bad_name(name):
    with pytest.raises(ValueError, match="`name` must be a directory name"):
        FinalExporter(name)


@pytest.mark.parametrize("keep", [0, -1])
@pytest.mark.parametrize("kind", [LatestExporter, BestExporter])
def test_bad_exports_to_keep(kind, keep):
    with pytest.raises(ValueError, match="`exports_to_keep` must be positive"):
        kind("a", exports_to_keep=keep)


def test_bad_serving_model_fn():
    with pytest.raises(TypeError, match="`serving_model_fn` must be callable"):
        FinalExporter("a", serving_model_fn=3)


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


@pytest.mark.parametrize("destination", ["/a", "../a", "b/../../a", "."])
def test_bad_destination(destination):
    with pytest.raises(ValueError, match=r"inside of `assets\.extra`"):
        FinalExporter("a", assets_extra={destination: "b"})


def test_bad_assets_extra():
    with pytest.raises(TypeError, match="`assets_extra` must be a dictionary"):
        FinalExporter("a", assets_extra=["b"])


def test_base_class_is_abstract(model):
    with pytest.raises(NotImplementedError):
        Exporter("a").export(model, "", {}, True)

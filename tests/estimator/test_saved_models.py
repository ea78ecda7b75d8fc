import os
import re
import time

import keras
import pytest
import tensorflow as tf
from small_models import logistic

from tfdist.estimator import serving
from tfdist.estimator.saved_models import (
    export_saved_model,
    list_exports,
    remove_abandoned,
)
from tfdist.estimator.serving import Serving


@pytest.fixture(scope="module")
def model():
    return logistic()


def test_path_is_a_version_of_tensorflow_serving(model, tmp_path):
    base = str(tmp_path / "export")
    path = export_saved_model(model, base)
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
    write = serving.write

    def slow_write(serving, path):
        write(serving, path)
        taken = tmp_path / str(int(time.time()) + 5000)
        taken.mkdir()
        (taken / "saved_model.pb").touch()

    monkeypatch.setattr(serving, "write", slow_write)
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


def test_a_jobs_own_leftovers_go_at_once(tmp_path):
    for name in (f"temp-{int(time.time()) - 2}-ab12", "1700000000", "mine"):
        (tmp_path / name).mkdir()
    remove_abandoned(str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"1700000000", "mine"}


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
    path = export_saved_model(
        model,
        str(tmp_path / "export"),
        assets_extra={"tf_serving/requests": str(source)},
    )
    copy = os.path.join(path, "assets.extra", "tf_serving", "requests")
    with open(copy) as file:
        assert file.read() == "requests"


def test_assets_extra_that_does_not_exist(model, tmp_path):
    absent = {"a": str(tmp_path / "b")}
    with pytest.raises(FileNotFoundError, match="`assets_extra`"):
        export_saved_model(model, str(tmp_path), assets_extra=absent)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_no_loader_would_find(model, tmp_path):
    with pytest.raises(ValueError, match="takes for a pattern"):
        export_saved_model(model, tmp_path / "run[1]")
    assert list(tmp_path.iterdir()) == []


def test_serving_of_the_model_is_the_default(model, tmp_path):
    class Knows(keras.Model):
        def serving(self):
            inputs = keras.Input([4])
            return Serving.of(keras.Model(inputs, {"p": model(inputs)}))

    knows = Knows(model.inputs, model.outputs)
    path = export_saved_model(knows, str(tmp_path))
    signature = tf.saved_model.load(path).signatures["serve"]
    assert list(signature.structured_outputs) == ["p"]


def test_an_export_without_the_predict_step_says_so(tmp_path, caplog):
    class Doubling(keras.Model):
        def predict_step(self, data):
            return {"twice": 2 * self(data, training=False)}

    x = keras.Input([2], name="x")
    made = Doubling({"x": x}, keras.layers.Dense(1)(x))
    export_saved_model(made, str(tmp_path / "called"))
    assert "unlike `predict`" in caplog.text
    caplog.clear()

    def serving(model):
        return Serving.of(model, predict=model.predict_step)

    path = export_saved_model(made, str(tmp_path / "served"), serving)
    assert "predict_step" not in caplog.text
    outputs = tf.saved_model.load(path).signatures["serve"].structured_outputs
    assert list(outputs) == ["twice"]


def test_an_unknown_format(model, tmp_path):
    with pytest.raises(ValueError, match=r"`format` must be one of.*'h5'"):
        export_saved_model(model, str(tmp_path), format="h5")
    assert not list(tmp_path.iterdir())


def test_serving_model_fn_that_returns_something_else(model, tmp_path):
    with pytest.raises(TypeError, match=r"must return a keras\.Model"):
        export_saved_model(model, str(tmp_path), lambda model: None)
    assert list(tmp_path.iterdir()) == []

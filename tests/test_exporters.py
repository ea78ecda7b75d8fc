import json
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from small_models import examples, logistic

from tfdist.exporters import (
    Exporter,
    FinalExporter,
    LatestExporter,
    list_exports,
)

# What a server does, without Keras and tfdist: the loader in C++.
SERVE = """
import json, sys
sys.modules["keras"] = sys.modules["tfdist"] = None  # An import fails.
import tensorflow.compat.v1 as tf
path, values = sys.argv[1], json.loads(sys.argv[2])
with tf.Graph().as_default(), tf.Session() as session:
    meta = tf.saved_model.load(session, ["serve"], path)
    signature = meta.signature_def["serving_default"]
    feed = {signature.inputs[name].name: x for name, x in values.items()}
    fetch = {name: out.name for name, out in signature.outputs.items()}
    results = session.run(fetch, feed)
print(json.dumps({name: value.tolist() for name, value in results.items()}))
"""


@pytest.fixture(scope="module")
def model():
    return logistic()


def with_names(trained):
    inputs = keras.Input([4], name="features")
    return keras.Model(inputs, {"probabilities": trained(inputs)})


def serve(path, **values):
    result = subprocess.run(
        [sys.executable, "-c", SERVE, path, json.dumps(values)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(result.stdout)


def test_export_is_served_without_keras(model, tmp_path):
    exporter = LatestExporter("serving", with_names)
    path = exporter.export(model, str(tmp_path / "serving"), {}, False)
    x, _ = examples(5)
    served = serve(path, features=x.tolist())
    assert list(served) == ["probabilities"]
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(served["probabilities"], expected, rtol=1e-5)


def test_path_is_a_version_of_tensorflow_serving(model, tmp_path):
    base = str(tmp_path / "export")
    path = FinalExporter("final").export(model, base, {}, True)
    assert re.fullmatch(re.escape(base) + r"/\d{10}", path)
    assert list_exports(base) == [path]
    assert [p.name for p in (tmp_path / "export").iterdir()] == [path[-10:]]


def test_final_exporter_waits_for_the_end(model, tmp_path):
    assert FinalExporter("f").export(model, str(tmp_path), {}, False) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("keep", "left"), [(1, 1), (2, 2), (None, 3)])
def test_latest_exporter_keeps_the_newest(model, tmp_path, keep, left):
    exporter = LatestExporter("latest", exports_to_keep=keep)
    paths = [exporter.export(model, str(tmp_path), {}, False) for _ in range(3)]
    assert len(set(paths)) == 3
    assert list_exports(str(tmp_path)) == paths[-left:]


def test_half_written_exports_are_not_counted(tmp_path):
    for name in ("temp-1700000000", "1700000000", "notes", "170"):
        (tmp_path / name).mkdir()
    assert list_exports(str(tmp_path)) == [str(tmp_path / "1700000000")]


@pytest.mark.parametrize("name", ["", None, "a/b", "a b", 3])
def test_bad_name(name):
    with pytest.raises(ValueError, match="`name` must be a directory name"):
        FinalExporter(name)


@pytest.mark.parametrize("keep", [0, -1])
def test_bad_exports_to_keep(keep):
    with pytest.raises(ValueError, match="`exports_to_keep` must be positive"):
        LatestExporter("a", exports_to_keep=keep)


def test_bad_serving_model_fn():
    with pytest.raises(TypeError, match="`serving_model_fn` must be callable"):
        FinalExporter("a", serving_model_fn=3)


def test_base_class_is_abstract(model):
    with pytest.raises(NotImplementedError):
        Exporter("a").export(model, "", {}, True)

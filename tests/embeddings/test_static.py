"""Growing tables in SavedModels, read without tfdist, Keras and Python's TF."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from serving_checks import serve
from test_dynamic import (
    VOCABULARY,
    data,
    dynamic,
    model_of,
    rows_of,
    trained,
    words,
)

from tfdist.embeddings.filling import fill
from tfdist.embeddings.index import NO_ID, SEGMENT
from tfdist.estimator.saved_models import export_saved_model

# A process that has TensorFlow alone.
_LOAD = """if True:
    import sys
    sys.modules["keras"] = sys.modules["tfdist"] = None  # An import fails.
    import numpy as np
    import tensorflow as tf
    model = tf.saved_model.load(sys.argv[1])
    serve = model.signatures["serving_default"]
    (name,) = serve.structured_input_signature[1]
    (found,) = serve(**{name: tf.constant(np.load("ids.npy"))}).values()
    np.save("found.npy", found)
"""


def run(tmp_path, code, *args):
    subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        check=True,
        timeout=120,
    )
    return np.load(tmp_path / "found.npy")


def hashes(ids):
    return ids << 40


@pytest.mark.slow
@pytest.mark.parametrize(("of", "num_shards"), [(hashes, 3), (words, 1)])
def test_an_export_needs_no_tfdist(tmp_path, of, num_shards):
    """Known ids and others."""
    dtype = "string" if of is words else "int64"
    model = trained(model_of(dynamic(num_shards), dtype=dtype), data(of=of), 5)
    ids = of(np.arange(2 * VOCABULARY)).reshape([-1, 3])
    path = export_saved_model(model, str(tmp_path / "export"))
    np.save(tmp_path / "ids.npy", ids)
    found = run(tmp_path, _LOAD, path)
    wanted = model.predict(tf.constant(ids), verbose=0)
    assert np.ptp(wanted) > 1e-3
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


# --- Its size ----------------------------------------------------------------


def filled(number, **kwargs):
    """A table and its ids, which have rows of their own."""
    table = dynamic(**kwargs)
    table.build()
    ids = np.arange(number) * 7 - 5
    rng = np.random.default_rng(0)
    fill(table, ids, rng.normal(size=[number, 16]).astype("float32"))
    return table, ids


def exported(table, path):
    """A model that returns rows, and adds few bytes to theirs."""
    ids = keras.Input([], dtype="int64", name="ids")
    model = keras.Model(ids, {"rows": table(ids)})
    return export_saved_model(model, str(path))


def bytes_of(path):
    every = Path(path).rglob("*")
    return sum(file.stat().st_size for file in every if file.is_file())


def test_its_size_is_that_of_the_ids_in_use(tmp_path):
    sizes = {}
    for number in (0, 1_000, 20_000):
        table, ids = filled(
            number, num_shards=2, capacity=32 * SEGMENT, output_dim=16
        )
        path = exported(table, tmp_path / str(number))
        sizes[number] = bytes_of(path)
        loaded = tf.saved_model.load(path)
        some = np.array([*ids[:3], *ids[-3:], 10**12, -(10**12)])
        found = loaded.serve({"ids": some})["rows"]
        np.testing.assert_array_equal(found, rows_of(table, some))
        with pytest.raises(tf.errors.InvalidArgumentError, match="must not be"):
            loaded.serve({"ids": np.array([NO_ID])})
    print(sizes)
    a_row = 16 * 4 + 8
    assert (sizes[20_000] - sizes[1_000]) / 19_000 == pytest.approx(a_row, 0.01)
    assert sizes[0] < 100_000 < 32 * SEGMENT * a_row / 10


@pytest.mark.slow
def test_two_tables_beside_others(tmp_path):
    """Each keeps its own rows; other tables are read as they are."""
    tables = {
        "a": filled(500, output_dim=16, name="table_a")[0],
        "b": filled(700, output_dim=16, name="table_b", num_shards=2)[0],
        "c": keras.layers.Embedding(50, 16),
    }
    inputs = {name: keras.Input([], dtype="int64", name=name) for name in "abc"}
    model = keras.Model(inputs, {n: tables[n](inputs[n]) for n in "abc"})
    path = export_saved_model(model, str(tmp_path))
    ids = {name: np.arange(40) - 5 * (name != "c") for name in "abc"}
    [(_, found)] = serve(path, ("serve", ids))
    wanted = model(ids)
    for name in "abc":
        np.testing.assert_array_equal(found[name], wanted[name])


# --- TensorFlow's loader in C++ ----------------------------------------------

# TensorFlow's C API, from its shared libraries; no module of TensorFlow's.
_IN_C = """if True:
    import ctypes, sys
    from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int64
    from ctypes import c_size_t, c_void_p
    import numpy as np

    folder, path, feed, fetch = sys.argv[1:]
    ctypes.CDLL(f"{folder}/libtensorflow_framework.so.2", ctypes.RTLD_GLOBAL)
    tf = ctypes.CDLL(f"{folder}/libtensorflow_cc.so.2", ctypes.RTLD_GLOBAL)

    class Output(Structure):
        _fields_ = [("operation", c_void_p), ("index", c_int)]

    for name in ("TF_NewStatus TF_NewGraph TF_NewSessionOptions "
        "TF_LoadSessionFromSavedModel TF_GraphOperationByName TF_TensorData "
        "TF_AllocateTensor").split():
        getattr(tf, name).restype = c_void_p
    tf.TF_Message.restype = c_char_p
    tf.TF_Dim.restype = c_int64
    status, graph = c_void_p(tf.TF_NewStatus()), c_void_p(tf.TF_NewGraph())

    def check():
        if tf.TF_GetCode(status):
            sys.exit(tf.TF_Message(status).decode())

    def output(name):
        name, _, index = name.partition(":")
        operation = tf.TF_GraphOperationByName(graph, name.encode())
        return Output(operation, int(index))

    tags = (c_char_p * 1)(b"serve")
    session = c_void_p(tf.TF_LoadSessionFromSavedModel(
        c_void_p(tf.TF_NewSessionOptions()), None, path.encode(), tags, 1,
        graph, None, status))
    check()
    ids = np.load("ids.npy")
    shape = (c_int64 * ids.ndim)(*ids.shape)
    tensor = c_void_p(tf.TF_AllocateTensor(
        9, shape, c_int(ids.ndim), c_size_t(ids.nbytes)))  # 9: TF_INT64
    ctypes.memmove(tf.TF_TensorData(tensor), ids.ctypes.data, ids.nbytes)
    result = c_void_p()
    tf.TF_SessionRun(
        session, None, byref(output(feed)), byref(tensor), 1,
        byref(output(fetch)), byref(result), 1, None, 0, None, status)
    check()
    shape = [tf.TF_Dim(result, i) for i in range(tf.TF_NumDims(result))]
    found = np.empty(shape, np.float32)
    ctypes.memmove(found.ctypes.data, tf.TF_TensorData(result), found.nbytes)
    np.save("found.npy", found)
    assert not {"tensorflow", "keras", "tfdist"} & sys.modules.keys()
"""


@pytest.mark.slow
def test_the_loader_of_tensorflow_in_c(tmp_path):
    """`TF_LoadSessionFromSavedModel`: a process without Python's TensorFlow."""
    model = trained(model_of(dynamic(3)), data(of=hashes), 5)
    ids = hashes(np.arange(2 * VOCABULARY)).reshape([-1, 3])
    path = export_saved_model(model, str(tmp_path / "export"))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], path)
        signature = loaded.signature_def["serve"]
    names = [
        each.name
        for every in (signature.inputs, signature.outputs)
        for each in every.values()
    ]
    np.save(tmp_path / "ids.npy", ids)
    folder = str(Path(tf.__file__).parent)
    found = run(tmp_path, _IN_C, folder, path, *names)
    wanted = model.predict(tf.constant(ids), verbose=0)
    assert np.ptp(wanted) > 1e-3
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)

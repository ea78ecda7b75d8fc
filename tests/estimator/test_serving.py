import keras
import numpy as np
import pytest
import tensorflow as tf
from serving_checks import example, serve
from small_models import examples, logistic

import tfdist
from tests.cases.models import compiled
from tfdist.estimator.saved_models import export_saved_model
from tfdist.estimator.serving import Serving, write
from tfdist.training.compiled_model import checked_model


def with_names(trained):
    inputs = keras.Input([4], name="features")
    return keras.Model(inputs, {"probabilities": trained(inputs)})


@pytest.mark.slow
def test_a_keras_model_is_served_from_tensors_and_examples(tmp_path):
    model = logistic()
    path = export_saved_model(model, str(tmp_path), with_names)
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


def test_outputs_within_outputs_are_named_by_their_path(tmp_path):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = (keras.layers.Dense(1) for _ in "ab")

        def call(self, x):
            return {"a": {"b": self.first(x)}, "c": (self.second(x),)}

    def model_fn():
        model = Model()
        model.compile("sgd", {"a": {"b": "mse"}, "c": ("mse",)})
        return model

    x, y = examples(4)

    def input_fn():
        targets = {"a": {"b": y}, "c": (y,)}
        return tf.data.Dataset.from_tensors((x, targets))

    run = tfdist.RunConfig(str(tmp_path / "job"))
    estimator = tfdist.Estimator(model_fn, run)
    estimator.train(input_fn)
    path = estimator.export_saved_model(str(tmp_path / "export"))
    served = tf.saved_model.load(path).signatures["serve"](x=tf.constant(x))
    expected = estimator.restored_model().predict(x, verbose=0)
    assert served.keys() == {"a_b", "c_0"}
    np.testing.assert_allclose(served["a_b"], expected["a"]["b"], rtol=1e-5)
    np.testing.assert_allclose(served["c_0"], expected["c"][0], rtol=1e-5)


def test_two_outputs_of_one_name():
    x = keras.Input([2], name="x")
    model = keras.Model(x, {"a": {"b": x}, "a_b": x + 1.0})
    with pytest.raises(ValueError, match=r"have one name.*\('a', 'b'\)"):
        Serving.of(model).predict({"x": tf.ones([1, 2])})


@pytest.mark.parametrize("other", [{"a": {"b": 0}}, {"a b": 0}])
def test_two_inputs_of_one_name(other, tmp_path):
    x, y = keras.Input([2], name="x"), keras.Input([2], name="y")
    other = keras.tree.map_structure(lambda _: x, other)
    model = keras.Model({**other, "a_b": y}, x - y)
    with pytest.raises(ValueError, match=r"inputs of .* have one name.*'a_b'"):
        write(Serving.of(model), str(tmp_path))


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


@pytest.mark.slow
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


def test_a_tensor_is_called_by_the_name_of_its_input(tmp_path):
    """Also if its spec has no name, or it is one that TensorFlow refuses."""
    names = {"plain": "plain", "hours per week": "hours_per_week"}
    names |= {"_id": "input_id", "größe": "gr__e"}
    model = logistic()
    serving = Serving(
        model,
        {name: tf.TensorSpec([None]) for name in names},
        lambda tensors: {f"out_{names[n]}": tensors[n] for n in names},
    )
    path = export_saved_model(model, str(tmp_path), lambda _: serving)
    serve = tf.saved_model.load(path).signatures["serve"]
    given = {n: tf.constant([float(i)]) for i, n in enumerate(names.values())}
    found = {n.removeprefix("out_"): t for n, t in serve(**given).items()}
    assert found == given


def test_inputs_of_unknown_length_are_read_from_examples():
    ids = keras.Input([None], dtype="int32", name="ids")
    (parse,) = Serving.of(keras.Model(ids, ids + 1)).examples.values()
    assert isinstance(parse, tf.io.FixedLenSequenceFeature)
    assert parse.allow_missing
    assert (parse.shape, parse.dtype) == ([], tf.int64)


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
        Serving.of(keras.Model(image, {"s": image + 1}), regression="s")


def test_model_that_does_not_know_its_inputs(tmp_path, caplog):
    class Own(keras.Model):
        def call(self, x):
            return 2 * x

    own = Own()
    own(tf.zeros([1, 2]))
    with pytest.raises(ValueError, match="neither functional nor sequential"):
        Serving.of(own)
    path = export_saved_model(own, str(tmp_path))
    signatures = tf.saved_model.load(path).signatures
    assert set(signatures) == {"serve", "serving_default"}
    assert "gets no signature for tf.Examples" in caplog.text


def test_inputs_of_a_model_that_was_built_of_batches():
    def inputs_of(features):
        targets = tf.TensorSpec([4, 1])
        model = checked_model(compiled(Taker()), (features, targets))
        return Serving.of(model)

    class Taker(keras.Model):
        def call(self, given):
            return tf.cast(tf.nest.flatten(given)[0], tf.float32)[:, :1]

    dense, ids = tf.TensorSpec([4, 2]), tf.TensorSpec([4, 3], tf.int32)
    assert inputs_of(dense).inputs == {
        "given": tf.TensorSpec([None, 2], name="given")
    }
    assert set(inputs_of((dense, ids)).inputs) == {"given_0", "given_1"}
    nested = inputs_of({"b": dense, "a": {"x": ids}})
    assert list(nested.inputs) == ["a_x", "b"]
    assert nested.examples["a_x"].dtype == tf.int64


def test_ragged_and_sparse_inputs_are_read_from_examples():
    class Counts(keras.Model):
        def call(self, inputs):
            total = tf.reduce_sum(inputs["ragged"], axis=1, keepdims=True)
            return total + tf.sparse.reduce_sum(inputs["sparse"], 1, True)

    features = {
        "ragged": tf.RaggedTensorSpec([4, None], tf.int32, 1),
        "sparse": tf.SparseTensorSpec([4, 5], tf.int32),
    }
    model = compiled(Counts())
    serving = Serving.of(
        checked_model(model, (features, tf.TensorSpec([4, 1])), targets=False)
    )
    strings = [example(ragged=[1, 2], sparse=[5]), example(sparse=[7])]
    parsed = tf.io.parse_example(strings, serving.examples)
    outputs = serving.predict(parsed)["output_0"]
    assert outputs.numpy().tolist() == [[8], [7]]


def test_a_string_that_keras_takes_for_a_float(tmp_path):
    column = tf.feature_column
    word = column.categorical_column_with_vocabulary_list("word", ["a", "b"])
    columns = column.numeric_column("size"), column.indicator_column(word)
    dense = keras.layers.Dense(1)
    model = keras.Sequential([tfdist.canned.DenseFeatures(columns), dense])
    features = {
        "size": tf.TensorSpec([4]),
        "word": tf.TensorSpec([4], tf.string),
    }
    model = checked_model(compiled(model), (features, tf.TensorSpec([4, 1])))
    path = export_saved_model(model, str(tmp_path))
    tensors = {"size": tf.constant([1.0, 2.0]), "word": tf.constant(["a", "c"])}
    served = tf.saved_model.load(path).signatures["serve"](**tensors)
    np.testing.assert_allclose(served["output_0"], model(tensors))


def test_an_export_pads_no_ragged_and_no_sparse_input(tmp_path):
    """Padding is id 0 to a table."""
    inputs = {
        "few": keras.Input([None], dtype="int64", ragged=True, name="few"),
        "ids": keras.Input([None], dtype="int64", sparse=True, name="ids"),
    }
    rows = [
        tfdist.PartitionedEmbedding(9, 2, combiner="sum")(ids)
        for ids in inputs.values()
    ]
    model = keras.Model(inputs, {"sum": keras.layers.Add()(rows)})
    path = export_saved_model(model, str(tmp_path))
    strings = [example(few=[1, 2], ids=[3]), example(ids=[4, 5, 6])]
    tensors = {
        "few": tf.RaggedTensor.from_row_splits([1, 2], np.array([0, 2, 2])),
        "ids": tf.sparse.from_dense(np.array([[3, 0, 0], [4, 5, 6]])),
    }
    tensors["few"] = tf.cast(tensors["few"], tf.int64)
    expected = model(tensors)["sum"]
    parts = {
        "few": tensors["few"].values,
        "few_1": tensors["few"].row_splits,
        "ids": tensors["ids"].indices,
        "ids_1": tensors["ids"].values,
        "ids_2": tensors["ids"].dense_shape,
    }
    signatures = tf.saved_model.load(path).signatures
    for outputs in (
        signatures["predict"](examples=tf.constant(strings)),
        signatures["serve"](**parts),
    ):
        np.testing.assert_allclose(outputs["sum"], expected, rtol=1e-5)

"""Input functions and model functions that return something else."""

import functools
import logging
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, examples, logistic, uncompiled

import tfdist
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.data import input_fns
from tfdist.launch.testing import LocalCluster, assert_nothing_left

HERE = Path(__file__).parents[1]


class OwnStep(keras.Model):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(self(data[0]))}


def own_step():
    x = keras.Input([4])
    model = OwnStep(x, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse")
    return model


def own_step_batches():
    return batches().repeat()


def job(model_dir):
    """What every task of the cluster runs."""
    tfdist.train_and_evaluate(
        tfdist.Estimator(own_step, tfdist.RunConfig(model_dir)),
        tfdist.TrainSpec(own_step_batches, max_steps=4),
        tfdist.EvalSpec(batches),
    )


def estimator(model_dir, model_fn=logistic):
    config = tfdist.RunConfig(model_dir, cluster=Cluster())
    return tfdist.Estimator(model_fn, config)


def trained(model_dir, input_fn, model_fn=logistic):
    """The whole of a local job."""
    return tfdist.train_and_evaluate(
        estimator(model_dir, model_fn),
        tfdist.TrainSpec(input_fn, max_steps=4),
        tfdist.EvalSpec(batches),
    )


# --- What is no dataset ------------------------------------------------------


def returns_nothing():
    batches()


def yields():
    yield from batches()


def returns_nothing_to_a_worker(context):
    batches()


@pytest.mark.parametrize(
    ("input_fn", "message"),
    [
        (returns_nothing, "Received: None of type NoneType"),
        (returns_nothing_to_a_worker, "Received: None"),
        (functools.partial(returns_nothing), "Received: None"),
        (yields, "type generator. .* a generator by `from_generator`"),
        (lambda: list(batches()), "of type list"),
        (lambda: examples(8), "type tuple. Arrays become a dataset by"),
        (lambda: iter(batches()), "must return a tf.data.Dataset"),
    ],
)
def test_no_dataset(tmp_path, input_fn, message):
    with pytest.raises(TypeError, match=message) as raised:
        trained(tmp_path, input_fn)
    assert input_fns.described(input_fn) in str(raised.value)
    assert f"{__file__}:" in str(raised.value)
    made = estimator(tmp_path)
    for use in (made.evaluate, lambda given: list(made.predict(given))):
        with pytest.raises(TypeError, match=message):
            use(input_fn)
    assert not list(tmp_path.glob("model.ckpt*"))


def test_no_function(tmp_path):
    made = estimator(tmp_path)
    for use in (made.train, made.evaluate, lambda d: list(made.predict(d))):
        with pytest.raises(TypeError, match="`input_fn` must be callable"):
            use(batches())


# --- No batch ----------------------------------------------------------------


class Calls(tfdist.CheckpointSaverListener, tfdist.SessionRunHook):
    """Whether it was told of the end, as hook or listener."""

    ended = False

    def end(self, *_):
        self.ended = True


def test_empty_from_the_start(tmp_path):
    """Nothing is evaluated, exported or announced; nobody is told `end`."""

    def input_fn():
        return batches(size=7, batch_size=8).unbatch().batch(8, True)

    calls = Calls()
    with pytest.raises(ValueError, match="has no batch: no step was") as raised:
        tfdist.train_and_evaluate(
            estimator(tmp_path),
            tfdist.TrainSpec(input_fn, 4, [calls], [calls]),
            tfdist.EvalSpec(batches, exporters=tfdist.FinalExporter("final")),
        )
    assert input_fns.described(input_fn) in str(raised.value)
    assert "drop_remainder=True" in str(raised.value)
    assert not calls.ended
    left = {path.name for path in tmp_path.iterdir()}
    assert not left & {"export", "eval", "training_done.json"}


# --- What the model does not read --------------------------------------------


def by_key():
    """Inputs of two names, and one of strings."""
    a, b = keras.Input([2], name="a"), keras.Input([1], name="b")
    s = keras.Input([1], name="s", dtype="string")
    flags = keras.layers.StringLookup(
        vocabulary=["x"], output_mode="one_hot", name="lookup"
    )(s)
    output = keras.layers.Dense(1)(keras.layers.concatenate([a, b, flags]))
    model = keras.Model({"a": a, "b": b, "s": s}, output)
    model.compile("sgd", "mse")
    return model


def by_list():
    model = by_key()
    listed = keras.Model(model.inputs, model.output)
    listed.compile("sgd", "mse")
    return listed


def features(**changes):
    """Batches of `by_key`; None leaves a feature out."""
    given = {
        "a": np.ones([8, 2], "float32"),
        "b": np.ones([8, 1], "float32"),
        "s": np.full([8, 1], "x"),
        **changes,
    }
    given = {name: v for name, v in given.items() if v is not None}
    y = np.ones([8, 1], "float32")
    return tf.data.Dataset.from_tensors((given, y)).repeat()


WRONG = {
    "missing": {"b": None},
    "extra": {"0": np.zeros([8, 1], "float32")},
    "renamed": {"b": None, "0": np.zeros([8, 1], "float32")},
    "number": {"s": np.ones([8, 1], "float32")},
    "string": {"a": np.full([8, 2], "x")},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_features_that_the_model_does_not_read(tmp_path, wrong):
    def input_fn():
        return features(**WRONG[wrong])

    message = (
        "features of the dataset are not the inputs of model.*\n"
        r"  Inputs of the model: a \(float32 \(None, 2\)\), b \(.*\), s \(str"
        r".*\n  Features of the dataset: .*\(8, .\)"
    )
    with pytest.raises(ValueError, match=message) as raised:
        trained(tmp_path, input_fn, by_key)
    note = (
        f"The batches come from input function {input_fns.described(input_fn)}."
    )
    assert raised.value.__notes__ == [note]
    made = estimator(tmp_path, by_key)
    with pytest.raises(ValueError, match=message):
        made.evaluate(input_fn, steps=1)
    with pytest.raises(ValueError, match=message):
        list(made.predict(input_fn))


@pytest.mark.parametrize(
    ("model_fn", "wanted"),
    [
        (by_key, features),
        (by_list, features),
        (by_list, lambda: features(unread=np.zeros([8, 1], "float32"))),
        (by_list, lambda: features().map(lambda x, y: (tuple(x.values()), y))),
        (logistic, lambda: batches().map(lambda x, y: ([x], y))),
        (logistic, lambda: batches().map(lambda x, y: (x, y, y))),
    ],
)
def test_what_fits_is_read(model_fn, wanted):
    spec = wanted().element_spec
    input_fns.check_batches(model_fn(), spec)


def test_no_targets(tmp_path):
    with pytest.raises(ValueError, match="batches without targets") as raised:
        trained(tmp_path, lambda: batches().map(lambda x, y: x))
    assert "`(features, targets)`" in str(raised.value)
    dataset = batches().map(lambda x, y: x)
    assert len(list(estimator(tmp_path).predict(lambda: dataset))) == 64


@pytest.mark.parametrize(
    ("of_x", "message"),
    [
        (lambda x: {"a": {"b": None}}, r"batch\[0\]\['a'\]\['b'\] is a NoneTe"),
        (lambda x: tf.experimental.Optional.from_value(x), "is a OptionalSpec"),
        (lambda x: tf.data.Dataset.from_tensors(x), "is a DatasetSpec"),
    ],
)
def test_what_is_no_tensor(tmp_path, of_x, message):
    def input_fn():
        return batches().map(lambda x, y: (of_x(x), y))

    with pytest.raises(ValueError, match=f"must be of tensors. .*{message}"):
        trained(tmp_path, input_fn)


@pytest.mark.skipif(
    not hasattr(tf, "NoneTensorSpec"), reason="refused in this version"
)
def test_weights_may_be_none():
    dataset = batches().map(lambda x, y: (x, y, None))
    call = input_fns.without_context(lambda: dataset)
    assert call().element_spec == batches().element_spec


def test_what_cannot_be_traced_for_workers():
    call = input_fns.without_context(lambda: batches().take(int(tf.ones([]))))
    call()
    message = "not on a worker .* Call `adapt`.* outside of the input function"
    with pytest.raises(ValueError, match=message):
        tf.function(call, autograph=False)()


def test_labels_of_strings(tmp_path):
    def input_fn():
        return batches().map(lambda x, y: (x, tf.strings.as_string(y)))

    with pytest.raises(ValueError, match="cannot be computed of strings"):
        trained(tmp_path, input_fn)


def test_no_batch_dimension(tmp_path):
    with pytest.raises(ValueError, match=r"Expected shape \(None, 4\)"):
        trained(tmp_path, lambda: batches().unbatch())


# --- Other shapes later ------------------------------------------------------


def generated(*shapes, signature):
    """Batches of these shapes, as a generator makes them."""

    def generator():
        for shape in shapes:
            yield np.ones(shape, "float32"), np.ones([shape[0], 1], "float32")

    y = tf.TensorSpec([None, 1])
    x = tf.TensorSpec(signature)
    return tf.data.Dataset.from_generator(generator, output_signature=(x, y))


def test_sizes_of_batches_may_differ(tmp_path):
    def input_fn():
        return generated([8, 4], [3, 4], [8, 4], signature=[None, 4])

    made = estimator(tmp_path).train(input_fn)
    assert checkpoints.step_of(made.latest_checkpoint()) == 3


@pytest.mark.parametrize("signature", [[None, 4], [None, None]])
def test_another_number_of_features_later(tmp_path, caplog, signature):
    """TensorFlow's own error, once; what was trained before is kept."""

    def input_fn():
        return generated([8, 4], [8, 4], [8, 5], signature=signature)

    made = estimator(tmp_path)
    with (
        caplog.at_level(logging.WARNING, "tfdist"),
        pytest.raises(tf.errors.InvalidArgumentError) as raised,
    ):
        made.train(input_fn)
    assert "(8, 5)" in str(raised.value) or "[8,5]" in str(raised.value)
    *summary, note = raised.value.__notes__
    assert all("8,5]" in line for line in summary)
    assert input_fns.described(input_fn) in note
    assert "Failed at step" not in caplog.text
    assert checkpoints.step_of(made.latest_checkpoint()) == 0


class Full(tfdist.SessionRunHook):
    def __init__(self, method):
        setattr(self, method, self.fail)

    def fail(self, *args):
        raise tf.errors.ResourceExhaustedError(None, None, "no space left")


@pytest.mark.parametrize("method", ["after_run", "end"])
def test_what_a_hook_fails_with_is_not_laid_to_the_batches(tmp_path, method):
    with pytest.raises(tf.errors.ResourceExhaustedError) as raised:
        estimator(tmp_path).train(batches, hooks=[Full(method)])
    assert not hasattr(raised.value, "__notes__")


def test_evaluated_batches_without_targets_are_refused_before_any_step(
    tmp_path,
):
    def unlabelled():
        return batches().map(lambda x, y: x)

    made = estimator(tmp_path)
    with pytest.raises(ValueError, match="batches without targets") as raised:
        tfdist.train_and_evaluate(
            made,
            tfdist.TrainSpec(batches, max_steps=2),
            tfdist.EvalSpec(unlabelled, steps=1),
        )
    assert input_fns.described(unlabelled) in raised.value.__notes__[0]
    assert checkpoints.step_of(made.latest_checkpoint()) == 0


def test_only_the_function_of_the_evaluated_batches_is_named(tmp_path):
    def narrow():
        return generated([8, 3], signature=[None, 3])

    with pytest.raises(ValueError, match="incompatible with the layer") as told:
        tfdist.train_and_evaluate(
            estimator(tmp_path),
            tfdist.TrainSpec(batches, max_steps=2),
            tfdist.EvalSpec(narrow, steps=1),
        )
    (note,) = told.value.__notes__
    assert input_fns.described(narrow) in note


def test_what_a_model_function_fails_with_is_not_laid_to_the_batches(tmp_path):
    def model_fn():
        return keras.Model.compile(keras.Sequential(), "unknown") or None

    with pytest.raises(ValueError, match="Could not interpret opt") as raised:
        estimator(tmp_path, model_fn).train(batches)
    assert not hasattr(raised.value, "__notes__")


# --- Model functions ---------------------------------------------------------


def without_call():
    class Parts(keras.Model):
        def __init__(self):
            super().__init__()
            self.part = keras.layers.Dense(1)

    model = Parts()
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("model_fn", "error", "message"),
    [
        (lambda: None, TypeError, "must return a `keras.Model`. Received: Non"),
        (lambda: (logistic(), 1), TypeError, "of type tuple"),
        (uncompiled, ValueError, "must be compiled with an optimizer and a lo"),
        (without_call, ValueError, "has no variables and.*`call`"),
    ],
)
def test_model_functions(tmp_path, model_fn, error, message):
    made = estimator(tmp_path, model_fn)
    for use in (
        lambda: made.train(batches),
        lambda: made.evaluate(batches),
        lambda: list(made.predict(batches)),
    ):
        with pytest.raises(error, match=message):
            use()
    assert not list(tmp_path.glob("model.ckpt*"))


@pytest.mark.slow
def test_own_train_step_on_a_cluster(tmp_path):
    """The chief says at once why not; its own processes use it."""
    metrics, _ = trained(tmp_path / "local", own_step_batches, own_step)
    assert metrics["global_step"] == 4
    code = "from tests.training.test_bad_input import job; job(sys.argv[1])"
    code = f"import sys; sys.path.append({str(HERE)!r}); {code}"
    model_dir = tmp_path / "cluster"
    command = [sys.executable, "-c", code, str(model_dir)]
    with LocalCluster(command, ps=1, workers=1, cwd=HERE.parent) as cluster:
        cluster.wait_for_line("chief:0", "ValueError: The `train_step` of Own")
        output = cluster.output("chief:0")
    assert "applies gradients 0 times" in output
    assert "Override `compute_loss` instead, or train by all-reduce" in output
    assert_nothing_left(cluster)
    assert not list(model_dir.glob("model.ckpt*"))

"""Valid and invalid results of input functions."""

import random
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import BATCH, case, compiled, examples
from tests.cases.optimizers import K

X, Y = examples()


def dense():
    return compiled(keras.layers.Dense(1))


def of_one():
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def of_two(as_list=False):
    """A model of the inputs "a" and "b"."""
    inputs = [keras.Input([2], name=name) for name in ("a", "b")]
    output = keras.layers.Dense(1)(keras.layers.concatenate(inputs))
    a, b = inputs
    model = keras.Model(inputs if as_list else {"a": a, "b": b}, output)
    model.compile("sgd", "mse")
    return model


def halves(**others):
    """The features of `of_two`."""
    return {"a": X[:, :2], "b": X[:, 2:], **others}


def repeated(*parts):
    """An input function of one batch, again and again."""
    return lambda: tf.data.Dataset.from_tensors(parts).repeat()


def of_ids(**arguments):
    """The mean embedding of some ids."""
    ids = keras.Input([None], dtype="int64", **arguments)
    vectors = keras.layers.Embedding(9, 3)(ids)
    mean = keras.layers.GlobalAveragePooling1D()(vectors)
    model = keras.Model(ids, keras.layers.Dense(1)(mean))
    model.compile("sgd", "mse")
    return model


# --- What works as in Keras --------------------------------------------------


def _trains(name, input_fn, model_fn=dense):
    @case(name)
    def run(job):
        job.trains_as_fit(model_fn, input_fn)


_trains("float64 features", repeated(X.astype("float64"), Y))
_trains("float16 features", repeated(X.astype("float16"), Y))
_trains("integer features", repeated(X.astype("int32"), Y))
_trains("boolean features", repeated(X > 0, Y))
_trains("integer labels", repeated(X, Y.astype("int64")))
_trains("boolean labels", repeated(X, Y > 0))
_trains("float64 labels", repeated(X, Y.astype("float64")))
_trains("labels of rank 1", repeated(X, Y[:, 0]))
_trains("weights of rank 1", repeated(X, Y, np.arange(BATCH)))
_trains("weights of rank 2", repeated(X, Y, np.arange(BATCH)[:, None]))
_trains("float64 weights", repeated(X, Y, np.linspace(0, 1, BATCH)))
_trains("boolean weights", repeated(X, Y, Y > 0))
_trains("features by name", repeated(halves(), Y), of_two)
_trains("features in a tuple", repeated((X[:, :2], X[:, 2:]), Y), of_two)
_trains(
    "features by name for a list", repeated(halves(), Y), lambda: of_two(True)
)
_trains(
    "features by name and unread, for a list",
    repeated(halves(c=X), Y),
    lambda: of_two(True),
)
_trains(
    "features that miss a last dimension of 1",
    repeated(X[:, 0], Y),
    of_one,
)


@case()
def no_weights(job):
    """None in the place of the sample weights."""
    job.trains_as_fit(
        dense,
        lambda: repeated(X, Y)().map(lambda x, y: (x, y, None)),
    )


@case()
def a_list_of_x_and_y(job):
    """`map` makes one tensor of a list, so shapes must agree; a tuple."""
    job.trains_as_fit(dense, lambda: repeated(X, Y)().map(lambda x, y: (x, y)))


@case()
def batches_of_other_sizes(job):
    def input_fn():
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        return data.batch(BATCH - 4).concatenate(data.take(4).batch(4)).repeat()

    if job.strategy in ("one process", "mirrored"):
        job.trains_as_fit(dense, input_fn)
    else:
        job.estimator(dense).train(input_fn, max_steps=4)


@case()
def whole_batches_alone(job):
    def input_fn():
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        return data.batch(8, drop_remainder=True).repeat()

    job.trains_as_fit(dense, input_fn)


@case()
def fewer_examples_than_a_batch(job):
    def input_fn():
        data = tf.data.Dataset.from_tensor_slices((X, Y))
        return data.batch(100).repeat()

    job.trains_as_fit(dense, input_fn)


@case(refused={"ps": "not on a worker .* there a tensor has no value"})
def an_if_over_tensors(job):
    def input_fn():
        dataset = tf.data.Dataset.from_tensor_slices((X, Y))
        if tf.reduce_sum(X) > 1e9:
            dataset = dataset.take(1)
        return dataset.batch(BATCH).repeat()

    job.trains_as_fit(dense, input_fn)


@case()
def sparse_features(job):
    def input_fn():
        return repeated(X, Y)().map(lambda x, y: (tf.sparse.from_dense(x), y))

    def model_fn():
        x = keras.Input([4], sparse=True)
        model = keras.Model(x, keras.layers.Dense(1)(x))
        model.compile("sgd", "mse")
        return model

    job.trains_as_fit(model_fn, input_fn)


IDS = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 6]] * 4)


COUNTED, SIZE = 24, 6


def counting():
    """A table of a row for each example, which counts how often it came."""
    ids = keras.Input([1], dtype="int64")
    table = keras.layers.Embedding(COUNTED, 1, embeddings_initializer="zeros")
    model = keras.Model(ids, keras.layers.Flatten()(table(ids)))
    model.compile(K.SGD(float(SIZE)), lambda y, y_pred: -y_pred)
    return model


def come_once(job, input_fn):
    """Trains until the data end."""
    estimator = job.estimator(counting)
    estimator.train(input_fn)
    if job.is_chief:
        times = estimator.restored_model().get_weights()[0]
        np.testing.assert_allclose(times, np.ones([COUNTED, 1]), rtol=1e-5)


@case()
def a_seeded_shuffle_before_a_shard(job):
    """The processes shuffle alike, so that their shards are one whole."""

    def input_fn(context):
        ids = tf.data.Dataset.range(COUNTED).map(lambda i: ([i], [0.0]))
        ids = ids.shuffle(COUNTED, seed=3, reshuffle_each_iteration=False)
        ids = ids.shard(context.num_input_pipelines, context.input_pipeline_id)
        return ids.batch(context.get_per_replica_batch_size(SIZE))

    come_once(job, input_fn)


@case()
def data_that_need_no_order(job):
    """Where processes take shares of one batch, they are in order."""

    def slowly(i):
        time.sleep(random.SystemRandom().random() / 50)
        return i

    def input_fn():
        ids = tf.data.Dataset.range(COUNTED)
        ids = ids.map(
            lambda i: ([tf.numpy_function(slowly, [i], tf.int64)], [0.0]),
            num_parallel_calls=8,
        )
        options = tf.data.Options()
        options.deterministic = False
        ids = ids.map(lambda x, y: (tf.ensure_shape(x, [1]), y))
        return ids.batch(SIZE).with_options(options)

    if job.strategy != "ps":  # There each worker reads all.
        come_once(job, input_fn)


@case()
def data_shuffled_and_cached(job):
    """What tfdist looks at beforehand leaves no trace in the cache."""

    def input_fn():
        ids = tf.data.Dataset.range(COUNTED).shuffle(COUNTED).cache()
        return ids.map(lambda i: ([i], [0.0])).batch(SIZE).prefetch(4)

    if job.strategy != "ps":  # There each worker reads all.
        come_once(job, input_fn)


@case()
def the_seed_of_the_program(job):
    def model_fn():
        return compiled(keras.layers.Dense(3), optimizer=K.SGD(0.0))

    run = tfdist.RunConfig(job.model_dir, log_step_count_steps=None)
    keras.utils.set_random_seed(11)
    found = tfdist.Estimator(model_fn, run).train(repeated(X, Y), max_steps=1)
    if job.is_chief:
        keras.utils.set_random_seed(11)
        kernel = found.get_variable_value("sequential/dense/kernel")
        np.testing.assert_array_equal(kernel, model_fn().get_weights()[0])


@case()
def ragged_features(job):
    def input_fn():
        data = tf.data.Dataset.from_tensors((IDS, Y)).repeat()
        return data.map(
            lambda x, y: (tf.RaggedTensor.from_tensor(x, padding=0), y)
        )

    job.trains_as_fit(lambda: of_ids(ragged=True), input_fn)


@case()
def ragged_features_made_dense(job):
    def input_fn():
        data = tf.data.Dataset.from_tensors((IDS, Y)).repeat()
        ragged = data.map(
            lambda x, y: (tf.RaggedTensor.from_tensor(x, padding=0), y)
        )
        return ragged.map(lambda x, y: (x.to_tensor(), y))

    job.trains_as_fit(of_ids, input_fn)


@case()
def other_structure_for_evaluation(job):
    """Trained with weights and by name, evaluated without and in a tuple."""
    estimator = job.estimator(of_two)
    estimator.train(repeated(halves(), Y, Y + 1), max_steps=2)
    if job.is_chief:
        named = estimator.evaluate(repeated(halves(), Y), steps=1)
        listed = estimator.evaluate(repeated((X[:, :2], X[:, 2:]), Y), steps=1)
        assert named == listed


# --- What is refused ---------------------------------------------------------


def _refuses(name, message, input_fn, model_fn=dense):
    @case(name, refused=message)
    def run(job):
        try:
            job.estimator(model_fn).train(input_fn, max_steps=2)
        finally:
            written = tf.io.gfile.glob(f"{job.model_dir}/model.ckpt-[1-9]*")
            assert not written, "It was refused after the first step."


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return X, Y


def generator():
    yield X, Y


NO_DATASET = "must return a tf.data.Dataset of batches. Received: "
_refuses("an array", NO_DATASET, lambda: X)
_refuses("a tuple of arrays", NO_DATASET, lambda: (X, Y))
_refuses("a dictionary", NO_DATASET, lambda: {"x": X})
_refuses("nothing", NO_DATASET + "None", lambda: None)
_refuses("a generator", NO_DATASET, generator)
_refuses("a PyDataset", NO_DATASET, Sequence)

NO_TENSOR = r"must be of tensors. Received: batch\[0\]"
_refuses(
    "windows",
    NO_TENSOR + r" is a DatasetSpec\(Tens.*of a window by its `batch`",
    lambda: tf.data.Dataset.from_tensor_slices((X, Y)).window(3),
)
_refuses(
    "a feature that is None",
    NO_TENSOR + r"\['b'\] is a NoneTensorSpec",
    lambda: repeated(X, Y)().map(lambda x, y: ({"a": x, "b": None}, y)),
)
_refuses(
    "an optional",
    NO_TENSOR + r"\['b'\] is a OptionalSpec",
    lambda: repeated(X, Y)().map(
        lambda x, y: ({"b": tf.experimental.Optional.from_value(x)}, y)
    ),
)
_refuses(
    "a TensorArray",
    NO_TENSOR + " is a TensorArraySpec",
    lambda: repeated(X, Y)().map(
        lambda x, y: (tf.TensorArray("float32", BATCH).unstack(x), y)
    ),
)
NOT_INPUTS = "features of the dataset are not the inputs of model"
_refuses("a feature by a name", NOT_INPUTS, repeated({"x": X}, Y))
_refuses("a feature too few", NOT_INPUTS, repeated({"a": X}, Y), of_two)
_refuses("a feature too many", NOT_INPUTS, repeated(halves(c=X), Y), of_two)
_refuses(
    "a feature of another name",
    NOT_INPUTS,
    repeated({"a": X[:, :2], "c": X[:, 2:]}, Y),
    of_two,
)
_refuses("strings for numbers", NOT_INPUTS, repeated(X.astype("str"), Y), dense)
NO_TARGETS = "batches without targets"
_refuses("no labels", NO_TARGETS, repeated(X))
_refuses("x alone", NO_TARGETS, lambda: repeated(X, Y)().map(lambda x, y: x))
_refuses(
    "labels that are None",
    NO_TARGETS,
    lambda: repeated(X, Y)().map(lambda x, y: (x, None)),
)
_refuses("four parts", "found: ", repeated(X, Y, Y, Y))
_refuses(
    "examples instead of batches",
    r"Expected shape \(None, 4\)|must give batches",
    lambda: tf.data.Dataset.from_tensor_slices((X, Y)).repeat(),
)
_refuses(
    "no batch at all",
    "has no batch",
    lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(100, True),
)
_refuses(
    "scalars instead of batches",
    "must give batches",
    lambda: tf.data.Dataset.from_tensor_slices((X[:, 0], Y)).repeat(),
    of_one,
)
_refuses(
    "strings as labels", "computed of strings", repeated(X, Y.astype("str"))
)
_refuses(
    "labels of another width",
    "must have the same shape",
    repeated(X, np.ones([BATCH, 3])),
    lambda: compiled(keras.layers.Dense(2), loss="categorical_crossentropy"),
)

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, logistic

import tfdist
from tfdist.checkpoint import checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.estimator.warm_start import WarmStartSettings

KERNEL, BIAS = "sequential/dense/kernel", "sequential/dense/bias"


def endless():
    return batches().repeat()


def model_fn(hidden=None):
    layers = [keras.layers.Dense(4, name=hidden)] if hidden else []
    return logistic(keras.optimizers.Adam(0.1), hidden=layers)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("old"))
    config = tfdist.RunConfig(path, cluster=Cluster())
    return tfdist.Estimator(model_fn, config).train(endless, steps=5)


def started(path, warm_start_from, model_fn=model_fn, input_fn=endless):
    """The weights of a new job before its first step."""
    config = tfdist.RunConfig(path, cluster=Cluster())
    made = tfdist.Estimator(model_fn, config, warm_start_from=warm_start_from)
    made.train(input_fn, steps=1)
    first = tfdist.Estimator(model_fn, config)
    saved = f"{path}/model.ckpt-0"
    return {
        name: checkpoints.load_variable(saved, name)
        for name in first.get_variable_names()
    }


def test_all_weights_and_nothing_else(old, tmp_path):
    values = started(tmp_path, Path(old.model_dir))
    for name in (KERNEL, BIAS):
        assert np.array_equal(values[name], old.get_variable_value(name))
    assert values["global_step"] == 0
    assert values["adam/iteration"] == 0
    assert not values[f"{KERNEL}/adam/momentum"].any()


def test_some_of_them(old, tmp_path):
    path = old.latest_checkpoint()
    values = started(tmp_path, WarmStartSettings(path, [".*kernel"]))
    assert np.array_equal(values[KERNEL], old.get_variable_value(KERNEL))
    assert not values[BIAS].any()
    assert old.get_variable_value(BIAS).any()


def test_renamed(old, tmp_path):
    def renamed():
        output = keras.layers.Dense(1, "sigmoid", name="output")
        model = keras.Sequential([keras.Input([4]), output], name="other")
        model.compile("sgd", "binary_crossentropy")
        return model

    names = {"other/output/kernel": KERNEL, "other/output/bias": BIAS}
    settings = WarmStartSettings(old.model_dir, var_name_to_prev_var_name=names)
    values = started(tmp_path, settings, renamed)
    for new, before in names.items():
        assert np.array_equal(values[new], old.get_variable_value(before))


def test_two_of_one(old, tmp_path):
    def towers():
        kernels = [keras.layers.Dense(1, use_bias=False, name=n) for n in "ab"]
        x = keras.Input([4])
        model = keras.Model(x, kernels[0](x) + kernels[1](x), name="towers")
        model.compile("sgd", "mse")
        return model

    names = dict.fromkeys(["a/kernel", "b/kernel"], KERNEL)
    settings = WarmStartSettings(old.model_dir, var_name_to_prev_var_name=names)
    values = started(tmp_path, settings, towers)
    for new in names:
        assert np.array_equal(values[new], old.get_variable_value(KERNEL))


@pytest.mark.parametrize(
    ("optimizer", "patterns"),
    [
        (lambda: keras.optimizers.Ftrl(0.1), [".*"]),
        (
            lambda: keras.optimizers.Adam(
                keras.optimizers.schedules.CosineDecay(0.1, 6), amsgrad=True
            ),
            ["kernel", "bias"],
        ),
    ],
)
def test_a_list_takes_slots_and_counters(tmp_path, optimizer, patterns):
    """It goes on as if it had not been interrupted, but for the step."""
    config = tfdist.RunConfig(tmp_path / "old", cluster=Cluster())
    before = tfdist.Estimator(lambda: logistic(optimizer()), config)
    data = batches().take(1).repeat
    settings = WarmStartSettings(
        before.train(data, steps=3).model_dir, patterns
    )
    config = config.replace(model_dir=tmp_path / "new")
    made = tfdist.Estimator(
        lambda: logistic(optimizer()), config, warm_start_from=settings
    )
    made.train(data, steps=3)
    before.train(data, steps=3)
    for name in set(before.get_variable_names()) - {"global_step"}:
        np.testing.assert_allclose(
            made.get_variable_value(name),
            before.get_variable_value(name),
            rtol=1e-6,
            err_msg=name,
        )
    assert made.get_variable_value("global_step") == 3


def test_a_list_of_some_takes_their_slots_and_no_counter(old, tmp_path):
    settings = WarmStartSettings(old.model_dir, ["kernel"])
    values = started(tmp_path, settings)
    slot = f"{KERNEL}/adam/velocity"
    assert np.array_equal(values[slot], old.get_variable_value(slot))
    assert not values[f"{BIAS}/adam/velocity"].any()
    assert values["adam/iteration"] == 0


def test_averages_of_weights_whose_slots_are_taken(tmp_path):
    """Other averages begin at their weights."""

    def averaging():
        return logistic(keras.optimizers.SGD(0.1, use_ema=True, name="sgd"))

    config = tfdist.RunConfig(tmp_path / "old", cluster=Cluster())
    before = tfdist.Estimator(averaging, config).train(endless, steps=5)
    names = WarmStartSettings(before.model_dir, ["kernel"])
    values = started(tmp_path / "new", names, averaging)
    average = before.get_variable_value(f"{KERNEL}/sgd/average")
    assert np.array_equal(values[f"{KERNEL}/sgd/average"], average)
    assert np.array_equal(values[f"{BIAS}/sgd/average"], values[BIAS])


def test_slots_of_another_optimizer(old, tmp_path):
    def other():
        return logistic("adagrad")

    settings = WarmStartSettings(old.model_dir, ["kernel", "bias"])
    message = r"has no \['adagrad/iteration', .*restores slots.*'kernel\|bias'"
    with pytest.raises(ValueError, match=message):
        started(tmp_path / "slots", settings, other)
    settings = WarmStartSettings(old.model_dir, "kernel|bias")
    values = started(tmp_path / "weights", settings, other)
    assert np.array_equal(values[KERNEL], old.get_variable_value(KERNEL))


def test_ftrl_forgets_weights_without_its_slots(tmp_path, caplog):
    def ftrl():
        return logistic(keras.optimizers.Ftrl(0.1))

    config = tfdist.RunConfig(tmp_path / "old", cluster=Cluster())
    before = tfdist.Estimator(ftrl, config).train(endless, steps=5)
    message = f"first step will forget ['{BIAS}', '{KERNEL}']"
    for path, settings, warns in (
        ("weights", before.model_dir, True),
        ("slots", WarmStartSettings(before.model_dir, [".*"]), False),
    ):
        caplog.clear()
        started(tmp_path / path, settings, ftrl)
        assert (message in caplog.text) == warns


def test_a_job_that_goes_on_keeps_its_own(old, tmp_path):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made = tfdist.Estimator(model_fn, config, warm_start_from=old.model_dir)
    made.train(endless, steps=3)
    before = made.get_variable_value(KERNEL)
    made.train(endless, max_steps=3)
    assert np.array_equal(made.get_variable_value(KERNEL), before)


def test_evaluated_and_asked_before_it_trains(old, tmp_path):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    made = tfdist.Estimator(model_fn, config, warm_start_from=old.model_dir)
    expected = old.evaluate(batches)
    assert made.evaluate(batches) == {**expected, "global_step": 0}
    outputs = next(old.predict(batches))
    assert np.array_equal(next(made.predict(batches)), outputs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda d: f"{d}/nothing", "no checkpoint for a warm start"),
        (lambda d: WarmStartSettings(d, "nothing"), "must name variables"),
        (lambda d: WarmStartSettings(d, None), "must name variables"),
        (
            lambda d: WarmStartSettings(
                d, var_name_to_prev_var_name={"nothing": KERNEL}
            ),
            "must name variables",
        ),
        (
            lambda d: WarmStartSettings(
                d, "bias", var_name_to_prev_var_name={KERNEL: KERNEL}
            ),
            "may rename only",
        ),
    ],
)
def test_bad_settings(old, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        started(tmp_path, settings(old.model_dir))


def test_another_shape(old, tmp_path):
    names = {"sequential/hidden/kernel": KERNEL}
    settings = WarmStartSettings(
        old.model_dir, "hidden/kernel", var_name_to_prev_var_name=names
    )
    message = r"kernel: shape \(4, 4\) in the mo"
    with pytest.raises(ValueError, match=message) as raised:
        started(tmp_path, settings, lambda: model_fn("hidden"))
    assert "out of `vars_to_warm_start`" in "".join(raised.value.__notes__)


def test_no_path():
    with pytest.raises(ValueError, match="`ckpt_to_initialize_from` must be"):
        WarmStartSettings("")
    for wrong, error in (("", ValueError), (5, TypeError)):
        with pytest.raises(error, match="`ckpt_to_initialize_from` must be"):
            tfdist.Estimator(model_fn, tfdist.RunConfig("m"), wrong)


def growing():
    ids = keras.Input([1], dtype="int64")
    rows = tfdist.DynamicEmbedding(2, 100, num_shards=1, name="table")(ids)
    output = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    model = keras.Model(ids, output)
    model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse")
    return model


SLOTS = ("average", "momentum", "velocity")


def ids():
    batch = np.array([[5], [7]]), np.ones([2, 1])
    return tf.data.Dataset.from_tensors(batch).repeat()


@pytest.mark.slow
def test_a_growing_table_starts_with_its_ids_or_not_at_all(tmp_path):
    config = tfdist.RunConfig(tmp_path / "old", cluster=Cluster())
    old = tfdist.Estimator(growing, config).train(ids, steps=5)
    new = tmp_path / "new"
    values = started(new, old.model_dir, growing, ids)
    for name in ("embeddings", "keys", "counters"):
        found = values[f"table/{name}"]
        assert np.array_equal(found, old.get_variable_value(f"table/{name}"))
    assert np.count_nonzero(values["table/keys"]) == 2
    averages = values["table/embeddings/adam/average"]
    assert np.array_equal(averages, values["table/embeddings"])
    settings = WarmStartSettings(old.model_dir, [".*"])
    values = started(tmp_path / "slots", settings, growing, ids)
    for name in ("embeddings", *(f"embeddings/adam/{s}" for s in SLOTS)):
        found = values[f"table/{name}"]
        assert found.any()
        assert np.array_equal(found, old.get_variable_value(f"table/{name}"))
    pattern = WarmStartSettings(old.model_dir, "embeddings")
    with pytest.raises(ValueError, match="all variables of a DynamicEmbedding"):
        started(tmp_path / "newer", pattern, growing, ids)


WORDS = [f"word {i}" for i in range(6)]


def listed():
    table = tfdist.PartitionedEmbedding(6, 2, num_shards=2, name="words")
    ids = keras.Input([1], dtype="int64")
    output = keras.layers.Dense(1)(keras.layers.Flatten()(table(ids)))
    model = keras.Model(ids, output)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model


def unlisted():
    table = tfdist.DynamicEmbedding(
        2, 8192, num_shards=2, name="table", admit_after=3
    )
    ids = keras.Input([1], dtype="string")
    output = keras.layers.Dense(1)(keras.layers.Flatten()(table(ids)))
    model = keras.Model(ids, output)
    model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse")
    return model


def words():
    batch = np.array([["word 5"], ["other"]]), np.ones([2, 1])
    return tf.data.Dataset.from_tensors(batch).repeat()


def from_words(path, ids, before="words/embeddings", name="table/embeddings"):
    return WarmStartSettings(
        path,
        var_name_to_prev_var_name={"table/embeddings": before},
        var_name_to_ids={name: ids},
    )


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    config = tfdist.RunConfig(tmp_path_factory.mktemp("v"), cluster=Cluster())

    def some():
        batch = np.array([[5], [3]]), np.ones([2, 1])
        return tf.data.Dataset.from_tensors(batch).repeat()

    return tfdist.Estimator(listed, config).train(some, steps=2)


@pytest.mark.slow
def test_a_growing_table_starts_with_the_rows_of_a_vocabulary(
    vocabulary, tmp_path
):
    settings = from_words(vocabulary.model_dir, WORDS)
    values = started(tmp_path, settings, unlisted, words)
    table = unlisted().get_layer("table")
    arrays = [values[f"table/{n}"] for n in ("embeddings", "keys", "seen")]
    sketch = values["table/sketch"]
    table.set_weights([*arrays, values["table/counters"], sketch])
    assert table.num_ids() == len(WORDS)
    rows = vocabulary.get_variable_value("words/embeddings")
    np.testing.assert_array_equal(table(np.array(WORDS)), rows)
    other = np.array(["other"])
    np.testing.assert_array_equal(table(other), table.initial_rows(other))
    # The averages of the rows begin with them; other weights are taken too.
    averages = values["table/embeddings/adam/average"]
    assert np.array_equal(averages, values["table/embeddings"])
    kernel = vocabulary.get_variable_value("dense/kernel")
    assert np.array_equal(values["dense/kernel"], kernel)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ids": WORDS[1:]},
            r"each with a unique id .* 5 ids \(5 different",
        ),
        ({"ids": [*WORDS[1:], WORDS[1]]}, r"6 ids \(5 different"),
        ({"ids": WORDS, "before": "nothing"}, "has no variable 'nothing'"),
        ({"ids": WORDS, "name": "dense/kernel"}, "the growing tables"),
    ],
)
def test_bad_ids_of_a_vocabulary(vocabulary, tmp_path, settings, message):
    settings = from_words(vocabulary.model_dir, **settings)
    with pytest.raises(ValueError, match=message):
        started(tmp_path, settings, unlisted, words)


# --- Of another vocabulary ----------------------------------------------------

OLD_WORDS = ["red", "green", "ro\u2028sé", "blue", "unused"]
NEW_WORDS = ["blue", "black", "ro\u2028sé", "red"]


def by_words(words, buckets, num_shards=None):
    def model_fn():
        ids = keras.Input([1], dtype="int64")
        table = tfdist.PartitionedEmbedding(
            words + buckets, 2, num_shards=num_shards, name="words"
        )
        output = keras.layers.Dense(1)(keras.layers.Flatten()(table(ids)))
        model = keras.Model(ids, output)
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return model

    return model_fn


def some_ids():
    batch = np.arange(4)[:, np.newaxis], np.ones([4, 1])
    return tf.data.Dataset.from_tensors(batch).repeat()


@pytest.fixture(scope="module")
def old_words(tmp_path_factory):
    """A job of four words of a file and two buckets, and the file."""
    directory = tmp_path_factory.mktemp("words")
    path = directory / "old.txt"
    path.write_text("\n".join(OLD_WORDS), "utf-8")
    config = tfdist.RunConfig(directory / "job", cluster=Cluster())
    job = tfdist.Estimator(by_words(4, 2), config).train(some_ids, steps=3)
    return job, str(path)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_words_keep_their_rows(old_words, tmp_path, num_shards):
    """As `tf.compat.v1.train.warm_start` has it, but for rows of new words."""
    job, old = old_words
    new = tmp_path / "new.txt"
    new.write_text("\n".join(NEW_WORDS) + "\n", "utf-8")
    info = tf.compat.v1.train.VocabInfo(str(new), 4, 1, old, 4)
    settings = WarmStartSettings(
        job.model_dir, [".*"], {"words/embeddings": info}
    )
    values = started(tmp_path, settings, by_words(4, 1, num_shards), some_ids)

    saved = job.get_variable_value("words/embeddings")
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_variable("words", initializer=saved)
        session.run(table.initializer)
        path = v1.train.Saver().save(session, f"{tmp_path}/v1")
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_variable("words", [5, 2])
        v1.train.warm_start(path, var_name_to_vocab_info={"words": info})
        session.run(v1.global_variables_initializer())
        expected = session.run(table)
    kept, others = [0, 2, 3], [1, 4]
    rows = values["words/embeddings"]
    assert np.array_equal(rows[kept], expected[kept])
    assert np.array_equal(rows[kept], saved[[3, 2, 0]])
    assert not expected[others].any()
    assert np.unique(rows[others]).size == 4  # As the layer begins.
    slot = "words/embeddings/adagrad/accumulator"
    slots = values[slot]
    assert np.array_equal(slots[kept], job.get_variable_value(slot)[[3, 2, 0]])
    assert np.all(slots[others] == np.float32(0.1))
    kernel = job.get_variable_value("dense/kernel")
    assert np.array_equal(values["dense/kernel"], kernel)


VocabInfo = tf.compat.v1.train.VocabInfo


@pytest.mark.parametrize(
    ("name", "info", "message"),
    [
        ("words/other", VocabInfo("", 4, 1, ""), "must name variables"),
        ("words/embeddings", VocabInfo("", 4, 2, ""), "does not fit 4 words a"),
    ],
)
def test_bad_vocabularies(old_words, tmp_path, name, info, message):
    job, path = old_words
    info = info._replace(new_vocab=path, old_vocab=path)
    settings = WarmStartSettings(
        job.model_dir, var_name_to_vocab_info={name: info}
    )
    with pytest.raises(ValueError, match=message):
        started(tmp_path, settings, by_words(4, 1), some_ids)


@pytest.mark.parametrize(
    "info",
    [
        "old.txt",
        VocabInfo("", 4, 1, "", axis=1),
        VocabInfo("", 4, 1, "", backup_initializer=tf.zeros_initializer()),
    ],
)
def test_arguments_of_vocabularies(info):
    with pytest.raises(ValueError, match=r"`var_name_to_vocab_info` must map"):
        WarmStartSettings("job", var_name_to_vocab_info={"words": info})

"""After training: checkpoints, exports, further training."""

import tempfile

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import EachStep, Job, case, compiled, examples, seeded


def batches():
    """Four batches of six examples."""
    return tf.data.Dataset.from_tensor_slices(examples(24)).batch(6)


def for_training(job):
    """On parameter servers, where steps race, all batches are the same."""

    def input_fn():
        if job.strategy == "ps":
            return tf.data.Dataset.from_tensors(examples()).repeat()
        return batches().repeat()

    return input_fn


def model_fn():
    return compiled(
        keras.layers.Dense(3, "relu"),
        keras.layers.Dense(1, "sigmoid"),
        optimizer="adam",
        metrics=["mae", "auc"],
    )


def with_a_table(num_shards=3):
    ids = keras.Input([2], dtype="int64", name="ids")
    rows = tfdist.PartitionedEmbedding(24, 3, num_shards, name="table")(ids)
    output = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
    model = keras.Model(ids, output)
    model.compile("adagrad", "mse")
    return model


def ids_and_targets():
    ids = np.arange(24).reshape(12, 2)
    batch = ids, ids.sum(1, keepdims=True).astype("float32")
    return tf.data.Dataset.from_tensors(batch).repeat()


def trained(job, make=model_fn, data=None, steps=4, **config):
    """An Estimator after some steps."""
    estimator, data = job.estimator(make, **config), data or for_training(job)
    return estimator.train(data, hooks=[EachStep()], max_steps=steps)


def fitted(job, make=model_fn, data=None, steps=4):
    """What Keras makes of the same."""
    model, data = seeded(make), data or for_training(job)
    model.fit(data(), steps_per_epoch=steps, verbose=0)
    return model


def assert_same_weights(model, other, **tolerance):
    tolerance = {"rtol": 1e-4, "atol": 1e-5, **tolerance}
    for one, two in zip(model.weights, other.weights, strict=True):
        np.testing.assert_allclose(one, two, **tolerance)


@case()
def the_restored_model_is_that_of_fit(job):
    estimator = trained(job)
    if job.is_chief:
        assert_same_weights(estimator.restored_model(), fitted(job))


@case()
def the_restored_model_goes_on_with_fit(job):
    """Its optimizer has its moments and its count of steps."""
    estimator, data = trained(job), for_training(job)
    if job.is_chief:
        model = estimator.restored_model()
        model.fit(data(), steps_per_epoch=3, verbose=0)
        again = fitted(job)
        again.fit(data(), steps_per_epoch=3, verbose=0)
        assert_same_weights(model, again)
        assert int(model.optimizer.iterations) == 7


@case()
def an_earlier_checkpoint_restores(job):
    estimator = trained(job, save_checkpoints_steps=2)
    if job.is_chief:
        path = estimator.latest_checkpoint().replace("-4", "-2")
        assert_same_weights(
            estimator.restored_model(path), fitted(job, steps=2)
        )


@case(refused="There is no checkpoint")
def no_checkpoint_to_restore(job):
    job.estimator(model_fn).restored_model()


@case()
def evaluate_is_that_of_keras(job):
    estimator = trained(job)
    if job.is_chief:
        metrics = estimator.evaluate(batches)
        wanted = estimator.restored_model().evaluate(
            batches(), verbose=0, return_dict=True
        )
        assert metrics.pop("global_step") == 4
        assert metrics.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4)


@case()
def predict_is_that_of_keras(job):
    estimator = trained(job)
    if job.is_chief:
        found = np.array(list(estimator.predict(batches)))
        wanted = estimator.restored_model().predict(batches(), verbose=0)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@case()
def a_saved_model_predicts_as_the_restored_one(job):
    estimator = trained(job)
    if job.is_chief:
        path = estimator.export_saved_model(f"{job.model_dir}/exported")
        x, _ = examples()
        serve = tf.saved_model.load(path).signatures["serving_default"]
        (name,) = serve.structured_input_signature[1]
        (found,) = serve(**{name: tf.constant(x)}).values()
        wanted = estimator.restored_model().predict(x, verbose=0)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def _exported(job, make, data, evaluated, exporter):
    """Trains and exports; the last export's directory, on the chief."""
    _, exports = tfdist.train_and_evaluate(
        job.estimator(make),
        tfdist.TrainSpec(data, max_steps=4, hooks=[EachStep()]),
        tfdist.EvalSpec(evaluated, steps=1, exporters=exporter),
    )
    assert len(exports) == job.is_chief
    return exports[0] if exports else None


@case()
def a_keras_file_of_the_best_model(job):
    exporter = tfdist.BestExporter("best", format="keras")
    path = _exported(job, model_fn, for_training(job), batches, exporter)
    if job.is_chief:
        model = keras.models.load_model(f"{path}/model.keras")
        assert_same_weights(model, fitted(job))
        assert model.evaluate(batches(), verbose=0, return_dict=True).keys()


@case()
def a_file_of_weights(job):
    exporter = tfdist.FinalExporter("weights", format="weights")
    path = _exported(job, model_fn, for_training(job), batches, exporter)
    if job.is_chief:
        model = seeded(model_fn)
        model.load_weights(f"{path}/model.weights.h5")
        assert_same_weights(model, fitted(job))


@case()
def a_keras_file_of_a_model_with_a_table(job):
    exporter = tfdist.LatestExporter("latest", format="keras")
    data = ids_and_targets
    path = _exported(job, with_a_table, data, data, exporter)
    if job.is_chief:
        model = keras.models.load_model(f"{path}/model.keras")
        wanted = fitted(job, with_a_table, data).predict(
            data().take(1), verbose=0
        )
        found = model.predict(data().take(1), verbose=0)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@case()
def weights_of_a_table_load_with_other_shards(job):
    estimator = trained(job, with_a_table, ids_and_targets)
    if job.is_chief:
        path = f"{job.model_dir}/table.weights.h5"
        model = estimator.restored_model()
        model.save_weights(path)
        other = with_a_table(num_shards=2)
        other.load_weights(path)
        data = ids_and_targets().take(1)
        np.testing.assert_array_equal(
            other.predict(data, verbose=0), model.predict(data, verbose=0)
        )


@case()
def a_model_of_ones_own_between_two_runs(job):
    """What Keras has traced for it goes on with its variables."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4]), -1
    )
    look_up, model = tf.function(table.lookup), seeded(model_fn)
    for steps in (2, 4):
        trained(job, steps=steps)
        if job.is_chief:
            model.fit(for_training(job)(), steps_per_epoch=2, verbose=0)
            assert look_up(tf.constant([2, 5])).numpy().tolist() == [4, -1]
            assert int(model.optimizer.iterations) == steps


@case()
def training_goes_on_to_max_steps(job):
    """A second call trains the rest; a third has nothing to do."""
    for _ in range(2):
        trained(job, steps=2)
    trained(job, steps=5)
    assert job.estimator(model_fn).latest_checkpoint().endswith("-5")


@case()
def a_job_of_the_chief_alone_after_one_of_the_cluster(job):
    """Its variables are in its process."""
    trained(job)
    if job.is_chief:
        with tempfile.TemporaryDirectory() as model_dir:
            alone = Job("one process", model_dir)
            alone.trains_as_fit(model_fn, cluster=tfdist.Cluster())


@case()
def training_goes_on_with_other_shards(job):
    trained(job, with_a_table, ids_and_targets, steps=2)

    def other():
        return with_a_table(num_shards=2)

    estimator = trained(job, other, ids_and_targets, steps=4)
    if job.is_chief:
        assert int(estimator.restored_model().optimizer.iterations) == 4


@case()
def training_by_steps_adds_to_the_checkpoint(job):
    for _ in range(2):
        job.estimator(model_fn).train(for_training(job), steps=3)
    assert job.estimator(model_fn).latest_checkpoint().endswith("-6")


@case()
def finite_data_end_the_training(job):
    """On parameter servers each of the two workers reads all of it."""
    estimator = trained(job, data=batches, steps=None)
    steps = 8 if job.strategy == "ps" else 4
    assert estimator.latest_checkpoint().endswith(f"-{steps}")


@case(refused="has no batch")
def no_data_at_all(job):
    trained(job, data=lambda: batches().take(0))


@case()
def train_and_evaluate_with_finite_data(job):
    metrics, _ = tfdist.train_and_evaluate(
        job.estimator(model_fn),
        tfdist.TrainSpec(lambda: batches().repeat(2)),
        tfdist.EvalSpec(batches, steps=None),
    )
    if job.is_chief:
        assert metrics["global_step"] == (16 if job.strategy == "ps" else 8)
        assert metrics.keys() == {"loss", "mae", "auc", "global_step"}


@case()
def a_warm_start_takes_the_weights_alone(job):
    path = f"{job.model_dir}/first"
    first = job.estimator(model_fn)
    first = tfdist.Estimator(model_fn, first.config.replace(model_dir=path))
    first.train(for_training(job), max_steps=2)
    config = first.config.replace(model_dir=f"{job.model_dir}/second")
    second = tfdist.Estimator(model_fn, config, warm_start_from=path)
    second.train(for_training(job), max_steps=1)
    if job.is_chief:
        assert int(second.restored_model().optimizer.iterations) == 1


@case(refused={"ps": "made outside of it"})
def dataset_made_outside_of_the_input_function(job):
    job_data = batches().repeat()
    trained(job, data=lambda: job_data)

"""Layers frozen before a run or between two runs; resumed runs."""

import keras
import numpy as np

import tfdist
from tests.cases import (
    EachStep,
    assert_weights_are_those_of,
    case,
    compiled,
    seeded,
)
from tests.cases.optimizers import (
    ROWS,
    K,
    assert_state_is_that_of,
    batches,
    fit,
    table_examples,
    table_model,
    train,
    trains_as_fit,
)


def adam():
    return K.Adam(0.01)


def _add_frozen(layer):
    @case(f"frozen {layer}")
    def run(job):
        trains_as_fit(job, lambda: table_model(adam(), layer), table_examples())


for name in ("table", "hidden", "bn"):
    _add_frozen(name)


def two_tables(optimizer):
    """Of one width, and the first one is frozen."""
    x = keras.Input([4], name="x")
    ids = keras.Input([1], dtype="int64", name="ids")
    base, tuned = (
        tfdist.PartitionedEmbedding(ROWS, 3, num_shards=2, name=name)
        for name in ("base", "tuned")
    )
    base.trainable = False
    rows = [keras.layers.Flatten()(table(ids)) for table in (base, tuned)]
    output = keras.layers.Dense(1, "sigmoid", name="out")
    hidden = keras.layers.Concatenate()([x, *rows])
    model = keras.Model({"x": x, "ids": ids}, output(hidden))
    model.compile(optimizer, "binary_crossentropy")
    return model


def _add_beside(name, make):
    @case(f"a frozen table beside another, {name}")
    def run(job):
        trains_as_fit(job, lambda: two_tables(make()), table_examples())


_add_beside("clipped", lambda: K.SGD(1.0, global_clipnorm=0.1))
_add_beside(
    "keras.optimizers.MultiOptimizer",
    lambda: K.MultiOptimizer(
        K.OptimizerMap(K.Adam(0.01), {"(base|tuned)/.*": K.Adagrad(0.1)})
    ),
)


def tunes_as_keras(job, first, then):
    """Trains with some layers, compiles again and trains with others."""
    data = table_examples()
    train(job, lambda: table_model(adam(), first), data, 3)
    tuned = train(job, lambda: table_model(K.Adam(0.001), then), data, 6)
    if job.is_chief:
        model = fit(seeded(lambda: table_model(adam(), first)), data, 3)
        for layer in model.layers:
            layer.trainable = layer.name != then
        model.compile(K.Adam(0.001, name="adam"), "binary_crossentropy")
        assert_state_is_that_of(tuned, fit(model, data, 3))


@case()
def frozen_between_runs(job):
    tunes_as_keras(job, None, "hidden")


@case()
def unfrozen_between_runs(job):
    tunes_as_keras(job, "hidden", None)


@case()
def table_unfrozen_between_runs(job):
    tunes_as_keras(job, "table", None)


def _add_in_two_runs(name, make, steps):
    """As `fit`, called twice."""

    @case(f"{name} in two runs")
    def run(job):
        data = table_examples()
        train(job, lambda: table_model(make()), data, steps[0])
        second = train(job, lambda: table_model(make()), data, sum(steps))
        if job.is_chief:
            model = seeded(lambda: table_model(make()))
            for number in steps:
                fit(model, data, number)
            assert_state_is_that_of(second, model)


_add_in_two_runs("Adam", adam, (3, 3))
_add_in_two_runs("use_ema", lambda: K.SGD(0.1, use_ema=True), (3, 3))
_add_in_two_runs(
    "accumulation",
    lambda: K.Adam(0.01, gradient_accumulation_steps=4),
    (2, 4),
)
_add_in_two_runs(
    "a loss scale",
    lambda: K.LossScaleOptimizer(K.Adam(0.01), 2.0**12, 2),
    (3, 3),
)


@case()
def warm_start_of_a_frozen_base(job):
    """All weights of the base are taken, also those that are not trained."""
    data = table_examples()
    first = train(job, lambda: table_model(adam()), data, 3)
    config = tfdist.RunConfig(
        f"{job.model_dir}-tuned",
        strategy="mirrored" if job.strategy == "mirrored" else "auto",
        save_checkpoints_steps=100,
    )
    tuned = tfdist.Estimator(
        lambda: seeded(lambda: table_model(K.SGD(0.0, use_ema=True), "hidden")),
        config,
        warm_start_from=job.model_dir,
    )

    tuned.train(lambda: batches(data), hooks=[EachStep()], max_steps=1)
    if job.is_chief:
        for part in ("table/embeddings", "hidden/kernel", "out/bias"):
            np.testing.assert_allclose(
                tuned.get_variable_value(part),
                first.get_variable_value(part),
                atol=1e-6,
                err_msg=part,
            )


@case()
def steps_after_a_warm_start(job):
    """Every process of a group begins with these weights."""
    second, model = after_a_warm_start(job, lambda: K.SGD(0.1), job.model_dir)
    if job.is_chief:
        assert_weights_are_those_of(second, model)


@case()
def steps_after_a_warm_start_with_slots(job):
    """And goes on with the optimizer's state, its schedule too."""
    settings = tfdist.WarmStartSettings(job.model_dir, [".*"])

    def decaying():
        return K.Adam(K.schedules.CosineDecay(0.05, 6))

    second, model = after_a_warm_start(job, decaying, settings)
    if job.is_chief:
        assert_state_is_that_of(second, model)


def after_a_warm_start(job, make_optimizer, warm_start_from):
    """An estimator after three steps and three, a model after six."""

    def model_fn():
        return table_model(make_optimizer())

    data = table_examples()
    first = train(job, model_fn, data, 3)
    config = first.config.replace(model_dir=f"{job.model_dir}-second")
    second = tfdist.Estimator(
        lambda: seeded(model_fn), config, warm_start_from=warm_start_from
    )
    second.train(lambda: batches(data), hooks=[EachStep()], max_steps=3)
    return second, fit(seeded(model_fn), data, 6)


@case()
def frozen_base_model(job):
    """As the guide to transfer learning: a model in a model, inference mode."""

    def model_fn():
        base = table_model(adam())
        base.trainable = False
        inputs = {
            k: keras.Input(v.shape[1:], dtype=v.dtype, name=k)
            for k, v in base.input.items()
        }
        hidden = base(inputs, training=False)
        model = keras.Model(inputs, keras.layers.Dense(1, name="head")(hidden))
        model.compile(K.Adam(0.1), "mse")
        return model

    trains_as_fit(job, model_fn, table_examples())


@case()
def weights_set_from_weights(job):
    """Also where a model is made without memory first: a plan, all-reduce."""

    def model_fn():
        model = compiled(
            *(keras.layers.Dense(n, "relu") for n in (600, 600, 1))
        )
        first, second, _ = model.layers
        first.set_weights([0.5 * weight for weight in first.get_weights()])
        second.kernel.assign(second.kernel * keras.ops.mean(first.kernel))
        return model

    config = {"placement": "planned"} if job.strategy == "ps" else {}
    job.trains_as_fit(model_fn, **config)

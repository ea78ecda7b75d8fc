"""Mixed precision, and loss scales for small gradients."""

import keras

import tfdist
from tests.cases import case, compiled, examples, seeded
from tests.cases.optimizers import K, table_examples, table_model, trains_as_fit

# float16 has 11 bits, bfloat16 has 8.
FLOAT16 = {"rtol": 2e-2, "atol": 5e-3}
BFLOAT16 = {"rtol": 5e-2, "atol": 2e-2}


def small_examples():
    """Of gradients that float16 holds, times a scale of 32,768."""
    x, y = table_examples()
    return x | {"x": x["x"] / 8}, y


def mixed(policy, make, **arguments):
    """A model function that makes its layers under a policy."""

    def model_fn():
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            return table_model(make(), **arguments)
        finally:
            keras.mixed_precision.set_dtype_policy("float32")

    return model_fn


def value(estimator, name):
    return estimator.get_variable_value(f"loss_scale_optimizer/{name}")


@case()
def mixed_float16(job):
    model_fn = mixed("mixed_float16", lambda: K.SGD(0.05))
    estimator = trains_as_fit(job, model_fn, small_examples(), **FLOAT16)
    if job.is_chief:
        assert value(estimator, "dynamic_scale") == 2.0**15
        assert value(estimator, "step_counter") == 5


@case()
def mixed_float16_with_use_ema(job):
    model_fn = mixed("mixed_float16", lambda: K.SGD(0.05, use_ema=True))
    trains_as_fit(job, model_fn, small_examples(), **FLOAT16)


@case("auto_scale_loss=False")
def auto_scale_loss(job):
    model_fn = mixed(
        "mixed_float16", lambda: K.SGD(0.05), auto_scale_loss=False
    )
    trains_as_fit(job, model_fn, small_examples(), **FLOAT16)


@case()
def mixed_bfloat16(job):
    model_fn = mixed("mixed_bfloat16", lambda: K.SGD(0.05))
    trains_as_fit(job, model_fn, table_examples(), **BFLOAT16)


NOT_SENT = {"all-reduce": r"cannot send .* types: .*kernel \((bfloat16|int8)\)"}


@case(refused=NOT_SENT)
def weights_of_bfloat16(job):
    def model_fn():
        return compiled(keras.layers.Dense(1, dtype="bfloat16"))

    job.trains_as_fit(model_fn, **BFLOAT16)


@case(refused=NOT_SENT)
def weights_of_int8(job):
    def model_fn():
        model = compiled(keras.layers.Dense(4), keras.layers.Dense(1))
        model.layers[0].quantize("int8")
        return model

    job.trains_as_fit(model_fn)


def scaled(make, scale, growth=2000):
    def model_fn():
        optimizer = K.LossScaleOptimizer(
            make(), initial_scale=scale, dynamic_growth_steps=growth
        )
        # So large a loss that gradients overflow at first.
        return table_model(optimizer, loss_weights=[32.0])

    return model_fn


@case()
def gradients_that_overflow_skip_updates(job):
    model_fn = scaled(lambda: K.Adam(0.01), 2.0**127)
    estimator = trains_as_fit(job, model_fn, table_examples(), steps=8)
    if job.is_chief:
        steps = int(estimator.get_variable_value("global_step"))
        updates = int(estimator.get_variable_value("adam/iteration"))
        assert (steps, 0 < updates < 8) == (8, True), updates


@case()
def a_frozen_table_whose_gradient_is_not_finite(job):
    """Whether a step updates is for the gradients of what is trained."""

    def model_fn():
        x = keras.Input([4], name="x")
        ids = keras.Input([1], dtype="int64", name="ids")
        table = tfdist.PartitionedEmbedding(
            12, 3, 2, embeddings_initializer="zeros", trainable=False
        )
        roots = keras.ops.sqrt(keras.layers.Flatten()(table(ids)))
        both = keras.layers.Concatenate()([x, roots])
        outputs = keras.layers.Dense(1)(both)
        model = keras.Model({"x": x, "ids": ids}, outputs)
        model.compile(K.LossScaleOptimizer(K.SGD(0.1)), "mse")
        return model

    estimator = trains_as_fit(job, model_fn, table_examples())
    if job.is_chief:
        assert estimator.get_variable_value("sgd/iteration") == 5


@case()
def a_scale_that_grows(job):
    model_fn = scaled(lambda: K.SGD(0.1, momentum=0.9), 8.0, growth=2)
    estimator = trains_as_fit(job, model_fn, table_examples())
    if job.is_chief:
        assert value(estimator, "dynamic_scale") == 32.0


@case()
def a_scaled_Nadam_that_overflows(job):
    model_fn = scaled(lambda: K.Nadam(0.01), 2.0**127)
    trains_as_fit(job, model_fn, table_examples(), steps=6)


@case()
def a_scaled_MultiOptimizer(job):
    def parts():
        return K.MultiOptimizer(
            K.OptimizerMap(K.Adam(0.01), {"table/.*": K.Adagrad(0.1)})
        )

    trains_as_fit(job, scaled(parts, 2.0**127), table_examples())


@case(refused={"ps": "'sgd' accumulates gradients.*scaled.*bfloat16"})
def scaled_and_accumulated(job):
    model_fn = scaled(
        lambda: K.SGD(0.1, gradient_accumulation_steps=2), 2.0**127
    )
    trains_as_fit(job, model_fn, table_examples(), steps=8)


@case("mixed_float16 is scaled by default")
def by_default(job):
    if job.is_chief:
        model = seeded(mixed("mixed_float16", lambda: K.SGD(0.05)))
        assert isinstance(model.optimizer, K.LossScaleOptimizer)


@case()
def float16_whose_sums_over_examples_it_cannot_hold(job):
    """Gradients are 8,000, of 12 examples."""

    def model_fn():
        layer = keras.layers.Dense(1, use_bias=False, dtype="float16")
        return compiled(layer, optimizer=K.SGD(1e-5))

    x, y = examples()
    data = x * 0 + 1, y * 0 - 4000
    job.trains_as_fit(model_fn, data, **FLOAT16)

"""All optimizers of Keras and their options, on a model with a table.

Everything in a checkpoint is compared: weights, slots, averages, accumulated
gradients, counters and scales.
"""

import functools

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.cases import EachStep, case, examples, seeded
from tfdist.checkpoint.checkpoints import named_variables

K = keras.optimizers
ROWS = 12  # Each batch has each once, so no rule leaves one alone.


def table_examples(size=ROWS):
    x, y = examples(size)
    ids = np.random.default_rng(1).permutation(ROWS)[:size, None]
    return {"x": x, "ids": ids}, y


def table_model(optimizer, frozen=None, num_shards=2, **arguments):
    """A table in shards, a normalization, two dense layers."""
    x = keras.Input([4], name="x")
    ids = keras.Input([1], dtype="int64", name="ids")
    table = tfdist.PartitionedEmbedding(
        ROWS, 3, num_shards=num_shards, name="table"
    )
    hidden = keras.layers.Concatenate()([x, keras.layers.Flatten()(table(ids))])
    hidden = keras.layers.Dense(
        5, "tanh", kernel_constraint="max_norm", name="hidden"
    )(hidden)
    hidden = keras.layers.BatchNormalization(synchronized=True, name="bn")(
        hidden
    )
    output = keras.layers.Dense(1, "sigmoid", dtype="float32", name="out")
    model = keras.Model({"x": x, "ids": ids}, output(hidden))
    if frozen:
        model.get_layer(frozen).trainable = False
    model.compile(optimizer, "binary_crossentropy", **arguments)
    return model


def dense_model(optimizer):
    layers = [keras.layers.Dense(5, "tanh"), keras.layers.Dense(1, name="out")]
    model = keras.Sequential([keras.Input([4]), *layers])
    model.compile(optimizer, "mse")
    return model


def train(job, model_fn, data, steps, **config):
    """Trains up to a step, one after the other."""

    estimator = job.estimator(model_fn, **config)
    return estimator.train(
        lambda: batches(data), hooks=[EachStep()], max_steps=steps
    )


def batches(data):
    """The same batch for ever, of a size that is not static."""
    return tf.data.Dataset.from_tensor_slices(data).batch(ROWS).repeat()


def fit(model, data, steps):
    model.fit(batches(data), steps_per_epoch=steps, verbose=0)
    return model


def assert_state_is_that_of(estimator, model, rtol=1e-4, atol=2e-5):
    """Compares the newest checkpoint with a model and its optimizer."""
    wanted = named_variables(model)
    names = set(estimator.get_variable_names()) - {"global_step"}
    assert wanted.keys() == names, wanted.keys() ^ names
    for name, variable in wanted.items():
        found = estimator.get_variable_value(name)
        np.testing.assert_allclose(
            found, variable.numpy(), rtol=rtol, atol=atol, err_msg=name
        )


def trains_as_fit(
    job, model_fn, data, steps=5, placement="round_robin", **tolerance
):
    estimator = train(job, model_fn, data, steps, placement=placement)
    if job.is_chief:
        model = fit(seeded(model_fn), data, steps)
        assert_state_is_that_of(estimator, model, **tolerance)
    return estimator


def schedule(rate):
    return K.schedules.ExponentialDecay(rate, 2, 0.5)


def sparing(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "SGD": lambda: K.SGD(0.1),
    "SGD nesterov": lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    "SGD schedule": lambda: K.SGD(schedule(0.1)),
    "SGD clipnorm": lambda: K.SGD(0.1, clipnorm=0.01),
    "SGD global_clipnorm": lambda: K.SGD(0.1, global_clipnorm=0.01),
    "SGD clipvalue": lambda: K.SGD(0.1, clipvalue=0.001),
    "a clipvalue that clips nothing": lambda: K.SGD(0.1, clipvalue=-1.0),
    "a clipnorm that clips nothing": lambda: K.SGD(0.1, clipnorm=-1.0),
    "RMSprop centered": lambda: K.RMSprop(0.01, centered=True, momentum=0.5),
    "Adam": lambda: K.Adam(0.01),
    "Adam amsgrad": lambda: K.Adam(0.01, amsgrad=True),
    "AdamW": lambda: sparing(K.AdamW(0.01, weight_decay=0.1)),
    "Adadelta": lambda: K.Adadelta(0.5),
    "Adagrad": lambda: K.Adagrad(0.1),
    "Adamax": lambda: K.Adamax(0.01),
    "Nadam": lambda: K.Nadam(0.01),
    "Ftrl": lambda: K.Ftrl(0.1, l1_regularization_strength=0.001),
    "Lion": lambda: K.Lion(0.001),
    "use_ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "use_ema of Adam with weight_decay": lambda: K.Adam(
        0.01, use_ema=True, ema_momentum=0.5, weight_decay=0.1
    ),
    "ema_overwrite_frequency": lambda: K.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "accumulation": lambda: K.SGD(0.1, gradient_accumulation_steps=2),
    "accumulation clipnorm": lambda: K.SGD(
        0.1, gradient_accumulation_steps=2, clipnorm=0.01
    ),
    "accumulation global_clipnorm": lambda: K.Adagrad(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.01
    ),
    "accumulation clipvalue": lambda: K.SGD(
        0.1, gradient_accumulation_steps=2, clipvalue=0.001
    ),
    "accumulation Adam schedule": lambda: K.Adam(
        schedule(0.01), gradient_accumulation_steps=2
    ),
    "accumulation Nadam": lambda: K.Nadam(0.01, gradient_accumulation_steps=2),
    "accumulation weight_decay": lambda: K.AdamW(
        0.01, gradient_accumulation_steps=2, weight_decay=0.1
    ),
    "accumulation use_ema": lambda: K.SGD(
        0.1,
        gradient_accumulation_steps=2,
        use_ema=True,
        ema_momentum=0.5,
        ema_overwrite_frequency=2,
    ),
    "tfdist.MultiOptimizer": lambda: tfdist.MultiOptimizer(
        [
            ("table", K.Adagrad(0.1, use_ema=True, ema_momentum=0.5)),
            ("", K.Adam(0.01, gradient_accumulation_steps=2)),
        ]
    ),
    "keras.optimizers.MultiOptimizer": lambda: K.MultiOptimizer(
        K.OptimizerMap(
            K.Adam(0.01, gradient_accumulation_steps=2),
            {"table.*": K.Adagrad(0.1, use_ema=True, ema_momentum=0.5)},
        ),
    ),
}
# `fit` cannot divide the gradient of a table.
SCALED = {
    "loss_scale_factor": lambda: K.SGD(0.1, loss_scale_factor=8.0),
    "accumulation loss_scale_factor": lambda: K.SGD(
        0.1, gradient_accumulation_steps=3, loss_scale_factor=8.0
    ),
    "keras.optimizers.MultiOptimizer loss_scale_factor": lambda: (
        K.MultiOptimizer(
            K.OptimizerMap(K.Adam(0.01), {".*bias": K.SGD(0.1)}), 4.0
        )
    ),
}
# They look at a variable as a whole.
OF_WHOLE_VARIABLES = {
    "Lamb": lambda: K.Lamb(0.01, use_ema=True, ema_momentum=0.5),
    "Adafactor": lambda: K.Adafactor(0.01, gradient_accumulation_steps=2),
    "Muon": lambda: K.Muon(0.01, exclude_layers=["out"], weight_decay=0.1),
}


class SignedMomentum(K.Optimizer):
    """A user's own rule, with a slot."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.momenta = [
                self.add_variable_from_reference(v, "momentum")
                for v in variables
            ]

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momenta[self._get_variable_index(variable)]
        rate = keras.ops.cast(learning_rate, variable.dtype)
        self.assign(momentum, 0.9 * momentum + 0.1 * gradient)
        self.assign_sub(variable, rate * keras.ops.sign(momentum))


class Centralized(K.SGD):
    """Does something with all gradients before it applies them."""

    def apply(self, grads, trainable_variables=None):
        means = [keras.ops.mean(g) for g in grads]
        grads = [g - mean for g, mean in zip(grads, means, strict=True)]
        super().apply(grads, trainable_variables)


class Warmup(K.schedules.LearningRateSchedule):
    """A user's own schedule, as in TensorFlow's guide to the Transformer."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32) + 1
        return tf.math.minimum(tf.math.rsqrt(step), step * self.steps**-1.5)


@case("an own schedule, placed by bytes")
def own_schedule(job):
    def model_fn():
        return table_model(K.Adam(Warmup(3.0), weight_decay=0.1))

    trains_as_fit(job, model_fn, table_examples(), placement="greedy")


@case("an own update_step")
def own_update_step(job):
    optimizer = functools.partial(SignedMomentum, 0.01, weight_decay=0.1)
    trains_as_fit(job, lambda: dense_model(optimizer()), examples())


@case("apply, overridden", refused="overrides `apply`")
def own_apply(job):
    train(job, lambda: dense_model(Centralized(0.01)), examples(), 1)


def _add(name, make):
    # Keras knows the shards as variables of a norm each.
    shards = 1 if "clipnorm" in name.split() else 2
    refused = "accumulation" in name and "clipnorm" in name

    @case(name, refused={"ps": "clips accumulated"} if refused else None)
    def of_a_table(job):
        trains_as_fit(
            job,
            lambda: table_model(make(), num_shards=shards),
            table_examples(),
        )


def _add_dense(name, make):
    @case(name)
    def without_a_table(job):
        trains_as_fit(job, lambda: dense_model(make()), examples())


def _add_refused(name, make):
    @case(f"{name} of a table", refused="cannot update some rows.*MultiOptim")
    def of_a_table(job):
        train(job, lambda: table_model(make()), table_examples(), 1)


for title, optimizer in OPTIMIZERS.items():
    _add(title, optimizer)
_add(
    "accumulation of what clips nothing",
    lambda: K.SGD(0.1, gradient_accumulation_steps=2, clipnorm=-1.0),
)
for title, optimizer in (SCALED | OF_WHOLE_VARIABLES).items():
    _add_dense(title, optimizer)
for title, optimizer in OF_WHOLE_VARIABLES.items():
    _add_refused(title, optimizer)


@case()
def ScheduleFreeAdamW(job):
    """Not as `fit`, which replaces the weights in its first step."""
    x, y = examples()

    def model_fn():
        layer = keras.layers.Dense(1, use_bias=False, name="out")
        model = keras.Sequential([keras.Input([4]), layer])
        model.compile(K.ScheduleFreeAdamW(0.1, warmup_steps=2), "mse")
        return model

    estimator = train(job, model_fn, (x, y), 5)
    if job.is_chief:
        mean = z = np.array(seeded(model_fn).weights[0])
        weight, square = mean, 0.0
        for step in range(1, 6):
            gradient = 2 * x.T @ (x @ weight - y) / len(x)
            square = 0.999 * square + 0.001 * gradient**2
            root = np.sqrt(square / (1 - 0.999**step)) + 1e-8
            z = z - 0.1 * min(step / 2, 1) * gradient / root
            mean = mean + (z - mean) / step
            weight = 0.1 * z + 0.9 * mean
        (name,) = [
            n for n in estimator.get_variable_names() if n.endswith("kernel")
        ]
        np.testing.assert_allclose(
            estimator.get_variable_value(name), weight, rtol=1e-4, atol=1e-5
        )


@case("ScheduleFreeAdamW of a table")
def schedule_free_table(job):
    estimator = train(
        job,
        lambda: table_model(K.ScheduleFreeAdamW(0.05)),
        table_examples(),
        8,
    )
    if job.is_chief:
        saved = estimator.get_variable_value
        start = seeded(lambda: table_model("sgd")).get_layer("table")
        [rows] = start.get_weights()
        moved = np.abs(saved("table/embeddings") - rows)
        # Eight steps of about the learning rate, from where it was.
        assert 0.01 < moved.max() < 0.5, moved

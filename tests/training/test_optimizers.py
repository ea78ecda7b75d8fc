import functools
import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from pace import slow_but

from tfdist import MultiOptimizer, PartitionedEmbedding
from tfdist._tf.private_keras import (
    nadam_product,
    reset_object_names,
)
from tfdist.checkpoint.checkpoints import named_variables
from tfdist.training import optimizer_checks, optimizers
from tfdist.training.loop import LocalLoop
from tfdist.training.slots import named_slots
from tfdist.training.step import ModelStep

pytestmark = pytest.mark.filterwarnings("ignore:When providing `inputs`")

K = keras.optimizers

# Over 50 steps of float32 rounding, on values of size about one. It depends on
# the CPU (4e-5 was seen with two Adams; the same in float64 is 2e-8 apart).
TOLERANCE = 1e-4

STEPS, BATCH = 50, 16


def schedule(rate):
    return K.schedules.ExponentialDecay(rate, 10, 0.9)


def sparing(optimizer, names):
    optimizer.exclude_from_weight_decay(var_names=names)
    return optimizer


def wide_and_deep(optimizer=None):
    return MultiOptimizer(
        [
            ("^wide/", K.Ftrl(0.1, l1_regularization_strength=0.001)),
            ("", optimizer or K.Adagrad(0.1)),
        ]
    )


class Assigning(K.Optimizer):
    """Like Adagrad, by `variable.assign` instead of `self.assign`."""

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self._squares = [
                self.add_variable_from_reference(variable, "squares")
                for variable in variables
            ]

    def update_step(self, gradient, variable, learning_rate):
        squares = self._squares[self._get_variable_index(variable)]
        squares.assign(squares + keras.ops.square(gradient))
        rate = keras.ops.cast(learning_rate, variable.dtype)
        variable.assign_sub(rate * gradient / (1.0 + keras.ops.sqrt(squares)))


# Their rule leaves a row without a gradient alone, as Keras' dense one does
# (Ftrl's if the table starts at zeros).
STILL = {
    "adagrad": lambda: K.Adagrad(0.1),
    "adagrad epsilon": lambda: K.Adagrad(0.1, epsilon=0.1),
    "ftrl": lambda: K.Ftrl(
        0.1, l1_regularization_strength=0.001, l2_regularization_strength=0.01
    ),
    "clipnorm": lambda: K.SGD(0.1, clipnorm=0.05),
    "multi global_clipnorm": lambda: wide_and_deep(
        K.SGD(0.1, global_clipnorm=0.05)
    ),
    "sgd schedule": lambda: K.SGD(schedule(0.1)),
    "sgd": lambda: K.SGD(0.1),
    "adagrad from zero": lambda: K.Adagrad(0.1, initial_accumulator_value=0.0),
    "adagrad schedule": lambda: K.Adagrad(schedule(0.1)),
    "ftrl beta": lambda: K.Ftrl(0.1, beta=0.1),
    "ftrl power": lambda: K.Ftrl(0.05, learning_rate_power=-0.3),
    "global_clipnorm": lambda: K.Adagrad(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: K.SGD(0.1, clipvalue=0.001),
    "loss_scale_factor": lambda: K.Adagrad(0.1, loss_scale_factor=8.0),
    "scaled clipnorm": lambda: K.SGD(0.1, loss_scale_factor=8.0, clipnorm=0.05),
    "multi": wide_and_deep,
}
# Their rule moves every row in every step.
MOVING = {
    "adam ema": lambda: K.Adam(0.01, use_ema=True, ema_momentum=0.9),
    "adamw": lambda: K.AdamW(0.01, weight_decay=0.1),
    "nadam": lambda: K.Nadam(0.01),
    "adam": lambda: K.Adam(0.01),
    "momentum": lambda: K.SGD(0.05, momentum=0.9),
    "nesterov": lambda: K.SGD(0.05, momentum=0.9, nesterov=True),
    "adam schedule": lambda: K.Adam(schedule(0.01)),
    "adam clipnorm": lambda: K.Adam(0.01, clipnorm=0.05),
    "amsgrad": lambda: K.Adam(0.01, amsgrad=True),
    "rmsprop": lambda: K.RMSprop(0.01, momentum=0.5),
    "centered": lambda: K.RMSprop(0.01, centered=True),
    "adadelta": lambda: K.Adadelta(0.5),
    "adamax": lambda: K.Adamax(0.01),
    "lion": lambda: K.Lion(0.001),
    "weight_decay": lambda: K.SGD(schedule(0.1), weight_decay=0.1),
    "spared": lambda: sparing(K.Adagrad(0.1, weight_decay=0.1), ["bias"]),
    "spared tables": lambda: sparing(
        K.Adagrad(0.1, weight_decay=0.1), ["embeddings"]
    ),
    "ema": lambda: K.SGD(0.1, use_ema=True, ema_momentum=0.9),
    "adagrad ema": lambda: K.Adagrad(0.1, use_ema=True),
    "ftrl ema": lambda: K.Ftrl(0.1, use_ema=True),
    "ftrl shrinkage": lambda: K.Ftrl(
        0.1, l2_shrinkage_regularization_strength=0.01
    ),
    "ftrl schedule": lambda: K.Ftrl(schedule(0.1)),
    "multi adam": lambda: wide_and_deep(K.Adam(0.01)),
    "same name": lambda: MultiOptimizer(
        [("wide", K.Adam(0.01, name="a")), ("", K.Adam(0.001, name="a"))]
    ),
}
# Not for tables.
WHOLE = {
    "lamb": lambda: K.Lamb(0.01),
    "adafactor": lambda: K.Adafactor(0.01),
}
if "adam_weight_decay" in inspect.signature(K.Muon).parameters:
    # That of Keras 3.12 fails in Keras' own `fit`.
    WHOLE["muon decay"] = lambda: K.Muon(
        0.01, exclude_layers=["out"], weight_decay=0.1, adam_weight_decay=None
    )


class DenseEmbedding(keras.layers.Layer):
    """A table whose gradient is dense, under the names of ours."""

    def __init__(self, rows, dim, name):
        super().__init__(name=name)
        self.rows, self.dim = rows, dim

    def build(self, shape):
        self.embeddings = self.add_weight(
            shape=(self.rows, self.dim), name="embeddings"
        )

    def call(self, ids):
        return keras.ops.matmul(
            keras.ops.one_hot(ids, self.rows), self.embeddings
        )


def table_model(make_optimizer, ours):
    """Two tables, one in three shards; moving statistics; a dense part."""
    reset_object_names()
    keras.utils.set_random_seed(1)
    if ours:
        deep = PartitionedEmbedding(
            20, 4, num_shards=3, partition_strategy="div", name="deep"
        )
        wide = PartitionedEmbedding(8, 4, name="wide")
    else:
        deep = DenseEmbedding(20, 4, name="deep")
        wide = DenseEmbedding(8, 4, name="wide")
    inputs = {  # The keys are those of the data.
        "deep": keras.Input([5], dtype="int32"),
        "wide": keras.Input([2], dtype="int32"),
        "dense": keras.Input([3]),
    }
    hidden = [
        keras.layers.Flatten()(deep(inputs["deep"])),
        keras.layers.Flatten()(wide(inputs["wide"])),
        inputs["dense"],
    ]
    return finished(inputs, keras.layers.Concatenate()(hidden), make_optimizer)


def dense_model(make_optimizer, ours):
    reset_object_names()
    keras.utils.set_random_seed(1)
    inputs = keras.Input([3])
    return finished(inputs, inputs, make_optimizer)


def finished(inputs, hidden, make_optimizer):
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dense(6, "tanh", kernel_regularizer="l2")(hidden)
    output = keras.layers.Dense(1, "sigmoid", name="out")(hidden)
    model = keras.Model(inputs, output)
    # Made here, its name too is the first of its kind.
    model.compile(make_optimizer(), "binary_crossentropy")
    return model


def ids(rng, rows, length, every):
    """Ids with duplicates in each batch, of every row or of some."""
    batches = []
    for _ in range(STEPS):
        some = np.arange(rows) if every else rng.integers(0, rows, 4)
        batch = rng.choice(some, BATCH * length)
        batch[: len(some)] = some
        batches.append(rng.permutation(batch).reshape(BATCH, length))
    return np.concatenate(batches).astype("int32")


@functools.cache
def examples(every):
    rng = np.random.default_rng(0)
    x = {
        "deep": ids(rng, 20, 5, every),
        "wide": ids(rng, 8, 2, every),
        "dense": rng.normal(size=(STEPS * BATCH, 3)).astype("float32"),
    }
    y = rng.integers(0, 2, (STEPS * BATCH, 1)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def values(model):
    """Every value that a checkpoint would hold, tables and slots whole."""
    return {name: v.numpy() for name, v in named_variables(model).items()}


def trained_by_keras(model, dataset, start):
    assign(model, start)
    # Else `fit` ends by replacing the weights with their moving averages.
    model.optimizer.finalize_variable_values = lambda variables: None
    model.fit(dataset, verbose=0, shuffle=False)
    return values(model)


def trained_by_us(model, dataset, start):
    assign(model, start)
    optimizers.build(model.optimizer, model.trainable_variables)
    global_step = tf.Variable(0, dtype=tf.int64)
    step = ModelStep(model, dataset.element_spec, global_step=global_step)
    LocalLoop(step, global_step, dataset).run(STEPS)
    assert int(model.optimizer.iterations.numpy()) == STEPS
    return values(model)


def assign(model, start):
    """Gives variables the values of `start`, by name."""
    for name, variable in named_variables(model, optimizer=False).items():
        first = 0
        for part in getattr(variable, "variables", [variable]):
            rows = slice(first, first + part.shape[0])
            part.assign(start[name][rows])
            first += part.shape[0]


def assert_trains_as_keras(make, model_fn, dataset, zeros=()):
    reset_object_names()
    theirs = model_fn(make, ours=False)
    start = random_weights(theirs, zeros)
    expected = trained_by_keras(theirs, dataset, start)
    reset_object_names()
    got = trained_by_us(model_fn(make, ours=True), dataset, start)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            got[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
        )


def random_weights(model, zeros):
    rng = np.random.default_rng(5)
    return {
        name: np.abs(rng.normal(size=v.shape)) * 0.5 * (name not in zeros)
        for name, v in named_variables(model, optimizer=False).items()
    }


# --- Equality with Keras -----------------------------------------------------


EVERY_RULE = STILL | MOVING


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_RULE)
def test_every_row_touched(name):
    assert_trains_as_keras(EVERY_RULE[name], table_model, examples(every=True))


@pytest.mark.parametrize("name", slow_but(["adagrad"], STILL))
def test_untouched_rows_stay(name):
    zeros = {"ftrl": ["deep", "wide"], "multi": ["wide"]}
    assert_trains_as_keras(
        STILL[name],
        table_model,
        examples(every=False),
        [f"{t}/embeddings" for t in zeros.get(name.split()[0], [])],
    )


def test_a_rule_that_assigns_by_itself():
    data = examples(every=False)
    assert_trains_as_keras(lambda: Assigning(0.1), table_model, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_dense_variables_alone(name):
    dataset = examples(every=True).map(lambda x, y: (x["dense"], y))
    assert_trains_as_keras(WHOLE[name], dense_model, dataset)


# --- Rows --------------------------------------------------------------------

ROWS, DIM = 6, 3


def row_updates(steps, seed=0):
    """`(ids, gradient)` of each step; some rows are never touched."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        ids = rng.choice(ROWS - 1, rng.integers(1, ROWS - 1), replace=False)
        yield ids, rng.normal(size=(len(ids), DIM)).astype("float32")


def updated_by_rows(optimizer, start, updates, dtype="float32"):
    """Ours: `update` of rows of one variable; returns it and its slots."""
    variable = keras.Variable(start, dtype=dtype, name="embeddings")
    optimizers.build(optimizer, [variable])

    @tf.function(reduce_retracing=True)
    def update(ids, gradient, iteration):
        rate = optimizers.learning_rate(optimizer, iteration, [])
        optimizers.begin_step(optimizer, iteration)
        optimizers.update(optimizer, variable, gradient, rate, iteration, ids)

    for step, (ids, gradient) in enumerate(updates):
        update(
            tf.constant(ids, tf.int64),
            tf.constant(gradient, variable.dtype),
            tf.constant(step, tf.int64),
        )
    slots = named_slots(optimizer, variable)
    return [v.numpy() for v in (variable, *slots.values())]


def updated_one_by_one(make, start, updates, dtype="float32"):
    """Keras' own `apply` on each row as a variable, when it is touched."""
    rows = []
    for row in start:
        variable = keras.Variable(row[None], dtype=dtype, name="embeddings")
        optimizer = make()
        optimizers.build(optimizer, [variable])
        rows.append((variable, optimizer))
    product = 1.0
    for step, (ids, gradient) in enumerate(updates):
        before = product
        product *= 0.9 * (1.0 - 0.5 * 0.96 ** (step + 1))
        for i, each in zip(ids, gradient, strict=True):
            variable, optimizer = rows[i]
            optimizer.iterations.assign(step)
            if isinstance(optimizer, K.Nadam):
                nadam_product(optimizer).assign(before)
            optimizer.apply([tf.constant(each[None], dtype)], [variable])
    columns = [
        [v.numpy() for v in (variable, *slots.values())]
        for variable, optimizer in rows
        for slots in [named_slots(optimizer, variable)]
    ]
    return [np.concatenate(column) for column in zip(*columns, strict=True)]


def single(name):
    return "multi" not in name and "clip" not in name and name != "same name"


@pytest.mark.parametrize("name", filter(single, EVERY_RULE))
def test_rule_runs_on_touched_rows_only(name):
    make = EVERY_RULE[name]
    start = np.random.default_rng(1).normal(size=(ROWS, DIM)) + 1.0
    # The scale is undone before, by `clip`.
    scale = make().loss_scale_factor or 1.0
    expected = updated_one_by_one(
        make, start, [(ids, scale * g) for ids, g in row_updates(8)]
    )
    got = updated_by_rows(make(), start, row_updates(8))
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[0][-1], start[-1].astype("float32"))


def test_adam_of_touched_rows_by_hand():
    start = np.random.default_rng(1).normal(size=(ROWS, DIM))
    w, m, v = start.copy(), np.zeros_like(start), np.zeros_like(start)
    updates = list(row_updates(20))
    for step, (rows, gradient) in enumerate(updates, start=1):
        m[rows] = 0.8 * m[rows] + 0.2 * gradient
        v[rows] = 0.95 * v[rows] + 0.05 * gradient**2
        rate = 0.01 * np.sqrt(1 - 0.95**step) / (1 - 0.8**step)
        w[rows] -= rate * m[rows] / (np.sqrt(v[rows]) + 1e-7)
    optimizer = K.Adam(0.01, beta_1=0.8, beta_2=0.95)
    got = updated_by_rows(optimizer, start, updates)
    for mine, expected in zip(got, (w, m, v), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)


DTYPES = {
    "sgd": lambda: K.SGD(0.1),
    "adagrad": lambda: K.Adagrad(0.1),
    "adam": lambda: K.Adam(0.01),
    "ftrl": lambda: K.Ftrl(0.1),
    "decay": lambda: K.RMSprop(0.01, weight_decay=0.1, use_ema=True),
}


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("name", DTYPES)
def test_other_dtypes(name, dtype):
    make = DTYPES[name]
    start = np.random.default_rng(1).normal(size=(ROWS, DIM)) + 1.0
    tolerance = {"float16": 5e-3, "float64": 1e-7}[dtype]
    expected = updated_one_by_one(make, start, row_updates(3), dtype)
    got = updated_by_rows(make(), start, row_updates(3), dtype)
    every = [(np.arange(ROWS), np.ones([ROWS, DIM]))]
    variable = keras.Variable(start, dtype=dtype, name="embeddings")
    optimizer = make()
    optimizers.build(optimizer, [variable])
    optimizers.update(
        optimizer,
        variable,
        tf.ones([ROWS, DIM], dtype),
        tf.constant(optimizer.learning_rate.numpy()),
        tf.constant(0, tf.int64),
    )
    slots = named_slots(optimizer, variable).values()
    got += [v.numpy() for v in (variable, *slots)]
    expected += updated_one_by_one(make, start, every, dtype)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def test_averages_start_at_the_variables():
    start = np.full([ROWS, DIM], 2.0)
    optimizer = K.SGD(0.0, use_ema=True, ema_momentum=0.9)
    _, average = updated_by_rows(optimizer, start, row_updates(3))
    np.testing.assert_allclose(average, start)


def test_averages_of_an_optimizer_built_beforehand():
    variable = keras.Variable(np.full([ROWS, DIM], 2.0))
    optimizer = K.SGD(use_ema=True)
    optimizer.build([variable])
    optimizers.build(optimizer, [variable])
    [average] = named_slots(optimizer, variable).values()
    np.testing.assert_allclose(average, variable)


def test_accumulated_rows_are_those_of_all_steps():
    """Their mean is clipped; two more steps do nothing to be seen."""
    start = np.zeros([ROWS, DIM])
    optimizer = K.SGD(1.0, gradient_accumulation_steps=3, clipvalue=0.2)
    variable = keras.Variable(start, dtype="float32")
    optimizers.build(optimizer, [variable])
    total = np.zeros([ROWS, DIM])
    for step, (ids, gradient) in enumerate(row_updates(5)):
        found = variable, tf.constant(gradient), tf.constant(ids, tf.int64)
        optimizers.apply(
            optimizer, [found], tf.constant(1.0), tf.constant(step, tf.int64)
        )
        if step < 3:
            total[ids] += gradient
        expected = -np.clip(total / 3, -0.2, 0.2) * (step >= 2)
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize(
    "make",
    [
        K.Adam,
        lambda: K.AdamW(weight_decay=0.1, use_ema=True),
        lambda: K.Nadam(gradient_accumulation_steps=2),
        lambda: K.SGD(0.1, momentum=0.9, nesterov=True),
    ],
    ids=["adam", "adamw", "nadam", "momentum"],
)
def test_long_updates_are_traced_once(make, shared):
    """Steps that share a trace do what each does with its own."""

    def trained(functions):
        optimizer = make()
        variables = [keras.Variable(tf.ones([ROWS, DIM])) for _ in range(16)]
        optimizers.build(optimizer, variables)
        rate = tf.constant(optimizer.learning_rate.numpy())
        row, whole = tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, DIM])

        @tf.function(input_signature=[[row] * 6, [whole] * 6])
        def steps(ids, gradients):
            for i, (rows, gradient) in enumerate(
                zip(ids, gradients, strict=True)
            ):
                every = tf.ones([ROWS, DIM]) / (i + 1)
                found = [(v, gradient, rows) for v in variables[:12]]
                found += [(v, every, None) for v in variables[12:]]
                number = tf.constant(i, tf.int64)
                optimizers.begin_step(optimizer, number, shared=shared)
                optimizers.apply(
                    optimizer, found, rate, number, shared, functions
                )

        graph = steps.get_concrete_function().graph.as_graph_def()
        steps(*map(list, zip(*row_updates(6), strict=True)))
        num_ops = sum(len(f.node_def) for f in graph.library.function)
        held = [named_slots(optimizer, v).values() for v in variables]
        values = [v.numpy() for v in itertools.chain(variables, *held)]
        return values, num_ops + len(graph.node)

    kept = {}
    expected, longer = trained(None)
    got, shorter = trained(kept)
    assert len(kept) == 1
    assert shorter < longer / 2
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert np.ptp(got[0]) > 0
    assert np.all(got[15] < 1)


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_rules_about_whole_variables_are_refused_for_tables(make):
    match = r"cannot update some rows of '.*embeddings.*MultiOptimizer"
    with pytest.raises(ValueError, match=match):
        updated_by_rows(make(), np.ones([ROWS, DIM]), row_updates(1))
    model = table_model(make, ours=True)
    optimizers.build(model.optimizer, model.trainable_variables)
    spec = examples(every=True).element_spec
    with pytest.raises(ValueError, match=match):
        ModelStep(model, spec, global_step=tf.Variable(0, dtype=tf.int64))


# --- What is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: K.LossScaleOptimizer(K.SGD(gradient_accumulation_steps=2)),
            "(?i)'sgd' accumulates.*LossScaleO.*loss_scale_factor",
        ),
        (
            lambda: K.LossScaleOptimizer(
                wide_and_deep(K.Adam(gradient_accumulation_steps=2))
            ),
            "'adam' accumulates",
        ),
    ],
)
def test_check(make, match):
    reset_object_names()
    with pytest.raises(ValueError, match=match):
        optimizer_checks.check(make())


def test_norms_of_accumulated_gradients():
    make = functools.partial(K.SGD, gradient_accumulation_steps=2)
    refused = pytest.raises(ValueError, match=r"clips accumulated .*clipvalue")
    with refused:
        optimizer_checks.check_norms(make(global_clipnorm=1.0), remote=True)
    optimizer_checks.check_norms(make(global_clipnorm=1.0), remote=False)
    for ignored in ("clipnorm", "global_clipnorm"):
        optimizer_checks.check_norms(make(**{ignored: -1.0}), remote=True)
    # A table in several shards.
    model = table_model(lambda: make(clipnorm=1.0), ours=True)
    optimizers.build(model.optimizer, model.trainable_variables)
    spec = examples(every=True).element_spec
    with refused:
        ModelStep(model, spec, global_step=tf.Variable(0, dtype=tf.int64))


@pytest.mark.parametrize("make", EVERY_RULE.values(), ids=EVERY_RULE)
def test_check_accepts(make):
    optimizer_checks.check(make())


# --- MultiOptimizer ----------------------------------------------------------


def variables(*names):
    """Variables with these paths, with different values."""
    made = []
    for i, name in enumerate(names):
        *scopes, name = name.split("/")
        with keras.name_scope("/".join(scopes)):
            made.append(keras.Variable(np.ones(2) * (i + 1), name=name))
    return made


def test_first_pattern_found_owns_a_variable():
    optimizer = MultiOptimizer(
        [("wide", K.Ftrl()), ("kernel$", K.Adam()), ("", K.SGD())]
    )
    paths = ["wide/kernel", "deep/kernel", "deep/bias", "deep/kernel_2"]
    made = variables(*paths)
    assert [v.path for v in made] == paths
    assert [optimizer.owner(v) for v in made] == [0, 1, 2, 2]
    assert [optimizers.owner(optimizer, v) for v in made] == [0, 1, 2, 2]
    assert optimizers.owner(K.SGD(), made[0]) == 0


def test_a_variable_that_no_pattern_matches():
    optimizer = MultiOptimizer([("wide", K.Ftrl())])
    with pytest.raises(ValueError, match=r"Set that of `parts\[i\]`"):
        optimizer.learning_rate = 0.1
    with pytest.raises(
        ValueError, match=r"matches variable 'deep/bias'.*empty"
    ):
        optimizer.build(variables("wide/kernel", "deep/bias"))


def test_no_pairs():
    with pytest.raises(ValueError, match=r"at least one.*Received: \[\]"):
        MultiOptimizer([])


def test_a_part_that_is_there_twice():
    shared = K.SGD()
    with pytest.raises(ValueError, match="an optimizer of its own"):
        MultiOptimizer([("wide", shared), ("", shared)])
    assert len(MultiOptimizer([("wide", "sgd"), ("", "sgd")]).parts) == 2


def test_a_pattern_that_is_none():
    with pytest.raises(ValueError, match=r"Pattern 'wide\(' of optimizer"):
        MultiOptimizer([("wide(", K.SGD())])


def test_a_part_that_would_scale_the_loss():
    """A loss is scaled for all variables; they would have been divided."""
    with pytest.raises(ValueError, match="'sgd' of a MultiOptimizer must have"):
        MultiOptimizer([("", K.SGD(name="sgd", loss_scale_factor=1024.0))])


def test_serialization():
    optimizer = MultiOptimizer(
        [("wide", K.Ftrl(schedule(0.2))), ("", K.Adam(0.01, amsgrad=True))],
        name="both",
    )
    config = keras.optimizers.serialize(optimizer)
    copy = keras.optimizers.deserialize(config)
    assert copy.get_config() == optimizer.get_config()
    assert copy.name == "both"
    assert [type(part) for part in copy.parts] == [K.Ftrl, K.Adam]
    assert copy.parts[1].amsgrad


def test_outside_tfdist_it_applies_each_part(tmp_path):
    def model_of(optimizer):
        reset_object_names()
        keras.utils.set_random_seed(1)
        wide = keras.layers.Dense(1, name="wide")
        inputs = keras.Input([3])
        deep = keras.layers.Dense(1, name="deep")(inputs)
        model = keras.Model(inputs, wide(inputs) + deep)
        model.compile(optimizer, "mse")
        return model

    x, y = np.ones([8, 3], "float32"), np.ones([8, 1], "float32")
    model = model_of(MultiOptimizer([("wide", K.SGD(0.1)), ("", K.Adam())]))
    model.fit(x, y, batch_size=4, verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 2
    expected = model_of("sgd")
    wide, deep = K.SGD(0.1), K.Adam()
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((expected(x[:4]) - y[:4]) ** 2)
        of = expected.trainable_variables
        pairs = list(zip(tape.gradient(loss, of), of, strict=True))
        wide.apply_gradients([p for p in pairs if "wide" in p[1].path])
        deep.apply_gradients([p for p in pairs if "deep" in p[1].path])
    for mine, theirs in zip(model.weights, expected.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert isinstance(loaded.optimizer, MultiOptimizer)
    for mine, theirs in zip(
        loaded.optimizer.variables, model.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_two_parts_of_one_kind_have_different_names():
    pairs = [("a", K.Adam(name="adam")), ("b", K.SGD(name="sgd"))]
    optimizer = MultiOptimizer([*pairs, ("", K.Adam(name="adam"))])
    assert optimizers.part_names(optimizer) == ["adam", "sgd", "adam_1"]
